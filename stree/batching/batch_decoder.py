"""Decode many sequences at once: requests come and go while others go on.

Every sequence has a row of the caches. A step decodes all active rows in one target call, each with
its own tree, length, settings and random numbers. The tokens of a row do not depend on the other
rows of the batch.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from threading import RLock
from typing import Any, Never

from stree.common.threads import for_decoding, one_at_a_time

import torch

from stree import verifiers
from stree.batching.checks import checked_sequence, not_finite, require_partners, require_target
from stree.batching.memory_report import MemoryReport
from stree.batching.prefill import Prefill
from stree.batching.prefix_cache import PrefixCache
from stree.batching.runners import runner_of
from stree.batching.sequences import Request, RunningSequence, StepOutput
from stree.batching.serve import RequestServer
from stree.batching.state import BatchState
from stree.batching.step import InFlightStep, Step, StepInputs, StepInputsCache
from stree.batching.step_timing import measure_step_times
from stree.checkpoints.tokenizer import eos_token_ids
from stree.common.clock import PhaseClock, Stopwatch
from stree.common.errors import UsageError
from stree.common.words import counted, described, placed
from stree.drafters import Drafter, DrafterSpec
from stree.drafters.model import ModelDrafterSpec
from stree.generation import GenerationConfig, GenerationOutput, require_whole
from stree.models.model import HybridModel
from stree.tree_policy.names import as_tree_policy
from stree.tree_policy.policy import TreeChoice, TreePolicy
from stree.tree_policy.step_times import StepTimes
from stree.trees.token_tree import TokenTree
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
            state and its keys; 0 keeps none.
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
        tree: TokenTree | TreePolicy | str | None = None, *, num_rows: int = 8,
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
        self.prompt_tokens_per_step = prompt_tokens_per_step
        if tree is None:
            tree = TokenTree.chain(0, "root") if drafter is None else TokenTree.paper()
        self.tree_policy = as_tree_policy(tree)
        self.tree = tree = self.tree_policy.largest
        if isinstance(drafter, HybridModel):
            drafter = ModelDrafterSpec(drafter)
        self.num_drafted = require_partners(target, drafter)
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
        self.rows = BatchState.new(num_rows, self.max_nodes, target.device)
        self.phase_clock: PhaseClock | None = None  # told of the phases of each step, if given
        self.prefill_time = Stopwatch()  # of steps on prompts; each step drains it
        self.runner = runner_of(step)
        self.prefixes = PrefixCache(num_prefixes, self.cache, self.drafter, self.runner.hand_over)
        self.prefill = Prefill(self.runner, self.rows, self.prefixes)
        self.lock = RLock()  # held by a thread while it changes anything
        self._sequences: dict[int, RunningSequence] = {}
        self._launched: deque[InFlightStep] = deque()  # steps that are not collected
        self._choice = TreeChoice(self.tree_policy)
        self._inputs = StepInputsCache(self.rows)

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
        return MemoryReport.of([self])

    @property
    def num_free_rows(self) -> int:
        """Number of free rows, which is the number of requests that can be admitted now."""
        return self.num_rows - len(self._sequences)

    def check(self, request: Request) -> None:
        """Raise the `UsageError` that `admit` would raise if a row were free; change nothing.

        A server calls it before a request waits for a row.
        """
        checked_sequence(self, request)

    @one_at_a_time
    def admit(self, request: Request) -> int:
        """Give a request a row, and return the row; later steps read its prompt and decode.

        Raises `UsageError` when no row is free, or for a request that cannot be served (`check`).

        `step` decodes the row until one of its outputs has a finish_reason; `release` frees it.
        """
        if not self.num_free_rows:
            raise UsageError(
                f"all rows ({self.num_rows}) are taken: release one, or make the decoder with more"
            )
        row = next(row for row in range(self.num_rows) if row not in self._sequences)
        sequence = checked_sequence(self, request)
        self.runner.step.require_same_models()
        self._follow_weights()
        self.prefill.admit(row, sequence)
        self._sequences[row] = sequence  # last: whatever fails before, the row is still free
        return row

    @one_at_a_time
    @torch.no_grad()
    def step(self) -> list[StepOutput]:
        """Launch a step of the rows that decode, prefill the others, and return new outputs.

        1. Launch steps until the runner's limit is in flight: one eagerly, two with CUDA graphs.
           If the drafter must catch up before a step, and outputs are pending that it has to know,
           the call returns these outputs; a later call catches up and goes on.
        2. Choose the tree of the next step while the device works.
        3. Prefill a chunk of each row whose prompt is not read, within `prompt_tokens_per_step`;
           whole prompts if no row decodes.
        4. Collect the outputs of the oldest step in flight.

        Returns the outputs of rows that have new tokens or end, in order: a row has two outputs in
        a call that reports both its first token and a step. With CUDA graphs a step's outputs come
        with the next call. Logits that are not finite end their row with the
        finish_reason "error"; other rows go on.
        """
        with for_decoding(self.target):
            decoding = {row: each for row, each in self._sequences.items() if each.is_decoding}
            pending = self._launch_steps(decoding)
            if pending is not None:
                return pending
            self._chosen_tree(decoding)
            self._read_prompts(whole=not decoding)
            outputs = self._collect() if decoding else []
            # With wait=False, the next step is launched before the host knows the first tokens
            firsts = self._first_tokens(self._sequences, wait=not decoding)
            self.prefill_time.drain()
            return firsts + outputs

    def _launch_steps(self, decoding: dict[int, RunningSequence]) -> list[StepOutput] | None:
        """Launch steps up to the runner's limit, or return outputs that must be known before.

        The drafter catches up by reading the last block of every row, whatever tree each has, so it
        needs all first tokens and the outputs of all steps in flight.
        """
        while self._launched and next(self._living(self._launched[0]), None) is None:
            self._take_launched()
            self.runner.drop()
        while decoding and len(self._launched) <= self.runner.ahead:
            chosen = self._chosen_tree(decoding)
            trees = {row: each.tree or chosen for row, each in decoding.items()}
            drafted = any(tree.num_nodes > 1 for tree in trees.values())
            if drafted and any(each.behind for each in decoding.values()):
                if self._launched:
                    return self._collect()
                if firsts := self._first_tokens(decoding, wait=True):
                    return firsts
                self.prefill.catch_up(decoding)
            self._choice.drop()  # these steps have it
            self._launch(decoding, trees)
        return None

    def _read_prompts(self, whole: bool) -> None:
        """Prefill the rows with unread prompt tokens, in the order in which they were admitted.

        With `whole` each row reads its whole prompt, else one chunk; all chunks together stay
        within `prompt_tokens_per_step`. A row begins to decode after its last chunk.
        """
        left: float = math.inf if whole else self.prompt_tokens_per_step or math.inf
        for row, each in self._sequences.items():
            if not each.is_prefilling or left <= 0:
                continue
            before = each.num_read
            if each.tree is None and each.num_read == 0:
                each.behind = not self.tree_policy.drafts
            with self.prefill_time.running(self.target.device):
                self.prefill.read(row, each, whole)
            left -= each.num_read - max(before, each.stats.num_reused_tokens)

    @one_at_a_time
    def release(self, row: int, keep: bool = False) -> GenerationOutput:
        """Free a row and return its output; an unfinished request ends as "released".

        Args:
            row: The number that `admit` returned.
            keep: Whether to keep the tokens of the row (nearly all of them) as a prefix: prompts
                that begin with them do not read them again. A request that ended with an error is
                not kept, nor is anything with `num_prefixes` = 0.
        """
        sequence = self._taken(row)
        del self._sequences[row]
        if sequence.shared is not None and sequence.shared.read_by is sequence:
            sequence.shared.read_by = None  # another row reads the prompt, unless that is done
        self.rows.active[row] = False
        cut_short = not sequence.finish_reason and len(sequence.stop.tokens) > 0
        if sequence.tree is None and cut_short:
            self.tree_policy.learn_answer()  # for these tokens its prompt was read
        if keep and sequence.finish_reason != "error" and not sequence.is_stale:
            with for_decoding(self.target):
                self.prefixes.keep(row, sequence.tokens, sequence.num_drafted_from > 0)
        asked = sequence.generation
        return GenerationOutput(
            list(sequence.stop.tokens), sequence.finish_reason or "released", sequence.stats,
            self.tokenizer, seed=asked.seed if asked.temperature else None,
            logprobs=None if asked.logprobs is None else sequence.logprobs,
        )

    def _taken(self, row: int) -> RunningSequence:
        """Return the row's sequence. Raises `UsageError` for a row that is free."""
        if row not in self._sequences:
            raise UsageError(
                f"row {row!r} is free, wanted one that is taken ({sorted(self._sequences)}): "
                "release a row once, with the number that admit returned"
            )
        return self._sequences[row]

    @one_at_a_time
    def num_reusable(self, prompt: list[int]) -> int:
        """Return how many tokens of a prompt are in a kept prefix, and need not be read again."""
        self._follow_weights()
        return self.prefixes.lengths(prompt)[0]

    def _follow_weights(self) -> None:
        """Drop prefixes and graphs that were made with weights which have changed since."""
        if self.runner.follow_weights():
            self.prefixes.clear()
            for each in self._sequences.values():
                each.is_stale = True

    def tokens_of(self, row: int) -> list[int]:
        """Return the tokens that a row has generated so far."""
        return list(self._taken(row).stop.tokens)

    def _living(self, launch: InFlightStep) -> Iterator[int]:
        """Yield the rows whose sequences of that step are still there and unfinished."""
        for row, (each, _) in launch.rows.items():
            if self._sequences.get(row) is each and not each.finish_reason:
                yield row

    def _take_launched(self) -> InFlightStep:
        """Remove and return the oldest step in flight."""
        launch = self._launched.popleft()
        for each, tree in launch.rows.values():
            each.ahead -= tree.max_depth + 1
        return launch

    def _first_tokens(self, rows: Iterable[int], wait: bool) -> list[StepOutput]:
        """Return outputs with the first tokens of rows, as far as the host has them.

        With `wait`, waits for the first tokens of all of them.
        """
        reports = []
        for row in rows:
            sequence = self._sequences[row]
            first = sequence.first
            if first is not None and (wait or first.is_there()):
                token, finite, *scores = first.tolist()
                sequence.first, now = None, time.perf_counter()
                sequence.stats.prefill_s, sequence.since = now - sequence.since, now
                told = self._keep(row, sequence, [int(token)], [scores]) if finite else None
                reports.append(told or self._fail(row, sequence, "target"))
        return reports

    @one_at_a_time
    def prepare(self) -> None:
        """Capture the graphs that the prefill and the steps of all taken rows need.

        Otherwise the first steps capture them.
        """
        if not self._sequences:
            return
        deepest = self.tree_policy.deepest.max_depth + 1
        with for_decoding(self.target):
            for row in self._sequences:
                self.prepare_prefill(row)
            for tree in self.tree_policy.trees:
                trees = {row: each.tree or tree for row, each in self._sequences.items()}
                inputs = self._inputs_of(self._sequences, trees)
                after_deepest = self._choice.block(deepest, inputs.tree_batch.max_depth)
                for most in {inputs.longest, after_deepest}:
                    self.runner.prepare(replace(inputs, longest=most))

    def prepare_prefill(self, row: int) -> None:
        """Capture the graphs that the prefill of a row needs, if its prompt is still to be read."""
        with for_decoding(self.target):
            if (each := self._sequences[row]).is_prefilling:
                self.prefill.prepare(row, each)

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
        if not self.tree_policy.needs_step_times or self._sequences:
            raise UsageError(
                "step times are measured of a decoder that was made with adaptive trees, while no "
                "row is taken"
            )
        self._choice.drop()  # it rests on other times
        with for_decoding(self.target):
            self.tree_policy.costs = measure_step_times(
                self, self.tree_policy.trees, context, num_steps, counts, generation
            )
        return self.tree_policy.costs

    def forget(self) -> None:
        """Let the tree policy forget everything that it has learned, except the step times."""
        self._choice.forget()

    def forgetting(self) -> AbstractContextManager[None]:
        """Let the tree policy learn nothing inside the block, a warm-up for example."""
        return self._choice.forgetting()

    @property
    def _num_step_rows(self) -> int:
        """Number of rows of a step now: up to the last row that is taken, idle ones included."""
        return self.runner.num_rows(max(self._sequences) + 1, self.num_rows)

    def _chosen_tree(self, decoding: dict[int, RunningSequence]) -> TokenTree:
        """Return the tree of the next step's rows whose requests name none."""
        if any(each.tree is None for each in decoding.values()):
            return self._choice.next(self._num_step_rows)
        return self.tree

    def _launch(self, decoding: dict[int, RunningSequence], trees: dict[int, TokenTree]) -> None:
        inputs = self._inputs_of(decoding, trees)
        clock, drafted = self.phase_clock, inputs.tree_batch.num_nodes > 1
        self.runner.launch(inputs, clock.mark if clock else lambda phase: None)
        if clock is not None:
            clock.end_call()
        for each in self._sequences.values():
            each.longest = 1
        for row, each in decoding.items():
            each.longest = trees[row].max_depth + 1
            each.ahead += each.longest
            each.behind = each.behind or not drafted
        rows = {row: (each, trees[row]) for row, each in decoding.items()}
        self._launched.append(InFlightStep(rows, drafted, inputs.tree_batch.max_depth + 1))

    def _inputs_of(
        self, decoding: dict[int, RunningSequence], trees: dict[int, TokenTree]
    ) -> StepInputs:
        """Return the inputs of a step of the rows that decode, each with its tree.

        All rows that are taken take part, or their buffers would fall behind.
        """
        generations = [each.generation for each in decoding.values()]
        inputs = self._inputs.of(self._num_step_rows, trees, generations)
        longest = max(each.longest for each in self._sequences.values())
        inputs.longest = self._choice.block(longest, inputs.tree_batch.max_depth)
        # A row that has ended may have dropped tokens of its last block
        inputs.position = max(
            each.position + each.ahead + (each.longest if each.finish_reason else 0)
            for row, each in self._sequences.items() if row in trees or each.finish_reason
        )
        return inputs

    def _collect(self) -> list[StepOutput]:
        launch, report = self._take_launched(), self.runner.collect()
        firsts = self._first_tokens(self._living(launch), wait=True)  # the step went on from them
        return firsts + [
            self._account(row, *launch.rows[row], launch, report[row])
            for row in self._living(launch)
        ]

    def _account(
        self, row: int, sequence: RunningSequence, tree: TokenTree, launch: InFlightStep,
        report: list[Any],
    ) -> StepOutput:
        finite, block, path, grown, scores = launch.read(report)
        if finite != 1:
            return self._fail(row, sequence, "drafter" if finite == -1 else "target")
        stats = sequence.stats
        if launch.drafted:  # up to the root, with which the draft began
            sequence.num_drafted_from = sequence.position + 1
        self._choice.learn(tree, path, stats.calls_by_tree)
        result = self._keep(row, sequence, block, scores)
        depth = grown or tree.max_depth
        result.num_accepted = stats.count_call(tree, depth, path, len(result.tokens))
        if sequence.finish_reason:
            stats.decode_s = time.perf_counter() - sequence.since
        return result

    def _keep(
        self, row: int, sequence: RunningSequence, block: list[int], scores: list[list[float]]
    ) -> StepOutput:
        kept, sequence.finish_reason = sequence.stop.keep(block)
        logprobs = sequence.learn_logprobs(kept, scores)
        if sequence.finish_reason:
            self.rows.active[row] = False
        if sequence.tree is None:  # it has the policy's
            self.tree_policy.learn_tokens(len(kept))
            if sequence.finish_reason:
                self.tree_policy.learn_answer(*sequence.drafter_read_s)
        return StepOutput(row, kept, sequence.finish_reason, logprobs=logprobs)

    def _fail(self, row: int, sequence: RunningSequence, who: str) -> StepOutput:
        sequence.finish_reason = "error"
        self.rows.active[row] = False
        return StepOutput(row, [], "error", not_finite(who, self.runner.step.models(), sequence))

