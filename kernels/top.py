"""The k best tokens of each row of logits, k small, in two launches (Triton).

A general top-k sorts; drafting wants three or so of 10⁴-10⁵ tokens. Each program takes the k
best of a piece of a row, then one program a row takes the k best of those. Ties go to the
smaller token. The naive twins are `naive.top_tokens` and `naive.choose_children`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree_kernels.launch import follow, overlapping

PIECE = 4096
MOST_UNROLLED = 8  # code as long as a tree is wide takes minutes to compile


def top_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`naive.top_tokens` for logits (R, V) with unit last stride, in two launches."""
    num_rows = logits.shape[0]
    tokens = torch.empty(num_rows, count, device=logits.device, dtype=torch.long)
    highest = torch.empty(num_rows, device=logits.device, dtype=torch.float32)
    _choose(logits, count, None, tokens, highest, None)
    return tokens, highest


def choose_children(logits: Tensor, places: Tensor, tokens: Tensor, finite: Tensor) -> None:
    """`naive.choose_children` in the same two launches; places contiguous."""
    assert places.is_contiguous() and tokens.stride(0) == finite.stride(0) == 1
    _choose(logits, places.shape[1], places, tokens, None, finite.view(torch.uint8))


def _choose(
    logits: Tensor,
    count: int,
    places: Tensor | None,
    tokens: Tensor,
    highest: Tensor | None,
    finite: Tensor | None,
) -> None:
    num_rows, vocabulary = logits.shape
    assert logits.stride(1) == 1
    pieces = triton.cdiv(vocabulary, PIECE)
    block = triton.next_power_of_2(pieces * count)
    counts = dict(COUNT=count, UNROLLED=count if count <= MOST_UNROLLED else 1)
    values = torch.empty(num_rows, pieces, count, device=logits.device, dtype=torch.float32)
    candidates = torch.empty(num_rows, pieces, count, device=logits.device, dtype=torch.int32)
    piece_kernel[(num_rows, pieces)](
        logits, logits.stride(0), values, candidates, vocabulary, PIECE=PIECE, num_warps=4,
        **counts, **overlapping(logits),
    )  # fmt: skip
    merge_kernel[(num_rows,)](
        values, candidates, places, tokens, highest, finite, pieces * count,
        BLOCK=block, num_warps=min(8, max(1, block // 1024)), **counts, **overlapping(logits),
    )  # fmt: skip


@triton.jit
def piece_kernel(
    logits, stride, values, candidates, vocabulary,
    COUNT: tl.constexpr, UNROLLED: tl.constexpr, PIECE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = piece * PIECE + tl.arange(0, PIECE)
    known = token < vocabulary
    value = tl.load(logits + row * stride + token, mask=known, other=-float("inf")).to(tl.float32)
    # NaN would lose every comparison and hide: as the best of all it shows
    value = tl.where(value != value, float("inf"), value)
    at = (row * tl.num_programs(1) + piece) * COUNT
    for rank in tl.range(COUNT, loop_unroll_factor=UNROLLED):
        best = tl.max(value, axis=0)
        chosen = tl.min(tl.where((value == best) & known, token, 2147483647), axis=0)
        tl.store(values + at + rank, best)
        tl.store(candidates + at + rank, chosen)
        known = known & (token != chosen)
        value = tl.where(known, value, -float("inf"))


@triton.jit
def merge_kernel(
    values, candidates, places, tokens, highest, finite, num_candidates,
    COUNT: tl.constexpr, UNROLLED: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < num_candidates
    value = tl.load(values + row * num_candidates + at, mask=mask, other=-float("inf"))
    token = tl.load(candidates + row * num_candidates + at, mask=mask, other=2147483647)
    if highest is not None:
        tl.store(highest + row, tl.max(value, axis=0))
    if finite is not None:
        tl.store(finite + row, (tl.abs(tl.max(value, axis=0)) < float("inf")).to(tl.uint8))
    for rank in tl.range(COUNT, loop_unroll_factor=UNROLLED):
        best = tl.max(value, axis=0)
        chosen = tl.min(tl.where(value == best, token, 2147483647), axis=0)
        place = row * COUNT + rank
        if places is not None:
            place = tl.load(places + place)
        tl.store(tokens + place, chosen.to(tl.int64), mask=place >= 0)
        taken = token == chosen
        value = tl.where(taken, -float("inf"), value)
        token = tl.where(taken, 2147483647, token)
