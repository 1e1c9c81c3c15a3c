"""Time the fused ops against their plain twins, one JSON line per case.

python pipelines/lab/bench_kernels.py runs/bench/kernels.jsonl
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import stree.common.threads  # noqa: F401  (before torch is loaded)

import torch

from stree.common.errors import UsageError, exit_with_reason, naming_what_does_not_fit
from stree.trees.token_tree import TokenTree
from stree.trees.tree_batch import topology_of
from stree_kernels import naive, ops
from stree_kernels.contracts import (
    CacheState,
    Derived,
    GatedDeltaShape,
    GatedDeltaWeights,
    MixerShape,
    MixerWeights,
)
from stree_pipelines.console.command_line import CommandParser
from stree_pipelines.lab.benches.options import device_of, require_numbers, require_results_file
from stree_pipelines.lab.benches.timing import require_green, side_by_side, write_rows
from stree_pipelines.resources.dry_run import MemoryEstimate

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
NODES = [1, 2, 4, 5, 8, 10, 13, 16, 32, 64, 128]
TESTS = ["kernels/attention", "kernels/gated_delta", "kernels/mamba", "kernels/products"]


def measure(
    shape: str, nodes: list[int], context: int, layers: int, repeats: int, device: torch.device
) -> list[dict[str, Any]]:
    """Time the ops of a shape, in µs per layer; a row per op and number of nodes.

    The ops are replay + conv + scan, attention over `context` tokens, an MLP's halves, and the
    gated delta rule. Each call goes through `layers` sets of buffers, back to back.
    """
    rows = []
    for num_nodes in nodes:
        for op in _ops_of(shape):
            make, _ = OPS[op]
            functions = make(shape, num_nodes, context, layers, device)
            times = side_by_side(functions, device, repeats)
            a_layer = {
                name: {key: value / layers for key, value in each.items()}
                for name, each in times.items()
            }
            row = dict(op=op, shape=shape, num_nodes=num_nodes, context=context, layers=layers)
            rows.append({**row, **{f"us_{name}": each for name, each in a_layer.items()}})
    return rows


def _cache_state(num_nodes: int, context: int, device: torch.device) -> CacheState:
    def whole(value: int) -> torch.Tensor:
        return torch.full((1,), value, device=device)

    path = torch.arange(num_nodes, device=device)[None]
    return CacheState(whole(context), path, whole(min(3, num_nodes)), whole(0), whole(0))


def _normal(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, device=device).bfloat16()


def _chain(num_nodes: int, device: torch.device) -> Any:
    """Make a chain's topology: times do not depend on a tree's shape, and every op can do a
    chain."""
    return topology_of(TokenTree.chain(num_nodes - 1), 4, device)


def _scan(
    name: str, num_nodes: int, context: int, layers: int, device: torch.device
) -> dict[str, Callable[[], object]]:
    shape = MIXERS[name]
    cache_state, topology = _cache_state(num_nodes, context, device), _chain(num_nodes, device)
    groups = shape.scan_groups
    conv_dim = groups[0] * shape.head_dim + (groups[1] + groups[2]) * shape.d_state
    per_head = [_normal(shape.num_heads, device=device) for _ in range(3)]
    sets = []
    for _ in range(layers):
        width = shape.d_inner + shape.num_kept
        weights = MixerWeights(
            _normal(shape.width, conv_dim, device=device).T, _normal(conv_dim, device=device),
            *per_head,
        )
        projected = _normal(1, num_nodes, width, device=device)
        rows = _normal(2, 1, shape.tail + num_nodes, shape.num_kept, device=device)
        xb = _normal(2, 1, num_nodes, conv_dim - groups[2] * shape.d_state, device=device)
        steps = torch.rand(2, 1, 2, num_nodes, shape.num_heads, device=device)
        state = torch.randn(1, shape.num_heads, shape.head_dim, shape.d_state, device=device)
        rest = (state, weights, shape, topology, cache_state, 0)
        sets.append((projected, rows, Derived(xb, steps), rest))
    functions: dict[str, Callable[[], object]] = {
        "naive": lambda: [naive.mamba_tree(a, b, *rest) for a, b, _, rest in sets]
    }
    if _fused(device):
        from stree_kernels.mamba import chain_scan, tree_scan

        functions["fused"] = lambda: [
            tree_scan.mamba_tree(a, b, c, *rest) for a, b, c, rest in sets
        ]
        functions["multi_step"] = lambda: [
            chain_scan.mamba_chain(a, b, c, *rest[:-1]) for a, b, c, rest in sets
        ]
        update = _mamba_ssm_update()
        if update is not None:
            calls = [_one_token(state, shape) for _, _, _, (state, *_) in sets]
            functions["mamba_ssm_updates"] = lambda: [
                update(*call, dt_softplus=True) for call in calls for _ in range(num_nodes)
            ]
    return functions


def _gated_delta(
    name: str, num_nodes: int, context: int, layers: int, device: torch.device
) -> dict[str, Callable[[], object]]:
    shape = GATED_DELTAS[name]
    cache_state, topology = _cache_state(num_nodes, context, device), _chain(num_nodes, device)
    heads, channels = shape.num_heads, shape.num_channels
    sets = []
    for _ in range(layers):
        weights = GatedDeltaWeights(
            _normal(shape.width, channels, device=device).T, None,
            _normal(heads, device=device), _normal(heads, device=device),
        )
        projected = _normal(1, num_nodes, shape.num_projected, device=device)
        rows = _normal(2, 1, shape.tail + num_nodes, shape.num_kept, device=device)
        qk = _normal(2, 1, num_nodes, 2 * shape.conv_dims[0], device=device)
        steps = torch.rand(2, 1, 2, num_nodes, heads, device=device)
        steps[:, :, 1] *= -1  # log-decays
        updates = torch.randn(1, num_nodes, heads, shape.value_dim, device=device)
        state = torch.randn(1, heads, shape.key_dim, shape.value_dim, device=device)
        rest = (updates, state, weights, shape, topology, cache_state, 0)
        sets.append((projected, rows, Derived(qk, steps), rest))
    functions: dict[str, Callable[[], object]] = {
        "naive": lambda: [naive.gated_delta_tree(a, b, *rest) for a, b, _, rest in sets]
    }
    if _fused(device):
        from stree_kernels.gated_delta import chain as gated_delta_chain
        from stree_kernels.gated_delta import tree as gated_delta_tree

        functions["fused"] = lambda: [
            gated_delta_tree.gated_delta_tree(a, b, c, *rest) for a, b, c, rest in sets
        ]
        functions["multi_step"] = lambda: [
            gated_delta_chain.gated_delta_chain(a, b, c, *rest[:-1]) for a, b, c, rest in sets
        ]
    return functions


def _mamba_ssm_update() -> Callable[..., Any] | None:
    """Return mamba-ssm's update of a state by one token, or None when it is not installed.

    It does less: no conv, no replay, and one token at a time.
    """
    try:
        module = importlib.import_module("mamba_ssm.ops.triton.selective_state_update")
    except ImportError:
        return None
    return module.selective_state_update


def _one_token(state: torch.Tensor, shape: MixerShape) -> tuple[torch.Tensor | None, ...]:
    """Make the update's arguments: state, x, dt, A, B, C, D, no gate, and the bias of dt."""
    device, heads, dim = state.device, shape.num_heads, shape.head_dim
    A = -torch.rand(heads, 1, 1, device=device).expand(heads, dim, shape.d_state)
    x = _normal(1, heads, dim, device=device)
    dt = _normal(1, heads, 1, device=device).expand(1, heads, dim)
    B, C = (_normal(1, shape.c_groups, shape.d_state, device=device) for _ in range(2))
    D, bias = (torch.rand(heads, 1, device=device).expand(heads, dim) for _ in range(2))
    return state.clone(), x, dt, A, B, C, D, None, bias


def _attention(
    name: str, num_nodes: int, context: int, layers: int, device: torch.device
) -> dict[str, Callable[[], object]]:
    heads, kv_heads, dim = HEADS[name]
    cache_state, topology = _cache_state(num_nodes, context, device), _chain(num_nodes, device)
    slots = context + 2 * num_nodes
    angles = torch.rand(2, slots, dim // 2, device=device)
    sets = [
        (
            _normal(1, num_nodes, (heads + 2 * kv_heads) * dim, device=device),
            *(_normal(1, kv_heads, slots, dim, device=device) for _ in range(2)),
            angles, topology, cache_state, 0, slots,
        )
        for _ in range(layers)
    ]
    return _both_ways("attend_tree", sets)


def _product(
    op: str, name: str, num_nodes: int, context: int, layers: int, device: torch.device
) -> dict[str, Callable[[], object]]:
    """Time gate and up with SwiGLU, or down, which the next norm adds up."""
    width, inside = MLPS[name]
    outputs, inputs = (2 * inside, width) if op == "linear_swiglu" else (width, inside)
    x = _normal(1, num_nodes, inputs, device=device)
    weights = [_normal(outputs, inputs, device=device) for _ in range(layers)]
    return _both_ways(op, [(x, weight) for weight in weights])


def _both_ways(op: str, sets: Sequence[tuple[Any, ...]]) -> dict[str, Callable[[], object]]:
    """Return calls by the fused kernels, if there are any, and by the plain twin."""
    ways = {"fused": ops, "naive": naive} if _fused(sets[0][0].device) else {"naive": naive}
    return {
        name: functools.partial(_each, getattr(module, op), sets) for name, module in ways.items()
    }


def _each(function: Callable[..., object], sets: Sequence[tuple[Any, ...]]) -> None:
    for arguments in sets:
        function(*arguments)


def _fused(device: torch.device) -> bool:
    return ops.fused(device, torch.bfloat16)


LESS = "fewer --nodes or --layers, or a smaller --context, need less"
PRODUCTS = ("linear_swiglu", "linear", "linear_parts")
# Each op with the shapes that have it
OPS: dict[str, tuple[Callable[..., dict[str, Callable[[], object]]], dict[str, Any]]] = {
    "mamba_tree": (_scan, MIXERS), "attend_tree": (_attention, HEADS),
    **{op: (functools.partial(_product, op), MLPS) for op in PRODUCTS},
    "gated_delta_tree": (_gated_delta, GATED_DELTAS),
}
SHAPES = sorted({*MIXERS, *GATED_DELTAS})


def _ops_of(shape: str) -> list[str]:
    return [op for op, (_, shapes) in OPS.items() if shape in shapes]


def describe(
    name: str, nodes: list[int], context: int, layers: int, device: torch.device
) -> Iterator[str]:
    """Yield lines about the measurements, and the memory of their largest buffers.

    Raises OutOfMemory, after the last line, when there is less.
    """
    memory = {}
    if name in MIXERS:
        shape, (_, kv_heads, dim), (width, inside) = MIXERS[name], HEADS[name], MLPS[name]
        slots = context + 2 * max(nodes)
        memory = {
            "states": 4 * layers * shape.num_heads * shape.head_dim * shape.d_state,
            "keys and values": 2 * 2 * layers * kv_heads * slots * dim,
            "weights": 2 * 2 * layers * width * inside,
        }
    if name in GATED_DELTAS:
        delta = GATED_DELTAS[name]
        bytes_a_layer = 4 * delta.num_heads * delta.key_dim * delta.value_dim
        memory["states of the gated delta rule"] = layers * bytes_a_layer
    counts = ", ".join(map(str, nodes))
    yield f"{', '.join(_ops_of(name))} over {counts} nodes, {layers} layers, {context} committed"
    estimate = MemoryEstimate(memory, device.type == "cuda")
    yield str(estimate)
    estimate.require(LESS)


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser("bench_kernels.py", description=__doc__)
    parser.add_argument("out", type=str, help="file to write, JSON lines")
    parser.add_argument("--shape", type=str, default="8b", help=f"one of {SHAPES}")
    parser.add_argument("--nodes", type=list[int], default=NODES)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--device", type=str, default="cuda")
    parser.add_argument("--dry_run", "--dry-run", action="store_true", help="say what it takes")
    options = parser.parse_args(arguments)
    device = device_of(options.device)
    if options.shape not in SHAPES:
        raise UsageError(f"shape {options.shape!r} is not one of {SHAPES}")
    require_numbers(
        nodes=options.nodes, context=options.context, layers=options.layers, repeats=options.repeats
    )
    require_results_file(options.out)
    if options.dry_run:
        for line in describe(options.shape, options.nodes, options.context, options.layers, device):
            print(line, flush=True)
        return
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("there is no CUDA device; --device cpu times the plain twins")
    require_green(TESTS)
    with ops.current(device), naming_what_does_not_fit(LESS):
        rows = measure(
            options.shape, options.nodes, options.context, options.layers, options.repeats, device
        )
    write_rows(options.out, rows, device)


if __name__ == "__main__":
    exit_with_reason(main)
