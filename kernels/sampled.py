"""Sampling siblings and multi-step speculative sampling on the device (Triton).

The twins are `stree.sampling.sample_siblings` and `stree.verify.verify_multi_step`, whose choices
are made by inverting the cumulative law with the same uniforms. Laws are fp64, so that what is
drawn has the law to its last digits; a vocabulary is gone through in blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # tokens whose sum is kept, in `sample_siblings`


def sample_siblings(laws: Tensor, count: int, uniforms: Tensor) -> Tensor:
    """Draw `count` tokens from each law, without replacement, in two launches.

    Args: laws (n, V) fp64, uniforms (count, n) in [0, 1). Returns (n, count).
    """
    num_rows, vocab = laws.shape
    assert laws.stride(1) == 1 and uniforms.is_contiguous()
    num_blocks = triton.cdiv(vocab, BLOCK)
    sums = laws.new_empty(num_rows, num_blocks)
    drawn = torch.empty(num_rows, count, dtype=torch.long, device=laws.device)
    sums_kernel[(num_blocks, num_rows)](
        laws, laws.stride(0), sums, num_blocks, vocab, BLOCK=BLOCK, num_warps=4
    )
    siblings_kernel[(num_rows,)](
        laws, laws.stride(0), sums, num_blocks, uniforms, drawn, vocab, num_rows,
        COUNT=count, TAKEN=triton.next_power_of_2(count), BLOCK=BLOCK,
        NUM_BLOCKS=triton.next_power_of_2(num_blocks), num_warps=4,
    )  # fmt: skip
    return drawn


def accept_sampled(
    target_laws: Tensor,
    draft_laws: Tensor,
    tokens: Tensor,
    children: Tensor,
    exists: Tensor,
    rows: Tensor,
    widths: Tensor,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """`stree.verify.verify_multi_step` in one launch.

    Args: target_laws (N, V), draft_laws (I, V) fp64; tokens (N,); children and exists (N, W) and
    rows (N,), where a node's children and its draft law are; widths (depth,), how many places
    each level has; uniforms, one a place of each level and one for the token after.
    """
    vocab = target_laws.shape[1]
    assert target_laws.stride(1) == draft_laws.stride(1) == 1
    depth = widths.shape[0]
    path = torch.empty(depth + 1, dtype=torch.long, device=tokens.device)
    length, after = (torch.empty(1, dtype=torch.long, device=tokens.device) for _ in range(2))
    residual = target_laws.new_empty(vocab)
    block = min(4096, triton.next_power_of_2(vocab))
    accept_sampled_kernel[(1,)](
        target_laws, target_laws.stride(0), draft_laws, draft_laws.stride(0), tokens,
        children, exists.view(torch.uint8), rows, children.shape[1], widths, depth, uniforms,
        residual, path, length, after, vocab,
        TAKEN=triton.next_power_of_2(children.shape[1]), BLOCK=block, num_warps=8,
    )  # fmt: skip
    return path, length, after


@triton.jit
def sums_kernel(laws, law_stride, sums, num_blocks, vocab, BLOCK: tl.constexpr):
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = block * BLOCK + tl.arange(0, BLOCK)
    law = tl.load(laws + row * law_stride + token, mask=token < vocab, other=0.0)
    tl.store(sums + row * num_blocks + block, tl.sum(law, axis=0))


@triton.jit
def _untaken(law, token, taken):
    """law (BLOCK,) at tokens, 0 at those taken (K,)."""
    is_taken = tl.sum((token[:, None] == taken[None, :]).to(tl.int32), axis=1) > 0
    return tl.where(is_taken, 0.0, law)


@triton.jit
def _place(values, threshold):
    """Where the cumulative sum of values first exceeds threshold; the last positive one if rounding
    lets none."""
    place = tl.arange(0, values.shape[0])
    above = tl.sum((tl.cumsum(values, axis=0) <= threshold).to(tl.int32), axis=0)
    return tl.minimum(above, tl.max(tl.where(values > 0.0, place, 0), axis=0))


@triton.jit
def siblings_kernel(
    laws, law_stride, sums, num_blocks, uniforms, drawn, vocab, num_rows,
    COUNT: tl.constexpr, TAKEN: tl.constexpr, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    laws += row * law_stride
    block, slot, place = tl.arange(0, NUM_BLOCKS), tl.arange(0, TAKEN), tl.arange(0, BLOCK)
    totals = tl.load(sums + row * num_blocks + block, mask=block < num_blocks, other=0.0)
    taken = tl.full([TAKEN], -1, dtype=tl.int32)
    for sibling in tl.static_range(COUNT):
        uniform = tl.load(uniforms + sibling * num_rows + row)
        total = tl.sum(totals, axis=0)
        if total > 0.0:
            chosen = _place(totals, uniform * total)
            before = tl.sum(tl.where(block < chosen, totals, 0.0), axis=0)
            token = chosen * BLOCK + place
            law = tl.load(laws + token, mask=token < vocab, other=0.0)
            law = _untaken(law, token, taken)
            picked = chosen * BLOCK + _place(law, uniform * total - before)
        else:  # uniform over what is left: that place among them, counting past the taken
            chosen = 0
            among = (uniform * (vocab - sibling)).to(tl.int32)
            picked = among
            for _ in tl.static_range(COUNT):
                past = (taken >= 0) & (taken <= picked)
                picked = among + tl.sum(past.to(tl.int32), axis=0)
        taken = tl.where(slot == sibling, picked, taken)
        tl.store(drawn + row * COUNT + sibling, picked.to(tl.int64))
        # The sum of the block without it, exactly: nothing is left of a law that is used up
        own = picked // BLOCK
        token = own * BLOCK + place
        law = tl.load(laws + token, mask=token < vocab, other=0.0)
        totals = tl.where(block == own, tl.sum(_untaken(law, token, taken), axis=0), totals)


@triton.jit
def accept_sampled_kernel(
    target_laws, target_stride, draft_laws, draft_stride, tokens, children, exists, rows, max_width,
    widths, depth, uniforms, residual, path, path_length, after, vocab,
    TAKEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot, place = tl.arange(0, TAKEN), tl.arange(0, BLOCK)
    node = tl.load(rows) * 0  # the root, as an int64
    length = node + 1
    walking = node == 0
    untouched = node == 0  # nothing was rejected since the node was reached
    scale = tl.load(target_laws) * 0.0 + 1.0  # of what `residual` holds
    number = 0
    tl.store(path, node)
    for level in range(depth):
        accepted = node < 0
        open_sum = scale * 0.0 + 1.0  # of the draft law without the taken tokens
        num_taken = 0
        taken = tl.full([TAKEN], -1, dtype=tl.int64)
        start, law = node, draft_laws + tl.load(rows + node) * draft_stride
        target = target_laws + node * target_stride
        for child_place in range(tl.load(widths + level)):
            uniform = tl.load(uniforms + number)
            number += 1
            there = tl.load(exists + start * max_width + child_place) != 0
            if walking & there & (accepted == 0):
                child = tl.load(children + start * max_width + child_place)
                token = tl.load(tokens + child)
                even = 1.0 / (vocab - num_taken).to(tl.float64)  # when the law is used up
                proposed = even
                if open_sum > 0.0:
                    proposed = tl.load(law + token) / open_sum
                wanted = tl.load(residual + token) * scale
                if untouched:
                    wanted = tl.load(target + token)
                if uniform >= 1.0 - tl.minimum(wanted / proposed, 1.0):
                    accepted = child >= 0
                    node = child
                else:
                    left, still_open = scale * 0.0, scale * 0.0
                    now = tl.where(slot == num_taken, token, taken)
                    for first in range(0, vocab, BLOCK):
                        each = first + place
                        known = each < vocab
                        if untouched:
                            value = tl.load(target + each, mask=known, other=0.0)
                        else:
                            value = tl.load(residual + each, mask=known, other=0.0) * scale
                        draft = tl.load(law + each, mask=known, other=0.0)
                        free = _untaken(tl.where(known, 1.0, 0.0).to(tl.float64), each, taken)
                        offered = draft * free
                        if open_sum > 0.0:
                            value -= offered / open_sum
                        else:
                            value -= free * even
                        value = tl.maximum(value, 0.0)
                        tl.store(residual + each, value, mask=known)
                        left += tl.sum(value, axis=0)
                        still_open += tl.sum(_untaken(offered, each, now), axis=0)
                    tl.debug_barrier()  # any thread may read any token's residual next
                    untouched = left <= 0.0  # rounding alone: then the law is as it was
                    scale = 1.0 / tl.where(left > 0.0, left, 1.0)
                    open_sum = still_open
                    taken = now
                    num_taken += 1
        walking = walking & accepted
        if accepted:
            untouched = node >= 0
            length += 1
        tl.store(path + level + 1, node)
    tl.store(path_length, length)

    # The token after: the first whose cumulative residual exceeds its share
    target = target_laws + node * target_stride
    total = scale * 0.0
    for first in range(0, vocab, BLOCK):
        each = first + place
        if untouched:
            value = tl.load(target + each, mask=each < vocab, other=0.0)
        else:
            value = tl.load(residual + each, mask=each < vocab, other=0.0)
        total += tl.sum(value, axis=0)
    threshold = tl.load(uniforms + number) * total
    chosen, before = node * 0 - 1, scale * 0.0
    last = node * 0
    for first in range(0, vocab, BLOCK):
        each = first + place
        if untouched:
            value = tl.load(target + each, mask=each < vocab, other=0.0)
        else:
            value = tl.load(residual + each, mask=each < vocab, other=0.0)
        here = tl.sum(value, axis=0)
        if (chosen < 0) & (before + here > threshold):
            chosen = (first + _place(value, threshold - before)).to(tl.int64)
        if here > 0.0:
            last = (first + tl.max(tl.where(value > 0.0, place, 0), axis=0)).to(tl.int64)
        before += here
    tl.store(after, tl.where(chosen < 0, last, chosen))
