"""A Mamba-2 layer's call over few nodes of a small model, in one launch (Triton).

What `tree_conv.py` and `tree_scan.py` do one after the other: of a small model a launch takes as
long as the work in it. One program serves a sequence, a head and a block of its channels. It
replays its part of the state, which it keeps for the scan, convolves what it scans (x of its
channels, B and C of its head's groups, as other programs of those groups do, too), and scans the
nodes: those of earlier levels as they were kept, new ones from its registers. So no program reads
what another one writes. What the next call needs is written once, by the first program that has it.

The last tree is read in one half of the buffers and the new one written to the other; of a tree
that grows, earlier nodes are read and new ones written in the same half. Both forms leave the same
behind, so that a tree may change between them from level to level. The naive twin is
`naive.mamba_tree`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree_kernels.launch import follow, load_kept, overlapping, store_kept
from stree_kernels.products import mixed_precision_of, mixed_product, precision_of
from stree_kernels.shapes import Derived, MixerShape, MixerWeights, Steering, Topology
from stree_kernels.tree_conv import (
    advance_state,
    convolved,
    convolved_earlier,
    keep_tail,
    positive_dt,
    windows_of,
)
from stree_kernels.tree_scan import above_of, among_nodes, nodes_of

NODES = 16  # of a tree so far, which a program has in one tile
LARGEST_STATE = 128  # of a channel: B and C of all nodes are in registers with it
CHANNELS = 32  # of a head, of a program
# Of a program and of a thread: it is to fit beside one of a short product (`short_products.py`),
# or else it could not begin under it
WARPS, REGISTERS = 8, 168
# Programs of a sequence, which convolve the B and C of few groups again and again
MOST_PROGRAMS = 64


def fits(shape: MixerShape, num_nodes: int) -> bool:
    """Whether a call that makes a tree one of so many nodes is for `mamba_tree`. How many sequences
    there are does not matter: a row's result is the same beside any others."""
    programs = shape.num_heads * triton.cdiv(shape.head_dim, _channels_of(shape))
    few = num_nodes <= NODES and programs <= MOST_PROGRAMS
    return few and shape.d_state <= LARGEST_STATE


def mamba_tree(
    projected: Tensor,
    rows: Tensor,
    derived: Derived,
    state: Tensor,
    weights: MixerWeights,
    shape: MixerShape,
    topology: Topology,
    steering: Steering,
    first: int,
    out: Tensor | None = None,
) -> Tensor:
    """`naive.mamba_tree` of a tree of at most `NODES` nodes; y (B, Q, H·P) in projected's dtype."""
    batch, num_new, _ = projected.shape
    xb, steps, heads = derived.xb, derived.steps, shape.num_heads
    kept = projected[..., shape.d_inner :]
    y = projected.new_empty(batch, num_new, shape.d_inner) if out is None else out
    assert y.stride(2) == projected.stride(2) == rows.stride(3) == xb.stride(3) == 1
    assert steps.stride(4) == state.stride(3) == 1
    assert first + num_new <= min(NODES, xb.shape[2], steps.shape[3], topology.depths.shape[1])
    assert kept.stride(0) % kept.stride(1) == 0
    assert rows.stride(0) % rows.stride(2) == rows.stride(1) % rows.stride(2) == 0
    assert rows.shape[2] >= shape.tail + first + num_new
    x_conv, b_conv, c_conv = shape.scan_groups
    x_columns, b_columns, _ = shape.xbc_dims
    x_channels, b_channels, _ = shape.conv_dims
    block_p = _channels_of(shape)
    conv_scan_kernel[(triton.cdiv(shape.head_dim, block_p), heads, batch)](
        kept, kept.stride(0) // kept.stride(1),
        rows, rows.stride(0) // rows.stride(2), rows.stride(1) // rows.stride(2),
        xb, xb.stride(0), xb.stride(1), xb.stride(2),
        steps, steps.stride(0), steps.stride(1), steps.stride(2), steps.stride(3),
        state, *state.stride()[:3],
        y, y.stride(0), y.stride(1), projected if shape.gated else None,
        weights.conv, weights.conv.stride(0), weights.conv.stride(1), weights.conv_bias,
        weights.dt_bias, weights.A_log, weights.D,
        topology.ancestors.view(torch.uint8), topology.windows, topology.depths.shape[1],
        steering.path, steering.path.stride(0), steering.path.shape[1], steering.path_length,
        steering.variant, steering.parity,
        first, num_new, min(xb.shape[2], steps.shape[3]),
        # Known to the compiler, so that it knows how many channels may be read at once
        PROJECTED_STRIDE=kept.stride(1), ROW_STRIDE=rows.stride(2),
        HEAD_DIM=shape.head_dim, D_STATE=shape.d_state, WIDTH=shape.width,
        HEADS_A_X=heads // x_conv, HEADS_A_B=heads // b_conv, HEADS_A_C=heads // c_conv,
        X_REPEATS=x_channels // x_columns, B_REPEATS=b_channels // b_columns,
        B_COLUMN=x_columns, C_COLUMN=x_columns + b_columns, DT_COLUMN=shape.num_channels,
        B_CHANNEL=x_channels, C_CHANNEL=x_channels + b_channels,
        DT_MIN=shape.dt_limit[0], DT_MAX=shape.dt_limit[1],
        REPLAY=first == 0, READY=steering.ready,
        BLOCK_P=block_p, BLOCK_S=max(16, triton.next_power_of_2(shape.d_state)), BLOCK_N=NODES,
        PRECISION=precision_of(kept), MIXED=mixed_precision_of(kept.dtype),
        num_warps=WARPS, maxnreg=REGISTERS, **overlapping(kept),
    )  # fmt: skip
    return y


def _channels_of(shape: MixerShape) -> int:
    return max(16, min(CHANNELS, triton.next_power_of_2(shape.head_dim)))


@triton.jit
def conv_scan_kernel(
    projected, projected_batch_rows, rows, parity_rows, batch_rows,
    xb, xb_parity_stride, xb_batch_stride, xb_stride,
    steps, steps_parity_stride, steps_batch_stride, steps_part_stride, steps_stride,
    state_pointer, state_batch_stride, state_head_stride, state_row_stride,
    y_pointer, y_batch_stride, y_stride, gate,
    weight_pointer, channel_stride, tap_stride, conv_bias, dt_bias, A_log, D_pointer,
    ancestors, windows, tree_size,
    path, path_stride, path_size, path_lengths, variants, parities,
    first, num_new, num_slots,
    PROJECTED_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr, D_STATE: tl.constexpr, WIDTH: tl.constexpr,
    HEADS_A_X: tl.constexpr, HEADS_A_B: tl.constexpr, HEADS_A_C: tl.constexpr,
    X_REPEATS: tl.constexpr, B_REPEATS: tl.constexpr,
    B_COLUMN: tl.constexpr, C_COLUMN: tl.constexpr, DT_COLUMN: tl.constexpr,
    B_CHANNEL: tl.constexpr, C_CHANNEL: tl.constexpr,
    DT_MIN: tl.constexpr, DT_MAX: tl.constexpr,
    REPLAY: tl.constexpr, READY: tl.constexpr, OVERLAPS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    # As in `tree_conv.py`, what needs nothing of the launch ahead, a product, does not wait for it
    if READY == "none":
        follow(OVERLAPS)
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    parity = load_kept(parities)
    variant = load_kept(variants + batch)
    projected += batch * projected_batch_rows * PROJECTED_STRIDE
    rows += batch * batch_rows * ROW_STRIDE
    xb += batch * xb_batch_stride
    steps += batch * steps_batch_stride + head
    state_pointer += batch * state_batch_stride + head * state_head_stride
    path += batch * path_stride
    old = rows + parity * parity_rows * ROW_STRIDE
    if REPLAY:
        path_length = load_kept(path_lengths + batch).to(tl.int32)
        half = 1 - parity
    else:
        path_length = 0
        half = parity
    new = rows + half * parity_rows * ROW_STRIDE

    start_p = block * BLOCK_P
    p, s = start_p + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_S)
    in_p, in_s = p < HEAD_DIM, s < D_STATE
    x_head, b_head, c_head = head // HEADS_A_X, head // HEADS_A_B, head // HEADS_A_C
    x_channel, b_channel = x_head * HEAD_DIM + p, B_CHANNEL + b_head * D_STATE + s
    c_channel = C_CHANNEL + c_head * D_STATE + s
    x_column = (x_head // X_REPEATS) * HEAD_DIM + p
    b_column = B_COLUMN + (b_head // B_REPEATS) * D_STATE + s
    c_column = C_COLUMN + c_head * D_STATE + s
    one = tl.arange(0, 1)
    dt_column = DT_COLUMN + head + one
    # Channels are kept by the first head that has them, raw ones by the first that convolves them;
    # of those that all blocks of a head have, by the first block
    keeps_x = p < tl.where(head % HEADS_A_X == 0, HEAD_DIM, 0)
    keeps_b = s < tl.where((block == 0) & (head % HEADS_A_B == 0), D_STATE, 0)
    keeps_dt = one < tl.where(block == 0, 1, 0)
    keeps_raw_x = p < tl.where(head % (HEADS_A_X * X_REPEATS) == 0, HEAD_DIM, 0)
    keeps_raw_b = s < tl.where((block == 0) & (head % (HEADS_A_B * B_REPEATS) == 0), D_STATE, 0)
    keeps_raw_c = s < tl.where((block == 0) & (head % HEADS_A_C == 0), D_STATE, 0)

    # Each row of a tile is a node, earlier ones included
    node = tl.arange(0, BLOCK_N)
    num_nodes = first + num_new
    known = (node >= first) & (node < num_nodes)
    windows += variant * tree_size * WIDTH
    ancestors += variant * tree_size * tree_size
    above = above_of(ancestors, tree_size, node, known, 0, num_nodes, BLOCK_N)
    earlier, fresh = windows_of(windows, node, known, path, path_length, first, WIDTH, REPLAY)
    x, x_weights = convolved_earlier(
        old, ROW_STRIDE, x_column, earlier, fresh, known,
        weight_pointer + x_channel * channel_stride, tap_stride, conv_bias, x_channel, in_p, WIDTH,
    )  # fmt: skip
    B, b_weights = convolved_earlier(
        old, ROW_STRIDE, b_column, earlier, fresh, known,
        weight_pointer + b_channel * channel_stride, tap_stride, conv_bias, b_channel, in_s, WIDTH,
    )  # fmt: skip
    C, c_weights = convolved_earlier(
        old, ROW_STRIDE, c_column, earlier, fresh, known,
        weight_pointer + c_channel * channel_stride, tap_stride, conv_bias, c_channel, in_s, WIDTH,
    )  # fmt: skip
    A = -tl.exp(load_kept(A_log + head).to(tl.float32))
    D = load_kept(D_pointer + head).to(tl.float32)
    bias = load_kept(dt_bias + head).to(tl.float32)
    if REPLAY:
        state = advance_state(
            state_pointer, state_row_stride,
            xb + parity * xb_parity_stride, xb_stride,
            steps + parity * steps_parity_stride, steps_stride,
            A_log + head,
            path, path_size, path_length, num_slots,
            start_p, x_head * HEAD_DIM, B_CHANNEL + b_head * D_STATE,
            HEAD_DIM, D_STATE, BLOCK_P, BLOCK_S, PRECISION, MIXED,
        )  # fmt: skip
        keep_tail(old, new, ROW_STRIDE, x_column, keeps_raw_x, path, path_length, WIDTH)
        keep_tail(old, new, ROW_STRIDE, b_column, keeps_raw_b, path, path_length, WIDTH)
        keep_tail(old, new, ROW_STRIDE, c_column, keeps_raw_c, path, path_length, WIDTH)
        keep_tail(old, new, ROW_STRIDE, dt_column, keeps_dt, path, path_length, WIDTH)
    else:
        state = tl.load(
            state_pointer + p[:, None] * state_row_stride + s[None, :],
            mask=in_p[:, None] & in_s[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
    xb += half * xb_parity_stride
    steps += half * steps_parity_stride
    if not REPLAY:
        x_before, b_before, dt_before, decay_before = nodes_of(
            0, first, xb, xb_stride, x_channel, in_p, b_channel, in_s,
            steps, steps_part_stride, steps_stride, BLOCK_N,
        )  # fmt: skip

    follow(OVERLAPS)
    own = node - first
    mine = known[:, None] & in_p[None, :]
    if gate is not None:
        gate += batch * projected_batch_rows * PROJECTED_STRIDE + head * HEAD_DIM
        z = tl.load(gate + own[:, None] * PROJECTED_STRIDE + p[None, :], mask=mine, other=0.0)
        z = z.to(tl.float32)
    raw_dt = tl.load(projected + own * PROJECTED_STRIDE + dt_column, mask=known, other=0.0)
    C, raw_c = convolved(
        C, c_weights, projected, PROJECTED_STRIDE, c_column, fresh, known, in_s, xb, WIDTH
    )
    B, raw_b = convolved(
        B, b_weights, projected, PROJECTED_STRIDE, b_column, fresh, known, in_s, xb, WIDTH
    )
    x, raw_x = convolved(
        x, x_weights, projected, PROJECTED_STRIDE, x_column, fresh, known, in_p, xb, WIDTH
    )
    C, B, x = _settled(C, PRECISION), _settled(B, PRECISION), _settled(x, PRECISION)
    dt = tl.where(known, positive_dt(raw_dt, bias, DT_MIN, DT_MAX), 0.0)
    at = new + (WIDTH - 1 + node)[:, None] * ROW_STRIDE
    store_kept(at + x_column[None, :], raw_x, known[:, None] & keeps_raw_x[None, :])
    store_kept(at + b_column[None, :], raw_b, known[:, None] & keeps_raw_b[None, :])
    store_kept(at + c_column[None, :], raw_c, known[:, None] & keeps_raw_c[None, :])
    store_kept(new + (WIDTH - 1 + node) * ROW_STRIDE + dt_column, raw_dt, known & keeps_dt)
    at = xb + node[:, None] * xb_stride
    store_kept(at + x_channel[None, :], x, known[:, None] & keeps_x[None, :])
    store_kept(at + b_channel[None, :], B, known[:, None] & keeps_b[None, :])
    store_kept(steps + node * steps_stride, dt, known & keeps_dt)
    if not REPLAY:
        x = tl.where(known[:, None], x, x_before)
        B = tl.where(known[:, None], B, b_before)
        dt = tl.where(known, dt, dt_before)
    log_decay = tl.sum(tl.where(above, (dt * A)[None, :], 0.0), axis=1)
    store_kept(steps + steps_part_stride + node * steps_stride, log_decay, known & keeps_dt)
    if not REPLAY:
        log_decay = tl.where(known, log_decay, decay_before)
    y = mixed_product(C, tl.trans(state), PRECISION, MIXED) * tl.exp(log_decay)[:, None]
    y += among_nodes(
        node, above, 0, C, log_decay, x, B, dt, log_decay, D, BLOCK_N, PRECISION, MIXED
    )
    if gate is not None:
        y = y.to(y_pointer.dtype.element_ty).to(tl.float32) * (z * tl.sigmoid(z))
    at = y_pointer + batch * y_batch_stride + own[:, None] * y_stride + head * HEAD_DIM + p[None, :]
    tl.store(at, y.to(y_pointer.dtype.element_ty), mask=mine)


@triton.jit
def _settled(y, PRECISION: tl.constexpr):
    """y, whose layout among threads is brought to that of a product here. Triton would bring what
    the conv reads to it instead, each tap through shared memory by itself."""
    if PRECISION == "as given":
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [y], dtype=y.dtype, is_pure=False, pack=2
        )
    else:
        return y
