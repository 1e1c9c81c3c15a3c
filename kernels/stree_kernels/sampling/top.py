"""The k best tokens of each row of logits, k small, in two launches (Triton).

A general top-k sorts, while a choice needs about three of 10⁴-10⁵ tokens. Each program takes the k
best of a part of a row, then one program a row takes the k best of those. Ties go to the smaller
token. Rows that sample first add noise to their scores, in fp64, and are then treated alike: a
sample is the token with the best sum. The naive twins are `naive.choose_best` and
`naive.choose_children`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree_kernels.contracts import Sampling, Slots
from stree_kernels.launch import follow, overlapping
from stree_kernels.sampling.uniforms import token_noise

PIECE = 4096
SAMPLED_PIECE = 1024  # of fp64, with the registers that the noise takes
MAX_UNROLLED_NODES = 8  # code as long as a tree is wide takes minutes to compile


def choose_best(logits: Tensor, depths: Tensor, sampling: Sampling | None) -> tuple[Tensor, Tensor]:
    """Compute `naive.choose_best` for logits (B, n, V) with unit last stride, in two launches."""
    shape = logits.shape[:2]
    tokens = torch.empty(shape, device=logits.device, dtype=torch.long)
    highest = torch.empty(shape, device=logits.device, dtype=torch.float32)
    _choose(logits, depths, sampling, 1, None, tokens, highest, None)
    return tokens, highest


def choose_children(
    logits: Tensor, depths: Tensor, sampling: Sampling | None, places: Tensor, tokens: Tensor,
    finite: Tensor, nodes: Tensor | None = None, values: Tensor | None = None,
    ids: Tensor | None = None, slots: Slots | None = None,
) -> None:
    """Compute `naive.choose_children` in the same two launches; depths, places, ids contiguous."""
    assert places.is_contiguous() and tokens.stride(1) == finite.stride(1) == 1
    assert nodes is None or nodes.stride(1) == 1
    assert values is None or values.stride(1) == 1
    assert slots is None or values is not None
    assert ids is None or (ids.is_contiguous() and len(ids) == logits.shape[2])
    _choose(
        logits, depths, sampling, places.shape[2], places, tokens, None, finite.view(torch.uint8),
        nodes, values, ids, slots,
    )


def _choose(
    logits: Tensor, depths: Tensor, sampling: Sampling | None, count: int, places: Tensor | None,
    tokens: Tensor, highest: Tensor | None, finite: Tensor | None, nodes: Tensor | None = None,
    paths: Tensor | None = None, ids: Tensor | None = None, slots: Slots | None = None,
) -> None:
    batch, per_row, vocabulary = logits.shape
    assert logits.stride(2) == 1 and depths.is_contiguous()
    piece = PIECE if sampling is None else SAMPLED_PIECE
    pieces = triton.cdiv(vocabulary, piece)
    shape = (batch * per_row, pieces, count)
    values = logits.new_empty(shape, dtype=torch.float32 if sampling is None else torch.float64)
    candidates = logits.new_empty(shape, dtype=torch.int32)
    sums = None if paths is None else logits.new_empty(shape[:2], dtype=torch.float32)
    chosen_by: tuple[Tensor | None, ...] = (None, None, None)
    if sampling is not None:
        chosen_by = (sampling.temperature, sampling.seed, sampling.position)
    piece_kernel[(batch * per_row, pieces)](
        logits, logits.stride(0), logits.stride(1), ids, per_row, depths, *chosen_by,
        values, candidates, sums, None if slots is None else slots.temperature, vocabulary,
        COUNT=count, UNROLLED=_unrolled(count), PIECE=piece, num_warps=4, **overlapping(logits),
    )
    merge(
        values, candidates, sampling, places, tokens, highest,
        finite, per_row, sums, nodes, paths, slots, depths,
    )


def merge(
    values: Tensor, candidates: Tensor, sampling: Sampling | None, places: Tensor | None,
    tokens: Tensor, highest: Tensor | None, finite: Tensor | None, per_row: int,
    sums: Tensor | None = None, nodes: Tensor | None = None, paths: Tensor | None = None,
    slots: Slots | None = None, depths: Tensor | None = None,
) -> None:
    """Merge each row's `count` best scores per piece into the `count` best of all.

    values (B·n, pieces, count) come with their tokens, candidates. To rate paths, sums (B·n,
    pieces) are the logarithms of each piece's sum of exponentials: of the scores, or with slots of
    the logits over the slots' temperature. Slots need depths, which the noise is made of again.
    """
    assert slots is None or (paths is not None and slots.values.stride() == paths.stride())
    num_rows, pieces, count = values.shape
    block = triton.next_power_of_2(pieces * count)
    merge_kernel[(num_rows,)](
        values, candidates, per_row, places, tokens, tokens.stride(0),
        highest, finite, 0 if finite is None else finite.stride(0), pieces * count,
        sums, *((None,) * 3 if sampling is None else
                (sampling.temperature, sampling.seed, sampling.position)), depths,
        nodes, 0 if nodes is None else nodes.stride(0),
        paths, 0 if paths is None else paths.stride(0), *(slots or (None, None)), pieces,
        COUNT=count, UNROLLED=_unrolled(count),
        BLOCK_PIECES=triton.next_power_of_2(pieces), BLOCK=block,
        num_warps=min(8, max(1, block // 256)), **overlapping(values),
    )


def _unrolled(count: int) -> int:
    return count if count <= MAX_UNROLLED_NODES else 1


@triton.jit
def piece_kernel(
    logits, batch_stride, stride, ids, per_row, depths, temperatures, seeds, positions,
    values, candidates, sums, slot_temperatures, vocabulary,
    COUNT: tl.constexpr, UNROLLED: tl.constexpr, PIECE: tl.constexpr, OVERLAPS: tl.constexpr,
):
    follow(OVERLAPS)
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence = row // per_row
    column = piece * PIECE + tl.arange(0, PIECE)
    known = column < vocabulary
    at = logits + sequence * batch_stride + row % per_row * stride
    value = tl.load(at + column, mask=known, other=-float("inf")).to(tl.float32)
    token = column
    if ids is not None:
        token = tl.load(ids + column, mask=known, other=0).to(tl.int32)
    if slot_temperatures is not None:
        share = value / _divisor(slot_temperatures + sequence)
    scale = 1.0
    if temperatures is not None:
        value = value.to(tl.float64)
        temperature = tl.load(temperatures + sequence)
        scale = _divisor(temperatures + sequence)
        if temperature > 0.0:
            noise = _noise(seeds, positions, depths, sequence, row, token)
            value = value / temperature + noise
    # NaN would lose every comparison and hide: as the best of all it shows
    value = tl.where(value != value, float("inf"), value)
    if sums is not None:
        if slot_temperatures is None:
            share = (value * scale).to(tl.float32)
        tl.store(sums + row * tl.num_programs(1) + piece, log_sum(share))
    at = (row * tl.num_programs(1) + piece) * COUNT
    for rank in tl.range(COUNT, loop_unroll_factor=UNROLLED):
        best = tl.max(value, axis=0)
        chosen = tl.min(tl.where((value == best) & known, token, 2147483647), axis=0)
        tl.store(values + at + rank, best)
        tl.store(candidates + at + rank, chosen)
        known = known & (token != chosen)
        value = tl.where(known, value, -float("inf"))


@triton.jit
def log_sum(value):
    """Return the logarithm of the sum of exponentials over the first axis; −∞ of −∞ alone."""
    top = tl.max(value, axis=0)
    top = tl.where(top == -float("inf"), 0.0, top)
    return top + tl.log(tl.sum(tl.exp(value - top), axis=0))


@triton.jit
def _noise(seeds, positions, depths, sequence, row, token):
    """Return the noise of tokens at the place that follows a row's node in its sequence."""
    position = tl.load(positions + sequence) + tl.load(depths + row) + 1
    return token_noise(tl.load(seeds + sequence), position, token)


@triton.jit
def _divisor(temperature):
    """Load the temperature that logits are divided by, 1 where it is 0."""
    value = tl.load(temperature).to(tl.float32)
    return tl.where(value > 0.0, value, 1.0)


@triton.jit
def merge_kernel(
    values, candidates, per_row, places, tokens, token_stride, highest, finite, finite_stride,
    num_candidates, sums, temperatures, seeds, positions, depths,
    nodes, node_stride, paths, path_stride, slots, slot_temperatures, pieces,
    COUNT: tl.constexpr, UNROLLED: tl.constexpr,
    BLOCK_PIECES: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):
    follow(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    sequence = row // per_row
    at = tl.arange(0, BLOCK)
    mask = at < num_candidates
    value = tl.load(values + row * num_candidates + at, mask=mask, other=-float("inf"))
    token = tl.load(candidates + row * num_candidates + at, mask=mask, other=2147483647)
    if paths is not None:
        scale = 1.0
        if temperatures is not None:
            scale = _divisor(temperatures + sequence)
        piece = tl.arange(0, BLOCK_PIECES)
        there = piece < pieces
        total = log_sum(tl.load(sums + row * pieces + piece, mask=there, other=-float("inf")))
        paths += sequence * path_stride
        path = tl.load(paths + tl.load(nodes + sequence * node_stride + row % per_row))
    if slots is not None:
        slots += sequence * path_stride
        divisor = _divisor(slot_temperatures + sequence)
        score = value
        if temperatures is not None:
            noise = _noise(seeds, positions, depths, sequence, row, token)
            score = tl.where(tl.load(temperatures + sequence) > 0.0, value - noise, value)
        log_share = (score * scale).to(tl.float32) / divisor - total
        elder = tl.full([], 0.0, tl.float32)  # shares of the elder siblings together
        left = elder + 1.0
    if highest is not None:
        tl.store(highest + row, tl.max(value, axis=0))
    if finite is not None:
        is_finite = (tl.abs(tl.max(value, axis=0)) < float("inf")).to(tl.uint8)
        tl.store(finite + sequence * finite_stride + row % per_row, is_finite)
    for rank in tl.range(COUNT, loop_unroll_factor=UNROLLED):
        best = tl.max(value, axis=0)
        chosen = tl.min(tl.where(value == best, token, 2147483647), axis=0)
        if places is None:
            tl.store(tokens + row * COUNT + rank, chosen.to(tl.int64))
        else:
            place = tl.load(places + row * COUNT + rank)
            tl.store(tokens + sequence * token_stride + place, chosen.to(tl.int64), mask=place >= 0)
            if slots is not None:
                own = tl.max(tl.where(token == chosen, log_share, -float("inf")), axis=0)
                worth = path + tl.log(left)
                tl.store(slots + place, worth, mask=place >= 0)
                # In spite of rounding, the token in a slot must not be better than the slot
                tl.store(paths + place, tl.minimum(path + own, worth), mask=place >= 0)
                elder += tl.exp(own)
                left = tl.minimum(left, tl.maximum(1.0 - elder, 0.0))
            elif paths is not None:
                below = tl.minimum((best * scale).to(tl.float32) - total, 0.0)
                tl.store(paths + place, path + below, mask=place >= 0)
        taken = token == chosen
        value = tl.where(taken, -float("inf"), value)
        token = tl.where(taken, 2147483647, token)
