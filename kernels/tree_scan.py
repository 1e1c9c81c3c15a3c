"""A Mamba-2 layer's tree call in two launches: tree conv, then replay and tree scan (Triton).

In the scan one program serves one sequence, one head and a block of that head's channels. It
advances its part of the state along the last accepted path, writes it once, and scans the new
nodes from it. Replay needs nothing of this call's conv, so on GPUs that can (compute capability
9.0) the scan starts while the conv runs, and waits for it when it comes to the new nodes. The
naive twin is `naive.mamba_tree`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from stree_kernels.shapes import Derived, MixerShape, MixerWeights, Steering, Topology
from stree_kernels.tree_conv import convolve, overlaps


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
) -> Tensor:
    """`naive.mamba_tree` in two launches; y (B, Q, H·P) in projected's dtype."""
    batch, num_new, _ = projected.shape
    xb, steps = derived.xb, derived.steps
    assert projected.stride(2) == rows.stride(3) == xb.stride(3) == state.stride(3) == 1
    assert steps.stride(4) == 1 and min(xb.shape[2], steps.shape[3]) >= first + num_new
    assert first + num_new <= topology.depths.shape[1]
    assert rows.shape[2] >= shape.tail + first + num_new
    kept = projected[..., shape.d_inner :]
    C = convolve(kept, rows, derived, weights, shape, topology, steering, first)
    y = torch.empty(batch, num_new, shape.d_inner, device=projected.device, dtype=projected.dtype)
    block_p = max(16, min(32, triton.next_power_of_2(shape.head_dim)))
    x_conv, b_conv, c_conv = shape.scan_groups
    heads, num_nodes = shape.num_heads, first + num_new
    block_n = min(64, max(16, triton.next_power_of_2(num_nodes)))
    early = overlaps(kept)
    tree_scan_kernel[(triton.cdiv(shape.head_dim, block_p), heads, batch)](
        xb, xb.stride(0), xb.stride(1), xb.stride(2),
        steps, steps.stride(0), steps.stride(1), steps.stride(2), steps.stride(3),
        C, C.stride(0), C.stride(1),
        state, state.stride(0), state.stride(1), state.stride(2),
        y, y.stride(0), y.stride(1),
        weights.A_log, weights.D,
        topology.ancestors.view(torch.uint8), topology.depths.shape[1],
        steering.path, steering.path.stride(0), steering.path_length,
        steering.variant, steering.parity, first, num_new,
        HEAD_DIM=shape.head_dim, D_STATE=shape.d_state,
        HEADS_A_X=heads // x_conv, HEADS_A_B=heads // b_conv, HEADS_A_C=heads // c_conv,
        B_CHANNEL=x_conv * shape.head_dim, REPLAY=first == 0, OVERLAPS=early,
        BLOCK_P=block_p, BLOCK_S=max(16, triton.next_power_of_2(shape.d_state)),
        BLOCK_N=block_n, BLOCK_Q=16, ONE_TILE=num_nodes <= block_n,
        # 16-bit inputs have no more digits than tf32; fp32 ones are to stay exact to 1e-5
        PRECISION="tf32x3" if projected.dtype == torch.float32 else "tf32",
        AS_GIVEN=kept.is_cuda and kept.dtype != torch.float32,  # the interpreter cannot
        num_warps=8, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return y


@triton.jit
def _nodes(
    start, num_nodes, xb, xb_stride, x_channel, in_p, b_channel, in_s,
    steps, steps_part_stride, steps_stride, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """x, B, dt and log-decay of a block of nodes."""
    node = start + tl.arange(0, BLOCK_N)
    there = node < num_nodes
    at = xb + node[:, None] * xb_stride
    x = tl.load(at + x_channel[None, :], mask=there[:, None] & in_p[None, :], other=0.0)
    B = tl.load(at + b_channel[None, :], mask=there[:, None] & in_s[None, :], other=0.0)
    dt = tl.load(steps + node * steps_stride, mask=there, other=0.0)
    log_decay = tl.load(steps + steps_part_stride + node * steps_stride, mask=there, other=0.0)
    return x, B, dt, log_decay


@triton.jit
def _among_nodes(
    node, known, start, num_nodes, C, log_decay, x, B, dt, other_decay, D,
    ancestors, tree_size, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    AS_GIVEN: tl.constexpr,
):  # fmt: skip
    """What nodes receive from a block of their ancestors."""
    other = start + tl.arange(0, BLOCK_N)
    above = tl.load(
        ancestors + node[:, None] * tree_size + other[None, :],
        mask=known[:, None] & (other < num_nodes)[None, :], other=0,
    ) != 0  # fmt: skip
    # Off the ancestors the difference can be positive and overflow: mask it before exp
    difference = tl.where(above, log_decay[:, None] - other_decay[None, :], -float("inf"))
    if AS_GIVEN:
        scores = tl.dot(C, tl.trans(B))
    else:
        scores = tl.dot(C.to(tl.float32), tl.trans(B.to(tl.float32)), input_precision=PRECISION)
    scores = scores * tl.exp(difference) * dt[None, :]
    scores += tl.where(node[:, None] == other[None, :], D, 0.0)
    return tl.dot(scores, x.to(tl.float32), input_precision=PRECISION)


@triton.jit
def tree_scan_kernel(
    xb, xb_parity_stride, xb_batch_stride, xb_stride,
    steps, steps_parity_stride, steps_batch_stride, steps_part_stride, steps_stride,
    C_pointer, C_batch_stride, C_stride,
    state_pointer, state_batch_stride, state_head_stride, state_row_stride,
    y_pointer, y_batch_stride, y_stride,
    A_log, D_pointer, ancestors, tree_size,
    path, path_stride, path_lengths, variants, parities, first, num_new,
    HEAD_DIM: tl.constexpr, D_STATE: tl.constexpr,
    HEADS_A_X: tl.constexpr, HEADS_A_B: tl.constexpr, HEADS_A_C: tl.constexpr,
    B_CHANNEL: tl.constexpr, REPLAY: tl.constexpr, OVERLAPS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr,
    ONE_TILE: tl.constexpr, PRECISION: tl.constexpr, AS_GIVEN: tl.constexpr,
):  # fmt: skip
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    parity = tl.load(parities)
    ancestors += tl.load(variants + batch) * tree_size * tree_size
    xb += batch * xb_batch_stride
    steps += batch * steps_batch_stride + head
    p = block * BLOCK_P + tl.arange(0, BLOCK_P)
    s = tl.arange(0, BLOCK_S)
    in_p, in_s = p < HEAD_DIM, s < D_STATE
    x_channel = (head // HEADS_A_X) * HEAD_DIM + p
    b_channel = B_CHANNEL + (head // HEADS_A_B) * D_STATE + s
    c_channel = (head // HEADS_A_C) * D_STATE + s
    D = tl.load(D_pointer + head).to(tl.float32)
    state_at = (
        state_pointer + batch * state_batch_stride + head * state_head_stride
        + p[:, None] * state_row_stride + s[None, :]
    )  # fmt: skip
    in_state = in_p[:, None] & in_s[None, :]
    state = tl.load(state_at, mask=in_state, other=0.0).to(tl.float32)

    # 1. Advance the state along the accepted path
    half = parity
    if REPLAY:
        half = 1 - parity
        A = -tl.exp(tl.load(A_log + head).to(tl.float32))
        path_length = tl.load(path_lengths + batch).to(tl.int32)
        path += batch * path_stride
        old_xb = xb + parity * xb_parity_stride
        old_dt = steps + parity * steps_parity_stride
        for start in range(0, path_length, 16):
            k = start + tl.arange(0, 16)
            accepted = k < path_length
            node = tl.load(path + k, mask=accepted, other=0).to(tl.int32)
            dt = tl.load(old_dt + node * steps_stride, mask=accepted, other=0.0)
            at = old_xb + node[:, None] * xb_stride
            x = tl.load(at + x_channel[None, :], mask=accepted[:, None] & in_p[None, :], other=0.0)
            B = tl.load(at + b_channel[None, :], mask=accepted[:, None] & in_s[None, :], other=0.0)
            total = tl.sum(dt * A, axis=0)
            after = tl.exp(total - tl.cumsum(dt * A, axis=0)) * dt
            x = x.to(tl.float32) * after[:, None]
            added = tl.dot(tl.trans(x), B.to(tl.float32), input_precision=PRECISION)
            state = tl.exp(total) * state + added
        if path_length > 0:
            tl.store(state_at, state.to(state_pointer.dtype.element_ty), mask=in_state)

    # 2. Scan the new nodes from the state
    if OVERLAPS:
        gdc_wait()
    xb += half * xb_parity_stride
    steps += half * steps_parity_stride
    num_nodes = first + num_new
    if ONE_TILE:
        x, B, dt, other_decay = _nodes(
            0, num_nodes, xb, xb_stride, x_channel, in_p, b_channel, in_s,
            steps, steps_part_stride, steps_stride, BLOCK_N,
        )  # fmt: skip
    for start in range(0, num_new, BLOCK_Q):
        q = start + tl.arange(0, BLOCK_Q)
        node = first + q
        known = q < num_new
        C = tl.load(
            C_pointer + batch * C_batch_stride + q[:, None] * C_stride + c_channel[None, :],
            mask=known[:, None] & in_s[None, :], other=0.0,
        )  # fmt: skip
        log_decay = tl.load(steps + steps_part_stride + node * steps_stride, mask=known, other=0.0)
        y = tl.dot(C.to(tl.float32), tl.trans(state), input_precision=PRECISION)
        y = y * tl.exp(log_decay)[:, None]
        if ONE_TILE:
            y += _among_nodes(
                node, known, 0, num_nodes, C, log_decay, x, B, dt, other_decay, D,
                ancestors, tree_size, BLOCK_N, PRECISION, AS_GIVEN,
            )  # fmt: skip
        else:
            last = tl.minimum(first + start + BLOCK_Q, num_nodes)
            for other_start in range(0, last, BLOCK_N):
                x, B, dt, other_decay = _nodes(
                    other_start, num_nodes, xb, xb_stride, x_channel, in_p, b_channel, in_s,
                    steps, steps_part_stride, steps_stride, BLOCK_N,
                )  # fmt: skip
                y += _among_nodes(
                    node, known, other_start, num_nodes, C, log_decay, x, B, dt, other_decay, D,
                    ancestors, tree_size, BLOCK_N, PRECISION, AS_GIVEN,
                )  # fmt: skip
        at = y_pointer + batch * y_batch_stride + q[:, None] * y_stride
        at += head * HEAD_DIM + p[None, :]
        tl.store(at, y.to(y_pointer.dtype.element_ty), mask=known[:, None] & in_p[None, :])
