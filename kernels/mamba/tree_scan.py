"""A Mamba-2 layer's tree call in two launches: replay and tree conv, then the tree scan (Triton).

In the scan one program serves one sequence, a few nodes, one head and a block of that head's
channels. Only the first launch writes the state, so any number of programs may read it. On GPUs
that can (compute capability 9.0) each launch is made before the one that it needs has ended, and
waits for it. Many sequences go another way (`streamed_scan.py`). The naive twin is
`naive.mamba_tree`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree_kernels.contracts import CacheState, Derived, MixerShape, MixerWeights, Topology
from stree_kernels.conv.tree_conv import replay_and_convolve
from stree_kernels.launch import follow, load_kept, overlapping
from stree_kernels.mamba.streamed_scan import gated_by_silu, mamba_streamed, pair_scores, streams
from stree_kernels.products.linear import mixed_precision_of, mixed_product, precision_of

# Nodes and channels of a head that a program scans, and its warps: for few nodes, and for many.
# Fastest on an H200.
FEW, MANY = (16, 32, 4), (32, 64, 8)


def mamba_tree(
    projected: Tensor,
    rows: Tensor,
    derived: Derived,
    state: Tensor,
    weights: MixerWeights,
    shape: MixerShape,
    topology: Topology,
    cache_state: CacheState,
    first: int,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `naive.mamba_tree` in two launches; y (B, Q, H·P) in projected's dtype."""
    batch, num_new, _ = projected.shape
    if streams(state, num_new, first):
        return mamba_streamed(
            projected, rows, derived, state, weights, shape, topology, cache_state, out
        )
    xb, steps = derived.xb, derived.steps
    kept = projected[..., shape.d_inner :]
    block_q, most_channels, num_warps = FEW if num_new <= FEW[0] else MANY
    query_blocks = triton.cdiv(num_new, block_q)
    C = replay_and_convolve(
        kept, rows, derived, state, weights, shape, topology, cache_state, first
    )
    y = projected.new_empty(batch, num_new, shape.d_inner) if out is None else out
    assert y.stride(2) == projected.stride(2) == 1
    block_p = max(16, min(most_channels, triton.next_power_of_2(shape.head_dim)))
    x_conv, b_conv, c_conv = shape.scan_groups
    heads, num_nodes = shape.num_heads, first + num_new
    block_n = min(64, max(16, triton.next_power_of_2(num_nodes)))
    tree_scan_kernel[(triton.cdiv(shape.head_dim, block_p) * query_blocks, heads, batch)](
        xb, xb.stride(0), xb.stride(1), xb.stride(2),
        steps, steps.stride(0), steps.stride(1), steps.stride(2), steps.stride(3),
        C, C.stride(0), C.stride(1),
        state, state.stride(0), state.stride(1), state.stride(2),
        y, y.stride(0), y.stride(1),
        projected if shape.gated else None, projected.stride(0), projected.stride(1),
        weights.A_log, weights.D,
        topology.ancestors.view(torch.uint8), topology.depths.shape[1],
        cache_state.variant, cache_state.parity, first, num_new, query_blocks,
        HEAD_DIM=shape.head_dim, D_STATE=shape.d_state,
        HEADS_A_X=heads // x_conv, HEADS_A_B=heads // b_conv, HEADS_A_C=heads // c_conv,
        B_CHANNEL=x_conv * shape.head_dim, NEW_HALF=first == 0,
        BLOCK_P=block_p, BLOCK_S=max(16, triton.next_power_of_2(shape.d_state)),
        BLOCK_N=block_n, BLOCK_Q=block_q, ONE_TILE=num_nodes <= block_n,
        PRECISION=precision_of(kept), MIXED=mixed_precision_of(kept.dtype),
        # Tiles of fp32 in several stages would not fit the shared memory of smaller GPUs
        num_stages=1 if projected.dtype == torch.float32 else 3,
        num_warps=num_warps, **overlapping(kept),
    )
    return y


@triton.jit
def _nodes(
    start, num_nodes, xb, xb_stride, x_channel, in_p, b_channel, in_s,
    steps, steps_part_stride, steps_stride, BLOCK_N: tl.constexpr,
):
    """Load x, B, dt and log-decay of a block of nodes."""
    node = start + tl.arange(0, BLOCK_N)
    there = node < num_nodes
    at = xb + node[:, None] * xb_stride
    x = load_kept(at + x_channel[None, :], there[:, None] & in_p[None, :])
    B = load_kept(at + b_channel[None, :], there[:, None] & in_s[None, :])
    dt = load_kept(steps + node * steps_stride, there)
    log_decay = tl.load(steps + steps_part_stride + node * steps_stride, mask=there, other=0.0)
    return x, B, dt, log_decay


@triton.jit
def _above(ancestors, tree_size, node, known, start, num_nodes, BLOCK_N: tl.constexpr):
    """Return which nodes of a block are at or above each node, (nodes, BLOCK_N)."""
    other = start + tl.arange(0, BLOCK_N)
    at = ancestors + node[:, None] * tree_size + other[None, :]
    return load_kept(at, known[:, None] & (other < num_nodes)[None, :]) != 0


@triton.jit
def _among_nodes(
    node, above, start, C, log_decay, x, B, dt, other_decay, D,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, MIXED: tl.constexpr,
):
    """Return the contribution of a block of ancestors to each node."""
    other = start + tl.arange(0, BLOCK_N)
    scores = pair_scores(node, other, above, C, log_decay, B, dt, other_decay, D, PRECISION)
    return mixed_product(scores, x, PRECISION, MIXED)  # (Q, P) = (Q, N) @ (N, P)


@triton.jit
def tree_scan_kernel(
    xb, xb_parity_stride, xb_batch_stride, xb_stride,
    steps, steps_parity_stride, steps_batch_stride, steps_part_stride, steps_stride,
    C_pointer, C_batch_stride, C_stride,
    state_pointer, state_batch_stride, state_head_stride, state_row_stride,
    y_pointer, y_batch_stride, y_stride, gate, gate_batch_stride, gate_stride,
    A_log, D_pointer, ancestors, tree_size, variants, parities, first, num_new, query_blocks,
    HEAD_DIM: tl.constexpr, D_STATE: tl.constexpr,
    HEADS_A_X: tl.constexpr, HEADS_A_B: tl.constexpr, HEADS_A_C: tl.constexpr,
    B_CHANNEL: tl.constexpr, NEW_HALF: tl.constexpr, OVERLAPS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr,
    ONE_TILE: tl.constexpr, PRECISION: tl.constexpr, MIXED: tl.constexpr,
):
    block, query_block = tl.program_id(0) // query_blocks, tl.program_id(0) % query_blocks
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    p = block * BLOCK_P + tl.arange(0, BLOCK_P)
    s = tl.arange(0, BLOCK_S)
    in_p, in_s = p < HEAD_DIM, s < D_STATE
    x_channel = (head // HEADS_A_X) * HEAD_DIM + p
    b_channel = B_CHANNEL + (head // HEADS_A_B) * D_STATE + s
    c_channel = (head // HEADS_A_C) * D_STATE + s
    q = query_block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    node = first + q
    known = q < num_new
    D = load_kept(D_pointer + head).to(tl.float32)
    # The first launch waited for all before it: the cache state is complete already
    parity = load_kept(parities)
    ancestors += load_kept(variants + batch) * tree_size * tree_size
    half = 1 - parity if NEW_HALF else parity
    xb += batch * xb_batch_stride
    steps += batch * steps_batch_stride + head
    state_pointer += batch * state_batch_stride + head * state_head_stride
    # Parents come before their children: nothing after these nodes is above them
    num_nodes = tl.minimum(first + (query_block + 1) * BLOCK_Q, first + num_new)
    if ONE_TILE:
        above = _above(ancestors, tree_size, node, known, 0, num_nodes, BLOCK_N)
    xb += half * xb_parity_stride
    steps += half * steps_parity_stride
    follow(OVERLAPS)
    C = tl.load(
        C_pointer + batch * C_batch_stride + q[:, None] * C_stride + c_channel[None, :],
        mask=known[:, None] & in_s[None, :], other=0.0,
    )
    state = tl.load(
        state_pointer + p[:, None] * state_row_stride + s[None, :],
        mask=in_p[:, None] & in_s[None, :], other=0.0,
    ).to(tl.float32)
    log_decay = tl.load(steps + steps_part_stride + node * steps_stride, mask=known, other=0.0)
    if ONE_TILE:
        x, B, dt, other_decay = _nodes(
            0, num_nodes, xb, xb_stride, x_channel, in_p, b_channel, in_s,
            steps, steps_part_stride, steps_stride, BLOCK_N,
        )
    # (Q, P) = (Q, S) @ (S, P)
    y = mixed_product(C, tl.trans(state), PRECISION, MIXED) * tl.exp(log_decay)[:, None]
    if ONE_TILE:
        y += _among_nodes(
            node, above, 0, C, log_decay, x, B, dt, other_decay, D, BLOCK_N, PRECISION, MIXED
        )
    else:
        for start in range(0, num_nodes, BLOCK_N):
            x, B, dt, other_decay = _nodes(
                start, num_nodes, xb, xb_stride, x_channel, in_p, b_channel, in_s,
                steps, steps_part_stride, steps_stride, BLOCK_N,
            )
            above = _above(ancestors, tree_size, node, known, start, num_nodes, BLOCK_N)
            y += _among_nodes(
                node, above, start, C, log_decay, x, B, dt, other_decay, D,
                BLOCK_N, PRECISION, MIXED,
            )
    if gate is not None:
        at = gate + batch * gate_batch_stride + q[:, None] * gate_stride + head * HEAD_DIM
        in_y = known[:, None] & in_p[None, :]
        y = gated_by_silu(y, at + p[None, :], in_y, y_pointer.dtype.element_ty)
    at = y_pointer + batch * y_batch_stride + q[:, None] * y_stride + head * HEAD_DIM + p[None, :]
    tl.store(at, y.to(y_pointer.dtype.element_ty), mask=known[:, None] & in_p[None, :])
