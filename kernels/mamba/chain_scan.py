"""A Mamba-2 layer's call over a chain, step by step: the multi-step state update (Triton).

`tree_scan.py` does it by matrix products, this as the recurrence itself: each program keeps
its part of the state in registers and takes the new tokens one by one (the fused update of Snakes
and Ladders, Wu et al. 2024). Useless for a tree, which has to be unrolled into chains. Replay and
conv are the same launch as for a tree; many sequences go another way (`streamed_scan.py`). The
naive twin is `naive.mamba_tree`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from stree_kernels.contracts import CacheState, Derived, MixerShape, MixerWeights, Topology
from stree_kernels.conv.tree_conv import replay_and_convolve
from stree_kernels.launch import follow, load_kept, overlapping
from stree_kernels.mamba.streamed_scan import gated_by_silu, mamba_streamed, streams


def mamba_chain(
    projected: Tensor,
    rows: Tensor,
    derived: Derived,
    state: Tensor,
    weights: MixerWeights,
    shape: MixerShape,
    topology: Topology,
    cache_state: CacheState,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `naive.mamba_tree` of new chains in two launches; `topology` must be of chains."""
    batch, num_new, _ = projected.shape
    if streams(state, num_new):
        where = (weights, shape, topology, cache_state, out)
        return mamba_streamed(projected, rows, derived, state, *where, as_chain=True)
    kept = projected[..., shape.d_inner :]
    C = replay_and_convolve(kept, rows, derived, state, weights, shape, topology, cache_state, 0)
    y = projected.new_empty(batch, num_new, shape.d_inner) if out is None else out
    assert y.stride(2) == projected.stride(2) == 1
    xb, steps, heads = derived.xb, derived.steps, shape.num_heads
    x_conv, b_conv, c_conv = shape.scan_groups
    block_p = max(16, min(32, triton.next_power_of_2(shape.head_dim)))
    chain_scan_kernel[(triton.cdiv(shape.head_dim, block_p), heads, batch)](
        xb, xb.stride(0), xb.stride(1), xb.stride(2),
        steps, steps.stride(0), steps.stride(1), steps.stride(3),
        C, C.stride(0), C.stride(1),
        state, state.stride(0), state.stride(1), state.stride(2),
        y, y.stride(0), y.stride(1),
        projected if shape.gated else None, projected.stride(0), projected.stride(1),
        weights.A_log, weights.D, cache_state.parity, num_new,
        HEAD_DIM=shape.head_dim, D_STATE=shape.d_state,
        HEADS_A_X=heads // x_conv, HEADS_A_B=heads // b_conv, HEADS_A_C=heads // c_conv,
        B_CHANNEL=x_conv * shape.head_dim,
        BLOCK_P=block_p, BLOCK_S=max(16, triton.next_power_of_2(shape.d_state)),
        num_warps=4, **overlapping(kept),
    )
    return y


@triton.jit
def chain_scan_kernel(
    xb, xb_parity_stride, xb_batch_stride, xb_stride,
    steps, steps_parity_stride, steps_batch_stride, steps_stride,
    C_pointer, C_batch_stride, C_stride,
    state_pointer, state_batch_stride, state_head_stride, state_row_stride,
    y_pointer, y_batch_stride, y_stride, gate, gate_batch_stride, gate_stride,
    A_log, D_pointer, parities, num_new,
    HEAD_DIM: tl.constexpr, D_STATE: tl.constexpr,
    HEADS_A_X: tl.constexpr, HEADS_A_B: tl.constexpr, HEADS_A_C: tl.constexpr,
    B_CHANNEL: tl.constexpr, OVERLAPS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr,
):
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    p = block * BLOCK_P + tl.arange(0, BLOCK_P)
    s = tl.arange(0, BLOCK_S)
    in_p, in_s = p < HEAD_DIM, s < D_STATE
    x_channel = (head // HEADS_A_X) * HEAD_DIM + p
    b_channel = B_CHANNEL + (head // HEADS_A_B) * D_STATE + s
    c_channel = (head // HEADS_A_C) * D_STATE + s
    A = -tl.exp(load_kept(A_log + head).to(tl.float32))
    D = load_kept(D_pointer + head).to(tl.float32)
    # The first launch waited for all before it: the cache state is complete already
    parity = load_kept(parities)
    xb += batch * xb_batch_stride
    steps += batch * steps_batch_stride + head
    state_pointer += batch * state_batch_stride + head * state_head_stride
    follow(OVERLAPS)
    state = tl.load(
        state_pointer + p[:, None] * state_row_stride + s[None, :],
        mask=in_p[:, None] & in_s[None, :], other=0.0,
    ).to(tl.float32)
    xb += (1 - parity) * xb_parity_stride
    steps += (1 - parity) * steps_parity_stride
    for node in range(0, num_new):
        dt = load_kept(steps + node * steps_stride)
        x = load_kept(xb + node * xb_stride + x_channel, in_p).to(tl.float32)
        B = load_kept(xb + node * xb_stride + b_channel, in_s).to(tl.float32)
        at_C = C_pointer + batch * C_batch_stride + node * C_stride + c_channel
        C = tl.load(at_C, mask=in_s, other=0.0).to(tl.float32)
        state = tl.exp(dt * A) * state + (dt * x)[:, None] * B[None, :]
        y = tl.sum(state * C[None, :], axis=1) + D * x
        if gate is not None:
            at = gate + batch * gate_batch_stride + node * gate_stride + head * HEAD_DIM + p
            y = gated_by_silu(y, at, in_p, y_pointer.dtype.element_ty)
        at = y_pointer + batch * y_batch_stride + node * y_stride + head * HEAD_DIM + p
        tl.store(at, y.to(y_pointer.dtype.element_ty), mask=in_p)
