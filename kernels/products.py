"""Matrix products of a tree's few rows with a weight: what limits them is how fast it arrives.

`share_kernel` (Triton): each multiprocessor has one equal share of the outputs and reads its rows
of the weight from end to end. cuBLAS cuts the outputs into tiles, of which a multiprocessor gets
1.7, say; or it splits the sum, and adds the parts in another launch. With SwiGLU, gate and up lie
side by side in a share, and only what SwiGLU makes of them is written. Up to 16 rows a row's
result does not depend on how many others there are.

More rows, more outputs than a share each can hold, and 32-bit numbers are left to NVIDIA's
libraries. PyTorch gives a product to cuBLAS, and one with a bias to cuBLASLt, which chooses among
other kernels: faster ones for some dozens of rows where cuBLAS would split the sum.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from stree_kernels.launch import follow, overlapping
from stree_kernels.pointwise import silu_times, swiglu

# What was fastest on an H200 (docs/results/h200-step)
FEW = 16  # rows of a product by shares
MANY = 64  # the same with SwiGLU; from FEW on with other tiles, stages and warps
MOST_OUTPUTS = 128  # of a share
TILE = 8192  # weights that arrive at once; of few rows' gate twice as many, and of their up
STAGES, STAGES_OF_MANY = 8, 4
STAGE_BYTES = 210_000  # of all stages, at most
WARPS, WARPS_OF_MANY = 4, 8
SHARED_BYTES = 228 * 1024  # that a multiprocessor must have: an H100's, H200's, B200's
LT_ROWS = (32, 96)  # for which cuBLASLt is asked


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`naive.linear`, by shares where rows are few."""
    outputs, inputs = weight.shape
    rows = x.numel() // inputs
    if rows <= FEW and _fits(x, weight, outputs):
        return _by_shares(x, weight, outputs, False)
    by_lt = x.element_size() == 2 and outputs <= inputs and LT_ROWS[0] <= rows <= LT_ROWS[1]
    if not by_lt:
        return F.linear(x, weight)
    result = torch.addmm(_zeros(outputs, x.dtype, x.device), x.flatten(0, -2), weight.t())
    return result.unflatten(0, x.shape[:-1])


def linear_swiglu(x: Tensor, weight: Tensor) -> Tensor:
    """`naive.linear_swiglu`, by shares where rows are few."""
    outputs = weight.shape[0] // 2
    if x.numel() // x.shape[-1] <= MANY and _fits(x, weight, outputs):
        return _by_shares(x, weight, outputs, True)
    return swiglu(linear(x, weight))


def precision_of(tensor: Tensor) -> str:
    """For `product` of 16-bit numbers, of which the interpreter knows no products."""
    return "as given" if tensor.is_cuda else "tf32"


def _fits(x: Tensor, weight: Tensor, outputs: int) -> bool:
    multiprocessors, shared_bytes = _device_of(x)
    return (
        x.element_size() == 2 and x.is_contiguous() and weight.is_contiguous()
        and outputs <= MOST_OUTPUTS * multiprocessors and shared_bytes >= SHARED_BYTES
    )  # fmt: skip


def _by_shares(x: Tensor, weight: Tensor, outputs: int, gated: bool) -> Tensor:
    inputs = x.shape[-1]
    rows = x.numel() // inputs
    out = x.new_empty(*x.shape[:-1], outputs)
    share = triton.cdiv(outputs, _device_of(x)[0])
    block_outputs = max(16, triton.next_power_of_2(share))
    block_rows = max(16, triton.next_power_of_2(rows))
    few = rows <= FEW
    block_inputs = min(256, TILE * (1 + (gated and few)) // block_outputs)
    stage_bytes = 2 * block_inputs * (block_outputs * (1 + gated) + block_rows)
    share_kernel[(triton.cdiv(outputs, share),)](
        x, weight, out, rows, outputs, inputs, share, GATED=gated,
        BLOCK_ROWS=block_rows, BLOCK_OUTPUTS=block_outputs, BLOCK_INPUTS=block_inputs,
        STAGES=min(STAGES if few else STAGES_OF_MANY, STAGE_BYTES // stage_bytes),
        PRECISION=precision_of(x), num_warps=WARPS if few else WARPS_OF_MANY, **overlapping(x),
    )  # fmt: skip
    return out


def _device_of(tensor: Tensor) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory of each."""
    if not tensor.is_cuda:
        return 4, SHARED_BYTES  # in the interpreter
    device = torch.cuda.get_device_properties(tensor.device)
    return device.multi_processor_count, device.shared_memory_per_multiprocessor


@functools.cache
def _zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A bias that changes nothing, made outside of any graph: a call is always run before it is
    captured."""
    return torch.zeros(size, dtype=dtype, device=device)


@triton.jit(do_not_specialize=["rows"])
def share_kernel(
    x, weight, out, rows, outputs, inputs, share,
    GATED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK_OUTPUTS)
    output = tl.program_id(0) * share + at
    mine = ((at < share) & (output < outputs))[:, None]
    row = tl.arange(0, BLOCK_ROWS)
    known = row < rows
    k = tl.arange(0, BLOCK_INPUTS)
    weight += output.to(tl.int64)[:, None] * inputs
    to_up = outputs.to(tl.int64) * inputs
    to_x = x + row[None, :] * inputs
    sums = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], dtype=tl.float32)
    ups = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], dtype=tl.float32)
    follow(OVERLAPS)
    for start in tl.range(0, inputs, BLOCK_INPUTS, num_stages=STAGES):
        there = (start + k < inputs)[None, :]
        values = tl.load(to_x + start + k[:, None], mask=there.T & known[None, :], other=0.0)
        tile = _tile(weight + start, k, mine & there)
        sums += product(tile, values, PRECISION)
        if GATED:
            tile = _tile(weight + to_up + start, k, mine & there)
            ups += product(tile, values, PRECISION)
    y = sums.to(out.dtype.element_ty)
    if GATED:
        y = silu_times(y, ups.to(y.dtype))
    at = out + row[None, :] * outputs + output[:, None]
    tl.store(at, y, mask=mine & known[None, :])


@triton.jit
def _tile(weight, k, mask):
    """Read once a call: what others keep in the L2 cache is to stay there."""
    return tl.load(weight + k[None, :], mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    if PRECISION == "as given":
        return tl.dot(a, b)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)
