"""Prompt reads: what each row reads of its prompt next, what it loads, and what is saved of it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from stree.engine.plan import Limits, Read, Save
from stree.engine.prefix_index import Prefix, PrefixIndex
from stree.engine.sequence import RunningSequence, SharedPrompt
from stree.tree_policy.policy import TreePolicy


class PromptReads:
    """Parts of prompts to read, by the scheduler's rows.

    Args:
        limits: Of the worker.
        tree_policy: Says whether the drafter of a row whose tree is chosen reads along.
        prefixes: Kept prefixes, which are loaded instead of being read.
    """

    def __init__(self, limits: Limits, tree_policy: TreePolicy, prefixes: PrefixIndex) -> None:
        self.limits, self.tree_policy, self.prefixes = limits, tree_policy, prefixes

    def next(
        self, sequences: dict[int, RunningSequence], whole: bool
    ) -> Iterator[Read]:
        """Yield the parts of prompts to read, in the order in which the rows were admitted.

        With `whole` each row reads its whole prompt, else one chunk; all chunks together stay
        within `prompt_tokens_per_step`. A row begins to decode after its last chunk.
        """
        left: float = math.inf if whole else self.limits.prompt_tokens_per_step or math.inf
        for row, each in sequences.items():
            if not each.is_prefilling or left <= 0:
                continue
            if each.num_read == 0:
                if self.prefixes.may_grow(each.prompt):
                    continue  # until the report tells what was saved
                if each.tree is None:
                    each.is_behind = not self.tree_policy.drafts
                    each.is_timed = self.tree_policy.times_reads
                else:  # the drafter reads nothing while no request wants drafts
                    each.is_behind = all(other.is_plain for other in sequences.values())
            for read in self._reads_of(row, each, whole):
                left -= read.stop - read.start
                yield read

    def _reads_of(self, row: int, sequence: RunningSequence, whole: bool) -> Iterator[Read]:
        """Yield what a row reads next; nothing while another row reads the prompt for it.

        Drafters whose rows cannot be saved read a prompt again.
        """
        shared, prompt = sequence.shared, sequence.prompt
        load, with_drafter = None, False
        if sequence.num_read == 0 and shared is not None:
            if shared.prefix is not None:
                yield self._take_over(row, sequence, shared)
                return
            if shared.read_by not in (None, sequence):
                return
            shared.read_by = sequence
        if sequence.num_read == 0 and (prefix := self.prefixes.longest_of(prompt)):
            self.prefixes.use(prefix)
            load, with_drafter = prefix.number, prefix.drafter > 0
            sequence.num_read, sequence.num_drafted_from = prefix.target, prefix.drafter
            sequence.stats.num_reused_tokens = prefix.target
        drafts = self.limits.has_drafter and not sequence.is_behind
        last = len(prompt) if whole else min(len(prompt), sequence.num_read + self.limits.chunk)
        for start, stop in self.pieces(sequence, sequence.num_read, last):
            drafted = sequence.num_drafted_from if drafts else None
            sequence.num_read = stop
            if drafts:
                sequence.num_drafted_from = stop
            sequence.has_begun = stop == len(prompt)
            yield Read(
                row, start, stop, drafted, load, with_drafter, self._saved_after(row, sequence),
                sequence.has_begun, sequence.is_timed,
            )
            load = None

    def pieces(
        self, sequence: RunningSequence, start: int, stop: int
    ) -> list[tuple[int, int]]:
        """Divide the tokens from `start` to `stop` where a prefix to keep ends between them."""
        end = sequence.num_to_keep
        is_inside = start < end < stop and self.prefixes.has_room_for(end)
        return [(start, end), (end, stop)] if is_inside else [(start, stop)]

    def _take_over(self, row: int, sequence: RunningSequence, shared: SharedPrompt) -> Read:
        """Return the read of a prompt that another row has read: a copy of its caches."""
        length, prefix = len(sequence.prompt), shared.prefix
        assert prefix is not None
        shared.left -= 1
        if not shared.left:
            shared.end()
        drafts = self.limits.has_drafter and not sequence.is_behind
        with_drafter = drafts and shared.drafter == length
        sequence.num_read = sequence.stats.num_reused_tokens = length
        drafted = length if with_drafter else 0
        if drafts:
            sequence.num_drafted_from = length
        sequence.has_begun = True
        return Read(
            row, length, length, drafted if drafts else None, prefix, with_drafter,
            begins=True, is_timed=sequence.is_timed,
        )

    def _saved_after(self, row: int, sequence: RunningSequence) -> Save | None:
        """Return what is saved of a row that has just read a piece of its prompt; None if nothing.

        Saved are the tokens to keep, and at the prompt's end what other rows wait for.
        """
        shared, read = sequence.shared, sequence.num_read
        is_end = read == sequence.num_to_keep
        keep = is_end and self.prefixes.has_room_for(read) and not sequence.is_stale
        waiting = sequence.has_begun and shared is not None and shared.left > 0
        if not (keep or waiting):
            return None
        number = self.prefixes.new_number(bool(waiting) + bool(keep))
        save = self.save(number, row, sequence, read)
        drafter = sequence.num_drafted_from if save.with_drafter else 0
        if keep:
            self.prefixes.add(Prefix(number, tuple(sequence.prompt[:read]), read, drafter))
        if waiting:
            assert shared is not None
            shared.prefix, shared.drafter = number, drafter
            shared.drop_at_end(self.prefixes.drop)
        return save

    def save(self, number: int, row: int, sequence: RunningSequence, most: int) -> Save:
        with_drafter = self.limits.saves_drafter and sequence.num_drafted_from > 0
        return Save(number, row, most, with_drafter)
