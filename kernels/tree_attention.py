"""Attention of tree nodes over a static cache, in two launches (Triton).

The first splits the committed keys among programs (flash-decoding); one more program a head
attends to what is not in order yet: the accepted nodes of the last tree, where they still lie,
and the new tree under its ancestor mask. The second combines the parts, makes the accepted keys
contiguous and writes the new ones: by then nobody reads them. The naive twin is
`naive.attend_tree`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree_kernels.launch import follow, overlapping
from stree_kernels.shapes import Steering, Topology

PROGRAMS = 132  # what the splits should fill: the multiprocessors of an H100 or H200


def attend_tree(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    rotary: Tensor,
    topology: Topology,
    steering: Steering,
    first: int,
    bound: int,
) -> Tensor:
    """`naive.attend_tree` in two launches; (B, Q, H·D) in qkv's dtype. `bound` is not needed."""
    batch, num_new, _ = qkv.shape
    num_kv_heads, head_dim = keys.shape[1], keys.shape[3]
    num_heads = qkv.shape[2] // head_dim - 2 * num_kv_heads
    shared = num_heads // num_kv_heads
    assert qkv.stride(2) == keys.stride(3) == values.stride(3) == rotary.stride(2) == 1
    assert keys.stride() == values.stride()
    num_rows = num_new * shared
    block_m = min(64, max(16, triton.next_power_of_2(num_rows)))
    row_blocks = triton.cdiv(num_rows, block_m)
    block_l = 64 if qkv.dtype != torch.float32 else 32
    num_splits = max(1, min(32, PROGRAMS // (batch * num_kv_heads * row_blocks)))
    num_splits = min(num_splits, triton.cdiv(keys.shape[2], block_l))
    parts = torch.empty(
        num_splits + 1, batch * num_kv_heads, num_rows, head_dim + 2,
        device=qkv.device, dtype=torch.float32,
    )  # fmt: skip
    y = torch.empty(batch, num_new, num_heads * head_dim, device=qkv.device, dtype=qkv.dtype)
    block_half = max(16, triton.next_power_of_2(head_dim // 2))
    common = (
        qkv, qkv.stride(0), qkv.stride(1),
        keys, values, keys.stride(0), keys.stride(1), keys.stride(2),
        rotary, rotary.stride(0), rotary.stride(1),
        topology.ancestors.view(torch.uint8), topology.depths, topology.depths.shape[1],
        steering.length, steering.path, steering.path.stride(0), steering.path_length,
        steering.variant, first, num_new, parts, num_splits, num_rows,
    )  # fmt: skip
    constants = dict(
        NUM_KV_HEADS=num_kv_heads, SHARED=shared, HEAD_DIM=head_dim,
        BLOCK_L=block_l, BLOCK_HALF=block_half, REPLAY=first == 0,
        **overlapping(qkv),
    )  # fmt: skip
    precision = "as given" if qkv.is_cuda else "tf32"  # the interpreter has no bf16 products
    if qkv.dtype == torch.float32:
        precision = "tf32x3"
    attend_kernel[(num_splits + 1, row_blocks, batch * num_kv_heads)](
        *common, head_dim**-0.5, BLOCK_M=block_m,
        PRECISION=precision,
        num_warps=4, num_stages=2, **constants,
    )  # fmt: skip
    combine_kernel[(num_rows + 1, batch * num_kv_heads)](
        *common, y, BLOCK_SPLITS=triton.next_power_of_2(num_splits + 1),
        BLOCK_N=min(64, max(16, triton.next_power_of_2(num_new))), num_warps=4, **constants,
    )  # fmt: skip
    return y


@triton.jit
def _split_length(length, num_splits, BLOCK_L: tl.constexpr):
    """Committed slots a split: whole blocks, so that most loads are full."""
    return tl.cdiv(tl.cdiv(length, num_splits), BLOCK_L) * BLOCK_L


@triton.jit
def _rotated(pointer, stride, row, known, position, rotary, rotary_stride, position_stride,
             HEAD_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr):  # fmt: skip
    """Both halves of heads of the projection at some positions, (rows, D / 2) each, rotated."""
    half = tl.arange(0, BLOCK_HALF)
    mask = known[:, None] & (half < HEAD_DIM // 2)[None, :]
    at = pointer + row[:, None] * stride + half[None, :]
    low = tl.load(at, mask=mask, other=0.0)
    high = tl.load(at + HEAD_DIM // 2, mask=mask, other=0.0)
    table = rotary + position[:, None] * position_stride + half[None, :]
    cos = tl.load(table, mask=mask, other=0.0)
    sin = tl.load(table + rotary_stride, mask=mask, other=0.0)
    low_wide, high_wide = low.to(tl.float32), high.to(tl.float32)
    rotated_low = (low_wide * cos - high_wide * sin).to(low.dtype)
    rotated_high = (high_wide * cos + low_wide * sin).to(low.dtype)
    return rotated_low, rotated_high


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    if PRECISION == "as given":
        return tl.dot(a, b)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)


@triton.jit
def _attend(q_low, q_high, k_low, k_high, v, visible, highest, total, out, scale,
            PRECISION: tl.constexpr):  # fmt: skip
    """One block of keys in the running softmax."""
    scores = _dot(q_low, tl.trans(k_low), PRECISION) + _dot(q_high, tl.trans(k_high), PRECISION)
    scores = tl.where(visible, scores * scale, -float("inf"))
    now = tl.maximum(highest, tl.max(scores, axis=1))
    shift = tl.where(now == -float("inf"), 0.0, now)  # nothing seen yet
    weights = tl.exp(scores - shift[:, None])
    fade = tl.exp(highest - shift)
    total = total * fade + tl.sum(weights, axis=1)
    out = out * fade[:, None] + _dot(weights.to(v.dtype), v, PRECISION)
    return now, total, out


@triton.jit
def _cached(keys, values, slot, known, slot_stride, HEAD_DIM: tl.constexpr,
            BLOCK_HALF: tl.constexpr):  # fmt: skip
    """Keys in halves and values at some slots; nothing is read where unknown."""
    half = tl.arange(0, BLOCK_HALF)
    d = tl.arange(0, 2 * BLOCK_HALF)
    in_half = known[:, None] & (half < HEAD_DIM // 2)[None, :]
    at = keys + slot[:, None] * slot_stride + half[None, :]
    low = tl.load(at, mask=in_half, other=0.0)
    high = tl.load(at + HEAD_DIM // 2, mask=in_half, other=0.0)
    in_d = known[:, None] & (d < HEAD_DIM)[None, :]
    v = tl.load(values + slot[:, None] * slot_stride + d[None, :], mask=in_d, other=0.0)
    return low, high, v


@triton.jit
def attend_kernel(
    qkv, qkv_batch_stride, qkv_stride,
    keys, values, cache_batch_stride, cache_head_stride, slot_stride,
    rotary, rotary_stride, position_stride,
    ancestors, depths, tree_size, lengths, path, path_stride, path_lengths, variants,
    first, num_new, parts, num_splits, num_rows, scale,
    NUM_KV_HEADS: tl.constexpr, SHARED: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_HALF: tl.constexpr, REPLAY: tl.constexpr, OVERLAPS: tl.constexpr,
    BLOCK_M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    split, block, sequence_head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch = (sequence_head // NUM_KV_HEADS).to(tl.int64)
    kv_head = sequence_head % NUM_KV_HEADS
    follow(OVERLAPS)
    old_length = tl.load(lengths + batch).to(tl.int32)
    variant = tl.load(variants + batch)
    length = old_length
    if REPLAY:
        path_length = tl.load(path_lengths + batch).to(tl.int32)
        length += path_length
    else:
        path_length = 0
    keys += batch * cache_batch_stride + kv_head * cache_head_stride
    values += batch * cache_batch_stride + kv_head * cache_head_stride
    qkv += batch * qkv_batch_stride
    depths += variant * tree_size
    ancestors += variant * tree_size * tree_size
    path += batch * path_stride

    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    known = row < num_rows
    query = row // SHARED
    depth = tl.load(depths + first + query, mask=known, other=0)
    head_at = qkv + (kv_head * SHARED + row % SHARED)[:, None] * HEAD_DIM
    half = tl.arange(0, BLOCK_HALF)
    in_half = known[:, None] & (half < HEAD_DIM // 2)[None, :]
    at = head_at + query[:, None] * qkv_stride + half[None, :]
    low = tl.load(at, mask=in_half, other=0.0)
    high = tl.load(at + HEAD_DIM // 2, mask=in_half, other=0.0)
    table = rotary + (length + depth)[:, None] * position_stride + half[None, :]
    cos = tl.load(table, mask=in_half, other=0.0)
    sin = tl.load(table + rotary_stride, mask=in_half, other=0.0)
    q_low = (low.to(tl.float32) * cos - high.to(tl.float32) * sin).to(low.dtype)
    q_high = (high.to(tl.float32) * cos + low.to(tl.float32) * sin).to(low.dtype)

    highest = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    out = tl.zeros([BLOCK_M, 2 * BLOCK_HALF], dtype=tl.float32)
    everyone = tl.full([BLOCK_M, 1], 1, dtype=tl.int1)
    if split < num_splits:
        share = _split_length(old_length, num_splits, BLOCK_L)
        end = tl.minimum((split + 1) * share, old_length)
        for start in range(split * share, end, BLOCK_L):
            slot = start + tl.arange(0, BLOCK_L)
            used = slot < end
            k_low, k_high, v = _cached(keys, values, slot, used, slot_stride, HEAD_DIM, BLOCK_HALF)
            highest, total, out = _attend(
                q_low, q_high, k_low, k_high, v, everyone & used[None, :],
                highest, total, out, scale, PRECISION,
            )  # fmt: skip
    else:
        for start in range(0, path_length, 16):  # accepted, not yet in order
            k = start + tl.arange(0, 16)
            used = k < path_length
            slot = old_length + tl.load(path + k, mask=used, other=0).to(tl.int32)
            k_low, k_high, v = _cached(keys, values, slot, used, slot_stride, HEAD_DIM, BLOCK_HALF)
            highest, total, out = _attend(
                q_low, q_high, k_low, k_high, v, everyone & used[None, :],
                highest, total, out, scale, PRECISION,
            )  # fmt: skip
        seen_by = ancestors + (first + query)[:, None] * tree_size
        for start in range(0, first, 16):  # the tree so far
            node = start + tl.arange(0, 16)
            used = node < first
            k_low, k_high, v = _cached(
                keys, values, length + node, used, slot_stride, HEAD_DIM, BLOCK_HALF
            )
            above = tl.load(seen_by + node[None, :], mask=known[:, None] & used[None, :], other=0)
            highest, total, out = _attend(
                q_low, q_high, k_low, k_high, v, above != 0,
                highest, total, out, scale, PRECISION,
            )  # fmt: skip
        key_at = qkv + (NUM_KV_HEADS * SHARED + kv_head) * HEAD_DIM
        d = tl.arange(0, 2 * BLOCK_HALF)
        for start in range(0, num_new, 16):
            new = start + tl.arange(0, 16)
            used = new < num_new
            new_depth = tl.load(depths + first + new, mask=used, other=0)
            k_low, k_high = _rotated(
                key_at, qkv_stride, new, used, length + new_depth,
                rotary, rotary_stride, position_stride, HEAD_DIM, BLOCK_HALF,
            )  # fmt: skip
            v = tl.load(
                key_at + NUM_KV_HEADS * HEAD_DIM + new[:, None] * qkv_stride + d[None, :],
                mask=used[:, None] & (d < HEAD_DIM)[None, :], other=0.0,
            )  # fmt: skip
            above = tl.load(
                seen_by + first + new[None, :], mask=known[:, None] & used[None, :], other=0
            )
            highest, total, out = _attend(
                q_low, q_high, k_low, k_high, v, above != 0,
                highest, total, out, scale, PRECISION,
            )  # fmt: skip

    d = tl.arange(0, 2 * BLOCK_HALF)
    part = (split * tl.num_programs(2) + sequence_head).to(tl.int64) * num_rows + row
    at = parts + part * (HEAD_DIM + 2)
    tl.store(at[:, None] + d[None, :], out, mask=known[:, None] & (d < HEAD_DIM)[None, :])
    tl.store(at + HEAD_DIM, highest, mask=known)
    tl.store(at + HEAD_DIM + 1, total, mask=known)


@triton.jit
def combine_kernel(
    qkv, qkv_batch_stride, qkv_stride,
    keys, values, cache_batch_stride, cache_head_stride, slot_stride,
    rotary, rotary_stride, position_stride,
    ancestors, depths, tree_size, lengths, path, path_stride, path_lengths, variants,
    first, num_new, parts, num_splits, num_rows, y_pointer,
    NUM_KV_HEADS: tl.constexpr, SHARED: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_HALF: tl.constexpr, REPLAY: tl.constexpr, OVERLAPS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row, sequence_head = tl.program_id(0), tl.program_id(1)
    batch = (sequence_head // NUM_KV_HEADS).to(tl.int64)
    kv_head = sequence_head % NUM_KV_HEADS
    follow(OVERLAPS)
    old_length = tl.load(lengths + batch).to(tl.int32)
    d = tl.arange(0, 2 * BLOCK_HALF)
    in_d = d < HEAD_DIM
    if row < num_rows:
        split = tl.arange(0, BLOCK_SPLITS)
        share = _split_length(old_length, num_splits, BLOCK_L)
        # The corner's part is the last; a split without keys left its sums at zero
        used = (split == num_splits) | ((split < num_splits) & (split * share < old_length))
        part = (split * tl.num_programs(1) + sequence_head).to(tl.int64) * num_rows + row
        at = parts + part * (HEAD_DIM + 2)
        out = tl.load(at[:, None] + d[None, :], mask=used[:, None] & in_d[None, :], other=0.0)
        highest = tl.load(at + HEAD_DIM, mask=used, other=-float("inf"))
        total = tl.load(at + HEAD_DIM + 1, mask=used, other=0.0)
        weights = tl.exp(highest - tl.max(highest, axis=0))
        y = tl.sum(out * weights[:, None], axis=0) / tl.sum(total * weights, axis=0)
        head = kv_head * SHARED + row % SHARED
        line = (batch * num_new + row // SHARED) * NUM_KV_HEADS * SHARED + head
        tl.store(y_pointer + line * HEAD_DIM + d, y.to(y_pointer.dtype.element_ty), mask=in_d)
    else:
        keys += batch * cache_batch_stride + kv_head * cache_head_stride
        values += batch * cache_batch_stride + kv_head * cache_head_stride
        length = old_length
        if REPLAY:
            path_length = tl.load(path_lengths + batch).to(tl.int32)
            length += path_length
            # path[k] >= k: going up, no block overwrites what a later one reads
            for start in range(0, path_length, 16):
                k = start + tl.arange(0, 16)
                mask = (k < path_length)[:, None] & in_d[None, :]
                node = tl.load(path + batch * path_stride + k, mask=k < path_length, other=0)
                source = (old_length + node)[:, None] * slot_stride + d[None, :]
                target = (old_length + k)[:, None] * slot_stride + d[None, :]
                moved_keys = tl.load(keys + source, mask=mask, other=0.0)
                moved_values = tl.load(values + source, mask=mask, other=0.0)
                tl.debug_barrier()
                tl.store(keys + target, moved_keys, mask=mask)
                tl.store(values + target, moved_values, mask=mask)
                tl.debug_barrier()
        variant = tl.load(variants + batch)
        key_at = qkv + batch * qkv_batch_stride + (NUM_KV_HEADS * SHARED + kv_head) * HEAD_DIM
        half = tl.arange(0, BLOCK_HALF)
        for start in range(0, num_new, BLOCK_N):
            new = start + tl.arange(0, BLOCK_N)
            used = new < num_new
            depth = tl.load(depths + variant * tree_size + first + new, mask=used, other=0)
            low, high = _rotated(
                key_at, qkv_stride, new, used, length + depth,
                rotary, rotary_stride, position_stride, HEAD_DIM, BLOCK_HALF,
            )  # fmt: skip
            slot = (length + first + new)[:, None] * slot_stride
            in_half = used[:, None] & (half < HEAD_DIM // 2)[None, :]
            tl.store(keys + slot + half[None, :], low, mask=in_half)
            tl.store(keys + slot + HEAD_DIM // 2 + half[None, :], high, mask=in_half)
            mask = used[:, None] & in_d[None, :]
            v = tl.load(
                key_at + NUM_KV_HEADS * HEAD_DIM + new[:, None] * qkv_stride + d[None, :],
                mask=mask, other=0.0,
            )  # fmt: skip
            tl.store(values + slot + d[None, :], v, mask=mask)
