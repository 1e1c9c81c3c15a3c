"""A gated-delta layer's call over a chain, step by step: the multi-step state update (Triton).

`gated_delta/tree.py` does it by matrix products, this as the recurrence itself: each program
keeps its part of the state in registers, takes the accepted path of the last tree and then the new
tokens one by one. Useless for a tree, which has to be unrolled into chains. The conv is the same
launch as for a tree. The naive twin is `naive.gated_delta_tree`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from stree_kernels.contracts import CacheState, Derived, GatedDeltaWeights
from stree_kernels.launch import follow, load_kept, overlapping, store_kept

BLOCK_VALUES = 32  # of a head that a program advances: not yet compared on a GPU


def advance_chain(
    args: Any, derived: Derived, weights: GatedDeltaWeights, dims: Any, num_heads: int,
    cache_state: CacheState,
) -> None:
    """Apply the rule to new chains, by a `RuleArgs` and a `RuleShape`."""
    batch, num_new, _ = args.y.shape
    block_v = min(BLOCK_VALUES, triton.next_power_of_2(dims.value_dim))
    gated_delta_chain_kernel[(triton.cdiv(dims.value_dim, block_v), num_heads, batch)](
        derived.args, args, weights.A_log, cache_state.args, num_new,
        SHAPE=dims, BLOCK_K=triton.next_power_of_2(dims.key_dim), BLOCK_V=block_v,
        num_warps=4, **overlapping(args.y),
    )


@triton.jit
def gated_delta_chain_kernel(
    nodes, rule, A_log, cache, num_new, SHAPE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, OVERLAPS: tl.constexpr,
):
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    d = tl.arange(0, BLOCK_K)
    p = block * BLOCK_V + tl.arange(0, BLOCK_V)
    in_d, in_p = d < SHAPE.key_dim, p < SHAPE.value_dim
    at_state = (
        rule.state + batch * rule.state_strides[0] + head * rule.state_strides[1]
        + d[:, None] * rule.state_strides[2] + p[None, :]
    )
    in_state = in_d[:, None] & in_p[None, :]
    state = tl.load(at_state, mask=in_state, other=0.0).to(tl.float32)  # (K, V)
    q_channel = (head // SHAPE.heads_a_key) * SHAPE.key_dim + d
    k_channel = SHAPE.k_channel + q_channel
    value = head * SHAPE.value_dim + p
    A = -tl.exp(load_kept(A_log + head).to(tl.float32))
    qk = nodes.convolved + batch * nodes.convolved_strides[1]
    steps = nodes.decays + (batch * nodes.decays_strides[1] + head)
    qk_stride, steps_stride = nodes.convolved_strides[2], nodes.decays_strides[3]
    updates = rule.updates + (batch * rule.updates_strides[0] + head * rule.updates_strides[2] + p)
    # The first launch waited for all before it: the last tree and the cache state are complete
    # already, and no other program uses the state
    half = load_kept(cache.parities)
    path_length = load_kept(cache.path_lengths + batch).to(tl.int32)
    for step in range(0, path_length):
        node = load_kept(cache.path + batch * cache.path_stride + step).to(tl.int32)
        decay = _decay(steps + half * nodes.decays_strides[0] + node * steps_stride, A)
        at_k = qk + half * nodes.convolved_strides[0] + node * qk_stride + k_channel
        k = _unit(at_k, in_d, SHAPE.eps)
        u = load_kept(updates + node * rule.updates_strides[1], in_p)
        state = decay * state + k[:, None] * u[None, :]
    if path_length > 0:
        tl.store(at_state, state.to(rule.state.dtype.element_ty), mask=in_state)
    follow(OVERLAPS)
    tl.debug_barrier()  # all threads have read the last tree's u: the new ones may be written
    qk += (1 - half) * nodes.convolved_strides[0]
    steps += (1 - half) * nodes.decays_strides[0]
    to_v = rule.v + (batch * rule.v_strides[0] + value)
    to_b = rule.b + (batch * rule.b_strides[0] + head)
    to_y = rule.y + (batch * rule.y_strides[0] + value)
    for node in range(0, num_new):
        k = _unit(qk + node * qk_stride + k_channel, in_d, SHAPE.eps)
        q = _unit(qk + node * qk_stride + q_channel, in_d, SHAPE.eps) * SHAPE.scale
        v = tl.load(to_v + node * rule.v_strides[1], mask=in_p, other=0.0).to(tl.float32)
        beta = tl.sigmoid(tl.load(to_b + node * rule.b_strides[1]).to(tl.float32))
        if SHAPE.negative:
            beta *= 2
        state *= _decay(steps + node * steps_stride, A)
        u = beta * (v - tl.sum(state * k[:, None], axis=0))
        state += k[:, None] * u[None, :]
        y = tl.sum(state * q[:, None], axis=0)
        store_kept(updates + node * rule.updates_strides[1], u, in_p)
        tl.store(to_y + node * rule.y_strides[1], y.to(rule.y.dtype.element_ty), mask=in_p)


@triton.jit
def _decay(at_dt, A):
    return tl.exp(load_kept(at_dt) * A)


@triton.jit
def _unit(at, in_d, EPS: tl.constexpr):
    """Scale a key or a query to length 1."""
    raw = load_kept(at, in_d).to(tl.float32)
    return raw * tl.rsqrt(tl.sum(raw * raw, axis=0) + EPS)
