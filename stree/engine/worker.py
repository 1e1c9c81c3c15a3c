"""Worker: execute plans on the device, asynchronously and in order, and report what they gave.

It holds target, drafter, caches, the rows' state and the graphs. It knows no requests or queues.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stree.batching.runners import runner_of
from stree.batching.state import NUM_SETTINGS, BatchState, bits_of
from stree.batching.step import Step, StepInputs, StepInputsCache
from stree.common.clock import PhaseClock, Stopwatch
from stree.common.host_copy import HostCopy
from stree.drafters import Drafter
from stree.engine.plan import Admit, CatchUp, Read, Report, RowReport, Save, StepPlan
from stree.engine.row_store import SavedRow
from stree.logits.asked import Asked
from stree.logits.log_probs import log_probs_of
from stree.models.hidden_states import HiddenStateTap
from stree.models.model import READ_AT_ONCE
from stree.trees.token_tree import StepTree
from stree_kernels import ops

FEATURES_CHUNK = READ_AT_ONCE  # prompt tokens whose features are in memory at once


@dataclass(frozen=True)
class _Saved:
    """Copies of a row: the target's, the drafter's, and the logits (1, V) after a prompt."""

    target: SavedRow
    drafter: SavedRow | None
    logits: Tensor | None


@dataclass
class _Launched:
    """A plan without a report, and what the device hands over.

    Attributes:
        plan: The plan.
        size: M, the tokens that the step yields at most.
        firsts: What `Worker.begin` returns, by row.
        saved: Lengths (S, 2) of the plan's `saves`.
        failed: Rows whose reads have failed by then.
    """

    plan: StepPlan
    size: int = 0
    firsts: dict[int, HostCopy] = field(default_factory=dict)
    saved: HostCopy | None = None
    failed: tuple[int, ...] = ()


@dataclass
class _Row:
    """Request of a row, and the drafter's times on its tokens."""

    admit: Admit
    reading: Stopwatch = field(default_factory=Stopwatch)
    catching_up: Stopwatch = field(default_factory=Stopwatch)

    @property
    def is_timed(self) -> bool:
        """True if `drafter_s` has all that was started."""
        return self.reading.is_drained and self.catching_up.is_drained

    @property
    def drafter_s(self) -> tuple[float | None, float | None]:
        """Seconds of reading the prompt and of catching up so far; None if it did not."""
        for each in (self.reading, self.catching_up):
            each.drain()
        reading, caught_up = self.reading, self.catching_up
        return (
            reading.seconds if reading.num_blocks else None,
            caught_up.seconds if caught_up.num_blocks else None,
        )


class Worker:
    """Executes plans with a step's models.

    Args:
        step: The step of all rows.
        num_rows: Rows of its caches.
        max_nodes: Nodes of the largest tree.

    Attributes:
        device: Device of target, caches and state.
        runner: Runs steps eagerly or by graphs.
        state: Settings and next tokens of the rows on the device.
        clock: Told of the phases of each step, if one is given.
        prefill_time: Time that the device has spent on prompts.
        errors: What the reads of a row's prompt have raised, until the row's next request.
    """

    def __init__(self, step: Step, num_rows: int, max_nodes: int) -> None:
        self.step, self.runner, self.device = step, runner_of(step), step.target.device
        self.state = BatchState.new(num_rows, max_nodes, self.device)
        self.clock: PhaseClock | None = None
        self.prefill_time = Stopwatch()
        self.errors: dict[int, Exception] = {}
        self._rows: dict[int, _Row] = {}
        self._saved: dict[int, _Saved] = {}
        self._launched: deque[_Launched] = deque()
        self._timed_rows: set[int] = set()  # rows whose drafter's times are not all reported
        self._inputs = StepInputsCache(self.state)
        self._given = self.state.position.new_zeros(1 + NUM_SETTINGS)  # a row and its values
        self._logits: Tensor | None = None  # (1, V) after a prompt

    # Plans

    def execute(self, plan: StepPlan) -> None:
        """Start what a plan says, without waiting for the device.

        What a row's read raises is kept in `errors`, and the report names the row; the row is not
        read any further. Other errors are raised, and nothing of the plan is reported.
        """
        launched = _Launched(plan)
        try:
            self._execute(plan, launched)
        except BaseException:
            if launched.size:
                self.runner.drop(newest=True)
            raise
        if plan.is_reported:
            self._launched.append(launched)

    def _execute(self, plan: StepPlan, launched: _Launched) -> None:
        for row in set(plan.stops):  # one that has ended and is freed is named twice
            self.state.active[row] = False
        lengths = [self._save(save) for save in plan.saves]
        if lengths:
            launched.saved = self.runner.hand_over(torch.stack(lengths))
        for admit in plan.admits:
            self._admit(admit)
        for each in plan.catch_ups:
            self._catch_up(each)
        if plan.trees:
            launched.size = self._launch(plan)
        for read in plan.reads:
            if read.row in self.errors:
                continue
            try:
                with self.prefill_time.running(self.device):
                    logits = self.read(read)
                    if read.save is not None:
                        self._save(read.save, logits)
                    if read.begins:
                        launched.firsts[read.row] = self.begin(read.row, logits)
            except Exception as error:
                self.errors[read.row] = error
        launched.failed = tuple(self.errors)
        for number in plan.drops:
            self._saved.pop(number, None)

    def report(self) -> Report:
        """Wait for the oldest plan without a report, and return its report."""
        launched = self._launched.popleft()
        plan, rows = launched.plan, {}
        if plan.trees:
            rows = _row_reports(self.runner.collect(), plan.trees, launched.size)
        firsts = {}
        for row, begun in launched.firsts.items():
            token, finite, *scores = begun.tolist()
            firsts[row] = int(token), bool(finite), scores
        lengths = [] if launched.saved is None else launched.saved.tolist()
        saved = {
            save.prefix: (target, drafter)
            for save, (target, drafter) in zip(plan.saves, lengths, strict=True)
        }
        self.prefill_time.drain()
        ended, drafter_s = time.perf_counter(), self._drafter_s()
        return Report(plan.number, ended, rows, firsts, saved, drafter_s, launched.failed)

    def error_of(self, row: int) -> Exception | None:
        """Return what reading the row's prompt or its own processors have raised; None for none."""
        text = self.state.rules.texts.get(row)
        return self.errors.get(row) or (None if text is None else text.error)

    def _drafter_s(self) -> dict[int, tuple[float | None, float | None]]:
        """Return the drafter's times of the rows in which the device has done them all."""
        told = {row: self._rows[row].drafter_s for row in self._timed_rows}
        done = {row: each for row, each in told.items() if self._rows[row].is_timed}
        self._timed_rows -= done.keys()
        return done

    def drop(self) -> None:
        """Forget the oldest plan without a report, without waiting for it."""
        if self._launched.popleft().plan.trees:
            self.runner.drop()

    # Rows

    def _admit(self, admit: Admit) -> None:
        """Clear what the last request left in a row, and write the settings of the next."""
        row, drafter = admit.row, self.step.drafter
        self.errors.pop(row, None)
        self._rows[row] = _Row(admit)
        self._give(row, bits_of(admit.generation))
        self.runner.run("admit", self._clear)
        if drafter is not None and not drafter.capturable:
            drafter.clear(row)
        self._begin_rules(admit)

    def _begin_rules(self, admit: Admit) -> None:
        """Write the request's biases, penalties and barred words."""
        self.state.rules.begin(
            admit.row, self.state.active, admit.generation, admit.prompt,
            self.step.target.config.vocab_size, admit.eos_ids,
        )

    def _clear(self) -> None:
        row, drafter = self._given[:1], self.step.drafter
        self.state.set_to(row, self._given[1:])
        self.step.cache.clear(row)
        if drafter is not None and drafter.capturable:
            drafter.clear(row)

    def _save(self, save: Save, logits: Tensor | None = None) -> Tensor:
        """Copy a row's caches; return how many tokens (2,) target and drafter hold there."""
        drafter, store = None, None if self.step.drafter is None else self.step.drafter.row_store
        target = self.step.cache.save(save.row, save.most)
        if save.with_drafter and store is not None:
            drafter = store.save(save.row, save.most)
        copied = None if logits is None else logits.clone()
        self._saved[save.prefix] = _Saved(target, drafter, copied)
        none = torch.zeros_like(target.length)
        return torch.stack([target.length, none if drafter is None else drafter.length])

    def prefix_bytes(self) -> tuple[int, int]:
        """Return the bytes of a saved prefix with its logits, and of each of its tokens."""
        drafter, target = self.step.drafter, self.step.target
        stores = [self.step.cache, *filter(None, [drafter and drafter.row_store])]
        empty, one = (sum(each.save(0, most).num_bytes for each in stores) for most in (0, 1))
        return empty + target.config.vocab_size * target.dtype.itemsize, one - empty

    def _load(self, read: Read) -> Tensor | None:
        """Copy a saved prefix into an empty row; return the logits (1, V) after it, if saved."""
        assert read.load is not None
        saved = self._saved[read.load]
        self.step.cache.load(saved.target, read.row)
        if read.with_drafter:
            assert self.step.drafter is not None and saved.drafter is not None
            assert self.step.drafter.row_store is not None
            self.step.drafter.row_store.load(saved.drafter, read.row)
        return saved.logits

    # Steps

    def _launch(self, plan: StepPlan) -> int:
        """Start a step; return how many tokens it yields at most."""
        inputs, clock = self._inputs_of(plan.num_rows, plan.trees), self.clock
        inputs.longest_block, inputs.position = plan.longest_block, plan.position
        self.runner.launch(inputs, clock.mark if clock else lambda phase: None)
        if clock is not None:
            clock.end_call()
        return inputs.tree_batch.max_depth + 1

    def _inputs_of(self, num_rows: int, trees: dict[int, StepTree]) -> StepInputs:
        generations = [self._rows[row].admit.generation for row in trees]
        return self._inputs.of(num_rows, trees, generations)

    def prepare_step(
        self, num_rows: int, trees: dict[int, StepTree], longest_block: int, position: int
    ) -> None:
        """Capture the graphs that such a step needs (`StepPlan`)."""
        inputs = self._inputs_of(num_rows, trees)
        inputs.longest_block, inputs.position = longest_block, position
        self.runner.prepare(inputs)

    # Prompts

    def read(self, read: Read) -> Tensor:
        """Read the next tokens of a row's prompt; return the logits (1, V) after them.

        A prefix that is not there, since what was to save it failed, is read again.
        """
        if read.load is not None and read.load not in self._saved:
            drafted = None if read.drafter_start is None else 0
            read = replace(read, start=0, drafter_start=drafted, load=None)
        row, logits = read.row, None if read.load is None else self._load(read)
        prompt = self._rows[row].admit.prompt
        drafter, drafted = self.step.drafter, read.drafter_start
        if drafted is None:
            drafter = None
        elif read.start == read.stop and drafted < read.stop:  # another row has read the prompt
            with self._timed(read):
                self.let_drafter_read(row, self._on_device(prompt[drafted:]), None, drafted)
        along = None if drafter is None else self._along
        features = () if drafter is None else drafter.feature_layers
        most = FEATURES_CHUNK if features else read.stop
        for start in range(read.start, read.stop, most):
            stop = min(read.stop, start + most)
            if along is not None and drafted is not None:
                chunk = torch.tensor(prompt[start:stop])  # on the host: `read_both` copies it
                logits = self._read_both(along, read, start, chunk, drafted)
            else:
                chunk = self._on_device(prompt[start:stop])
                tap = HiddenStateTap(features) if features else None
                asked = () if tap is None else (tap,)
                logits = self.runner.prefiller.read_row(
                    self.step.target, self.step.cache, row, chunk, *asked, start=start
                )
                if drafted is not None and drafted < stop:
                    known = None if tap is None else tap.values[0]
                    unread = self._on_device(prompt[drafted:stop])
                    with self._timed(read):
                        self.let_drafter_read(row, unread, known, drafted)
            drafted = None if drafted is None else stop
        assert logits is not None
        return logits

    def _read_both(
        self, drafter: Drafter, read: Read, start: int, chunk: Tensor, drafted: int
    ) -> Tensor:
        """Let the target read a chunk (T,) after `start` tokens, and the drafter right after it.

        The chunk may be on the host.
        """
        row = read.row
        if drafted < start:  # the prefix's features are not kept
            missed = self._on_device(self._rows[row].admit.prompt[drafted:start])
            with self._timed(read):
                self.let_drafter_read(row, missed, None, drafted)
        return self.runner.prefiller.read_both(
            self.step.target, self.step.cache, drafter, row, chunk, partial(self._timed, read),
            start=start, drafter_read=max(drafted - start, 0),
        )

    @property
    def _along(self) -> Drafter | None:
        """The drafter if it reads each chunk right after the target, else None."""
        drafter = self.step.drafter
        reads_both = self.runner.prefiller.reads_both
        return drafter if drafter is not None and drafter.reads_alongside and reads_both else None

    def _timed(self, of: Read | CatchUp) -> AbstractContextManager[None]:
        """Time the drafter inside the block, if the tree policy learns from it."""
        if not of.is_timed:
            return nullcontext()
        self._timed_rows.add(of.row)
        row = self._rows[of.row]
        watch = row.reading if isinstance(of, Read) else row.catching_up
        return watch.running(self.device)

    def let_drafter_read(
        self, row: int, tokens: Tensor, features: Tensor | None = None, start: int | None = None
    ) -> None:
        """Let the drafter read tokens (T,), with the target's features if they are given.

        start as in `Prefiller.read_row`.
        """
        if self.step.drafter is not None:
            self.step.drafter.read_by(self.runner.prefiller, row, tokens, features, start)

    def _catch_up(self, missed: CatchUp) -> None:
        if missed.tokens:
            with self._timed(missed):
                tokens = self._on_device(missed.tokens)
                self.let_drafter_read(missed.row, tokens, None, missed.start)
        self.state.place(missed.row, missed.position, missed.root)  # rules have noted the root

    def begin(self, row: int, logits: Tensor) -> HostCopy:
        """Choose the first token by the logits (1, V) after a prompt, and let the row decode.

        Returns [token, is_finite], then the token's log-probabilities if the request wants them
        (`log_probs_of`). A row whose logits are not finite stays idle.
        """
        admit = self._rows[row].admit
        if self._logits is None:
            with torch.inference_mode(False):  # written inside of it and outside
                self._logits = torch.empty_like(logits)
        self._logits.copy_(logits)
        self._give(row, [len(admit.prompt)])
        key = self._beginning(admit)
        _, asked = key
        task = partial(self._begin, self._logits, asked)
        begun = task() if asked.processed else self.runner.run(key, task)
        assert begun is not None
        self.state.rules.note(self._given[:1], begun[:1].long())
        return self.runner.hand_over(begun)

    def _begin(self, logits: Tensor, asked: Asked) -> Tensor:
        row, position = self._given[:1], self._given[1:2]
        rows = self.state.at(row, asked)
        rows.position = position - 1  # as after a tree's root there
        depths = torch.zeros(1, 1, dtype=torch.int32, device=logits.device)
        logits = logits[:, None]
        processed = rows.processed(logits)
        token, score = ops.choose_best(processed, depths, rows.sampling)
        finite = score.abs() < torch.inf
        token = token * finite
        begun = torch.cat([token, finite.to(token.dtype)])[:, 0]
        self.state.place(row, position, begun[:1], finite[0])
        if asked.num_top is None:
            return begun
        temperature = rows.temperature if asked.sampled else None
        scores = log_probs_of(logits, processed, token, temperature, asked.num_top)
        return torch.cat([begun.double(), scores.flatten()])

    def _beginning(self, admit: Admit) -> tuple[str, Asked]:
        """Return the key of the runner's task that begins such a row."""
        return "begin", self.state.asked_by([admit.generation])

    def _give(self, row: int, values: list[int]) -> None:
        """Copy a row's number and its values to the device, without waiting for it."""
        given = [row, *values, *[0] * (NUM_SETTINGS - len(values))]
        self._given.copy_(torch.tensor(given), non_blocking=True)

    def _on_device(self, tokens: tuple[int, ...]) -> Tensor:
        """Return the tokens (T,) on the device, without waiting for it."""
        return torch.tensor(tokens).to(self.device, non_blocking=True)

    # Graphs

    def prepare_reads(
        self, row: int, pieces: list[tuple[int, int]], drafted: int, may_lag: bool
    ) -> None:
        """Capture the graphs that reading the rest of a row's prompt needs.

        Args:
            row: The row.
            pieces: Where its reads start and stop, one after the other.
            drafted: Tokens of it that the drafter has.
            may_lag: Whether the drafter may be left behind, and catch up later.
        """
        step, drafter, admit = self.step, self.step.drafter, self._rows[row].admit
        prepare = self.runner.prefiller.prepare
        along = self._along
        ways = [(() if drafter is None else drafter.feature_layers, along)]
        if may_lag:
            ways.append(((), None))
            self.prepare_catching_up(row)
        for layers, also in dict.fromkeys(ways):
            for start, stop in pieces:
                graphs = prepare(
                    step.target, step.cache, row, start, stop - start, layers, False, also
                )
        key = self._beginning(admit)
        begun = self.runner.is_ready(key) or key[1].processed
        if graphs and graphs[-1].given and not begun:  # as it will begin, but for the token
            self.begin(row, graphs[-1].given[0])
            self.state.active[row] = False
            self._begin_rules(admit)
        if drafter is not None:
            alone = len(admit.prompt) if along is None else pieces[0][0]
            drafter.prepare_reads(self.runner.prefiller, row, drafted, alone - drafted)

    def prepare_catching_up(self, row: int) -> None:
        """Capture the graphs that the drafter needs to catch up after plain decoding steps.

        The row is one without a pending path (`ChunkedPrefill.prepare`).
        """
        if self.step.drafter is not None:
            self.step.drafter.prepare_reads(self.runner.prefiller, row, 0, None)


def _row_reports(told: list[list[Any]], rows: Iterable[int], size: int) -> dict[int, RowReport]:
    """Return what a step's report tells of rows (`Step.verify`), by row; size is M."""
    tokens_end, nodes_end = 2 + size, 2 + 2 * size
    reports = {}
    for row in rows:
        numbers, scores = told[row], []
        if len(numbers) > nodes_end + 1:  # floats, as some row wants log-probabilities
            width = (len(numbers) - nodes_end - 1) // size
            ends = range(nodes_end + 1 + width, len(numbers) + 1, width)
            scores = [numbers[end - width : end] for end in ends[: int(numbers[1])]]
            numbers = list(map(int, numbers[: nodes_end + 1]))
        count = numbers[1]
        tokens, nodes = numbers[2 : 2 + count], numbers[tokens_end : tokens_end + count]
        reports[row] = RowReport(numbers[0], tokens, nodes, numbers[nodes_end], scores)
    return reports
