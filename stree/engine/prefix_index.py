"""Index of saved prefixes on the host: a system prompt, or a conversation's earlier turns.

A recurrent state cannot be cut back, so a prefix serves only prompts that begin with all of it.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class Prefix:
    """A saved prefix.

    Attributes:
        number: The worker's copies have it.
        tokens: Tokens of the prefix.
        target: How many of them the target holds.
        drafter: How many of them the drafter holds; 0 for none.
    """

    number: int
    tokens: tuple[int, ...]
    target: int
    drafter: int


class PrefixIndex:
    """Prefixes that are kept, and those that are being saved; the one used longest ago goes first.

    Args:
        most: Number of prefixes to keep, those that are being saved included; 0 keeps none.

    Attributes:
        budget: Bytes that all of them may take together.
        bytes_each: Bytes of a prefix, and of each of its tokens.
    """

    def __init__(self, most: int) -> None:
        self.most, self.budget, self.bytes_each = most, math.inf, (0, 0)
        self.kept: dict[tuple[int, ...], Prefix] = {}
        self._sizes: dict[int, int] = {}  # bytes by number, the one used longest ago first
        # Tokens by number, and how many of them are saved at least; reports have the lengths
        self.unsettled: dict[int, tuple[tuple[int, ...], int]] = {}
        self.drops: list[int] = []  # numbers that nobody needs any more, for the next plan
        self._uses: Counter[int] = Counter()
        self._last = 0

    def bytes_of(self, num_tokens: int) -> int:
        """Return the bytes of a prefix of so many tokens."""
        each, token = self.bytes_each
        return each + token * num_tokens

    def has_room_for(self, num_tokens: int) -> bool:
        """Return whether a prefix of so many tokens is kept, if need be instead of all others."""
        return self.most > 0 and self.bytes_of(num_tokens) <= self.budget

    def new_number(self, uses: int = 1) -> int:
        """Return the number of a new prefix, which is dropped after so many calls of `drop`."""
        self._last += 1
        self._uses[self._last] = uses
        return self._last

    def drop(self, number: int) -> None:
        """Note that one use of a prefix has ended."""
        self._uses[number] -= 1
        if not self._uses[number]:
            del self._uses[number]
            self._sizes.pop(number, None)
            self.drops.append(number)

    def add(self, prefix: Prefix) -> None:
        """Keep a prefix, instead of another one of the same tokens."""
        if (before := self.kept.pop(prefix.tokens, None)) is not None:
            del self._sizes[before.number]
            self.drop(before.number)
        self.kept[prefix.tokens] = prefix
        self._sizes[prefix.number] = self.bytes_of(len(prefix.tokens))
        self._make_room()

    def await_lengths(self, number: int, tokens: list[int], least: int) -> None:
        """Note that at least `least` of these tokens are being saved; the report has the number."""
        self.unsettled[number] = tuple(tokens), least
        self._sizes[number] = self.bytes_of(len(tokens))
        self._make_room()

    def settle(self, number: int, target: int, drafter: int) -> None:
        """Keep a prefix that was being saved, now that its lengths are known.

        A row that has read other tokens after those of its answer is not kept.
        """
        if number not in self.unsettled:
            return
        tokens, _ = self.unsettled.pop(number)
        if not 0 < target <= len(tokens):
            self.drop(number)
            return
        if drafter > len(tokens):
            drafter = 0
        num_tokens = max(target, drafter)  # the drafter has read the last root, too
        self.add(Prefix(number, tokens[:num_tokens], target, drafter))

    def longest_of(self, prompt: list[int]) -> Prefix | None:
        """Return the longest kept prefix that is shorter than a prompt; None for none."""
        asked = tuple(prompt)
        fitting = [
            each for tokens, each in self.kept.items()
            if len(tokens) < len(asked) and tokens[-1] == asked[len(tokens) - 1]
            and tokens == asked[: len(tokens)]
        ]
        return max(fitting, key=lambda each: len(each.tokens), default=None)

    def use(self, prefix: Prefix) -> None:
        """Note that a prefix is used now."""
        self._sizes[prefix.number] = self._sizes.pop(prefix.number)

    def may_grow(self, prompt: list[int]) -> bool:
        """Return whether a prefix that is being saved may be one of a prompt."""
        return any(
            list(tokens[:least]) == prompt[:least] for tokens, least in self.unsettled.values()
        )

    def clear(self) -> None:
        """Forget all prefixes, also those that are being saved."""
        for number in [*(each.number for each in self.kept.values()), *self.unsettled]:
            self.drop(number)
        self.kept.clear()
        self.unsettled.clear()
        self._sizes.clear()

    def _make_room(self) -> None:
        while len(self._sizes) > self.most or sum(self._sizes.values()) > self.budget:
            number = next(iter(self._sizes))
            del self._sizes[number]
            self.unsettled.pop(number, None)
            self.kept = {tokens: each for tokens, each in self.kept.items()
                         if each.number != number}
            self.drop(number)
