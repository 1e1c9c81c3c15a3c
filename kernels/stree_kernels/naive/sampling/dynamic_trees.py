"""Dynamic trees on the device in plain PyTorch: the twins of `sampling/dynamic_trees.py`.

Shapes: B sequences, N nodes of a tree, P nodes of a pool, from which a tree is chosen, I of them
that have children (the root first), Q picks, W conv width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stree_kernels.contracts import Topology


def build_topology(parents: Tensor, max_depth: int, topology: Topology) -> None:
    """Write ancestors, depths and windows of trees whose parents only the device knows.

    Args: parents (B, N) int64, each before its children; below 0 for a root or padding, which sees
    itself only. max_depth, of any node at most. Nothing waits for the device.
    """
    size, width = parents.shape[1], topology.windows.shape[2]
    node = torch.arange(size, device=parents.device)
    at = node.expand_as(parents)
    path = [at]  # of each node up to its root, −1 beyond
    for _ in range(max_depth):
        at = torch.where(at >= 0, parents.gather(1, at.clamp(min=0)), -1)
        path.append(at)
    above = torch.stack(path, -1)  # (B, N, max_depth + 1)
    seen = torch.where(above >= 0, above, node[:, None])  # a node sees itself anyhow
    topology.ancestors.zero_().scatter_(2, seen, True)
    depths = (above >= 0).sum(-1, dtype=torch.int32) - 1
    topology.depths.copy_(depths)
    for back in range(width):  # before the root comes the end of the tail
        seen = width - 1 - back + depths
        if back <= max_depth:
            seen = torch.where(above[..., back] >= 0, width - 1 + above[..., back], seen)
        topology.windows[..., width - 1 - back] = seen


def pick_level(
    values: Tensor, drawn_by: Tensor, begin: int, end: int, picks: Tensor, parents: Tensor
) -> None:
    """Pick the nodes begin … end − 1 of each pool with the largest values, to have children next.

    Args:
        values: (B, P) fp32, at most 0; NaN counts least; the first of equal values wins.
        drawn_by: (P,) place of each node's parent among the nodes that have children.
        picks: (B, Q) int64, written in ascending order.
        parents: (B, Q), written: parents in these nodes' trees without the root, drawn_by − 1.
    """
    best = _ranked(values[:, begin:end])[:, : picks.shape[1]]
    found = begin + best.sort(dim=1).values
    picks.copy_(found)
    parents.copy_(drawn_by[found] - 1)


def pick_tree(
    values: Tensor, drawn_by: Tensor, drawn: Tensor, pool_depths: Tensor, pool_tokens: Tensor,
    tokens: Tensor, parents: Tensor, depths: Tensor, inner: Tensor | None = None,
    least: float = -math.inf,
) -> None:
    """Pick the nodes of each pool with the largest values as a tree, the largest first.

    A smaller tree is its first nodes. No child has a larger value than its parent, and of equal
    values the first wins: so the parents of picks are picks, and come before them.

    Args:
        values: (B, P) as in `pick_level`, the root first with the value 0.
        drawn_by: (P,) as in `pick_level`.
        drawn: (B, I), nodes from which others were drawn.
        pool_depths: (P,) int32.
        pool_tokens: (B, P).
        tokens: (B, N), written.
        parents: (B, N), written; −1 for the root.
        depths: (B, N) int32, written.
        inner: (B, N), written: the place of each pick in `drawn`, 0 for one without children; None
            is not wanted.
        least: Picks of a lower value are absent: their parents are −2, and their depths 0.
    """
    picks = _ranked(values)[:, : tokens.shape[1]]
    tokens.copy_(pool_tokens.gather(1, picks))
    numbers = torch.arange(tokens.shape[1], device=picks.device).expand_as(picks)
    numbers = torch.zeros_like(pool_tokens).scatter_(1, picks, numbers)
    parents.copy_(numbers.gather(1, drawn.gather(1, drawn_by[picks])))
    parents[:, 0] = -1
    depths.copy_(pool_depths[picks])
    if inner is not None:
        places = torch.arange(drawn.shape[1], device=picks.device).expand_as(drawn)
        drawn_at = torch.zeros_like(pool_tokens).scatter_(1, drawn, places)
        inner.copy_(drawn_at.gather(1, picks))
    absent = values.gather(1, picks) < least
    parents.masked_fill_(absent, -2)
    depths.masked_fill_(absent, 0)


def _ranked(values: Tensor) -> Tensor:
    """Return indices from the largest value down; of equal values the first comes first."""
    values = torch.where(values.isnan(), -torch.inf, values)
    return values.sort(dim=1, descending=True, stable=True).indices
