"""Time the fused ops against their plain twins, one JSON line per case.

python pipelines/stree_lab/bench_kernels.py runs/bench/kernels.jsonl
python pipelines/stree_lab/bench_kernels.py runs/bench/updates.jsonl --nodes "[1,5,10]" \\
    --batch "[1,4,16]"
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import stree.common.threads  # noqa: F401  (before torch is loaded)

import torch
from torch import Tensor

from stree.common.errors import exit_with_reason
from stree.trees.token_tree import TokenTree
from stree_kernels import naive, ops
from stree_kernels.contracts import Derived, GatedDeltaWeights, MixerWeights
from stree_kernels.shapes import GatedDeltaShape, MixerShape
from stree_lab.benches.buffers import OpCall
from stree_lab.benches.command import (
    device_of,
    measure_when_green,
    require_numbers,
    require_results_file,
    require_some,
)
from stree_lab.benches.timing import Row, per_layer, side_by_side, us_fields
from stree_pipelines.console.command_line import CommandParser

MIXERS = {  # MambaInLlama-8B, the chat target, and something for the CPU
    "8b": MixerShape(32, 128, 128, 8, 8, 32, 4),
    "chat": MixerShape(16, 64, 64, 4, 4, 16, 4),
    "tiny": MixerShape(2, 16, 16, 1, 1, 2, 4),
}
GATED_DELTAS = {  # of that model's gated-delta layers alone
    "qwen3.5-27b": GatedDeltaShape(48, 16, 128, 128, 4),
    "tiny": GatedDeltaShape(2, 1, 16, 16, 4),
}
HEADS = {"8b": (32, 8, 128), "chat": (16, 4, 64), "tiny": (2, 1, 16)}
MLPS = {"8b": (4096, 14336), "chat": (1024, 4096), "tiny": (32, 64)}  # width and inner width
SHAPES = sorted({*MIXERS, *GATED_DELTAS})
NODES = [1, 2, 4, 5, 8, 10, 13, 16, 32, 64, 128]
TESTS = [
    "kernels/attention", "kernels/products", "kernels/test_mixers.py", "kernels/test_scans.py",
]
LESS = "fewer --nodes or --layers, or a smaller --context, need less"

Calls = dict[str, Callable[[], object]]  # by way: "fused", "naive", …
# Of a layer: projected inputs, kept rows, what is derived from them, and the op's further arguments
MixerSet = tuple[Tensor, Tensor, Derived, tuple[Any, ...]]


def measure(
    shape: str, nodes: list[int], context: int, layers: int, repeats: int, device: torch.device,
    batch: Sequence[int] = (1,),
) -> Iterator[Row]:
    """Time the ops of a shape, in µs per layer; a row per op, number of nodes and of sequences.

    The ops are replay + conv + scan, attention over `context` tokens, an MLP's halves, and the
    gated delta rule. Each call goes through `layers` sets of buffers, back to back. The tree is a
    chain: times do not depend on its shape, and every op can do a chain. Several sequences have
    rows of Mamba-2's op alone.
    """
    for count, num_nodes in itertools.product(batch, nodes):
        call = OpCall(TokenTree.chain(num_nodes - 1), context, layers, device, batch=count)
        for op, (make, sizes) in OPS.items():
            if shape not in sizes or (count > 1 and make is not _scan):
                continue
            times = side_by_side(make(call, sizes[shape]), device, repeats)
            row = dict(
                op=op, shape=shape, num_nodes=num_nodes, batch=count, context=context,
                layers=layers,
            )
            yield {**row, **us_fields(per_layer(times, layers))}


def _scan(call: OpCall, shape: MixerShape) -> Calls:
    sets = _mixer_sets(call, shape)
    if not call.fused:
        return _mixer_calls(sets, naive.mamba_tree)
    from stree_kernels.mamba.chunk_scan import chunk_scan
    from stree_kernels.mamba.tree_scan import mamba_tree

    ways = _mixer_calls(sets, naive.mamba_tree, mamba_tree)
    states = [rest[0] for *_, rest in sets]
    if (update := _mamba_ssm_update()) is not None:
        updates = [_one_token(call, state, shape) for state in states]
        ways["mamba_ssm_updates"] = lambda: [
            update(*each, dt_softplus=True) for each in updates for _ in range(call.num_nodes)
        ]
    ones = _mixer_sets(replace(call, tree=TokenTree.chain(0)), shape)
    step: Callable[..., object] = partial(mamba_tree, as_chain=True)
    ways["updates"] = lambda: [
        step(a, b, c, *rest) for a, b, c, rest in ones for _ in range(call.num_nodes)
    ]
    scanned = [_scanned(call, state, shape) for state in states]
    ways["chunk_scan"] = lambda: [
        chunk_scan(*inputs, initial_state=state) for *inputs, state in scanned
    ]
    return ways


def _mixer_sets(call: OpCall, shape: MixerShape) -> list[MixerSet]:
    topology, cache_state = call.place()
    groups, batch = shape.scan_groups, call.batch
    conv_dim = groups[0] * shape.head_dim + (groups[1] + groups[2]) * shape.d_state
    per_head = [call.normal(shape.num_heads) for _ in range(3)]
    sets: list[MixerSet] = []
    for _ in range(call.layers):
        weights = MixerWeights(
            call.normal(shape.width, conv_dim).T, call.normal(conv_dim), *per_head
        )
        projected = call.normal(batch, call.num_nodes, shape.d_inner + shape.num_kept)
        rows = call.normal(2, batch, shape.tail + call.num_nodes, shape.num_kept)
        xb = call.normal(2, batch, call.num_nodes, conv_dim - groups[2] * shape.d_state)
        steps = torch.rand(2, batch, 2, call.num_nodes, shape.num_heads, device=call.device)
        state = torch.randn(
            batch, shape.num_heads, shape.head_dim, shape.d_state, device=call.device
        )
        rest = (state, weights, shape, topology, cache_state, 0)
        sets.append((projected, rows, Derived(xb, steps), rest))
    return sets


def _gated_delta(call: OpCall, shape: GatedDeltaShape) -> Calls:
    topology, cache_state = call.place()
    heads, channels = shape.num_heads, shape.num_channels
    sets: list[MixerSet] = []
    for _ in range(call.layers):
        weights = GatedDeltaWeights(
            call.normal(shape.width, channels).T, None, call.normal(heads), call.normal(heads)
        )
        projected = call.normal(1, call.num_nodes, shape.num_projected)
        rows = call.normal(2, 1, shape.tail + call.num_nodes, shape.num_kept)
        qk = call.normal(2, 1, call.num_nodes, 2 * shape.conv_dims[0])
        steps = torch.rand(2, 1, 2, call.num_nodes, heads, device=call.device)
        steps[:, :, 1] *= -1  # log-decays
        updates = torch.randn(1, call.num_nodes, heads, shape.value_dim, device=call.device)
        state = torch.randn(1, heads, shape.key_dim, shape.value_dim, device=call.device)
        rest = (updates, state, weights, shape, topology, cache_state, 0)
        sets.append((projected, rows, Derived(qk, steps), rest))
    if not call.fused:
        return _mixer_calls(sets, naive.gated_delta_tree)
    from stree_kernels.gated_delta.tree import gated_delta_tree

    return _mixer_calls(sets, naive.gated_delta_tree, gated_delta_tree)


def _mixer_calls(
    sets: list[MixerSet], twin: Callable[..., object], kernel: Callable[..., object] | None = None
) -> Calls:
    """Return calls of a mixer's twin and, if there is one, of its kernel for trees and chains."""
    calls: Calls = {"naive": lambda: [twin(a, b, c, *rest) for a, b, c, rest in sets]}
    if kernel is not None:
        calls["fused"] = lambda: [kernel(a, b, c, *rest, as_chain=False) for a, b, c, rest in sets]
        calls["multi_step"] = lambda: [
            kernel(a, b, c, *rest, as_chain=True) for a, b, c, rest in sets
        ]
    return calls


def _mamba_ssm_update() -> Callable[..., Any] | None:
    """Return mamba-ssm's update of a state by one token, or None when it is not installed.

    It does less: no conv, no replay, and one token at a time.
    """
    try:
        module = importlib.import_module("mamba_ssm.ops.triton.selective_state_update")
    except ImportError:
        return None
    return module.selective_state_update


def _one_token(call: OpCall, state: Tensor, shape: MixerShape) -> tuple[Tensor | None, ...]:
    """Make the update's arguments: state, x, dt, A, B, C, D, no gate, and the bias of dt."""
    device, heads, dim = state.device, shape.num_heads, shape.head_dim
    A = -torch.rand(heads, 1, 1, device=device).expand(heads, dim, shape.d_state)
    x = call.normal(call.batch, heads, dim)
    dt = call.normal(call.batch, heads, 1).expand(call.batch, heads, dim)
    B, C = (call.normal(call.batch, shape.c_groups, shape.d_state) for _ in range(2))
    D, bias = (torch.rand(heads, 1, device=device).expand(heads, dim) for _ in range(2))
    return state.clone(), x, dt, A, B, C, D, None, bias


def _scanned(call: OpCall, state: Tensor, shape: MixerShape) -> tuple[Tensor, ...]:
    """Make chunk scan's arguments, x, dt, A, B, C and D, and the state to begin with."""
    heads, at = shape.num_heads, (call.batch, call.num_nodes)
    x = call.normal(*at, heads, shape.head_dim)
    dt, A = torch.rand(*at, heads, device=state.device), -torch.rand(heads, device=state.device)
    B, C = (call.normal(*at, shape.c_groups, shape.d_state) for _ in range(2))
    return x, dt, A, B, C, torch.rand(heads, device=state.device), state


def _attention(call: OpCall, shape: tuple[int, int, int]) -> Calls:
    return _both_ways("attend_tree", call, call.attention_sets(*shape))


def _product(op: str, call: OpCall, shape: tuple[int, int]) -> Calls:
    """Time gate and up with SwiGLU, or down, which the next norm adds up."""
    width, inside = shape
    outputs, inputs = (2 * inside, width) if op == "linear_swiglu" else (width, inside)
    x = call.normal(1, call.num_nodes, inputs)
    return _both_ways(op, call, [(x, call.normal(outputs, inputs)) for _ in range(call.layers)])


def _both_ways(op: str, call: OpCall, sets: list[tuple[Any, ...]]) -> Calls:
    """Return calls by the fused kernels, if there are any, and by the plain twin."""
    modules = {"fused": ops, "naive": naive} if call.fused else {"naive": naive}
    return {name: partial(_each, getattr(module, op), sets) for name, module in modules.items()}


def _each(function: Callable[..., object], sets: list[tuple[Any, ...]]) -> None:
    for arguments in sets:
        function(*arguments)


# Each op with the shapes that have it
OPS: dict[str, tuple[Callable[[OpCall, Any], Calls], Mapping[str, Any]]] = {
    "mamba_tree": (_scan, MIXERS), "attend_tree": (_attention, HEADS),
    "linear_swiglu": (partial(_product, "linear_swiglu"), MLPS),
    "linear": (partial(_product, "linear"), MLPS),
    "linear_parts": (partial(_product, "linear_parts"), MLPS),
    "gated_delta_tree": (_gated_delta, GATED_DELTAS),
}


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser("bench_kernels.py", description=__doc__)
    add = parser.add_argument
    add("out", type=str, help="file to write, JSON lines")
    add("--shape", type=str, default="8b", help=f"one of {SHAPES}")
    add("--nodes", type=list[int], default=NODES)
    add("--batch", type=list[int], default=[1], help="sequences, for Mamba-2's op")
    add("--context", type=int, default=1024)
    add("--layers", type=int, default=16)
    add("--repeats", type=int, default=50)
    add("--device", type=str, default="cuda")
    options = parser.parse_args(arguments)
    device = device_of(options.device)
    require_some("shape", [options.shape], SHAPES)
    require_numbers(options, "nodes", "batch", "context", "layers", "repeats")
    require_results_file(options.out)
    rows = measure(
        options.shape, options.nodes, options.context, options.layers, options.repeats, device,
        options.batch,
    )
    measure_when_green(options.out, rows, device, TESTS, LESS)


if __name__ == "__main__":
    exit_with_reason(main)
