"""Matrix products of a tree's few rows with a small weight, with the norm before them (Triton).

A small model's products are not limited by the weight's arrival, but by launches and loads that
wait for one another. So in `short_kernel` a program reads its rows of the weight whole, before the
previous launch has ended: they are in its registers when the inputs come. The norm of the inputs,
and the sum, the embeddings or the gate before it, are no launches of their own: every program
computes them again. A sum over a row is computed in several parts at once, because each step of a
sum waits for the one before.

It serves up to `MAX_ROWS_SHORT_PRODUCT` rows; a row's result does not depend on the number of rows.
Weights that do not fit the registers of all multiprocessors at once are for `linear.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree_kernels import gather, pointwise
from stree_kernels.contracts import Gated, Scaled, Split, Stream
from stree_kernels.launch import follow, load_kept, overlapping, store_kept
from stree_kernels.pointwise import normed, silu_times, with_parts
from stree_kernels.products import linear as products
from stree_kernels.products import scaled
from stree_kernels.products import tiled as tiled_products
from stree_kernels.products.linear import device_of, precision_of, product
from stree_kernels.products.split import new_split, split

MAX_ROWS_SHORT_PRODUCT = 16
MAX_INPUTS_SHORT_PRODUCT = 1024  # numbers of a weight's row
TILE = 16384  # numbers of a weight that 4 warps keep
# Of 4 warps; of 8 it is one. 4 programs would fit, and sample slower.
PROGRAMS_PER_MULTIPROCESSOR = 2
SPLIT = 4  # parts of a sum


def linear(x: Tensor | Stream, weight: Tensor | Scaled) -> Tensor:
    """Compute `naive.linear` in one launch if it fits; a weight in 8 bits has its own kernel."""
    if isinstance(weight, Scaled):
        rows, halves = _split(x)
        return scaled.linear(rows, weight, halves)
    x = _as_normed(x)
    if fits(x, weight):
        return _product(x, weight)
    return products.linear(norm(x) if isinstance(x, Stream) else x, weight)


def linear_parts(x: Tensor | Gated, weight: Tensor | Scaled) -> Tensor:
    """Compute `naive.linear_parts`, in one part as `linear` if that fits."""
    if isinstance(weight, Tensor) and fits(x, weight):
        return _product(x, weight)[None]
    if isinstance(x, Gated):
        x = x.norm_by(pointwise.gated_rms_norm)
    if isinstance(weight, Scaled):
        return scaled.linear_parts(x, weight)
    return products.linear_parts(x, weight)


def linear_swiglu(x: Tensor | Stream, weight: Tensor | Scaled) -> Tensor:
    """Compute `naive.linear_swiglu` in one launch if it fits."""
    if isinstance(weight, Scaled):
        rows, halves = _split(x)
        return scaled.linear_swiglu(rows, weight, halves)
    x = _as_normed(x)
    if fits(x, weight, gated=True):
        return _product(x, weight, gated=True)
    rows = norm(x) if isinstance(x, Stream) else x
    if tiled_products.fits(rows, weight):
        return tiled_products.linear_swiglu(rows, weight)
    return products.linear_swiglu(rows, weight)


def norm(stream: Stream) -> Tensor:
    """Compute `naive.norm` in one launch."""
    return stream.norm_by(gather.embed_norm, pointwise.add_rms_norm)


def _split(x: Tensor | Stream) -> tuple[Tensor, Split | None]:
    """Return rows, a stream's norm, as they are and, if they are bf16, split."""
    if not isinstance(x, Stream):
        return x, None
    if x.split is None and x.source.dtype == torch.bfloat16:
        made = None
        if x.normed is None and x.tokens is None and x.scale is not None:
            made = new_split((*x.shape, len(x.scale)), x.source.device)
        x.norm_by(gather.embed_norm, partial(pointwise.add_rms_norm, split=made))
        x.split = made or split(norm(x))
    return norm(x), x.split


def _as_normed(x: Tensor | Stream) -> Tensor | Stream:
    """Return a stream's norm if it is computed, or needs a launch of its own; else the stream."""
    if isinstance(x, Stream) and (x.normed is not None or not x.is_plain):
        return norm(x)
    return x


def fits(x: Tensor | Stream | Gated, weight: Tensor, *, gated: bool = False) -> bool:
    outputs, inputs = weight.shape
    if isinstance(x, Stream) and not x.is_plain:
        return False
    if isinstance(x, Gated):
        group, x = inputs // x.groups, x.y
        if group != inputs and group != triton.next_power_of_2(group):
            return False
    rows = math.prod(x.shape) if isinstance(x, Stream) else x.numel() // inputs
    is_short = rows <= MAX_ROWS_SHORT_PRODUCT and inputs <= MAX_INPUTS_SHORT_PRODUCT
    if not is_short or weight.element_size() != 2:
        return False
    outputs //= 1 + gated
    *_, num_warps = shares_of(outputs, inputs, weight, gated)
    together = device_of(weight)[0] * (PROGRAMS_PER_MULTIPROCESSOR if num_warps == 4 else 1)
    whole = weight.is_contiguous() and (isinstance(x, Stream) or _has_even_rows(x))
    return whole and 1 < outputs <= TILE // block_of(inputs) * together


def shares_of(
    outputs: int, inputs: int, weight: Tensor, gated: bool = False
) -> tuple[int, int, int]:
    """Return the outputs per program, the block size they belong to, and the warps."""
    most = TILE // block_of(inputs)
    share = min(triton.cdiv(outputs, device_of(weight)[0]), most)
    block_outputs = max(16, triton.next_power_of_2(share))
    return share, block_outputs, 4 if block_outputs * block_of(inputs) * (1 + gated) <= TILE else 8


def _has_even_rows(x: Tensor) -> bool:
    """Return True for rows (…, D) that lie one after the other, be it with gaps between them."""
    steps = zip(x.stride()[:-2], x.shape[1:-1], x.stride()[1:-1], strict=True)
    return x.stride(-1) == 1 and all(outer == size * inner for outer, size, inner in steps)


def _product(x: Tensor | Stream | Gated, weight: Tensor, *, gated: bool = False) -> Tensor:
    outputs, inputs = weight.shape[0] // (1 + gated), weight.shape[1]
    block_inputs = block_of(inputs)
    share, block_outputs, num_warps = shares_of(outputs, inputs, weight, gated)
    shape: Sequence[int]
    gate, group = None, block_inputs
    if isinstance(x, Stream):
        stream, shape = x, x.shape
    elif isinstance(x, Gated):
        stream, shape = Stream(x.y.view(1, -1, inputs), x.scale, x.eps), x.y.shape[:-1]
        gate = x.gate.flatten(0, -2)
        if x.groups > 1:
            group = inputs // x.groups
    else:
        stream, shape = Stream(x.view(1, -1, inputs)), x.shape[:-1]
    source, tokens, nodes, added = stream.source, stream.tokens, stream.nodes, stream.added
    total = None if stream.is_sum else source.new_empty(*shape, inputs)
    assert source.stride(-1) == 1 and not isinstance(added, tuple)
    assert added is None or added.stride(3) == 1
    assert gate is None or gate.stride(1) == 1
    rows, out = math.prod(shape), weight.new_empty(*shape, outputs)
    short_kernel[(triton.cdiv(outputs, share),)](
        source, source.stride(-2), added, *((0, 0, 0) if added is None else added.stride()[:3]),
        stream.scale, gate, 0 if gate is None else gate.stride(0), total,
        tokens, 0 if tokens is None else tokens.stride(0),
        nodes, 0 if nodes is None else nodes.stride(0),
        weight, out, rows, stream.shape[1], outputs, inputs, share, stream.eps,
        PARTS=0 if added is None else len(added), WRITTEN=stream.written, GATED=gated, GROUP=group,
        BLOCK_ROWS=8 if rows <= 8 else MAX_ROWS_SHORT_PRODUCT,
        BLOCK_OUTPUTS=block_outputs, BLOCK_INPUTS=block_inputs,
        SPLIT=SPLIT if block_outputs < 64 else 1, PRECISION=precision_of(weight),
        num_warps=num_warps,
        **overlapping(weight),
    )
    if total is not None:
        stream.set_total(total)
    return out


def block_of(inputs: int) -> int:
    """Return the block of a row, at least 128, so that 8 rows are added up in the order of 16."""
    return max(128, triton.next_power_of_2(inputs))


@triton.jit(do_not_specialize=["rows", "per_row"])
def short_kernel(
    source, source_stride, added, part_stride, sequence_stride, place_stride,
    scale, gate, gate_stride, total, tokens, token_stride, nodes, node_stride,
    weight, out, rows, per_row, outputs, inputs, share, eps,
    PARTS: tl.constexpr, WRITTEN: tl.constexpr, GATED: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr, OVERLAPS: tl.constexpr,
):
    output, mine, k, row, known, there, tile, up_tile, factor = tile_of(
        weight, scale, rows, outputs, inputs, share, GATED, BLOCK_ROWS, BLOCK_OUTPUTS, BLOCK_INPUTS
    )
    sequence, place = (row // per_row).to(tl.int64), row % per_row
    line = row.to(tl.int64)
    if WRITTEN:
        follow(OVERLAPS)
    if tokens is not None:
        node = place
        if nodes is not None:
            node = tl.maximum(tl.load(nodes + sequence * node_stride + place, known, other=0), 0)
    if not WRITTEN:
        follow(OVERLAPS)
    if tokens is not None:
        line = tl.load(tokens + sequence * token_stride + node, mask=known, other=0)
    values = load_kept(source + line[:, None] * source_stride + k[None, :], there)
    if PARTS > 0:
        added += sequence[:, None] * sequence_stride + place[:, None] * place_stride + k[None, :]
        values = with_parts(values, added, None, part_stride, there, PARTS, 0)
    if total is not None:
        total += row[:, None] * inputs + k[None, :]
        if tl.program_id(0) == 0:
            store_kept(total, values, there)
    if scale is not None:
        wide = values.to(tl.float32)
        if gate is not None:
            z = tl.load(gate + line[:, None] * gate_stride + k[None, :], mask=there, other=0.0)
            wide *= z.to(tl.float32) * tl.sigmoid(z.to(tl.float32))
        if GROUP == BLOCK_INPUTS:
            values = normed(wide, factor[None, :], inputs, eps, values.dtype)
        else:
            groups: tl.constexpr = BLOCK_INPUTS // GROUP
            wide = tl.reshape(wide, [BLOCK_ROWS, groups, GROUP])
            wide *= tl.rsqrt(tl.sum(wide * wide, axis=2) / GROUP + eps)[:, :, None]
            wide = tl.reshape(wide, [BLOCK_ROWS, BLOCK_INPUTS]).to(values.dtype).to(tl.float32)
            values = (factor.to(tl.float32)[None, :] * wide).to(values.dtype)
    y = short_product(tile, values, SPLIT, PRECISION).to(out.dtype.element_ty)
    if GATED:
        y = silu_times(y, short_product(up_tile, values, SPLIT, PRECISION).to(y.dtype))
    at = out + row[None, :] * outputs + output[:, None]
    tl.store(at, y, mask=mine[:, None] & known[None, :])


@triton.jit
def tile_of(
    weight, scale, rows, outputs, inputs, share, GATED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
):
    """Load the weight's tile and all else that a program needs before its inputs are ready.

    Returns nine blocks: the indices of the program's outputs and their mask; the indices of the
    inputs; the indices of the rows and their mask; the mask of (row, input) pairs; the weight's
    tile, the up projection's tile (GATED only, else the weight's again), and the norm's scale.
    """
    at = tl.arange(0, BLOCK_OUTPUTS)
    output = tl.program_id(0) * share + at
    mine = (at < share) & (output < outputs)
    k = tl.arange(0, BLOCK_INPUTS)
    in_k = k < inputs
    row = tl.arange(0, BLOCK_ROWS)
    known = row < rows
    there = known[:, None] & in_k[None, :]
    weight += output.to(tl.int64)[:, None] * inputs + k[None, :]
    in_tile = mine[:, None] & in_k[None, :]
    tile = tl.load(weight, mask=in_tile, other=0.0)
    up_tile, factor = tile, tile  # for where there are none: Triton 3.6 returns no None
    if GATED:
        up_tile = tl.load(weight + outputs.to(tl.int64) * inputs, mask=in_tile, other=0.0)
    if scale is not None:
        factor = load_kept(scale + k, in_k)
    return output, mine, k, row, known, there, tile, up_tile, factor


@triton.jit
def short_product(tile, values, SPLIT: tl.constexpr, PRECISION: tl.constexpr):
    """Multiply (outputs, inputs) and (rows, inputs) to (outputs, rows)."""
    if SPLIT == 1:
        return product(tile, tl.trans(values), PRECISION)
    else:
        shape: tl.constexpr = tile.shape[1] // SPLIT
        left = tl.permute(tl.reshape(tile, [tile.shape[0], SPLIT, shape]), 1, 0, 2)
        right = tl.permute(tl.reshape(values, [values.shape[0], SPLIT, shape]), 1, 2, 0)
        return tl.sum(product(left, right, PRECISION), axis=0)
