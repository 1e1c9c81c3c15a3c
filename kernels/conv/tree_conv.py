"""Replay and conv of a recurrent layer's tree call, before its scan, in one launch (Triton).

Neither needs the other, so their programs run side by side. Replay: one program serves a sequence,
a head and a block of its channels, and advances the state along the last accepted path; with many
sequences the scan's programs do that (`streamed_scan.py`). Conv: one serves a sequence, a block of
channels and a few nodes; it reads each node's window of raw inputs (new nodes, older nodes of the
tree, or the accepted path and the conv state), keeps the nodes' own raw inputs, and
writes silu(conv); a last block of programs does the same for dt and the log-decay. The values that
the next call's replay needs are kept (`Derived`), so that nothing is convolved twice. The naive
twins are in `naive.mamba_tree`. A gated-delta layer's call begins with the same launch, without
replay (`convolve`).

The last tree's inputs are still read while the new tree's are written: hence two buffers, and
`CacheState.parity` says which is which.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree_kernels.contracts import (
    CacheState,
    Derived,
    GatedDeltaShape,
    GatedDeltaWeights,
    MixerShape,
    MixerWeights,
    Topology,
)
from stree_kernels.launch import follow, load_kept, overlapping, store_kept
from stree_kernels.products.linear import mixed_precision_of, mixed_product, precision_of

BLOCK_CHANNELS, BLOCK_NODES = 64, 16  # that a program convolves
MANY, MOST_CHANNELS = 8, 256  # sequences from which on few nodes have wider blocks, at most so wide
BLOCK_HEAD = 32  # channels of a head whose state a program advances


def replay_and_convolve(
    kept: Tensor,
    rows: Tensor,
    derived: Derived,
    state: Tensor | None,
    weights: MixerWeights,
    shape: MixerShape,
    topology: Topology,
    cache_state: CacheState,
    first: int,
) -> Tensor:
    """Replay the accepted path, and convolve nodes first … first + Q − 1.

    kept (B, Q, C + H) holds their raw inputs. Writes rows and state, as `naive.mamba_tree` does,
    and derived. Without a state nothing is replayed here: then the scan does that. Returns C
    (B, Q, Gc·S).
    """
    x_conv, b_conv, _ = shape.scan_groups
    heads = shape.num_heads
    block_p = max(16, min(BLOCK_HEAD, triton.next_power_of_2(shape.head_dim)))
    return _launch(
        kept, rows, derived, state, weights, shape, topology, cache_state, first,
        columns=shape.xbc_dims, dt_limit=shape.dt_limit,
        HEAD_DIM=shape.head_dim, D_STATE=shape.d_state,
        HEADS_A_X=heads // x_conv, HEADS_A_B=heads // b_conv,
        HEAD_BLOCKS=triton.cdiv(shape.head_dim, block_p), BLOCK_P=block_p,
        BLOCK_S=max(16, triton.next_power_of_2(shape.d_state)),
    )


def convolve(
    kept: Tensor,
    rows: Tensor,
    derived: Derived,
    weights: GatedDeltaWeights,
    shape: GatedDeltaShape,
    topology: Topology,
    cache_state: CacheState,
    first: int,
) -> Tensor:
    """Convolve for a gated-delta layer, whose state the next launch replays.

    q, k and v stand in the places of x, B and C, and a in dt's. Writes rows, as
    `naive.gated_delta_tree` does, and derived. Returns v (B, Q, H·V).
    """
    return _launch(
        kept, rows, derived, None, weights, shape, topology, cache_state, first,
        columns=shape.conv_dims, dt_limit=(0.0, math.inf),
        HEAD_DIM=1, D_STATE=1, HEADS_A_X=1, HEADS_A_B=1, HEAD_BLOCKS=1, BLOCK_P=16, BLOCK_S=16,
    )


def _launch(
    kept: Tensor,
    rows: Tensor,
    derived: Derived,
    state: Tensor | None,
    weights: MixerWeights | GatedDeltaWeights,
    shape: MixerShape | GatedDeltaShape,
    topology: Topology,
    cache_state: CacheState,
    first: int,
    *,
    columns: tuple[int, int, int],
    dt_limit: tuple[float, float],
    **replay: int,
) -> Tensor:
    """Launch the kernel; columns are projected channels, which the conv may repeat.

    Without a state nothing is replayed.
    """
    batch, num_new, _ = kept.shape
    x_channels, b_channels, c_channels = shape.conv_dims
    C = torch.empty(batch, num_new, c_channels, device=kept.device, dtype=kept.dtype)
    block_q, block_c = BLOCK_NODES, BLOCK_CHANNELS
    if batch >= MANY:
        block_q = min(block_q, triton.next_power_of_2(num_new))
        block_c = min(MOST_CHANNELS, block_c * BLOCK_NODES // block_q)
    num_blocks = triton.cdiv(x_channels + b_channels + c_channels, block_c)
    xb, steps, heads = derived.xb, derived.steps, shape.num_heads
    assert kept.stride(2) == rows.stride(3) == xb.stride(3) == steps.stride(4) == 1
    assert state is None or state.stride(3) == 1
    assert min(xb.shape[2], steps.shape[3]) >= first + num_new
    assert first + num_new <= topology.depths.shape[1]
    assert rows.shape[2] >= shape.tail + first + num_new
    replays = first == 0 and state is not None
    num_replays = heads * replay["HEAD_BLOCKS"] if replays else 0
    num_tiles = triton.cdiv(num_new, BLOCK_NODES)
    replay_conv_kernel[(num_replays + (num_blocks + 1) * num_tiles, batch)](
        kept, kept.stride(0), kept.stride(1),
        rows, rows.stride(0), rows.stride(1), rows.stride(2),
        xb, xb.stride(0), xb.stride(1), xb.stride(2),
        steps, steps.stride(0), steps.stride(1), steps.stride(2), steps.stride(3),
        C, C.stride(0), C.stride(1),
        state, *((0, 0, 0) if state is None else state.stride()[:3]),
        weights.conv, weights.conv.stride(0), weights.conv.stride(1), weights.conv_bias,
        weights.dt_bias, weights.A_log,
        topology.ancestors.view(torch.uint8), topology.windows, topology.depths.shape[1],
        cache_state.path, cache_state.path.stride(0), cache_state.path.shape[1],
        cache_state.path_length,
        cache_state.variant, cache_state.parity,
        first, num_new, min(xb.shape[2], steps.shape[3]), num_replays, num_blocks,
        HEADS=heads, WIDTH=shape.width,
        X_REPEATS=x_channels // columns[0], B_REPEATS=b_channels // columns[1],
        B_COLUMN=columns[0], C_COLUMN=columns[0] + columns[1], DT_COLUMN=shape.num_channels,
        B_CHANNEL=x_channels, C_CHANNEL=x_channels + b_channels,
        NUM_CHANNELS=x_channels + b_channels + c_channels,
        DT_MIN=dt_limit[0], DT_MAX=dt_limit[1], REPLAY=first == 0, READY=cache_state.ready,
        PRECISION=precision_of(kept), MIXED=mixed_precision_of(kept.dtype),
        BLOCK_C=block_c, BLOCK_Q=block_q, BLOCK_STEPS=BLOCK_NODES,
        BLOCK_H=max(16, triton.next_power_of_2(heads)),
        num_warps=4, **replay, **overlapping(kept),
    )
    return C


@triton.jit
def replay_conv_kernel(
    projected, projected_batch_stride, projected_stride,
    rows, rows_parity_stride, rows_batch_stride, row_stride,
    xb, xb_parity_stride, xb_batch_stride, xb_stride,
    steps, steps_parity_stride, steps_batch_stride, steps_part_stride, steps_stride,
    C_pointer, C_batch_stride, C_stride,
    state, state_batch_stride, state_head_stride, state_row_stride,
    weight_pointer, channel_stride, tap_stride, conv_bias, dt_bias, A_log,
    ancestors, windows, tree_size,
    path, path_stride, path_size, path_lengths, variants, parities,
    first, num_new, num_slots, num_replays, num_blocks,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D_STATE: tl.constexpr, WIDTH: tl.constexpr,
    X_REPEATS: tl.constexpr, B_REPEATS: tl.constexpr,
    B_COLUMN: tl.constexpr, C_COLUMN: tl.constexpr, DT_COLUMN: tl.constexpr,
    B_CHANNEL: tl.constexpr, C_CHANNEL: tl.constexpr, NUM_CHANNELS: tl.constexpr,
    DT_MIN: tl.constexpr, DT_MAX: tl.constexpr, REPLAY: tl.constexpr, READY: tl.constexpr,
    OVERLAPS: tl.constexpr,
    HEADS_A_X: tl.constexpr, HEADS_A_B: tl.constexpr, HEAD_BLOCKS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr,
    PRECISION: tl.constexpr, MIXED: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_STEPS: tl.constexpr, BLOCK_H: tl.constexpr,
):
    # The previous launch, a product, touches neither the state nor the last tree's inputs. So the
    # replay waits for nothing; the conv waits for the product, and the scan relies on that
    if READY == "none":
        follow(OVERLAPS)
    program, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    parity = load_kept(parities)
    variant = load_kept(variants + batch)
    projected += batch * projected_batch_stride
    rows += batch * rows_batch_stride
    xb += batch * xb_batch_stride
    steps += batch * steps_batch_stride
    old = rows + parity * rows_parity_stride
    path += batch * path_stride
    if REPLAY:
        path_length = load_kept(path_lengths + batch).to(tl.int32)
        half = 1 - parity
    else:
        path_length = 0
        half = parity
    new = rows + half * rows_parity_stride
    if program < num_replays:  # never so without REPLAY
        if state is not None:
            head = program // HEAD_BLOCKS
            replay(
                state + batch * state_batch_stride + head * state_head_stride, state_row_stride,
                xb + parity * xb_parity_stride, xb_stride,
                steps + parity * steps_parity_stride + head, steps_stride,
                A_log + head,
                path, path_size, path_length, num_slots,
                (program % HEAD_BLOCKS) * BLOCK_P, (head // HEADS_A_X) * HEAD_DIM,
                B_CHANNEL + (head // HEADS_A_B) * D_STATE,
                HEAD_DIM, D_STATE, BLOCK_P, BLOCK_S, PRECISION, MIXED,
            )
    else:
        block = (program - num_replays) % (num_blocks + 1)
        tile = (program - num_replays) // (num_blocks + 1)
        if block == num_blocks:
            _keep_steps(
                projected, projected_stride, old, new, row_stride,
                steps + half * steps_parity_stride,
                steps_part_stride, steps_stride, dt_bias, A_log,
                ancestors + variant * tree_size * tree_size, tree_size,
                path, path_length, tile, first, num_new,
                HEADS, WIDTH, DT_COLUMN, DT_MIN, DT_MAX, REPLAY, OVERLAPS, BLOCK_STEPS, BLOCK_H,
            )
        else:
            _keep_channels(
                projected, projected_stride, old, new, row_stride,
                xb + half * xb_parity_stride, xb_stride,
                C_pointer + batch * C_batch_stride, C_stride,
                weight_pointer, channel_stride, tap_stride, conv_bias,
                windows + variant * tree_size * WIDTH,
                path, path_length, block, tile, first, num_new,
                HEAD_DIM, D_STATE, WIDTH, X_REPEATS, B_REPEATS, B_COLUMN, C_COLUMN,
                B_CHANNEL, C_CHANNEL, NUM_CHANNELS, REPLAY, OVERLAPS, BLOCK_C, BLOCK_Q,
            )


@triton.jit
def replay(
    state, row_stride, xb, xb_stride, dt_pointer, dt_stride, A_log,
    path, path_size, path_length, num_slots,
    start_p, x_start, b_start, HEAD_DIM: tl.constexpr, D_STATE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr,
    PRECISION: tl.constexpr, MIXED: tl.constexpr,
):
    """Advance the state of a block of a head's channels along the accepted path."""
    p, s = start_p + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_S)
    in_p, in_s = p < HEAD_DIM, s < D_STATE
    at_state = state + p[:, None] * row_stride + s[None, :]
    in_state = in_p[:, None] & in_s[None, :]
    h = tl.load(at_state, mask=in_state, other=0.0).to(tl.float32)
    A = -tl.exp(load_kept(A_log).to(tl.float32))
    # All values of the first nodes are loaded before it is known how many of them count
    k = tl.arange(0, 16)
    h = advanced_along(
        h, A, path, k, k < path_size, k < path_length, num_slots, xb, xb_stride,
        dt_pointer, dt_stride, x_start + p, in_p, b_start + s, in_s, PRECISION, MIXED,
    )
    for start in range(16, path_length, 16):
        counts = start + k < path_length
        h = advanced_along(
            h, A, path, start + k, counts, counts, num_slots, xb, xb_stride,
            dt_pointer, dt_stride, x_start + p, in_p, b_start + s, in_s, PRECISION, MIXED,
        )
    if path_length > 0:
        tl.store(at_state, h.to(state.dtype.element_ty), mask=in_state)


@triton.jit
def advanced_along(
    h, A, path, k, listed, accepted, num_slots, xb, xb_stride, dt_pointer, dt_stride,
    x_channel, in_p, b_channel, in_s, PRECISION: tl.constexpr, MIXED: tl.constexpr,
):
    """Return a block of a state after the accepted nodes among 16 of a path buffer.

    All listed nodes are read.
    """
    node, there, dt, B = path_inputs(
        path, k, listed, num_slots, xb, xb_stride, dt_pointer, dt_stride, b_channel, in_s
    )
    at = xb + node[:, None] * xb_stride + x_channel[None, :]
    x = load_kept(at, there[:, None] & in_p[None, :])
    decay, after = path_weights(A, dt, accepted)
    return advanced(h, decay, after, x, B, accepted, PRECISION, MIXED)


@triton.jit
def path_inputs(
    path, k, listed, num_slots, xb, xb_stride, dt_pointer, dt_stride, b_channel, in_s
):
    """Return some nodes of a path buffer, which of them exist, and their dt and B.

    Not all of them need count.
    """
    node = load_kept(path + k, listed).to(tl.int32)
    there = listed & (node >= 0) & (node < num_slots)
    dt = load_kept(dt_pointer + node * dt_stride, there)
    at = xb + node[:, None] * xb_stride + b_channel[None, :]
    return node, there, dt, load_kept(at, there[:, None] & in_s[None, :])


@triton.jit
def path_weights(A, dt, accepted):
    """Return the state's decay over the path's accepted nodes, and each node's decay after it.

    Covers 16 nodes of the path; nodes that are not accepted count for nothing.
    """
    dt = tl.where(accepted, dt, 0.0)
    total = tl.sum(dt * A, axis=0)
    return tl.exp(total), tl.exp(total - tl.cumsum(dt * A, axis=0)) * dt


@triton.jit
def advanced(h, decay, after, x, B, accepted, PRECISION: tl.constexpr, MIXED: tl.constexpr):
    """Return the state after the accepted nodes among 16 of the path."""
    x = tl.where(accepted[:, None], x.to(tl.float32), 0.0)
    B = tl.where(accepted[:, None], B, 0.0)
    added = mixed_product(tl.trans(x * after[:, None]), B, PRECISION, MIXED)
    # One rounding, in every kernel that this is a part of
    return tl.fma(tl.zeros_like(h) + decay, h, added)


@triton.jit
def _replayed(place, path, WIDTH: tl.constexpr):
    """Return the row in the old buffer of a token of [old conv state, accepted path]."""
    on_path = place >= WIDTH - 1
    node = load_kept(path + place - (WIDTH - 1), on_path)
    return tl.where(on_path, WIDTH - 1 + node, place).to(tl.int32)


@triton.jit
def _keep_channels(
    projected, projected_stride, old, new, row_stride, xb, xb_stride, C_pointer, C_stride,
    weight_pointer, channel_stride, tap_stride, conv_bias, windows,
    path, path_length, block, tile, first, num_new,
    HEAD_DIM: tl.constexpr, D_STATE: tl.constexpr, WIDTH: tl.constexpr,
    X_REPEATS: tl.constexpr, B_REPEATS: tl.constexpr,
    B_COLUMN: tl.constexpr, C_COLUMN: tl.constexpr,
    B_CHANNEL: tl.constexpr, C_CHANNEL: tl.constexpr, NUM_CHANNELS: tl.constexpr,
    REPLAY: tl.constexpr, OVERLAPS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_Q: tl.constexpr,
):
    channel = block * BLOCK_C + tl.arange(0, BLOCK_C)
    in_conv = channel < NUM_CHANNELS
    if X_REPEATS * B_REPEATS == 1:
        column, owned = channel, in_conv
    else:  # several channels convolve one column; the first of them keeps it
        x_head, b_head = channel // HEAD_DIM, (channel - B_CHANNEL) // D_STATE
        x_column = (x_head // X_REPEATS) * HEAD_DIM + channel % HEAD_DIM
        b_column = B_COLUMN + (b_head // B_REPEATS) * D_STATE + (channel - B_CHANNEL) % D_STATE
        is_x, is_b = channel < B_CHANNEL, (channel >= B_CHANNEL) & (channel < C_CHANNEL)
        column = tl.where(is_b, b_column, C_COLUMN + channel - C_CHANNEL)
        column = tl.where(is_x, x_column, column)
        owned = in_conv & ~(is_x & (x_head % X_REPEATS > 0))
        owned = owned & ~(is_b & (b_head % B_REPEATS > 0))

    q = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    known = q < num_new
    node = first + q
    y = tl.zeros([BLOCK_Q, BLOCK_C], dtype=tl.float32)
    if conv_bias is not None:
        y += load_kept(conv_bias + channel, in_conv).to(tl.float32)[None, :]
    at_new, weights = (), ()
    for tap in tl.static_range(WIDTH):
        weight = load_kept(
            weight_pointer + channel * channel_stride + tap * tap_stride, in_conv
        ).to(tl.float32)
        seen = load_kept(windows + node * WIDTH + tap, known)
        fresh = seen - (WIDTH - 1) - first
        at_new += (fresh,)  # type: ignore[assignment]
        weights += (weight,)  # type: ignore[assignment]
        row = seen  # row of the tree so far, or of the conv state when the tree began
        if REPLAY:
            for place in tl.static_range(WIDTH - 1):
                row = tl.where(seen == place, _replayed(path_length + place, path, WIDTH), row)
        earlier = load_kept(
            old + row[:, None] * row_stride + column[None, :],
            (known & (fresh < 0))[:, None] & in_conv[None, :],
        )
        y += earlier.to(tl.float32) * weight[None, :]
    if REPLAY and tile == 0:
        _keep_tail(old, new, row_stride, column, owned, path, path_length, WIDTH)
    follow(OVERLAPS)
    value = y.to(xb.dtype.element_ty)
    for tap in tl.static_range(WIDTH):
        fresh = at_new[tap]
        value = tl.load(  # the last tap's is the node's own
            projected + fresh[:, None] * projected_stride + column[None, :],
            mask=(known & (fresh >= 0))[:, None] & in_conv[None, :], other=0.0,
        )
        y += value.to(tl.float32) * weights[tap][None, :]
    at = new + (WIDTH - 1 + node)[:, None] * row_stride + column[None, :]
    store_kept(at, value, known[:, None] & owned[None, :])
    y = (y * tl.sigmoid(y)).to(xb.dtype.element_ty)
    in_xb, in_c = channel < C_CHANNEL, in_conv & (channel >= C_CHANNEL)
    at = xb + node[:, None] * xb_stride + channel[None, :]
    store_kept(at, y, known[:, None] & in_xb[None, :])
    at = C_pointer + q[:, None] * C_stride + (channel - C_CHANNEL)[None, :]
    tl.store(at, y, mask=known[:, None] & in_c[None, :])


@triton.jit
def _keep_tail(
    old, new, row_stride, column, owned, path, path_length, WIDTH: tl.constexpr
):
    """Store the new conv state: the last inputs of [old conv state, accepted path]."""
    for place in tl.static_range(WIDTH - 1):
        source = _replayed(path_length + place, path, WIDTH)
        kept = load_kept(old + source * row_stride + column, owned)
        store_kept(new + place * row_stride + column, kept, owned)


@triton.jit
def _keep_steps(
    projected, projected_stride, old, new, row_stride, steps, steps_part_stride, steps_stride,
    dt_bias, A_log, ancestors, tree_size, path, path_length, tile, first, num_new,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, DT_COLUMN: tl.constexpr,
    DT_MIN: tl.constexpr, DT_MAX: tl.constexpr, REPLAY: tl.constexpr, OVERLAPS: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr,
):
    """Store dt of the new nodes, and c_i = Σ_j L[i, j]·dt_j·A, for all heads."""
    head = tl.arange(0, BLOCK_H)
    in_h = head < HEADS
    bias = load_kept(dt_bias + head, in_h).to(tl.float32)
    A = -tl.exp(load_kept(A_log + head, in_h).to(tl.float32))
    q = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    known = q < num_new
    node = first + q
    mine = known[:, None] & in_h[None, :]
    if REPLAY and tile == 0:
        _keep_tail(old, new, row_stride, DT_COLUMN + head, in_h, path, path_length, WIDTH)
    follow(OVERLAPS)
    raw = tl.load(
        projected + q[:, None] * projected_stride + (DT_COLUMN + head)[None, :],
        mask=mine, other=0.0,
    )
    at = new + (WIDTH - 1 + node)[:, None] * row_stride + (DT_COLUMN + head)[None, :]
    store_kept(at, raw, mine)
    at = steps + node[:, None] * steps_stride + head[None, :]
    store_kept(at, _positive_dt(raw, bias[None, :], DT_MIN, DT_MAX), mine)

    total = tl.zeros([BLOCK_Q, BLOCK_H], dtype=tl.float32)
    for start in range(0, first + tl.minimum((tile + 1) * BLOCK_Q, num_new), BLOCK_Q):
        other = start + tl.arange(0, BLOCK_Q)
        fresh = other - first
        is_new, is_old = (fresh >= 0) & (fresh < num_new), fresh < 0
        value = tl.load(
            projected + fresh[:, None] * projected_stride + (DT_COLUMN + head)[None, :],
            mask=is_new[:, None] & in_h[None, :], other=0.0,
        ).to(tl.float32)
        if not REPLAY:
            value += load_kept(
                old + (WIDTH - 1 + other)[:, None] * row_stride + (DT_COLUMN + head)[None, :],
                is_old[:, None] & in_h[None, :],
            ).to(tl.float32)
        dt = _positive_dt(value, bias[None, :], DT_MIN, DT_MAX)
        there = (is_new | is_old)[:, None] & in_h[None, :]
        above = load_kept(
            ancestors + node[:, None] * tree_size + other[None, :],
            known[:, None] & (is_new | is_old)[None, :],
        )
        decay = tl.where(there, dt * A[None, :], 0.0)
        total += tl.dot((above != 0).to(tl.float32), decay, input_precision="ieee")
    store_kept(at + steps_part_stride, total, mine)


@triton.jit
def _positive_dt(dt, bias, DT_MIN: tl.constexpr, DT_MAX: tl.constexpr):
    """Apply softplus and clamp."""
    # max(x, 0) + log1p(e), with log1p(e) = 2·atanh(e / (2 + e)) as a series: exact for small e too
    dt = dt.to(tl.float32) + bias
    e = tl.exp(-tl.abs(dt))
    z = e / (2.0 + e)
    z2 = z * z
    series = 1.0 / 9 + z2 * (1.0 / 11 + z2 * (1.0 / 13))
    series = 1.0 + z2 * (1.0 / 3 + z2 * (1.0 / 5 + z2 * (1.0 / 7 + z2 * series)))
    soft = tl.maximum(dt, 0.0) + 2.0 * z * series
    return tl.minimum(tl.maximum(soft, DT_MIN), DT_MAX)
