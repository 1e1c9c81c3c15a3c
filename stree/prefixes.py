"""Prefixes that have been read before: a system prompt, or a conversation's earlier turns.

A recurrent state cannot be cut back, so a prefix serves prompts that begin with all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stree.drafters.model import ModelDrafter
from stree.last_used import LastUsed
from stree.models.cache import HybridCache, SavedPrefix


@dataclass(frozen=True)
class _Kept:
    target: SavedPrefix
    drafter: SavedPrefix | None
    following: Tensor | None = None  # what the drafter's next token is read with, if it is known


class Prefixes:
    """The `most` prefixes that were used last, each as copies of what the caches held of it.

    cache, the target's; drafter, which reads a prefix again unless it is a `ModelDrafter`.
    """

    def __init__(self, most: int, cache: HybridCache, drafter: Any) -> None:
        self.cache, self.drafter = cache, drafter
        self._kept: LastUsed[tuple[int, ...], _Kept] = LastUsed(most)

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, row: int, tokens: list[int]) -> None:
        """Keep what a row has read of `tokens`; nothing where it has gone on to others."""
        target = self.cache.narrow(row, 1).save()
        if not 0 < target.length <= len(tokens):
            return
        drafter, following, length = None, None, target.length
        if type(self.drafter) is ModelDrafter:  # one that keeps the text beside reads it again
            drafter = self.drafter.cache.narrow(row, 1).save()
            length = max(length, drafter.length)  # it has read the last root, too
            # The features are those of the last call's accepted path, pending or not
            if self.drafter.inputs is not None:
                pending = bool(self.cache.path_length[row])
                if drafter.length == target.length + pending:
                    following = self.drafter.inputs[row, 0].clone()
            if drafter.length > len(tokens):
                drafter, length = None, target.length
        self._kept[tuple(tokens[:length])] = _Kept(target, drafter, following)

    def longest_of(self, prompt: list[int]) -> tuple[int, ...]:
        """The longest prefix of `prompt` that there is, shorter than itself; () for none."""
        fitting = [each for each in self._kept if len(each) < len(prompt)]
        fitting = [each for each in fitting if list(each) == prompt[: len(each)]]
        return max(fitting, key=len, default=())

    def lengths(self, prompt: list[int]) -> tuple[int, int]:
        """How many tokens of a prompt the target need not read again, and the drafter."""
        return _lengths(self._longest_kept(prompt))

    def _longest_kept(self, prompt: list[int]) -> _Kept | None:
        prefix = self.longest_of(prompt)
        return self._kept[prefix] if prefix else None

    def load(self, row: int, prompt: list[int]) -> tuple[int, int]:
        """Let a row, which is empty, begin with `longest_of` its prompt; returns how many tokens of
        it the target has read then, and the drafter."""
        kept = self._longest_kept(prompt)
        if kept is not None:
            self.cache.narrow(row, 1).load(kept.target)
            if kept.drafter is not None:
                self.drafter.cache.narrow(row, 1).load(kept.drafter)
                if kept.following is not None:
                    self.drafter.inputs[row, 0] = kept.following
        return _lengths(kept)


def _lengths(kept: _Kept | None) -> tuple[int, int]:
    if kept is None:
        return 0, 0
    return kept.target.length, 0 if kept.drafter is None else kept.drafter.length
