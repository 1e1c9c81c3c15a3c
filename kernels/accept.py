"""Greedy acceptance on the device, in one launch (Triton).

One program a sequence walks down its tree. The naive twin is `naive.accept_greedy`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree_kernels.launch import follow, overlapping


def accept_greedy(
    best: Tensor,
    highest: Tensor,
    tokens: Tensor,
    parents: Tensor,
    finite: Tensor,
    path: Tensor,
    path_length: Tensor,
    block: Tensor,
    report: Tensor,
) -> None:
    """`naive.accept_greedy` in one launch; last strides are 1, finite is contiguous."""
    batch, num_nodes = tokens.shape
    accept_kernel[(batch,)](
        best, highest, tokens, parents, finite.view(torch.uint8), finite[0].numel(),
        path, path.stride(0), path_length,
        block, block.stride(0), report, report.stride(0), num_nodes, block.shape[1] - 1,
        BLOCK=triton.next_power_of_2(num_nodes),
        BLOCK_FLAGS=triton.next_power_of_2(finite[0].numel()),
        num_warps=1, **overlapping(tokens),
    )  # fmt: skip


@triton.jit
def accept_kernel(
    best, highest, tokens, parents, finite, num_flags, path, path_stride, path_length,
    block, block_stride, report, report_stride, num_nodes, longest,
    BLOCK: tl.constexpr, BLOCK_FLAGS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK)
    known = node < num_nodes
    wanted = tl.load(best + row * num_nodes + node, mask=known, other=-1)
    token = tl.load(tokens + row * num_nodes + node, mask=known, other=-2)
    parent = tl.load(parents + node, mask=known, other=-2)
    value = tl.load(highest + row * num_nodes + node, mask=known, other=0.0)
    all_finite = tl.min((tl.abs(value) < float("inf")).to(tl.int32), axis=0)
    flag = tl.arange(0, BLOCK_FLAGS)
    flags = tl.load(finite + row * num_flags + flag, mask=flag < num_flags, other=1)
    all_finite = all_finite & tl.min(flags.to(tl.int32), axis=0)
    path += row * path_stride
    block += row * block_stride
    report += row * report_stride

    here = 0
    count = 0
    walking = 1
    for step in range(longest):
        # A finished walk stores nothing more
        going = walking == 1
        tl.store(path + step, here, mask=going)
        tl.store(report + 2 + longest + step, here, mask=going)
        choice = tl.sum(tl.where(node == here, wanted, 0), axis=0)
        tl.store(block + 1 + step, choice, mask=going)
        tl.store(report + 2 + step, choice, mask=going)
        count += walking
        child = tl.min(tl.where((parent == here) & (token == choice), node, BLOCK), axis=0)
        walking = tl.where(going & (child < BLOCK), 1, 0)
        here = tl.where(walking == 1, child, here)
    tl.store(path_length + row, count)
    tl.store(block, count)
    tl.store(report, all_finite)
    tl.store(report + 1, count)
