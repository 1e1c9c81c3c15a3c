"""Norms, gates, activations and the end of a tree call in plain PyTorch: twins of `pointwise.py`.

Norms and gates are computed in fp32, or in fp64 when the inputs are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stree_kernels.contracts import Added, CacheState
from stree_kernels.naive.dtypes import widened


def add_rms_norm(
    x: Tensor, added: Added, weight: Tensor, eps: float, beside: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return x + added and its root-mean-square norm, each (…, D) in x's dtype.

    Args:
        x: (…, D).
        added: (S, …, D), parts of a sum as `linear_parts` returns them, or several such; None adds
            nothing.
        weight: (D,), or (D + E,) with `beside`.
        eps: Of the norm.
        beside: (…, E); the norm is then of [x + added, beside], (…, D + E). None is none.
    """
    if isinstance(added, tuple):
        added = torch.cat(added)
    if added is not None:
        x = x + (added[0] if added.shape[0] == 1 else added.sum(0).to(x.dtype))
    return x, rms_norm(x if beside is None else torch.cat([x, beside], dim=-1), weight, eps)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, groups: int = 1, gate: Tensor | None = None
) -> Tensor:
    """Return the root-mean-square norm of x·silu(gate), (…, D) in x's dtype, by groups."""
    wide = widened(x)
    if gate is not None:
        wide = wide * F.silu(widened(gate))
    grouped = wide if groups == 1 else wide.unflatten(-1, (groups, -1))
    # Fewer operations than mean() or F.rms_norm, which count where rows are few
    norm = torch.linalg.vector_norm(grouped, dim=-1, keepdim=True)
    mean = torch.full_like(norm, eps).addcmul_(norm, norm, value=1 / grouped.shape[-1])
    normed = grouped * mean.rsqrt_()
    normed = normed if groups == 1 else normed.flatten(-2)
    if weight.dtype == x.dtype == normed.dtype:
        return normed * weight
    normed = normed.to(x.dtype)
    # Rounded before it is scaled, and a scale in more bits than x is not rounded before
    dtype = torch.promote_types(weight.dtype, x.dtype)
    return (weight.to(dtype) * normed).to(x.dtype)


def gated_rms_norm(y: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
    """Return Mamba-2's norm of y·silu(gate), both (…, C), over groups of channels."""
    return rms_norm(y, weight, eps, groups, gate)


def gate_normed(y: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm each head's channels, then multiply by silu(gate): y, gate (…, H·V), weight (V,)."""
    return gated(rms_norm(y.unflatten(-1, (-1, len(weight))), weight, eps).flatten(-2), gate)


def gated(y: Tensor, gate: Tensor) -> Tensor:
    """Return y·silu(gate) in y's dtype."""
    return (widened(y) * F.silu(widened(gate))).to(y.dtype)


def norm_heads(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, num_k: int) -> Tensor:
    """Norm each head of q and k in qkv (…, (H + 2·num_k)·P), with one weight (P,) each; v stays."""
    heads = qkv.unflatten(-1, (-1, len(q_weight)))
    q, k, v = heads.split([heads.shape[-2] - 2 * num_k, num_k, num_k], dim=-2)
    q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    return torch.cat([q, k, v], dim=-2).flatten(-2)


def sigmoid_gated(y: Tensor, gate: Tensor) -> Tensor:
    """Return y·sigmoid(gate) in y's dtype."""
    return (widened(y) * widened(gate).sigmoid()).to(y.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate)·up (…, I) of gate and up side by side, (…, 2·I)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def activated(y: Tensor, kind: str) -> Tensor:
    """Return an MLP's inner values (…, I) of gate and up side by side, (…, 2·I), or up alone."""
    if kind == "relu2":
        return F.relu(y).square()
    if kind == "gelu":
        return F.gelu(y)
    if kind == "swiglu":
        return swiglu(y)
    gate, up = y.chunk(2, dim=-1)
    return F.gelu(gate) * up


def advance(cache_state: CacheState) -> None:
    """End a tree call: commit the path that it replayed, and make its tree the last one."""
    cache_state.length.add_(cache_state.path_length)
    cache_state.path_length.zero_()
    cache_state.parity.bitwise_xor_(1)
