"""Prefixes that have been read before: a system prompt, or a conversation's earlier turns.

A recurrent state cannot be cut back, so a prefix serves prompts that begin with all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from stree.drafters.model import ModelDrafter
from stree.last_used import LastUsed
from stree.models.cache import HybridCache, SavedPrefix


@dataclass(frozen=True)
class _Kept:
    target: SavedPrefix
    drafter: SavedPrefix | None


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
        drafter = None
        if type(self.drafter) is ModelDrafter:  # one that keeps the text beside reads it again
            drafter = self.drafter.cache.narrow(row, 1).save()
            if drafter.length > target.length:
                drafter = None
        self._kept[tuple(tokens[: target.length])] = _Kept(target, drafter)

    def longest_of(self, prompt: list[int]) -> tuple[int, ...]:
        """The longest prefix of `prompt` that there is, shorter than itself; () for none."""
        fitting = [each for each in self._kept if len(each) < len(prompt)]
        fitting = [each for each in fitting if list(each) == prompt[: len(each)]]
        return max(fitting, key=len, default=())

    def load(self, row: int, prompt: list[int]) -> int:
        """Let a row, which is empty, begin with `longest_of` its prompt; returns how many tokens
        that are."""
        prefix = self.longest_of(prompt)
        if not prefix:
            return 0
        kept = self._kept[prefix]
        self.cache.narrow(row, 1).load(kept.target)
        if self.drafter is not None:
            read = 0
            if kept.drafter is not None:
                self.drafter.cache.narrow(row, 1).load(kept.drafter)
                read = kept.drafter.length
            if read < len(prefix):
                missed = torch.tensor(prefix[read:], device=self.cache.device)
                self.drafter.read(row, missed)
        return len(prefix)
