"""A Mamba-2 layer's call of many sequences, whose states stream through shared memory (Triton).

Such a call is limited by reading and writing the states. A program serves a sequence and a head:
it computes once the values that all of the head's channels need, and then goes over blocks of
channels, while the states of the next blocks are loaded. Each block is advanced along the last
accepted path, stored, and scanned, by matrix products (a tree, as in `tree_scan.py`) or step by
step (a chain, as in `chain_scan.py`). So a state is read once and written once. The conv, which
writes no state, is the same launch as in the other scans. The naive twin is `naive.mamba_tree`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree_kernels.contracts import CacheState, Derived, MixerShape, MixerWeights, Topology
from stree_kernels.conv.tree_conv import (
    advanced,
    advanced_along,
    path_inputs,
    path_weights,
    replay_and_convolve,
)
from stree_kernels.launch import follow, load_kept, overlapping
from stree_kernels.products.linear import (
    SHARED_BYTES,
    device_of,
    mixed_precision_of,
    mixed_product,
    precision_of,
    product,
)

FAR_STATES = 16 * 2**20  # bytes of a layer's states, more than the L2 cache keeps between launches
MOST_NODES = 32  # that a program scans
# Fastest on an H200
BLOCK = 4096  # numbers of a state at a time
STAGES = 3  # blocks in flight, the present one included
FEW_NODES = 16
# For few nodes, with more than three programs a multiprocessor, so that four fit
MANY_STAGES = 2
MANY_REGISTERS = 128  # of a thread
LEAST_SHARED = 128 * 1024  # bytes of a multiprocessor; below this, do not prefetch (one stage)


def streams(state: Tensor, num_new: int, first: int = 0) -> bool:
    """Return True if a call over num_new nodes should stream its states.

    It should for a whole tree, for states (B, H, P, S) that the L2 cache does not keep, and with
    at least one program per multiprocessor.
    """
    return (
        first == 0 and num_new <= MOST_NODES and state.nbytes >= FAR_STATES
        and state.shape[0] * state.shape[1] >= device_of(state)[0]
    )


def mamba_streamed(
    projected: Tensor,
    rows: Tensor,
    derived: Derived,
    state: Tensor,
    weights: MixerWeights,
    shape: MixerShape,
    topology: Topology,
    cache_state: CacheState,
    out: Tensor | None = None,
    *,
    as_chain: bool = False,
) -> Tensor:
    """Compute `naive.mamba_tree` of whole trees in two launches; y (B, Q, H·P).

    Chains go step by step. y is in projected's dtype.
    """
    batch, num_new, _ = projected.shape
    kept = projected[..., shape.d_inner :]
    C = replay_and_convolve(kept, rows, derived, None, weights, shape, topology, cache_state, 0)
    y = projected.new_empty(batch, num_new, shape.d_inner) if out is None else out
    assert y.stride(2) == projected.stride(2) == 1
    xb, steps, heads = derived.xb, derived.steps, shape.num_heads
    x_conv, b_conv, c_conv = shape.scan_groups
    block_s = max(16, triton.next_power_of_2(shape.d_state))
    block_p = max(16, min(BLOCK // block_s, triton.next_power_of_2(shape.head_dim)))
    stages, registers, wide = STAGES, None, projected.element_size() == 4
    multiprocessors, shared_bytes = device_of(projected)
    if heads * batch > 3 * multiprocessors and num_new <= FEW_NODES and not wide:
        stages, registers = MANY_STAGES, MANY_REGISTERS
    if shared_bytes < (SHARED_BYTES if wide else LEAST_SHARED):
        stages = 1
    streamed_scan_kernel[(heads, batch)](
        xb, xb.stride(0), xb.stride(1), xb.stride(2),
        steps, steps.stride(0), steps.stride(1), steps.stride(2), steps.stride(3),
        C, C.stride(0), C.stride(1),
        state, state.stride(0), state.stride(1), state.stride(2),
        y, y.stride(0), y.stride(1),
        projected if shape.gated else None, projected.stride(0), projected.stride(1),
        weights.A_log, weights.D,
        topology.ancestors.view(torch.uint8), topology.depths.shape[1],
        cache_state.variant, cache_state.parity, num_new,
        cache_state.path, cache_state.path.stride(0), cache_state.path.shape[1],
        cache_state.path_length,
        min(xb.shape[2], steps.shape[3]),
        HEAD_DIM=shape.head_dim, D_STATE=shape.d_state,
        HEADS_A_X=heads // x_conv, HEADS_A_B=heads // b_conv, HEADS_A_C=heads // c_conv,
        B_CHANNEL=x_conv * shape.head_dim,
        BLOCK_P=block_p, BLOCK_S=block_s, STAGES=stages,
        CHAIN=num_new if as_chain else 0, BLOCK_Q=FEW_NODES if num_new <= FEW_NODES else MOST_NODES,
        LONG_PATHS=cache_state.path.shape[1] > 16,
        PRECISION=precision_of(kept), MIXED=mixed_precision_of(kept.dtype),
        num_warps=8 if wide else 4, num_stages=1, maxnreg=registers, **overlapping(kept),
    )
    return y


@triton.jit
def pair_scores(
    node, other, above, C, log_decay, B, dt, other_decay, D, PRECISION: tl.constexpr
):
    """Return the share of each other node's x that a node receives, (nodes, others)."""
    # Off the ancestors the difference can be positive and overflow: mask it before exp
    difference = tl.where(above, log_decay[:, None] - other_decay[None, :], -float("inf"))
    scores = product(C, tl.trans(B), PRECISION) * tl.exp(difference) * dt[None, :]
    return scores + tl.where(node[:, None] == other[None, :], D, 0.0)


@triton.jit
def gated_by_silu(y, gate_at, mask, dtype: tl.constexpr):
    """Round a scan's output and multiply it by silu of the gate."""
    z = tl.load(gate_at, mask=mask, other=0.0).to(tl.float32)
    return y.to(dtype).to(tl.float32) * (z * tl.sigmoid(z))


@triton.jit
def streamed_scan_kernel(
    xb, xb_parity_stride, xb_batch_stride, xb_stride,
    steps, steps_parity_stride, steps_batch_stride, steps_part_stride, steps_stride,
    C_pointer, C_batch_stride, C_stride,
    state_pointer, state_batch_stride, state_head_stride, state_row_stride,
    y_pointer, y_batch_stride, y_stride, gate, gate_batch_stride, gate_stride,
    A_log, D_pointer, ancestors, tree_size, variants, parities, num_new,
    path, path_stride, path_size, path_lengths, num_slots,
    HEAD_DIM: tl.constexpr, D_STATE: tl.constexpr,
    HEADS_A_X: tl.constexpr, HEADS_A_B: tl.constexpr, HEADS_A_C: tl.constexpr,
    B_CHANNEL: tl.constexpr, OVERLAPS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_Q: tl.constexpr, STAGES: tl.constexpr,
    CHAIN: tl.constexpr, LONG_PATHS: tl.constexpr, PRECISION: tl.constexpr, MIXED: tl.constexpr,
):
    head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    s = tl.arange(0, BLOCK_S)
    in_s = s < D_STATE
    x_start = (head // HEADS_A_X) * HEAD_DIM
    b_channel = B_CHANNEL + (head // HEADS_A_B) * D_STATE + s
    A = -tl.exp(load_kept(A_log + head).to(tl.float32))
    D = load_kept(D_pointer + head).to(tl.float32)
    # The first launch waited for all before it: the cache state is complete already, and so are the
    # values that the last call left
    parity = load_kept(parities)
    xb += batch * xb_batch_stride
    steps += batch * steps_batch_stride + head
    state_pointer += batch * state_batch_stride + head * state_head_stride
    path += batch * path_stride
    path_length = load_kept(path_lengths + batch).to(tl.int32)
    old, old_steps = xb + parity * xb_parity_stride, steps + parity * steps_parity_stride
    k = tl.arange(0, 16)
    node, there, old_dt, old_B = path_inputs(
        path, k, k < path_size, num_slots, old, xb_stride, old_steps, steps_stride,
        b_channel, in_s,
    )
    accepted = k < path_length
    decay, after = path_weights(A, old_dt, accepted)
    old_B = tl.where(accepted[:, None], old_B, 0.0)
    follow(OVERLAPS)
    xb += (1 - parity) * xb_parity_stride
    steps += (1 - parity) * steps_parity_stride
    C_pointer += batch * C_batch_stride + (head // HEADS_A_C) * D_STATE + s
    y_pointer += batch * y_batch_stride + head * HEAD_DIM
    if gate is not None:
        gate += batch * gate_batch_stride + head * HEAD_DIM
    if CHAIN == 0:
        q = tl.arange(0, BLOCK_Q)
        known = q < num_new
        ancestors += load_kept(variants + batch) * tree_size * tree_size
        in_tree = known[:, None] & known[None, :]
        above = load_kept(ancestors + q[:, None] * tree_size + q[None, :], in_tree) != 0
        in_nodes = known[:, None] & in_s[None, :]
        B = load_kept(xb + q[:, None] * xb_stride + b_channel[None, :], in_nodes)
        C = tl.load(C_pointer[None, :] + q[:, None] * C_stride, mask=in_nodes, other=0.0)
        dt = load_kept(steps + q * steps_stride, known)
        log_decay = tl.load(steps + steps_part_stride + q * steps_stride, mask=known, other=0.0)
        scores = pair_scores(q, q, above, C, log_decay, B, dt, log_decay, D, PRECISION)
        fade = tl.exp(log_decay)
    for start in tl.range(0, HEAD_DIM, BLOCK_P, num_stages=STAGES):
        p = start + tl.arange(0, BLOCK_P)
        in_p = p < HEAD_DIM
        x_channel = x_start + p
        at_state = state_pointer + p[:, None] * state_row_stride + s[None, :]
        in_state = in_p[:, None] & in_s[None, :]
        h = tl.load(at_state, mask=in_state, other=0.0).to(tl.float32)
        at = old + node[:, None] * xb_stride + x_channel[None, :]
        old_x = load_kept(at, there[:, None] & in_p[None, :])
        h = advanced(h, decay, after, old_x, old_B, accepted, PRECISION, MIXED)
        if LONG_PATHS:  # noqa: SIM102 (known when it is compiled, the other when it runs)
            if path_length > 16:  # a loop that is in no `if` would keep this one from streaming
                for first in range(16, path_length, 16):
                    counts = first + k < path_length
                    h = advanced_along(
                        h, A, path, first + k, counts, counts, num_slots, old, xb_stride,
                        old_steps, steps_stride, x_channel, in_p, b_channel, in_s, PRECISION, MIXED,
                    )
        kept = h.to(state_pointer.dtype.element_ty)
        if path_length > 0:
            tl.store(at_state, kept, mask=in_state)
        h = kept.to(tl.float32)
        if CHAIN == 0:
            in_y = known[:, None] & in_p[None, :]
            x = load_kept(xb + q[:, None] * xb_stride + x_channel[None, :], in_y)
            y = mixed_product(C, tl.trans(h), PRECISION, MIXED) * fade[:, None]
            y += mixed_product(scores, x, PRECISION, MIXED)
            if gate is not None:
                at = gate + q[:, None] * gate_stride + p[None, :]
                y = gated_by_silu(y, at, in_y, y_pointer.dtype.element_ty)
            at = y_pointer + q[:, None] * y_stride + p[None, :]
            tl.store(at, y.to(y_pointer.dtype.element_ty), mask=in_y)
        else:
            for i in tl.static_range(CHAIN):
                dt = load_kept(steps + i * steps_stride)
                x = load_kept(xb + i * xb_stride + x_channel, in_p).to(tl.float32)
                B = load_kept(xb + i * xb_stride + b_channel, in_s).to(tl.float32)
                C = tl.load(C_pointer + i * C_stride, mask=in_s, other=0.0).to(tl.float32)
                h = tl.exp(dt * A) * h + (dt * x)[:, None] * B[None, :]
                y = tl.sum(h * C[None, :], axis=1) + D * x
                if gate is not None:
                    at = gate + i * gate_stride + p
                    y = gated_by_silu(y, at, in_p, y_pointer.dtype.element_ty)
                at = y_pointer + i * y_stride + p
                tl.store(at, y.to(y_pointer.dtype.element_ty), mask=in_p)
