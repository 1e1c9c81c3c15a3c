"""Time decoding of random weights against the floor of its matrix products.

python pipelines/stree_lab/bench_decode.py runs/bench/8b.jsonl --shape 8b
python pipelines/stree_lab/bench_decode.py runs/bench/8b-8k.jsonl --shape 8b \\
    --what "[calls]" --context 8192
python pipelines/stree_lab/bench_decode.py runs/bench/8b-drafters.jsonl \\
    --what "[draft]" --drafters \\
    "[own,head=32768,rank=256,head=32768+rank=256,own+head_dtype=float8]"
python pipelines/stree_lab/bench_decode.py runs/bench/two.jsonl --shape \\
    bamba-9b,zamba2-7b --what "[calls]"
python pipelines/stree_lab/bench_decode.py runs/bench/8b-float8.jsonl --what \\
    "[rows]" --rows "[1,16]" --target_dtypes "[bfloat16,float8]"
python pipelines/stree_lab/bench_decode.py runs/bench/8b-joint.jsonl --what \\
    "[memory,joint]" --rows "[1,8]"
python pipelines/stree_lab/bench_decode.py runs/bench/mtp.jsonl --shape \\
    qwen3.5-9b --what "[draft,rows]" --drafters "[own,mtp]" --rows "[1]" \\
    --trees "[chain-1,chain-2,chain-3,paper]" --row_trees "[chain-1,chain-3,paper]"
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import stree.common.threads  # noqa: F401  (before torch is loaded)

import torch

from stree.common.errors import UsageError, exit_with_reason
from stree.loading import FLOAT8
from stree.models.config import HybridConfig
from stree.models.model import HybridModel
from stree.trees.token_tree import FORMS, StepTree, as_tree
from stree.verifiers import VERIFIERS
from stree_lab.benches import batches, calls, steps
from stree_lab.benches.command import (
    device_of,
    measure_when_green,
    require_numbers,
    require_results_file,
    require_some,
)
from stree_lab.benches.models import (
    OWN,
    SHAPES,
    drafter_config,
    random_drafter,
    random_target,
    target_config,
)
from stree_lab.benches.timing import Row, release_memory
from stree_lab.papers.joint_steps import parts_of_steps
from stree_lab.papers.order_bench import orders
from stree_pipelines.console.command_line import CommandParser

TESTS = [
    "kernels/attention", "kernels/conv", "kernels/products", "kernels/sampling",
    "kernels/test_gather.py", "kernels/test_mixers.py", "kernels/test_pointwise.py",
    "kernels/test_scans.py", "stree/batching/test_graphs.py",
]
PROFILED_NODES = (1, 16, 64)
TARGET_DTYPES = ("bfloat16", FLOAT8)
ORDER_NODES = [256, 512, 1024, 2048]
PROMPT_TOKENS = [16, 100, 512, 2048]
LESS = "fewer --what or --nodes, or a smaller --context or --lengths, need less"


@dataclass
class Bench:
    """Models of a shape under the options of the command; the target is made when first used."""

    shape: str
    options: Any
    device: torch.device
    target_dtype: str
    drafter: HybridModel = field(init=False)

    @property
    def config(self) -> HybridConfig:
        return target_config(self.shape)

    @cached_property
    def target(self) -> HybridModel:
        return random_target(self.shape, self.device, self.target_dtype)

    @property
    def few(self) -> int:
        """Number of repeats of what takes long."""
        return max(5, self.options.repeats // 5)

    def profiles(self) -> Iterator[Row]:
        nodes = [each for each in self.options.nodes if each in PROFILED_NODES]
        return calls.profiles(self.target, nodes, self.options.context, 5)

    def offloaded(self) -> Iterator[Row]:
        o, target = self.options, self.__dict__.pop("target", None)  # it is another one afterwards
        target = target or random_target(self.shape, self.device, self.target_dtype)
        return calls.offloaded(target, o.nodes, o.context, self.few)

    def draft_lengths(self) -> Iterator[Row]:
        o = self.options
        drafters = {kind: random_drafter(self.shape, self.device, kind) for kind in o.drafters}
        return calls.draft_lengths(drafters, o.trees, o.lengths, o.repeats)


Measurement = Callable[[Bench, Any], Iterable[Row]]  # of the bench and its options
OF_TARGETS: dict[str, Measurement] = {
    "orders": lambda bench, o: orders(ORDER_NODES, bench.few, bench.device),
    "draft_lengths": lambda bench, o: bench.draft_lengths(),
    "calls": lambda bench, o: calls.calls(bench.target, o.nodes, o.context, o.repeats),
    "profiles": lambda bench, o: bench.profiles(),
    "unrolled": lambda bench, o: calls.unrolled(bench.target, o.context, bench.few),
    "memory": lambda bench, o: calls.memory(bench.target, 64),
    "prompts": lambda bench, o: calls.prompts(bench.target, PROMPT_TOKENS, bench.few),
    "parts": lambda bench, o: () if bench.config.attn_layers else parts_of_steps(
        bench.target, o.context
    ),
    "offloaded": lambda bench, o: bench.offloaded(),
}
OF_PAIRS: dict[str, Measurement] = {
    "draft": lambda bench, o: calls.draft(bench.drafter, o.trees, o.context, o.repeats),
    "copied": lambda bench, o: calls.copied(bench.drafter, o.trees, o.context, o.repeats),
    "beams": lambda bench, o: calls.beams(bench.target, bench.drafter, o.context, bench.few),
    "steps": lambda bench, o: steps.decode_at(
        bench.target, bench.drafter, o.taus, o.context, o.num_steps, 3
    ),
    "graphs": lambda bench, o: steps.graphs(
        bench.target, bench.drafter, o.context, o.repeats, o.verifiers, o.graph_rows
    ),
    "rows": lambda bench, o: batches.steps_of_rows(
        bench.target, bench.drafter, _trees(o.row_trees), o.rows, o.context, o.repeats,
        o.temperatures,
    ),
    "joint": lambda bench, o: batches.joint_of_rows(
        bench.target, bench.drafter, _trees(o.joint_trees), o.rows, o.context, o.repeats
    ),
    "serve": lambda bench, o: batches.serve_at(
        bench.target, bench.drafter, o.rows, o.taus, o.context, o.num_steps
    ),
}
WHAT = (*OF_TARGETS, *OF_PAIRS)
# Measurements of what runs in CUDA graphs
CAPTURED = ("profiles", "prompts", "steps", "graphs", "rows", "joint", "serve", "parts")


def measure(
    shape: str, options: Any, device: torch.device, target_dtype: str = "bfloat16"
) -> Iterator[Row]:
    """Yield the rows of a shape: first what needs no drafter, then the rest, drafter by drafter."""
    bench = Bench(shape, options, device, target_dtype)
    for name, rows_of in OF_TARGETS.items():
        if name in options.what:
            yield from rows_of(bench, options)
    for kind in options.drafters if OF_PAIRS.keys() & set(options.what) else ():
        bench.drafter = random_drafter(shape, device, kind)
        named = {} if kind == OWN else {"drafter": kind}
        for name, rows_of in OF_PAIRS.items():
            if name in options.what:
                for row in rows_of(bench, options):
                    yield {**row, **named}


def _measure_all(shapes: list[str], options: Any, device: torch.device) -> Iterator[Row]:
    for shape, dtype in itertools.product(shapes, options.target_dtypes):
        for row in measure(shape, options, device, dtype):
            named = {} if dtype == TARGET_DTYPES[0] else {"target_dtype": dtype}
            yield {"shape": shape, **row, **named}
        release_memory(device)


def _trees(names: list[str]) -> list[StepTree]:
    return [as_tree(name) for name in names]


def build_parser() -> CommandParser:
    parser = CommandParser("bench_decode.py", description=__doc__)
    add = parser.add_argument
    add("out", type=str, help="file to write, JSON lines")
    add("--shape", type=str, default="8b", help=f"one of {', '.join(SHAPES)}, or several")
    add("--what", type=list[str], default=list(WHAT), help=f"of {', '.join(WHAT)}")
    add("--nodes", type=list[int], default=[1, 5, 13, 16, 32, 64, 128], help="for calls")
    add("--taus", type=list[float], default=[1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0], help="for steps")
    add("--rows", type=list[int], default=[1, 2, 4, 8, 16, 32, 64],
        help="for rows, joint and serve")
    add("--verifiers", type=list[str], default=["coupled"],
        help=f"for graphs: {', '.join(VERIFIERS)}")
    add("--graph_rows", type=list[int], default=[1], help="rows, for graphs")
    add("--drafters", type=list[str], default=[OWN],
        help="own, or what is otherwise, e.g. head=32768, rank=256, layers=4, "
        "width=2048, head_dtype=float8, attention, mtp, eagle, head=32768+rank=256")
    add("--trees", type=list[str], default=[calls.PAPER],
        help=f"for draft, copied and draft_lengths: {FORMS}")
    add("--target_dtypes", type=list[str], default=["bfloat16"],
        help=f"of the weights of the target's products: {', '.join(TARGET_DTYPES)}")
    add("--row_trees", type=list[str], default=["chain-2", calls.PAPER],
        help=f"for rows, plain decoding beside them: {FORMS}")
    add("--joint_trees", type=list[str], default=["chain-2", calls.PAPER],
        help=f"for joint: {FORMS}")
    add("--temperatures", type=list[float], default=[0.0], help="for rows")
    add("--context", type=int, default=1024, help="committed tokens")
    add("--lengths", type=list[int], default=[1024, 4096, 16384, 65536],
        help="committed tokens, for draft_lengths")
    add("--repeats", type=int, default=50)
    add("--num_steps", type=int, default=100, help="a run of steps")
    add("--device", type=str, default="cuda")
    return parser


def require_possible(shapes: list[str], options: Any, device: torch.device) -> None:
    """Raise UsageError for options that cannot be measured, CannotWrite for the file."""
    require_some("shape", shapes, SHAPES)
    require_some("what", options.what, WHAT)
    require_some("target_dtypes", options.target_dtypes, TARGET_DTYPES)
    require_some("verifiers", options.verifiers, VERIFIERS)
    for name in ("drafters", "trees", "row_trees", "joint_trees", "temperatures"):
        if not getattr(options, name):
            raise UsageError(f"--{name} is empty")
    for shape in shapes:
        for kind in options.drafters:
            drafter_config(shape, kind)
    _trees([*options.trees, *options.row_trees, *options.joint_trees])
    require_numbers(
        options, "nodes", "context", "repeats", "num_steps", "rows", "graph_rows", "lengths"
    )
    require_results_file(options.out)
    captured = [each for each in CAPTURED if each in options.what]
    if device.type != "cuda" and captured:
        names = " and ".join(captured)
        raise UsageError(f"{names} need CUDA graphs: leave {names} out of --what")
    if "profiles" in options.what and not set(options.nodes) & set(PROFILED_NODES):
        profiled = ", ".join(map(str, PROFILED_NODES))
        raise UsageError(f"profiles are of {profiled} nodes, and --nodes has none of them")
    without = [each for each in shapes if not target_config(each).attn_layers]
    if without and options.what == ["orders"]:
        raise UsageError(f"orders time attention, which {', '.join(without)} has none of")
    if options.what == ["parts"] and len(without) < len(shapes):
        attend = ", ".join(each for each in shapes if each not in without)
        raise UsageError(
            f"parts are of joint attainment by rows, which needs a shape without attention layers: "
            f"leave out {attend}"
        )
    if "steps" in options.what and (not options.taus or min(options.taus) < 1):
        raise UsageError(f"--taus: wanted numbers of at least 1, got {options.taus}")


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    device, shapes = device_of(options.device), options.shape.split(",")
    require_possible(shapes, options, device)
    measure_when_green(options.out, _measure_all(shapes, options, device), device, TESTS, LESS)


if __name__ == "__main__":
    exit_with_reason(main)
