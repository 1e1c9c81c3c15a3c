"""A Mamba-2 layer's tree call in one launch: replay, tree conv, tree scan (Triton).

One program serves one sequence, one head and a block of that head's channels. It advances its
part of the state along the last accepted path, writes it once, and scans the new nodes from it.
Nothing is kept a node but the projected inputs. The naive twin is `naive.mamba_tree`.

Programs of other heads still read the last tree's inputs while this one writes the new tree's:
hence two buffers, and `Steering.parity` says which is which.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree_kernels.shapes import MixerShape, MixerWeights, Steering, Topology


def mamba_tree(
    projected: Tensor,
    rows: Tensor,
    state: Tensor,
    weights: MixerWeights,
    shape: MixerShape,
    topology: Topology,
    steering: Steering,
    first: int,
) -> Tensor:
    """`naive.mamba_tree` in one launch; y (B, Q, H·P) in projected's dtype."""
    batch, num_new, _ = projected.shape
    assert projected.stride(2) == rows.stride(3) == state.stride(3) == 1
    assert first + num_new <= topology.depths.shape[1]
    assert rows.shape[2] >= shape.tail + first + num_new
    kept = projected[..., shape.d_inner :]
    y = torch.empty(batch, num_new, shape.d_inner, device=projected.device, dtype=projected.dtype)
    block_p = max(16, min(32, triton.next_power_of_2(shape.head_dim)))
    num_blocks = triton.cdiv(shape.head_dim, block_p)
    x_dim, b_dim, _ = shape.xbc_dims
    x_conv, b_conv, _ = shape.scan_groups
    heads = shape.num_heads
    num_nodes = first + num_new
    block_n = min(64, max(16, triton.next_power_of_2(num_nodes)))
    copied = triton.next_power_of_2(triton.cdiv(shape.num_kept, heads * num_blocks))
    wide = projected.dtype == torch.float32
    mamba_tree_kernel[(num_blocks, heads, batch)](
        kept, kept.stride(0), kept.stride(1),
        rows, rows.stride(0), rows.stride(1), rows.stride(2),
        state, state.stride(0), state.stride(1), state.stride(2),
        y, y.stride(0), y.stride(1),
        weights.conv, weights.conv_bias, weights.conv.stride(0),
        weights.dt_bias, weights.A_log, weights.D,
        topology.ancestors.view(torch.uint8), topology.windows, topology.depths.shape[1],
        steering.path, steering.path.stride(0), steering.path_length,
        steering.variant, steering.parity,
        first, num_new,
        HEAD_DIM=shape.head_dim, D_STATE=shape.d_state, WIDTH=shape.width,
        HEADS_A_X=heads // shape.x_groups, HEADS_A_B=heads // shape.b_groups,
        HEADS_A_C=heads // shape.c_groups,
        HEADS_A_XCONV=heads // x_conv, HEADS_A_BCONV=heads // b_conv,
        B_COLUMN=x_dim, C_COLUMN=x_dim + b_dim, DT_COLUMN=shape.num_channels,
        B_CHANNEL=x_conv * shape.head_dim,
        C_CHANNEL=x_conv * shape.head_dim + b_conv * shape.d_state,
        NUM_KEPT=shape.num_kept, DT_MIN=shape.dt_limit[0], DT_MAX=shape.dt_limit[1],
        REPLAY=first == 0,
        BLOCK_P=block_p, BLOCK_S=max(16, triton.next_power_of_2(shape.d_state)),
        BLOCK_N=block_n, BLOCK_Q=min(block_n, max(16, triton.next_power_of_2(num_new))),
        COPIED=copied,
        # 16-bit inputs have no more digits than tf32; fp32 ones are to stay exact to 1e-5
        PRECISION="tf32x3" if wide else "tf32",
        num_warps=4 if block_n <= 32 else 8,
    )  # fmt: skip
    return y


@triton.jit
def _replayed(seq, path, known, WIDTH: tl.constexpr):
    """Where a token of [old tail, accepted path] lies in the old buffer of [tail, nodes]."""
    on_path = seq >= WIDTH - 1
    node = tl.load(path + seq - (WIDTH - 1), mask=known & on_path, other=0)
    return tl.where(on_path, WIDTH - 1 + node, seq).to(tl.int32)


@triton.jit
def _softplus_clamped(dt, DT_MIN: tl.constexpr, DT_MAX: tl.constexpr):
    # max(x, 0) + log1p(e), with log1p(e) = 2·atanh(e / (2 + e)) as a series: exact for small e too
    e = tl.exp(-tl.abs(dt))
    z = e / (2.0 + e)
    z2 = z * z
    series = 1.0 / 9 + z2 * (1.0 / 11 + z2 * (1.0 / 13))
    series = 1.0 + z2 * (1.0 / 3 + z2 * (1.0 / 5 + z2 * (1.0 / 7 + z2 * series)))
    soft = tl.maximum(dt, 0.0) + 2.0 * z * series
    return tl.minimum(tl.maximum(soft, DT_MIN), DT_MAX)


@triton.jit
def _replayed_conv(
    k, accepted, old, row_stride, column, in_block, channel, path,
    conv_weight, conv_bias, weight_stride, WIDTH: tl.constexpr,
):  # fmt: skip
    """silu(conv) at steps k of the accepted path, (BLOCK_K, channels)."""
    y = tl.zeros([k.shape[0], column.shape[0]], dtype=tl.float32)
    if conv_bias is not None:
        y += tl.load(conv_bias + channel, mask=in_block, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(WIDTH):
        row = _replayed(k + tap, path, accepted, WIDTH)
        value = tl.load(
            old + row[:, None] * row_stride + column[None, :],
            mask=accepted[:, None] & in_block[None, :], other=0.0,
        )  # fmt: skip
        weight = tl.load(conv_weight + channel * weight_stride + tap, mask=in_block, other=0.0)
        y += value.to(tl.float32) * weight.to(tl.float32)[None, :]
    y = tl.where(accepted[:, None], y, 0.0)
    return y * tl.sigmoid(y)


@triton.jit
def _tree_conv(
    node, known, projected, projected_stride, old, row_stride, column, in_block, channel,
    windows, path, path_length, first, conv_weight, conv_bias, weight_stride,
    WIDTH: tl.constexpr, REPLAY: tl.constexpr,
):  # fmt: skip
    """silu(conv) at nodes of the new tree, (BLOCK, channels)."""
    y = tl.zeros([node.shape[0], column.shape[0]], dtype=tl.float32)
    if conv_bias is not None:
        y += tl.load(conv_bias + channel, mask=in_block, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(WIDTH):
        seen = tl.load(windows + node * WIDTH + tap, mask=known, other=0)
        new = seen - (WIDTH - 1) - first
        is_new = known & (new >= 0)
        is_old = known & (new < 0)
        if REPLAY:
            row = _replayed(path_length + seen, path, is_old, WIDTH)
        else:
            row = seen
        value = tl.load(
            projected + new[:, None] * projected_stride + column[None, :],
            mask=is_new[:, None] & in_block[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        value += tl.load(
            old + row[:, None] * row_stride + column[None, :],
            mask=is_old[:, None] & in_block[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        weight = tl.load(conv_weight + channel * weight_stride + tap, mask=in_block, other=0.0)
        y += value * weight.to(tl.float32)[None, :]
    y = tl.where(known[:, None], y, 0.0)
    return y * tl.sigmoid(y)


@triton.jit
def _node_dt(
    node, known, projected, projected_stride, old, row_stride, column, dt_bias, first,
    WIDTH: tl.constexpr, DT_MIN: tl.constexpr, DT_MAX: tl.constexpr,
):  # fmt: skip
    """dt after softplus at nodes of the new tree; 0 where unknown."""
    is_new = node >= first
    dt = tl.load(
        projected + (node - first) * projected_stride + column, mask=known & is_new, other=0.0
    ).to(tl.float32)
    dt += tl.load(
        old + (node + WIDTH - 1) * row_stride + column, mask=known & (node < first), other=0.0
    ).to(tl.float32)
    return tl.where(known, _softplus_clamped(dt + dt_bias, DT_MIN, DT_MAX), 0.0)


@triton.jit
def _log_decay(
    node, known, num_nodes, ancestors, row_length, projected, projected_stride, old, row_stride,
    column, dt_bias, A, first, WIDTH: tl.constexpr, DT_MIN: tl.constexpr, DT_MAX: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """c_i = Σ_j L[i, j]·dt_j·A, summed over blocks of ancestors."""
    total = tl.zeros([node.shape[0]], dtype=tl.float32)
    for start in range(0, num_nodes, BLOCK_N):
        other = start + tl.arange(0, BLOCK_N)
        other_known = other < num_nodes
        dt = _node_dt(
            other, other_known, projected, projected_stride, old, row_stride, column, dt_bias,
            first, WIDTH, DT_MIN, DT_MAX,
        )  # fmt: skip
        above = tl.load(
            ancestors + node[:, None] * row_length + other[None, :],
            mask=known[:, None] & other_known[None, :], other=0,
        )  # fmt: skip
        total += tl.sum(tl.where(above != 0, dt[None, :] * A, 0.0), axis=1)
    return total


@triton.jit
def mamba_tree_kernel(
    projected, projected_batch_stride, projected_stride,
    rows, rows_parity_stride, rows_batch_stride, row_stride,
    state_pointer, state_batch_stride, state_head_stride, state_row_stride,
    y_pointer, y_batch_stride, y_stride,
    conv_weight, conv_bias, weight_stride, dt_bias_pointer, A_log, D_pointer,
    ancestors, windows, tree_size, path, path_stride, path_lengths, variants, parities,
    first, num_new,
    HEAD_DIM: tl.constexpr, D_STATE: tl.constexpr, WIDTH: tl.constexpr,
    HEADS_A_X: tl.constexpr, HEADS_A_B: tl.constexpr, HEADS_A_C: tl.constexpr,
    HEADS_A_XCONV: tl.constexpr, HEADS_A_BCONV: tl.constexpr,
    B_COLUMN: tl.constexpr, C_COLUMN: tl.constexpr, DT_COLUMN: tl.constexpr,
    B_CHANNEL: tl.constexpr, C_CHANNEL: tl.constexpr,
    NUM_KEPT: tl.constexpr, DT_MIN: tl.constexpr, DT_MAX: tl.constexpr, REPLAY: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr,
    COPIED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    parity = tl.load(parities)
    variant = tl.load(variants + batch)
    ancestors += variant * tree_size * tree_size
    windows += variant * tree_size * WIDTH
    projected += batch * projected_batch_stride
    rows += batch * rows_batch_stride
    old = rows + parity * rows_parity_stride
    path += batch * path_stride
    if REPLAY:
        path_length = tl.load(path_lengths + batch).to(tl.int32)
        new = rows + (1 - parity) * rows_parity_stride
    else:
        path_length = 0
        new = old

    p = block * BLOCK_P + tl.arange(0, BLOCK_P)
    s = tl.arange(0, BLOCK_S)
    in_p, in_s = p < HEAD_DIM, s < D_STATE
    x_column = (head // HEADS_A_X) * HEAD_DIM + p
    b_column = B_COLUMN + (head // HEADS_A_B) * D_STATE + s
    c_column = C_COLUMN + (head // HEADS_A_C) * D_STATE + s
    dt_column = DT_COLUMN + head
    x_channel = (head // HEADS_A_XCONV) * HEAD_DIM + p
    b_channel = B_CHANNEL + (head // HEADS_A_BCONV) * D_STATE + s
    c_channel = C_CHANNEL + (head // HEADS_A_C) * D_STATE + s
    dt_bias = tl.load(dt_bias_pointer + head).to(tl.float32)
    A = -tl.exp(tl.load(A_log + head).to(tl.float32))
    D = tl.load(D_pointer + head).to(tl.float32)
    state_at = (
        state_pointer + batch * state_batch_stride + head * state_head_stride
        + p[:, None] * state_row_stride + s[None, :]
    )  # fmt: skip
    in_state = in_p[:, None] & in_s[None, :]
    state = tl.load(state_at, mask=in_state, other=0.0).to(tl.float32)

    # 1. Advance the state along the accepted path
    if REPLAY:
        for start in range(0, path_length, 16):
            k = start + tl.arange(0, 16)
            accepted = k < path_length
            x = _replayed_conv(
                k, accepted, old, row_stride, x_column, in_p, x_channel, path,
                conv_weight, conv_bias, weight_stride, WIDTH,
            )  # fmt: skip
            B = _replayed_conv(
                k, accepted, old, row_stride, b_column, in_s, b_channel, path,
                conv_weight, conv_bias, weight_stride, WIDTH,
            )  # fmt: skip
            row = _replayed(k + WIDTH - 1, path, accepted, WIDTH)
            dt = tl.load(old + row * row_stride + dt_column, mask=accepted, other=0.0)
            dt = _softplus_clamped(dt.to(tl.float32) + dt_bias, DT_MIN, DT_MAX)
            dt = tl.where(accepted, dt, 0.0)
            total = tl.sum(dt * A, axis=0)
            after = tl.exp(total - tl.cumsum(dt * A, axis=0)) * dt
            added = tl.dot(tl.trans(x * after[:, None]), B, input_precision=PRECISION)
            state = tl.exp(total) * state + added
        if path_length > 0:
            tl.store(state_at, state.to(state_pointer.dtype.element_ty), mask=in_state)

    # 2. Keep the new nodes' inputs, each program a few columns of them
    copied = (head * tl.num_programs(0) + block) * COPIED + tl.arange(0, COPIED)
    in_copy = copied < NUM_KEPT
    for start in range(0, num_new, BLOCK_Q):
        q = start + tl.arange(0, BLOCK_Q)
        in_tile = (q < num_new)[:, None] & in_copy[None, :]
        value = tl.load(
            projected + q[:, None] * projected_stride + copied[None, :], mask=in_tile, other=0.0
        )
        at = new + (WIDTH - 1 + first + q)[:, None] * row_stride + copied[None, :]
        tl.store(at, value, mask=in_tile)
    if REPLAY:
        for tail_row in tl.static_range(WIDTH - 1):
            seq = path_length + tail_row
            row = _replayed(seq, path, True, WIDTH)
            value = tl.load(old + row * row_stride + copied, mask=in_copy, other=0.0)
            tl.store(new + tail_row * row_stride + copied, value, mask=in_copy)

    # 3. Scan the new nodes from the state
    num_nodes = first + num_new
    for start in range(0, num_new, BLOCK_Q):
        node = first + start + tl.arange(0, BLOCK_Q)
        known = node < num_nodes
        C = _tree_conv(
            node, known, projected, projected_stride, old, row_stride, c_column, in_s, c_channel,
            windows, path, path_length, first, conv_weight, conv_bias, weight_stride,
            WIDTH, REPLAY,
        )  # fmt: skip
        log_decay = _log_decay(
            node, known, num_nodes, ancestors, tree_size, projected, projected_stride, old,
            row_stride, dt_column, dt_bias, A, first, WIDTH, DT_MIN, DT_MAX, BLOCK_N,
        )  # fmt: skip
        y = tl.dot(C, tl.trans(state), input_precision=PRECISION) * tl.exp(log_decay)[:, None]
        for other_start in range(0, tl.minimum(first + start + BLOCK_Q, num_nodes), BLOCK_N):
            other = other_start + tl.arange(0, BLOCK_N)
            other_known = other < num_nodes
            x = _tree_conv(
                other, other_known, projected, projected_stride, old, row_stride, x_column, in_p,
                x_channel, windows, path, path_length, first, conv_weight, conv_bias,
                weight_stride, WIDTH, REPLAY,
            )  # fmt: skip
            B = _tree_conv(
                other, other_known, projected, projected_stride, old, row_stride, b_column, in_s,
                b_channel, windows, path, path_length, first, conv_weight, conv_bias,
                weight_stride, WIDTH, REPLAY,
            )  # fmt: skip
            dt = _node_dt(
                other, other_known, projected, projected_stride, old, row_stride, dt_column,
                dt_bias, first, WIDTH, DT_MIN, DT_MAX,
            )  # fmt: skip
            other_decay = _log_decay(
                other, other_known, num_nodes, ancestors, tree_size, projected, projected_stride,
                old, row_stride, dt_column, dt_bias, A, first, WIDTH, DT_MIN, DT_MAX, BLOCK_N,
            )  # fmt: skip
            above = tl.load(
                ancestors + node[:, None] * tree_size + other[None, :],
                mask=known[:, None] & other_known[None, :], other=0,
            ) != 0  # fmt: skip
            # Off the ancestors the difference can be positive and overflow: mask it before exp
            difference = tl.where(above, log_decay[:, None] - other_decay[None, :], -float("inf"))
            scores = tl.dot(C, tl.trans(B), input_precision=PRECISION)
            scores = scores * tl.exp(difference) * dt[None, :]
            scores += tl.where(node[:, None] == other[None, :], D, 0.0)
            y += tl.dot(scores, x, input_precision=PRECISION)
        q = node - first
        at = y_pointer + batch * y_batch_stride + q[:, None] * y_stride
        at += head * HEAD_DIM + p[None, :]
        tl.store(at, y.to(y_pointer.dtype.element_ty), mask=known[:, None] & in_p[None, :])
