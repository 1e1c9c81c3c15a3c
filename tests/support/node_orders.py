"""Renumber a tree's nodes depth first, for tests of orders in which no drafter fills a tree."""

from __future__ import annotations

from collections.abc import Sequence


def depth_first(parents: Sequence[int], heaviest_first: bool = False) -> tuple[int, ...]:
    """Return the parents, −1 for the root, with each node followed by all below its first child.

    heaviest_first: children come by the number of nodes below them, most first, else as numbered.
    """
    children: list[list[int]] = [[] for _ in parents]
    sizes = [1] * len(parents)
    for node in range(len(parents) - 1, 0, -1):
        children[parents[node]].insert(0, node)
        sizes[parents[node]] += sizes[node]
    order, waiting = [], [0]
    while waiting:
        order.append(waiting.pop())
        below = children[order[-1]]
        if heaviest_first:
            below.sort(key=lambda node: -sizes[node])
        waiting += below[::-1]
    place = {-1: -1, **{node: at for at, node in enumerate(order)}}
    return tuple(place[parents[node]] for node in order)
