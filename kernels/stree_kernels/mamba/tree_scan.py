"""A Mamba-2 layer's tree call in two launches: replay and tree conv, then the tree scan (Triton).

In the scan one program serves one sequence, a few nodes, one head and a block of that head's
channels. Only the first launch writes the state, so any number of programs may read it. On GPUs
that can (compute capability 9.0) each launch is made before the one that it needs has ended, and
waits for it. Many sequences go another way (`streamed_scan.py`). The naive twin is
`naive.mamba_tree`.
"""

from __future__ import annotations

from collections import namedtuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree_kernels.contracts import CacheState, Derived, MixerWeights, Topology
from stree_kernels.conv.tree_conv import ConvDims, convolve
from stree_kernels.launch import follow, load_kept, overlapping
from stree_kernels.mamba.chain_scan import scan_chain
from stree_kernels.mamba.streamed_scan import gated_by_silu, pair_scores, scan_streamed, streams
from stree_kernels.products.linear import mixed_precision_of, mixed_product, precision_of
from stree_kernels.shapes import MixerShape

# Nodes and channels of a head that a program scans, and its warps; fastest on an H200
TILE_SMALL_TREE, TILE_LARGE_TREE = (16, 32, 4), (32, 64, 8)


# Tensors of a scan, pointers in its kernel; strides are of all dims but the last
ScanArgs = namedtuple(
    "ScanArgs", "C C_strides state state_strides y y_strides gate gate_strides A_log D"
)


def mamba_tree(
    projected: Tensor, history: Tensor, derived: Derived, state: Tensor, weights: MixerWeights,
    shape: MixerShape, topology: Topology, cache_state: CacheState, num_read: int,
    out: Tensor | None = None, as_chain: bool | None = None,
) -> Tensor:
    """Compute `naive.mamba_tree` in two launches; y (B, Q, H·P) in projected's dtype.

    With `as_chain` trees are chains, whose nodes come step by step; None: as
    `Topology.comes_in_steps` says.
    """
    batch, num_new, _ = projected.shape
    if as_chain is None:
        as_chain = topology.comes_in_steps(num_read)
    streamed, kept = streams(state, num_new, num_read), projected[..., shape.d_inner :]
    replayed = None if streamed else state  # else the scan advances the state
    dims = ConvDims(shape.xbc_dims, shape.conv_dims, shape.dt_limit, shape.scan)
    C = convolve(
        kept, history, derived, replayed, weights, shape, dims, topology, cache_state, num_read
    )
    y = projected.new_empty(batch, num_new, shape.d_inner) if out is None else out
    assert y.stride(2) == projected.stride(2) == 1
    scan = ScanArgs(
        C, C.stride()[:2], state, state.stride()[:3], y, y.stride()[:2],
        projected if shape.gated else None, projected.stride()[:2], weights.A_log, weights.D,
    )
    if streamed:
        scan_streamed(scan, derived, shape, topology, cache_state, as_chain)
    elif as_chain:
        scan_chain(scan, derived, shape, cache_state)
    else:
        _scan_tree(scan, derived, shape, topology, cache_state, num_read)
    return y


def _scan_tree(
    scan: ScanArgs, derived: Derived, shape: MixerShape, topology: Topology,
    cache_state: CacheState, num_read: int,
) -> None:
    batch, num_new, _ = scan.y.shape
    tile = TILE_SMALL_TREE if num_new <= TILE_SMALL_TREE[0] else TILE_LARGE_TREE
    block_q, max_channels, num_warps = tile
    query_blocks = triton.cdiv(num_new, block_q)
    block_p = max(16, min(max_channels, triton.next_power_of_2(shape.head_dim)))
    num_nodes = num_read + num_new
    block_n = min(64, max(16, triton.next_power_of_2(num_nodes)))
    grid = triton.cdiv(shape.head_dim, block_p) * query_blocks, shape.num_heads, batch
    tree_scan_kernel[grid](
        derived.args, scan, topology.args, cache_state.variant, cache_state.parity,
        num_read, num_new, query_blocks,
        SHAPE=shape.scan, BLOCK_P=block_p, BLOCK_S=max(16, triton.next_power_of_2(shape.d_state)),
        BLOCK_N=block_n, BLOCK_Q=block_q, ONE_TILE=num_nodes <= block_n, NEW_HALF=num_read == 0,
        PRECISION=precision_of(scan.y), MIXED=mixed_precision_of(scan.y.dtype),
        # Tiles of fp32 in several stages would not fit the shared memory of smaller GPUs
        num_stages=1 if scan.y.dtype == torch.float32 else 3,
        num_warps=num_warps, **overlapping(scan.y),
    )


@triton.jit
def _nodes(
    start, num_nodes, xb, steps, nodes, x_channel, in_p, b_channel, in_s, BLOCK_N: tl.constexpr
):
    """Load x (N, P), B (N, S), dt and log-decay (N,) of a block of nodes."""
    node = start + tl.arange(0, BLOCK_N)
    there = node < num_nodes
    at = xb + node[:, None] * nodes.convolved_strides[2]
    x = load_kept(at + x_channel[None, :], there[:, None] & in_p[None, :])
    B = load_kept(at + b_channel[None, :], there[:, None] & in_s[None, :])
    dt = load_kept(steps + node * nodes.decays_strides[3], there)
    at = steps + nodes.decays_strides[2] + node * nodes.decays_strides[3]
    return x, B, dt, tl.load(at, mask=there, other=0.0)


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
    nodes, scan, tree, variants, parities, num_read, num_new, query_blocks, SHAPE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr,
    ONE_TILE: tl.constexpr, NEW_HALF: tl.constexpr, PRECISION: tl.constexpr, MIXED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    block, query_block = tl.program_id(0) // query_blocks, tl.program_id(0) % query_blocks
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    p = block * BLOCK_P + tl.arange(0, BLOCK_P)
    s = tl.arange(0, BLOCK_S)
    in_p, in_s = p < SHAPE.head_dim, s < SHAPE.d_state
    x_channel = (head // SHAPE.heads_a_x) * SHAPE.head_dim + p
    b_channel = SHAPE.b_channel + (head // SHAPE.heads_a_b) * SHAPE.d_state + s
    c_channel = (head // SHAPE.heads_a_c) * SHAPE.d_state + s
    q = query_block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    node = num_read + q
    known = q < num_new
    D = load_kept(scan.D + head).to(tl.float32)
    # The first launch waited for all before it: the cache state is complete already
    parity = load_kept(parities)
    ancestors = tree.ancestors + load_kept(variants + batch) * tree.size * tree.size
    half = 1 - parity if NEW_HALF else parity
    xb = nodes.convolved + batch * nodes.convolved_strides[1]
    steps = nodes.decays + (batch * nodes.decays_strides[1] + head)
    to_state = scan.state + (batch * scan.state_strides[0] + head * scan.state_strides[1])
    # Parents come before their children: nothing after these nodes is above them
    num_nodes = tl.minimum(num_read + (query_block + 1) * BLOCK_Q, num_read + num_new)
    if ONE_TILE:
        above = _above(ancestors, tree.size, node, known, 0, num_nodes, BLOCK_N)
    xb += half * nodes.convolved_strides[0]
    steps += half * nodes.decays_strides[0]
    follow(OVERLAPS)
    in_nodes = known[:, None] & in_s[None, :]
    to_C = scan.C + batch * scan.C_strides[0] + q[:, None] * scan.C_strides[1]
    C = tl.load(to_C + c_channel[None, :], mask=in_nodes, other=0.0)
    state = tl.load(
        to_state + p[:, None] * scan.state_strides[2] + s[None, :],
        mask=in_p[:, None] & in_s[None, :], other=0.0,
    ).to(tl.float32)
    to_decay = steps + nodes.decays_strides[2]
    log_decay = tl.load(to_decay + node * nodes.decays_strides[3], mask=known, other=0.0)
    if ONE_TILE:
        x, B, dt, other_decay = _nodes(
            0, num_nodes, xb, steps, nodes, x_channel, in_p, b_channel, in_s, BLOCK_N
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
                start, num_nodes, xb, steps, nodes, x_channel, in_p, b_channel, in_s, BLOCK_N
            )
            above = _above(ancestors, tree.size, node, known, start, num_nodes, BLOCK_N)
            y += _among_nodes(
                node, above, start, C, log_decay, x, B, dt, other_decay, D,
                BLOCK_N, PRECISION, MIXED,
            )
    if scan.gate is not None:
        at = scan.gate + batch * scan.gate_strides[0] + q[:, None] * scan.gate_strides[1]
        at += head * SHAPE.head_dim
        in_y = known[:, None] & in_p[None, :]
        y = gated_by_silu(y, at + p[None, :], in_y, scan.y.dtype.element_ty)
    at = scan.y + batch * scan.y_strides[0] + q[:, None] * scan.y_strides[1]
    at = at + head * SHAPE.head_dim + p[None, :]
    tl.store(at, y.to(scan.y.dtype.element_ty), mask=known[:, None] & in_p[None, :])
