"""Loads, stores and rotation of heads of queries, keys and values, in halves (Triton)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_halves(at, known, half, HEAD_DIM: tl.constexpr):
    """Load columns of both halves of the heads at some pointers, masked by `known`."""
    mask = known[:, None] & (half < HEAD_DIM // 2)[None, :]
    at = at[:, None] + half[None, :]
    low = tl.load(at, mask=mask, other=0.0)
    return low, tl.load(at + HEAD_DIM // 2, mask=mask, other=0.0)


@triton.jit
def store_halves(at, known, half, low, high, HEAD_DIM: tl.constexpr):
    mask = known[:, None] & (half < HEAD_DIM // 2)[None, :]
    at = at[:, None] + half[None, :]
    tl.store(at, low, mask=mask)
    tl.store(at + HEAD_DIM // 2, high, mask=mask)


@triton.jit
def load_heads(at, known, d, HEAD_DIM: tl.constexpr):
    mask = known[:, None] & (d < HEAD_DIM)[None, :]
    return tl.load(at[:, None] + d[None, :], mask=mask, other=0.0)


@triton.jit
def rotated(low, high, position, known, half, call, HEAD_DIM: tl.constexpr):
    """Return columns of both halves of heads, rotated to their positions."""
    mask = known[:, None] & (half < HEAD_DIM // 2)[None, :]
    table = call.rotary + position[:, None] * call.rotary_strides[1] + half[None, :]
    cos = tl.load(table, mask=mask, other=0.0)
    sin = tl.load(table + call.rotary_strides[0], mask=mask, other=0.0)
    low_wide, high_wide = low.to(tl.float32), high.to(tl.float32)
    rotated_low = (low_wide * cos - high_wide * sin).to(low.dtype)
    rotated_high = (high_wide * cos + low_wide * sin).to(low.dtype)
    return rotated_low, rotated_high
