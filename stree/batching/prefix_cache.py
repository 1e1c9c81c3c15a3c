"""Cache of prefixes that were read before: a system prompt, or a conversation's earlier turns.

A recurrent state cannot be cut back, so a prefix serves only prompts that begin with all of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stree.common.host_copy import HostCopy
from stree.common.lru import LRUCache
from stree.drafters.model import ModelDrafter
from stree.models.cache import HybridCache, SavedPrefix


@dataclass(frozen=True)
class _Copies:
    """Copies of a row's caches; only the device knows yet how many tokens they hold."""

    tokens: tuple[int, ...]  # tokens of the row, of which a prefix is in the caches
    lengths: HostCopy  # the target's, of its pending path, and the drafter's
    target: list[tuple[Tensor, ...]]  # as of `HybridCache.copies`
    drafter: list[tuple[Tensor, ...]] | None
    following: Tensor | None  # input that the drafter adds to its next token


@dataclass(frozen=True)
class SavedRow:
    """Copies of a row's caches.

    Attributes:
        target: The row's part of the target's cache.
        drafter: The row's part of the drafter's cache; None unless the drafter is a model that has
            read the tokens.
        following: Input that the drafter adds to its next token; None if unknown, or without any.
    """

    target: SavedPrefix
    drafter: SavedPrefix | None
    following: Tensor | None

    def load(self, row: int, cache: HybridCache, drafter: Any) -> None:
        """Copy these copies into an empty row, the drafter's too unless the drafter is None."""
        cache.load(self.target, row)
        if drafter is not None and self.drafter is not None:
            drafter.cache.load(self.drafter, row)
            if self.following is not None:
                drafter.inputs[row, 0] = self.following


class PrefixCache:
    """LRU cache of prefixes, each as copies of the row's part of the caches.

    Args:
        most: Number of prefixes to keep; 0 keeps none.
        cache: The target's.
        drafter: Reads a prefix again unless it is a `ModelDrafter`.
        hand_over: Copies values to the host (`EagerRunner.hand_over`).
    """

    def __init__(
        self, most: int, cache: HybridCache, drafter: Any, hand_over: Callable[[Tensor], HostCopy]
    ) -> None:
        self.most, self.cache, self.drafter, self.hand_over = most, cache, drafter, hand_over
        self._kept: LRUCache[tuple[int, ...], SavedRow] = LRUCache(most)
        self._copied: deque[_Copies] = deque()  # their lengths may still be on the device

    def __len__(self) -> int:
        self._take_in()
        return len(self._kept)

    def keep(self, row: int, tokens: list[int], drafted: bool = True) -> None:
        """Keep the part of `tokens` that a row has read, without waiting for the device.

        A row that has read other tokens after them is not kept. drafted says whether the drafter
        may have read any of them.
        """
        if not self.most:
            return
        drafter = following = None
        lengths = [self.cache.length[row], self.cache.path_length[row]]
        if drafted and type(self.drafter) is ModelDrafter:  # others read the text again
            theirs, inputs = self.drafter.cache, self.drafter.inputs
            lengths.append(theirs.length[row])
            drafter = theirs.copies(row, len(tokens))
            following = None if inputs is None else inputs[row, 0].clone()
        told, target = self.hand_over(torch.stack(lengths)), self.cache.copies(row, len(tokens))
        self._copied.append(_Copies(tuple(tokens), told, target, drafter, following))
        while self._copied and self._copied[0].lengths.is_there():
            self._take_in_first()
        while len(self._copied) + len(self._kept) > self.most:
            if self._kept:
                del self._kept[next(iter(self._kept))]
            else:
                self._take_in_first()

    def clear(self) -> None:
        """Forget all prefixes, also those whose lengths are still on the device."""
        self._kept.clear()
        self._copied.clear()

    def _take_in(self) -> None:
        while self._copied:
            self._take_in_first()

    def _take_in_first(self) -> None:
        """Read the lengths of the oldest copies, and move them into the cache."""
        each = self._copied.popleft()
        length, pending, *drafted = each.lengths.tolist()
        if not 0 < length <= len(each.tokens):
            return
        drafter, following, longest = None, None, length
        if each.drafter is not None and (theirs := drafted[0]) <= len(each.tokens):
            drafter = SavedPrefix(theirs, each.drafter)
            longest = max(length, theirs)  # the drafter has read the last root, too
            # The features are those of the last call's accepted path, pending or not
            if theirs == length + bool(pending):
                following = each.following
        target = SavedPrefix(length, each.target)
        self._kept[each.tokens[:longest]] = SavedRow(target, drafter, following)

    def longest_of(self, prompt: list[int]) -> tuple[int, ...]:
        """Return the longest kept prefix that is shorter than `prompt`; () for none.

        Waits for the device to finish the copies of the prefix that was kept last.
        """
        self._take_in()
        fitting = [each for each in self._kept if len(each) < len(prompt)]
        fitting = [each for each in fitting if list(each) == prompt[: len(each)]]
        return max(fitting, key=len, default=())

    def lengths(self, prompt: list[int]) -> tuple[int, int]:
        """Return how many tokens of a prompt the target and the drafter need not read again."""
        prefix = self.longest_of(prompt)
        if not prefix:
            return 0, 0
        kept = self._kept[prefix]
        return kept.target.length, 0 if kept.drafter is None else kept.drafter.length

    def load(self, row: int, prompt: list[int]) -> tuple[int, int]:
        """Load `longest_of` a prompt into an empty row; return `lengths`."""
        if prefix := self.longest_of(prompt):
            self._kept[prefix].load(row, self.cache, self.drafter)
        return self.lengths(prompt)
