"""Matrix products of many rows with a weight in 8 bits that has a scale a block (Triton).

A tile of the weight is loaded once, and multiplied by both halves of the rows (`split.py`). The
sums over its inputs are scaled, and added up in fp32. PyTorch's product knows no such scales.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from stree_kernels.contracts import Scaled, Split
from stree_kernels.launch import follow, overlapping
from stree_kernels.pointwise import silu_times
from stree_kernels.products.linear import SHARED_BYTES, device_of, is_aligned
from stree_kernels.products.split import split

ROWS, OUTPUTS, INPUTS = 128, 128, 128  # of a tile
STAGES, WARPS = 4, 8


def fits(x: Tensor, weight: Scaled) -> bool:
    """Return True if `linear` serves rows (…, D) and a weight: the copy engine fetches both."""
    values, scale = weight.values, weight.scale
    return (
        x.dtype == torch.bfloat16 and is_aligned(values) and scale.is_contiguous()
        and values.shape[1] % 16 == 0
        and weight.group % INPUTS == 0
        and device_of(x)[1] >= SHARED_BYTES  # which no GPU without the copy engine has
    )


def linear(x: Tensor, weight: Scaled, halves: Split | None, *, gated: bool = False) -> Tensor:
    """Compute `naive.linear` or, with `gated`, `naive.linear_swiglu` in one launch."""
    halves = halves or split(x)
    kinds, inputs = 1 + gated, x.shape[-1]
    rows, outputs = x.numel() // inputs, len(weight.values) // kinds
    out = x.new_empty(*x.shape[:-1], outputs)
    tile = [kinds, OUTPUTS // kinds, INPUTS]
    blocks_kernel[triton.cdiv(rows, ROWS), triton.cdiv(outputs, tile[1])](
        TensorDescriptor(
            halves.pieces.view(2 * rows, inputs), [2 * rows, inputs], [inputs, 1], [ROWS, INPUTS]
        ),
        TensorDescriptor(
            weight.values, [kinds, outputs, inputs], [outputs * inputs, inputs, 1], tile
        ),
        halves.unit, weight.scale, out, rows, outputs, inputs, inputs // weight.group,
        GROUP=weight.group, GATED=gated, ROWS=ROWS, OUTPUTS=OUTPUTS, INPUTS=INPUTS,
        num_stages=STAGES, num_warps=WARPS, **overlapping(x),
    )
    return out


@triton.jit
def blocks_kernel(
    halves, weight, units, scale, out, rows, outputs, inputs, groups,
    GROUP: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, OVERLAPS: tl.constexpr,
):
    SHARE: tl.constexpr = OUTPUTS // 2 if GATED else OUTPUTS  # of gate, and the same of up
    row_begin, begin = tl.program_id(0) * ROWS, tl.program_id(1) * SHARE
    row, at = row_begin + tl.arange(0, ROWS), tl.arange(0, OUTPUTS)
    known, mine = row < rows, begin + at % SHARE < outputs
    scale += (begin + at % SHARE + at // SHARE * outputs).to(tl.int64) * groups
    sums = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    follow(OVERLAPS)
    for start in range(0, inputs, INPUTS):
        factor = tl.load(scale + start // GROUP, mask=mine, other=0.0)
        tile = weight.load([0, begin, start]).reshape(OUTPUTS, INPUTS)
        coarse = halves.load([row_begin, start])
        fine = halves.load([rows + row_begin, start])
        # (outputs, rows) += (outputs, inputs) @ (inputs, rows)
        sums += tl.dot(tile, fine.T, tl.dot(tile, coarse.T)) * factor[:, None]
    sums *= tl.load(units + row, mask=known, other=0.0)[None, :]
    y = sums.to(out.dtype.element_ty)
    if GATED:
        gate, up = y.reshape(2, SHARE, ROWS).permute(1, 2, 0).split()
        y = silu_times(gate, up)
    output = begin + tl.arange(0, SHARE)
    to_out = out + row.to(tl.int64)[None, :] * outputs + output[:, None]
    tl.store(to_out, y, mask=(output < outputs)[:, None] & known[None, :])
