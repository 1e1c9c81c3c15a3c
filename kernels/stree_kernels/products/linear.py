"""Matrix products of a tree's few rows with a weight, limited by the weight's arrival (Triton).

In `share_kernel` each multiprocessor has one equal share of the outputs and reads its rows of the
weight from end to end. cuBLAS cuts the outputs into tiles, of which a multiprocessor gets 1.7, for
example, or it splits the sum, and adds the parts in another launch. With SwiGLU, gate and up lie
side by side in a share, and only SwiGLU's result is written. Up to 16 rows, a row's result does not
depend on the number of rows.

Every multiprocessor reads all rows of the inputs. If these are larger than its share of the weight,
and a norm follows, a share has more outputs and a part of the inputs; the norm adds up the parts
(`linear_parts`).

More rows, more outputs than a share can hold, and 32-bit numbers are left to NVIDIA's libraries.
PyTorch gives a product to cuBLAS, and one with a bias to cuBLASLt, which chooses among other
kernels: faster ones for some dozens of rows where cuBLAS would split the sum.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from stree_kernels.launch import follow, overlapping
from stree_kernels.pointwise import activated, gated_by


@dataclass(frozen=True)
class Tiling:
    """Tiling of a share's weights as they are loaded.

    Attributes:
        weights: Numbers loaded at a time, of gate and of up each.
        stages: Tiles that are loaded before their use, if they fit.
        inputs_apart: Whether inputs come through registers, one tile before their use, which
            leaves shared memory to the weights.
    """

    weights: int
    stages: int
    warps: int
    inputs_apart: bool = False


# Fastest on an H200 (docs/results/h200-step)
MAX_ROWS_SHARED = 16  # rows of a product by shares
MAX_ROWS_GATED = 64  # the same with SwiGLU, or where a share has as many outputs as there are rows
TILINGS = {  # for few rows or not, with SwiGLU or not
    (True, False): Tiling(8192, 8, 4),
    (True, True): Tiling(16384, 3, 4),
    (False, False): Tiling(16384, 4, 8),
    (False, True): Tiling(16384, 3, 8, inputs_apart=True),
}
MAX_SHARE_OUTPUTS = 128  # of a share
PARTS = (4, 2)  # of a sum, in order of preference
MIN_SPAN = 2048  # inputs of a part: with fewer, the norm loses more than the product gains
MAX_RANK = 256  # of an adapter whose term is added
STAGE_BYTES = 214_000  # of shared memory, at most
SHARED_BYTES = 228 * 1024  # that a multiprocessor must have: an H100's, H200's, B200's
PREFETCHED_BYTES = 65536  # of its weight that a share asks for before it waits for inputs
CHUNK = tl.constexpr(256)  # bytes of a row that it asks for at a time
LT_ROWS = (32, 96)  # for which cuBLASLt is asked


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Compute `naive.linear`, by shares if rows are few."""
    outputs, inputs = weight.shape
    rows = x.numel() // inputs
    multiprocessors, _ = device_of(x)
    is_wide = rows <= MAX_ROWS_GATED and outputs >= rows * multiprocessors
    enough = rows <= MAX_ROWS_SHARED or is_wide
    if enough and _fits(x, weight, outputs):
        return _by_shares(x, weight, outputs)
    by_lt = outputs <= inputs or outputs > MAX_SHARE_OUTPUTS * multiprocessors
    if x.element_size() == 2 and LT_ROWS[0] <= rows <= LT_ROWS[1] and by_lt:
        result = torch.addmm(_zeros(outputs, x.dtype, x.device), x.flatten(0, -2), weight.t())
        return result.unflatten(0, x.shape[:-1])
    return F.linear(x, weight)


def laid(weight: Tensor) -> Tensor:
    """Store a weight as `naive.laid` does, output by output."""
    return weight.contiguous()


def linear_wide(x: Tensor, weight: Tensor) -> Tensor:
    """Compute `naive.linear_wide`, by shares if rows are few."""
    outputs, rows = len(weight), x.numel() // x.shape[-1]
    if rows <= MAX_ROWS_GATED and x.dtype == weight.dtype and _fits(x, weight, outputs):
        return _by_shares(x, weight, outputs, dtype=torch.float32)
    return F.linear(x.float(), weight.float())


def linear_parts(x: Tensor, weight: Tensor) -> Tensor:
    """Compute `naive.linear_parts`, in several parts for more than `MAX_ROWS_SHARED` rows."""
    outputs, inputs = weight.shape
    multiprocessors, _ = device_of(x)
    if MAX_ROWS_SHARED < x.numel() // inputs <= MAX_ROWS_GATED:
        for parts in PARTS:
            wide_enough = outputs <= multiprocessors // parts * MAX_SHARE_OUTPUTS
            if wide_enough and inputs >= parts * MIN_SPAN and _fits(x, weight, outputs):
                return _by_shares(x, weight, outputs, parts=parts)
    return linear(x, weight)[None]


def linear_swiglu(x: Tensor, weight: Tensor) -> Tensor:
    """Compute `naive.linear_swiglu`, by shares if rows are few."""
    outputs = weight.shape[0] // 2
    if x.numel() // x.shape[-1] <= MAX_ROWS_GATED and _fits(x, weight, outputs):
        return _by_shares(x, weight, outputs, gated="swiglu")
    return activated(linear(x, weight), "swiglu")


def linear_adapted(x: Tensor, weight: Tensor, low: Tensor, up: Tensor, kind: str) -> Tensor:
    """Compute `naive.linear_adapted`, in one launch if rows are few; kind is one with a gate."""
    outputs, rank = weight.shape[0] // 2, up.shape[1]
    few = x.numel() // x.shape[-1] <= MAX_ROWS_GATED and rank <= MAX_RANK
    if few and _fits(x, weight, outputs) and low.is_contiguous() and up.is_contiguous():
        return _by_shares(x, weight, outputs, gated=kind, adapter=(low, up))
    return activated(linear(x, weight) + linear(low, up), kind)


def precision_of(tensor: Tensor) -> str:
    """Return the precision of `product`, which keeps fp32 exact to about 1e-6.

    Triton's interpreter has no products of 16-bit numbers.
    """
    if tensor.dtype == torch.float32:
        return "tf32x3"
    return "as given" if tensor.is_cuda else "tf32"


def mixed_precision_of(dtype: torch.dtype) -> str:
    """Return the precision of `mixed_product`: fp16's range is too small for two fp16 numbers."""
    return {torch.float32: "tf32x3", torch.bfloat16: "in two", torch.float16: "tf32"}[dtype]


def _fits(x: Tensor, weight: Tensor, outputs: int) -> bool:
    multiprocessors, shared_bytes = device_of(x)
    return (
        x.element_size() == 2 and x.is_contiguous() and weight.is_contiguous()
        and 1 < outputs <= MAX_SHARE_OUTPUTS * multiprocessors and shared_bytes >= SHARED_BYTES
    )


def _by_shares(
    x: Tensor, weight: Tensor, outputs: int, *, gated: str | None = None, parts: int = 1,
    adapter: tuple[Tensor | None, Tensor | None] = (None, None), dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute a product by shares.

    gated is the kind of MLP, adapter as in `linear_adapted`, dtype the result's (None: that of x).
    """
    inputs = x.shape[-1]
    assert inputs == weight.shape[1]
    rows = x.numel() // inputs
    if parts == 1:
        out = x.new_empty(*x.shape[:-1], outputs, dtype=dtype or x.dtype)
    else:
        out = x.new_empty(parts, *x.shape[:-1], outputs, dtype=torch.float32)
    share = triton.cdiv(outputs, device_of(x)[0] // parts)
    block_outputs = max(16, triton.next_power_of_2(share))
    block_rows = max(16, triton.next_power_of_2(rows))
    tiling = TILINGS[rows <= MAX_ROWS_SHARED, gated is not None]
    block_inputs, tensors = min(256, tiling.weights // block_outputs), 1 if gated is None else 2
    rank = 0 if adapter[1] is None else adapter[1].shape[1]
    stage, inputs_stage = (2 * block_inputs * n for n in (block_outputs * tensors, block_rows))
    if tiling.inputs_apart:
        most_stages = (STAGE_BYTES - inputs_stage) // stage
    else:
        most_stages = STAGE_BYTES // (stage + inputs_stage)
    span = triton.cdiv(inputs, parts * block_inputs) * block_inputs
    ahead = PREFETCHED_BYTES // (CHUNK.value * block_outputs * tensors)
    whole = inputs % 16 == 0 and ahead * CHUNK.value <= 2 * (inputs - (parts - 1) * span)
    share_kernel[(triton.cdiv(outputs, share), parts)](
        x, weight, out, rows, outputs, inputs, share, span, *adapter,
        RANK=rank, BLOCK_RANK=max(16, triton.next_power_of_2(rank)),
        PARTED=parts > 1, EVEN=inputs % 16 == 0, GATED=gated,
        AHEAD=ahead if whole else 0,
        INPUTS_APART=tiling.inputs_apart, BLOCK_ROWS=block_rows,
        BLOCK_OUTPUTS=block_outputs, BLOCK_INPUTS=block_inputs, PRECISION=precision_of(x),
        num_stages=min(tiling.stages, most_stages), num_warps=tiling.warps, **overlapping(x),
    )
    return out


def device_of(tensor: Tensor) -> tuple[int, int]:
    """Return the number of multiprocessors, and the bytes of shared memory of each."""
    if not tensor.is_cuda:
        return 4, SHARED_BYTES  # in the interpreter
    device = torch.cuda.get_device_properties(tensor.device)
    return device.multi_processor_count, device.shared_memory_per_multiprocessor


def is_aligned(tensor: Tensor) -> bool:
    """Return True if a tensor lies in order, from an address on that the copy engine takes."""
    return tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


@functools.cache
def _zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a bias of zeros, made outside of any graph: calls are run before they are captured."""
    return torch.zeros(size, dtype=dtype, device=device)


@triton.jit(do_not_specialize=["rows"])
def share_kernel(
    x, weight, out, rows, outputs, inputs, share, span, low, up,
    RANK: tl.constexpr, BLOCK_RANK: tl.constexpr, AHEAD: tl.constexpr,
    PARTED: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr, INPUTS_APART: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAPS: tl.constexpr,
):
    part = tl.program_id(1)
    at = tl.arange(0, BLOCK_OUTPUTS)
    output = tl.program_id(0) * share + at
    mine = (at < share) & (output < outputs)
    row = tl.arange(0, BLOCK_ROWS)
    known = row < rows
    k = tl.arange(0, BLOCK_INPUTS)
    begin = 0
    end = inputs  # as it is: knowing its divisors, the compiler makes small products a tenth faster
    if PARTED:
        begin = part * span
        end = tl.minimum(begin + span, inputs)
        if EVEN:
            end = tl.multiple_of(end, 16)
    first = weight
    weight += output.to(tl.int64)[:, None] * inputs
    to_up = outputs.to(tl.int64) * inputs
    to_x = x + row[None, :] * inputs
    sums = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], dtype=tl.float32)
    ups = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], dtype=tl.float32)
    if OVERLAPS and AHEAD > 0:
        near = tl.where(mine, output, tl.program_id(0) * share).to(tl.int64)
        rows_at = first + near[:, None] * inputs + begin
        ask_for(rows_at, AHEAD)
        if GATED is not None:
            ask_for(rows_at + to_up, AHEAD)
    follow(OVERLAPS)
    if INPUTS_APART:  # the compiler stages only what is loaded where it is used
        values = input_tile(to_x, begin + k, end, known)
    for start in range(begin, end, BLOCK_INPUTS):
        if not INPUTS_APART:
            values = input_tile(to_x, start + k, end, known)
        tile = weight_tile(weight, start + k, end, mine)
        if INPUTS_APART:
            later = input_tile(to_x, start + BLOCK_INPUTS + k, end, known)
        # (outputs, rows) += (outputs, inputs) @ (inputs, rows)
        sums += product(tile, values, PRECISION)
        if GATED is not None:
            tile = weight_tile(weight + to_up, start + k, end, mine)
            ups += product(tile, values, PRECISION)
        if INPUTS_APART:
            values = later
    if low is not None:
        r = tl.arange(0, BLOCK_RANK)
        values = input_tile(low + row[None, :] * RANK, r, RANK, known)
        up += output.to(tl.int64)[:, None] * RANK
        sums += product(weight_tile(up, r, RANK, mine), values, PRECISION)
        ups += product(weight_tile(up + outputs * RANK, r, RANK, mine), values, PRECISION)
    y = sums.to(out.dtype.element_ty)
    if GATED is not None:
        y = gated_by(y, ups.to(y.dtype), GATED)
    at = out + (part.to(tl.int64) * rows + row)[None, :] * outputs + output[:, None]
    tl.store(at, y, mask=mine[:, None] & known[None, :])


@triton.jit
def ask_for(rows, chunks: tl.constexpr):
    """Prefetch the first chunks of rows into the L2 cache; rows (R, 1) are their beginnings."""
    at = rows.to(tl.int64) + tl.arange(0, chunks)[None, :] * CHUNK
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r", [at, CHUNK], dtype=tl.int32, is_pure=False, pack=1,
    )


@triton.jit
def input_tile(to_x, k, end, known):
    return tl.load(to_x + k[:, None], mask=(k < end)[:, None] & known[None, :], other=0.0)


@triton.jit
def weight_tile(weight, k, end, mine):
    """Load a tile that is read once a call, without evicting other values from the L2 cache."""
    mask = mine[:, None] & (k < end)[None, :]
    return tl.load(weight + k[None, :], mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    if PRECISION == "as given":
        return tl.dot(a, b)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)


@triton.jit
def mixed_product(a, b, PRECISION: tl.constexpr, MIXED: tl.constexpr):
    """Multiply an fp32 operand with one as given.

    MIXED `in two` splits the fp32 operand into a sum of two of the other's type, which keeps 16 of
    its 24 digits; one tf32 product is as fast and keeps 11.
    """
    if MIXED == "in two":
        if a.dtype == tl.float32:
            high, low = _in_two(a, b.dtype)
            return product(high, b, PRECISION) + product(low, b, PRECISION)
        else:
            high, low = _in_two(b, a.dtype)
            return product(a, high, PRECISION) + product(a, low, PRECISION)
    else:
        return product(a, b, MIXED)


@triton.jit
def _in_two(wide, dtype: tl.constexpr):
    high = wide.to(dtype)
    return high, (wide - high.to(tl.float32)).to(dtype)
