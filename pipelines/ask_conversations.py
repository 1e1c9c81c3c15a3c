"""Write what users say in conversations, held out of training, as prompts for --benchmarks.

python pipelines/ask_conversations.py ../shared/data/chat/valid.jsonl.gz \\
    --source schema-guided-dialogue --out data/dialogues.jsonl
A later turn is asked after the model's own earlier answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stree.errors import NotFound, UsageError, exit_with_reason
from stree.files import make_directory, write_atomically
from stree_pipelines.command_line import PlainParser, input_path
from stree_pipelines.data.asked import prompts_asked


def main(arguments: Sequence[str] | None = None) -> None:
    parser = PlainParser("ask_conversations.py", description=__doc__)
    add = parser.add_argument
    add("conversations", help="ShareGPT file, JSONL or JSONL.gz, of rows that name their source")
    add("--out", required=True, help="JSONL file of prompts to write")
    add("--source", default="", help="take conversations whose source begins so (default: all)")
    add("--limit", type=int, default=80, help="first so many of them")
    add("--turns", type=int, default=2, help="first so many turns of the user's")
    options = parser.parse_args(arguments)
    for name in ("limit", "turns"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name} is {getattr(options, name)}, wanted at least 1")
    file, out = Path(input_path(options.conversations)), Path(options.out)
    if not file.is_file():
        raise NotFound(f"no file {file}: name a ShareGPT file, JSONL or JSONL.gz")
    prompts = prompts_asked(file, options.source, options.limit, options.turns)
    if not prompts:
        raise UsageError(f"{file} has no conversation whose source begins with {options.source!r}")
    make_directory(out.parent)
    write_atomically(out, prompts)
    print(f"{out}: {prompts.count(chr(10)):,} prompts from {file}")


if __name__ == "__main__":
    exit_with_reason(main)
