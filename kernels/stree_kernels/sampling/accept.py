"""Acceptance on the device, in one launch (Triton).

One program a sequence walks down its tree. The naive twin is `naive.accept_choices`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree_kernels.launch import follow, overlapping


def accept_choices(
    best: Tensor, highest: Tensor, tokens: Tensor, parents: Tensor, finite: Tensor | None,
    active: Tensor, path: Tensor, path_length: Tensor, block: Tensor, position: Tensor,
    root: Tensor, report: Tensor,
) -> None:
    """Compute `naive.accept_choices` in one launch; last strides are 1.

    All tensors except tokens, path, block and report are contiguous.
    """
    batch, num_nodes = tokens.shape
    num_flags = 1 if finite is None else finite[0].numel()
    num_places = triton.next_power_of_2(num_nodes)
    accept_kernel[(batch,)](
        best, highest, tokens, tokens.stride(0), parents,
        None if finite is None else finite.view(torch.uint8), num_flags, active.view(torch.uint8),
        path, path.stride(0), path_length, block, block.stride(0), position, root,
        report, report.stride(0), num_nodes, (report.shape[1] - 2) // 2,
        BLOCK=num_places, BLOCK_FLAGS=triton.next_power_of_2(num_flags),
        num_warps=max(1, num_places // 256), **overlapping(tokens),
    )


@triton.jit
def accept_kernel(
    best, highest, tokens, token_stride, parents, finite, num_flags, active,
    path, path_stride, path_length, block, block_stride, position, root,
    report, report_stride, num_nodes, longest,
    BLOCK: tl.constexpr, BLOCK_FLAGS: tl.constexpr, OVERLAPS: tl.constexpr,
):
    follow(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK)
    known = node < num_nodes
    wanted = tl.load(best + row * num_nodes + node, mask=known, other=-1)
    token = tl.load(tokens + row * token_stride + node, mask=known, other=-2)
    parent = tl.load(parents + row * num_nodes + node, mask=known, other=-2)
    value = tl.load(highest + row * num_nodes + node, mask=known, other=0.0)
    target_finite = tl.min((tl.abs(value) < float("inf")).to(tl.int32), axis=0)
    draft_finite = 1
    if finite is not None:
        flag = tl.arange(0, BLOCK_FLAGS)
        flags = tl.load(finite + row * num_flags + flag, mask=flag < num_flags, other=1)
        draft_finite = tl.min(flags.to(tl.int32), axis=0)
    path += row * path_stride
    block += row * block_stride
    report += row * report_stride

    here = 0
    count = 0
    walking = tl.load(active + row).to(tl.int32)
    decodes = walking == 1
    for step in range(longest):
        # A finished walk stores nothing more
        going = walking == 1
        tl.store(path + step, here, mask=going)
        tl.store(report + 2 + longest + step, here, mask=going)
        choice = tl.sum(tl.where(node == here, wanted, 0), axis=0)
        tl.store(block + 1 + step, choice, mask=going)
        tl.store(root + row, choice, mask=going)
        tl.store(report + 2 + step, choice, mask=going)
        count += walking
        child = tl.min(tl.where((parent == here) & (token == choice), node, BLOCK), axis=0)
        walking = tl.where(going & (child < BLOCK), 1, 0)
        here = tl.where(walking == 1, child, here)
    tl.store(path_length + row, count)
    tl.store(block, count, mask=decodes)
    tl.store(position + row, tl.load(position + row) + count, mask=decodes)
    drafted = tl.where(draft_finite == 1, 1, -1)
    tl.store(report, tl.where(target_finite == 1, drafted, 0))
    tl.store(report + 1, count)
