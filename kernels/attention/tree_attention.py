"""Attention of tree nodes over a static cache, in two launches (Triton).

The first launch splits the committed keys among programs (flash-decoding); one or two more programs
a head attend to the keys that are not in order yet: those of the last tree's accepted nodes, and
the new tree under its ancestor mask. The second combines the parts, makes the accepted keys
contiguous and writes the new ones, which no program reads by then. Twin: `naive.attend_tree`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree_kernels.contracts import CacheState, Topology
from stree_kernels.launch import follow, lead, load_kept, overlapping
from stree_kernels.products.linear import device_of, precision_of, product

# Fastest on an H200, for 1 to 64 nodes and 1,024 and 8,192 committed tokens
PROGRAMS = 264  # that splits and corner should fill: two a multiprocessor of an H200
ALONE_PROGRAMS = 528  # for a single query, which needs no tiles for tensor cores
STAGED_FROM = 64  # heads of all sequences from which on keys arrive by way of shared memory
STAGES = 3  # blocks in flight, the present one included
LEAST_SPLITS = 2  # of staged keys, unless those of many queries fill the GPU once with one
MAX_ROWS = 64  # queries a program of the first launch; half as many in fp32
BLOCK_KEYS = 64  # committed keys at a time; half as many in fp32, and for a single query
CORNER_KEYS = 16  # accepted and new ones at a time
SKIPPED_FROM = 257  # nodes from which on keys that no query of a program sees are left out
FEW_NODES = 16  # of more, the corner has two parts
ATTEND_WARPS = 4
ATTEND_REGISTERS = 255
COMBINE_PROGRAMS = 132
COMBINE_WARPS = 1
PARTS_A_PROGRAM = 16  # rows × parts that a program of the second launch combines, or one row's
WRITE_DIMS = 32  # of each half of a head, written by one program of the second launch


def attend_tree(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    rotary: Tensor,
    topology: Topology,
    cache_state: CacheState,
    first: int,
    bound: int,
    scale: float | None = None,
    out: Tensor | None = None,
    skips: bool | None = None,
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
    skips = first + num_new >= SKIPPED_FROM if skips is None else skips
    num_corners = 1 if first + num_new <= FEW_NODES else 2
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
    common = (
        qkv, qkv.stride(0), qkv.stride(1),
        keys, values, keys.stride(0), keys.stride(1), keys.stride(2),
        rotary, rotary.stride(0), rotary.stride(1),
        topology.ancestors.view(torch.uint8), topology.depths, topology.depths.shape[1],
        cache_state.length, cache_state.path, cache_state.path.stride(0), cache_state.path_length,
        cache_state.variant, cache_state.rows, first, num_new, outs, sums, sums.stride(0), num_rows,
    )
    constants = dict(
        NUM_KV_HEADS=num_kv_heads, SHARED=shared, HEAD_DIM=head_dim,
        NUM_CORNERS=num_corners, NUM_SPLITS=num_splits,
        BLOCK_L=block_l, BLOCK_M=block_m, BLOCK_CORNER=CORNER_KEYS,
        BLOCK_HALF=max(16, triton.next_power_of_2(head_dim // 2)),
        REPLAY=first == 0, ONE_TREE=len(topology.depths) == 1 and not topology.written,
        **overlapping(qkv),
    )
    # A wider head's tiles would spill most of what four warps' registers hold
    attend_warps = ATTEND_WARPS if head_dim <= 128 or alone else 2 * ATTEND_WARPS
    attend_kernel[(num_parts, row_blocks, sequence_heads)](
        *common, scale * math.log2(math.e), PRECISION=precision_of(qkv),
        SKIPS=skips, READY=cache_state.ready, STAGES=STAGES if staged else 1,
        num_warps=attend_warps, num_stages=1, maxnreg=ATTEND_REGISTERS, **constants,
    )
    writers = triton.cdiv(head_dim // 2, WRITE_DIMS)
    combine_kernel[(writers + triton.cdiv(num_rows, rows_each), sequence_heads)](
        *common, y, y.stride(0), y.stride(1), writers, keys.shape[2],
        BLOCK_PARTS=block_parts, BLOCK_R=rows_each, BLOCK_W=WRITE_DIMS,
        BLOCK_N=min(64, max(16, triton.next_power_of_2(num_new))),
        num_warps=COMBINE_WARPS, **constants,
    )
    return y


def _num_splits(programs: int, num_corners: int, staged: bool, many_queries: bool) -> int:
    """Return the number of parts in which committed keys are read, for some programs a head."""
    num_splits = min(32, programs)
    if not staged:
        return num_splits - num_corners
    if many_queries:  # of few queries the corner is done soon, and takes no program's place
        num_splits -= num_corners
        return num_splits if num_splits == 1 else max(num_splits, LEAST_SPLITS)
    return max(num_splits, LEAST_SPLITS)


@triton.jit
def _split_length(length, num_splits: tl.constexpr, BLOCK_L: tl.constexpr):
    """Return the committed slots of a split: whole blocks, so that most loads are full."""
    return tl.cdiv(tl.cdiv(length, num_splits), BLOCK_L) * BLOCK_L


@triton.jit
def _held_by(rows, batch):
    """Return the cache row of one of the call's sequences."""
    if rows is None:
        return batch
    else:
        return load_kept(rows + batch)


@triton.jit
def _corner(
    row, num_new, num_cached, num_corners: tl.constexpr,
    SHARED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):
    """Return the numbers of the corner's keys that a block of rows sees, and of a part's keys."""
    num_keys = num_cached + tl.minimum(
        (row // BLOCK_M * BLOCK_M + BLOCK_M - 1) // SHARED + 1, num_new
    )
    return num_keys, _split_length(num_keys, num_corners, BLOCK)


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
def _halves(at, known, half, HEAD_DIM: tl.constexpr):
    """Load columns of both halves of the heads at some pointers, masked by `known`."""
    mask = known[:, None] & (half < HEAD_DIM // 2)[None, :]
    at = at[:, None] + half[None, :]
    low = tl.load(at, mask=mask, other=0.0)
    return low, tl.load(at + HEAD_DIM // 2, mask=mask, other=0.0)


@triton.jit
def _store_halves(at, known, half, low, high, HEAD_DIM: tl.constexpr):
    mask = known[:, None] & (half < HEAD_DIM // 2)[None, :]
    at = at[:, None] + half[None, :]
    tl.store(at, low, mask=mask)
    tl.store(at + HEAD_DIM // 2, high, mask=mask)


@triton.jit
def _whole(at, known, d, HEAD_DIM: tl.constexpr):
    mask = known[:, None] & (d < HEAD_DIM)[None, :]
    return tl.load(at[:, None] + d[None, :], mask=mask, other=0.0)


@triton.jit
def _rotated(low, high, position, known, half, rotary, rotary_stride, position_stride,
             HEAD_DIM: tl.constexpr):
    """Return columns of both halves of heads, rotated to their positions."""
    mask = known[:, None] & (half < HEAD_DIM // 2)[None, :]
    table = rotary + position[:, None] * position_stride + half[None, :]
    cos = tl.load(table, mask=mask, other=0.0)
    sin = tl.load(table + rotary_stride, mask=mask, other=0.0)
    low_wide, high_wide = low.to(tl.float32), high.to(tl.float32)
    rotated_low = (low_wide * cos - high_wide * sin).to(low.dtype)
    rotated_high = (high_wide * cos + low_wide * sin).to(low.dtype)
    return rotated_low, rotated_high


@triton.jit
def _above(seen_by, known, node, there):
    """Return which of the tree's nodes among some keys each query sees."""
    mask = known[:, None] & (there & (node >= 0))[None, :]
    return tl.load(seen_by + node[None, :], mask=mask, other=0)


@triton.jit
def _attend_corner(
    q_low, q_high, known, seen_by, key_at, qkv_stride,
    keys, values, slot_stride, rotary, rotary_stride, position_stride,
    depths, path, path_length, old_length, first, begin, end, highest, total, out, scale,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr,
    REPLAY: tl.constexpr, SKIPS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):
    """Attend to the keys from begin to end that are not yet in order, and to the new nodes.

    First come the keys that the last call left in the cache (its accepted path, or the tree so
    far), then the new nodes; begin and end count through both.
    """
    half, d = tl.arange(0, BLOCK_HALF), tl.arange(0, 2 * BLOCK_HALF)
    num_cached = path_length if REPLAY else first
    for start in range(begin, end, BLOCK):
        k = start + tl.arange(0, BLOCK)
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
            new_at = key_at + (node - first) * qkv_stride
            slot_at = slot * slot_stride
            # A choice between pointers would be one load, but of two bytes at a time
            old_low, old_high = _halves(keys + slot_at, cached, half, HEAD_DIM)
            old_v = _whole(values + slot_at, cached, d, HEAD_DIM)
            k_low, k_high = _halves(new_at, fresh, half, HEAD_DIM)
            v = _whole(new_at + NUM_KV_HEADS * HEAD_DIM, fresh, d, HEAD_DIM)
            above = _above(seen_by, known, node, there)
            k_low, k_high = _rotated(
                k_low, k_high, old_length + path_length + depth, fresh, half,
                rotary, rotary_stride, position_stride, HEAD_DIM,
            )
            k_low = tl.where(cached[:, None], old_low, k_low)
            k_high = tl.where(cached[:, None], old_high, k_high)
            v = tl.where(cached[:, None], old_v, v)
            highest, total, out = _attend(
                q_low, q_high, k_low, k_high, v, (above != 0) | (node < 0)[None, :],
                highest, total, out, scale, PRECISION,
            )
    return highest, total, out


@triton.jit
def attend_kernel(
    qkv, qkv_batch_stride, qkv_stride,
    keys, values, cache_batch_stride, cache_head_stride, slot_stride,
    rotary, rotary_stride, position_stride,
    ancestors, depths, tree_size, lengths, path, path_stride, path_lengths, variants, rows,
    first, num_new, outs, sums, sums_stride, num_rows, scale,
    NUM_KV_HEADS: tl.constexpr, SHARED: tl.constexpr, HEAD_DIM: tl.constexpr,
    NUM_CORNERS: tl.constexpr, NUM_SPLITS: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_HALF: tl.constexpr, REPLAY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_CORNER: tl.constexpr,
    SKIPS: tl.constexpr, ONE_TREE: tl.constexpr, READY: tl.constexpr, OVERLAPS: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):
    part, block, sequence_head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch = (sequence_head // NUM_KV_HEADS).to(tl.int64)
    kv_head = sequence_head % NUM_KV_HEADS
    half, d = tl.arange(0, BLOCK_HALF), tl.arange(0, 2 * BLOCK_HALF)
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    known = row < num_rows
    query = row // SHARED
    if READY == "none":
        follow(OVERLAPS)
    if READY == "all":
        lead(OVERLAPS)
    if not ONE_TREE:
        variant = load_kept(variants + batch)
        depths += variant * tree_size
        ancestors += variant * tree_size * tree_size
    depth = load_kept(depths + first + query, known)
    old_length = load_kept(lengths + batch).to(tl.int32)
    path_length = 0
    if REPLAY:
        path_length = load_kept(path_lengths + batch).to(tl.int32)
    length = old_length + path_length
    at_head = _held_by(rows, batch) * cache_batch_stride + kv_head.to(tl.int64) * cache_head_stride
    keys += at_head
    values += at_head
    qkv += batch * qkv_batch_stride

    # First come parts of the corner, then splits, whose first keys come ahead of the queries
    share = _split_length(old_length, NUM_SPLITS, BLOCK_L)
    begin = (part - NUM_CORNERS) * share
    end = tl.minimum(begin + share, old_length)
    num_keys, corner_share = _corner(
        block * BLOCK_M, num_new, path_length if REPLAY else first, NUM_CORNERS,
        SHARED, BLOCK_M, BLOCK_CORNER,
    )
    corner_end = tl.minimum((part + 1) * corner_share, num_keys)
    if part < NUM_CORNERS:
        end = begin
        if part * corner_share >= num_keys:
            return
    elif begin >= end:
        return
    if STAGES == 1:
        slot = begin + tl.arange(0, BLOCK_L)
        k_low, k_high = _halves(keys + slot * slot_stride, slot < end, half, HEAD_DIM)
        v = _whole(values + slot * slot_stride, slot < end, d, HEAD_DIM)
    if READY == "memory":
        follow(OVERLAPS)
    low, high = _halves(
        qkv + query * qkv_stride + (kv_head * SHARED + row % SHARED) * HEAD_DIM,
        known, half, HEAD_DIM,
    )
    q_low, q_high = _rotated(
        low, high, length + depth, known, half, rotary, rotary_stride, position_stride, HEAD_DIM
    )
    highest = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    out = tl.zeros([BLOCK_M, 2 * BLOCK_HALF], dtype=tl.float32)
    everyone = tl.full([BLOCK_M, 1], 1, dtype=tl.int1)
    for start in tl.range(begin, end, BLOCK_L, num_stages=STAGES):
        slot = start + tl.arange(0, BLOCK_L)
        used = slot < end
        if STAGES > 1:
            k_low, k_high = _halves(keys + slot * slot_stride, used, half, HEAD_DIM)
            v = _whole(values + slot * slot_stride, used, d, HEAD_DIM)
        else:
            slot += BLOCK_L
            next_low, next_high = _halves(keys + slot * slot_stride, slot < end, half, HEAD_DIM)
            next_v = _whole(values + slot * slot_stride, slot < end, d, HEAD_DIM)
        highest, total, out = _attend(
            q_low, q_high, k_low, k_high, v, everyone & used[None, :],
            highest, total, out, scale, PRECISION,
        )
        if STAGES == 1:
            k_low, k_high, v = next_low, next_high, next_v
    if part < NUM_CORNERS:
        highest, total, out = _attend_corner(
            q_low, q_high, known, ancestors + (first + query)[:, None] * tree_size,
            qkv + (NUM_KV_HEADS * SHARED + kv_head) * HEAD_DIM, qkv_stride,
            keys, values, slot_stride, rotary, rotary_stride, position_stride,
            depths, path + batch * path_stride, path_length, old_length, first,
            part * corner_share, corner_end,
            highest, total, out, scale,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_HALF, REPLAY, SKIPS, BLOCK_CORNER, PRECISION,
        )

    if READY == "all":  # the previous launch may read the written memory
        follow(OVERLAPS)
    at = (part * tl.num_programs(2) + sequence_head).to(tl.int64) * num_rows + row
    tl.store(
        outs + at[:, None] * HEAD_DIM + d[None, :], out,
        mask=known[:, None] & (d < HEAD_DIM)[None, :],
    )
    tl.store(sums + at, highest, mask=known)
    tl.store(sums + sums_stride + at, total, mask=known)


@triton.jit(do_not_specialize=["num_slots"])
def combine_kernel(
    qkv, qkv_batch_stride, qkv_stride,
    keys, values, cache_batch_stride, cache_head_stride, slot_stride,
    rotary, rotary_stride, position_stride,
    ancestors, depths, tree_size, lengths, path, path_stride, path_lengths, variants, rows,
    first, num_new, outs, sums, sums_stride, num_rows,
    y_pointer, y_batch_stride, y_stride, writers, num_slots,
    NUM_KV_HEADS: tl.constexpr, SHARED: tl.constexpr, HEAD_DIM: tl.constexpr,
    NUM_CORNERS: tl.constexpr, NUM_SPLITS: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_HALF: tl.constexpr, REPLAY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_CORNER: tl.constexpr,
    ONE_TREE: tl.constexpr, OVERLAPS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr,
):
    block, sequence_head = tl.program_id(0), tl.program_id(1)
    batch = (sequence_head // NUM_KV_HEADS).to(tl.int64)
    kv_head = sequence_head % NUM_KV_HEADS
    d = tl.arange(0, 2 * BLOCK_HALF)
    in_d = d < HEAD_DIM
    # The first launch waited for all before it: the cache state is complete already
    old_length = load_kept(lengths + batch).to(tl.int32)
    path_length = 0
    if REPLAY:
        path_length = load_kept(path_lengths + batch).to(tl.int32)
    if block >= writers:
        row = (block - writers) * BLOCK_R + tl.arange(0, BLOCK_R)
        known = row < num_rows
        part = tl.arange(0, BLOCK_PARTS)
        share = _split_length(old_length, NUM_SPLITS, BLOCK_L)
        num_keys, corner_share = _corner(
            row, num_new, path_length if REPLAY else first, NUM_CORNERS,
            SHARED, BLOCK_M, BLOCK_CORNER,
        )
        # A part without keys left nothing
        split = part - NUM_CORNERS
        used = (split >= 0) & (split < NUM_SPLITS) & (split * share < old_length)
        in_corner = part[:, None] * corner_share[None, :] < num_keys[None, :]
        used = used[:, None] | ((split < 0)[:, None] & in_corner)
        used = used & known[None, :]
        first_row = (part * tl.num_programs(1) + sequence_head).to(tl.int64) * num_rows
        at = first_row[:, None] + row[None, :]
        follow(OVERLAPS)
        out = tl.load(
            outs + at[:, :, None] * HEAD_DIM + d[None, None, :],
            mask=used[:, :, None] & in_d[None, None, :], other=0.0,
        )
        highest = tl.load(sums + at, mask=used, other=-float("inf"))
        total = tl.load(sums + sums_stride + at, mask=used, other=0.0)
        top = tl.max(highest, axis=0)
        top = tl.where(known, top, 0.0)
        weights = tl.exp2(highest - top[None, :])
        whole = tl.where(known, tl.sum(total * weights, axis=0), 1.0)
        y = tl.sum(out * weights[:, :, None], axis=0) / whole[:, None]
        head = kv_head * SHARED + row % SHARED
        line = batch * y_batch_stride + row // SHARED * y_stride + head * HEAD_DIM
        tl.store(
            y_pointer + line[:, None] + d[None, :], y.to(y_pointer.dtype.element_ty),
            mask=known[:, None] & in_d[None, :],
        )
    else:
        half = block * BLOCK_W + tl.arange(0, BLOCK_W)
        held = _held_by(rows, batch) * cache_batch_stride
        keys += held + kv_head.to(tl.int64) * cache_head_stride
        values += held + kv_head.to(tl.int64) * cache_head_stride
        length = old_length + path_length
        follow(OVERLAPS)
        if REPLAY:
            # path[k] >= k: going up, no block overwrites what a later one reads
            for start in range(0, path_length, 16):
                k = start + tl.arange(0, 16)
                moved = k < path_length
                node = load_kept(path + batch * path_stride + k, moved).to(tl.int32)
                source = (old_length + node) * slot_stride
                target = (old_length + k) * slot_stride
                k_low, k_high = _halves(keys + source, moved, half, HEAD_DIM)
                v_low, v_high = _halves(values + source, moved, half, HEAD_DIM)
                tl.debug_barrier()
                _store_halves(keys + target, moved, half, k_low, k_high, HEAD_DIM)
                _store_halves(values + target, moved, half, v_low, v_high, HEAD_DIM)
                tl.debug_barrier()
        if not ONE_TREE:
            depths += load_kept(variants + batch) * tree_size
        key_at = qkv + batch * qkv_batch_stride + (NUM_KV_HEADS * SHARED + kv_head) * HEAD_DIM
        for start in range(0, num_new, BLOCK_N):
            new = start + tl.arange(0, BLOCK_N)
            used = new < num_new
            depth = load_kept(depths + first + new, used)
            new_at = key_at + new * qkv_stride
            k_low, k_high = _halves(new_at, used, half, HEAD_DIM)
            v_low, v_high = _halves(new_at + NUM_KV_HEADS * HEAD_DIM, used, half, HEAD_DIM)
            k_low, k_high = _rotated(
                k_low, k_high, length + depth, used, half,
                rotary, rotary_stride, position_stride, HEAD_DIM,
            )
            used = used & (length + first + new < num_slots)
            at = (length + first + new) * slot_stride
            _store_halves(keys + at, used, half, k_low, k_high, HEAD_DIM)
            _store_halves(values + at, used, half, v_low, v_high, HEAD_DIM)
