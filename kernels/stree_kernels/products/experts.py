"""Mixture of MLPs, of which each token chooses a few, in three launches (Triton).

Each chosen expert's weights are read once. In `route_kernel` a program chooses a token's experts.
In `up_kernel` each program lists those that any token has chosen, and serves one of them and some
of its inner values, for all rows: a tensor core multiplies 16 rows in the time of one, so that rows
which have not chosen the expert cost nothing, and are filled with zeros. In `down_kernel` a program
adds up some outputs over a share of the list; the norm that follows adds up the shares. The naive
twins are in `naive/mixture.py`.

Weights in 8 bits are converted to the rows' type in registers, which is exact, and products of
their tiles are scaled. Splitting rows into two in e4m3, as `scaled.py` does, would take another
launch before each of the two products, or be done again by each program that reads the rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree_kernels import naive
from stree_kernels.contracts import Router, Scaled
from stree_kernels.launch import follow, overlapping
from stree_kernels.pointwise import silu_times
from stree_kernels.products.linear import input_tile, precision_of, product, weight_tile

MAX_ROWS = 64  # of a launch; more are left to batched products over all experts, or go in pieces
MIN_GROUP = 32  # inputs of a scale, and so of a step
KINDS = ("swiglu", "relu2")


class Tiling(NamedTuple):
    """Tiling of a program's weights: outputs and inputs of a tile, tiles in flight, warps."""

    outputs: int
    inputs: int
    stages: int
    warps: int


# Chosen by time on an H200: 512 experts, 10 a token, rows of 2,048 and inner rows of 512 numbers
UP, UP_IN_8_BITS = Tiling(32, 128, 3, 4), Tiling(64, 128, 3, 4)
DOWN = Tiling(64, 128, 4, 4)
MAX_SHARES = 16  # of the list of chosen experts


def choose_experts(
    logits: Tensor, correction: Tensor | None, router: Router
) -> tuple[Tensor, Tensor]:
    """Compute `naive.choose_experts` in one launch, except for groups; the first of equals wins.

    logits are in fp32, contiguous.
    """
    if router.top_groups < router.groups:
        return naive.choose_experts(logits, correction, router)
    assert logits.is_contiguous() and logits.dtype == torch.float32
    count, num_experts = logits.shape
    weights = logits.new_empty(count, router.top)
    chosen = torch.empty(count, router.top, dtype=torch.long, device=logits.device)
    route_kernel[(count,)](
        logits, correction, weights, chosen, num_experts, router.scale, router.floor,
        TOP=router.top, SOFTMAX=router.softmax, NORMALISED=router.normalised,
        BLOCK_E=triton.next_power_of_2(num_experts), BLOCK_K=triton.next_power_of_2(router.top),
        num_warps=1 if num_experts <= 128 else 4, **overlapping(logits),
    )
    return weights, chosen


def experts(
    rows: Tensor, weights: Tensor, chosen: Tensor, up: Tensor | Scaled, down: Tensor | Scaled,
    kind: str,
) -> Tensor:
    """Compute `naive.experts`; rows, weights, chosen, up and down contiguous. Parts in fp32.

    More than `MAX_ROWS` rows go in pieces where a weight is in 8 bits, so that none is written out.
    """
    (count, width), (num_experts, _, inner), top = rows.shape, down.shape, chosen.shape[1]
    assert up.shape[0] == num_experts and up.shape[2] == down.shape[1] == width
    in_8_bits = isinstance(up, Scaled) or isinstance(down, Scaled)
    tiling = UP_IN_8_BITS if isinstance(up, Scaled) else UP
    steps = _step_of(up, tiling), _step_of(down, DOWN)
    if kind not in KINDS or min(steps) < MIN_GROUP or (count > MAX_ROWS and not in_8_bits):
        return naive.experts(rows, weights, chosen, up, down, kind)
    if count > MAX_ROWS:
        pieces = (each.split(MAX_ROWS) for each in (rows, weights, chosen))
        of_pieces = [experts(r, w, c, up, down, kind) for r, w, c in zip(*pieces, strict=True)]
        return torch.cat([each.sum(0) for each in of_pieces])[None]
    up_values, up_scale, up_group = _held(up)
    down_values, down_scale, down_group = _held(down)
    given = (rows, weights, chosen, up_values, up_scale, down_values, down_scale)
    assert all(each is None or each.is_contiguous() for each in given)
    most = min(num_experts, count * top)  # experts that can be on the list
    listed = torch.empty(1 + num_experts, dtype=torch.int32, device=rows.device)
    block_rows = max(16, triton.next_power_of_2(count))
    hidden = rows.new_empty(most, count, inner)
    fewer = int(rows.element_size() == 4)  # stages, of tiles that are twice as large
    up_kernel[(triton.cdiv(inner, tiling.outputs), most)](
        rows, weights, chosen, up_values, up_scale, hidden, listed,
        count, top, width, inner, GATED=kind == "swiglu", GROUP=up_group,
        BLOCK_E=triton.next_power_of_2(num_experts), BLOCK_K=triton.next_power_of_2(top),
        BLOCK_ROWS=block_rows, BLOCK_OUTPUTS=tiling.outputs, BLOCK_INPUTS=steps[0],
        PRECISION=precision_of(rows), num_warps=tiling.warps, num_stages=tiling.stages - fewer,
        **overlapping(rows),
    )
    shares = min(MAX_SHARES, most)
    parts = rows.new_empty(shares, count, width, dtype=torch.float32)
    down_kernel[(triton.cdiv(width, DOWN.outputs), shares)](
        hidden, down_values, down_scale, parts, listed, count, width, inner, shares,
        GROUP=down_group, BLOCK_ROWS=block_rows, BLOCK_OUTPUTS=DOWN.outputs, BLOCK_INPUTS=steps[1],
        PRECISION=precision_of(rows), num_warps=DOWN.warps, num_stages=DOWN.stages - fewer,
        **overlapping(rows),
    )
    return parts


def _held(weight: Tensor | Scaled) -> tuple[Tensor, Tensor | None, int | None]:
    """Return a weight's numbers and, in 8 bits, its scales and the inputs of a scale."""
    if isinstance(weight, Tensor):
        return weight, None, None
    return weight.values, weight.scale, weight.group


def _step_of(weight: Tensor | Scaled, tiling: Tiling) -> int:
    """Return the inputs of a step, which keeps to one scale."""
    if isinstance(weight, Tensor) or weight.scale.shape[-1] == 1:
        return tiling.inputs
    return min(tiling.inputs, weight.group & -weight.group)


@triton.jit
def route_kernel(
    logits, correction, weights, chosen, num_experts, scale, floor,
    TOP: tl.constexpr, SOFTMAX: tl.constexpr, NORMALISED: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0)
    expert = tl.arange(0, BLOCK_E)
    rank = tl.arange(0, BLOCK_K)
    known = expert < num_experts
    follow(OVERLAPS)
    score = tl.load(logits + row * num_experts + expert, mask=known, other=-float("inf"))
    by = score
    if not SOFTMAX:
        score = tl.sigmoid(score)
        by = score + tl.load(correction + expert, mask=known, other=0.0).to(tl.float32)
        by = tl.where(known, by, -float("inf"))
    top = tl.max(score, axis=0)
    total = tl.sum(tl.exp(score - top), axis=0)  # of a softmax over all
    best = tl.full([BLOCK_K], -float("inf"), dtype=tl.float32)
    place = tl.zeros([BLOCK_K], dtype=tl.int32)
    for k in range(TOP):
        found = tl.min(tl.where(by == tl.max(by, axis=0), expert, num_experts - 1), axis=0)
        value = tl.sum(tl.where(expert == found, score, 0.0), axis=0)
        best = tl.where(rank == k, value, best)
        place = tl.where(rank == k, found, place)
        by = tl.where(expert == found, -float("inf"), by)
    if SOFTMAX:
        if NORMALISED:
            total = tl.sum(tl.exp(best - top), axis=0)
        weight = tl.exp(best - top) / total
    else:
        weight = best
        if NORMALISED:
            weight /= tl.sum(tl.where(rank < TOP, best, 0.0), axis=0) + floor
    at = row * TOP + rank
    tl.store(weights + at, weight * scale, mask=rank < TOP)
    tl.store(chosen + at, place.to(tl.int64), mask=rank < TOP)


@triton.jit
def _listed(chosen, num_chosen, number, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr):
    """Count the experts that any row has chosen, and return the one numbered `number`.

    A histogram counts them, but for the few of one token, which comparisons find sooner.
    """
    expert = tl.arange(0, BLOCK_E)
    if num_chosen <= BLOCK_K:
        rank = tl.arange(0, BLOCK_K)
        few = tl.load(chosen + rank, mask=rank < num_chosen, other=-1)
        wanted = tl.max((few[:, None] == expert[None, :]).to(tl.int32), axis=0)
    else:
        wanted = tl.zeros([BLOCK_E], dtype=tl.int32)
        for start in range(0, num_chosen, 1024):
            place = start + tl.arange(0, 1024)
            many = tl.load(chosen + place, mask=place < num_chosen, other=0).to(tl.int32)
            wanted += tl.histogram(many, BLOCK_E, mask=place < num_chosen)
        wanted = (wanted > 0).to(tl.int32)
    here = (tl.cumsum(wanted, axis=0) == number + 1) & (wanted > 0)
    return tl.sum(wanted, axis=0), tl.sum(tl.where(here, expert, 0), axis=0).to(tl.int64)


@triton.jit(do_not_specialize=["count", "top"])
def up_kernel(
    rows, weights, chosen, up, up_scale, hidden, listed, count, top, width, inner,
    GATED: tl.constexpr, GROUP: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAPS: tl.constexpr,
):
    output = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    number = tl.program_id(1)
    row = tl.arange(0, BLOCK_ROWS)
    k = tl.arange(0, BLOCK_INPUTS)
    known, mine = row < count, output < inner
    dtype = hidden.dtype.element_ty
    follow(OVERLAPS)
    num_listed, expert = _listed(chosen, count * top, number, BLOCK_E, BLOCK_K)
    if tl.program_id(0) == 0:  # for the next launch
        tl.store(listed + 1 + number, expert.to(tl.int32), mask=number < num_listed)
        tl.store(listed, num_listed, mask=number == 0)
    if number < num_listed:
        scale = tl.zeros([BLOCK_ROWS], dtype=tl.float32)
        wanted = tl.zeros([BLOCK_ROWS], dtype=tl.int32)
        for rank in range(top):
            hit = tl.load(chosen + row * top + rank, mask=known, other=-1) == expert
            share = tl.load(weights + row * top + rank, mask=known & hit, other=0.0)
            scale += share.to(dtype).to(tl.float32)
            wanted = tl.maximum(wanted, hit.to(tl.int32))
        place = (expert * 2 if GATED else expert) * inner + output
        to_row = rows + row[None, :] * width
        sums = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], dtype=tl.float32)
        others = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], dtype=tl.float32)
        for start in range(0, width, BLOCK_INPUTS):
            values = input_tile(to_row, start + k, width, known)
            sums += _term(up, up_scale, place, start, k, width, mine, values, GROUP, PRECISION)
            if GATED:
                others += _term(
                    up, up_scale, place + inner, start, k, width, mine, values, GROUP, PRECISION
                )
        y = sums.to(dtype)
        if GATED:
            y = silu_times(y, others.to(dtype))
        else:
            positive = tl.maximum(y.to(tl.float32), 0.0)
            y = (positive * positive).to(dtype)
        y = (y.to(tl.float32) * scale[None, :]).to(dtype)
        # Filled, not multiplied: rows that have not chosen the expert may hold anything
        y = tl.where(wanted[None, :] > 0, y, 0.0)
        at = hidden + (number * count + row)[None, :] * inner + output[:, None]
        tl.store(at, y, mask=mine[:, None] & known[None, :])


@triton.jit(do_not_specialize=["count", "shares"])
def down_kernel(
    hidden, down, down_scale, parts, listed, count, width, inner, shares, GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAPS: tl.constexpr,
):
    output = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    share = tl.program_id(1)
    row = tl.arange(0, BLOCK_ROWS)
    k = tl.arange(0, BLOCK_INPUTS)
    known, mine = row < count, output < width
    follow(OVERLAPS)
    sums = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], dtype=tl.float32)
    for number in range(share, tl.load(listed), shares):
        expert = tl.load(listed + 1 + number).to(tl.int64)
        place = expert * width + output
        to_row = hidden + (number * count + row)[None, :] * inner
        for start in range(0, inner, BLOCK_INPUTS):
            values = input_tile(to_row, start + k, inner, known)
            sums += _term(down, down_scale, place, start, k, inner, mine, values, GROUP, PRECISION)
    at = parts + (share * count + row)[None, :] * width + output[:, None]
    tl.store(at, sums, mask=mine[:, None] & known[None, :])


@triton.jit
def _term(
    weight, scale, place, start, k, inputs, mine, values, GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply inputs of the weight's outputs at `place` by rows: (outputs, k) @ (k, rows)."""
    tile = weight_tile(weight + place[:, None] * inputs, start + k, inputs, mine)
    if GROUP is None:
        return product(tile, values, PRECISION)
    else:
        factor = tl.load(scale + place * (inputs // GROUP) + start // GROUP, mask=mine, other=0.0)
        tile = tile.to(tl.float16).to(values.dtype)
        return product(tile, values, PRECISION) * factor[:, None]
