"""LRU cache as a dictionary, and one for functions of trees, which keeps fewer large trees."""

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
    """Dictionary of the `most` values that were last set or got by []; older ones are dropped."""

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
    """Cache the last results of a function whose first argument is a tree, or several trees."""
    few, many = (functools.lru_cache(most)(make) for most in (MOST_LARGE, MOST))

    @functools.wraps(make)
    def kept(*arguments: P.args, **options: P.kwargs) -> V:
        trees = arguments[0]
        trees = (trees,) if isinstance(trees, TokenTree) else trees
        large = any(tree.num_nodes > LARGE for tree in trees)  # type: ignore[attr-defined]
        return (few if large else many)(*arguments, **options)  # type: ignore[arg-type]

    return kept
