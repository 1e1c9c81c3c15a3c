"""The k best tokens of each row of logits, k small, in two launches (Triton).

A general top-k sorts; drafting wants three or so of 10⁴-10⁵ tokens. Each program takes the k
best of a piece of a row, then one program a row takes the k best of those. Ties go to the
smaller token. The naive twin is `naive.top_tokens`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE = 4096


def top_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`naive.top_tokens` for logits (R, V) with unit last stride, in two launches."""
    num_rows, vocabulary = logits.shape
    assert logits.stride(1) == 1
    pieces = triton.cdiv(vocabulary, PIECE)
    values = torch.empty(num_rows, pieces, count, device=logits.device, dtype=torch.float32)
    candidates = torch.empty(num_rows, pieces, count, device=logits.device, dtype=torch.int32)
    tokens = torch.empty(num_rows, count, device=logits.device, dtype=torch.long)
    highest = torch.empty(num_rows, device=logits.device, dtype=torch.float32)
    piece_kernel[(num_rows, pieces)](
        logits, logits.stride(0), values, candidates, vocabulary, COUNT=count, PIECE=PIECE,
        num_warps=4,
    )  # fmt: skip
    merge_kernel[(num_rows,)](
        values, candidates, tokens, highest, pieces * count, COUNT=count,
        BLOCK=triton.next_power_of_2(pieces * count), num_warps=1,
    )  # fmt: skip
    return tokens, highest


@triton.jit
def piece_kernel(
    logits, stride, values, candidates, vocabulary, COUNT: tl.constexpr, PIECE: tl.constexpr
):
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = piece * PIECE + tl.arange(0, PIECE)
    known = token < vocabulary
    value = tl.load(logits + row * stride + token, mask=known, other=-float("inf")).to(tl.float32)
    # NaN would lose every comparison and hide: as the best of all it shows
    value = tl.where(value != value, float("inf"), value)
    at = (row * tl.num_programs(1) + piece) * COUNT
    for rank in tl.static_range(COUNT):
        best = tl.max(value, axis=0)
        chosen = tl.min(tl.where((value == best) & known, token, 2147483647), axis=0)
        tl.store(values + at + rank, best)
        tl.store(candidates + at + rank, chosen)
        known = known & (token != chosen)
        value = tl.where(known, value, -float("inf"))


@triton.jit
def merge_kernel(
    values, candidates, tokens, highest, num_candidates, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < num_candidates
    value = tl.load(values + row * num_candidates + at, mask=mask, other=-float("inf"))
    token = tl.load(candidates + row * num_candidates + at, mask=mask, other=2147483647)
    tl.store(highest + row, tl.max(value, axis=0))
    for rank in tl.static_range(COUNT):
        best = tl.max(value, axis=0)
        chosen = tl.min(tl.where(value == best, token, 2147483647), axis=0)
        tl.store(tokens + row * COUNT + rank, chosen.to(tl.int64))
        taken = token == chosen
        value = tl.where(taken, -float("inf"), value)
        token = tl.where(taken, 2147483647, token)
