"""Matrix products of a few rows with a weight in 8 bits, a scale an output (Triton): a large head.

The head has too many outputs for the registers (`short.py`) or for one share of a multiprocessor
(`linear.py`). So `scaled_kernel` goes through its share tile by tile, in one loop over all tiles
and all inputs of each: the weights of the next tile arrive while this one is written. A share is
one range of memory, read once from end to end. In registers weights are converted to the type of
the inputs, which is exact for e4m3; sums are fp32, and the scale comes last.

The inputs are read again with each tile, from the L2 cache: larger tiles need fewer such reads.
Rows beyond `MOST_ROWS` are for further programs, which read the weight again; they run at the same
time, so that it comes from the L2 cache, too. Up to `FEW` rows, a row's result does not depend on
the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from stree_kernels.contracts import Scaled
from stree_kernels.launch import follow, overlapping
from stree_kernels.products.linear import (
    CHUNK,
    STAGE_BYTES,
    ask_for,
    device_of,
    precision_of,
    product,
)


@dataclass(frozen=True)
class Tiling:
    """Tiling of a share: most outputs of a tile, tiles in flight if they fit, warps, programs.

    The programs are those of a multiprocessor.
    """

    outputs: int
    stages: int
    warps: int
    together: int


INPUTS = 128  # of a tile, at most
FEW = 16  # rows
TILINGS = {True: Tiling(256, 4, 4, 2), False: Tiling(128, 4, 8, 1)}  # for few rows or not
MOST_ROWS = 64  # of a program
OTHER_BYTES = 16 * 1024  # of shared memory, that a program has beside its stages, at most
AHEAD = 32768  # bytes of its share that a program asks for before the previous launch has ended


def linear(x: Tensor, weight: Scaled) -> Tensor:
    """Compute `naive.linear` by a weight in 8 bits."""
    outputs, inputs = weight.values.shape
    assert x.shape[-1] == inputs and weight.values.is_contiguous() and weight.scale.is_contiguous()
    x, rows = x.contiguous(), x.numel() // inputs
    tiling = TILINGS[rows <= FEW]
    out = x.new_empty(*x.shape[:-1], outputs)
    multiprocessors, shared_bytes = device_of(x)
    most = tiling.together * multiprocessors  # programs at once
    room = min(STAGE_BYTES, shared_bytes - OTHER_BYTES) // tiling.together
    block_outputs = triton.next_power_of_2(triton.cdiv(outputs, most))
    block_outputs = min(tiling.outputs, max(16, block_outputs))
    share = triton.cdiv(outputs, min(most, triton.cdiv(outputs, block_outputs)))
    block_rows = min(MOST_ROWS, max(8, triton.next_power_of_2(rows)))
    block_inputs = min(INPUTS, max(32, triton.next_power_of_2(inputs)))
    stage = block_inputs * (block_outputs + block_rows * x.element_size())
    aligned = inputs % 16 == 0 and weight.values.data_ptr() % 16 == 0  # as asking needs it
    asks = aligned and outputs * inputs >= CHUNK.value
    scaled_kernel[(triton.cdiv(rows, block_rows), triton.cdiv(outputs, share))](
        x, weight.values, weight.scale, out, rows, outputs, inputs, share,
        STEPS=triton.cdiv(inputs, block_inputs), AHEAD=AHEAD // CHUNK.value if asks else 0,
        EVEN=inputs % block_inputs == 0, PRECISION=precision_of(x),
        BLOCK_ROWS=block_rows, BLOCK_OUTPUTS=block_outputs, BLOCK_INPUTS=block_inputs,
        num_stages=min(tiling.stages, 1 + room // stage),
        num_warps=tiling.warps, **overlapping(x),
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def scaled_kernel(
    x, weight, scale, out, rows, outputs, inputs, share,
    STEPS: tl.constexpr, AHEAD: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    known = row < rows
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, outputs)
    at, k = tl.arange(0, BLOCK_OUTPUTS), tl.arange(0, BLOCK_INPUTS)
    if OVERLAPS and AHEAD > 0:
        near = begin.to(tl.int64) * inputs + tl.arange(0, AHEAD) * CHUNK
        there = tl.minimum(near, outputs.to(tl.int64) * inputs - CHUNK)
        ask_for((weight + there)[:, None], 1)
    follow(OVERLAPS)
    to_x = x + row.to(tl.int64)[None, :] * inputs + k[:, None]
    in_tile = at[:, None] * inputs + k[None, :]
    sums = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], dtype=tl.float32)
    for step in range(tl.cdiv(end - begin, BLOCK_OUTPUTS) * STEPS):
        start = step % STEPS * BLOCK_INPUTS
        first = begin + step // STEPS * BLOCK_OUTPUTS
        mine = at < end - first
        given, wanted = known[None, :], mine[:, None]
        if not EVEN:
            in_k = start + k < inputs
            given, wanted = given & in_k[:, None], wanted & in_k[None, :]
        values = tl.load(to_x + start, mask=given, other=0.0)
        to_tile = weight + (first.to(tl.int64) * inputs + start) + in_tile
        tile = tl.load(to_tile, mask=wanted, other=0.0, eviction_policy="evict_first")
        # Through fp32: from fp16 to bf16 in one step takes four times as long
        tile = tile.to(tl.float16).to(tl.float32).to(values.dtype)
        # (outputs, rows) += (outputs, inputs) @ (inputs, rows)
        sums = tl.where(start == 0, 0.0, sums) + product(tile, values, PRECISION)
        if start + BLOCK_INPUTS >= inputs:
            output = first + at
            y = sums * tl.load(scale + output, mask=mine, other=0.0)[:, None]
            to_out = out + row.to(tl.int64)[None, :] * outputs + output[:, None]
            tl.store(to_out, y.to(out.dtype.element_ty), mask=mine[:, None] & known[None, :])
