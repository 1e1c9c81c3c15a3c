"""Prefill: read prompts into the caches of target and drafter before a row decodes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stree.batching.prefillers import LONGEST_CHUNK, ChunkedPrefill, chunk_sizes
from stree.batching.prefix_cache import PrefixCache, SavedRow
from stree.batching.runners import EagerRunner, GraphRunner
from stree.batching.sequences import RunningSequence, SharedPrompt
from stree.batching.state import NUM_SETTINGS, BatchState, bits_of
from stree.common.host_copy import HostCopy
from stree.drafters.model import ModelDrafter
from stree.logits.asked import Asked
from stree.logits.log_probs import log_probs_of
from stree.models.cache import SavedPrefix
from stree.models.hidden_states import HiddenStateTap
from stree.models.model import READ_AT_ONCE
from stree_kernels import ops

PREFILL_CHUNK = LONGEST_CHUNK  # prompt tokens that a row reads between two steps of others
FEATURES_CHUNK = READ_AT_ONCE  # prompt tokens whose features are in memory at once


class Prefill:
    """Read the prompts of rows with a step's target and drafter; reuse prefixes that are kept.

    Args:
        runner: Of the step; its `prefiller` reads the tokens.
        rows: All rows of the batch.
        prefixes: Prefixes that need not be read again.
    """

    def __init__(
        self, runner: EagerRunner | GraphRunner, rows: BatchState, prefixes: PrefixCache
    ) -> None:
        self.runner, self.step = runner, runner.step
        self.rows, self.prefixes = rows, prefixes
        self._given = rows.position.new_zeros(1 + NUM_SETTINGS)  # a row's number and its values
        self._logits: Tensor | None = None  # (1, V) after a prompt

    def admit(self, row: int, sequence: RunningSequence) -> None:
        """Give a row to a request: clear what the last one left, and write the settings."""
        drafter = self.step.drafter
        self._give(row, bits_of(sequence.generation))
        self.runner.run("admit", self._admit)
        if drafter is not None and not drafter.capturable:
            drafter.clear(row)
        self._begin_rules(row, sequence)

    def _begin_rules(self, row: int, sequence: RunningSequence) -> None:
        """Write the request's biases, penalties and barred words."""
        vocabulary, eos_ids = self.step.target.config.vocab_size, sequence.stop.eos_ids
        generation, prompt = sequence.generation, sequence.prompt
        self.rows.rules.begin(row, self.rows.active, generation, prompt, vocabulary, eos_ids)

    def _admit(self) -> None:
        row, drafter = self._given[:1], self.step.drafter
        self.rows.set_to(row, self._given[1:])
        self.step.cache.reset(row)
        if drafter is not None and drafter.capturable:
            drafter.clear(row)

    def read(self, row: int, sequence: RunningSequence, whole: bool) -> None:
        """Read the next chunk of the row's prompt, or with `whole` all that is left.

        After the last chunk the row begins to decode.
        """
        logits = self._read(row, sequence, whole)
        if logits is not None:
            sequence.first = self.begin(row, sequence, logits)

    def _read(self, row: int, sequence: RunningSequence, whole: bool) -> Tensor | None:
        """Read as `read` does.

        Returns the logits (1, V) after the prompt's last token, or None while tokens are left. A
        row that shares its prompt waits while another row reads it, then copies that row's caches.
        """
        shared = sequence.shared
        if shared is not None and sequence.num_read == 0:
            if shared.read is not None:
                return self._take_over(row, sequence, shared)
            if shared.read_by not in (None, sequence):
                return None
            shared.read_by = sequence
        if sequence.num_read == 0:
            read = self.prefixes.load(row, sequence.prompt)
            sequence.num_read, sequence.num_drafted_from = read
            sequence.stats.num_reused_tokens = sequence.num_read
        last = len(sequence.prompt) if whole else sequence.num_read + PREFILL_CHUNK
        tokens = self._on_device(sequence.prompt[:last])
        for end in self._ends(sequence, sequence.num_read, len(tokens)):
            logits = self._read_tokens(row, sequence, tokens[:end])
            if end == sequence.num_to_keep and not sequence.is_stale:
                self.prefixes.keep(row, sequence.prompt[:end], sequence.num_drafted_from > 0)
        if sequence.is_prefilling:
            return None
        if shared is not None and shared.left:
            shared.read = self._hold(row, sequence, logits)
        return logits

    def _ends(self, sequence: RunningSequence, start: int, end: int) -> list[int]:
        """Return where to stop between `start` and `end`: the prefix to keep, and the end."""
        is_inside = self.prefixes.most and start < sequence.num_to_keep < end
        return [sequence.num_to_keep, end] if is_inside else [end]

    def _hold(
        self, row: int, sequence: RunningSequence, logits: Tensor
    ) -> tuple[Tensor, SavedRow]:
        """Copy logits and caches of a row that has just read its prompt."""
        length, drafter, drafted, following = len(sequence.prompt), self._along, None, None
        if drafter is not None and sequence.num_drafted_from == length:
            drafted = SavedPrefix(length, drafter.cache.copies(row, length))
            following = None if drafter.inputs is None else drafter.inputs[row, 0].clone()
        target = SavedPrefix(length, self.step.cache.copies(row, length))
        return logits.clone(), SavedRow(target, drafted, following)

    def _take_over(self, row: int, sequence: RunningSequence, shared: SharedPrompt) -> Tensor:
        """Copy a prompt that another row has read into a row; return the logits (1, V) after it.

        Drafters that keep more than a model's cache read the prompt again.
        """
        logits, held = shared.read
        shared.left -= 1
        if not shared.left:
            shared.read = None
        drafter = None if sequence.behind else self.step.drafter
        held.load(row, self.step.cache, drafter)
        sequence.num_read = sequence.stats.num_reused_tokens = len(sequence.prompt)
        if drafter is not None:
            if held.drafter is None:
                with self._timed(sequence):
                    self.let_drafter_read(row, self._on_device(sequence.prompt), None, 0)
            sequence.num_drafted_from = len(sequence.prompt)
        return logits

    def prepare(self, row: int, sequence: RunningSequence) -> None:
        """Capture the graphs that the prefill of the row's prompt needs."""
        step, feature_drafter, length = self.step, self.step.feature_drafter, len(sequence.prompt)
        read, drafted = sequence.num_read, sequence.num_drafted_from
        if read == 0:
            read, drafted = self.prefixes.lengths(sequence.prompt)
        prepare, drafter = self.runner.prefiller.prepare, step.drafter
        along = self._along
        ways = [(() if feature_drafter is None else feature_drafter.feature_layers, along)]
        if sequence.tree is None:  # the drafter may be left behind, and catch up later
            ways.append(((), None))
            self.prepare_catching_up(row)
        for layers, also in dict.fromkeys(ways):
            start = read
            for end in self._ends(sequence, read, length):
                graphs = prepare(
                    step.target, step.cache, row, start, end - start, layers, False, also
                )
                start = end
        key = self._beginning(sequence)
        begun = self.runner.is_ready(key) or key[1].processed
        if graphs and graphs[-1].given and not begun:  # as it will begin, but for the token
            self.begin(row, sequence, graphs[-1].given[0])
            self.rows.active[row] = False
            self._begin_rules(row, sequence)
        if isinstance(drafter, ModelDrafter):
            alone = length if along is None else read
            self._prepare_drafter(drafter, row, drafted, alone - drafted)

    def prepare_catching_up(self, row: int) -> None:
        """Capture the graphs that the drafter needs to catch up after plain decoding steps.

        The row is one without a pending path (`ChunkedPrefill.prepare`).
        """
        if isinstance(drafter := self.step.drafter, ModelDrafter):
            most = drafter.cache.max_length
            for size in chunk_sizes(most):
                self._prepare_drafter(drafter, row, 0, min(size, most))

    def _prepare_drafter(self, drafter: ModelDrafter, row: int, start: int, count: int) -> None:
        model, cache, reads_inputs = drafter.model, drafter.cache, drafter.inputs is not None
        self.runner.prefiller.prepare(model, cache, row, start, count, (), reads_inputs)

    def _read_tokens(self, row: int, sequence: RunningSequence, tokens: Tensor) -> Tensor:
        """Let target and drafter read the tokens (T,) of the prompt that they have not read yet.

        A drafter that is behind reads none. Returns the logits (1, V) after the last token.
        """
        target, cache, runner = self.step.target, self.step.cache, self.runner
        drafter, along, feature_drafter = self.step.drafter, self._along, self.step.feature_drafter
        if sequence.behind:
            drafter = along = feature_drafter = None
        most = len(tokens) if feature_drafter is None else FEATURES_CHUNK
        for start in range(sequence.num_read, len(tokens), most):
            chunk, drafted = tokens[start : start + most], sequence.num_drafted_from
            if along is not None and isinstance(runner.prefiller, ChunkedPrefill):
                timed = partial(self._timed, sequence)
                if drafted < start:  # the prefix's features are not kept
                    with timed():
                        self.let_drafter_read(row, tokens[drafted:start], None, drafted)
                ahead, read_both = max(drafted - start, 0), runner.prefiller.read_both
                logits = read_both(
                    target, cache, along, row, chunk, timed, start=start, ahead=ahead
                )
            else:
                layers = () if feature_drafter is None else feature_drafter.feature_layers
                features = HiddenStateTap(layers) if layers else None
                asked = () if features is None else (features,)
                logits = runner.prefiller.read_row(target, cache, row, chunk, *asked, start=start)
                unread = tokens[drafted : start + most]
                if drafter is not None and len(unread):
                    known = None if features is None else features.values[0]
                    with self._timed(sequence):
                        self.let_drafter_read(row, unread, known, drafted)
            sequence.num_read = start + len(chunk)
            if drafter is not None:
                sequence.num_drafted_from = sequence.num_read
        return logits

    @property
    def _along(self) -> ModelDrafter | None:
        """The drafter if it can read each chunk right after the target, else None.

        Drafters that also keep the text cannot.
        """
        drafter = self.step.drafter
        return drafter if type(drafter) is ModelDrafter else None

    def _timed(
        self, sequence: RunningSequence, caught_up: bool = False
    ) -> AbstractContextManager[None]:
        """Time the drafter's prefill inside the block, if the tree policy of the row needs it."""
        if sequence.tree is not None:
            return nullcontext()
        stopwatch = sequence.catch_up_time if caught_up else sequence.prefill_time
        return stopwatch.running(self.rows.position.device)

    def let_drafter_read(
        self, row: int, tokens: Tensor, features: Tensor | None = None, start: int | None = None
    ) -> None:
        """Let the drafter read tokens (T,), with the target's features if they are given.

        start as in `ChunkedPrefill.read_row`.
        """
        drafter: Any = self.step.drafter
        if isinstance(drafter, ModelDrafter):
            read_row = partial(self.runner.prefiller.read_row, start=start)
            drafter.read(row, tokens, features, read_row)
        elif features is None:
            drafter.read(row, tokens)
        else:
            drafter.read(row, tokens, features)

    def begin(self, row: int, sequence: RunningSequence, logits: Tensor) -> HostCopy:
        """Choose the first token by the logits (1, V) after a prompt, and let the row decode.

        Returns [token, is_finite], then the token's log-probabilities if the request wants them
        (`log_probs_of`). A row whose logits are not finite stays idle.
        """
        if self._logits is None:
            with torch.inference_mode(False):  # written inside of it and outside
                self._logits = torch.empty_like(logits)
        self._logits.copy_(logits)
        self._give(row, torch.tensor([len(sequence.prompt)]))
        key = self._beginning(sequence)
        _, asked = key
        task = partial(self._begin, self._logits, asked)
        first = task() if asked.processed else self.runner.run(key, task)
        assert first is not None
        self.rows.rules.note(self._given[:1], first[:1].long())
        return self.runner.hand_over(first)

    def _begin(self, logits: Tensor, asked: Asked) -> Tensor:
        row, position = self._given[:1], self._given[1:2]
        rows = self.rows.at(row, asked)
        rows.position = position - 1  # as after a tree's root there
        depths = torch.zeros(1, 1, dtype=torch.int32, device=logits.device)
        logits = logits[:, None]
        kept = rows.kept(logits)
        token, score = ops.choose_best(kept, depths, rows.sampling)
        finite = score.abs() < torch.inf
        token = token * finite
        first = torch.cat([token, finite.to(token.dtype)])[:, 0]
        self.rows.place(row, position, first[:1], finite[0])
        if asked.num_top is None:
            return first
        scores = log_probs_of(logits, kept, token, rows.temperature, asked.num_top)
        return torch.cat([first.double(), scores.flatten()])

    def catch_up(self, decoding: dict[int, RunningSequence]) -> None:
        """Let the drafter read the tokens that it missed; the host must know all of them."""
        assert self.step.drafter is not None
        for row, each in decoding.items():
            if each.behind:
                *missed, root = each.tokens[each.num_drafted_from :]
                if missed:
                    start = None if each.num_drafted_from else 0
                    with self._timed(each, caught_up=True):
                        self.let_drafter_read(row, self._on_device(missed), None, start)
                self.rows.place(row, each.position, root)  # rules have noted the root
                each.behind, each.longest = False, 1

    def _give(self, row: int, told: Tensor) -> None:
        """Copy a row's number and its values to the device, without waiting for it."""
        given = torch.cat([torch.tensor([row]), told])
        self._given[: len(given)].copy_(given, non_blocking=True)

    def _on_device(self, tokens: list[int]) -> Tensor:
        """Return the tokens (T,) on the device, without waiting for it."""
        return torch.tensor(tokens).to(self.step.target.device, non_blocking=True)

    def _beginning(self, sequence: RunningSequence) -> tuple[str, Asked]:
        """Return the key of the runner's task that begins such a row."""
        return "begin", self.rows.asked_by([sequence.generation])
