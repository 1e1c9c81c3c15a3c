"""Matrix products of some dozens of rows with gate and up, and SwiGLU, in one launch (Triton).

From 65 rows on, a multiprocessor's share of a weight (`linear.py`) waits for the inputs as long as
for the weight. Here both come as tiles that the copy engine fetches (compute capability 9.0): a
program has a tile of gate's outputs and the same of up's. cuBLAS takes as long for the product, but
then SwiGLU is a launch of its own, and neither begins before the previous launch has ended.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from stree_kernels.launch import follow, overlapping
from stree_kernels.pointwise import silu_times
from stree_kernels.products.linear import (
    CHUNK,
    MAX_ROWS_GATED,
    SHARED_BYTES,
    ask_for,
    device_of,
    is_aligned,
    precision_of,
    product,
)

# Fastest on an H200
MAX_ROWS = 128
OUTPUTS, INPUTS = 128, 64  # of a tile
STAGES, WARPS = 4, 8
PREFETCHED_BYTES = 65536  # of its weights that a program asks for before it waits for inputs
MIN_SHARE_BUSY = 0.75  # of the multiprocessors, at least, in the time that the programs take


def fits(x: Tensor, weight: Tensor) -> bool:
    """Return True if `linear_swiglu` serves these: enough tiles, and none left over."""
    rows, (outputs, inputs) = x.numel() // x.shape[-1], weight.shape
    multiprocessors, shared_bytes = device_of(x)
    tiles = triton.cdiv(outputs // 2, OUTPUTS)
    waves = triton.cdiv(tiles, multiprocessors)
    return (
        MAX_ROWS_GATED < rows <= MAX_ROWS and tiles >= MIN_SHARE_BUSY * waves * multiprocessors
        and x.element_size() == 2 and x.dtype == weight.dtype and inputs % 8 == 0
        and is_aligned(x) and is_aligned(weight)
        and shared_bytes >= SHARED_BYTES  # which no GPU without the copy engine has
    )


def linear_swiglu(x: Tensor, weight: Tensor) -> Tensor:
    """Compute `naive.linear_swiglu` in one launch."""
    inputs = x.shape[-1]
    rows, outputs = x.numel() // inputs, weight.shape[0] // 2
    out = x.new_empty(*x.shape[:-1], outputs)
    ahead = PREFETCHED_BYTES // (CHUNK.value * 2 * OUTPUTS)
    tiled_kernel[(triton.cdiv(outputs, OUTPUTS),)](
        TensorDescriptor(x.view(rows, inputs), [rows, inputs], [inputs, 1], [MAX_ROWS, INPUTS]),
        TensorDescriptor(weight, list(weight.shape), [inputs, 1], [OUTPUTS, INPUTS]),
        weight, out, rows, outputs, inputs,
        AHEAD=ahead if inputs % 16 == 0 and ahead * CHUNK.value <= 2 * inputs else 0,
        BLOCK_ROWS=MAX_ROWS, BLOCK_OUTPUTS=OUTPUTS, BLOCK_INPUTS=INPUTS,
        PRECISION=precision_of(x), num_stages=STAGES, num_warps=WARPS, **overlapping(x),
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def tiled_kernel(
    all_values, all_weights, weight, out, rows, outputs, inputs,
    AHEAD: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr, PRECISION: tl.constexpr, OVERLAPS: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK_OUTPUTS
    output, row = first + tl.arange(0, BLOCK_OUTPUTS), tl.arange(0, BLOCK_ROWS)
    if OVERLAPS and AHEAD > 0:
        near = weight + tl.minimum(output, outputs - 1).to(tl.int64)[:, None] * inputs
        ask_for(near, AHEAD)
        ask_for(near + outputs.to(tl.int64) * inputs, AHEAD)
    follow(OVERLAPS)
    gates = tl.zeros([BLOCK_ROWS, BLOCK_OUTPUTS], dtype=tl.float32)
    ups = tl.zeros([BLOCK_ROWS, BLOCK_OUTPUTS], dtype=tl.float32)
    for start in range(0, inputs, BLOCK_INPUTS):
        values = all_values.load([0, start])
        # (rows, outputs) += (rows, inputs) @ (inputs, outputs)
        gates += product(values, all_weights.load([first, start]).T, PRECISION)
        ups += product(values, all_weights.load([outputs + first, start]).T, PRECISION)
    dtype = out.dtype.element_ty
    at = out + row.to(tl.int64)[:, None] * outputs + output[None, :]
    known = (row < rows)[:, None] & (output < outputs)[None, :]
    tl.store(at, silu_times(gates.to(dtype), ups.to(dtype)), mask=known)
