"""A gated-delta layer's tree call in two launches: tree conv, then replay and tree (Triton).

In the last launch one program serves one sequence, one value head and a block of its value
channels. It alone reads and writes its part of the state: it replays the last accepted path into
it, and keeps it in registers for all nodes of the new tree. The replay does not need the conv, so
with compute capability 9.0 both run at the same time. Then the nodes come in blocks, each with a
triangular system that is inverted by doubling of depth (`_inverse`). The naive twin is
`naive.gated_delta_tree`.

Blocks wait for one another only for u: the couplings of a block's nodes with each other and with
those of earlier blocks follow from q, k, β and the decays alone. For more than
`MAX_NODES_TWO_WARPS` and at most `MAX_NODES_PAIRED` nodes a launch between the two computes the
couplings of all blocks at once (`pairs_kernel`), so that the last one has a few products a block
left. State and replay do not need it, and run at the same time.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree_kernels.contracts import CacheState, Derived, GatedDeltaWeights, Topology
from stree_kernels.conv.tree_conv import PATH_BLOCK, ConvDims, convolve
from stree_kernels.gated_delta.chain import advance_chain
from stree_kernels.launch import follow, lead, load_kept, overlapping, store_kept
from stree_kernels.naive.gated_delta import NORM_EPS
from stree_kernels.products.linear import mixed_precision_of, mixed_product, precision_of, product
from stree_kernels.shapes import GatedDeltaShape

# Fastest on an H200: nodes and value channels of a head that a program takes at a time
BLOCK_NODES, BLOCK_VALUES = 16, 32
MAX_NODES_TWO_WARPS = 32  # nodes for which two warps are faster than four
BLOCK_KNOWN = 64  # earlier nodes that a block takes at a time once their pairs are known
MAX_NODES_PAIRED = 256  # nodes: the buffer of pairs grows with their square, 25 MB for 48 heads


# Tensors of a gated delta rule, pointers in its kernels; strides are of all dims but the last
RuleArgs = namedtuple(
    "RuleArgs", "v v_strides b b_strides updates updates_strides state state_strides y y_strides"
)


def gated_delta_tree(
    projected: Tensor, history: Tensor, derived: Derived, updates: Tensor, state: Tensor,
    weights: GatedDeltaWeights, shape: GatedDeltaShape, topology: Topology, cache_state: CacheState,
    num_read: int, as_chain: bool | None = None,
) -> Tensor:
    """Compute `naive.gated_delta_tree` in two launches; y (B, Q, H·V) in projected's dtype.

    More than `MAX_NODES_TWO_WARPS` and at most `MAX_NODES_PAIRED` nodes take three launches. With
    `as_chain` trees are chains, whose nodes come step by step; None: as `Topology.comes_in_steps`
    says.
    """
    if as_chain is None:
        as_chain = topology.comes_in_steps(num_read)
    _, kept, b = projected.split([shape.d_inner, shape.num_kept, shape.num_heads], dim=-1)
    conv = ConvDims(shape.conv_dims, shape.conv_dims)
    v = convolve(
        kept, history, derived, None, weights, shape, conv, topology, cache_state, num_read
    )
    y = torch.empty_like(v)
    assert state.stride(3) == updates.stride(3) == 1
    assert updates.shape[1] >= num_read + projected.shape[1]
    args = RuleArgs(
        v, v.stride()[:2], b, b.stride()[:2], updates, updates.stride()[:3],
        state, state.stride()[:3], y, y.stride()[:2],
    )
    dims = RuleShape(
        shape.key_dim, shape.value_dim, shape.num_heads // shape.num_key_heads,
        shape.conv_dims[0], shape.key_dim**-0.5, NORM_EPS, shape.negative_eigenvalues,
    )
    if as_chain:
        advance_chain(args, derived, weights, dims, shape.num_heads, cache_state)
    else:
        _advance_tree(args, derived, dims, shape.num_heads, topology, cache_state, num_read)
    return y


class RuleShape(NamedTuple):
    """Dimensions of a gated delta rule, constants of its kernels."""

    key_dim: int
    value_dim: int
    heads_a_key: int
    k_channel: int  # of `Derived.convolved`, at which k begins
    scale: float  # of the queries
    eps: float  # of the norm of keys and queries
    negative: bool


def _advance_tree(
    args: RuleArgs, derived: Derived, dims: RuleShape, num_heads: int, topology: Topology,
    cache_state: CacheState, num_read: int,
) -> None:
    batch, num_new, _ = args.y.shape
    rule: dict[str, Any] = dict(
        SHAPE=dims, REPLAY=num_read == 0,
        BLOCK_K=max(16, triton.next_power_of_2(dims.key_dim)), BLOCK_N=BLOCK_NODES,
        PRECISION=precision_of(args.y), num_stages=1, **overlapping(args.y),
    )
    pairs = None
    if MAX_NODES_TWO_WARPS < num_new <= MAX_NODES_PAIRED:
        num_blocks = triton.cdiv(num_new, BLOCK_NODES)
        num_columns = triton.cdiv(num_read + (num_blocks - 1) * BLOCK_NODES, BLOCK_NODES) + 1
        size = 2, batch, num_heads, num_new, num_read + num_new
        pairs = torch.empty(size, device=args.y.device)
        pairs_kernel[(num_blocks * num_columns, num_heads, batch)](
            derived.args, args.b, args.b_strides, pairs, pairs.stride(0), topology.args,
            cache_state.variant, cache_state.parity, num_read, num_new, num_columns,
            num_warps=2, **rule,
        )
    block_v = max(16, min(BLOCK_VALUES, triton.next_power_of_2(dims.value_dim)))
    gated_delta_kernel[(triton.cdiv(dims.value_dim, block_v), num_heads, batch)](
        derived.args, args, pairs, 0 if pairs is None else pairs.stride(0), topology.args,
        cache_state.args, num_read, num_new,
        min(derived.convolved.shape[2], derived.decays.shape[3], args.updates.shape[1]),
        BLOCK_V=block_v, BLOCK_KNOWN=BLOCK_KNOWN, MIXED=exact_products(args.y.dtype),
        num_warps=2 if num_new <= MAX_NODES_TWO_WARPS else 4, **rule,
    )


def exact_products(dtype: torch.dtype) -> str:
    """Return the precision of `mixed_product` where errors would stay in the state: no tf32."""
    mixed = mixed_precision_of(dtype)
    return "tf32x3" if mixed == "tf32" else mixed


@triton.jit(do_not_specialize=["num_new", "num_columns"])
def pairs_kernel(
    nodes, b, b_strides, pairs, scores_stride, tree, variants, parities,
    num_read, num_new, num_columns, SHAPE: tl.constexpr, REPLAY: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, OVERLAPS: tl.constexpr,
):
    """Compute the part of the system that couples a block of new nodes with earlier ones.

    Rows are new nodes. The last column is the block itself: its part is inverted and multiplied by
    β. The scores of queries and keys come with it. Written: pairs (2, B, H, Q, num_read + Q).
    """
    lead(OVERLAPS)  # the next launch begins with what neither this one nor the conv writes
    program, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    start = program // num_columns * BLOCK_N
    column = program % num_columns
    begin, end = column * BLOCK_N, num_read + start
    if column == num_columns - 1:
        begin, end = num_read + start, num_read + num_new
    if begin >= end:
        return
    d, at = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_N)
    in_d = d < SHAPE.key_dim
    place, other = start + at, begin + at
    known, there = place < num_new, other < end
    node = num_read + place
    half = load_kept(parities)
    if REPLAY:
        half = 1 - half
    variant = load_kept(variants + batch)
    ancestors = tree.ancestors + variant * tree.size * tree.size
    depth = load_kept(tree.depths + variant * tree.size + node, known)
    q_channel = (head // SHAPE.heads_a_key) * SHAPE.key_dim + d
    k_channel = SHAPE.k_channel + q_channel
    qk = nodes.convolved + (half * nodes.convolved_strides[0] + batch * nodes.convolved_strides[1])
    decays = half * nodes.decays_strides[0] + batch * nodes.decays_strides[1]
    log_decays = nodes.decays + (decays + nodes.decays_strides[2] + head)
    qk_stride, steps_stride = nodes.convolved_strides[2], nodes.decays_strides[3]
    follow(OVERLAPS)
    k = _rows(qk + k_channel[None, :], qk_stride, node, known, in_d)
    q = _rows(qk + q_channel[None, :], qk_stride, node, known, in_d)
    keys = _rows(qk + k_channel[None, :], qk_stride, other, there, in_d)
    decays = _inverse_length(keys, SHAPE.eps)[None, :] * _decays(
        ancestors, tree.size, node, known, load_kept(log_decays + node * steps_stride, known),
        other, there, load_kept(log_decays + other * steps_stride, there),
    )
    # (nodes, others) = (nodes, K) @ (K, others)
    system = product(k, tl.trans(keys), PRECISION) * decays * _inverse_length(k, SHAPE.eps)[:, None]
    scores = product(q, tl.trans(keys), PRECISION) * decays
    if column == num_columns - 1:
        beta = _strength(b + batch * b_strides[0] + place * b_strides[1] + head, known, SHAPE)
        system = _inverse(system * beta[:, None], depth, known, BLOCK_N) * beta[None, :]
    row = (batch * tl.num_programs(1) + head) * num_new + place
    at = pairs + row[:, None] * (num_read + num_new) + other[None, :]
    mine = known[:, None] & there[None, :]
    store_kept(at, system, mine)
    store_kept(at + scores_stride, scores, mine)


@triton.jit
def _strength(at, known, SHAPE: tl.constexpr):
    """Return β of some nodes."""
    beta = tl.sigmoid(tl.load(at, mask=known, other=0.0).to(tl.float32))
    if SHAPE.negative:
        beta *= 2
    return beta


# Compiled for exactly one new node, the loop over nodes is gone, and with it, in Triton 3.6 on an
# H200, what keeps the warps' use of shared memory apart: wrong numbers, others at each run
@triton.jit(do_not_specialize=["num_new"])
def gated_delta_kernel(
    nodes, rule, pairs, scores_stride, tree, cache, num_read, num_new, max_nodes,
    SHAPE: tl.constexpr, REPLAY: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_KNOWN: tl.constexpr, PRECISION: tl.constexpr, MIXED: tl.constexpr,
    OVERLAPS: tl.constexpr,
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
    qk = nodes.convolved + batch * nodes.convolved_strides[1]
    log_decays = nodes.decays + (batch * nodes.decays_strides[1] + nodes.decays_strides[2] + head)
    qk_stride, steps_stride = nodes.convolved_strides[2], nodes.decays_strides[3]
    updates = rule.updates + (batch * rule.updates_strides[0] + head * rule.updates_strides[2])
    updates_stride = rule.updates_strides[1]
    # The first launch waited for all before it: the last tree and the cache state are complete
    # already, and no other program uses the state
    half = load_kept(cache.parities)
    variant = load_kept(cache.variants + batch)
    if REPLAY:
        path_length = load_kept(cache.path_lengths + batch).to(tl.int32)
        state = _replay(
            state, qk + half * nodes.convolved_strides[0], qk_stride, k_channel, in_d,
            log_decays + half * nodes.decays_strides[0], steps_stride,
            updates, updates_stride, p, in_p, cache.path + batch * cache.path_stride,
            cache.path_size, path_length, max_nodes, SHAPE.eps, PRECISION, MIXED,
        )
        if path_length > 0:
            tl.store(at_state, state.to(rule.state.dtype.element_ty), mask=in_state)
        half = 1 - half
    qk += half * nodes.convolved_strides[0]
    log_decays += half * nodes.decays_strides[0]
    ancestors = tree.ancestors + variant * tree.size * tree.size
    depths = tree.depths + variant * tree.size
    follow(OVERLAPS)
    tl.debug_barrier()  # all threads have read the last tree's u: the new one's may be written
    for start in range(0, num_new, BLOCK_N):
        place = start + tl.arange(0, BLOCK_N)
        known = place < num_new
        node = num_read + place
        k = _rows(qk + k_channel[None, :], qk_stride, node, known, in_d)
        q = _rows(qk + q_channel[None, :], qk_stride, node, known, in_d)
        log_decay = load_kept(log_decays + node * steps_stride, known)
        v = tl.load(
            rule.v + batch * rule.v_strides[0] + place[:, None] * rule.v_strides[1]
            + value[None, :], mask=known[:, None] & in_p[None, :], other=0.0,
        ).to(tl.float32)
        if pairs is None:
            at_b = rule.b + batch * rule.b_strides[0] + place * rule.b_strides[1] + head
            beta = _strength(at_b, known, SHAPE)
        k_scale = _inverse_length(k, SHAPE.eps)
        q_scale = _inverse_length(q, SHAPE.eps) * SHAPE.scale
        # All that takes whole keys comes first: they, and the state, are most of the registers
        # (nodes, V) = (nodes, K) @ (K, V)
        seen = mixed_product(k, state, PRECISION, MIXED)
        wanted = v - seen * (tl.exp(log_decay) * k_scale)[:, None]
        y = mixed_product(q, state, PRECISION, MIXED) * tl.exp(log_decay)[:, None]
        if pairs is None:
            decays = k_scale[None, :] * _decays(
                ancestors, tree.size, node, known, log_decay, node, known, log_decay
            )
            system = product(k, tl.trans(k), PRECISION) * decays * (beta * k_scale)[:, None]
            scores = product(q, tl.trans(k), PRECISION) * decays
            for earlier in range(0, num_read + start, BLOCK_N):  # nodes of which u is known
                other = earlier + tl.arange(0, BLOCK_N)
                there = other < num_read + start
                keys = _rows(qk + k_channel[None, :], qk_stride, other, there, in_d)
                decay_there = load_kept(log_decays + other * steps_stride, there)
                decays = _inverse_length(keys, SHAPE.eps)[None, :] * _decays(
                    ancestors, tree.size, node, known, log_decay, other, there, decay_there
                )
                u_there = _rows(updates + p[None, :], updates_stride, other, there, in_p)
                k = _rows(qk + k_channel[None, :], qk_stride, node, known, in_d)  # anew
                overlaps = product(k, tl.trans(keys), PRECISION) * decays * k_scale[:, None]
                wanted -= product(overlaps, u_there, "tf32x3")
                q = _rows(qk + q_channel[None, :], qk_stride, node, known, in_d)
                y += product(product(q, tl.trans(keys), PRECISION) * decays, u_there, "tf32x3")
            depth = load_kept(depths + node, known)
            inverse = _inverse(system, depth, known, BLOCK_N) * beta[None, :]
        else:
            row = (batch * tl.num_programs(1) + head) * num_new + place
            line = pairs + row[:, None] * (num_read + num_new)
            inverse = load_kept(line + node[None, :], known[:, None] & known[None, :])
            scores = load_kept(
                line + scores_stride + node[None, :], known[:, None] & known[None, :]
            )
            for earlier in range(0, num_read + start, BLOCK_KNOWN):
                other = earlier + tl.arange(0, BLOCK_KNOWN)
                there = other < num_read + start
                u_there = _rows(updates + p[None, :], updates_stride, other, there, in_p)
                both = known[:, None] & there[None, :]
                wanted -= product(load_kept(line + other[None, :], both), u_there, "tf32x3")
                y += product(
                    load_kept(line + scores_stride + other[None, :], both), u_there, "tf32x3"
                )
        # (nodes, V) = (nodes, nodes) @ (nodes, V)
        u = product(inverse, wanted, "tf32x3")
        y = (y + product(scores, u, "tf32x3")) * q_scale[:, None]
        mine = known[:, None] & in_p[None, :]
        store_kept(updates + node[:, None] * updates_stride + p[None, :], u, mine)
        at = rule.y + batch * rule.y_strides[0] + place[:, None] * rule.y_strides[1]
        tl.store(at + value[None, :], y.to(rule.y.dtype.element_ty), mask=mine)
        tl.debug_barrier()  # the next block reads what these threads have written


@triton.jit
def _inverse(system, depth, known, BLOCK_N: tl.constexpr):
    """Return (I + A)⁻¹, where A has the entries of system between ancestors and descendants.

    Let T invert I + A within each band of 2ᵐ depths, and E be what of A joins the two halves of the
    bands twice as wide. TE has rows in the deeper halves and columns in the others only, so that
    (TE)² = 0: in the wider bands T − TET is the inverse. That is two products a doubling of depth,
    as stable as substitution is. A series in powers of A takes as many, but they grow like
    binomials on a chain of similar keys.
    """
    at = tl.arange(0, BLOCK_N)
    deepest = tl.max(tl.where(known, depth, 0), axis=0)
    highest = tl.min(tl.where(known, depth, deepest), axis=0)
    doublings = tl.sum((((deepest ^ highest) >> tl.arange(0, 16)) > 0).to(tl.int32), axis=0)
    between = depth[:, None] ^ depth[None, :]  # its highest bit says in which doubling a pair meets
    identity = tl.where(at[:, None] == at[None, :], 1.0, 0.0)
    inverse = identity - tl.where(between == 1, system, 0.0)
    for doubling in range(1, doublings):
        joins = tl.where((between >> doubling) == 1, system, 0.0)
        inverse -= product(inverse, product(joins, inverse, "tf32x3"), "tf32x3")
    return inverse


@triton.jit
def _replay(
    state, qk, qk_stride, k_channel, in_d, log_decays, steps_stride, updates, updates_stride,
    p, in_p, path, path_size, path_length, max_nodes,
    EPS: tl.constexpr, PRECISION: tl.constexpr, MIXED: tl.constexpr,
):
    """Return the state after the accepted path of the last tree."""
    # All values of the first nodes are loaded before it is known how many of them count
    at = tl.arange(0, PATH_BLOCK)
    k, u, log_decay = _path_nodes(
        path, at, at < path_size, max_nodes, qk, qk_stride, k_channel, in_d,
        log_decays, steps_stride, updates, updates_stride, p, in_p,
    )
    state, decayed = _advanced(state, 0.0, k, u, log_decay, at, path_length, EPS, PRECISION, MIXED)
    for start in range(PATH_BLOCK, path_length, PATH_BLOCK):
        k, u, log_decay = _path_nodes(
            path, start + at, start + at < path_length, max_nodes, qk, qk_stride, k_channel, in_d,
            log_decays, steps_stride, updates, updates_stride, p, in_p,
        )
        state, decayed = _advanced(
            state, decayed, k, u, log_decay, at, path_length - start, EPS, PRECISION, MIXED
        )
    return state


@triton.jit
def _path_nodes(
    path, at, listed, max_nodes, qk, qk_stride, k_channel, in_d,
    log_decays, steps_stride, updates, updates_stride, p, in_p,
):
    """Return k, u and log-decay of nodes of a path buffer; those that are not listed are 0."""
    node = load_kept(path + at, listed).to(tl.int32)
    there = listed & (node >= 0) & (node < max_nodes)
    k = _rows(qk + k_channel[None, :], qk_stride, node, there, in_d)
    u = _rows(updates + p[None, :], updates_stride, node, there, in_p)
    return k, u, load_kept(log_decays + node * steps_stride, there)


@triton.jit
def _advanced(
    state, decayed, k, u, log_decay, at, count,
    EPS: tl.constexpr, PRECISION: tl.constexpr, MIXED: tl.constexpr,
):
    """Return the state after the nodes that count of a `PATH_BLOCK`, and its log-decay.

    The log-decay from the root was `decayed` before these nodes.
    """
    counts = at < count
    total = tl.sum(tl.where(at == tl.minimum(count, PATH_BLOCK) - 1, log_decay, 0.0), axis=0)
    k = tl.where(counts[:, None], k, 0.0)
    weight = tl.exp(total - tl.where(counts, log_decay, total)) * _inverse_length(k, EPS)
    u = tl.where(counts[:, None], u, 0.0) * weight[:, None]
    added = mixed_product(tl.trans(k), u, PRECISION, MIXED)  # (K, V) = (K, path) @ (path, V)
    return tl.exp(total - decayed) * state + added, total


@triton.jit
def _rows(columns, stride, node, there, inside):
    """Load the rows of some nodes; zeros for missing ones."""
    return load_kept(columns + node[:, None] * stride, there[:, None] & inside[None, :])


@triton.jit
def _inverse_length(rows, EPS: tl.constexpr):
    wide = rows.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, axis=1) + EPS)


@triton.jit
def _decays(ancestors, tree_size, node, known, log_decay, other, there, other_decay):
    """Return e^{c_i − c_j} where node j (column) is above or at node i (row), else 0."""
    above = load_kept(
        ancestors + node[:, None] * tree_size + other[None, :], known[:, None] & there[None, :]
    )
    # Off the ancestors the difference can be positive and overflow: mask it before exp
    difference = log_decay[:, None] - other_decay[None, :]
    return tl.exp(tl.where(above != 0, difference, -float("inf")))
