"""What was used last is kept, by a dictionary or of a function's results: it takes memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from stree.trees.token_tree import TokenTree

K = TypeVar("K")
V = TypeVar("V")
P = ParamSpec("P")
MOST, MOST_LARGE = 256, 8  # results a function, for small trees and for large ones
LARGE = 256  # nodes above which a tree's mask is counted in megabytes


class LRUCache(dict[K, V]):
    """Holds the `most` values that were last set or got by []; the one used longest ago goes."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __getitem__(self, key: K) -> V:
        value = self.pop(key)  # a dict is in the order of insertion
        super().__setitem__(key, value)
        return value

    def __setitem__(self, key: K, value: V) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        if len(self) > self.most:
            del self[next(iter(self))]


def kept_by_trees(make: Callable[P, V]) -> Callable[P, V]:
    """A function of a tree, or of a batch of them, first, that keeps what it made last."""
    few, many = (functools.lru_cache(most)(make) for most in (MOST_LARGE, MOST))

    @functools.wraps(make)
    def kept(*arguments: P.args, **options: P.kwargs) -> V:
        trees = arguments[0]
        trees = (trees,) if isinstance(trees, TokenTree) else trees
        large = any(tree.num_nodes > LARGE for tree in trees)  # type: ignore[attr-defined]
        return (few if large else many)(*arguments, **options)  # type: ignore[arg-type]

    return kept
