"""Rows in bf16 as sums of two rows in e4m3, which tensor cores of 8 bits multiply (Triton).

A row is divided by its unit, a power of two; each number is rounded, and what is left of it is the
second number. bf16 has 8 significant bits and e4m3 has 4, so the two add up to the number, except
where it is less than 2⁻¹⁰ of the largest that shares its unit: there at most 2⁻¹⁸ of that is lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree_kernels.contracts import Split
from stree_kernels.launch import follow, overlapping

WARPS = 8
MANY_PIECES, MULTIPLE = 256, 128  # more pieces than so many are padded, to a multiple


def new_split(shape: Sequence[int], device: torch.device) -> Split:
    """Allocate what rows of a shape (…, D) are split into."""
    *rows, width = shape
    count = 2 * math.prod(rows)
    multiple = MULTIPLE if count > MANY_PIECES else 1
    size = triton.cdiv(count, multiple) * multiple
    padded = torch.empty(size, width, dtype=torch.float8_e4m3fn, device=device)
    return Split(padded[:count].view(2, *shape), torch.empty(2, *rows, device=device), padded)


def split(x: Tensor) -> Split:
    """Split contiguous rows (…, D) in one launch."""
    made, width = new_split(x.shape, x.device), x.shape[-1]
    split_kernel[(x.numel() // width,)](
        x, made.pieces, made.unit, width, BITWISE=x.is_cuda,
        BLOCK=max(128, triton.next_power_of_2(width)), num_warps=WARPS, **overlapping(x),
    )
    return made


@triton.jit
def split_kernel(
    x, pieces, unit, width, BITWISE: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
):
    k = tl.arange(0, BLOCK)[None, :]
    mine = k < width
    follow(OVERLAPS)
    values = tl.load(x + tl.program_id(0).to(tl.int64) * width + k, mask=mine, other=0.0)
    store_split(values, pieces, unit, k, mine, width, BITWISE)


@triton.jit
def store_split(values, pieces, unit, k, mine, width, BITWISE: tl.constexpr):
    """Store a row (1, BLOCK), the one of this program among the grid's first axis, split."""
    row = tl.program_id(0)
    coarse, fine, units = in_two(values, BITWISE)
    pieces += row.to(tl.int64) * width + k
    tl.store(pieces, coarse, mask=mine)
    tl.store(pieces + tl.num_programs(0).to(tl.int64) * width, fine, mask=mine)
    tl.store(unit + row + tl.arange(0, 1), units)
    tl.store(unit + tl.num_programs(0) + row + tl.arange(0, 1), units)


@triton.jit
def in_two(x, BITWISE: tl.constexpr):
    """Split numbers (rows, inputs): return both numbers in e4m3, and the units (rows,).

    The unit of a row that holds a number which is not finite is NaN.
    """
    bits = tl.max((x.to(tl.int16, bitcast=True) & 0x7FFF).to(tl.int32), axis=1)
    exponent = tl.maximum(bits >> 7, 16)  # of the largest, which becomes 128 to 255
    into = ((261 - exponent) << 23).to(tl.float32, bitcast=True).to(tl.bfloat16)[:, None]
    unit = ((exponent - 7) << 23).to(tl.float32, bitcast=True)
    unit = tl.where(bits < 0x7F80, unit, float("nan"))
    if BITWISE:
        x, into = tl.broadcast(x, into)
        coarse, fine = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 zero, v, w, a, b, c, d, g, h, s, t;
            .reg .b16 p, q;
            mov.b32 zero, 0x80008000;
            fma.rn.bf16x2 v, $2, $4, zero;
            fma.rn.bf16x2 w, $3, $5, zero;
            shl.b32 a, v, 16;
            and.b32 b, v, 0xffff0000;
            shl.b32 c, w, 16;
            and.b32 d, w, 0xffff0000;
            cvt.rn.f16x2.f32 g, b, a;
            cvt.rn.f16x2.f32 h, d, c;
            cvt.rn.satfinite.e4m3x2.f16x2 p, g;
            cvt.rn.satfinite.e4m3x2.f16x2 q, h;
            mov.b32 $0, {p, q};
            cvt.rn.f16x2.e4m3x2 s, p;
            cvt.rn.f16x2.e4m3x2 t, q;
            sub.rn.f16x2 g, g, s;
            sub.rn.f16x2 h, h, t;
            cvt.rn.satfinite.e4m3x2.f16x2 p, g;
            cvt.rn.satfinite.e4m3x2.f16x2 q, h;
            mov.b32 $1, {p, q};
            }
            """,
            "=r,=r,r,r,r,r", [x, into], dtype=(tl.float8e4nv, tl.float8e4nv), is_pure=True, pack=4,
        )
    else:
        values = x.to(tl.float32) * into.to(tl.float32)
        coarse = in_e4m3(values)
        fine = in_e4m3(values - coarse.to(tl.float32))
    return coarse, fine, unit


@triton.jit
def in_e4m3(values):
    """Convert numbers to e4m3, rounded before: the interpreter's conversion would cut them off."""
    values = (values + 24576.0) - 24576.0  # to multiples of 2⁻⁹, the smallest number
    kept = (values.to(tl.int32, bitcast=True) + 0x80000) & -0x100000
    return tl.where(values == values, kept.to(tl.float32, bitcast=True), values).to(tl.float8e4nv)
