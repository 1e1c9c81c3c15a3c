"""Drafts from a text in one launch (Triton): search and merge of all nodes of a tree.

One program serves one sequence. It goes through the nodes in their order, parents first: a node's
matches with all places of the text follow from its parent's, which are in memory, and its children
are found in one more pass each. Of the places only those up to the root are read. The naive twin is
in `naive/sampling/ngrams.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree_kernels.launch import follow, overlapping
from stree_kernels.naive.sampling.ngrams import TreesToFill

BLOCK_TOKENS = 4096  # that a program compares at a time


def draft_ngrams(
    texts: Tensor, roots: Tensor, tokens: Tensor, trees: TreesToFill, context: int,
    num_excerpts: int = 0, excerpt: int = 1, places: Tensor | None = None,
    barred: Tensor | None = None,
) -> None:
    """Compute `naive.draft_ngrams` in one launch; last strides are 1, children are contiguous."""
    batch, length = texts.shape
    num_nodes, widest = trees.children.shape[1:]
    assert texts.stride(1) == tokens.stride(1) == trees.parents.stride(1) == roots.stride(0) == 1
    assert trees.children.is_contiguous()
    num_places = 0 if places is None else places.shape[2]
    num_barred = 0 if barred is None else barred.shape[2]
    matches = torch.empty(batch, num_nodes, length, dtype=torch.int32, device=texts.device)
    block = min(BLOCK_TOKENS, triton.next_power_of_2(length))
    # Matches and places in one number, to find the longest and latest
    is_wide = (context + num_nodes + 1) * length >= 2**31
    ngram_kernel[(batch,)](
        texts, texts.stride(0), length, roots, tokens, tokens.stride(0),
        trees.parents, trees.parents.stride(0), trees.children, num_nodes, widest, matches,
        context, num_excerpts * excerpt, excerpt,
        None if places is None else places.contiguous(), num_places,
        None if barred is None else barred.contiguous(), num_barred,
        ORDER=tl.int64 if is_wide else tl.int32, BLOCK=block,
        BLOCK_K=triton.next_power_of_2(max(widest, num_places)),
        BLOCK_T=triton.next_power_of_2(max(widest, num_places) + num_barred + 1),
        BLOCK_J=triton.next_power_of_2(max(num_barred, 1)),
        num_warps=max(1, min(16, block // 256)), **overlapping(texts),
    )


# Bounds of 1 are not made constants: loops over such were once compiled wrongly
@triton.jit(do_not_specialize=["num_nodes", "widest", "context", "num_places", "num_barred"])
def ngram_kernel(
    texts, text_stride, length, roots, tokens, token_stride, parents, parent_stride, children,
    num_nodes, widest, matches, context, base, excerpt, places, num_places, barred, num_barred,
    ORDER: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_J: tl.constexpr, OVERLAPS: tl.constexpr,
):
    follow(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    texts += row * text_stride
    tokens += row * token_stride
    parents += row * parent_stride
    children += row * num_nodes * widest
    matches += row * num_nodes * length
    root = tl.load(roots + row)
    end = tl.minimum(root + 1, length).to(tl.int32)
    of_child, of_barred = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_J)
    root_children, num_root = children, widest
    if places is not None:
        root_children, num_root = places + row * num_places, num_places
    barred_first = tl.full([BLOCK_J], -1, tl.int64)
    if barred is not None:
        at = barred + row * num_barred + of_barred
        barred_first = tl.load(at, mask=of_barred < num_barred, other=-1)
    for node in range(num_nodes):
        at_children, count = children + node * widest, widest
        if node == 0:
            at_children, count = root_children, num_root
        child = tl.load(at_children + of_child, mask=of_child < count, other=-1)
        count = tl.sum((child >= 0).to(tl.int32), axis=0)
        left_out = tl.where(node == 0, barred_first, -1)
        num_left_out = tl.where(node == 0, num_barred, 0)
        if count > 0:
            parent = tl.load(parents + node)
            token = tl.load(tokens + node)
            for start in range(0, end, BLOCK):
                index = start + tl.arange(0, BLOCK)
                there = index < end
                match = tl.zeros([BLOCK], dtype=tl.int32)
                if node == 0:
                    same = there
                    for back in range(context):
                        here = tl.load(texts + index - back, mask=same & (index >= back), other=-1)
                        wanted = tl.load(texts + tl.maximum(root - back, base))
                        same = same & (here == tl.where(wanted < 0, -2, wanted))
                        match += same.to(tl.int32)
                    beside = (index < base) & (index % excerpt != context - 1)
                    match = tl.where(beside, -1, match)
                else:
                    here = tl.load(texts + index, mask=there, other=-1)
                    match = tl.load(
                        matches + parent * length + index - 1, mask=there & (index > 0), other=0
                    )
                    match = tl.where(here == token, match + 1, 0)
                tl.store(matches + node * length + index, match, mask=there)
            found = tl.full([BLOCK_K], -1, tl.int64)
            for number in range(count):
                best = tl.full([BLOCK], -1, ORDER)
                for start in range(0, end, BLOCK):
                    index = start + tl.arange(0, BLOCK)
                    there = index + 1 < end  # nothing follows the root
                    following = tl.load(texts + index + 1, mask=there, other=-1)
                    match = tl.load(matches + node * length + index, mask=there, other=-1)
                    order = match.to(ORDER) * length + index
                    wanted = there & (following >= 0)
                    for one in range(number):
                        taken = tl.sum(tl.where(of_child == one, found, 0), axis=0)
                        wanted = wanted & (following != taken)
                    for one in range(num_left_out):
                        taken = tl.sum(tl.where(of_barred == one, left_out, 0), axis=0)
                        wanted = wanted & (following != taken)
                    best = tl.maximum(best, tl.where(wanted, order, -1))
                longest = tl.max(best, axis=0)
                place = tl.minimum(tl.maximum(longest, 0) % length + 1, length - 1)
                token = tl.where(longest < 0, -1, tl.load(texts + place))
                found = tl.where(of_child == number, token, found)
            # What a text has too few of: the smallest ids that are not taken
            free = tl.arange(0, BLOCK_T)
            for number in range(count):
                is_taken = tl.sum((found[:, None] == free[None, :]).to(tl.int32), axis=0)
                is_taken += tl.sum((left_out[:, None] == free[None, :]).to(tl.int32), axis=0)
                smallest = tl.min(tl.where(is_taken > 0, BLOCK_T, free), axis=0)
                missing = (of_child == number) & (found < 0)
                found = tl.where(missing, smallest.to(tl.int64), found)
            tl.store(tokens + child, found, mask=child >= 0)
            tl.debug_barrier()
