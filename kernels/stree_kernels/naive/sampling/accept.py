"""Acceptance along the target's own choices in plain PyTorch: the twin of `sampling/accept.py`."""

from __future__ import annotations

import torch
from torch import Tensor


def accept_choices(
    best: Tensor, highest: Tensor, tokens: Tensor, parents: Tensor, finite: Tensor | None,
    active: Tensor, path: Tensor, path_length: Tensor, block: Tensor, position: Tensor,
    root: Tensor, report: Tensor,
) -> None:
    """Follow the target's own choices down each tree, and write the accepted path.

    M is larger than the trees' depth.

    Args:
        best: (B, N), the token that the target chooses after each node.
        highest: (B, N), its score.
        tokens: (B, N) of the trees.
        parents: (B, N) of the trees.
        finite: (B, …) bool, which of the drafter's logits were finite; None without logits.
        active: (B,) bool, rows that decode.
        path: (B, K), written: the accepted nodes.
        path_length: (B,), written: their number.
        block: (B, 1 + M), written in active rows: the number of new tokens, and the tokens, the
            target's own last one included.
        position: (B,), moved on by that number in active rows.
        root: (B, 1), written in active rows: the last new token.
        report: (B, 2 + 2·M), written: 1 when all logits were finite, 0 when the target's were not,
            −1 when the drafter's were not; the block; and the path.
    """
    longest = (report.shape[1] - 2) // 2
    node = torch.zeros_like(root)
    nodes, choices, walked = [node], [best[:, :1]], [active[:, None]]
    for _ in range(longest - 1):
        matching, child = ((parents == node) & (tokens == choices[-1])).max(1, keepdim=True)
        walked.append(walked[-1] & matching)
        node = torch.where(walked[-1], child, node)
        nodes.append(node)
        choices.append(best.gather(1, node))
    accepted, chosen, walking = (torch.cat(each, 1) for each in (nodes, choices, walked))
    count = walking.sum(1, keepdim=True)
    for written, value in (
        (path[:, :longest], accepted),
        (report[:, 2 + longest :], accepted),
        (report[:, 2 : 2 + longest], chosen),
        (block[:, 1 : 1 + longest], chosen),
        (root, chosen[:, -1:]),  # a row that goes no further stays at its last node
        (block[:, :1], count),
    ):
        there = walking if value.shape == walking.shape else walking[:, :1]
        torch.where(there, value, written, out=written)
    path_length.copy_(count[:, 0])
    position.add_(path_length)
    code = highest.isfinite().all(1).long()
    if finite is not None:
        code = torch.where((code == 1) & ~finite.flatten(1).all(1), -1, code)
    report[:, :2] = torch.cat([code[:, None], count], 1)
