"""Write users' questions from held-out conversations as prompts for --benchmarks.

stree ask data/python-docs/valid.jsonl \\
    --source python-docs/unittest --out data/unittest.jsonl

A later turn is asked after the model's own earlier answers.

stree ask data/python-docs/valid.jsonl \\
    --out data/long.jsonl --lengths 0 1024 2048 4096 \\
    --tokenizer checkpoints/python-docs-hybrid --limit 8 --turns 1

asks the same questions after other conversations, in prompts of these numbers of tokens:
data/long-0.jsonl, data/long-1024.jsonl and so on (docs/long-context.md).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from stree.chat_encoding import chat_encoder
from stree.checkpoints.tokenizer import fingerprint, load_tokenizer
from stree.common.errors import NotFound, UsageError, require_fitting
from stree.common.files import make_directory, sha256_of_file, write_atomically
from stree_pipelines.console.command_line import PlainParser, input_path, typed_command
from stree_pipelines.data.held_out_prompts import held_out_prompts, held_out_prompts_by_length
from stree_pipelines.evaluation.benchmarks import load_benchmark
from stree_pipelines.evaluation.context import describe_code


def main(arguments: Sequence[str] | None = None) -> None:
    parser = PlainParser("stree ask", description=__doc__)
    add = parser.add_argument
    add("conversations", help="ShareGPT file, JSONL or JSONL.gz, of rows that name their source")
    add("--out", required=True, help="JSONL file of prompts to write; of --lengths, OUT-LENGTH")
    add("--source", default="", help="take conversations whose source begins so (default: all)")
    add("--limit", type=int, default=80, help="number of conversations, from the first on")
    add("--turns", type=int, default=2, help="number of the user's turns, from the first on")
    add("--lengths", type=int, nargs="+", default=[],
        help="in tokens, of prompts that ask the same after other conversations")
    add("--tokenizer", help="target folder or other whose tokens --lengths are in")
    options = parser.parse_args(arguments)
    wanted = {name: (getattr(options, name) >= 1, "at least 1") for name in ("limit", "turns")}
    require_fitting(options, wanted, "--")
    lengths = sorted(set(options.lengths))
    if lengths and lengths[0] < 0:
        raise UsageError(f"--lengths has {lengths[0]}, wanted 0 or more tokens")
    if bool(lengths) != bool(options.tokenizer):
        raise UsageError("--lengths are in tokens of --tokenizer: give both, or neither")
    file, out = Path(input_path(options.conversations)), Path(options.out)
    if not file.is_file():
        raise NotFound(f"no file {file}: name a ShareGPT file, JSONL or JSONL.gz")
    chosen = file, options.source, options.limit, options.turns
    written = {out: ""}
    if lengths:
        tokenizer = load_tokenizer(input_path(options.tokenizer))
        encoder = chat_encoder(tokenizer)
        prompts = held_out_prompts_by_length(*chosen, lengths, encoder)
        written = {
            out.with_name(f"{out.stem}-{length}{out.suffix}"): text
            for length, text in prompts.items()
        }
    else:
        written[out] = held_out_prompts(*chosen)
    if not all(written.values()):
        raise UsageError(f"{file} has no conversation whose source begins with {options.source!r}")
    make_directory(out.parent)
    for path, text in written.items():
        write_atomically(path, text)
        line = f"{path}: {text.count(chr(10)):,} prompts"
        if lengths:
            counts = [
                len(encoder.encode_prompt([*each.history, ("user", each.turns[0])]))
                for each in load_benchmark(str(path)).prompts
            ]
            line += f" of {min(counts):,} to {max(counts):,} tokens"
        print(f"{line} from {file}", flush=True)
    if lengths:
        provenance = {
            "conversations": str(file), "sha256": sha256_of_file(file), "source": options.source,
            "tokenizer": fingerprint(tokenizer), "command": typed_command(),
            **describe_code(),
        }
        text = json.dumps(provenance, indent=2) + "\n"
        write_atomically(out.with_name(f"{out.stem}.provenance.json"), text)
