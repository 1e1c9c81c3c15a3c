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
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree_kernels.contracts import CacheState, Derived, GatedDeltaWeights, MixerWeights, Topology
from stree_kernels.launch import follow, load_kept, overlapping, store_kept
from stree_kernels.products.linear import mixed_precision_of, mixed_product, precision_of
from stree_kernels.shapes import GatedDeltaShape, MixerShape, ScanShape

BLOCK_CHANNELS, BLOCK_NODES = 64, 16  # that a program convolves
MIN_ROWS_WIDE_BLOCKS = 8  # sequences from which on a small tree's blocks have more channels
MAX_BLOCK_CHANNELS = 256
BLOCK_HEAD = 32  # channels of a head whose state a program advances
PATH_BLOCK = tl.constexpr(16)  # nodes of an accepted path that a program takes at a time


class ConvShape(NamedTuple):
    """Dimensions of a replay and conv, constants of its kernel."""

    heads: int
    x_repeats: int  # conv channels a projected channel of x, likewise of B
    b_repeats: int
    b_column: int  # of the projected channels, at which B begins, likewise C and dt
    c_column: int
    dt_column: int
    b_channel: int  # of the conv's channels, at which B begins, likewise C
    c_channel: int
    num_channels: int
    dt_min: float
    dt_max: float


class ConvBlock(NamedTuple):
    """Tiles of the launch's programs."""

    C: int  # channels that a program convolves
    Q: int  # nodes of a program
    STEPS: int  # nodes of a program of dt
    H: int  # heads
    P: int  # channels of a head whose state a program advances
    S: int
    HEAD: int  # such blocks of a head


class ConvDims(NamedTuple):
    """Dimensions of a mixer's conv.

    Attributes:
        columns: Channels of x, B and C, or of q, k and v, in the raw inputs.
        channels: The same after the conv: a group of x or B may be repeated before it.
        dt_limit: Bounds of dt.
        scan: Dimensions of the state that the launch advances; none is advanced by default.
    """

    columns: tuple[int, int, int]
    channels: tuple[int, int, int]
    dt_limit: tuple[float, float] = (0.0, math.inf)
    scan: ScanShape = ScanShape(1, 1, 1, 1, 1, 0)


def convolve(
    kept: Tensor, history: Tensor, derived: Derived, state: Tensor | None,
    weights: MixerWeights | GatedDeltaWeights, shape: MixerShape | GatedDeltaShape, dims: ConvDims,
    topology: Topology, cache_state: CacheState, num_read: int,
) -> Tensor:
    """Replay the accepted path into a state, if any, and convolve the new nodes.

    These are num_read … num_read + Q − 1.

    kept (B, Q, C + H) holds their raw inputs. Writes history and state, as `naive.mamba_tree` or
    `naive.gated_delta_tree` does, and derived. Of a gated-delta layer q, k and v stand in the
    places of x, B and C, and a in dt's. Returns C (B, Q, Gc·S), or v (B, Q, H·V).
    """
    batch, num_new, _ = kept.shape
    x_channels, b_channels, c_channels = dims.channels
    x_columns, b_columns, _ = dims.columns
    num_channels = x_channels + b_channels + c_channels
    C = torch.empty(batch, num_new, c_channels, device=kept.device, dtype=kept.dtype)
    block_q, block_c = BLOCK_NODES, BLOCK_CHANNELS
    if batch >= MIN_ROWS_WIDE_BLOCKS:
        block_q = min(block_q, triton.next_power_of_2(num_new))
        block_c = min(MAX_BLOCK_CHANNELS, block_c * BLOCK_NODES // block_q)
    block_p = max(16, min(BLOCK_HEAD, triton.next_power_of_2(dims.scan.head_dim)))
    num_blocks, head_blocks = (
        triton.cdiv(num_channels, block_c), triton.cdiv(dims.scan.head_dim, block_p)
    )
    xb, steps, heads = derived.convolved, derived.decays, shape.num_heads
    assert kept.stride(2) == history.stride(3) == xb.stride(3) == steps.stride(4) == 1
    assert state is None or state.stride(3) == 1
    assert min(xb.shape[2], steps.shape[3]) >= num_read + num_new
    assert num_read + num_new <= topology.depths.shape[1]
    assert history.shape[2] >= shape.tail + num_read + num_new
    num_replays = heads * head_blocks if num_read == 0 and state is not None else 0
    num_tiles = triton.cdiv(num_new, BLOCK_NODES)
    replay_conv_kernel[(num_replays + (num_blocks + 1) * num_tiles, batch)](
        kept, kept.stride()[:2], history, history.stride()[:3], derived.args, C, C.stride()[:2],
        state, (0, 0, 0) if state is None else state.stride()[:3],
        weights.conv, weights.conv.stride(), weights.conv_bias, weights.dt_bias, weights.A_log,
        topology.args, cache_state.args,
        num_read, num_new, min(xb.shape[2], steps.shape[3]), num_replays, num_blocks,
        SCAN=dims.scan,
        CONV=ConvShape(
            heads, x_channels // x_columns, b_channels // b_columns,
            x_columns, x_columns + b_columns, shape.num_channels,
            x_channels, x_channels + b_channels, num_channels, *dims.dt_limit,
        ),
        BLOCK=ConvBlock(
            block_c, block_q, BLOCK_NODES, max(16, triton.next_power_of_2(heads)), block_p,
            max(16, triton.next_power_of_2(dims.scan.d_state)), head_blocks,
        ),
        WIDTH=shape.width, REPLAY=num_read == 0, READY=cache_state.ready,
        PRECISION=precision_of(kept), MIXED=mixed_precision_of(kept.dtype),
        num_warps=4, **overlapping(kept),
    )
    return C


@triton.jit
def replay_conv_kernel(
    projected, projected_strides, history, history_strides, nodes, C, C_strides, state,
    state_strides, weight, weight_strides, conv_bias, dt_bias, A_log, tree, cache,
    num_read, num_new, max_nodes, num_replays, num_blocks,
    SCAN: tl.constexpr, CONV: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    REPLAY: tl.constexpr, READY: tl.constexpr, PRECISION: tl.constexpr, MIXED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # The previous launch, a product, touches neither the state nor the last tree's inputs. So the
    # replay waits for nothing; the conv waits for the product, and the scan relies on that
    if READY == "none":
        follow(OVERLAPS)
    program, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    parity = load_kept(cache.parities)
    variant = load_kept(cache.variants + batch)
    projected += batch * projected_strides[0]
    history += batch * history_strides[1]
    xb = nodes.convolved + batch * nodes.convolved_strides[1]
    steps = nodes.decays + batch * nodes.decays_strides[1]
    old = history + parity * history_strides[0]
    path = cache.path + batch * cache.path_stride
    if REPLAY:
        path_length = load_kept(cache.path_lengths + batch).to(tl.int32)
        half = 1 - parity
    else:
        path_length = 0
        half = parity
    new = history + half * history_strides[0]
    if program < num_replays:  # never so without REPLAY
        if state is not None:
            head = program // BLOCK.HEAD
            replay(
                state + batch * state_strides[0] + head * state_strides[1], state_strides[2],
                xb + parity * nodes.convolved_strides[0], nodes.convolved_strides[2],
                steps + parity * nodes.decays_strides[0] + head, nodes.decays_strides[3],
                A_log + head, path, cache.path_size, path_length, max_nodes,
                (program % BLOCK.HEAD) * BLOCK.P, (head // SCAN.heads_a_x) * SCAN.head_dim,
                SCAN.b_channel + (head // SCAN.heads_a_b) * SCAN.d_state,
                SCAN, BLOCK, PRECISION, MIXED,
            )
    else:
        block = (program - num_replays) % (num_blocks + 1)
        tile = (program - num_replays) // (num_blocks + 1)
        if block == num_blocks:
            _keep_steps(
                projected, projected_strides[1], old, new, history_strides[2],
                steps + half * nodes.decays_strides[0],
                nodes.decays_strides[2], nodes.decays_strides[3], dt_bias, A_log,
                tree.ancestors + variant * tree.size * tree.size, tree.size,
                path, path_length, tile, num_read, num_new,
                CONV, BLOCK, WIDTH, REPLAY, OVERLAPS,
            )
        else:
            _keep_channels(
                projected, projected_strides[1], old, new, history_strides[2],
                xb + half * nodes.convolved_strides[0], nodes.convolved_strides[2],
                C + batch * C_strides[0], C_strides[1], weight, weight_strides, conv_bias,
                tree.windows + variant * tree.size * WIDTH,
                path, path_length, block, tile, num_read, num_new,
                SCAN, CONV, BLOCK, WIDTH, REPLAY, OVERLAPS,
            )


@triton.jit
def replay(
    state, row_stride, xb, xb_stride, dt_pointer, dt_stride, A_log,
    path, path_size, path_length, max_nodes,
    start_p, x_start, b_start, SCAN: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr, MIXED: tl.constexpr,
):
    """Advance the state of a block of a head's channels along the accepted path."""
    p, s = start_p + tl.arange(0, BLOCK.P), tl.arange(0, BLOCK.S)
    in_p, in_s = p < SCAN.head_dim, s < SCAN.d_state
    at_state = state + p[:, None] * row_stride + s[None, :]
    in_state = in_p[:, None] & in_s[None, :]
    h = tl.load(at_state, mask=in_state, other=0.0).to(tl.float32)
    A = -tl.exp(load_kept(A_log).to(tl.float32))
    # All values of the first nodes are loaded before it is known how many of them count
    k = tl.arange(0, PATH_BLOCK)
    h = advanced_along(
        h, A, path, k, k < path_size, k < path_length, max_nodes, xb, xb_stride,
        dt_pointer, dt_stride, x_start + p, in_p, b_start + s, in_s, PRECISION, MIXED,
    )
    for start in range(PATH_BLOCK, path_length, PATH_BLOCK):
        counts = start + k < path_length
        h = advanced_along(
            h, A, path, start + k, counts, counts, max_nodes, xb, xb_stride,
            dt_pointer, dt_stride, x_start + p, in_p, b_start + s, in_s, PRECISION, MIXED,
        )
    if path_length > 0:
        tl.store(at_state, h.to(state.dtype.element_ty), mask=in_state)


@triton.jit
def advanced_along(
    h, A, path, k, listed, accepted, max_nodes, xb, xb_stride, dt_pointer, dt_stride,
    x_channel, in_p, b_channel, in_s, PRECISION: tl.constexpr, MIXED: tl.constexpr,
):
    """Return a block of a state after the accepted nodes of a `PATH_BLOCK`; all listed are read."""
    node, there, dt, B = path_inputs(
        path, k, listed, max_nodes, xb, xb_stride, dt_pointer, dt_stride, b_channel, in_s
    )
    at = xb + node[:, None] * xb_stride + x_channel[None, :]
    x = load_kept(at, there[:, None] & in_p[None, :])
    decay, after = path_weights(A, dt, accepted)
    return advanced(h, decay, after, x, B, accepted, PRECISION, MIXED)


@triton.jit
def path_inputs(
    path, k, listed, max_nodes, xb, xb_stride, dt_pointer, dt_stride, b_channel, in_s
):
    """Return some nodes of a path buffer, which of them exist, and their dt and B.

    Not all of them need count.
    """
    node = load_kept(path + k, listed).to(tl.int32)
    there = listed & (node >= 0) & (node < max_nodes)
    dt = load_kept(dt_pointer + node * dt_stride, there)
    at = xb + node[:, None] * xb_stride + b_channel[None, :]
    return node, there, dt, load_kept(at, there[:, None] & in_s[None, :])


@triton.jit
def path_weights(A, dt, accepted):
    """Return the state's decay over the path's accepted nodes, and each node's decay after it.

    Covers a `PATH_BLOCK`; nodes that are not accepted count for nothing.
    """
    dt = tl.where(accepted, dt, 0.0)
    total = tl.sum(dt * A, axis=0)
    return tl.exp(total), tl.exp(total - tl.cumsum(dt * A, axis=0)) * dt


@triton.jit
def advanced(h, decay, after, x, B, accepted, PRECISION: tl.constexpr, MIXED: tl.constexpr):
    """Return the state (P, S) after the accepted nodes of a `PATH_BLOCK`."""
    x = tl.where(accepted[:, None], x.to(tl.float32), 0.0)
    B = tl.where(accepted[:, None], B, 0.0)
    # (P, S) = (P, path) @ (path, S)
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
    projected, projected_stride, old, new, row_stride, xb, xb_stride, C, C_stride,
    weight, weight_strides, conv_bias, windows, path, path_length, block, tile, num_read, num_new,
    SCAN: tl.constexpr, CONV: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    REPLAY: tl.constexpr, OVERLAPS: tl.constexpr,
):
    """Keep the nodes' raw inputs, and store silu(conv) of a block of channels."""
    channel = block * BLOCK.C + tl.arange(0, BLOCK.C)
    in_conv = channel < CONV.num_channels
    if CONV.x_repeats * CONV.b_repeats == 1:
        column, owned = channel, in_conv
    else:  # several channels convolve one column; the first of them keeps it
        x_head, b_head = channel // SCAN.head_dim, (channel - CONV.b_channel) // SCAN.d_state
        x_column = (x_head // CONV.x_repeats) * SCAN.head_dim + channel % SCAN.head_dim
        b_column = CONV.b_column + (b_head // CONV.b_repeats) * SCAN.d_state
        b_column = b_column + (channel - CONV.b_channel) % SCAN.d_state
        is_x, after_x = channel < CONV.b_channel, channel >= CONV.b_channel
        is_b = after_x & (channel < CONV.c_channel)
        column = tl.where(is_b, b_column, CONV.c_column + channel - CONV.c_channel)
        column = tl.where(is_x, x_column, column)
        owned = in_conv & ~(is_x & (x_head % CONV.x_repeats > 0))
        owned = owned & ~(is_b & (b_head % CONV.b_repeats > 0))

    q = tile * BLOCK.Q + tl.arange(0, BLOCK.Q)
    known = q < num_new
    node = num_read + q
    block_q: tl.constexpr = BLOCK.Q  # Triton 3.6 wants constants, not numbers, in lists
    block_c: tl.constexpr = BLOCK.C
    y = tl.zeros([block_q, block_c], dtype=tl.float32)
    if conv_bias is not None:
        y += load_kept(conv_bias + channel, in_conv).to(tl.float32)[None, :]
    at_new, taps = (), ()
    for tap in tl.static_range(WIDTH):
        at = weight + channel * weight_strides[0] + tap * weight_strides[1]
        factor = load_kept(at, in_conv).to(tl.float32)
        seen = load_kept(windows + node * WIDTH + tap, known)
        fresh = seen - (WIDTH - 1) - num_read
        at_new += (fresh,)  # type: ignore[assignment]
        taps += (factor,)  # type: ignore[assignment]
        row = seen  # row of the tree so far, or of the conv state when the tree began
        if REPLAY:
            for place in tl.static_range(WIDTH - 1):
                row = tl.where(seen == place, _replayed(path_length + place, path, WIDTH), row)
        earlier = load_kept(
            old + row[:, None] * row_stride + column[None, :],
            (known & (fresh < 0))[:, None] & in_conv[None, :],
        )
        y += earlier.to(tl.float32) * factor[None, :]
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
        y += value.to(tl.float32) * taps[tap][None, :]
    at = new + (WIDTH - 1 + node)[:, None] * row_stride + column[None, :]
    store_kept(at, value, known[:, None] & owned[None, :])
    y = (y * tl.sigmoid(y)).to(xb.dtype.element_ty)
    in_xb, in_c = channel < CONV.c_channel, in_conv & (channel >= CONV.c_channel)
    at = xb + node[:, None] * xb_stride + channel[None, :]
    store_kept(at, y, known[:, None] & in_xb[None, :])
    at = C + q[:, None] * C_stride + (channel - CONV.c_channel)[None, :]
    tl.store(at, y, mask=known[:, None] & in_c[None, :])


@triton.jit
def _keep_tail(old, new, row_stride, column, owned, path, path_length, WIDTH: tl.constexpr):
    """Store the new conv state: the last inputs of [old conv state, accepted path]."""
    for place in tl.static_range(WIDTH - 1):
        source = _replayed(path_length + place, path, WIDTH)
        kept = load_kept(old + source * row_stride + column, owned)
        store_kept(new + place * row_stride + column, kept, owned)


@triton.jit
def _keep_steps(
    projected, projected_stride, old, new, row_stride, steps, steps_part_stride, steps_stride,
    dt_bias, A_log, ancestors, tree_size, path, path_length, tile, num_read, num_new,
    CONV: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    REPLAY: tl.constexpr, OVERLAPS: tl.constexpr,
):
    """Store dt of the new nodes, and c_i = Σ_j L[i, j]·dt_j·A, for all heads."""
    head = tl.arange(0, BLOCK.H)
    in_h, column = head < CONV.heads, CONV.dt_column + head
    bias = load_kept(dt_bias + head, in_h).to(tl.float32)
    A = -tl.exp(load_kept(A_log + head, in_h).to(tl.float32))
    q = tile * BLOCK.STEPS + tl.arange(0, BLOCK.STEPS)
    known = q < num_new
    node = num_read + q
    mine = known[:, None] & in_h[None, :]
    if REPLAY and tile == 0:
        _keep_tail(old, new, row_stride, column, in_h, path, path_length, WIDTH)
    follow(OVERLAPS)
    raw = tl.load(
        projected + q[:, None] * projected_stride + column[None, :],
        mask=mine, other=0.0,
    )
    at = new + (WIDTH - 1 + node)[:, None] * row_stride + column[None, :]
    store_kept(at, raw, mine)
    at = steps + node[:, None] * steps_stride + head[None, :]
    store_kept(at, positive_dt(raw, bias[None, :], CONV.dt_min, CONV.dt_max), mine)

    block_q: tl.constexpr = BLOCK.STEPS
    block_h: tl.constexpr = BLOCK.H
    total = tl.zeros([block_q, block_h], dtype=tl.float32)
    for start in range(0, num_read + tl.minimum((tile + 1) * BLOCK.STEPS, num_new), BLOCK.STEPS):
        other = start + tl.arange(0, BLOCK.STEPS)
        fresh = other - num_read
        is_new, is_old = (fresh >= 0) & (fresh < num_new), fresh < 0
        value = tl.load(
            projected + fresh[:, None] * projected_stride + column[None, :],
            mask=is_new[:, None] & in_h[None, :], other=0.0,
        ).to(tl.float32)
        if not REPLAY:
            value += load_kept(
                old + (WIDTH - 1 + other)[:, None] * row_stride + column[None, :],
                is_old[:, None] & in_h[None, :],
            ).to(tl.float32)
        dt = positive_dt(value, bias[None, :], CONV.dt_min, CONV.dt_max)
        there = (is_new | is_old)[:, None] & in_h[None, :]
        above = load_kept(
            ancestors + node[:, None] * tree_size + other[None, :],
            known[:, None] & (is_new | is_old)[None, :],
        )
        decay = tl.where(there, dt * A[None, :], 0.0)
        # (Q, H) = (Q, N) @ (N, H)
        total += tl.dot((above != 0).to(tl.float32), decay, input_precision="ieee")
    store_kept(at + steps_part_stride, total, mine)


@triton.jit
def positive_dt(dt, bias, DT_MIN: tl.constexpr, DT_MAX: tl.constexpr):
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
