"""Prompts on their way into the caches of target and drafter, before a row decodes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from stree.arrival import Arrival
from stree.drafters.model import ModelDrafter
from stree.executors import Eager, Graphs
from stree.models.features import Features
from stree.models.hybrid import READ_AT_ONCE
from stree.prefixes import Prefixes
from stree.readers import LONGEST_PIECE
from stree.requests import Progress
from stree.rows import Rows
from stree_kernels import ops

PREFILL_CHUNK = LONGEST_PIECE  # prompt tokens that a row reads between two steps of others
FEATURES_CHUNK = READ_AT_ONCE  # prompt tokens whose features are in memory at once


class Prefill:
    """Reads what rows are given, for a step's target and drafter; prefixes that are kept are not
    read again."""

    def __init__(self, executor: Eager | Graphs, rows: Rows, prefixes: Prefixes | None) -> None:
        self.executor, self.step = executor, executor.step
        self.rows, self.prefixes = rows, prefixes

    def read(self, row: int, sequence: Progress, whole: bool) -> Tensor | None:
        """A piece of the row's prompt, or the whole of it; the logits (1, V) after its last token
        when it was the last piece."""
        if self.prefixes is not None and sequence.num_read == 0:
            read = self.prefixes.load(row, sequence.prompt)
            sequence.num_read, sequence.num_drafted_from = read
            sequence.stats.num_reused_tokens = sequence.num_read
        end = len(sequence.prompt) if whole else sequence.num_read + PREFILL_CHUNK
        tokens = self._on_device(sequence.prompt[:end])
        logits = self._read_tokens(row, sequence, tokens)
        if sequence.reading:
            return None
        if sequence.keep_prompt and self.prefixes is not None:
            self.prefixes.keep(row, sequence.prompt)
        return logits

    def prepare(self, row: int, sequence: Progress) -> None:
        """Make ready now what reading the row's prompt needs (graphs)."""
        step, reader, length = self.step, self.step.feature_drafter, len(sequence.prompt)
        layers = () if reader is None else reader.feature_layers
        read, drafted = sequence.num_read, sequence.num_drafted_from
        if self.prefixes is not None and read == 0:
            read, drafted = self.prefixes.lengths(sequence.prompt)
        prepare = self.executor.reader.prepare
        prepare(step.target, step.cache, row, read, length - read, layers)
        if isinstance(drafter := step.drafter, ModelDrafter):
            reads_inputs = drafter.inputs is not None
            rest = length - drafted
            prepare(drafter.model, drafter.cache, row, drafted, rest, (), reads_inputs)

    def _read_tokens(self, row: int, sequence: Progress, tokens: Tensor) -> Tensor:
        """Let target and drafter read those of the prompt's first tokens (T,) that they have not;
        returns the logits (1, V) after the last."""
        target, cache, drafter = self.step.target, self.step.cache, self.step.drafter
        reader, read_row = self.step.feature_drafter, self.executor.reader.read_row
        most = len(tokens) if reader is None else FEATURES_CHUNK
        for start in range(sequence.num_read, len(tokens), most):
            piece, drafted = tokens[start : start + most], sequence.num_drafted_from
            unread = tokens[drafted : start + most]
            if reader is not None:
                features = Features(reader.feature_layers)
                logits = read_row(target, cache, row, piece, features, start=start)
                self.let_drafter_read(row, unread, features.values[0], drafted)
            else:
                logits = read_row(target, cache, row, piece, start=start)
                if drafter is not None and len(unread):
                    self.let_drafter_read(row, unread, start=drafted)
            sequence.num_read = sequence.num_drafted_from = start + len(piece)
        return logits

    def let_drafter_read(
        self, row: int, tokens: Tensor, features: Tensor | None = None, start: int | None = None
    ) -> None:
        """Let the drafter read tokens (T,), with features as it takes them; start, as in
        `Pieces.read_row`."""
        drafter: Any = self.step.drafter
        if isinstance(drafter, ModelDrafter):
            read_row = partial(self.executor.reader.read_row, start=start)
            drafter.read(row, tokens, features, read_row)
        elif features is None:
            drafter.read(row, tokens)
        else:
            drafter.read(row, tokens, features)

    def begin(self, row: int, sequence: Progress, logits: Tensor) -> Arrival:
        """Let a row decode from the token that the target chooses by the logits (1, V) after its
        prompt, if they are finite; returns the token and whether they are."""
        rows = self.rows.narrow(row, 1, [sequence.generation])
        rows.position.fill_(len(sequence.prompt) - 1)  # as after a tree's root there
        depths = torch.zeros(1, 1, dtype=torch.int32, device=logits.device)
        token, score = ops.choose_best(rows.kept(logits)[:, None], depths, rows.sampling)
        finite = score.abs() < torch.inf
        first = torch.cat([token * finite, finite.to(token.dtype)])[:, 0]
        self.rows.begin(row, len(sequence.prompt), first[0], finite[0, 0])
        return self.executor.hand_over(first)

    def catch_up(self, decoding: dict[int, Progress]) -> None:
        """Let the drafter read what it has missed; the host knows all of it by now."""
        assert self.step.drafter is not None
        for row, each in decoding.items():
            if each.behind:
                tokens = (each.prompt + each.stop.tokens)[each.num_drafted_from :]
                *missed, root = tokens
                if missed:
                    self.let_drafter_read(row, self._on_device(missed))
                self.rows.begin(row, each.position, root)
                each.behind, each.longest = False, 1

    def _on_device(self, tokens: list[int]) -> Tensor:
        """Does not wait for the device."""
        return torch.tensor(tokens).to(self.step.target.device, non_blocking=True)
