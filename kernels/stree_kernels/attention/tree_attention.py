"""Attention of tree nodes over a static cache, in two launches (Triton).

The first launch splits the committed keys among programs (flash-decoding); one or two more programs
a head attend to the keys that are not in order yet: those of the last tree's accepted nodes, and
the new tree under its ancestor mask. The second combines the parts, makes the accepted keys
contiguous and writes the new ones, which no program reads by then. Twin: `naive.attend_tree`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree_kernels.attention.heads import load_halves, load_heads, rotated, store_halves
from stree_kernels.contracts import CacheState, Topology
from stree_kernels.launch import follow, lead, load_kept, overlapping
from stree_kernels.products.linear import device_of, precision_of, product

# Fastest on an H200, for 1 to 64 nodes and 1,024 and 8,192 committed tokens
PROGRAMS = 264  # that splits and corner should fill: two a multiprocessor of an H200
ALONE_PROGRAMS = 528  # for a single query, which needs no tiles for tensor cores
STAGED_FROM = 64  # heads of all sequences from which on keys arrive by way of shared memory
STAGES = 3  # blocks in flight, the present one included
MIN_SPLITS = 2  # of staged keys, unless those of many queries fill the GPU once with one
MAX_ROWS = 64  # queries a program of the first launch; half as many in fp32
BLOCK_KEYS = 64  # committed keys at a time; half as many in fp32, and for a single query
CORNER_KEYS = tl.constexpr(16)  # accepted and new ones at a time
SKIPPED_FROM = 257  # nodes from which on keys that no query of a program sees are left out
MAX_NODES_ONE_CORNER = 16  # of more, the corner has two parts
ATTEND_WARPS = 4
ATTEND_REGISTERS = 255
COMBINE_PROGRAMS = 132
COMBINE_WARPS = 1
PARTS_A_PROGRAM = 16  # rows × parts that a program of the second launch combines, or one row's
WRITE_DIMS = tl.constexpr(32)  # of each half of a head, written by one program of the second launch


def attend_tree(
    qkv: Tensor, keys: Tensor, values: Tensor, rotary: Tensor, topology: Topology,
    cache_state: CacheState, num_read: int, bound: int, scale: float | None = None,
    out: Tensor | None = None, window: int = 0, skips: bool | None = None,
) -> Tensor:
    """Compute `naive.attend_tree` in two launches; (B, Q, H·D) in qkv's dtype, `bound` unused.

    With `skips` programs leave out keys that no query sees; None: from `SKIPPED_FROM` nodes on.
    """
    batch, num_new, _ = qkv.shape
    num_kv_heads, head_dim = keys.shape[1], keys.shape[3]
    num_heads = qkv.shape[2] // head_dim - 2 * num_kv_heads
    shared = num_heads // num_kv_heads
    scale = head_dim**-0.5 if scale is None else scale
    assert qkv.stride(2) == keys.stride(3) == values.stride(3) == rotary.stride(2) == 1
    assert keys.stride() == values.stride()
    num_rows, sequence_heads = num_new * shared, batch * num_kv_heads
    wide, alone = qkv.dtype == torch.float32, num_rows == 1
    block_m = min(MAX_ROWS // 2 if wide else MAX_ROWS, max(16, triton.next_power_of_2(num_rows)))
    block_m = 1 if alone else block_m
    row_blocks = triton.cdiv(num_rows, block_m)
    skips = num_read + num_new >= SKIPPED_FROM if skips is None else skips
    num_corners = 1 if num_read + num_new <= MAX_NODES_ONE_CORNER else 2
    block_l = BLOCK_KEYS // 2 if wide or alone else BLOCK_KEYS
    tiles_bytes = STAGES * block_l * 2 * head_dim * qkv.element_size()
    staged = not alone and sequence_heads >= STAGED_FROM
    staged = staged and 2 * tiles_bytes < device_of(qkv)[1]  # two programs a multiprocessor
    programs = (ALONE_PROGRAMS if alone else PROGRAMS) // (sequence_heads * row_blocks)
    many_queries = num_rows > MAX_ROWS // 2
    num_splits = _num_splits(programs, num_corners, staged, many_queries)
    num_splits = max(1, min(num_splits, triton.cdiv(keys.shape[2], block_l)))
    num_parts = num_corners + num_splits
    block_parts = triton.next_power_of_2(num_parts)
    rows_each = triton.next_power_of_2(triton.cdiv(num_rows * sequence_heads, COMBINE_PROGRAMS))
    rows_each = max(1, min(rows_each, PARTS_A_PROGRAM // block_parts))
    per_row = (num_parts, sequence_heads, num_rows)
    outs = qkv.new_empty(*per_row, head_dim, dtype=torch.float32)
    sums = qkv.new_empty(2, *per_row, dtype=torch.float32)
    y = qkv.new_empty(batch, num_new, num_heads * head_dim) if out is None else out
    assert y.stride(2) == 1
    call = AttentionArgs(
        qkv, qkv.stride()[:2], keys, values, keys.stride()[:3], rotary, rotary.stride()[:2],
        cache_state.length, cache_state.rows, outs, sums, sums.stride(0), num_rows,
    )
    constants = dict(
        SHAPE=AttentionShape(num_kv_heads, shared, head_dim, num_corners, num_splits, window),
        BLOCK=AttentionBlock(block_l, block_m, max(16, triton.next_power_of_2(head_dim // 2))),
        REPLAY=num_read == 0, ONE_TREE=len(topology.depths) == 1 and not topology.written,
        **overlapping(qkv),
    )
    common = call, topology.args, cache_state.args, num_read, num_new
    # A wider head's tiles would spill most of what four warps' registers hold
    attend_warps = ATTEND_WARPS if head_dim <= 128 or alone else 2 * ATTEND_WARPS
    attend_kernel[(num_parts, row_blocks, sequence_heads)](
        *common, scale * math.log2(math.e), PRECISION=precision_of(qkv),
        SKIPS=skips, READY=cache_state.ready, STAGES=STAGES if staged else 1,
        num_warps=attend_warps, num_stages=1, maxnreg=ATTEND_REGISTERS, **constants,
    )
    writers = triton.cdiv(head_dim // 2, WRITE_DIMS.value)
    combine_kernel[(writers + triton.cdiv(num_rows, rows_each), sequence_heads)](
        *common, y, y.stride()[:2], writers, keys.shape[2],
        BLOCK_PARTS=block_parts, BLOCK_R=rows_each,
        BLOCK_N=min(64, max(16, triton.next_power_of_2(num_new))),
        num_warps=COMBINE_WARPS, **constants,
    )
    return y


class AttentionArgs(NamedTuple):
    """Tensors of both launches of a call; strides are of all dims but the last."""

    qkv: Any
    qkv_strides: Any
    key_cache: Any
    value_cache: Any
    cache_strides: Any
    rotary: Any
    rotary_strides: Any
    lengths: Any
    rows: Any
    outs: Any  # (parts, B·Hkv, rows, D), what each part of the keys gives
    sums: Any  # (2, parts, B·Hkv, rows), its highest scores, and its sums of exponentials
    sums_stride: Any
    num_rows: Any  # queries a head of keys: those of all heads that share it


class AttentionShape(NamedTuple):
    num_kv_heads: int
    shared: int  # heads a head of keys
    head_dim: int
    num_corners: int  # parts of the keys that are not in order yet
    num_splits: int  # parts of the others
    window: int  # positions that a node sees, its own included; 0: all


class AttentionBlock(NamedTuple):
    L: int  # committed keys at a time
    M: int  # queries
    HALF: int  # channels of half a head


def _num_splits(programs: int, num_corners: int, staged: bool, many_queries: bool) -> int:
    """Return the number of parts in which committed keys are read, for some programs a head."""
    num_splits = min(32, programs)
    if not staged:
        return num_splits - num_corners
    if many_queries:  # of few queries the corner is done soon, and takes no program's place
        num_splits -= num_corners
        return num_splits if num_splits == 1 else max(num_splits, MIN_SPLITS)
    return max(num_splits, MIN_SPLITS)


@triton.jit
def _split_length(length, num_splits: tl.constexpr, BLOCK_L: tl.constexpr):
    """Return the committed slots of a split: whole blocks, so that most loads are full."""
    return tl.cdiv(tl.cdiv(length, num_splits), BLOCK_L) * BLOCK_L


@triton.jit
def _first_seen(length, old_length, SHAPE: tl.constexpr):
    """Return the first committed slot that a node at `length`, the first position, sees."""
    if SHAPE.window > 0:
        return tl.minimum(tl.maximum(length + 1 - SHAPE.window, 0), old_length)
    else:
        return 0


@triton.jit
def _at_head(call, batch, kv_head):
    """Return the offset of a sequence's head of keys in the cache."""
    row = batch
    if call.rows is not None:
        row = load_kept(call.rows + batch)
    return row * call.cache_strides[0] + kv_head.to(tl.int64) * call.cache_strides[1]


@triton.jit
def _corner(row, num_new, num_cached, SHAPE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the numbers of the corner's keys that a block of rows sees, and of a part's keys."""
    last = row // BLOCK.M * BLOCK.M + BLOCK.M - 1
    num_keys = num_cached + tl.minimum(last // SHAPE.shared + 1, num_new)
    return num_keys, _split_length(num_keys, SHAPE.num_corners, CORNER_KEYS)


@triton.jit
def _attend(q_low, q_high, k_low, k_high, v, visible, highest, total, out, scale,
            PRECISION: tl.constexpr):
    """Add one block of keys to the running softmax, in powers of two.

    The highest score is rounded up: so the division of keys does not change rounding to bf16.
    """
    scores = _scores(q_low, k_low, PRECISION) + _scores(q_high, k_high, PRECISION)
    scores = tl.where(visible, scores * scale, -float("inf"))
    now = tl.maximum(highest, tl.ceil(tl.max(scores, axis=1)))
    shift = tl.where(now == -float("inf"), 0.0, now)  # nothing seen yet
    weights = tl.exp2(scores - shift[:, None])
    fade = tl.exp2(highest - shift)
    total = total * fade + tl.sum(weights, axis=1)
    out = out * fade[:, None] + _weighed(weights.to(v.dtype), v, PRECISION)
    return now, total, out


@triton.jit
def _scores(q, k, PRECISION: tl.constexpr):
    """Multiply (queries, channels) and (keys, channels) to scores (queries, keys)."""
    if q.shape[0] == 1:  # tensor cores would multiply 16 queries, and want keys in shared memory
        return tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1)[None, :]
    else:
        return product(q, tl.trans(k), PRECISION)


@triton.jit
def _weighed(weights, v, PRECISION: tl.constexpr):
    """Multiply weights (queries, keys) and values (keys, channels) to (queries, channels)."""
    if weights.shape[0] == 1:
        return tl.sum(tl.trans(weights).to(tl.float32) * v.to(tl.float32), axis=0)[None, :]
    else:
        return product(weights, v, PRECISION)


@triton.jit
def _above(seen_by, known, node, there):
    """Return which of the tree's nodes among some keys each query sees."""
    mask = known[:, None] & (there & (node >= 0))[None, :]
    return tl.load(seen_by + node[None, :], mask=mask, other=0)


@triton.jit
def _near(position, key_position, SHAPE: tl.constexpr):
    """Return which keys are in the window of each query, (queries, keys)."""
    return key_position[None, :] > (position - SHAPE.window)[:, None]


@triton.jit
def _attend_corner(
    call, q_low, q_high, known, position, seen_by, key_at, keys, values,
    depths, path, path_length, old_length, num_read, begin, end, highest, total, out, scale,
    SHAPE: tl.constexpr, BLOCK: tl.constexpr, REPLAY: tl.constexpr, SKIPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend to the keys from begin to end that are not yet in order, and to the new nodes.

    First come the keys that the last call left in the cache (its accepted path, or the tree so
    far), then the new nodes; begin and end count through both.
    """
    half, d = tl.arange(0, BLOCK.HALF), tl.arange(0, 2 * BLOCK.HALF)
    head_dim: tl.constexpr = SHAPE.head_dim
    num_cached = path_length if REPLAY else num_read
    for start in range(begin, end, CORNER_KEYS):
        k = start + tl.arange(0, CORNER_KEYS)
        there, cached = k < end, k < num_cached
        fresh, cached = there & ~cached, there & cached
        node = k - path_length  # negative on the path
        needed = True
        if SKIPS:
            seen = tl.max(_above(seen_by, known, node, there).to(tl.int32))
            needed = (start < path_length) | (seen > 0)
        if needed:
            if REPLAY:
                slot = old_length + load_kept(path + k, cached).to(tl.int32)
            else:
                slot = old_length + k
            depth = load_kept(depths + node, fresh)
            new_at = key_at + (node - num_read) * call.qkv_strides[1]
            slot_at = slot * call.cache_strides[2]
            # A choice between pointers would be one load, but of two bytes at a time
            old_low, old_high = load_halves(keys + slot_at, cached, half, head_dim)
            old_v = load_heads(values + slot_at, cached, d, head_dim)
            k_low, k_high = load_halves(new_at, fresh, half, head_dim)
            v = load_heads(new_at + SHAPE.num_kv_heads * head_dim, fresh, d, head_dim)
            visible = (_above(seen_by, known, node, there) != 0) | (node < 0)[None, :]
            if SHAPE.window > 0:
                below = load_kept(depths + node, there & (node >= 0))
                key_position = tl.where(node < 0, old_length + k, old_length + path_length + below)
                visible = visible & _near(position, key_position, SHAPE)
            k_low, k_high = rotated(
                k_low, k_high, old_length + path_length + depth, fresh, half, call, head_dim
            )
            k_low = tl.where(cached[:, None], old_low, k_low)
            k_high = tl.where(cached[:, None], old_high, k_high)
            v = tl.where(cached[:, None], old_v, v)
            highest, total, out = _attend(
                q_low, q_high, k_low, k_high, v, visible, highest, total, out, scale, PRECISION,
            )
    return highest, total, out


@triton.jit
def attend_kernel(
    call, tree, cache, num_read, num_new, scale, SHAPE: tl.constexpr, BLOCK: tl.constexpr,
    REPLAY: tl.constexpr, SKIPS: tl.constexpr, ONE_TREE: tl.constexpr, READY: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, OVERLAPS: tl.constexpr,
):
    part, block, sequence_head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch = (sequence_head // SHAPE.num_kv_heads).to(tl.int64)
    kv_head = sequence_head % SHAPE.num_kv_heads
    head_dim: tl.constexpr = SHAPE.head_dim
    half, d = tl.arange(0, BLOCK.HALF), tl.arange(0, 2 * BLOCK.HALF)
    row = block * BLOCK.M + tl.arange(0, BLOCK.M)
    known = row < call.num_rows
    query = row // SHAPE.shared
    if READY == "none":
        follow(OVERLAPS)
    if READY == "all":
        lead(OVERLAPS)
    ancestors, depths = tree.ancestors, tree.depths
    if not ONE_TREE:
        variant = load_kept(cache.variants + batch)
        depths += variant * tree.size
        ancestors += variant * tree.size * tree.size
    depth = load_kept(depths + num_read + query, known)
    old_length = load_kept(call.lengths + batch).to(tl.int32)
    path_length = 0
    if REPLAY:
        path_length = load_kept(cache.path_lengths + batch).to(tl.int32)
    length = old_length + path_length
    at_head = _at_head(call, batch, kv_head)
    keys, values = call.key_cache + at_head, call.value_cache + at_head
    qkv, slot_stride = call.qkv + batch * call.qkv_strides[0], call.cache_strides[2]

    # First come parts of the corner, then splits, whose first keys come ahead of the queries
    seen_from = _first_seen(length, old_length, SHAPE)
    share = _split_length(old_length - seen_from, SHAPE.num_splits, BLOCK.L)
    begin = seen_from + (part - SHAPE.num_corners) * share
    end = tl.minimum(begin + share, old_length)
    num_keys, corner_share = _corner(
        block * BLOCK.M, num_new, path_length if REPLAY else num_read, SHAPE, BLOCK
    )
    corner_end = tl.minimum((part + 1) * corner_share, num_keys)
    if part < SHAPE.num_corners:
        end = begin
        if part * corner_share >= num_keys:
            return
    elif begin >= end:
        return
    if STAGES == 1:
        slot = begin + tl.arange(0, BLOCK.L)
        k_low, k_high = load_halves(keys + slot * slot_stride, slot < end, half, head_dim)
        v = load_heads(values + slot * slot_stride, slot < end, d, head_dim)
    if READY == "memory":
        follow(OVERLAPS)
    at_query = qkv + query * call.qkv_strides[1]
    head = kv_head * SHAPE.shared + row % SHAPE.shared
    low, high = load_halves(at_query + head * head_dim, known, half, head_dim)
    # Halves of the queries, (M, D / 2) each; keys come as (L, D / 2) twice, values as (L, D)
    q_low, q_high = rotated(low, high, length + depth, known, half, call, head_dim)
    block_m: tl.constexpr = BLOCK.M  # Triton 3.6 wants constants, not numbers, in lists
    block_d: tl.constexpr = 2 * BLOCK.HALF
    highest = tl.full([block_m], -float("inf"), dtype=tl.float32)
    total = tl.zeros([block_m], dtype=tl.float32)
    out = tl.zeros([block_m, block_d], dtype=tl.float32)
    everyone = tl.full([block_m, 1], 1, dtype=tl.int1)
    for start in tl.range(begin, end, BLOCK.L, num_stages=STAGES):
        slot = start + tl.arange(0, BLOCK.L)
        used = slot < end
        visible = everyone & used[None, :]
        if SHAPE.window > 0:
            visible = visible & _near(length + depth, slot, SHAPE)
        if STAGES > 1:
            k_low, k_high = load_halves(keys + slot * slot_stride, used, half, head_dim)
            v = load_heads(values + slot * slot_stride, used, d, head_dim)
        else:
            slot += BLOCK.L
            next_low, next_high = load_halves(keys + slot * slot_stride, slot < end, half, head_dim)
            next_v = load_heads(values + slot * slot_stride, slot < end, d, head_dim)
        highest, total, out = _attend(
            q_low, q_high, k_low, k_high, v, visible, highest, total, out, scale, PRECISION,
        )
        if STAGES == 1:
            k_low, k_high, v = next_low, next_high, next_v
    if part < SHAPE.num_corners:
        highest, total, out = _attend_corner(
            call, q_low, q_high, known, length + depth,
            ancestors + (num_read + query)[:, None] * tree.size,
            qkv + (SHAPE.num_kv_heads * SHAPE.shared + kv_head) * head_dim, keys, values,
            depths, cache.path + batch * cache.path_stride, path_length, old_length, num_read,
            part * corner_share, corner_end, highest, total, out, scale,
            SHAPE, BLOCK, REPLAY, SKIPS, PRECISION,
        )

    if READY == "all":  # the previous launch may read the written memory
        follow(OVERLAPS)
    at = (part * tl.num_programs(2) + sequence_head).to(tl.int64) * call.num_rows + row
    tl.store(
        call.outs + at[:, None] * head_dim + d[None, :], out,
        mask=known[:, None] & (d < head_dim)[None, :],
    )
    tl.store(call.sums + at, highest, mask=known)
    tl.store(call.sums + call.sums_stride + at, total, mask=known)


@triton.jit(do_not_specialize=["num_slots"])
def combine_kernel(
    call, tree, cache, num_read, num_new, y_pointer, y_strides, writers, num_slots,
    SHAPE: tl.constexpr, BLOCK: tl.constexpr, REPLAY: tl.constexpr, ONE_TREE: tl.constexpr,
    BLOCK_PARTS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, OVERLAPS: tl.constexpr,
):
    block, sequence_head = tl.program_id(0), tl.program_id(1)
    batch = (sequence_head // SHAPE.num_kv_heads).to(tl.int64)
    kv_head = sequence_head % SHAPE.num_kv_heads
    head_dim: tl.constexpr = SHAPE.head_dim
    d = tl.arange(0, 2 * BLOCK.HALF)
    in_d = d < head_dim
    # The first launch waited for all before it: the cache state is complete already
    old_length = load_kept(call.lengths + batch).to(tl.int32)
    path_length = 0
    if REPLAY:
        path_length = load_kept(cache.path_lengths + batch).to(tl.int32)
    if block >= writers:
        row = (block - writers) * BLOCK_R + tl.arange(0, BLOCK_R)
        known = row < call.num_rows
        part = tl.arange(0, BLOCK_PARTS)
        num_seen = old_length - _first_seen(old_length + path_length, old_length, SHAPE)
        share = _split_length(num_seen, SHAPE.num_splits, BLOCK.L)
        num_keys, corner_share = _corner(
            row, num_new, path_length if REPLAY else num_read, SHAPE, BLOCK
        )
        # A part without keys left nothing
        split = part - SHAPE.num_corners
        used = (split >= 0) & (split < SHAPE.num_splits) & (split * share < num_seen)
        in_corner = part[:, None] * corner_share[None, :] < num_keys[None, :]
        used = used[:, None] | ((split < 0)[:, None] & in_corner)
        used = used & known[None, :]
        first_row = (part * tl.num_programs(1) + sequence_head).to(tl.int64) * call.num_rows
        at = first_row[:, None] + row[None, :]
        follow(OVERLAPS)
        out = tl.load(  # (parts, rows, D)
            call.outs + at[:, :, None] * head_dim + d[None, None, :],
            mask=used[:, :, None] & in_d[None, None, :], other=0.0,
        )
        highest = tl.load(call.sums + at, mask=used, other=-float("inf"))
        total = tl.load(call.sums + call.sums_stride + at, mask=used, other=0.0)
        top = tl.max(highest, axis=0)
        top = tl.where(known, top, 0.0)
        weights = tl.exp2(highest - top[None, :])
        whole = tl.where(known, tl.sum(total * weights, axis=0), 1.0)
        y = tl.sum(out * weights[:, :, None], axis=0) / whole[:, None]
        head = kv_head * SHAPE.shared + row % SHAPE.shared
        line = batch * y_strides[0] + row // SHAPE.shared * y_strides[1] + head * head_dim
        tl.store(
            y_pointer + line[:, None] + d[None, :], y.to(y_pointer.dtype.element_ty),
            mask=known[:, None] & in_d[None, :],
        )
    else:
        half = block * WRITE_DIMS + tl.arange(0, WRITE_DIMS)
        at_head = _at_head(call, batch, kv_head)
        keys, values = call.key_cache + at_head, call.value_cache + at_head
        length = old_length + path_length
        follow(OVERLAPS)
        if REPLAY:
            # path[k] >= k: going up, no block overwrites what a later one reads
            for start in range(0, path_length, CORNER_KEYS):
                k = start + tl.arange(0, CORNER_KEYS)
                moved = k < path_length
                node = load_kept(cache.path + batch * cache.path_stride + k, moved).to(tl.int32)
                source = (old_length + node) * call.cache_strides[2]
                target = (old_length + k) * call.cache_strides[2]
                k_low, k_high = load_halves(keys + source, moved, half, head_dim)
                v_low, v_high = load_halves(values + source, moved, half, head_dim)
                tl.debug_barrier()
                store_halves(keys + target, moved, half, k_low, k_high, head_dim)
                store_halves(values + target, moved, half, v_low, v_high, head_dim)
                tl.debug_barrier()
        depths = tree.depths
        if not ONE_TREE:
            depths += load_kept(cache.variants + batch) * tree.size
        key_head = SHAPE.num_kv_heads * SHAPE.shared + kv_head
        key_at = call.qkv + batch * call.qkv_strides[0] + key_head * head_dim
        for start in range(0, num_new, BLOCK_N):
            new = start + tl.arange(0, BLOCK_N)
            used = new < num_new
            depth = load_kept(depths + num_read + new, used)
            new_at = key_at + new * call.qkv_strides[1]
            k_low, k_high = load_halves(new_at, used, half, head_dim)
            new_at += SHAPE.num_kv_heads * head_dim  # the values
            v_low, v_high = load_halves(new_at, used, half, head_dim)
            k_low, k_high = rotated(
                k_low, k_high, length + depth, used, half, call, head_dim
            )
            used = used & (length + num_read + new < num_slots)
            at = (length + num_read + new) * call.cache_strides[2]
            store_halves(keys + at, used, half, k_low, k_high, head_dim)
            store_halves(values + at, used, half, v_low, v_high, head_dim)
