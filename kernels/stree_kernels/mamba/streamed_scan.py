"""A Mamba-2 layer's call of many sequences, whose states stream through shared memory (Triton).

Such a call is limited by reading and writing the states. A program serves a sequence and a head:
it computes once the values that all of the head's channels need, and then goes over blocks of
channels, while the states of the next blocks are loaded. Each block is advanced along the last
accepted path, stored, and scanned, by matrix products (a tree, as in `tree_scan.py`) or step by
step (a chain, as in `chain_scan.py`). So a state is read once and written once. The conv, which
writes no state, is the same launch as in the other scans. The naive twin is `naive.mamba_tree`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from stree_kernels.contracts import CacheState, Derived, Topology
from stree_kernels.conv.tree_conv import (
    PATH_BLOCK,
    advanced,
    advanced_along,
    path_inputs,
    path_weights,
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
from stree_kernels.shapes import MixerShape

STATE_BYTES_PAST_L2 = 16 * 2**20  # of a layer, more than the L2 cache keeps between launches
MAX_STREAMED_NODES = 32  # that a program scans
# Fastest on an H200
BLOCK = 4096  # numbers of a state at a time
STAGES = 3  # blocks in flight, the present one included
# With more than three programs a multiprocessor, and so few nodes, settings by which four fit
MAX_NODES_CROWDED = 16
CROWDED_STAGES = 2
CROWDED_REGISTERS = 128  # of a thread
MIN_SHARED_BYTES = 128 * 1024  # bytes of a multiprocessor; below this, do not prefetch (one stage)


def streams(state: Tensor, num_new: int, num_read: int = 0) -> bool:
    """Return True if a call over num_new nodes should stream its states.

    It should for a whole tree, for states (B, H, P, S) that the L2 cache does not keep, and with
    at least one program per multiprocessor.
    """
    return (
        num_read == 0 and num_new <= MAX_STREAMED_NODES and state.nbytes >= STATE_BYTES_PAST_L2
        and state.shape[0] * state.shape[1] >= device_of(state)[0]
    )


def scan_streamed(
    scan: Any, derived: Derived, shape: MixerShape, topology: Topology, cache_state: CacheState,
    as_chain: bool,
) -> None:
    """Replay the accepted paths and scan whole trees, by a `ScanArgs`; chains go step by step."""
    batch, num_new, _ = scan.y.shape
    block_s = max(16, triton.next_power_of_2(shape.d_state))
    block_p = max(16, min(BLOCK // block_s, triton.next_power_of_2(shape.head_dim)))
    stages, registers, wide = STAGES, None, scan.y.element_size() == 4
    multiprocessors, shared_bytes = device_of(scan.y)
    if shape.num_heads * batch > 3 * multiprocessors and num_new <= MAX_NODES_CROWDED and not wide:
        stages, registers = CROWDED_STAGES, CROWDED_REGISTERS
    if shared_bytes < (SHARED_BYTES if wide else MIN_SHARED_BYTES):
        stages = 1
    streamed_scan_kernel[(shape.num_heads, batch)](
        derived.args, scan, topology.args, cache_state.args, num_new,
        min(derived.convolved.shape[2], derived.decays.shape[3]),
        SHAPE=shape.scan, BLOCK_P=block_p, BLOCK_S=block_s,
        BLOCK_Q=MAX_NODES_CROWDED if num_new <= MAX_NODES_CROWDED else MAX_STREAMED_NODES,
        STAGES=stages, CHAIN=num_new if as_chain else 0,
        LONG_PATHS=cache_state.path.shape[1] > PATH_BLOCK.value,
        PRECISION=precision_of(scan.y), MIXED=mixed_precision_of(scan.y.dtype),
        num_warps=8 if wide else 4, num_stages=1, maxnreg=registers, **overlapping(scan.y),
    )


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
    nodes, scan, tree, cache, num_new, max_nodes, SHAPE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_Q: tl.constexpr, STAGES: tl.constexpr,
    CHAIN: tl.constexpr, LONG_PATHS: tl.constexpr, PRECISION: tl.constexpr, MIXED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    s = tl.arange(0, BLOCK_S)
    in_s = s < SHAPE.d_state
    x_start = (head // SHAPE.heads_a_x) * SHAPE.head_dim
    b_channel = SHAPE.b_channel + (head // SHAPE.heads_a_b) * SHAPE.d_state + s
    A = -tl.exp(load_kept(scan.A_log + head).to(tl.float32))
    D = load_kept(scan.D + head).to(tl.float32)
    # The first launch waited for all before it: the cache state is complete already, and so are the
    # values that the last call left
    parity = load_kept(cache.parities)
    xb = nodes.convolved + batch * nodes.convolved_strides[1]
    steps = nodes.decays + (batch * nodes.decays_strides[1] + head)
    xb_stride, steps_stride = nodes.convolved_strides[2], nodes.decays_strides[3]
    to_state = scan.state + (batch * scan.state_strides[0] + head * scan.state_strides[1])
    path = cache.path + batch * cache.path_stride
    path_length = load_kept(cache.path_lengths + batch).to(tl.int32)
    old = xb + parity * nodes.convolved_strides[0]
    old_steps = steps + parity * nodes.decays_strides[0]
    k = tl.arange(0, PATH_BLOCK)
    node, there, old_dt, old_B = path_inputs(
        path, k, k < cache.path_size, max_nodes, old, xb_stride, old_steps, steps_stride,
        b_channel, in_s,
    )
    accepted = k < path_length
    decay, after = path_weights(A, old_dt, accepted)
    old_B = tl.where(accepted[:, None], old_B, 0.0)
    follow(OVERLAPS)
    xb += (1 - parity) * nodes.convolved_strides[0]
    steps += (1 - parity) * nodes.decays_strides[0]
    to_C = scan.C + (batch * scan.C_strides[0] + (head // SHAPE.heads_a_c) * SHAPE.d_state + s)
    to_y = scan.y + (batch * scan.y_strides[0] + head * SHAPE.head_dim)
    dtype = scan.y.dtype.element_ty
    if scan.gate is not None:
        to_gate = scan.gate + (batch * scan.gate_strides[0] + head * SHAPE.head_dim)
    if CHAIN == 0:
        q = tl.arange(0, BLOCK_Q)
        known = q < num_new
        ancestors = tree.ancestors + load_kept(cache.variants + batch) * tree.size * tree.size
        in_tree = known[:, None] & known[None, :]
        above = load_kept(ancestors + q[:, None] * tree.size + q[None, :], in_tree) != 0
        in_nodes = known[:, None] & in_s[None, :]
        B = load_kept(xb + q[:, None] * xb_stride + b_channel[None, :], in_nodes)
        C = tl.load(to_C[None, :] + q[:, None] * scan.C_strides[1], mask=in_nodes, other=0.0)
        dt = load_kept(steps + q * steps_stride, known)
        to_decay = steps + nodes.decays_strides[2]
        log_decay = tl.load(to_decay + q * steps_stride, mask=known, other=0.0)
        scores = pair_scores(q, q, above, C, log_decay, B, dt, log_decay, D, PRECISION)  # (Q, Q)
        fade = tl.exp(log_decay)
    for start in tl.range(0, SHAPE.head_dim, BLOCK_P, num_stages=STAGES):
        p = start + tl.arange(0, BLOCK_P)
        in_p = p < SHAPE.head_dim
        x_channel = x_start + p
        at_state = to_state + p[:, None] * scan.state_strides[2] + s[None, :]
        in_state = in_p[:, None] & in_s[None, :]
        h = tl.load(at_state, mask=in_state, other=0.0).to(tl.float32)  # (P, S)
        at = old + node[:, None] * xb_stride + x_channel[None, :]
        old_x = load_kept(at, there[:, None] & in_p[None, :])
        h = advanced(h, decay, after, old_x, old_B, accepted, PRECISION, MIXED)
        if LONG_PATHS:  # noqa: SIM102 (known when it is compiled, the other when it runs)
            # A loop that is in no `if` would keep this one from streaming
            if path_length > PATH_BLOCK:
                for begin in range(PATH_BLOCK, path_length, PATH_BLOCK):
                    counts = begin + k < path_length
                    h = advanced_along(
                        h, A, path, begin + k, counts, counts, max_nodes, old, xb_stride,
                        old_steps, steps_stride, x_channel, in_p, b_channel, in_s, PRECISION, MIXED,
                    )
        kept = h.to(scan.state.dtype.element_ty)
        if path_length > 0:
            tl.store(at_state, kept, mask=in_state)
        h = kept.to(tl.float32)
        if CHAIN == 0:
            in_y = known[:, None] & in_p[None, :]
            x = load_kept(xb + q[:, None] * xb_stride + x_channel[None, :], in_y)
            # (Q, P) = (Q, S) @ (S, P) + (Q, Q) @ (Q, P)
            y = mixed_product(C, tl.trans(h), PRECISION, MIXED) * fade[:, None]
            y += mixed_product(scores, x, PRECISION, MIXED)
            if scan.gate is not None:
                at = to_gate + q[:, None] * scan.gate_strides[1] + p[None, :]
                y = gated_by_silu(y, at, in_y, dtype)
            at = to_y + q[:, None] * scan.y_strides[1] + p[None, :]
            tl.store(at, y.to(dtype), mask=in_y)
        else:
            for i in tl.static_range(CHAIN):
                dt = load_kept(steps + i * steps_stride)
                x = load_kept(xb + i * xb_stride + x_channel, in_p).to(tl.float32)
                B = load_kept(xb + i * xb_stride + b_channel, in_s).to(tl.float32)
                C = tl.load(to_C + i * scan.C_strides[1], mask=in_s, other=0.0).to(tl.float32)
                h = tl.exp(dt * A) * h + (dt * x)[:, None] * B[None, :]
                y = tl.sum(h * C[None, :], axis=1) + D * x
                if scan.gate is not None:
                    y = gated_by_silu(y, to_gate + i * scan.gate_strides[1] + p, in_p, dtype)
                tl.store(to_y + i * scan.y_strides[1] + p, y.to(dtype), mask=in_p)
