"""Matrix products of some rows with a weight in 8 bits, scaled in fp32 (Triton).

Weights are converted in registers to the type of the inputs, which is exact for e4m3; sums are
fp32, and a scale multiplies the sum over its inputs. Converting takes a multiprocessor about as
long as the weights take to arrive, and a warp that waits for weights converts none. So several
programs of few warps share a multiprocessor, each with its own tiles on the way, and each warp has
outputs of its own: two that share outputs would convert the same weights twice.

A program has an equal share of the outputs, and of the inputs if the norm that follows adds up the
parts (`linear_parts`). `scaled_kernel` goes through the share tile by tile, in one loop over all
tiles and all inputs of each: the weights of the next tile arrive while this one is written. A share
is one range of memory, read once from end to end. The inputs are read again with each tile, from
the L2 cache.

Beyond `MAX_ROWS`, as in a prompt, the weight is written out in the type of the inputs first. Up to
`MAX_ROWS_ALIKE` rows, a row's result does not depend on the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from stree_kernels.contracts import Scaled
from stree_kernels.launch import follow, overlapping
from stree_kernels.pointwise import activated, silu_times
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
    """Tiling of a share.

    Attributes:
        outputs: Of a tile, at most.
        inputs: Of a tile, at most.
        stages: Tiles in flight, if they fit.
        warps: Of a program.
        together: Programs of a multiprocessor.
        parts: Parts of a sum over the inputs, if it may have several.
    """

    outputs: int
    inputs: int
    stages: int
    warps: int
    together: int
    parts: int = 1


MAX_ROWS_ALIKE = 16  # rows
MAX_ROWS = 64  # by tiles; more are multiplied in the inputs' own type
MAX_WRITTEN_OUT = 32768  # outputs of a weight that are written out at a time
WRITTEN_OUT = (8, 1024)  # outputs and inputs of a program that does it
MIN_GROUP = 16  # inputs of a scale, and so of a step
OTHER_BYTES = 16 * 1024  # of shared memory, that a program has beside its stages, at most
PREFETCHED_BYTES = 32768  # of its share that a program asks for before it waits for inputs


def tiling_of(outputs: int, multiprocessors: int, rows: int, kind: str) -> Tiling:
    """Return the tiling of a product; kind is "linear", "parts" or "swiglu".

    Chosen by time on an H200 with the weights of an 8B model, but for the parts of 17 to 64 rows.
    """
    if rows > MAX_ROWS_ALIKE:
        return Tiling(128, 128, 4, 8, 1) if kind == "linear" else Tiling(64, 128, 4, 4, 2, 4)
    if kind == "parts":
        return Tiling(32, 128, 5, 2, 4, 4)
    if kind == "swiglu":
        return Tiling(32, 256, 3, 2, 4)
    small = outputs <= 2 * 32 * multiprocessors  # one tile for each of two programs
    return Tiling(32, 256, 6, 2, 2) if small else Tiling(64, 128, 4, 2, 4)


def linear(x: Tensor, weight: Scaled) -> Tensor:
    """Compute `naive.linear` by a weight in 8 bits."""
    x = x.contiguous()
    if _fits(x, weight, MAX_ROWS):
        return _by_tiles(x, weight, "linear")
    pieces = zip(
        weight.values.split(MAX_WRITTEN_OUT), weight.scale.split(MAX_WRITTEN_OUT), strict=True
    )
    ys = [F.linear(x, written_out(Scaled(*piece), x.dtype)) for piece in pieces]
    return ys[0] if len(ys) == 1 else torch.cat(ys, dim=-1)


def written_out(weight: Scaled, dtype: torch.dtype) -> Tensor:
    """Compute `naive.dequantised` in one launch."""
    values, scale = weight.values, weight.scale
    assert values.stride(1) == 1 and (scale.shape[1] == 1 or scale.stride(1) == 1)
    out = torch.empty(weight.shape, dtype=dtype, device=values.device)
    outputs, inputs = weight.shape
    grid = triton.cdiv(outputs, WRITTEN_OUT[0]), triton.cdiv(inputs, WRITTEN_OUT[1])
    write_out_kernel[grid](
        values, values.stride(0), scale, scale.stride(0), out, outputs, inputs,
        GROUP=weight.group, BLOCK_OUTPUTS=WRITTEN_OUT[0], BLOCK_INPUTS=WRITTEN_OUT[1], num_warps=4,
    )
    return out


def linear_parts(x: Tensor, weight: Scaled) -> Tensor:
    """Compute `naive.linear_parts`, in several parts for few rows."""
    x = x.contiguous()
    if _fits(x, weight, MAX_ROWS):
        return _by_tiles(x, weight, "parts")
    return linear(x, weight)[None]


def linear_swiglu(x: Tensor, weight: Scaled) -> Tensor:
    """Compute `naive.linear_swiglu`, in one launch if rows are few."""
    x = x.contiguous()
    if _fits(x, weight, MAX_ROWS):
        return _by_tiles(x, weight, "swiglu")
    return activated(linear(x, weight), "swiglu")


def _fits(x: Tensor, weight: Scaled, most_rows: int) -> bool:
    assert x.shape[-1] == weight.shape[1]
    in_order = weight.values.is_contiguous() and weight.scale.is_contiguous()
    return x.numel() <= most_rows * x.shape[-1] and in_order and _step_of(weight) >= MIN_GROUP


def _step_of(weight: Scaled) -> int:
    """Return the most inputs, a power of two, by which steps over the inputs keep to one scale."""
    return 4096 if weight.scale.shape[1] == 1 else weight.group & -weight.group


def _by_tiles(x: Tensor, weight: Scaled, kind: str) -> Tensor:
    """Compute a product; `kind` as for `tiling_of`, of which parts come as (S, …, E)."""
    values, groups, inputs = weight.values, weight.scale.shape[1], x.shape[-1]
    gated = kind == "swiglu"
    outputs, rows = len(values) // (1 + gated), x.numel() // inputs
    multiprocessors, shared_bytes = device_of(x)
    tiling = tiling_of(outputs, multiprocessors, rows, kind)
    block_inputs = min(tiling.inputs, _step_of(weight), max(32, triton.next_power_of_2(inputs)))
    by_one_warp = outputs <= 16 * tiling.together * multiprocessors
    if gated and by_one_warp and rows > MAX_ROWS_ALIKE:
        block_inputs = min(block_inputs, 64)  # or the two sums spill registers
    num_blocks = triton.cdiv(inputs, block_inputs)
    parts = min(tiling.parts, num_blocks) if kind == "parts" else 1
    steps = triton.cdiv(num_blocks, parts)
    parts = triton.cdiv(num_blocks, steps)
    if parts > 1:
        out = x.new_empty(parts, *x.shape[:-1], outputs, dtype=torch.float32)
    else:
        out = x.new_empty(*([1] if kind == "parts" else []), *x.shape[:-1], outputs)
    most = max(1, tiling.together * multiprocessors // parts)  # programs at once, of a part
    room = min(STAGE_BYTES, shared_bytes - OTHER_BYTES) // tiling.together
    block_outputs = triton.next_power_of_2(triton.cdiv(outputs, most))
    block_outputs = min(tiling.outputs, max(16, block_outputs))
    share = triton.cdiv(outputs, min(most, triton.cdiv(outputs, block_outputs)))
    block_rows = max(8, triton.next_power_of_2(rows))
    stage = block_inputs * (block_outputs * (1 + gated) + block_rows * x.element_size())
    aligned = inputs % 16 == 0 and values.data_ptr() % 16 == 0  # as asking needs it
    asks = aligned and outputs * inputs >= CHUNK.value and parts == 1
    grid = triton.cdiv(outputs, share), parts
    scaled_kernel[grid](
        x, values, weight.scale, out, rows, outputs, inputs, groups, share, steps * block_inputs,
        STEPS=steps, AHEAD=PREFETCHED_BYTES // CHUNK.value if asks else 0,
        GROUP=inputs // groups if groups > 1 else None, GATED=gated, ONE=share <= block_outputs,
        EVEN=inputs == parts * steps * block_inputs,
        BITWISE=x.is_cuda and x.dtype == torch.bfloat16, PRECISION=precision_of(x),
        BLOCK_ROWS=block_rows, BLOCK_OUTPUTS=block_outputs, BLOCK_INPUTS=block_inputs,
        num_stages=max(1, min(tiling.stages, 1 + room // stage)),
        num_warps=min(tiling.warps, max(1, block_outputs // 16)), **overlapping(x),
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def scaled_kernel(
    x, weight, scale, out, rows, outputs, inputs, groups, share, span,
    STEPS: tl.constexpr, AHEAD: tl.constexpr, GROUP: tl.constexpr, GATED: tl.constexpr,
    ONE: tl.constexpr, EVEN: tl.constexpr, BITWISE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAPS: tl.constexpr,
):
    row = tl.arange(0, BLOCK_ROWS)
    known = row < rows
    begin = tl.program_id(0) * share
    end = tl.minimum(begin + share, outputs)
    base = tl.program_id(1) * span  # the part's first input
    at, k = tl.arange(0, BLOCK_OUTPUTS), tl.arange(0, BLOCK_INPUTS)
    to_up = outputs.to(tl.int64) * inputs
    if OVERLAPS and AHEAD > 0:
        near = begin.to(tl.int64) * inputs + tl.arange(0, AHEAD) * CHUNK
        there = tl.minimum(near, outputs.to(tl.int64) * inputs - CHUNK)
        ask_for((weight + there)[:, None], 1)
        if GATED:
            ask_for((weight + to_up + there)[:, None], 1)
    scale += at * groups
    up_scale = scale + outputs * groups
    factor, up_factor = 0.0, 0.0
    if GROUP is not None:
        factor = scales_of(scale + begin * groups + base // GROUP, at < end - begin)
        if GATED:
            up_factor = scales_of(up_scale + begin * groups + base // GROUP, at < end - begin)
    follow(OVERLAPS)
    to_x = x + row.to(tl.int64)[None, :] * inputs + (base + k)[:, None]
    in_tile = at[:, None] * inputs + (base + k)[None, :]
    sums = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], dtype=tl.float32)
    ups = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], dtype=tl.float32)
    out += tl.program_id(1).to(tl.int64) * rows * outputs
    for step in range(STEPS if ONE else tl.cdiv(end - begin, BLOCK_OUTPUTS) * STEPS):
        start, first = step * BLOCK_INPUTS, begin
        if not ONE:
            start = step % STEPS * BLOCK_INPUTS
            first = begin + step // STEPS * BLOCK_OUTPUTS
        mine = at < end - first
        given, wanted = known[None, :], mine[:, None]
        if not EVEN:
            in_k = base + start + k < inputs
            given, wanted = given & in_k[:, None], wanted & in_k[None, :]
        values = tl.load(to_x + start, mask=given, other=0.0)
        to_tile = weight + (first.to(tl.int64) * inputs + start) + in_tile
        if not ONE:
            sums = tl.where(start == 0, 0.0, sums)
            if GATED:
                ups = tl.where(start == 0, 0.0, ups)
        tile = tl.load(to_tile, mask=wanted, other=0.0, eviction_policy="evict_first")
        # (outputs, rows) += (outputs, inputs) @ (inputs, rows)
        term = product(numbers_of(tile, values.dtype, BITWISE), values, PRECISION)
        if GROUP is not None:
            term *= factor
        sums += term
        if GATED:
            tile = tl.load(to_tile + to_up, mask=wanted, other=0.0, eviction_policy="evict_first")
            term = product(numbers_of(tile, values.dtype, BITWISE), values, PRECISION)
            if GROUP is not None:
                term *= up_factor
            ups += term
        if GROUP is not None:  # the next step's scales, which arrive meanwhile
            later, at_group = begin, (base + (step + 1) * BLOCK_INPUTS) // GROUP
            if not ONE:
                later = begin + (step + 1) // STEPS * BLOCK_OUTPUTS
                at_group = (base + (step + 1) % STEPS * BLOCK_INPUTS) // GROUP
            to_scale = later * groups + tl.minimum(at_group, groups - 1)
            factor = scales_of(scale + to_scale, at < end - later)
            if GATED:
                up_factor = scales_of(up_scale + to_scale, at < end - later)
        if not ONE:  # noqa: SIM102 (known to the compiler)
            if start + BLOCK_INPUTS >= STEPS * BLOCK_INPUTS:
                y = finished(sums, ups, scale, up_scale, first, groups, mine, out, GROUP, GATED)
                to_out = out + row.to(tl.int64)[None, :] * outputs + (first + at)[:, None]
                tl.store(to_out, y, mask=mine[:, None] & known[None, :])
    if ONE:
        mine = at < end - begin
        y = finished(sums, ups, scale, up_scale, begin, groups, mine, out, GROUP, GATED)
        to_out = out + row.to(tl.int64)[None, :] * outputs + (begin + at)[:, None]
        tl.store(to_out, y, mask=mine[:, None] & known[None, :])


@triton.jit
def write_out_kernel(
    values, stride, scale, scale_stride, out, outputs, inputs,
    GROUP: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
):
    output = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)[:, None].to(tl.int64)
    k = tl.program_id(1) * BLOCK_INPUTS + tl.arange(0, BLOCK_INPUTS)[None, :]
    there = (output < outputs) & (k < inputs)
    tile = tl.load(values + output * stride + k, mask=there, other=0.0)
    factor = tl.load(scale + output * scale_stride + k // GROUP, mask=there, other=0.0)
    y = tile.to(tl.float16).to(tl.float32) * factor
    tl.store(out + output * inputs + k, y.to(out.dtype.element_ty), mask=there)


@triton.jit
def finished(
    sums, ups, scale, up_scale, first, groups, mine, out, GROUP: tl.constexpr, GATED: tl.constexpr
):
    """Return the outputs of a tile: sums that are scaled, and SwiGLU of gate and up."""
    if GROUP is None:
        sums *= scales_of(scale + first * groups, mine)
        if GATED:
            ups *= scales_of(up_scale + first * groups, mine)
    y = sums.to(out.dtype.element_ty)
    if GATED:
        y = silu_times(y, ups.to(y.dtype))
    return y


@triton.jit
def scales_of(scale, mine):
    return tl.load(scale, mask=mine, other=0.0)[:, None]


@triton.jit
def numbers_of(tile, dtype: tl.constexpr, BITWISE: tl.constexpr):
    """Return a tile of e4m3 numbers in the type of the inputs, exactly.

    BITWISE moves exponent and mantissa to their places in bf16 and multiplies by 2^120, which is
    the difference of the exponents' biases; what is not a number becomes 480, and is left to its
    row's scale. Else it goes through fp32: from fp16 to bf16 in one step takes four times as long.
    """
    if BITWISE:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high, a, b, sign, bias, zero;
            mov.b32 sign, 0x80008000;
            mov.b32 bias, 0x7b807b80;
            prmt.b32 low, $2, 0, 0x1404;
            prmt.b32 high, $2, 0, 0x3424;
            shr.u32 a, low, 4;
            shr.u32 b, high, 4;
            and.b32 a, a, 0x07f007f0;
            and.b32 b, b, 0x07f007f0;
            lop3.b32 a, low, sign, a, 0xea;
            lop3.b32 b, high, sign, b, 0xea;
            fma.rn.bf16x2 $0, a, bias, sign;
            fma.rn.bf16x2 $1, b, bias, sign;
            }
            """,
            "=r,=r,r", [tile], dtype=tl.bfloat16, is_pure=True, pack=4,
        )
    else:
        return tile.to(tl.float16).to(tl.float32).to(dtype)
