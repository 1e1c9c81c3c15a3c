"""Mamba-1 in plain PyTorch: its scan over a sequence, and a layer's tree call in two parts.

The functions are the twins of `mamba1/scan.py` and `mamba1/tree.py`.

Each channel c has a state of S numbers with decays of its own (Gu and Dao 2023, Algorithm 2):

    h_t = exp(dt_t·A)·h_{t−1} + dt_t·x_t·B_t,  y_t = h_t·C_t + D·x_t

with A (E, S), so that no product of matrices computes a chunk. dt, B and C are products of x after
the conv: hence a tree call is `mamba1_advance`, these products, and `mamba1_scan`.

Shapes: B batch, T tokens, N tree nodes, Q new nodes, E channels, S state, R rank of dt, W conv
width, K places of an accepted path. Sums run in fp32, or in fp64 when the inputs are.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stree_kernels.contracts import CacheState, Mamba1Held, Mamba1Weights, Topology
from stree_kernels.index_plan import accepted_path
from stree_kernels.naive.conv import convolve
from stree_kernels.naive.dtypes import accumulation_dtype, as_dtype, widened
from stree_kernels.naive.pointwise import gated
from stree_kernels.shapes import Mamba1Shape

CHUNK = 32  # tokens that a scan takes at a time


def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *,
    initial_state: Tensor | None = None, segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute Mamba-1's recurrence over a sequence, without D, token by token.

    Args:
        x: (B, T, E).
        dt: (B, T, E) after softplus.
        A: (E, S), negative.
        B: (B, T, S).
        C: (B, T, S).
        initial_state: (B, E, S), which reaches the first segment only; None is zeros.
        segment_ids: (B, T) non-decreasing: a token sees its own segment only; None is one segment.

    Returns y (B, T, E) in x's dtype and the state after the last token, (B, E, S).
    """
    out_dtype, dtype = x.dtype, accumulation_dtype(x.dtype)
    x, dt, A, B, C = (as_dtype(part, dtype) for part in (x, dt, A, B, C))
    state = x.new_zeros(len(x), *A.shape) if initial_state is None else initial_state.to(dtype)
    carried = torch.ones_like(dt[:, :, :1])  # 0 where a token begins a segment
    if segment_ids is not None:
        carried[:, 1:, 0] = (segment_ids[:, 1:] == segment_ids[:, :-1]).to(dtype)
    parts = (part.split(CHUNK, dim=1) for part in (dt, dt * x, B, C, carried))
    scan: Any = _scan_chunk
    outputs = []
    if torch.is_grad_enabled():  # keeps states between chunks only
        scan = partial(checkpoint, scan, use_reentrant=False, preserve_rng_state=False)
    for chunk in zip(*parts, strict=True):
        y, state = scan(state, A, *chunk)
        outputs.append(y)
    return torch.cat(outputs, dim=1).to(out_dtype), state


def _scan_chunk(
    state: Tensor, A: Tensor, dt: Tensor, written: Tensor, B: Tensor, C: Tensor, carried: Tensor
) -> tuple[Tensor, Tensor]:
    """Return y (B, T, E) of some tokens, and the state after them."""
    outputs = []
    for t in range(dt.shape[1]):
        state = advanced_by_token(state * carried[:, t, None], dt[:, t], written[:, t], A, B[:, t])
        outputs.append(torch.einsum("bes,bs->be", state, C[:, t]))
    return torch.stack(outputs, dim=1), state


def advanced_by_token(state: Tensor, dt: Tensor, written: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """Return the states (B, E, S) after one more token each, whose dt·x (B, E) is `written`."""
    decay = (dt[..., None] * A).exp()
    return decay * state + written[..., None] * B[:, None]


def mamba1_advance(
    inputs: Tensor, held: Mamba1Held, weights: Mamba1Weights, shape: Mamba1Shape,
    topology: Topology, cache_state: CacheState, num_read: int,
) -> Tensor:
    """Replay the accepted path, and compute the conv of nodes num_read … num_read + Q − 1 of trees.

    With num_read = 0 a new tree begins: the last one's accepted path advances state and conv state
    in place. Else the tree continues. The nodes' inputs are kept.

    Args:
        inputs: (B, Q, E), x as projected.

    Returns x after conv and SiLU, (B, Q, E).
    """
    if num_read == 0:
        mamba1_replay(held, weights, shape, cache_state)
    last = num_read + inputs.shape[1]
    held.inputs[:, num_read:last] = inputs
    return _convolved(held, weights, topology, cache_state, num_read, last)


def mamba1_scan(
    x: Tensor, selected: Tensor, dt: Tensor, gate: Tensor, held: Mamba1Held,
    weights: Mamba1Weights, shape: Mamba1Shape, topology: Topology, cache_state: CacheState,
    num_read: int, out: Tensor | None = None,
) -> Tensor:
    """Compute the scan of nodes num_read … num_read + Q − 1 of trees, after `mamba1_advance`.

    y_i = C_i·h_i + D·x_i, where h_i is the state after node i's ancestors and itself, from the
    committed state, which stays. The nodes' dt and B are kept.

    Args:
        x: (B, Q, E) after the conv.
        selected: (B, Q, R + 2·S): dt of low rank, B and C, before norms.
        dt: (B, Q, E), the product with low-rank dt before its norm, bias and softplus.
        gate: (B, Q, E), z.
        out: (B, Q, E), written; None returns a new tensor.

    Returns y·silu(z), (B, Q, E), in x's dtype.
    """
    last = num_read + x.shape[1]
    low, B, C = selected.split(shape.selected_dims, dim=-1)
    if shape.norm_eps is not None:
        dt = dt * root_mean_square(low, shape.norm_eps).reciprocal()
        B, C = (part / root_mean_square(part, shape.norm_eps) for part in (B, C))
    if weights.c_scale is not None:
        C = C * widened(weights.c_scale)
    held.dt[:, num_read:last] = dt
    held.B[:, num_read:last] = B
    seen = x if num_read == 0 else _convolved(held, weights, topology, cache_state, 0, last)
    A = -widened(weights.A_log).exp()
    steps = mamba1_dt(held.dt[:, :last], weights)
    written = steps * widened(seen)
    windows = topology.windows.index_select(0, cache_state.variant)
    # A node's parent is the last input before its own; the root's is the committed state, place 0
    parents = (windows[:, :last, -2].long() - shape.tail + 1).clamp(min=0)
    rows = torch.arange(len(x), device=x.device)
    states = held.state.new_zeros(len(x), last + 1, *held.state.shape[1:])
    states[:, 0] = held.state
    for node in range(last):
        above = states[rows, parents[:, node].clamp(max=node)]
        states[:, node + 1] = advanced_by_token(
            above, steps[:, node], written[:, node], A, widened(held.B[:, node])
        )
    y = torch.einsum("bnes,bns->bne", states[:, num_read + 1 :], as_dtype(C, states.dtype))
    y = gated((y + widened(weights.D) * x).to(x.dtype), gate)
    return y if out is None else out.copy_(y)


def mamba1_replay(
    held: Mamba1Held, weights: Mamba1Weights, shape: Mamba1Shape, cache_state: CacheState
) -> None:
    """Advance state and conv state, in place, along the accepted path of the last tree."""
    path, counts = accepted_path(cache_state)
    rows = torch.arange(len(path), device=path.device)[:, None]
    inputs, dt, B = (each[rows, path] for each in (held.inputs, held.dt, held.B))
    if counts is not None:  # where(), not a product: an uncounted place may hold anything, NaN too
        inputs, B = (torch.where(counts[..., None], each, 0.0) for each in (inputs, B))
    line = torch.cat([held.conv_state, inputs], dim=1)
    seen = line.unfold(1, shape.width, 1).mT
    x = F.silu(convolve(seen, weights.conv, weights.conv_bias))
    steps = mamba1_dt(dt, weights)
    if counts is not None:
        steps = torch.where(counts[..., None], steps, 0.0)
    A, state, written = -widened(weights.A_log).exp(), widened(held.state), steps * widened(x)
    for k in range(path.shape[1]):
        state = advanced_by_token(state, steps[:, k], written[:, k], A, widened(B[:, k]))
    held.state.copy_(state)
    newest = cache_state.path_length[:, None] + torch.arange(shape.tail, device=path.device)
    held.conv_state.copy_(line[rows, newest])


def _convolved(
    held: Mamba1Held, weights: Mamba1Weights, topology: Topology, cache_state: CacheState,
    num_read: int, last: int,
) -> Tensor:
    """Return silu(conv) (B, last − first, E) of nodes whose inputs are kept."""
    windows = topology.windows.index_select(0, cache_state.variant)[:, num_read:last].long()
    line = torch.cat([held.conv_state, held.inputs[:, :last]], dim=1)
    rows = torch.arange(len(line), device=line.device)[:, None, None]
    return F.silu(convolve(line[rows, windows], weights.conv, weights.conv_bias))


def mamba1_dt(dt: Tensor, weights: Mamba1Weights) -> Tensor:
    """Return dt (…, E) after bias and softplus, in the accumulation dtype."""
    return F.softplus(widened(dt) + widened(weights.dt_bias))


def root_mean_square(x: Tensor, eps: float) -> Tensor:
    """Return the root mean square (…, 1) of the last dimension, in the accumulation dtype."""
    return (widened(x).square().mean(-1, keepdim=True) + eps).sqrt()
