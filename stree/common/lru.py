"""LRU cache as a dictionary."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


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
