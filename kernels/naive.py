"""Every op in plain PyTorch: the CPU path, and the oracle of the kernels beside it.

Shapes: B batch, T tokens, N tree nodes, H heads, P head dim, S state, G groups, C channels,
W conv width, K slots of an accepted path, L cache slots, D attention head dim.

x, B and C come in groups (their own number each): head h reads group h // (H // G).
Sums run in fp32, or in fp64 when the inputs are. The derivation is in README.md.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stree_kernels.places import (
    ConvPlaces,
    Index,
    ancestors_of,
    attention_places,
    conv_places,
    moved_slots,
    path_places,
)
from stree_kernels.shapes import (
    Added,
    Gated,
    MixerShape,
    MixerWeights,
    Sampling,
    Steering,
    Stream,
    Topology,
)

_WORD = 2**32 - 1
_PHILOX = (0xD2511F53, 0xCD9E8D57)  # what words 0 and 2 of a counter are multiplied by
_PHILOX_KEYS = (0x9E3779B9, 0xBB67AE85)  # what the words of a key grow by


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for anything narrower, else the dtype itself."""
    return dtype if dtype == torch.float64 else torch.float32


def widened(x: Tensor) -> Tensor:
    """x in its accumulation dtype."""
    return _as(x, accumulation_dtype(x.dtype))


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype), which is an operation even where there is nothing to do."""
    return x if x.dtype == dtype else x.to(dtype)


def _per_head(grouped: Tensor, num_heads: int) -> Tensor:
    """(..., G, X) → (..., H, X) in the accumulation dtype."""
    repeats = num_heads // grouped.shape[-2]
    grouped = widened(grouped)
    return grouped if repeats == 1 else grouped.repeat_interleave(repeats, dim=-2)


def chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mamba-2's recurrence over a sequence, in chunks (SSD: Dao and Gu 2024, section 6).

    h_t = exp(dt_t·A)·h_{t−1} + dt_t·x_t ⊗ B_t,  y_t = h_t·C_t + D·x_t

    Args: x (B, T, Gx, P), dt (B, T, H) after softplus, A (H,) negative, B (B, T, Gb, S),
    C (B, T, Gc, S), D (H,), initial_state (B, H, P, S), segment_ids (B, T) non-decreasing: a
    token sees only tokens of its own segment, and an initial state only reaches the first one.
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


def tree_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    ancestors: Tensor,
    state: Tensor,
) -> Tensor:
    """Outputs of the last Q nodes of a token tree from one state (STree, Eq. 5-6).

    Args: x (B, N, Gx, P), dt (B, N, H), A (H,), B (B, N, Gb, S), C (B, Q, Gc, S), D (H,),
    ancestors (B, N, N) with 1 or true at [i, j] when j is i or an ancestor of i, state
    (B, H, P, S).
    Returns y (B, Q, H, P) in x's dtype. The state is not written: see `replay`.
    """
    batch, num_nodes, num_heads = dt.shape
    num_new, out_dtype = C.shape[1], x.dtype
    x_groups, b_groups, c_groups = x.shape[2], B.shape[2], C.shape[2]
    # (B · G, nodes, …): heads of a group are rows of one product
    x, B, C = (widened(part).transpose(1, 2).flatten(0, 1) for part in (x, B, C))
    dtype = x.dtype
    dt, A, ancestors = (_as(part, dtype) for part in (dt, A, ancestors))
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
    state = _as(state, dtype).view(batch * c_groups, -1, state.shape[-1])
    from_state = torch.bmm(C, state.mT).view(*C.shape[:2], num_heads // c_groups, -1)
    y = from_state.transpose(1, 2).reshape(batch, num_heads, num_new, -1) * from_root.exp()
    y = y.reshape(batch * x_groups, -1, y.shape[-1])
    y = y.baddbmm_(weights.view(batch * x_groups, -1, num_nodes), x)
    y = y.view(batch, x_groups, -1, num_new, y.shape[-1])
    if D is not None:
        new = x.narrow(1, num_nodes - num_new, num_new).view(batch, x_groups, 1, num_new, -1)
        y = y.addcmul_(new, _as(D, dtype).view(x_groups, -1, 1, 1))
    y = y.flatten(1, 2).transpose(1, 2)
    return _as(y, out_dtype)


def replay(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, counts: Tensor | None
) -> None:
    """Advance a state, in place, along an accepted path, from the inputs that the tree's call kept.

    h ← exp(Σ_k a_k)·h + Σ_k exp(Σ_{m>k} a_m)·dt_k·x_k ⊗ B_k  (activation replay: Wu et al. 2024)

    Args: state (B, H, P, S) in fp32 or wider; x (B, K, Gx, P), dt (B, K, H), A (H,), B
    (B, K, Gb, S) along the path; counts (B, K) bool, the nodes that are accepted, None for all.
    A row without an accepted node keeps its state.
    """
    x, dt, B, A = (_as(part, state.dtype) for part in (x, dt, B, A))
    if counts is not None:  # where(), not a product: an uncounted slot may hold anything, NaN too
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
    """(G, …) → (G · repeats, …), each repeated after itself."""
    return grouped if repeats == 1 else grouped.repeat_interleave(repeats, dim=0)


def tree_conv(
    inputs: Tensor, tail: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor
) -> Tensor:
    """Causal depthwise convolution along each node's ancestors, before the activation.

    Args: inputs (B, N, C), tail (B, W − 1, C) the last committed inputs, weight (C, W),
    bias (C,), windows (N, W) or (B, N, W) indices into [tail, inputs], oldest first
    (`TokenTree.windows`). Returns (B, N, C) in inputs' dtype.
    """
    sequences = torch.arange(len(inputs), device=inputs.device)[:, None, None]
    seen = torch.cat([tail.to(inputs.dtype), inputs], dim=1)[sequences, windows]
    return _convolve(seen, weight, bias)


def mamba_tree(
    projected: Tensor,
    rows: Tensor,
    state: Tensor,
    weights: MixerWeights,
    shape: MixerShape,
    topology: Topology,
    steering: Steering,
    first: int,
    out: Tensor | None = None,
) -> Tensor:
    """Everything between a Mamba-2 layer's projections, for nodes first … first + Q − 1 of a tree.

    With first = 0 a new tree begins: the last one's accepted path is replayed into the state,
    and the new one's inputs go to the other half of `rows`. Else the tree grows.

    Args: projected (B, Q, H·P + C + H), z and then what `rows` keeps; rows (2, B, W − 1 + N, C + H)
    raw conv inputs and dt of [committed tail, nodes], twice: `steering.parity` says where the last
    tree is, and the caller flips it after all layers; state (B, H, P, S); out, where y
    is to be.
    Returns y (B, Q, H·P) in projected's dtype, gated if `shape` says so. Writes `rows` and `state`.
    """
    num_new = projected.shape[1]
    places = conv_places(rows, shape.tail, topology, steering, 0, first, num_new)
    line = torch.cat([_at(rows, places.before), projected[..., shape.d_inner :]], dim=1)
    _write(rows, places, line)
    x, dt, B, C = _scan_inputs(_seen(line, places.windows, shape.width), weights, shape)
    A, path = _negative(weights.A_log), places.path
    if first == 0:
        replay(state, x[:, :path], dt[:, :path], A, B[:, :path], places.counts)
        x, dt, B = x[:, path:], dt[:, path:], B[:, path:]
    ancestors = ancestors_of(topology, steering, first, num_new, dt.dtype)
    C = C.narrow(1, path + first, num_new)
    y = tree_scan(x, dt, A, B, C, weights.D, ancestors, state).flatten(-2)
    if shape.gated:
        y = gated(y, projected[..., : shape.d_inner])
    return y if out is None else out.copy_(y)


def mamba_replay(
    rows: Tensor, state: Tensor, weights: MixerWeights, shape: MixerShape, steering: Steering
) -> Tensor:
    """Advance a layer's state, in place, along the accepted path of the tree that `rows` holds.

    Args as in `mamba_tree`. Returns the new tail, (B, W − 1, C + H), which the caller writes.
    """
    places = path_places(rows, shape.tail, steering)
    line = _at(rows, places.before)
    x, dt, B, _ = _scan_inputs(_seen(line, places.windows, shape.width), weights, shape)
    replay(state, x, dt, _negative(weights.A_log), B, places.counts)
    return _kept(line, places)


def _negative(A_log: Tensor) -> Tensor:
    """A (H,)."""
    return widened(A_log).exp().neg_()


def _at(rows: Tensor, places: Tensor) -> Tensor:
    """What rows (…, C) hold at places (…), counted through all but their last dim: (…, C)."""
    channels = rows.shape[-1]
    found = rows.reshape(-1, channels).index_select(0, places.reshape(-1))
    return found.view(*places.shape, channels)


def _seen(line: Tensor, windows: Tensor | None, width: int) -> Tensor:
    """What a conv sees of lines (B, L, C), as `ConvPlaces` says: (B, …, W, C)."""
    return line.unfold(1, width, 1).mT if windows is None else _at(line, windows)


def _kept(line: Tensor, places: ConvPlaces) -> Tensor:
    """What is kept of lines (B, L, C), as `ConvPlaces` says."""
    kept = places.kept
    return line[:, kept:] if isinstance(kept, int) else _at(line, kept)


def _write(rows: Tensor, places: ConvPlaces, line: Tensor) -> None:
    """Write what is kept of lines to the rows."""
    kept = _kept(line, places)
    there = rows.narrow(2, places.written, kept.shape[1])
    there.index_copy_(0, places.half, kept[None])


def _scan_inputs(
    seen: Tensor, weights: MixerWeights, shape: MixerShape
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x (B, n, Gx, P), dt (B, n, H), B (B, n, Gb, S) and C (B, n, Gc, S) of n nodes, given what
    `rows` keeps of the inputs that the conv sees at each, (B, n, W, C + H)."""
    inputs = conv_channels(seen.narrow(-1, 0, shape.num_channels), shape)
    convolved = F.silu(_convolve(inputs, weights.conv, weights.conv_bias))
    dt = positive_dt(seen[:, :, -1, shape.num_channels :], weights, shape)
    x, B, C = split_channels(convolved, shape)
    return x, dt, B, C


def _convolve(seen: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(B, n, C) of the inputs (B, n, W, C) that a conv sees, oldest first, in their dtype."""
    y = (widened(seen) * widened(weight).t()).sum(2)
    y = y if bias is None else y + widened(bias)
    return _as(y, seen.dtype)


def short_conv_tree(
    projected: Tensor,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    topology: Topology,
    steering: Steering,
    first: int,
) -> Tensor:
    """A gated causal depthwise convolution, C·conv(B·x), of nodes first … first + Q − 1 of a tree,
    and its memory.

    As `mamba_tree`, without a scan: with first = 0 a new tree begins after the accepted path of the
    last one, else the tree grows.

    Args: projected (B, Q, 3·C), the gates B and C and then x; rows (2, B, W − 1 + N, C), B·x of
    [committed tail, nodes], twice, as in `mamba_tree`; weight (C, W), bias (C,).
    Returns (B, Q, C) in projected's dtype. Writes `rows`.
    """
    opened, gate, values = projected.chunk(3, dim=-1)
    inputs = opened * values
    places = conv_places(
        rows, weight.shape[1] - 1, topology, steering, first, first, inputs.shape[1]
    )
    line = torch.cat([_at(rows, places.before), inputs], dim=1)
    _write(rows, places, line)
    seen = _seen(line, places.windows, weight.shape[1])[:, places.path :]
    return gate * _convolve(seen, weight, bias)


def short_conv_replay(rows: Tensor, tail: int, steering: Steering) -> Tensor:
    """The last inputs (B, W − 1, C) of [committed tail, accepted path], which the caller writes."""
    places = path_places(rows, tail, steering)
    return _kept(_at(rows, places.before), places)


def conv_channels(projected: Tensor, shape: MixerShape) -> Tensor:
    """Projected x, B and C (…, C) as the conv takes them: x and B repeated a head if need be."""
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
    """x (…, Gx, P), B (…, Gb, S) and C (…, Gc, S) of the conv's output."""
    x_groups, b_groups, c_groups = shape.scan_groups
    x, B, C = convolved.split_with_sizes(shape.conv_dims, dim=-1)
    at = x.shape[:-1]
    return x.view(*at, x_groups, -1), B.view(*at, b_groups, -1), C.view(*at, c_groups, -1)


def positive_dt(dt: Tensor, weights: MixerWeights, shape: MixerShape) -> Tensor:
    """dt (…, H) after bias, softplus and clamp, in the accumulation dtype."""
    dt = F.softplus(widened(dt) + widened(weights.dt_bias))
    return dt if shape.dt_limit == (0.0, math.inf) else dt.clamp(*shape.dt_limit)


def segment_conv(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, segment_ids: Tensor | None
) -> Tensor:
    """Causal depthwise convolution over packed sequences: a token sees its own segment only.

    Args: inputs (B, T, C), weight (C, W), bias (C,), segment_ids (B, T) or None.
    Returns (B, T, C) in inputs' dtype, before the activation.
    """
    width = weight.shape[1]
    weight = weight.to(inputs.dtype)
    y = inputs * weight[:, -1]
    for back in range(1, min(width, inputs.shape[1])):
        shifted = inputs[:, :-back]
        if segment_ids is not None:
            same = segment_ids[:, back:] == segment_ids[:, :-back]
            shifted = shifted * same[..., None]
        y = y + F.pad(shifted * weight[:, -1 - back], (0, 0, back, 0))
    return y if bias is None else y + bias.to(inputs.dtype)


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
    """Everything between an attention layer's projections, for nodes first … first + Q − 1.

    With first = 0 a new tree begins: the accepted keys of the last one are made contiguous.
    The new nodes' keys and values are rotated to their depths and take the slots behind.

    Args: qkv (B, Q, (H + 2·Hkv)·D), the projections of q, k and v; keys and values
    (B, Hkv, L, D), written in place; rotary (2, positions, D / 2), cosines and sines; bound, how
    many slots to look at, at least those in use after this call; scale, of the scores, D^−½ unless
    given; out, where the result is to be.
    Returns (B, Q, H·D) in qkv's dtype.
    """
    batch, num_new, _ = qkv.shape
    num_kv_heads, head_dim = keys.shape[1], keys.shape[3]
    heads = qkv.view(batch, num_new, -1, head_dim).transpose(1, 2)
    num_heads, bound = heads.shape[1] - 2 * num_kv_heads, min(bound, keys.shape[2])
    places = attention_places(
        topology, steering, first, num_new, bound, rotary, (num_heads, num_kv_heads), qkv.dtype
    )
    rotated = rotate(heads.narrow(1, 0, num_heads + num_kv_heads), *places.rotary)
    new = rotated.narrow(1, num_heads, num_kv_heads), heads.narrow(1, -num_kv_heads, num_kv_heads)
    for cache, each in zip((keys, values), new, strict=True):
        if places.moves is not None:
            _move(cache, places.moves)
        cache.scatter_(2, places.slots, each)
    q = rotated.narrow(1, 0, num_heads)
    keys, values = (each.narrow(2, 0, places.bound) for each in (keys, values))
    y = tree_attention(q, keys, values, places.mask, places.unused, scale)
    y = y.transpose(1, 2).flatten(2)
    return y if out is None else out.copy_(y)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding on halves: x (…, D), cos and sin as `whole_heads` gives them."""
    wide = _as(x, cos.dtype)
    y = torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, -1), sin)
    return _as(y, x.dtype)


def tree_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    unused: Tensor | None,
    scale: float | None = None,
) -> Tensor:
    """Attention of tree nodes to the committed keys and to their ancestors.

    Args: q (B, H, Q, D), keys and values (B, Hkv, L, D), mask (B, 1, H / Hkv·Q, L), unused
    (B, 1, L, 1) as in `AttentionPlaces`; scale, of the scores, D^−½ unless given. Unused slots may
    hold anything. Returns (B, H, Q, D) in q's dtype.
    """
    if unused is not None:  # 0 · NaN would be NaN
        keys, values = (each.masked_fill(unused, 0.0) for each in (keys, values))
    # The heads that share keys are further queries: the keys need not be repeated
    batch, num_kv_heads, _, head_dim = keys.shape
    queries = q.reshape(batch, num_kv_heads, -1, head_dim)
    y = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
    return y.reshape(q.shape)


def add_rms_norm(
    x: Tensor, added: Added, weight: Tensor, eps: float, beside: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x + added (or x) and its root-mean-square norm, each (…, D) in x's dtype.

    added (S, …, D), the parts of a sum, as `linear_parts` gives it, or several such. With beside
    (…, E), the norm is that of both next to each other, (…, D + E).
    """
    if isinstance(added, tuple):
        added = torch.cat(added)
    if added is not None:
        x = x + (added[0] if added.shape[0] == 1 else added.sum(0).to(x.dtype))
    return x, rms_norm(x if beside is None else torch.cat([x, beside], dim=-1), weight, eps)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, groups: int = 1, gate: Tensor | None = None
) -> Tensor:
    """Root-mean-square norm of x·silu(gate), (…, D) in x's dtype, over groups of channels."""
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
    """Mamba-2's norm of y·silu(gate), both (…, C), over groups of channels."""
    return rms_norm(y, weight, eps, groups, gate)


def gate_normed(y: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of each head's channels, then silu(gate): y and gate (…, H·V), weight (V,)."""
    return gated(rms_norm(y.unflatten(-1, (-1, len(weight))), weight, eps).flatten(-2), gate)


def gated(y: Tensor, gate: Tensor) -> Tensor:
    """y·silu(gate) in y's dtype."""
    return (widened(y) * F.silu(widened(gate))).to(y.dtype)


def norm_heads(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, num_k: int) -> Tensor:
    """The norm of each head of q and k in qkv (…, (H + 2·num_k)·P), q, k and v side by side, with
    one weight (P,) each; v stays."""
    heads = qkv.unflatten(-1, (-1, len(q_weight)))
    q, k, v = heads.split([heads.shape[-2] - 2 * num_k, num_k, num_k], dim=-2)
    q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    return torch.cat([q, k, v], dim=-2).flatten(-2)


def sigmoid_gated(y: Tensor, gate: Tensor) -> Tensor:
    """y·sigmoid(gate) in y's dtype."""
    return (widened(y) * widened(gate).sigmoid()).to(y.dtype)


def norm(stream: Stream) -> Tensor:
    """The norm (B, Q, D) of a stream."""
    return stream.norm_by(embed_norm, add_rms_norm)


def linear(x: Tensor | Stream, weight: Tensor) -> Tensor:
    """x (…, D), or the norm of a stream, by a weight (E, D) → (…, E) in x's dtype."""
    return F.linear(norm(x) if isinstance(x, Stream) else x, weight)


def linear_wide(x: Tensor, weight: Tensor) -> Tensor:
    """`linear` in fp32 or wider, from what is not rounded first."""
    return F.linear(widened(x), widened(weight))


def laid(weight: Tensor) -> Tensor:
    """A weight (E, D) stored as products of a few rows read it fastest: on a CPU input by input."""
    return weight.t().contiguous().t() if weight.device.type == "cpu" else weight.contiguous()


def linear_parts(x: Tensor | Gated, weight: Tensor) -> Tensor:
    """`linear`, as parts of a sum (S, …, E): several in fp32, or one in x's dtype."""
    return linear(x.norm_by(gated_rms_norm) if isinstance(x, Gated) else x, weight)[None]


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate)·up of gate and up side by side, (…, 2·I) → (…, I)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def activated(y: Tensor, kind: str) -> Tensor:
    """An MLP's inner values (…, I): of gate and up side by side, (…, 2·I), or of up alone."""
    if kind == "relu2":
        return F.relu(y).square()
    if kind == "swiglu":
        return swiglu(y)
    gate, up = y.chunk(2, dim=-1)
    return F.gelu(gate) * up


def linear_swiglu(x: Tensor | Stream, weight: Tensor) -> Tensor:
    """x (…, D), or the norm of a stream, by gate and up one above the other, (2·I, D), and SwiGLU
    of both → (…, I)."""
    return swiglu(linear(x, weight))


def linear_adapted(x: Tensor, weight: Tensor, low: Tensor, up: Tensor, kind: str) -> Tensor:
    """An MLP's inner values (…, I), as `activated` makes them of x (…, D) by a weight (2·I, D) and
    an adapter's term, low (…, R) by up (2·I, R)."""
    return activated(linear(x, weight) + linear(low, up), kind)


def advance(steering: Steering) -> None:
    """The end of a tree call: the path that it replayed is committed, its own tree is the last."""
    steering.length.add_(steering.path_length)
    steering.path_length.zero_()
    steering.parity.bitwise_xor_(1)


def choice_scores(
    logits: Tensor, depths: Tensor, sampling: Sampling | None, ids: Tensor | None = None
) -> Tensor:
    """What the best tokens are the best by: logits, or those of a row that samples with noise.

    The best token of logits / temperature + Gumbel noise is a sample, the best k are k samples
    without replacement (Gumbel 1954; Kool et al. 2019). The noise belongs to the token's position
    in its sequence, so whoever chooses a token there, drafter or target, has the same.

    Args: logits (B, n, V) of nodes at depths (B, n); or (B, n, K) of the tokens ids (K,) alone,
    whose noise is what it is among all. Returns as many, fp64 with sampling.
    """
    if sampling is None:
        return logits.to(accumulation_dtype(logits.dtype))
    temperature = sampling.temperature[:, None, None]
    sampled = temperature > 0
    scores = logits.double() / torch.where(sampled, temperature, 1.0)
    levels = depths
    if depths.device.type == "cpu" and depths.numel() > 1:  # nodes of a level share their noise
        levels, at = depths.unique(return_inverse=True)
    noise = token_noise(
        sampling.seed, sampling.position[:, None] + 1 + levels.view(-1, levels.shape[-1]),
        logits.shape[-1], ids,
    )  # fmt: skip
    if levels is not depths:
        noise = noise.gather(1, at.expand(len(logits), -1)[..., None].expand_as(logits))
    return scores + torch.where(sampled, noise, 0.0)


def choose_best(logits: Tensor, depths: Tensor, sampling: Sampling | None) -> tuple[Tensor, Tensor]:
    """The token that is chosen after each node, (B, n), and its score, (B, n).

    The score is not finite when any logit of the row is NaN or +∞. Args as in `choice_scores`.
    """
    highest, best = choice_scores(logits, depths, sampling).max(-1)
    return best, highest


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
    """Write the best tokens after some nodes to their places in the trees; nothing waits for the
    device.

    Args: logits (B, n, V), depths, sampling and ids as in `choice_scores`; places (B, n, k), the
    node of its tree that takes each of the best, −1 for none; tokens (B, N), written there; finite
    (B, n) bool, written: no logit is NaN or +∞. With nodes (B, n), those that the logits are of,
    values (B, N) fp32 are written likewise: how sure the path down to a node is. A child's is its
    parent's plus the logarithm of its share in the softmax of logits + temperature · noise: the
    target chooses the best of those, by its own logits, so a share means the same at all
    temperatures.
    """
    every = choice_scores(logits, depths, sampling, ids)
    scores, best = every.topk(places.shape[2], dim=-1)
    chosen = best if ids is None else ids[best]
    slots = F.pad(tokens, (0, 1))  # the last takes what no node does
    places = torch.where(places < 0, tokens.shape[1], places)
    slots.scatter_(1, places.flatten(1), chosen.flatten(1))
    tokens.copy_(slots[:, :-1])
    finite.copy_(scores[..., 0].isfinite())
    if values is not None:
        assert nodes is not None
        if sampling is not None:
            temperature = sampling.temperature[:, None, None]
            every = every * torch.where(temperature > 0, temperature, 1.0)
        shares = every.log_softmax(-1).gather(-1, best)
        paths = values.gather(1, nodes)[..., None] + shares.to(values.dtype).clamp(max=0.0)
        slots = F.pad(values, (0, 1))
        slots.scatter_(1, places.flatten(1), paths.flatten(1))
        values.copy_(slots[:, :-1])


def draw_children(x: Tensor | Stream, weight: Tensor, depths: Tensor, *others: Any) -> Tensor:
    """`choose_children` by the logits (B, n, K) of a head (K, D), which are returned, given rows x
    (B, n, D) or a stream ahead of its norm."""
    logits = linear(x, weight)
    choose_children(logits, depths, *others)
    return logits


def embed_norm(
    weight: Tensor,
    tokens: Tensor,
    nodes: Tensor | None,
    scale: Tensor,
    eps: float,
    written: bool = False,
    added: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rows of weight (V, D) at tokens (B, N), of all nodes or of nodes (B, Q), and their norm: both
    (B, N or Q, D). A node below 0 stands for the first. written: the step itself writes the nodes.
    added (B, N or Q, D), to the rows ahead of the norm.
    """
    x = F.embedding(tokens if nodes is None else tokens.gather(1, nodes.clamp(min=0)), weight)
    if added is not None:
        x = x + added
    return add_rms_norm(x, None, scale, eps)


def norm_at(x: Tensor, nodes: Tensor, scale: Tensor, eps: float, groups: int) -> Tensor:
    """Rows of x (B, N, C) at nodes (B, M), each normed over groups of channels: (B, M, C). A node
    that there is none of stands for the last."""
    nodes = nodes.clamp(max=x.shape[1] - 1)[..., None]
    return rms_norm(x.gather(1, nodes.expand(-1, -1, x.shape[2])), scale, eps, groups)


def take_roots(
    stream: Stream, block: Tensor, active: Tensor, tokens: Tensor, steering: Steering
) -> Tensor:
    """End the call that reads certain tokens, and begin drafts after each row's last, its root.

    Args: stream of B rows after each of the tokens of block (B, 1 + M), how many are certain, and
    the tokens; active (B,) bool; tokens (B, N), whose first are written; steering, of which all is
    written that `advance` writes, and path_length: the certain ones are all accepted, in active
    rows. Returns the norm (B, 1, D) after the roots.
    """
    hidden = norm(stream)
    advance(steering)
    count = torch.where(active, block[:, 0], 0)
    steering.path_length.copy_(count)
    count = count.clamp(min=1)[:, None]
    tokens[:, :1] = block.gather(1, count)
    return hidden.gather(1, (count - 1)[..., None].expand(-1, -1, hidden.shape[2]))


def accept_choices(
    best: Tensor,
    highest: Tensor,
    tokens: Tensor,
    parents: Tensor,
    finite: Tensor | None,
    active: Tensor,
    path: Tensor,
    path_length: Tensor,
    block: Tensor,
    position: Tensor,
    root: Tensor,
    report: Tensor,
) -> None:
    """Follow the target's own choices down each tree, and write down what was accepted.

    Args: best (B, N) and highest (B, N), the token that the target chooses after each node and its
    score; tokens (B, N) and parents (B, N) of the trees; finite (B, …) bool or None, which of the
    drafter's logits were; active (B,) bool, whose rows decode at all. Written: path (B, K) and
    path_length (B,), the accepted nodes; in active rows block (B, 1 + M), how many new tokens there
    are and the tokens, the target's own last one included, position (B,), which moves on by as
    many, and root (B, 1), the last of them; report (B, 2 + 2·M): 1 when all logits were finite, 0
    when the target's were not, −1 when the drafter's; the same as block; and the path. M is above
    the trees' depth.
    """
    longest = (report.shape[1] - 2) // 2
    node = torch.zeros_like(root)
    nodes, choices, walked = [node], [best[:, :1]], [active[:, None]]
    for _ in range(longest - 1):
        matching, child = ((parents == node) & (tokens == choices[-1])).max(1, keepdim=True)
        walked.append(walked[-1] & matching)
        node = torch.where(walked[-1], child, node)
        nodes.append(node)
        choices.append(best.gather(1, node))
    accepted, chosen, walking = (torch.cat(each, 1) for each in (nodes, choices, walked))
    count = walking.sum(1, keepdim=True)
    for written, value in (
        (path[:, :longest], accepted),
        (report[:, 2 + longest :], accepted),
        (report[:, 2 : 2 + longest], chosen),
        (block[:, 1 : 1 + longest], chosen),
        (root, chosen[:, -1:]),  # a row that goes no further stays at its last node
        (block[:, :1], count),
    ):
        there = walking if value.shape == walking.shape else walking[:, :1]
        torch.where(there, value, written, out=written)
    path_length.copy_(count[:, 0])
    position.add_(path_length)
    code = highest.isfinite().all(1).long()
    if finite is not None:
        code = torch.where((code == 1) & ~finite.flatten(1).all(1), -1, code)
    report[:, :2] = torch.cat([code[:, None], count], 1)


def move_accepted(cache: Tensor, length: Tensor, path: Tensor, path_length: Tensor) -> None:
    """Make the keys (or values) of an accepted path contiguous, in place.

    Args: cache (B, Hkv, L, D), length (B,) committed slots, path (B, K) node indices of which
    the first path_length (B,) count. Slots length … length + K − 1 may be written.
    """
    moves = moved_slots(length, path, path_length)
    if moves is not None:
        _move(cache, moves)


def _move(cache: Tensor, moves: Index) -> None:
    rows, source, target = moves
    cache[rows, :, target] = cache[rows, :, source]


def uniforms(seeds: Tensor, positions: Tensor, places: Tensor) -> Tensor:
    """Random numbers in [0, 1), (B, P) fp64: a function of seed, position and place alone.

    Philox4x32-10 (Salmon et al. 2011) with the seed as key and (place, position, 0) as counter; the
    first two of its four words give 53 bits.

    Args: seeds (B,) and positions (B,) int64, not negative; places (B, P) int64 below 2³².
    """
    words = _philox(seeds[:, None], places, positions[:, None] + torch.zeros_like(places), 0)
    return ((words[0] >> 5) * 2**26 + (words[1] >> 6)).double() * 2.0**-53


def token_noise(
    seeds: Tensor, positions: Tensor, num_tokens: int, ids: Tensor | None = None
) -> Tensor:
    """Gumbel noise (B, n, V) fp64 of each token: a function of seed, position and token alone.

    −log(−log u) of uniform numbers of 52 bits, never 0 or 1: two of a Philox counter (half the
    token, position, 1).

    Args: seeds (B,), positions (B, n) int64, not negative; ids (V,), the tokens, in place of the
    first num_tokens.
    """
    if ids is None:
        pairs = torch.arange(-(-num_tokens // 2), device=seeds.device)
    else:
        pairs = ids >> 1
    positions = positions[..., None]
    words = _philox(seeds[:, None, None], pairs.expand(*positions.shape[:2], -1), positions, 1)
    bits = [(words[at] >> 6) * 2**26 + (words[at + 1] >> 6) for at in (0, 2)]
    if ids is None:
        chosen = torch.stack(bits, dim=-1).flatten(-2)[..., :num_tokens]
    else:
        chosen = torch.where(ids % 2 == 1, bits[1], bits[0])
    uniform = (chosen.double() + 0.5) * 2.0**-52
    return -(-uniform.log()).log()


def _philox(seeds: Tensor, places: Tensor, positions: Tensor, stream: int) -> list[Tensor]:
    """The four words at counter (place, position, stream), the seed being the key."""
    places, low, high = torch.broadcast_tensors(places, positions & _WORD, positions >> 32)
    # Constants are made where they are needed: nothing waits for the device.
    numbers = torch.arange(10, device=places.device).view(-1, *[1] * places.dim())
    first, second = _PHILOX_KEYS
    keys = torch.stack([(seeds & _WORD) + numbers * first, (seeds >> 32) + numbers * second], 1)
    factors = _PHILOX[0] + numbers[:2] * (_PHILOX[1] - _PHILOX[0])
    # Words 0 and 2 go through a round together, and so do 1 and 3: half the launches
    even, odd = torch.stack([places, high]), torch.stack([low, torch.full_like(low, stream)])
    for key in (keys & _WORD).unbind():
        # An int64 product wraps around, but keeps all 64 bits of the two words it consists of
        product = (even * factors).flip(0)
        even = (product >> 32).bitwise_and_(_WORD).bitwise_xor_(odd).bitwise_xor_(key)
        odd = product.bitwise_and_(_WORD)
    return [even[0], odd[0], even[1], odd[1]]
