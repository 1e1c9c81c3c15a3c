"""The ops of a tree call: Triton on CUDA in 16 or 32 bits, else plain PyTorch (`naive`).

Both give the same results up to rounding. This is the one place that chooses.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import warnings
from typing import Any

import torch
from torch import Tensor

from stree_kernels import naive
from stree_kernels.shapes import (
    Added,
    Derived,
    Drafts,
    Gated,
    GatedDeltaShape,
    GatedDeltaWeights,
    MixerShape,
    MixerWeights,
    Router,
    Sampling,
    Scaled,
    Steering,
    Stream,
    Topology,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_DIM = 256  # of a head or a state: larger tiles do not fit a multiprocessor's registers
BUCKET = 256  # cache slots, of which plain PyTorch reads a multiple in a graph


def fused(device: torch.device, dtype: torch.dtype, largest_dim: int = 0) -> bool:
    """Whether the Triton kernels serve this device, type and largest head or state dimension.

    `STREE_KERNELS=naive` in the environment says no, for comparisons. A CUDA device that they
    cannot serve is warned about once a reason.
    """
    if device.type != "cuda" or os.environ.get("STREE_KERNELS") == "naive":
        return False
    if importlib.util.find_spec("triton") is None:
        reason = "triton is not installed"
    elif dtype not in DTYPES:
        reason = f"they have no {dtype}"
    elif torch.cuda.get_device_capability(device) < (8, 0):
        reason = f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    elif largest_dim > MAX_DIM:
        reason = f"a dimension of {largest_dim} is above their {MAX_DIM}"
    else:
        return True
    _warn_once(f"decoding runs on plain PyTorch, not on the fused kernels: {reason}")
    return False


def current(device: torch.device) -> torch.cuda.device:
    """Inside, this GPU is the current one, to which Triton launches, streams, events and graphs go
    whatever GPU their tensors are on. Nothing for other devices."""
    return torch.cuda.device(device if device.type == "cuda" else -1)


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)


def _module(name: str, tensor: Tensor, largest_dim: int = 0) -> Any:
    """The Triton module of an op, imported when first needed, or `naive`."""
    if fused(tensor.device, tensor.dtype, largest_dim):
        return importlib.import_module(f"stree_kernels.{name}")
    return naive


def new_derived(shape: MixerShape | GatedDeltaShape, rows: Tensor) -> Derived | None:
    """What calls of such a mixer keep of nodes beside their raw inputs `rows` (2, B, W − 1 + N, C):
    zeros, or None where they keep nothing."""
    if not fused(rows.device, rows.dtype, shape.largest_dim):
        return None
    batch, num_nodes = rows.shape[1], rows.shape[2] - shape.tail
    return Derived(
        rows.new_zeros(2, batch, num_nodes, sum(shape.conv_dims[:2])),
        rows.new_zeros(2, batch, 2, num_nodes, shape.num_heads, dtype=torch.float32),
    )


def bucket(num_slots: int, device: torch.device, dtype: torch.dtype) -> int:
    """In multiples of how many of num_slots cache slots captured calls read them: all at once where
    lengths on the device say what is read, else few, of which each multiple is a graph."""
    return num_slots if fused(device, dtype) else min(BUCKET, num_slots)


def mamba_tree(
    projected: Tensor,
    rows: Tensor,
    derived: Derived | None,
    state: Tensor,
    weights: MixerWeights,
    shape: MixerShape,
    topology: Topology,
    steering: Steering,
    first: int,
    out: Tensor | None = None,
) -> Tensor:
    """See `naive.mamba_tree`; `derived` is from `new_derived`."""
    arguments = (state, weights, shape, topology, steering)
    if not fused(projected.device, projected.dtype, shape.largest_dim):
        return naive.mamba_tree(projected, rows, *arguments, first, out)
    if first == 0 and topology.depths.shape[1] == 1:  # one token a sequence: an ordinary step
        module = importlib.import_module("stree_kernels.chain_scan")
        return module.mamba_chain(projected, rows, derived, *arguments, out)
    module = importlib.import_module("stree_kernels.tree_scan")
    return module.mamba_tree(projected, rows, derived, *arguments, first, out)


def gated_delta_tree(
    projected: Tensor,
    rows: Tensor,
    derived: Derived | None,
    updates: Tensor,
    state: Tensor,
    weights: GatedDeltaWeights,
    shape: GatedDeltaShape,
    topology: Topology,
    steering: Steering,
    first: int,
) -> Tensor:
    """See `naive.gated_delta_tree`; `derived` is from `new_derived`."""
    arguments = (updates, state, weights, shape, topology, steering, first)
    if not fused(projected.device, projected.dtype, shape.largest_dim):
        return naive.gated_delta_tree(projected, rows, *arguments)
    if first == 0 and topology.depths.shape[1] == 1:  # one token a sequence: an ordinary step
        module = importlib.import_module("stree_kernels.gated_delta_chain")
        return module.gated_delta_chain(projected, rows, derived, *arguments[:-1])
    module = importlib.import_module("stree_kernels.gated_delta_tree")
    return module.gated_delta_tree(projected, rows, derived, *arguments)


def attend_tree(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    rotary: Tensor,
    topology: Topology,
    steering: Steering,
    first: int,
    bound: int,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `naive.attend_tree`."""
    module = _module("tree_attention", qkv, keys.shape[3])
    where = (topology, steering, first, bound, scale, out)
    return module.attend_tree(qkv, keys, values, rotary, *where)


def short_conv_tree(
    projected: Tensor,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    topology: Topology,
    steering: Steering,
    first: int,
) -> Tensor:
    """See `naive.short_conv_tree`."""
    module = _module("short_conv", projected)
    return module.short_conv_tree(projected, rows, weight, bias, topology, steering, first)


def add_rms_norm(
    x: Tensor, added: Added, weight: Tensor, eps: float, beside: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `naive.add_rms_norm`."""
    return _module("pointwise", x).add_rms_norm(x, added, weight, eps, beside)


def gated_rms_norm(y: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
    """See `naive.gated_rms_norm`."""
    return _module("pointwise", y).gated_rms_norm(y, gate, weight, eps, groups)


def gate_normed(y: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `naive.gate_normed`."""
    return _module("pointwise", y).gate_normed(y, gate, weight, eps)


def norm_heads(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, num_k: int) -> Tensor:
    """See `naive.norm_heads`."""
    return _module("pointwise", qkv).norm_heads(qkv, q_weight, k_weight, eps, num_k)


def gated(y: Tensor, gate: Tensor) -> Tensor:
    """See `naive.gated`."""
    return _module("pointwise", y).gated(y, gate)


def sigmoid_gated(y: Tensor, gate: Tensor) -> Tensor:
    """See `naive.sigmoid_gated`."""
    return _module("pointwise", y).sigmoid_gated(y, gate)


def norm(stream: Stream) -> Tensor:
    """See `naive.norm`."""
    return _module("short_products", stream.source).norm(stream)


def linear(x: Tensor | Stream, weight: Tensor | Scaled) -> Tensor:
    """See `naive.linear`."""
    if isinstance(weight, Scaled):
        x = norm(x) if isinstance(x, Stream) else x
        return _module("scaled_products", x).linear(x, weight)
    return _module("short_products", weight).linear(x, weight)


def linear_wide(x: Tensor, weight: Tensor) -> Tensor:
    """See `naive.linear_wide`."""
    return _module("products", x).linear_wide(x, weight)


def laid(weight: Tensor) -> Tensor:
    """See `naive.laid`."""
    return _module("products", weight).laid(weight)


def linear_parts(x: Tensor | Gated, weight: Tensor) -> Tensor:
    """See `naive.linear_parts`."""
    return _module("short_products", weight).linear_parts(x, weight)


def activated(y: Tensor, kind: str) -> Tensor:
    """See `naive.activated`."""
    return _module("pointwise", y).activated(y, kind)


def linear_swiglu(x: Tensor | Stream, weight: Tensor) -> Tensor:
    """See `naive.linear_swiglu`."""
    return _module("short_products", weight).linear_swiglu(x, weight)


def linear_adapted(x: Tensor, weight: Tensor, low: Tensor, up: Tensor, kind: str) -> Tensor:
    """See `naive.linear_adapted`."""
    return _module("products", x).linear_adapted(x, weight, low, up, kind)


def choose_experts(
    logits: Tensor, correction: Tensor | None, router: Router
) -> tuple[Tensor, Tensor]:
    """See `naive.choose_experts`."""
    return _module("experts", logits).choose_experts(logits, correction, router)


def experts(
    rows: Tensor, weights: Tensor, chosen: Tensor, up: Tensor, down: Tensor, kind: str
) -> Tensor:
    """See `naive.experts`."""
    return _module("experts", rows).experts(rows, weights, chosen, up, down, kind)


def advance(steering: Steering, like: Tensor) -> None:
    """See `naive.advance`; `like` is a tensor of the call that ends."""
    _module("pointwise", like).advance(steering)


def choose_best(logits: Tensor, depths: Tensor, sampling: Sampling | None) -> tuple[Tensor, Tensor]:
    """See `naive.choose_best`."""
    return _module("top", logits).choose_best(logits, depths, sampling)


def choose_children(
    logits: Tensor,
    depths: Tensor,
    sampling: Sampling | None,
    places: Tensor,
    tokens: Tensor,
    finite: Tensor,
    nodes: Tensor | None = None,
    values: Tensor | None = None,
    ids: Tensor | None = None,
) -> None:
    """See `naive.choose_children`."""
    module = _module("top", logits)
    module.choose_children(logits, depths, sampling, places, tokens, finite, nodes, values, ids)


def draw_children(
    x: Tensor | Stream,
    weight: Tensor | Scaled,
    depths: Tensor,
    sampling: Sampling | None,
    places: Tensor,
    tokens: Tensor,
    finite: Tensor,
    nodes: Tensor | None = None,
    values: Tensor | None = None,
    ids: Tensor | None = None,
) -> Tensor:
    """See `naive.draw_children`."""
    if isinstance(weight, Tensor) and fused(weight.device, weight.dtype):
        head = importlib.import_module("stree_kernels.head")
        if head.fits(x, weight, places, values):
            return head.draw_children(x, weight, depths, sampling, places, tokens, finite, ids)
    logits = linear(x, weight)
    choose_children(logits, depths, sampling, places, tokens, finite, nodes, values, ids)
    return logits


def build_topology(parents: Tensor, max_depth: int, topology: Topology) -> None:
    """See `naive.build_topology`."""
    _growth(parents).build_topology(parents, max_depth, topology)


def pick_level(
    values: Tensor, drawn_by: Tensor, first: int, end: int, picks: Tensor, parents: Tensor
) -> None:
    """See `naive.pick_level`."""
    _growth(values).pick_level(values, drawn_by, first, end, picks, parents)


def pick_tree(values: Tensor, *others: Tensor) -> None:
    """See `naive.pick_tree`."""
    _growth(values).pick_tree(values, *others)


def _growth(tensor: Tensor) -> Any:
    fits = fused(tensor.device, torch.float32)
    return importlib.import_module("stree_kernels.growth") if fits else naive


def norm_at(x: Tensor, nodes: Tensor, scale: Tensor, eps: float, groups: int) -> Tensor:
    """See `naive.norm_at`."""
    return _module("gather", x).norm_at(x, nodes, scale, eps, groups)


def take_roots(
    stream: Stream, block: Tensor, active: Tensor, tokens: Tensor, steering: Steering
) -> Tensor:
    """See `naive.take_roots`."""
    return _module("gather", stream.source).take_roots(stream, block, active, tokens, steering)


def accept_choices(best: Tensor, highest: Tensor, *others: Tensor | None) -> None:
    """See `naive.accept_choices`."""
    fits = fused(highest.device, torch.float32)
    module = importlib.import_module("stree_kernels.accept") if fits else naive
    module.accept_choices(best, highest, *others)


def accept_drafts(
    rule: str,
    logits: Tensor,
    drafts: Drafts,
    sampling: Sampling,
    active: Tensor,
    path: Tensor,
    path_length: Tensor,
    block: Tensor,
    root: Tensor,
    report: Tensor,
    choose: naive.Choose | None = None,
) -> None:
    """See `naive.accept_drafts`; where choices are made for it, it makes them."""
    committed = (active, path, path_length, block, root, report)
    if choose is not None or not fused(logits.device, logits.dtype):
        naive.accept_drafts(rule, logits, drafts, sampling, *committed, choose=choose)
        return
    module = importlib.import_module("stree_kernels.verification")
    module.accept_drafts(rule, logits, drafts, sampling, *committed)
