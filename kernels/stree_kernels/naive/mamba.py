"""Mamba-2 in plain PyTorch: its scans, and a layer's tree call.

The functions are the twins of `conv/tree_conv.py` and of `mamba/`.

Shapes: B batch, T tokens, N tree nodes, H heads, P head dim, S state, G groups, C channels,
W conv width, K places of an accepted path.

x, B and C come in groups (their own number each): head h reads group h // (H // G).
Sums run in fp32, or in fp64 when the inputs are. The derivation is in kernels/README.md.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from stree_kernels.contracts import CacheState, Derived, MixerWeights, Topology
from stree_kernels.index_plan import ancestors_of, conv_places, path_places
from stree_kernels.naive.conv import convolve, held_at, kept_of, seen_of, write_kept
from stree_kernels.naive.dtypes import as_dtype, widened
from stree_kernels.naive.pointwise import gated
from stree_kernels.shapes import MixerShape


def chunk_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, *,
    chunk_size: int = 64, initial_state: Tensor | None = None, segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute Mamba-2's recurrence over a sequence, in chunks (SSD: Dao and Gu 2024, section 6).

    h_t = exp(dt_t·A)·h_{t−1} + dt_t·x_t ⊗ B_t,  y_t = h_t·C_t + D·x_t

    Args:
        x: (B, T, Gx, P).
        dt: (B, T, H) after softplus.
        A: (H,), negative.
        B: (B, T, Gb, S).
        C: (B, T, Gc, S).
        D: (H,).
        initial_state: (B, H, P, S), which reaches the first segment only; None is zeros.
        segment_ids: (B, T) non-decreasing: a token sees its own segment only; None is one segment.

    Returns y (B, T, H, P) in x's dtype and the state after the last token, (B, H, P, S).
    """
    batch, length, num_heads = dt.shape
    chunk_size = min(chunk_size, length)
    padding = -length % chunk_size
    out_dtype = x.dtype
    x, B, C = (_per_head(part, num_heads) for part in (x, B, C))
    dt = dt.to(x.dtype)
    skip = x * D.to(x.dtype)[:, None] if D is not None else None
    if segment_ids is None:
        segment_ids = torch.zeros(batch, length, dtype=torch.long, device=x.device)
    if padding:  # dt = 0 neither decays nor adds, so padding leaves the state alone
        x, B, C = (F.pad(part, (0, 0, 0, 0, 0, padding)) for part in (x, B, C))
        dt = F.pad(dt, (0, 0, 0, padding))
        segment_ids = torch.cat([segment_ids, segment_ids[:, -1:].expand(-1, padding)], dim=1)
    num_chunks = x.shape[1] // chunk_size

    def chunks(part: Tensor) -> Tensor:
        return part.unflatten(1, (num_chunks, chunk_size))

    x, dt, B, C, segments = (chunks(part) for part in (x * dt[..., None], dt, B, C, segment_ids))
    log_decay = (dt * A.to(dt.dtype)).cumsum(2)  # (B, chunks, Q, H), from the chunk's start

    # 1. Within a chunk: y_i += Σ_{j ≤ i} exp(c_i − c_j) (C_i·B_j) x_j
    causal = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=x.device).tril()
    same_segment = segments[:, :, :, None] == segments[:, :, None, :]
    difference = log_decay.transpose(2, 3)[..., :, None] - log_decay.transpose(2, 3)[..., None, :]
    visible = (causal & same_segment)[:, :, None]
    weights = difference.masked_fill(~visible, -torch.inf).exp()  # (B, chunks, H, Q, Q)
    scores = torch.einsum("bcihs,bcjhs->bchij", C, B)
    y = torch.einsum("bchij,bcjhp->bcihp", scores * weights, x)

    # 2. What each chunk leaves behind at its end
    last = segments[:, :, -1:]
    to_end = (log_decay[:, :, -1:] - log_decay).exp() * (segments == last)[..., None]
    left = torch.einsum("bcjh,bcjhp,bcjhs->bchps", to_end, x, B)

    # 3. States at chunk starts: the recurrence over chunks
    state = x.new_zeros(left[:, 0].shape) if initial_state is None else initial_state.to(x.dtype)
    carried_segment = segments[:, 0, 0]
    starts, carried = [], []
    for chunk in range(num_chunks):
        starts.append(state)
        carried.append(carried_segment)
        survives = (last[:, chunk, 0] == carried_segment)[:, None]
        decay = log_decay[:, chunk, -1].exp() * survives
        state = decay[..., None, None] * state + left[:, chunk]
        carried_segment = last[:, chunk, 0]

    # 4. What they give to the tokens of their segment
    reaches = segments == torch.stack(carried, dim=1)[..., None]
    from_start = log_decay.exp() * reaches[..., None]
    start_states = torch.stack(starts, dim=1)
    y = y + torch.einsum("bcihs,bchps->bcihp", C, start_states) * from_start[..., None]
    y = y.flatten(1, 2)[:, :length]
    if skip is not None:
        y = y + skip
    return y.to(out_dtype), state


def _per_head(grouped: Tensor, num_heads: int) -> Tensor:
    """Repeat the groups of (..., G, X) to heads (..., H, X), in the accumulation dtype."""
    repeats = num_heads // grouped.shape[-2]
    grouped = widened(grouped)
    return grouped if repeats == 1 else grouped.repeat_interleave(repeats, dim=-2)


def tree_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, ancestors: Tensor,
    state: Tensor,
) -> Tensor:
    """Compute the outputs of the last Q nodes of a token tree from one state (STree, Eq. 5-6).

    Args:
        x: (B, N, Gx, P).
        dt: (B, N, H).
        A: (H,).
        B: (B, N, Gb, S).
        C: (B, Q, Gc, S).
        D: (H,).
        ancestors: (B, N, N), 1 or true at [i, j] when j is i or an ancestor of i.
        state: (B, H, P, S), which stays; `replay` advances it.

    Returns y (B, Q, H, P) in x's dtype.
    """
    batch, num_nodes, num_heads = dt.shape
    num_new, out_dtype = C.shape[1], x.dtype
    x_groups, b_groups, c_groups = x.shape[2], B.shape[2], C.shape[2]
    # (B · G, nodes, …): heads of a group are rows of one product
    x, B, C = (widened(part).transpose(1, 2).flatten(0, 1) for part in (x, B, C))
    dtype = x.dtype
    dt, A, ancestors = (as_dtype(part, dtype) for part in (dt, A, ancestors))
    log_decay = (dt * A).transpose(1, 2)
    weights = dt.transpose(1, 2)[:, :, None]
    if num_nodes == 1:  # a root has no ancestors to sum over
        from_root = log_decay[..., None]
    else:
        log_decay = torch.bmm(log_decay, ancestors.mT)  # (B, H, N), from the root
        from_root = log_decay[..., num_nodes - num_new :, None]
        # No decay along a path is positive; off the mask it can be, and overflow
        decays = (from_root - log_decay[:, :, None]).clamp_(max=0).exp_()
        weights = decays.mul_(weights).mul_(ancestors[:, None, num_nodes - num_new :])
    groups = math.lcm(b_groups, c_groups)
    scores = torch.bmm(_repeated(C, groups // c_groups), _repeated(B, groups // b_groups).mT)
    weights = weights.reshape(batch * groups, -1, num_new, num_nodes) * scores[:, None]
    state = as_dtype(state, dtype).view(batch * c_groups, -1, state.shape[-1])
    from_state = torch.bmm(C, state.mT).view(*C.shape[:2], num_heads // c_groups, -1)
    y = from_state.transpose(1, 2).reshape(batch, num_heads, num_new, -1) * from_root.exp()
    y = y.reshape(batch * x_groups, -1, y.shape[-1])
    y = y.baddbmm_(weights.view(batch * x_groups, -1, num_nodes), x)
    y = y.view(batch, x_groups, -1, num_new, y.shape[-1])
    if D is not None:
        new = x.narrow(1, num_nodes - num_new, num_new).view(batch, x_groups, 1, num_new, -1)
        y = y.addcmul_(new, as_dtype(D, dtype).view(x_groups, -1, 1, 1))
    y = y.flatten(1, 2).transpose(1, 2)
    return as_dtype(y, out_dtype)


def replay(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, counts: Tensor | None
) -> None:
    """Advance a state, in place, along an accepted path, from the inputs that the tree's call kept.

    h ← exp(Σ_k a_k)·h + Σ_k exp(Σ_{m>k} a_m)·dt_k·x_k ⊗ B_k  (activation replay: Wu et al. 2024)

    Args:
        state: (B, H, P, S) in fp32 or wider.
        x: (B, K, Gx, P) along the path.
        dt: (B, K, H) along the path.
        A: (H,).
        B: (B, K, Gb, S) along the path.
        counts: (B, K) bool, nodes that are accepted (a row without any keeps its state); None is
            all.
    """
    x, dt, B, A = (as_dtype(part, state.dtype) for part in (x, dt, B, A))
    if counts is not None:  # where(), not a product: an uncounted place may hold anything, NaN too
        x, B = (torch.where(counts[..., None, None], part, 0.0) for part in (x, B))
        dt = torch.where(counts[..., None], dt, 0.0)
    batch, length, groups = B.shape[:3]
    log_decay = dt * A
    if length == 1:
        total, steps = log_decay, dt
    else:
        total = log_decay.sum(1, keepdim=True)
        steps = (total - log_decay.cumsum(1)).exp_() * dt
    x = x[:, :, :, None] * steps.view(batch, length, x.shape[2], -1, 1)  # (B, K, Gx, H / Gx, P)
    x = x.view(batch, length, groups, -1).permute(0, 2, 3, 1).flatten(0, 1)  # (B · Gb, …, K)
    state.mul_(total.exp_().view(batch, -1, 1, 1))
    state.view(batch * groups, -1, state.shape[-1]).baddbmm_(x, B.transpose(1, 2).flatten(0, 1))


def _repeated(grouped: Tensor, repeats: int) -> Tensor:
    """Repeat each of (G, …) after itself, to (G · repeats, …)."""
    return grouped if repeats == 1 else grouped.repeat_interleave(repeats, dim=0)


def mamba_tree(
    projected: Tensor, history: Tensor, derived: Derived | None, state: Tensor,
    weights: MixerWeights, shape: MixerShape, topology: Topology, cache_state: CacheState,
    num_read: int, out: Tensor | None = None,
) -> Tensor:
    """Compute conv and scan between a Mamba-2 layer's projections, for Q new nodes of trees.

    They come after the num_read nodes that earlier calls have read. With num_read = 0 a new tree
    begins: the last one's accepted path is replayed into the state, and the new one's inputs go to
    the other half of `history`. Else the tree continues. Writes `history` and `state`.

    Args:
        projected: (B, Q, H·P + C + H), z, and the inputs that `history` keeps.
        history: (2, B, W − 1 + N, C + H), two halves of raw conv inputs and dt of [conv state,
            nodes]; `cache_state.parity` names the last tree's, and the caller flips it after all
            layers.
        derived: Written by the kernels (`ops.new_derived`); plain PyTorch needs none.
        state: (B, H, P, S).
        out: (B, Q, H·P), written; None returns a new tensor.

    Returns y (B, Q, H·P) in projected's dtype, gated if `shape` says so.
    """
    num_new = projected.shape[1]
    places = conv_places(history, shape.tail, topology, cache_state, 0, num_read, num_new)
    line = torch.cat([held_at(history, places.before), projected[..., shape.d_inner :]], dim=1)
    write_kept(history, places, line)
    x, dt, B, C = _scan_inputs(seen_of(line, places.windows, shape.width), weights, shape)
    A, path = _negative(weights.A_log), places.path
    if num_read == 0:
        replay(state, x[:, :path], dt[:, :path], A, B[:, :path], places.counts)
        x, dt, B = x[:, path:], dt[:, path:], B[:, path:]
    ancestors = ancestors_of(topology, cache_state, num_read, num_new, dt.dtype)
    C = C.narrow(1, path + num_read, num_new)
    y = tree_scan(x, dt, A, B, C, weights.D, ancestors, state).flatten(-2)
    if shape.gated:
        y = gated(y, projected[..., : shape.d_inner])
    return y if out is None else out.copy_(y)


def mamba_replay(
    history: Tensor, state: Tensor, weights: MixerWeights, shape: MixerShape,
    cache_state: CacheState,
) -> Tensor:
    """Advance a layer's state, in place, along the accepted path of the tree that `history` holds.

    Args as in `mamba_tree`. Returns the new conv state with dt, (B, W − 1, C + H), for the caller
    to write.
    """
    places = path_places(history, shape.tail, cache_state)
    line = held_at(history, places.before)
    x, dt, B, _ = _scan_inputs(seen_of(line, places.windows, shape.width), weights, shape)
    replay(state, x, dt, _negative(weights.A_log), B, places.counts)
    return kept_of(line, places)


def _negative(A_log: Tensor) -> Tensor:
    """Return A (H,), negative."""
    return widened(A_log).exp().neg_()


def _scan_inputs(
    seen: Tensor, weights: MixerWeights, shape: MixerShape
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x (B, n, Gx, P), dt (B, n, H), B (B, n, Gb, S) and C (B, n, Gc, S) of n nodes.

    They are computed from the entries (B, n, W, C + H) of `history` in each node's window.
    """
    inputs = conv_channels(seen.narrow(-1, 0, shape.num_channels), shape)
    convolved = F.silu(convolve(inputs, weights.conv, weights.conv_bias))
    dt = positive_dt(seen[:, :, -1, shape.num_channels :], weights, shape)
    x, B, C = split_channels(convolved, shape)
    return x, dt, B, C


def conv_channels(projected: Tensor, shape: MixerShape) -> Tensor:
    """Return projected x, B and C (…, C) for the conv, with x and B repeated a head if needed."""
    if not shape.repeat_before_conv:
        return projected
    x, B, C = projected.split(shape.xbc_dims, dim=-1)
    repeated = [
        part.unflatten(-1, (groups, -1))
        .repeat_interleave(shape.num_heads // groups, dim=-2)
        .flatten(-2)
        for part, groups in ((x, shape.x_groups), (B, shape.b_groups))
    ]
    return torch.cat([*repeated, C], dim=-1)


def split_channels(convolved: Tensor, shape: MixerShape) -> tuple[Tensor, Tensor, Tensor]:
    """Split the conv's output into x (…, Gx, P), B (…, Gb, S) and C (…, Gc, S)."""
    x_groups, b_groups, c_groups = shape.scan_groups
    x, B, C = convolved.split_with_sizes(shape.conv_dims, dim=-1)
    at = x.shape[:-1]
    return x.view(*at, x_groups, -1), B.view(*at, b_groups, -1), C.view(*at, c_groups, -1)


def positive_dt(dt: Tensor, weights: MixerWeights, shape: MixerShape) -> Tensor:
    """Return dt (…, H) after bias, softplus and clamp, in the accumulation dtype."""
    dt = F.softplus(widened(dt) + widened(weights.dt_bias))
    return dt if shape.dt_limit == (0.0, math.inf) else dt.clamp(*shape.dt_limit)
