"""The product with a small head and the best of each program's tokens in one launch (Triton).

It joins `short.py`'s product and `sampling/top.py`'s choice, for a drafter that takes few tokens of
a head which all multiprocessors hold at once: a program computes the logits of its tokens, adds the
noise of rows that sample, and keeps the k best. A second launch, `top.py`'s, takes the k best of
those. The naive twin is `naive.draw_children`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree_kernels.contracts import Sampling, Scaled, Slots, Stream
from stree_kernels.launch import follow, load_kept, overlapping
from stree_kernels.pointwise import normed, with_parts
from stree_kernels.products import short as short_products
from stree_kernels.products.linear import precision_of
from stree_kernels.products.short import (
    MAX_ROWS_SHORT_PRODUCT,
    SPLIT,
    block_of,
    shares_of,
    short_product,
    tile_of,
)
from stree_kernels.sampling import top
from stree_kernels.sampling.uniforms import token_noise


def fits(x: Tensor | Stream, weight: Tensor, places: Tensor, values: Tensor | None) -> bool:
    """Return True if one product chooses, too: small head, few children, paths not rated."""
    few = places.shape[2] <= top.MAX_UNROLLED_NODES and values is None
    embeds = isinstance(x, Stream) and x.tokens is not None
    return few and not embeds and short_products.fits(x, weight)


def draw_children(
    x: Tensor | Stream, weight: Tensor | Scaled, depths: Tensor, sampling: Sampling | None,
    places: Tensor, tokens: Tensor, finite: Tensor, nodes: Tensor | None = None,
    values: Tensor | None = None, ids: Tensor | None = None, slots: Slots | None = None,
) -> Tensor:
    """Compute `naive.draw_children`, in two launches where it fits."""
    if isinstance(weight, Scaled) or not fits(x, weight, places, values):
        logits = short_products.linear(x, weight)
        top.choose_children(
            logits, depths, sampling, places, tokens, finite, nodes, values, ids, slots
        )
        return logits
    assert places.is_contiguous() and tokens.stride(1) == finite.stride(1) == 1
    if isinstance(x, Stream) and x.normed is not None:
        x = x.normed
    logits, best, candidates = _multiply(x, weight, depths, sampling, places.shape[2], ids)
    top.merge(
        best, candidates, sampling, places, tokens, None, finite.view(torch.uint8), places.shape[1]
    )
    return logits


def _multiply(
    x: Tensor | Stream, weight: Tensor, depths: Tensor, sampling: Sampling | None, count: int,
    ids: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits (B, n, K), and the `count` best scores and tokens of each row and program."""
    assert depths.is_contiguous() and (ids is None or ids.is_contiguous())
    (outputs, inputs), block_inputs = weight.shape, block_of(weight.shape[1])
    share, block_outputs, num_warps = shares_of(outputs, inputs, weight)
    stream = x if isinstance(x, Stream) else Stream(x)
    source, added, shape = stream.source, stream.added, stream.shape
    assert source.is_contiguous() and not isinstance(added, tuple)
    assert added is None or added.is_contiguous()
    rows, programs = math.prod(shape), triton.cdiv(outputs, share)
    logits = weight.new_empty(*shape, outputs)
    wide = torch.float32 if sampling is None else torch.float64
    best = weight.new_empty(rows, programs, count, dtype=wide)
    candidates = weight.new_empty(rows, programs, count, dtype=torch.int32)
    chosen_by: tuple[Tensor | None, ...] = (None, None, None)
    if sampling is not None:
        chosen_by = (sampling.temperature, sampling.seed, sampling.position)
    total = None if stream.is_sum else torch.empty_like(source)
    head_kernel[(programs,)](
        source, added, rows * inputs, stream.scale, total, weight, logits, ids, depths, *chosen_by,
        best, candidates, rows, shape[1], outputs, inputs, share, stream.eps,
        PARTS=0 if added is None else len(added), COUNT=count,
        BLOCK_ROWS=8 if rows <= 8 else MAX_ROWS_SHORT_PRODUCT,
        BLOCK_OUTPUTS=block_outputs, BLOCK_INPUTS=block_inputs,
        SPLIT=SPLIT if block_outputs < 64 else 1, PRECISION=precision_of(weight),
        num_warps=num_warps, **overlapping(weight),
    )
    if total is not None:
        stream.set_total(total)
    return logits, best, candidates


@triton.jit(do_not_specialize=["rows", "per_row"])
def head_kernel(
    source, added, part_stride, scale, total, weight, logits, ids,
    depths, temperatures, seeds, positions,
    best_values, candidates, rows, per_row, outputs, inputs, share, eps,
    PARTS: tl.constexpr, COUNT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr, OVERLAPS: tl.constexpr,
):
    output, mine, k, row, known, there, tile, _, factor = tile_of(
        weight, scale, rows, outputs, inputs, share, False, BLOCK_ROWS, BLOCK_OUTPUTS, BLOCK_INPUTS
    )
    token = output
    if ids is not None:
        token = tl.load(ids + output, mask=mine, other=0).to(tl.int32)
    follow(OVERLAPS)
    line = row[:, None] * inputs + k[None, :]
    x = load_kept(source + line, there)
    if PARTS > 0:
        x = with_parts(x, added + line, None, part_stride, there, PARTS, 0)
    if total is not None:
        total += line
        if tl.program_id(0) == 0:
            tl.store(total, x, mask=there)
    if scale is not None:
        x = normed(x.to(tl.float32), factor[None, :], inputs, eps, x.dtype)
    y = short_product(tile, x, SPLIT, PRECISION).to(logits.dtype.element_ty)
    line = row.to(tl.int64)[None, :] * outputs + output[:, None]
    tl.store(logits + line, y, mask=mine[:, None] & known[None, :])

    value, token = y.to(tl.float32), token[:, None] + row[None, :] * 0
    left = mine[:, None] & (row >= 0)[None, :]
    if temperatures is not None:
        sequence = row // per_row
        temperature = tl.load(temperatures + sequence, mask=known, other=0.0)[None, :]
        seed = tl.load(seeds + sequence, mask=known, other=0)[None, :]
        position = tl.load(positions + sequence, mask=known, other=0)
        position = (position + tl.load(depths + row, mask=known, other=0) + 1)[None, :]
        samples = temperature > 0.0
        value = value.to(tl.float64)
        noisy = value / tl.where(samples, temperature, 1.0) + token_noise(seed, position, token)
        value = tl.where(samples, noisy, value)
    # NaN would lose every comparison and hide: as the best of all it shows
    value = tl.where(value != value, float("inf"), value)
    value = tl.where(left, value, -float("inf"))
    at = (row * tl.num_programs(0) + tl.program_id(0)) * COUNT
    for rank in tl.static_range(COUNT):
        best = tl.max(value, axis=0)
        chosen = tl.min(tl.where((value == best[None, :]) & left, token, 2147483647), axis=0)
        tl.store(best_values + at + rank, best, mask=known)
        tl.store(candidates + at + rank, chosen, mask=known)
        left = left & (token != chosen[None, :])
        value = tl.where(left, value, -float("inf"))
