"""Time decoding of random weights against the floor of its matrix products.

Here … is pipelines/lab.

python …/bench_decode.py runs/bench/8b.jsonl --shape 8b
python …/bench_decode.py runs/bench/8b-8k.jsonl --shape 8b --what "[calls]" --context 8192
python …/bench_decode.py runs/bench/2.7b.jsonl --shape mamba2-2.7b --what "[calls,draft]"
python …/bench_decode.py runs/bench/chat.jsonl --shape chat --what "[draft,draft_profiles]"
python …/bench_decode.py runs/bench/8b-drafters.jsonl --what "[draft]" \\
    --drafters "[own,head=32768,rank=256,head=32768+rank=256,own+head_dtype=float8]"
python …/bench_decode.py runs/bench/8b-trees.jsonl --what "[draft]" \\
    --trees "[beam-4-8-16,beam-8-8-32]"
python …/bench_decode.py runs/bench/8b-lengths.jsonl --what "[draft_lengths]" \\
    --drafters "[own,attention]" --trees "[beam-1-4-5,beam-8-4-32]"
python …/bench_decode.py runs/bench/two.jsonl --shape bamba-9b,zamba2-7b --what "[calls]"
python …/bench_decode.py runs/bench/8b-verifiers.jsonl --what "[graphs]" \\
    --verifiers "[coupled,naive,multi_step,block,traversal]" --graph_rows "[1,32]"
python …/bench_decode.py runs/bench/8b-batch.jsonl --what "[rows,serve]" --taus "[2.5]"
python …/bench_decode.py runs/bench/8b-beam.jsonl --what "[rows]" --rows "[1]" \\
    --row_trees "[paper,beam-4-5-32]"
python …/bench_decode.py runs/bench/8b-joint.jsonl --what "[memory,joint]" --rows "[1,8]"
python …/bench_decode.py runs/bench/joint.jsonl --shape mamba2-2.7b --what "[joint]" \\
    --rows "[1]" --joint_trees "[png-6-1,png-6-2]"
python …/bench_decode.py runs/bench/beams.jsonl --shape mamba2-2.7b --what "[beams]"
python …/bench_decode.py runs/bench/8b-orders.jsonl --what "[orders]"
python …/bench_decode.py runs/bench/prompts.jsonl --shape chat,8b --what "[prompts]"
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import stree.common.threads  # noqa: F401  (before torch is loaded)

import torch

from stree.common.errors import UsageError, exit_with_reason, naming_what_does_not_fit
from stree.models.model import HybridModel
from stree.trees.token_tree import FORMS, as_tree
from stree.verifiers import VERIFIERS
from stree_kernels import ops
from stree_pipelines.console.command_line import CommandParser
from stree_pipelines.lab.benches import calls
from stree_pipelines.lab.benches.batches import TREES, joint_of_rows, serve_at, steps_of_rows
from stree_pipelines.lab.benches.models import (
    OWN,
    SHAPES,
    drafter_config,
    random_drafter,
    random_target,
    target_config,
)
from stree_pipelines.lab.benches.options import device_of, require_numbers, require_results_file
from stree_pipelines.lab.benches.steps import decode_at, graphs
from stree_pipelines.lab.benches.timing import release_memory, require_green, write_rows
from stree_pipelines.lab.papers.order_bench import bytes_of, orders
from stree_pipelines.resources.dry_run import MemoryEstimate, model_line
from stree_pipelines.resources.estimates import cache_bytes, decoding_memory, num_parameters

TESTS = [
    "kernels/attention", "kernels/conv", "kernels/gated_delta", "kernels/mamba",
    "kernels/products", "kernels/sampling", "kernels/test_gather.py", "kernels/test_pointwise.py",
    "stree/batching/test_graphs.py",
]
PROFILED_NODES = (1, 16, 64)
LESS = "fewer --what or --nodes, or a smaller --context or --lengths, need less"
WHAT = (
    "calls", "profiles", "draft", "draft_profiles", "unrolled", "beams", "memory", "steps",
    "graphs", "rows", "joint", "serve", "orders", "draft_lengths", "prompts",
)
WITHOUT_TARGET = {"orders", "draft_lengths"}
PAPER = "paper"  # the tree whose drafts the bars are about
DRAFTED = ("draft", "draft_profiles", "steps", "graphs", "rows", "joint", "serve")
CAPTURED = (
    "profiles", "draft_profiles", "steps", "graphs", "rows", "joint", "serve", "prompts",
)


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser("bench_decode.py", description=__doc__)
    add = parser.add_argument
    add("out", type=str, help="file to write, JSON lines")
    add("--shape", type=str, default="8b", help=f"one of {', '.join(SHAPES)}, or several")
    add("--what", type=list[str], default=list(WHAT), help=f"of {', '.join(WHAT)}")
    add("--nodes", type=list[int], default=[1, 5, 13, 16, 32, 64, 128], help="for calls")
    add("--order_nodes", "--order-nodes", type=list[int], default=[256, 512, 1024, 2048],
        help="of trees, for orders")
    add("--taus", type=list[float], default=[1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0], help="for steps")
    add(
        "--rows", type=list[int], default=[1, 2, 4, 8, 16, 32, 64], help="for rows, joint and serve"
    )
    known_verifiers = ", ".join(VERIFIERS)
    add("--verifiers", type=list[str], default=["coupled"], help=f"for graphs: {known_verifiers}")
    add("--graph_rows", "--graph-rows", type=list[int], default=[1], help="rows, for graphs")
    add("--drafters", type=list[str], default=[OWN],
        help="own, or what is otherwise, e.g. head=32768, rank=256, layers=4, "
        "width=2048, head_dtype=float8, attention, head=32768+rank=256")
    add("--trees", type=list[str], default=[PAPER],
        help=f"for draft, draft_profiles and draft_lengths: {FORMS}")
    add("--row_trees", "--row-trees", type=list[str], default=["chain-2", PAPER],
        help=f"for rows, plain decoding beside them: {FORMS}")
    add("--joint_trees", "--joint-trees", type=list[str], default=["chain-2", PAPER],
        help=f"for joint: {FORMS}")
    add("--context", type=int, default=1024, help="committed tokens")
    add("--lengths", type=list[int], default=[1024, 4096, 16384, 65536],
        help="committed tokens, for draft_lengths")
    add("--prompt_tokens", "--prompt-tokens", type=list[int], default=[16, 100, 512, 2048],
        help="of a prompt, for prompts")
    add("--repeats", type=int, default=50)
    add("--num_steps", "--num-steps", type=int, default=100, help="a run of steps")
    add("--device", type=str, default="cuda")
    add("--dry_run", "--dry-run", action="store_true", help="say what it takes")
    options = parser.parse_args(arguments)
    device = device_of(options.device)
    shapes = options.shape.split(",")
    for names, known in ((shapes, SHAPES), (options.what, WHAT), (options.verifiers, VERIFIERS)):
        for name in names:
            if name not in known:
                raise UsageError(f"{name!r} is not one of {', '.join(known)}")
    if not options.verifiers:
        raise UsageError(f"--verifiers: wanted some of {', '.join(VERIFIERS)}, got none")
    without = [each for each in shapes if not target_config(each).attn_layers]
    if without and options.what == ["orders"]:
        raise UsageError(f"orders time attention, which {', '.join(without)} has none of")
    for shape, kind in itertools.product(shapes, options.drafters):
        drafter_config(shape, kind)
    if not options.drafters:
        raise UsageError(f"--drafters: wanted {OWN} or changes to it, got none")
    for option in ("trees", "row_trees", "joint_trees"):
        if not getattr(options, option):
            raise UsageError(f"--{option}: wanted some of {FORMS}, got none")
        for name in getattr(options, option):
            as_tree(name)
    if not options.what:
        raise UsageError(f"--what: wanted some of {', '.join(WHAT)}, got none")
    require_numbers(
        nodes=options.nodes, order_nodes=options.order_nodes, context=options.context,
        repeats=options.repeats, num_steps=options.num_steps, rows=options.rows,
        graph_rows=options.graph_rows, lengths=options.lengths,
        prompt_tokens=options.prompt_tokens,
    )
    require_results_file(options.out)
    captured = [each for each in CAPTURED if each in options.what]
    if device.type != "cuda" and captured:
        names = " and ".join(captured)
        raise UsageError(f"{names} need CUDA graphs: leave {names} out of --what")
    if "profiles" in options.what and not set(options.nodes) & set(PROFILED_NODES):
        profiled = ", ".join(map(str, PROFILED_NODES))
        raise UsageError(f"profiles are of {profiled} nodes, and --nodes has none of them")
    if "steps" in options.what and not (options.taus and all(t >= 1 for t in options.taus)):
        raise UsageError(f"--taus: wanted numbers of at least 1, got {options.taus}")
    if options.dry_run:
        _say_what_it_takes(shapes, options, device)
        return
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("there is no CUDA device; --device cpu --shape tiny tries the script")
    _say_what_it_takes(shapes, options, device)
    require_green(TESTS)
    with ops.current(device), naming_what_does_not_fit(LESS):
        write_rows(options.out, _rows_of(shapes, options, device), device)


def _rows_of(shapes: list[str], options: Any, device: torch.device) -> Iterator[dict[str, Any]]:
    for shape in shapes:
        for row in measure(shape, options, device):
            yield {"shape": shape, **row}
        release_memory(device)


def _say_what_it_takes(shapes: list[str], options: Any, device: torch.device) -> None:
    for shape in shapes:
        for line in describe(shape, options, device.type == "cuda"):
            print(line, flush=True)


def measure(shape: str, options: Any, device: torch.device) -> Iterator[dict[str, Any]]:
    context, repeats = options.context, options.repeats
    config = target_config(shape)
    if "orders" in options.what and config.attn_layers:
        yield from orders(config, options.order_nodes, context, repeats, device)
    if "draft_lengths" in options.what:
        drafters = {kind: random_drafter(shape, device, kind) for kind in options.drafters}
        yield from calls.draft_lengths(drafters, options.trees, options.lengths, repeats)
    if set(options.what) <= WITHOUT_TARGET:
        return
    target = random_target(shape, device)
    if "calls" in options.what:
        yield from calls.calls(target, options.nodes, context, repeats)
    if "profiles" in options.what:
        nodes = [each for each in options.nodes if each in PROFILED_NODES]
        yield from calls.profiles(target, nodes, context, 5)
    if "unrolled" in options.what:
        yield from calls.unrolled(target, context, max(5, repeats // 5))
    if "beams" in options.what:
        yield from calls.beams(target, context, max(5, repeats // 5))
    if "memory" in options.what:
        yield from calls.memory(target, 64)
    if "prompts" in options.what:
        yield from calls.prompts(target, options.prompt_tokens, max(5, repeats // 5))
    for kind in options.drafters if set(DRAFTED) & set(options.what) else ():
        named = {} if kind == OWN else {"drafter": kind}
        drafter = random_drafter(shape, device, kind)
        for row in with_a_drafter(target, drafter, options):
            yield {**row, **named}


def with_a_drafter(
    target: HybridModel, drafter: HybridModel, options: Any
) -> Iterator[dict[str, Any]]:
    context, repeats = options.context, options.repeats
    for name in options.trees:
        tree, named = as_tree(name), {} if name == PAPER else {"tree": name}
        if "draft" in options.what:
            for row in calls.draft(drafter, tree, context, repeats):
                yield {**row, **named}
        if "draft_profiles" in options.what:
            for row in calls.draft_profiles(drafter, tree, context, 5):
                yield {**row, **named}
    if "steps" in options.what:
        yield from decode_at(target, drafter, options.taus, context, options.num_steps, 3)
    if "graphs" in options.what:
        verifiers, counts = options.verifiers, options.graph_rows
        yield from graphs(target, drafter, context, repeats, verifiers, counts)
    if "rows" in options.what:
        trees = [as_tree(name) for name in options.row_trees]
        yield from steps_of_rows(target, drafter, trees, options.rows, context, repeats)
    if "joint" in options.what:
        trees = [as_tree(name) for name in options.joint_trees]
        yield from joint_of_rows(target, drafter, trees, options.rows, context, repeats)
    if "serve" in options.what:
        yield from serve_at(target, drafter, options.rows, options.taus, context, options.num_steps)


def describe(shape: str, options: Any, on_cuda: bool) -> Iterator[str]:
    """Yield lines about the measurements, and the most memory that they take.

    One target call's cache is there at a time, or all caches of unrolled trees. Raises OutOfMemory,
    after the last line, when there is less.
    """
    what, nodes, context = set(options.what), options.nodes, options.context
    target, drafter = target_config(shape), drafter_config(shape)
    memory = {}
    if not what <= WITHOUT_TARGET:
        memory = decoding_memory(
            target, drafter, torch.bfloat16, context + max(nodes), {"tree": max(nodes)}
        )
    if "orders" in what:
        memory["attention of large trees"] = bytes_of(target, max(options.order_nodes), context)
    if {"calls", "rows", "joint"} & what:
        memory["floor's weights"] = calls.floor_bytes(target, max(nodes))
    if "unrolled" in what:
        nodes_each = calls.UNROLLED_DEPTH + 1
        one = cache_bytes(target, context + nodes_each, nodes_each, torch.bfloat16)
        calls_and_prefills = 2 * 2**calls.UNROLLED_DEPTH
        memory["caches of unrolled paths"] = calls_and_prefills * one
    if "beams" in what:
        nodes_each = max(calls.BEAM_STEPS) + 1
        one = cache_bytes(target, context + nodes_each, nodes_each, torch.bfloat16)
        leaves = max(calls.BEAMS) * max(calls.BEAM_STEPS)
        memory["caches of unrolled beams"] = 2 * leaves * one  # timed, and weighed
    if "prompts" in what:
        most = max(options.prompt_tokens) + 1
        memory["a prompt's cache"] = cache_bytes(target, most, 1, torch.bfloat16)
    if "draft_lengths" in what:
        dtype, longest = torch.bfloat16, max(options.lengths) + calls.MORE
        sizes = [as_tree(name).num_nodes for name in options.trees]
        configs = [drafter_config(shape, kind) for kind in options.drafters]
        memory["drafters beside each other"] = sum(
            dtype.itemsize * num_parameters(config)
            + sum(cache_bytes(config, longest, size, dtype) for size in sizes)
            for config in configs
        )
    if {"rows", "joint", "serve", "graphs"} & what:
        rows = options.rows if {"rows", "joint", "serve"} & what else options.graph_rows
        named = {"joint": options.joint_trees, "rows": options.row_trees}
        given = [as_tree(name) for kind, names in named.items() if kind in what for name in names]
        most = max(tree.num_nodes for tree in (*TREES, *given))
        one = cache_bytes(target, 2 * context + most, most, torch.bfloat16)
        at_once = 3 if "joint" in what else 1  # replay, joint and plain
        memory[f"caches of {max(rows)} rows"] = at_once * max(rows) * one
    counts = ", ".join(map(str, nodes))
    yield model_line(f"target {shape}", target)
    yield model_line("drafter", drafter)
    yield f"{', '.join(options.what)}; calls over {counts} nodes, {context} tokens committed"
    estimate = MemoryEstimate(memory, on_cuda)
    yield str(estimate)
    estimate.require(LESS)


if __name__ == "__main__":
    exit_with_reason(main)
