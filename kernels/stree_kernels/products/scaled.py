"""Matrix products of some rows with a weight in 8 bits, scaled in fp32 (Triton).

Few rows with few outputs go by shares (`linear.py`). A large head has too many outputs for the
registers (`short.py`) or for one share of a multiprocessor. So `scaled_kernel` goes through its
share tile by tile, in one loop over all tiles and all inputs of each: the weights of the next tile
arrive while this one is written. A share is one range of memory, read once from end to end. In
registers weights are converted to the type of the inputs, which is exact for e4m3; sums are fp32,
and a scale multiplies the sum over its inputs.

The inputs are read again with each tile, from the L2 cache: larger tiles need fewer such reads.
Rows beyond `ROWS` are for further programs, which read the weight again; they run at the same time,
so that it comes from the L2 cache, too. Beyond `MAX_ROWS`, as in a prompt, the weight is written
out in the type of the inputs first. Up to `MAX_ROWS_ALIKE` rows, a row's result
does not depend on the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from stree_kernels import naive
from stree_kernels.contracts import Scaled
from stree_kernels.launch import follow, overlapping
from stree_kernels.pointwise import activated
from stree_kernels.products import linear as products
from stree_kernels.products.linear import (
    CHUNK,
    LEAST_GROUP,
    STAGE_BYTES,
    ask_for,
    device_of,
    numbers_of,
    precision_of,
    product,
    scales_of,
    step_of,
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
MAX_ROWS_ALIKE = 16  # rows
TILINGS = {True: Tiling(256, 4, 4, 2), False: Tiling(128, 4, 8, 1)}  # for few rows or not
ROWS = 64  # of a program, at most
MAX_ROWS = 256  # by tiles; more are multiplied in the inputs' own type
OTHER_BYTES = 16 * 1024  # of shared memory, that a program has beside its stages, at most
PREFETCHED_BYTES = 32768  # of its share that a program asks for before it waits for inputs


def linear(x: Tensor, weight: Scaled) -> Tensor:
    """Compute `naive.linear` by a weight in 8 bits."""
    inputs = weight.shape[1]
    assert x.shape[-1] == inputs
    x = x.contiguous()
    if products.serves(x, weight):
        return products.by_shares(x, weight, len(weight.values))
    in_order = weight.values.is_contiguous() and weight.scale.is_contiguous()
    if x.numel() <= MAX_ROWS * inputs and in_order and step_of(weight) >= LEAST_GROUP:
        return _by_tiles(x, weight)
    return F.linear(x, naive.dequantised(weight, x.dtype))


def linear_parts(x: Tensor, weight: Scaled) -> Tensor:
    """Compute `naive.linear_parts`, in several parts for some dozens of rows."""
    parts = products.parts_of(x, weight)
    if parts is not None:
        return products.by_shares(x, weight, len(weight.values), parts=parts)
    return linear(x, weight)[None]


def linear_swiglu(x: Tensor, weight: Scaled) -> Tensor:
    """Compute `naive.linear_swiglu`, in one launch if rows are few."""
    if products.serves_swiglu(x, weight):
        return products.by_shares(x, weight, len(weight.values) // 2, gated="swiglu")
    return activated(linear(x, weight), "swiglu")


def _by_tiles(x: Tensor, weight: Scaled) -> Tensor:
    outputs, inputs = weight.shape
    rows = x.numel() // inputs
    tiling = TILINGS[rows <= MAX_ROWS_ALIKE]
    out = x.new_empty(*x.shape[:-1], outputs)
    multiprocessors, shared_bytes = device_of(x)
    most = tiling.together * multiprocessors  # programs at once
    room = min(STAGE_BYTES, shared_bytes - OTHER_BYTES) // tiling.together
    block_outputs = triton.next_power_of_2(triton.cdiv(outputs, most))
    block_outputs = min(tiling.outputs, max(16, block_outputs))
    share = triton.cdiv(outputs, min(most, triton.cdiv(outputs, block_outputs)))
    block_rows = min(ROWS, max(8, triton.next_power_of_2(rows)))
    block_inputs = min(INPUTS, step_of(weight), max(32, triton.next_power_of_2(inputs)))
    stage = block_inputs * (block_outputs + block_rows * x.element_size())
    aligned = inputs % 16 == 0 and weight.values.data_ptr() % 16 == 0  # as asking needs it
    asks = aligned and outputs * inputs >= CHUNK.value
    scaled_kernel[(triton.cdiv(rows, block_rows), triton.cdiv(outputs, share))](
        x, weight.values, weight.scale, out, rows, outputs, inputs, weight.scale.shape[1], share,
        STEPS=triton.cdiv(inputs, block_inputs),
        AHEAD=PREFETCHED_BYTES // CHUNK.value if asks else 0,
        GROUP=weight.group if weight.scale.shape[1] > 1 else None,
        EVEN=inputs % block_inputs == 0, PRECISION=precision_of(x),
        BLOCK_ROWS=block_rows, BLOCK_OUTPUTS=block_outputs, BLOCK_INPUTS=block_inputs,
        num_stages=min(tiling.stages, 1 + room // stage),
        num_warps=tiling.warps, **overlapping(x),
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def scaled_kernel(
    x, weight, scale, out, rows, outputs, inputs, groups, share,
    STEPS: tl.constexpr, AHEAD: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
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
        # (outputs, rows) += (outputs, inputs) @ (inputs, rows)
        term = product(numbers_of(tile, values.dtype), values, PRECISION)
        if GROUP is not None:
            term *= scales_of(scale + (first + at) * groups + start // GROUP, mine)
        sums = tl.where(start == 0, 0.0, sums) + term
        if start + BLOCK_INPUTS >= inputs:
            output = first + at
            y = sums
            if GROUP is None:
                y *= scales_of(scale + output, mine)
            to_out = out + row.to(tl.int64)[None, :] * outputs + output[:, None]
            tl.store(to_out, y.to(out.dtype.element_ty), mask=mine[:, None] & known[None, :])
