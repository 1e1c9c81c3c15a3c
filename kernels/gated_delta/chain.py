"""A gated-delta layer's call over a chain, step by step: the multi-step state update (Triton).

`gated_delta/tree.py` does it by matrix products, this as the recurrence itself: each program
keeps its part of the state in registers, takes the accepted path of the last tree and then the new
tokens one by one. Useless for a tree, which has to be unrolled into chains. The conv is the same
launch as for a tree. The naive twin is `naive.gated_delta_tree`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree_kernels.contracts import (
    CacheState,
    Derived,
    GatedDeltaShape,
    GatedDeltaWeights,
    Topology,
)
from stree_kernels.conv.tree_conv import convolve
from stree_kernels.launch import follow, load_kept, overlapping, store_kept
from stree_kernels.naive.gated_delta import NORM_EPS

BLOCK_VALUES = 32  # of a head that a program advances: not yet compared on a GPU


def gated_delta_chain(
    projected: Tensor,
    rows: Tensor,
    derived: Derived,
    updates: Tensor,
    state: Tensor,
    weights: GatedDeltaWeights,
    shape: GatedDeltaShape,
    topology: Topology,
    cache_state: CacheState,
) -> Tensor:
    """Compute `naive.gated_delta_tree` of chains in two launches; `topology` must be of chains."""
    batch, num_new, _ = projected.shape
    _, kept, b = projected.split([shape.d_inner, shape.num_kept, shape.num_heads], dim=-1)
    v = convolve(kept, rows, derived, weights, shape, topology, cache_state, 0)
    y = torch.empty_like(v)
    qk, steps = derived.xb, derived.steps
    assert state.stride(3) == updates.stride(3) == 1 and updates.shape[1] >= num_new
    block_v = min(BLOCK_VALUES, triton.next_power_of_2(shape.value_dim))
    gated_delta_chain_kernel[(triton.cdiv(shape.value_dim, block_v), shape.num_heads, batch)](
        qk, qk.stride(0), qk.stride(1), qk.stride(2),
        steps, steps.stride(0), steps.stride(1), steps.stride(3),
        v, v.stride(0), v.stride(1), b, b.stride(0), b.stride(1),
        updates, updates.stride(0), updates.stride(1), updates.stride(2),
        state, state.stride(0), state.stride(1), state.stride(2),
        y, y.stride(0), y.stride(1), weights.A_log,
        cache_state.path, cache_state.path.stride(0), cache_state.path_length, cache_state.parity,
        num_new,
        KEY_DIM=shape.key_dim, VALUE_DIM=shape.value_dim,
        HEADS_A_KEY=shape.num_heads // shape.num_key_heads, K_CHANNEL=shape.conv_dims[0],
        SCALE=shape.key_dim**-0.5, EPS=NORM_EPS, NEGATIVE=shape.negative_eigenvalues,
        BLOCK_K=triton.next_power_of_2(shape.key_dim), BLOCK_V=block_v,
        num_warps=4, **overlapping(kept),
    )
    return y


@triton.jit
def gated_delta_chain_kernel(
    qk, qk_parity_stride, qk_batch_stride, qk_stride,
    steps, steps_parity_stride, steps_batch_stride, steps_stride,
    v_pointer, v_batch_stride, v_stride, b_pointer, b_batch_stride, b_stride,
    updates, updates_batch_stride, updates_stride, updates_head_stride,
    state_pointer, state_batch_stride, state_head_stride, state_row_stride,
    y_pointer, y_batch_stride, y_stride, A_log,
    path, path_stride, path_lengths, parities, num_new,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, HEADS_A_KEY: tl.constexpr,
    K_CHANNEL: tl.constexpr, SCALE: tl.constexpr, EPS: tl.constexpr, NEGATIVE: tl.constexpr,
    OVERLAPS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    d = tl.arange(0, BLOCK_K)
    p = block * BLOCK_V + tl.arange(0, BLOCK_V)
    in_d, in_p = d < KEY_DIM, p < VALUE_DIM
    at_state = (
        state_pointer + batch * state_batch_stride + head * state_head_stride
        + d[:, None] * state_row_stride + p[None, :]
    )
    in_state = in_d[:, None] & in_p[None, :]
    state = tl.load(at_state, mask=in_state, other=0.0).to(tl.float32)
    q_channel = (head // HEADS_A_KEY) * KEY_DIM + d
    k_channel = K_CHANNEL + q_channel
    value = head * VALUE_DIM + p
    A = -tl.exp(load_kept(A_log + head).to(tl.float32))
    qk += batch * qk_batch_stride
    steps += batch * steps_batch_stride + head
    updates += batch * updates_batch_stride + head * updates_head_stride + p
    # The first launch waited for all before it: the last tree and the cache state are complete
    # already, and no other program uses the state
    half = load_kept(parities)
    path_length = load_kept(path_lengths + batch).to(tl.int32)
    for step in range(0, path_length):
        node = load_kept(path + batch * path_stride + step).to(tl.int32)
        decay = _decay(steps + half * steps_parity_stride + node * steps_stride, A)
        k = _unit(qk + half * qk_parity_stride + node * qk_stride + k_channel, in_d, EPS)
        u = load_kept(updates + node * updates_stride, in_p)
        state = decay * state + k[:, None] * u[None, :]
    if path_length > 0:
        tl.store(at_state, state.to(state_pointer.dtype.element_ty), mask=in_state)
    follow(OVERLAPS)
    tl.debug_barrier()  # all threads have read the last tree's u: the new ones may be written
    qk += (1 - half) * qk_parity_stride
    steps += (1 - half) * steps_parity_stride
    v_pointer += batch * v_batch_stride + value
    b_pointer += batch * b_batch_stride + head
    y_pointer += batch * y_batch_stride + value
    for node in range(0, num_new):
        k = _unit(qk + node * qk_stride + k_channel, in_d, EPS)
        q = _unit(qk + node * qk_stride + q_channel, in_d, EPS) * SCALE
        v = tl.load(v_pointer + node * v_stride, mask=in_p, other=0.0).to(tl.float32)
        beta = tl.sigmoid(tl.load(b_pointer + node * b_stride).to(tl.float32))
        if NEGATIVE:
            beta *= 2
        state *= _decay(steps + node * steps_stride, A)
        u = beta * (v - tl.sum(state * k[:, None], axis=0))
        state += k[:, None] * u[None, :]
        y = tl.sum(state * q[:, None], axis=0)
        store_kept(updates + node * updates_stride, u, in_p)
        tl.store(y_pointer + node * y_stride, y.to(y_pointer.dtype.element_ty), mask=in_p)


@triton.jit
def _decay(at_dt, A):
    return tl.exp(load_kept(at_dt) * A)


@triton.jit
def _unit(at, in_d, EPS: tl.constexpr):
    """Scale a key or a query to length 1."""
    raw = load_kept(at, in_d).to(tl.float32)
    return raw * tl.rsqrt(tl.sum(raw * raw, axis=0) + EPS)
