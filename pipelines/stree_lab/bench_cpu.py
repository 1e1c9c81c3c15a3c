"""Time decoding on a CPU against transformers' `generate` with the same weights.

    python pipelines/stree_lab/bench_cpu.py runs/bench/cpu.jsonl
    OMP_NUM_THREADS=1 python pipelines/stree_lab/bench_cpu.py cpu.jsonl --layouts "[llama]"

Per layout (Llama's, Mamba-2's), random weights in fp32: a token of plain decoding, ours and theirs,
interleaved, prompts read included; and a call over a tree of 13 nodes against one over a single
node. Each ratio is paired by turn: its median with a 95 % bootstrap interval over turns.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import stree.common.threads  # noqa: F401  (before torch is loaded)

import torch

from stree import Decoder, GenerationConfig
from stree.checkpoints.load_save import load_model
from stree.common import threads
from stree.common.errors import UsageError, exit_with_reason
from stree.models.model import HybridModel
from stree.trees.token_tree import TokenTree
from stree_lab.benches.command import (
    require_numbers,
    require_results_file,
    require_some,
)
from stree_lab.benches.timing import (
    Row,
    interleaved_times,
    ratio_by_turn,
    spread,
    write_rows,
)
from stree_pipelines.console.command_line import CommandParser

LAYOUTS = ("llama", "mamba2")
CPU = torch.device("cpu")


def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser("bench_cpu.py", description=__doc__)
    add = parser.add_argument
    add("out", type=str, help="file to write, JSON lines")
    add("--layouts", type=list[str], default=list(LAYOUTS), help=f"of {', '.join(LAYOUTS)}")
    add("--width", type=int, default=256, help="of the model, a multiple of 64")
    add("--layers", type=int, default=8)
    add("--vocabulary", type=int, default=8192)
    add("--context", type=int, default=64, help="tokens of the prompt")
    add("--new_tokens", type=int, default=96, help="a generation")
    add("--repeats", type=int, default=11, help="turns")
    options = parser.parse_args(arguments)
    require_some("layouts", options.layouts, LAYOUTS)
    require_numbers(options, "layers", "vocabulary", "context", "new_tokens", "repeats")
    if options.width < 64 or options.width % 64:
        raise UsageError(f"--width: wanted a multiple of 64, got {options.width}")
    require_results_file(options.out)
    write_rows(options.out, measure(options), CPU)


def measure(options: Any) -> Iterator[Row]:
    for layout in options.layouts:
        theirs, ours = same_weights(layout, options)
        with threads.for_decoding(ours):  # which transformers is given, too
            yield {"what": "plain", "layout": layout, **plain(theirs, ours, options)}
            yield {"what": "tree", "layout": layout, **tree_call(ours, options)}


def same_weights(layout: str, options: Any) -> tuple[Any, HybridModel]:
    """Return transformers' model and ours, with the same random weights."""
    torch.manual_seed(0)
    theirs = _reference(layout, options).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return theirs, load_model(folder, device="cpu", dtype=torch.float32)


def _reference(layout: str, options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM

    shared = dict(
        vocab_size=options.vocabulary, hidden_size=options.width,
        num_hidden_layers=options.layers, tie_word_embeddings=True,
    )
    heads = options.width // 64
    if layout == "llama":
        return LlamaForCausalLM(LlamaConfig(
            **shared, intermediate_size=options.width * 43 // 16, num_attention_heads=heads,
            num_key_value_heads=max(heads // 2, 1), head_dim=64,
        ))
    return Mamba2ForCausalLM(Mamba2Config(
        **shared, num_heads=2 * heads, head_dim=64, state_size=64, n_groups=1, chunk_size=64
    ))


def plain(theirs: Any, ours: HybridModel, options: Any) -> Row:
    """Time plain decoding: µs per token, and tokens/s over transformers' in each turn."""
    tokens, count = _tokens(options), options.new_tokens
    decoder = Decoder(ours, max_length=options.context + count + 1)
    generation = GenerationConfig(max_new_tokens=count, ignore_eos=True)
    prompt = torch.tensor([tokens])

    def generate() -> None:
        theirs.generate(
            prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        )

    functions = dict(ours_us=lambda: decoder.generate(tokens, generation), transformers_us=generate)
    times = interleaved_times(functions, CPU, options.repeats)
    return {
        **{name: spread([us / count for us in each]) for name, each in times.items()},
        "over_transformers": ratio_by_turn(times["transformers_us"], times["ours_us"]),
        "threads": torch.get_num_threads(),
    }


@torch.no_grad()
def tree_call(ours: HybridModel, options: Any) -> Row:
    """Time a call over the paper's tree and over one node, in µs, one token after the last
    call's."""
    trees = {"step_us": TokenTree.chain(0), "tree_us": TokenTree.paper()}

    def call_over(tree: TokenTree) -> Any:
        cache = ours.new_cache(options.context + 4 * options.repeats + 64, tree.num_nodes)
        ours.prefill(torch.tensor([_tokens(options)]), cache)
        nodes = torch.arange(tree.num_nodes)[None] % options.vocabulary

        def call() -> None:
            ours.tree_forward(nodes, tree, cache)
            cache.commit([0])

        return call

    calls = {name: call_over(tree) for name, tree in trees.items()}
    times = interleaved_times(calls, CPU, options.repeats)
    return {
        **{name: spread(each) for name, each in times.items()},
        "nodes": trees["tree_us"].num_nodes,
        "tree_over_step": ratio_by_turn(times["tree_us"], times["step_us"]),
    }


def _tokens(options: Any) -> list[int]:
    return [token % options.vocabulary for token in range(options.context)]


if __name__ == "__main__":
    exit_with_reason(main)
