"""Order a tree's nodes, and count the blocks of block-sparse attention (DySpec, Appendix C).

A tree is the tuple of its nodes' parents, −1 for the root, each before its children; of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_

Parents = tuple[int, ...]


def by_level(parents: Sequence[int]) -> Parents:
    """Renumber a tree level by level, as drafters fill it."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return _renumbered(parents, sorted(range(len(parents)), key=depths.__getitem__))


def depth_first(parents: Sequence[int]) -> Parents:
    """Renumber a tree so that each node is followed by all below its first child, then its
    second's, …"""
    return _walked(parents, lambda children, sizes: children)


def heavy_path(parents: Sequence[int]) -> Parents:
    """Renumber a tree depth first, the child with most nodes below it first.

    (Sleator and Tarjan 1981.) Nodes of long paths, which see most, then lie together. Of equal
    children the first comes first.
    """
    return _walked(parents, lambda children, sizes: sorted(children, key=lambda node: -sizes[node]))


def num_blocks(parents: Sequence[int], size: int = 32, width: int | None = None) -> int:
    """Count the blocks of `size` nodes × `width` others of the mask that are not empty.

    In the mask a node sees itself and the nodes above it. width None is `size`.
    """
    width = size if width is None else width
    seen: list[int] = []  # by node, the blocks that it sees, a bit each
    for node, parent in enumerate(parents):
        seen.append((seen[parent] if parent >= 0 else 0) | 1 << node // width)
    rows = (seen[first : first + size] for first in range(0, len(seen), size))
    return sum(reduce(or_, row).bit_count() for row in rows)


def _walked(parents: Sequence[int], ranked: Callable[[list[int], list[int]], list[int]]) -> Parents:
    children: list[list[int]] = [[] for _ in parents]
    sizes = [1] * len(parents)
    for node in range(len(parents) - 1, 0, -1):
        children[parents[node]].append(node)
        sizes[parents[node]] += sizes[node]
    stack = [0]
    order: list[int] = []
    while stack:
        node = stack.pop()
        order.append(node)
        stack += ranked(children[node][::-1], sizes)[::-1]
    return _renumbered(parents, order)


def _renumbered(parents: Sequence[int], order: Sequence[int]) -> Parents:
    """Renumber a tree's nodes in this order."""
    new = {-1: -1, **{node: place for place, node in enumerate(order)}}
    return tuple(new[parents[node]] for node in order)
