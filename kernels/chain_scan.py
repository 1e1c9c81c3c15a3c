"""A Mamba-2 layer's call over a chain, step by step: the multi-step state update (Triton).

What `tree_scan.py` does by matrix products, this does as the recurrence itself: each program keeps
its part of the state in registers, replays the accepted path and then takes the new tokens one by
one (the fused update of Snakes and Ladders, Wu et al. 2024, with replay). Cheaper for a few tokens,
and useless for a tree, which has to be unrolled into chains. The naive twin is `naive.mamba_tree`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from stree_kernels.shapes import Derived, MixerShape, MixerWeights, Steering, Topology
from stree_kernels.tree_conv import convolve, overlaps


def mamba_chain(
    projected: Tensor,
    rows: Tensor,
    derived: Derived,
    state: Tensor,
    weights: MixerWeights,
    shape: MixerShape,
    topology: Topology,
    steering: Steering,
) -> Tensor:
    """`naive.mamba_tree` of new chains, as `topology` must be, in two launches."""
    batch, num_new, _ = projected.shape
    kept = projected[..., shape.d_inner :]
    C = convolve(kept, rows, derived, weights, shape, topology, steering, 0)
    y = torch.empty(batch, num_new, shape.d_inner, device=projected.device, dtype=projected.dtype)
    xb, steps, heads = derived.xb, derived.steps, shape.num_heads
    x_conv, b_conv, c_conv = shape.scan_groups
    block_p = min(32, triton.next_power_of_2(shape.head_dim))
    early = overlaps(kept)
    chain_scan_kernel[(triton.cdiv(shape.head_dim, block_p), heads, batch)](
        xb, xb.stride(0), xb.stride(1), xb.stride(2),
        steps, steps.stride(0), steps.stride(1), steps.stride(3),
        C, C.stride(0), C.stride(1),
        state, state.stride(0), state.stride(1), state.stride(2),
        y, y.stride(0), y.stride(1), weights.A_log, weights.D,
        steering.path, steering.path.stride(0), steering.path_length, steering.parity, num_new,
        HEAD_DIM=shape.head_dim, D_STATE=shape.d_state,
        HEADS_A_X=heads // x_conv, HEADS_A_B=heads // b_conv, HEADS_A_C=heads // c_conv,
        B_CHANNEL=x_conv * shape.head_dim, OVERLAPS=early,
        BLOCK_P=block_p, BLOCK_S=triton.next_power_of_2(shape.d_state),
        num_warps=4, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return y


@triton.jit
def _token(
    node, xb, xb_stride, x_channel, in_p, b_channel, in_s, steps, steps_stride, A, state
):  # fmt: skip
    """The state after a node, and the node's x."""
    dt = tl.load(steps + node * steps_stride)
    x = tl.load(xb + node * xb_stride + x_channel, mask=in_p, other=0.0).to(tl.float32)
    B = tl.load(xb + node * xb_stride + b_channel, mask=in_s, other=0.0).to(tl.float32)
    return tl.exp(dt * A) * state + (dt * x)[:, None] * B[None, :], x


@triton.jit
def chain_scan_kernel(
    xb, xb_parity_stride, xb_batch_stride, xb_stride,
    steps, steps_parity_stride, steps_batch_stride, steps_stride,
    C_pointer, C_batch_stride, C_stride,
    state_pointer, state_batch_stride, state_head_stride, state_row_stride,
    y_pointer, y_batch_stride, y_stride, A_log, D_pointer,
    path, path_stride, path_lengths, parities, num_new,
    HEAD_DIM: tl.constexpr, D_STATE: tl.constexpr,
    HEADS_A_X: tl.constexpr, HEADS_A_B: tl.constexpr, HEADS_A_C: tl.constexpr,
    B_CHANNEL: tl.constexpr, OVERLAPS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    parity = tl.load(parities)
    xb += batch * xb_batch_stride
    steps += batch * steps_batch_stride + head
    path += batch * path_stride
    p = block * BLOCK_P + tl.arange(0, BLOCK_P)
    s = tl.arange(0, BLOCK_S)
    in_p, in_s = p < HEAD_DIM, s < D_STATE
    x_channel = (head // HEADS_A_X) * HEAD_DIM + p
    b_channel = B_CHANNEL + (head // HEADS_A_B) * D_STATE + s
    c_channel = (head // HEADS_A_C) * D_STATE + s
    A = -tl.exp(tl.load(A_log + head).to(tl.float32))
    D = tl.load(D_pointer + head).to(tl.float32)
    state_at = (
        state_pointer + batch * state_batch_stride + head * state_head_stride
        + p[:, None] * state_row_stride + s[None, :]
    )  # fmt: skip
    in_state = in_p[:, None] & in_s[None, :]
    state = tl.load(state_at, mask=in_state, other=0.0).to(tl.float32)

    path_length = tl.load(path_lengths + batch).to(tl.int32)
    old_xb, old_steps = xb + parity * xb_parity_stride, steps + parity * steps_parity_stride
    for k in range(0, path_length):
        node = tl.load(path + k).to(tl.int32)
        state, _ = _token(
            node, old_xb, xb_stride, x_channel, in_p, b_channel, in_s,
            old_steps, steps_stride, A, state,
        )  # fmt: skip
    if path_length > 0:
        tl.store(state_at, state.to(state_pointer.dtype.element_ty), mask=in_state)

    if OVERLAPS:
        gdc_wait()
    xb += (1 - parity) * xb_parity_stride
    steps += (1 - parity) * steps_parity_stride
    for node in range(0, num_new):
        state, x = _token(
            node, xb, xb_stride, x_channel, in_p, b_channel, in_s, steps, steps_stride, A, state
        )
        C = tl.load(
            C_pointer + batch * C_batch_stride + node * C_stride + c_channel, mask=in_s, other=0.0
        ).to(tl.float32)  # fmt: skip
        y = tl.sum(state * C[None, :], axis=1) + D * x
        at = y_pointer + batch * y_batch_stride + node * y_stride + head * HEAD_DIM + p
        tl.store(at, y.to(y_pointer.dtype.element_ty), mask=in_p)
