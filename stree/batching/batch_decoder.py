"""Decode many sequences at once: requests come and go while others go on.

Every sequence has a row of the caches. A step decodes all active rows in one target call, each with
its own tree, length, settings and random numbers. The tokens of a row do not depend on the other
rows of the batch.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from os import PathLike
from threading import RLock
from typing import Any, Never

from stree.common.threads import for_decoding, one_at_a_time

import torch

from stree import verifiers
from stree.batching.checks import (
    RequestLimits,
    checked_sequence,
    not_finite,
    require_partners,
    require_target,
)
from stree.batching.memory_report import MemoryReport
from stree.batching.prefillers import LONGEST_CHUNK
from stree.batching.sequences import Request
from stree.batching.serve import RequestServer
from stree.batching.step import Step
from stree.batching.step_timing import measure_step_times
from stree.checkpoints.tokenizer import eos_token_ids
from stree.common.errors import InvariantBroken, UsageError, first_line
from stree.common.words import counted, described, placed
from stree.drafters import Drafter, DrafterSpec
from stree.drafters.model import ModelDrafterSpec
from stree.engine.plan import Limits, StepPlan
from stree.engine.plan_log import LoggedScheduler
from stree.engine.scheduler import Scheduler
from stree.engine.sequence import StepOutput
from stree.engine.worker import Worker
from stree.generation import GenerationConfig, GenerationOutput, require_whole
from stree.models.model import HybridModel
from stree.tree_policy.names import as_tree_policy
from stree.tree_policy.policy import TreePolicy
from stree.tree_policy.step_times import StepTimes
from stree.trees.token_tree import StepTree, TokenTree
from stree.verifiers import Verifier


class BatchDecoder(RequestServer):
    """Decoder of many sequences: a target, optionally a drafter and a tree, and their caches.

    Any thread may admit, step, release and generate: a lock lets one thread in at a time, and
    `generate` holds it to its end. A step reports all rows, also those that other
    threads admitted: if several threads admit, let one of them step.

    Args:
        target: A `HybridModel`.
        drafter: A model, n-grams or anything that fills trees (`stree.drafters.Drafter`); None
            decodes without drafts.
        tree: The tree of requests that name none, or a tree policy such as `AdaptiveTrees`, which
            chooses a tree for each step (call `measure_step_times` first). None is the paper's tree
            with a drafter, else the root alone.
        num_rows: Sequences at once, at least 1.
        max_length: Tokens of the longest sequence, prompt included.
        max_nodes: Nodes of the largest tree of any request; at least those of `tree`.
        tokenizer: Finds stop strings, and encodes texts and chats; None takes token ids only.
        verifier: A name (`stree.verifiers.named`), or a verifier of your own.
        num_prefixes: Prefixes to keep after `release(row, keep=True)`, each with the memory of a
            state and its keys; 0 keeps none. `limit_prefixes` sets their bytes.
        backtracking: "replay" advances the states along the accepted path by the inputs that the
            last call kept. "joint" feeds the accepted path again before the next trees
            (`stree.models.joint`), which takes less memory and more rows of each product.
        prompt_tokens_per_step: Most prompt tokens that a step reads while other rows decode, in
            chunks of up to 512 a row; the chunk that passes the limit is still read. None reads
            one chunk of each row. A low limit keeps streams going while many prompts arrive.

    Raises:
        UsageError: When target, drafter and verifier do not fit each other.
        OutOfMemory: When the caches do not fit.

    Example:
        >>> import stree
        >>> sizes = dict(attn_layers=(0,), num_heads=2, num_kv_heads=1, head_dim=8)
        >>> target = stree.HybridModel(stree.HybridConfig(64, d_model=16, num_layers=1, **sizes))
        >>> batch = stree.BatchDecoder(target, num_rows=2, max_length=64)
        >>> asked = stree.GenerationConfig(max_new_tokens=4)
        >>> [len(out.tokens) for out in batch.generate([[1, 2, 3], [4, 5]], asked)]
        [4, 4]
    """

    @torch.inference_mode(False)  # its buffers are written inside of it and outside
    def __init__(
        self, target: Any, drafter: HybridModel | DrafterSpec | Drafter | None = None,
        tree: StepTree | TreePolicy | str | None = None, *, num_rows: int = 8,
        max_length: int = 2048, max_nodes: int = 1, tokenizer: Any = None,
        verifier: str | Verifier = "coupled", num_prefixes: int = 0, backtracking: str = "replay",
        prompt_tokens_per_step: int | None = None,
    ) -> None:
        require_target(target)
        require_whole("max_length", max_length)
        require_whole("num_rows", num_rows)
        require_whole("num_prefixes", num_prefixes, least=0)
        if prompt_tokens_per_step is not None:
            require_whole("prompt_tokens_per_step", prompt_tokens_per_step)
        if tree is None:
            tree = TokenTree.chain(0, "root") if drafter is None else TokenTree.paper()
        self.tree_policy = as_tree_policy(tree)
        self.tree = tree = self.tree_policy.largest
        if isinstance(drafter, HybridModel):
            drafter = ModelDrafterSpec(drafter)
        num_drafted = require_partners(target, drafter)
        if drafter is None and tree.num_nodes > 1:
            raise UsageError(f"{tree} needs a drafter to fill it")
        self.verifier = verifiers.named(verifier)
        self.max_nodes = max(max_nodes, tree.num_nodes)
        if (num_positions := target.config.num_positions) is not None:
            # Beyond it nothing is served; the last tree may reach further
            max_length = min(max_length, num_positions + self.max_nodes + 1)
        step = Step.new(
            target, drafter, self.verifier, self.tree_policy.trees, num_rows=num_rows,
            max_length=max_length, max_nodes=self.max_nodes, backtracking=backtracking,
        )
        self.target, self.cache, self.drafter = target, step.cache, step.drafter
        self.num_rows, self.max_length, self.tokenizer = num_rows, max_length, tokenizer
        self.eos_token_ids = eos_token_ids(target.config, tokenizer)
        self._request_limits = RequestLimits(
            target.config, step.drafter, self.verifier, self.tree_policy, max_length,
            self.max_nodes, num_drafted, self.eos_token_ids, tokenizer,
        )
        self.worker = Worker(step, num_rows, self.max_nodes)
        runner, drafter = self.worker.runner, step.drafter
        limits = Limits(
            num_rows, runner.rounds_rows, runner.num_in_flight, LONGEST_CHUNK,
            prompt_tokens_per_step, num_prefixes, has_drafter=drafter is not None,
            saves_drafter=drafter is not None and drafter.row_store is not None,
        )
        self.scheduler = Scheduler(limits, self.tree_policy, tree)
        self.lock = RLock()  # held by a thread while it changes anything
        self.failure: Exception | None = None  # what stopping a freed row has raised
        self._outputs: list[StepOutput] = []  # of reports that were read between two steps

    def __repr__(self) -> str:
        models = described(self.target, self.drafter, self.tree_policy)
        size = f"{counted(self.num_rows, 'row')}, max_length {self.max_length}"
        return f"BatchDecoder({models}, {size}, {placed(self.target)})"

    def __getstate__(self) -> Never:
        raise UsageError(
            "a decoder has buffers, graphs and a lock, of which no copy or pickle is made: copy or "
            "save its target and drafter, and make another decoder of them"
        )

    @property
    def room(self) -> MemoryReport:
        """Report of the rows, the bytes of a sequence and how many more would fit; print it."""
        return MemoryReport.of(self.worker.step, self.num_rows, self.max_length)

    @property
    def num_free_rows(self) -> int:
        """Number of free rows, which is the number of requests that can be admitted now."""
        return self.scheduler.num_free_rows

    def check(self, request: Request) -> None:
        """Raise the `UsageError` that `admit` would raise if a row were free; change nothing.

        A server calls it before a request waits for a row.
        """
        self.require_working()
        checked_sequence(self._request_limits, request)

    def require_working(self) -> None:
        """Raise `InvariantBroken` if no row can be freed any more, as after an error of a GPU."""
        if self.failure is not None:
            raise InvariantBroken(
                f"the decoder has failed and serves no more requests: {first_line(self.failure)}; "
                "start the process again"
            ) from self.failure

    @one_at_a_time
    def admit(self, request: Request) -> int:
        """Give a request a row, and return the row; later steps read its prompt and decode.

        Raises `UsageError` when no row is free, or for a request that cannot be served (`check`).

        `step` decodes the row until one of its outputs has a finish_reason; `release` frees it.
        """
        self.require_working()
        sequence = checked_sequence(self._request_limits, request)
        self.worker.step.require_same_models()
        self._follow_weights()
        sequence.since = time.perf_counter()
        row = self.scheduler.admit(sequence)
        try:
            self._execute_changes()
        except BaseException:
            self.scheduler.release(row)
            self._clean_up()
            raise
        return row

    @one_at_a_time
    @torch.no_grad()
    def step(self) -> list[StepOutput]:
        """Decode a step of the rows that decode, read prompts of the others, return new outputs.

        The scheduler plans steps, and the worker starts them, until as many are in flight as the
        runner takes: one eagerly, two with CUDA graphs. Then the report of the oldest is awaited.

        Returns the outputs of rows that have new tokens or end, in order: a row has two outputs in
        a call that reports both its first token and a step. With CUDA graphs a step's outputs come
        with the next call. What goes wrong in a row (logits that are not finite, an error of its
        own processors or of reading its prompt) ends the row with the finish_reason "error" and
        the error; an error of the step itself ends all rows that decode in it. Other rows go on.
        """
        scheduler = self.scheduler
        with for_decoding(self.target):
            is_told = False
            while not is_told:
                for _ in range(scheduler.drop_useless()):
                    self.worker.drop()
                reads_alone = False
                while scheduler.awaits_steps < scheduler.limits.num_in_flight and not reads_alone:
                    if (plan := scheduler.plan()) is None:
                        break
                    try:
                        self._execute(plan)
                    except Exception as error:
                        is_told = self._end(scheduler.abandon(plan), error)
                        break
                    reads_alone = not plan.trees  # the first tokens come before any step
                if is_told or not scheduler.awaits_reports:
                    break
                scheduler.look_ahead()
                is_told = self._take_report()
                while reads_alone and scheduler.awaits_reports:
                    is_told |= self._take_report()
        outputs, self._outputs = self._outputs, []
        return outputs

    def _execute_changes(self) -> None:
        if (plan := self.scheduler.plan_changes()) is not None:
            with for_decoding(self.target):
                try:
                    self._execute(plan)
                except Exception:
                    self.scheduler.abandon(plan)
                    raise

    def _execute(self, plan: StepPlan) -> None:
        try:
            self.worker.execute(plan)
        except Exception:
            raise
        except BaseException:  # the user stops it
            self.scheduler.abandon(plan)
            raise

    def _take_report(self) -> bool:
        """Wait for the oldest report and keep its outputs; return whether it tells of any row."""
        try:
            report = self.worker.report()
        except Exception as error:
            return self._end(self.scheduler.abandon(), error)
        for output in self.scheduler.take(report):
            if output.finish_reason == "error" and output.error is None:
                sequence = self.scheduler.taken(output.row)
                output.error = self.worker.error_of(output.row) or not_finite(
                    output.culprit, self.worker.step.models(), sequence
                )
            self._outputs.append(output)
        return bool(report.rows or report.firsts or report.failed)

    def _end(self, rows: list[int], error: Exception) -> bool:
        """Keep the outputs of rows that an error has ended; raise it if it has ended none."""
        if not rows:
            raise error
        self._outputs += [StepOutput(row, [], "error", error=error) for row in rows]
        return True

    @one_at_a_time
    def release(self, row: int, keep: bool = False) -> GenerationOutput:
        """Free a row and return its output; an unfinished request ends as "released".

        Args:
            row: The number that `admit` returned.
            keep: Whether to keep the tokens of the row (nearly all of them) as a prefix: prompts
                that begin with them do not read them again. A request that ended with an error is
                not kept, nor is anything with `num_prefixes` = 0, or what cannot be saved, as
                where it does not fit in memory.
        """
        sequence = self.scheduler.release(row, keep)
        self._outputs = [each for each in self._outputs if each.row != row]
        try:
            self._execute_changes()
        except Exception as error:
            self._clean_up()
            if keep:
                warnings.warn(f"no prefix is kept of row {row}: {error}", stacklevel=2)
        asked = sequence.generation
        return GenerationOutput(
            list(sequence.stop.tokens), sequence.finish_reason or "released", sequence.stats,
            self.tokenizer, seed=asked.seed if asked.temperature else None,
            logprobs=None if asked.logprobs is None else sequence.logprobs,
        )

    def _clean_up(self) -> None:
        """Stop the rows that a failed plan was to stop; what fails now, too, fails for good."""
        try:
            self._execute_changes()
        except Exception as error:
            self.failure = error

    @one_at_a_time
    def num_reusable(self, prompt: list[int]) -> int:
        """Return how many tokens of a prompt are in a kept prefix, and need not be read again.

        Waits for the device to save the prefixes that were kept last.
        """
        self._follow_weights()
        while self.scheduler.prefixes.unsettled:
            self._take_report()
        return self.scheduler.num_reusable(prompt)

    @one_at_a_time
    def limit_prefixes(self, num_bytes: int) -> int:
        """Keep prefixes within so many bytes from now on, the one used longest ago out first.

        Returns how many prefixes of `max_length` fit, at most `num_prefixes`.
        """
        require_whole("num_bytes", num_bytes, least=0)
        self.scheduler.limit_prefixes(num_bytes, self.worker.prefix_bytes())
        index = self.scheduler.prefixes
        return min(index.most, num_bytes // index.bytes_of(self.max_length))

    @one_at_a_time
    def log_plans(self, path: str | PathLike[str] | None) -> None:
        """Write requests, plans and reports to a file of JSON lines from now on; None ends it.

        `stree.engine.plan_log` reads and replays it. The file has the prompts' and answers' tokens.
        So that it tells all that plans rest on, kept prefixes and what the tree policy has learned
        are forgotten, except the step times; do not measure these anew until the file has ended.

        Raises `UsageError` while rows are taken, and `CannotWrite` if the file cannot be made.
        """
        self.require_free()
        before = self.scheduler
        sizes = before.limits, self.tree_policy, self.tree
        scheduler = Scheduler(*sizes) if path is None else LoggedScheduler(path, *sizes)
        before.forget_prefixes()
        self._execute_changes()
        while before.awaits_reports:
            self._take_report()
        self.forget()
        scheduler.limit_prefixes(before.prefixes.budget, before.prefixes.bytes_each)
        if isinstance(before, LoggedScheduler):
            before.close()
        self.scheduler = scheduler

    def _follow_weights(self) -> None:
        """Drop prefixes and graphs that were made with weights which have changed since."""
        if self.worker.runner.follow_weights():
            self.scheduler.forget_prefixes()

    def tokens_of(self, row: int) -> list[int]:
        """Return the tokens that a row has generated so far."""
        return list(self.scheduler.taken(row).stop.tokens)

    @one_at_a_time
    def prepare(self) -> None:
        """Capture the graphs that the prefill and the steps of all taken rows need.

        Otherwise the first steps capture them.
        """
        with for_decoding(self.target):
            for row in self.scheduler.sequences:
                self.prepare_prefill(row)
            for step in self.scheduler.steps_to_prepare():
                self.worker.prepare_step(*step)

    @one_at_a_time
    def prepare_prefill(self, row: int) -> None:
        """Capture the graphs that the prefill of a row needs, if its prompt is still to be read."""
        each = self.scheduler.taken(row)
        if each.is_prefilling:
            pieces, drafted = self.scheduler.reads_to_prepare(each)
            may_lag = each.tree is None or each.is_plain
            with for_decoding(self.target):
                self.worker.prepare_reads(row, pieces, drafted, may_lag)

    @one_at_a_time
    def measure_step_times(
        self, context: int | None = None, num_steps: int = 8, counts: Sequence[int] | None = None,
        generation: GenerationConfig = GenerationConfig(),
    ) -> StepTimes:
        """Time steps with each tree of the policy; its choice rests on these times from now on.

        Args:
            context: Committed tokens before the first step; None is 32, or a quarter of max_length
                if that is less.
            num_steps: Steps of each timing.
            counts: Numbers of rows to time; None is 1, 2, 4, … up to all rows.
            generation: Settings of the requests to expect (sampling takes longer).

        Raises `UsageError` while rows are taken, or for one fixed tree.
        """
        if not self.tree_policy.needs_step_times or self.scheduler.sequences:
            raise UsageError(
                "step times are measured of a decoder that was made with adaptive trees, while no "
                "row is taken"
            )
        self.scheduler.choice.drop()  # it rests on other times
        with for_decoding(self.target):
            self.tree_policy.costs = measure_step_times(
                self.worker, self.tree_policy.trees, context, num_steps, counts, generation,
                self.max_length, self.eos_token_ids,
            )
        return self.tree_policy.costs

    def forget(self) -> None:
        """Let the tree policy forget everything that it has learned, except the step times."""
        self.scheduler.choice.forget()

    def forgetting(self) -> AbstractContextManager[None]:
        """Let the tree policy learn nothing inside the block, a warm-up for example."""
        return self.scheduler.choice.forgetting()
