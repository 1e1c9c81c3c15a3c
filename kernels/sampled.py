"""Laws, sampling siblings and multi-step speculative sampling on the device (Triton).

The twins are `stree.sampling.sampling_law` and `sample_siblings`, `stree.verify.verify_multi_step`
and `naive.settle_sampled`. Choices are made by inverting the cumulative law with the same
uniforms. Laws are fp64, so that what is drawn has the law to its last digits; a vocabulary is gone
through in blocks.
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree_kernels.launch import follow, overlapping

BLOCK = 1024  # tokens of a program, and of a sum that is kept
MOST_UNROLLED = tl.constexpr(8)  # siblings
# What a launch of acceptance leaves to the next: node, where its level began, walking, accepted,
# untouched, which residual, rejected, and how many nodes the path has
FLAGS = tl.constexpr(8)


def temperature_law(logits: Tensor, temperature: float, finite: Tensor | None) -> Tensor:
    """softmax(logits / temperature) in fp64, in two launches.

    Args: logits (n, V), temperature above 0; finite (n,) bool, if given, is told whether each row
    has a law. Returns (n, V).
    """
    num_rows, vocab = logits.shape
    assert logits.stride(1) == 1 and (finite is None or finite.is_contiguous())
    num_blocks = triton.cdiv(vocab, BLOCK)
    partial = torch.empty(2, num_rows, num_blocks, dtype=torch.float64, device=logits.device)
    laws = torch.empty(num_rows, vocab, dtype=torch.float64, device=logits.device)
    bits = struct.unpack("q", struct.pack("d", temperature))[0]  # a number would arrive as fp32
    common = (logits, logits.stride(0), bits, partial)
    options = dict(BLOCK=BLOCK, num_warps=4, **overlapping(logits))
    peaks_kernel[(num_blocks, num_rows)](*common, vocab, **options)
    law_kernel[(num_blocks, num_rows)](
        *common, laws, None if finite is None else finite.view(torch.uint8), vocab,
        NUM_BLOCKS=triton.next_power_of_2(num_blocks), **options,
    )  # fmt: skip
    return laws


def sample_siblings(laws: Tensor, count: int, uniforms: Tensor) -> Tensor:
    """Draw `count` tokens from each law, without replacement, in two launches.

    Args: laws (n, V) fp64, uniforms (count, n) in [0, 1). Returns (n, count).
    """
    drawn = torch.empty(len(laws), count, dtype=torch.long, device=laws.device)
    _sample(laws, count, uniforms, None, drawn)
    return drawn


def sample_children(laws: Tensor, places: Tensor, uniforms: Tensor, tokens: Tensor) -> None:
    """The same into places (n, count) of tokens (N,), none where a place is negative."""
    assert places.is_contiguous() and tokens.stride(0) == 1
    _sample(laws, places.shape[1], uniforms, places, tokens)


def _sample(
    laws: Tensor, count: int, uniforms: Tensor, places: Tensor | None, drawn: Tensor
) -> None:
    num_rows, vocab = laws.shape
    assert laws.stride(1) == 1 and uniforms.is_contiguous()
    num_blocks = triton.cdiv(vocab, BLOCK)
    sums = laws.new_empty(num_rows, num_blocks)
    sums_kernel[(num_blocks, num_rows)](
        laws, laws.stride(0), sums, num_blocks, vocab, BLOCK=BLOCK, num_warps=4,
        **overlapping(laws),
    )  # fmt: skip
    siblings_kernel[(num_rows,)](
        laws, laws.stride(0), sums, num_blocks, uniforms, places, drawn, vocab, num_rows,
        COUNT=count, TAKEN=triton.next_power_of_2(count), BLOCK=BLOCK,
        NUM_BLOCKS=triton.next_power_of_2(num_blocks), num_warps=4, **overlapping(laws),
    )  # fmt: skip


def accept_sampled(
    target_laws: Tensor,
    draft_laws: Tensor,
    tokens: Tensor,
    children: Tensor,
    exists: Tensor,
    rows: Tensor,
    widths: list[int],
    uniforms: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """`stree.verify.verify_multi_step`, in one launch for each place a child could be in, and two.

    A rejection changes the law of all tokens, and the next child is judged by their sum: each
    launch judges one child, alike in all its programs, which share out the tokens. What one
    decides is left to the next in a row of `flags` and `numbers`, and sums in `partial`.

    Args: target_laws (N, V), draft_laws (I, V) fp64; tokens (N,); children and exists (N, W) and
    rows (N,), where a node's children and its draft law are; widths, how many places each level
    has, one level at least; uniforms, one a place of each level and one for the token after.
    """
    assert widths
    vocab = target_laws.shape[1]
    assert target_laws.stride(1) == draft_laws.stride(1) == 1
    num_places, num_blocks, device = sum(widths), triton.cdiv(vocab, BLOCK), tokens.device
    path = torch.empty(len(widths) + 1, dtype=torch.long, device=device)
    length, after = (torch.empty(1, dtype=torch.long, device=device) for _ in range(2))
    flags = torch.empty(num_places + 1, FLAGS.value, dtype=torch.long, device=device)
    numbers = target_laws.new_empty(num_places + 1, 2)
    partial = target_laws.new_empty(num_places + 1, 2, num_blocks)
    residuals = target_laws.new_empty(2, vocab)
    common = (target_laws, target_laws.stride(0), flags, numbers, partial, residuals)
    options = dict(
        BLOCK=BLOCK, NUM_BLOCKS=triton.next_power_of_2(num_blocks), num_warps=4,
        **overlapping(target_laws),
    )  # fmt: skip
    step = 0
    for level, width in enumerate(widths):
        for place in range(width):
            place_kernel[(num_blocks,)](
                *common, draft_laws, draft_laws.stride(0), tokens,
                children, exists.view(torch.uint8), rows, children.shape[1],
                uniforms, path, step, level, place, vocab,
                FIRST=step == 0, TAKEN=4, **options,
            )  # fmt: skip
            step += 1
    rest_kernel[(num_blocks,)](*common, step, vocab, **options)
    after_kernel[(1,)](
        *common, uniforms, path, length, after, step, len(widths), num_blocks, vocab, **options
    )
    return path, length, after


def settle_sampled(
    accepted: Tensor,
    count: Tensor,
    after: Tensor,
    tokens: Tensor,
    target_finite: Tensor,
    draft_finite: Tensor,
    path: Tensor,
    path_length: Tensor,
    block: Tensor,
    report: Tensor,
) -> None:
    """`naive.settle_sampled` in one launch; all contiguous, but for path's first stride."""
    longest = len(accepted)
    settle_kernel[(1,)](
        accepted, count, after, tokens,
        target_finite.view(torch.uint8), len(target_finite),
        draft_finite.view(torch.uint8), draft_finite.numel(),
        path, path_length, block, report, longest,
        BLOCK=triton.next_power_of_2(longest),
        BLOCK_ROWS=triton.next_power_of_2(max(len(target_finite), draft_finite.numel())),
        num_warps=1, **overlapping(tokens),
    )  # fmt: skip


@triton.jit
def _scores(logits, stride, row, token, vocab, temperature_bits):
    score = tl.load(logits + row * stride + token, mask=token < vocab, other=-float("inf"))
    return score.to(tl.float64) / temperature_bits.to(tl.float64, bitcast=True)


@triton.jit
def _shift(highest):
    """A row or block of tokens that are all impossible has nothing to shift by."""
    return tl.where(highest == -float("inf"), 0.0, highest)


@triton.jit(do_not_specialize=["temperature_bits"])
def peaks_kernel(
    logits, stride, temperature_bits, partial, vocab, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
):  # fmt: skip
    """The highest score of each block, and the sum of its exponentials."""
    follow(OVERLAPS)
    block, row, num_blocks = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    score = _scores(logits, stride, row, token, vocab, temperature_bits)
    peak = tl.max(score, axis=0)
    at = partial + row * num_blocks + block
    tl.store(at, peak)
    total = tl.sum(tl.exp(score - _shift(peak)), axis=0)
    tl.store(at + tl.num_programs(1) * num_blocks, total)


@triton.jit(do_not_specialize=["temperature_bits"])
def law_kernel(
    logits, stride, temperature_bits, partial, laws, finite, vocab,
    NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    block, row, num_blocks = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    other = tl.arange(0, NUM_BLOCKS)
    at = partial + row * num_blocks + other
    follow(OVERLAPS)
    score = _scores(logits, stride, row, token, vocab, temperature_bits)
    peaks = tl.load(at, mask=other < num_blocks, other=-float("inf"))
    totals = tl.load(at + tl.num_programs(1) * num_blocks, mask=other < num_blocks, other=0.0)
    highest = _shift(tl.max(peaks, axis=0))
    total = tl.sum(totals * tl.exp(peaks - highest), axis=0)
    law = tl.exp(score - highest) / total
    tl.store(laws + row * vocab + token, law, mask=token < vocab)
    if finite is not None and block == 0:
        tl.store(finite + row, (total > 0.0) & (total < float("inf")))


@triton.jit
def sums_kernel(
    laws, law_stride, sums, num_blocks, vocab, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
):  # fmt: skip
    follow(OVERLAPS)
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
    laws, law_stride, sums, num_blocks, uniforms, places, drawn, vocab, num_rows,
    COUNT: tl.constexpr, TAKEN: tl.constexpr, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    laws += row * law_stride
    uniforms += row
    drawn_at = row * COUNT
    block = tl.arange(0, NUM_BLOCKS)
    totals = tl.load(sums + row * num_blocks + block, mask=block < num_blocks, other=0.0)
    taken = tl.full([TAKEN], -1, dtype=tl.int32)
    if COUNT <= MOST_UNROLLED:
        for sibling in tl.static_range(COUNT):
            totals, taken = _next_sibling(
                sibling, laws, totals, taken, uniforms, num_rows, places, drawn, drawn_at, vocab,
                BLOCK, NUM_BLOCKS, TAKEN,
            )  # fmt: skip
    else:
        for sibling in range(COUNT):
            totals, taken = _next_sibling(
                sibling, laws, totals, taken, uniforms, num_rows, places, drawn, drawn_at, vocab,
                BLOCK, NUM_BLOCKS, TAKEN,
            )  # fmt: skip


@triton.jit
def _next_sibling(
    sibling, laws, totals, taken, uniforms, num_rows, places, drawn, drawn_at, vocab,
    BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr, TAKEN: tl.constexpr,
):  # fmt: skip
    """Draw one more; the blocks' sums and the tokens taken after it."""
    block, slot, place = tl.arange(0, NUM_BLOCKS), tl.arange(0, TAKEN), tl.arange(0, BLOCK)
    uniform = tl.load(uniforms + sibling * num_rows)
    total = tl.sum(totals, axis=0)
    if total > 0.0:
        chosen = _place(totals, uniform * total)
        before = tl.sum(tl.where(block < chosen, totals, 0.0), axis=0)
        token = chosen * BLOCK + place
        law = tl.load(laws + token, mask=token < vocab, other=0.0)
        law = _untaken(law, token, taken)
        picked = chosen * BLOCK + _place(law, tl.maximum(uniform * total - before, 0.0))
        # The block's sum without it, exactly: nothing is left of a law that is used up
        left = tl.sum(tl.where(token == picked, 0.0, law), axis=0)
        totals = tl.where(block == chosen, left, totals)
    else:  # uniform over what is left: that place among them, counting past the taken
        among = (uniform * (vocab - sibling)).to(tl.int32)
        picked = among
        for _ in range(sibling):
            past = (taken >= 0) & (taken <= picked)
            picked = among + tl.sum(past.to(tl.int32), axis=0)
    taken = tl.where(slot == sibling, picked, taken)
    if places is None:
        tl.store(drawn + drawn_at + sibling, picked.to(tl.int64))
    else:
        at = tl.load(places + drawn_at + sibling)
        tl.store(drawn + at, picked.to(tl.int64), mask=at >= 0)
    return totals, taken


@triton.jit
def _decided(flags, numbers, partial, step, num_blocks, NUM_BLOCKS: tl.constexpr):
    """What the launches before have decided: flags, then the residual's sum and what is left of the
    draft law."""
    flags += step * FLAGS
    node, start, walking = tl.load(flags), tl.load(flags + 1), tl.load(flags + 2)
    accepted, untouched, which = tl.load(flags + 3), tl.load(flags + 4), tl.load(flags + 5)
    rejected, length = tl.load(flags + 6), tl.load(flags + 7)
    whole, still_open = tl.load(numbers + 2 * step), tl.load(numbers + 2 * step + 1)
    if rejected != 0:
        block = tl.arange(0, NUM_BLOCKS)
        at = partial + 2 * step * num_blocks + block
        left = tl.sum(tl.load(at, mask=block < num_blocks, other=0.0), axis=0)
        still_open = tl.sum(tl.load(at + num_blocks, mask=block < num_blocks, other=0.0), axis=0)
        some = left > 0.0  # rounding alone can leave nothing: then the law is as it was
        untouched = tl.where(some, 0, untouched)
        which = tl.where(some, which, 1 - which)
        whole = tl.where(some, left, whole)
    return node, start, walking, accepted, untouched, which, length, whole, still_open


@triton.jit
def _law_left(target_laws, target_stride, residuals, node, untouched, which, token, vocab):
    """Some tokens of the law that a node's next child is judged by, times its sum."""
    law = residuals + which * vocab
    if untouched != 0:
        law = target_laws + node * target_stride
    return tl.load(law + token, mask=token < vocab, other=0.0)


@triton.jit(do_not_specialize=["step", "level", "place"])
def place_kernel(
    target_laws, target_stride, flags, numbers, partial, residuals,
    draft_laws, draft_stride, tokens, children, exists, rows, max_width,
    uniforms, path, step, level, place, vocab,
    FIRST: tl.constexpr, TAKEN: tl.constexpr,
    BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Judge the child at one place of the node reached; if it is rejected, leave the residual."""
    follow(OVERLAPS)
    program, num_blocks = tl.program_id(0), tl.num_programs(0)
    if FIRST:
        node = tl.full([], 0, dtype=tl.int64)
        start, accepted, which, walking = node, node, node, node + 1
        untouched, length = walking, walking
        whole = tl.full([], 1.0, dtype=tl.float64)
        still_open = whole
    else:
        node, start, walking, accepted, untouched, which, length, whole, still_open = _decided(
            flags, numbers, partial, step, num_blocks, NUM_BLOCKS
        )
    if place == 0:
        start = node
        if level > 0:
            walking = walking * accepted
        accepted = accepted * 0
        still_open = still_open * 0.0 + 1.0
        if program == 0:
            tl.store(path + level, node)

    rejected = accepted * 0
    there = tl.load(exists + start * max_width + place) != 0
    if (walking != 0) & (accepted == 0) & there:
        child = tl.load(children + start * max_width + place)
        token = tl.load(tokens + child)
        law = draft_laws + tl.load(rows + start) * draft_stride
        even = 1.0 / (vocab - place).to(tl.float64)  # when the draft law is used up
        proposed = even
        if still_open > 0.0:
            proposed = tl.load(law + token) / still_open
        wanted = _law_left(
            target_laws, target_stride, residuals, start, untouched, which, token, vocab
        )
        wanted = wanted / whole
        if tl.load(uniforms + step) >= 1.0 - tl.minimum(wanted / proposed, 1.0):
            accepted, untouched, node, length = walking, walking, child, length + 1
            whole = whole * 0.0 + 1.0
        else:
            each = program * BLOCK + tl.arange(0, BLOCK)
            known = each < vocab
            value = _law_left(
                target_laws, target_stride, residuals, start, untouched, which, each, vocab
            )
            value = value / whole
            free = tl.where(known, 1.0, 0.0).to(tl.float64)
            for first in range(0, place, TAKEN):  # whoever stands at an earlier place was rejected
                slot = first + tl.arange(0, TAKEN)
                earlier = tl.load(children + start * max_width + slot, mask=slot < place, other=0)
                taken = tl.load(tokens + earlier, mask=slot < place, other=-1)
                free = _untaken(free, each, taken)
            offered = tl.load(law + each, mask=known, other=0.0) * free
            if still_open > 0.0:
                value -= offered / still_open
            else:
                value -= free * even
            value = tl.maximum(value, 0.0)
            which = 1 - which  # others may still be reading the last one
            tl.store(residuals + which * vocab + each, value, mask=known)
            at = partial + 2 * (step + 1) * num_blocks + program
            tl.store(at, tl.sum(value, axis=0))
            tl.store(at + num_blocks, tl.sum(tl.where(each == token, 0.0, offered), axis=0))
            rejected += 1
    if program == 0:
        flags += (step + 1) * FLAGS
        tl.store(flags, node)
        tl.store(flags + 1, start)
        tl.store(flags + 2, walking)
        tl.store(flags + 3, accepted)
        tl.store(flags + 4, untouched)
        tl.store(flags + 5, which)
        tl.store(flags + 6, rejected)
        tl.store(flags + 7, length)
        tl.store(numbers + 2 * (step + 1), whole)
        tl.store(numbers + 2 * (step + 1) + 1, still_open)


@triton.jit(do_not_specialize=["step"])
def rest_kernel(
    target_laws, target_stride, flags, numbers, partial, residuals, step, vocab,
    BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The sums of its blocks, where the first launch's would be."""
    follow(OVERLAPS)
    program, num_blocks = tl.program_id(0), tl.num_programs(0)
    node, _, _, _, untouched, which, _, _, _ = _decided(
        flags, numbers, partial, step, num_blocks, NUM_BLOCKS
    )
    each = program * BLOCK + tl.arange(0, BLOCK)
    law = _law_left(target_laws, target_stride, residuals, node, untouched, which, each, vocab)
    tl.store(partial + program, tl.sum(law, axis=0))


@triton.jit(do_not_specialize=["step", "depth"])
def after_kernel(
    target_laws, target_stride, flags, numbers, partial, residuals,
    uniforms, path, path_length, after, step, depth, num_blocks, vocab,
    BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The token after: the first whose cumulative law exceeds its share."""
    follow(OVERLAPS)
    node, _, _, _, untouched, which, length, _, _ = _decided(
        flags, numbers, partial, step, num_blocks, NUM_BLOCKS
    )
    tl.store(path + depth, node)
    tl.store(path_length, length)
    block = tl.arange(0, NUM_BLOCKS)
    sums = tl.load(partial + block, mask=block < num_blocks, other=0.0)
    threshold = tl.load(uniforms + step) * tl.sum(sums, axis=0)
    chosen = _place(sums, threshold)
    before = tl.sum(tl.where(block < chosen, sums, 0.0), axis=0)
    each = chosen * BLOCK + tl.arange(0, BLOCK)
    law = _law_left(target_laws, target_stride, residuals, node, untouched, which, each, vocab)
    place = _place(law, tl.maximum(threshold - before, 0.0))
    tl.store(after, (chosen * BLOCK + place).to(tl.int64))


@triton.jit
def settle_kernel(
    accepted, count, after, tokens, target_finite, num_target, draft_finite, num_draft,
    path, path_length, block, report, longest,
    BLOCK: tl.constexpr, BLOCK_ROWS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    step, row = tl.arange(0, BLOCK), tl.arange(0, BLOCK_ROWS)
    known = step < longest
    length = tl.load(count)
    node = tl.load(accepted + step, mask=known, other=0)
    following = tl.load(accepted + step + 1, mask=step + 1 < length, other=0)
    new = tl.load(tokens + following, mask=step + 1 < length, other=0)
    new = tl.where(step + 1 < length, new, tl.load(after))
    finite = tl.load(target_finite + row, mask=row < num_target, other=1).to(tl.int64)
    finite &= tl.load(draft_finite + row, mask=row < num_draft, other=1).to(tl.int64)
    tl.store(path + step, node, mask=known)
    tl.store(path_length, length)
    tl.store(block, length)
    tl.store(block + 1 + step, new, mask=known)
    tl.store(report, tl.min(finite, axis=0))
    tl.store(report + 1, length)
    tl.store(report + 2 + step, new, mask=known)
    tl.store(report + 2 + longest + step, node, mask=known)
