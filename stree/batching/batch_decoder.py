"""Decode many sequences at once: requests come and go while others go on.

Every sequence has a row of the caches. A step decodes all active rows in one target call, each with
its own tree, length, settings and random numbers. The tokens of a row do not depend on the other
rows of the batch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from threading import RLock
from typing import Any, ClassVar

from stree.common.threads import one_at_a_time

import torch

from stree import verifiers
from stree.batching.checks import (
    checked_sequence,
    not_finite,
    require_partners,
    require_target,
)
from stree.batching.memory_report import MemoryReport
from stree.batching.prefill import Prefill
from stree.batching.prefix_cache import PrefixCache
from stree.batching.runners import runner_of
from stree.batching.sequences import (
    InFlightStep,
    Request,
    RunningSequence,
    StepInputs,
    StepOutput,
)
from stree.batching.serve import RequestServer
from stree.batching.state import BatchState
from stree.batching.step import Step
from stree.batching.step_timing import context_of, measure_step_times
from stree.checkpoints.tokenizer import eos_token_ids
from stree.common import threads
from stree.common.clock import PhaseClock, recorded
from stree.common.errors import UsageError
from stree.common.lru import LRUCache
from stree.common.renamed import Renamed
from stree.common.words import counted
from stree.drafters import Drafter, DrafterSpec
from stree.drafters.model import ModelDrafterSpec
from stree.drafters.ngram import NGram
from stree.generation import (
    GenerationConfig,
    GenerationOutput,
    require_whole,
)
from stree.model_words import described, placed
from stree.models.model import HybridModel
from stree.tree_policy.adaptive import PLAIN, AdaptiveTrees, deepest_of, largest_of, trees_of
from stree.tree_policy.names import as_tree_policy
from stree.tree_policy.step_times import StepTimes
from stree.trees.build import make_tree_batch
from stree.trees.token_tree import TokenTree
from stree.trees.tree_batch import TreeBatch
from stree.verifiers import Verifier
from stree_kernels import ops

MAX_PREPARED = 16  # steps' rows and tree batches that are kept, one for each tree


class BatchDecoder(RequestServer, Renamed):
    """Decoder of many sequences: a target, optionally a drafter and a tree, and their caches.

    Any thread may admit, step, release and generate: a lock lets one thread in at a time, and a
    call of `generate` waits for the end of another. A step reports all rows, also those that other
    threads admitted: if several threads admit, let one of them step.

    Args:
        target: A `HybridModel`.
        drafter: A model, n-grams or anything that fills trees (`stree.drafters.Drafter`); None
            decodes without drafts.
        tree: The tree of requests that name none, or `AdaptiveTrees`, which choose a tree for each
            step (call `measure_step_times` first). None is the paper's tree with a drafter, else
            the root alone.
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

    RENAMED: ClassVar[dict[str, str]] = {
        "measure_costs": "measure_step_times", "modes": "adaptive_trees", "growth": "tree_policy",
    }

    def __init__(
        self,
        target: Any,
        drafter: HybridModel | DrafterSpec | Drafter | None = None,
        tree: TokenTree | AdaptiveTrees | str | None = None,
        *,
        num_rows: int = 8,
        max_length: int = 2048,
        max_nodes: int = 1,
        tokenizer: Any = None,
        verifier: str | Verifier = "coupled",
        num_prefixes: int = 0,
        backtracking: str = "replay",
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
        else:
            tree = as_tree_policy(tree)
        if isinstance(drafter, HybridModel):
            drafter = ModelDrafterSpec(drafter)
        model = drafter.model if isinstance(drafter, ModelDrafterSpec | NGram) else None
        self.num_drafted = target.config.vocab_size
        if model is not None:
            require_partners(target, model)
            self.num_drafted = model.config.head_size
        self.adaptive_trees = tree if isinstance(tree, AdaptiveTrees) else None
        choices, tree = trees_of(tree), largest_of(tree)
        if drafter is None and tree.num_nodes > 1:
            raise UsageError(f"{tree} needs a drafter to fill it")
        self.verifier = verifiers.named(verifier)
        self.max_nodes = max(max_nodes, tree.num_nodes)
        if (num_positions := target.config.num_positions) is not None:
            # Beyond it nothing is served; the last tree may reach further
            max_length = min(max_length, num_positions + self.max_nodes + 1)
        step = Step.new(
            target, drafter, self.verifier, choices, num_rows=num_rows, max_length=max_length,
            max_nodes=self.max_nodes, backtracking=backtracking,
        )
        self.cache, drafter = step.cache, step.drafter
        self.target, self.drafter, self.tree = target, drafter, tree
        self.num_rows, self.max_length, self.tokenizer = num_rows, max_length, tokenizer
        self.eos_token_ids = eos_token_ids(target.config, tokenizer)
        self.rows = BatchState.new(num_rows, self.max_nodes, target.device)
        self.phase_clock: PhaseClock | None = None  # told of the phases of each step, if given
        self.read_s = 0.0  # what steps have spent on prompts so far, as far as it is known
        self._prefill_marks: deque[tuple[Any, Any]] = deque()  # when they began and were done
        self.runner = runner_of(step)
        self.prefixes: PrefixCache | None = None
        if num_prefixes:
            hand_over = self.runner.hand_over
            self.prefixes = PrefixCache(num_prefixes, self.cache, drafter, hand_over)
        self.prefill = Prefill(self.runner, self.rows, self.prefixes)
        self.lock = RLock()  # held by a thread while it changes anything
        self._sequences: dict[int, RunningSequence] = {}
        self._launched: deque[InFlightStep] = deque()  # steps that are not collected
        self._next: tuple[int, TokenTree] | None = None  # rows, and the tree chosen for them
        # Inputs of the last steps, by the tree that idle rows had in them
        self._prepared: LRUCache[TokenTree, StepInputs] = LRUCache(MAX_PREPARED)

    @property
    def tree_policy(self) -> TokenTree | AdaptiveTrees:
        """The tree, or the policy that chooses one for each step."""
        return self.adaptive_trees or self.tree

    def __repr__(self) -> str:
        models = described(self.target, self.drafter, self.tree_policy)
        size = f"{counted(self.num_rows, 'row')}, max_length {self.max_length}"
        return f"BatchDecoder({models}, {size}, {placed(self.target)})"

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
        free = (row for row in range(self.num_rows) if row not in self._sequences)
        row = next(free, None)
        if row is None:
            raise UsageError(
                f"all rows ({self.num_rows}) are taken: release one, or make the decoder with more"
            )
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
           If the drafter must catch up first, and outputs are pending that it has to know, the call
           returns these outputs and does nothing else.
        2. Choose the tree of the next step while the device works.
        3. Prefill a chunk of each row whose prompt is not read, within `prompt_tokens_per_step`;
           whole prompts if no row decodes.
        4. Collect the outputs of the oldest step in flight.

        Returns one output for each row that has new tokens or ends; with CUDA graphs a step's
        outputs come with the next call. Logits that are not finite end their row with the
        finish_reason "error"; other rows go on.
        """
        with ops.current(self.target.device), threads.for_decoding(self.target):
            decoding = {
                row: each
                for row, each in self._sequences.items()
                if not each.is_prefilling and not each.finish_reason
            }
            pending = self._launch_steps(decoding)
            if pending is not None:
                return pending
            if decoding:
                self._choose_next(decoding)
            self._read_prompts(whole=not decoding)
            outputs = self._collect() if decoding else []
            # With wait=False, the next step is launched before the host knows the first tokens
            firsts = self._first_tokens(self._sequences, wait=not decoding)
            while self._prefill_marks and self._prefill_marks[0][1].query():
                begun, done = self._prefill_marks.popleft()
                self.read_s += begun.elapsed_time(done) / 1e3
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
            trees = self._trees(decoding)
            drafted = any(tree.num_nodes > 1 for tree in trees.values())
            if drafted and any(each.behind for each in decoding.values()):
                if self._launched:
                    return self._collect()
                if firsts := self._first_tokens(decoding, wait=True):
                    return firsts
                self.prefill.catch_up(decoding)
            self._next = None  # the choice is used
            self._launch(decoding, trees)
        return None

    def _read_prompts(self, whole: bool) -> None:
        """Prefill the rows whose prompts are not read, those admitted first at first.

        With `whole` their whole prompts, else a chunk each within `prompt_tokens_per_step`.
        """
        left = None if whole else self.prompt_tokens_per_step
        for row, each in self._sequences.items():
            if not each.is_prefilling:
                continue
            if left is not None and left <= 0:
                break
            begun, before = recorded(self.target.device), each.num_read
            self._read(row, each, whole)
            self._prefill_marks.append((begun, recorded(self.target.device)))
            if left is not None:
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
        if self.adaptive_trees is not None and sequence.tree is None and cut_short:
            self.adaptive_trees.learn_answer()  # for these tokens its prompt was read
        keep = keep and sequence.finish_reason != "error" and not sequence.is_stale
        if keep and self.prefixes is not None:
            tokens = sequence.prompt + sequence.stop.tokens
            with ops.current(self.target.device):
                self.prefixes.keep(row, tokens, sequence.num_drafted_from > 0)
        reason = sequence.finish_reason or "released"
        asked = sequence.generation
        return GenerationOutput(
            list(sequence.stop.tokens), reason, sequence.stats, self.tokenizer,
            seed=asked.seed if asked.temperature else None,
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
        if self.prefixes is None:
            return 0
        self._follow_weights()
        return self.prefixes.lengths(prompt)[0]

    def _follow_weights(self) -> None:
        """Drop prefixes and graphs that were made with weights which have changed since."""
        if self.runner.follow_weights():
            if self.prefixes is not None:
                self.prefixes.clear()
            for each in self._sequences.values():
                each.is_stale = True

    def tokens_of(self, row: int) -> list[int]:
        """Return the tokens that a row has generated so far."""
        return list(self._taken(row).stop.tokens)

    def now(self) -> float:
        """Wait until the device has finished all work, and return the time in seconds."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

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

    def _read(self, row: int, sequence: RunningSequence, whole: bool) -> None:
        """Read a chunk of the row's prompt; after the last one the row begins to decode."""
        if sequence.tree is None and self.adaptive_trees is not None and sequence.num_read == 0:
            sequence.behind = not self.adaptive_trees.drafts
        logits = self.prefill.read(row, sequence, whole)
        if logits is not None:
            sequence.first = self.prefill.begin(row, sequence, logits)

    def _first_tokens(self, rows: Iterable[int], wait: bool) -> list[StepOutput]:
        """Return outputs with the first tokens of rows, as far as the host has them.

        With `wait`, waits for the first tokens of all of them.
        """
        reports = []
        for row in rows:
            sequence = self._sequences[row]
            first = sequence.first
            if first is not None and (wait or first.is_there()):
                token, finite = first.tolist()
                sequence.first, now = None, time.perf_counter()
                sequence.stats.prefill_s, sequence.since = now - sequence.since, now
                told = self._keep(row, sequence, [token]) if finite else None
                reports.append(told or self._fail(row, sequence, "target"))
        return reports

    @one_at_a_time
    def prepare(self) -> None:
        """Capture the graphs that the prefill and the steps of all taken rows need.

        Otherwise the first steps capture them.
        """
        if not self._sequences:
            return
        deepest = deepest_of(self.tree_policy).max_depth + 1
        with ops.current(self.target.device):
            for row in self._sequences:
                self.prepare_prefill(row)
            for tree in trees_of(self.tree_policy):
                trees = {row: each.tree or tree for row, each in self._sequences.items()}
                inputs = self._inputs_of(self._sequences, trees)
                for most in {inputs.longest, self._longest(inputs.tree_batch, deepest)}:
                    self.runner.prepare(replace(inputs, longest=most))

    def prepare_prefill(self, row: int) -> None:
        """Capture the graphs that the prefill of a row needs, if its prompt is still to be read."""
        with ops.current(self.target.device):
            if (each := self._sequences[row]).is_prefilling:
                self.prefill.prepare(row, each)

    def _longest(self, tree_batch: TreeBatch, longest: int) -> int:
        """Return the most tokens of any block that a step is launched for, at least `longest`.

        With adaptive trees it takes two values a tree, so that few step graphs serve them all.
        """
        if self.adaptive_trees is not None and longest > tree_batch.max_depth + 1:
            return max(longest, deepest_of(self.adaptive_trees).max_depth + 1)
        return longest

    @one_at_a_time
    def measure_step_times(
        self,
        context: int | None = None,
        num_steps: int = 8,
        counts: Sequence[int] | None = None,
        generation: GenerationConfig = GenerationConfig(),
    ) -> StepTimes:
        """Time steps with each of the adaptive trees; their choice rests on these times from now.

        Args:
            context: Committed tokens before the first step; None is 32, or a quarter of max_length
                if that is less.
            num_steps: Steps of each timing.
            counts: Numbers of rows to time; None is 1, 2, 4, … up to all rows.
            generation: Settings of the requests to expect (sampling takes longer).

        Raises `UsageError` while rows are taken, or without adaptive trees.
        """
        if self.adaptive_trees is None or self._sequences:
            raise UsageError(
                "step times are measured of a decoder that was made with adaptive trees, while no "
                "row is taken"
            )
        with ops.current(self.target.device), threads.for_decoding(self.target):
            after = context_of(self.max_length) if context is None else context
            self._next = None  # was chosen by other times
            self.prefill.prepare_catching_up(0)
            self.adaptive_trees.costs = measure_step_times(
                self, self.adaptive_trees.trees, after, num_steps, counts, generation
            )
        return self.adaptive_trees.costs

    def forget(self) -> None:
        """Let adaptive trees forget all that they have learned, except the step times."""
        self._next = None
        if self.adaptive_trees is not None:
            self.adaptive_trees.forget()

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """Let adaptive trees learn nothing inside the block, a warm-up for example."""
        self._next = None
        try:
            with nullcontext() if self.adaptive_trees is None else self.adaptive_trees.forgetting():
                yield
        finally:
            self._next = None

    @property
    def _num_step_rows(self) -> int:
        """Number of rows of a step now: up to the last row that is taken, idle ones included."""
        return self.runner.num_rows(max(self._sequences) + 1, self.num_rows)

    def _trees(self, decoding: dict[int, RunningSequence]) -> dict[int, TokenTree]:
        """Return the tree of each row in the next step."""
        self._choose_next(decoding)
        chosen = self.tree if self._next is None else self._next[1]
        return {row: each.tree or chosen for row, each in decoding.items()}

    def _choose_next(self, decoding: dict[int, RunningSequence]) -> None:
        """Choose the next step's tree while the device works, unless it is chosen already.

        The choice ignores what steps in flight will accept.
        """
        if self.adaptive_trees is None or all(each.tree is not None for each in decoding.values()):
            return
        num_rows = self._num_step_rows
        if self._next is None or self._next[0] != num_rows:
            self._next = num_rows, self.adaptive_trees.choose(num_rows)

    def _launch(self, decoding: dict[int, RunningSequence], trees: dict[int, TokenTree]) -> None:
        inputs = self._inputs_of(decoding, trees)
        clock, drafted = self.phase_clock, inputs.tree_batch.num_nodes > 1
        self.runner.launch(inputs, clock.mark if clock else _no_mark)
        if clock is not None:
            clock.end_call()
        left_behind = self.drafter is not None and not drafted
        launched = {}
        for row, each in self._sequences.items():
            each.longest = 1
            if (tree := trees.get(row)) is not None:
                each.longest = most = tree.max_depth + 1
                each.ahead += most
                each.behind = each.behind or left_behind
                launched[row] = each, tree
        self._launched.append(InFlightStep(launched, drafted))

    def _inputs_of(
        self, decoding: dict[int, RunningSequence], trees: dict[int, TokenTree]
    ) -> StepInputs:
        """Return the inputs of a step of the rows that decode, each with its tree.

        All rows that are taken take part, or their buffers would fall behind.
        """
        batch = self._num_step_rows
        # Idle rows have the others' tree: one tree batch serves while requests come and go
        idle = next(iter(trees.values()))
        if any(tree != idle for tree in trees.values() if tree is not idle):
            idle = PLAIN
        of_rows = [trees.get(row, idle) for row in range(batch)]
        generations = [each.generation for each in decoding.values()]
        inputs = self._prepared.get(idle)
        if inputs is None or (inputs.trees, inputs.generations) != (of_rows, generations):
            tree_batch = make_tree_batch(of_rows, self.target.device)
            rows = self.rows.narrow(0, batch, generations)
            inputs = StepInputs(rows, tree_batch, 1, 0, of_rows, generations)
            self._prepared[idle] = inputs
        inputs.generations = generations  # the same objects, so that the next step compares fast
        longest = max(each.longest for each in self._sequences.values())
        inputs.longest = self._longest(inputs.tree_batch, longest)
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
            self._account(row, *launch.rows[row], launch.drafted, report[row])
            for row in self._living(launch)
        ]

    def _account(
        self, row: int, sequence: RunningSequence, tree: TokenTree, drafted: bool, report: list[int]
    ) -> StepOutput:
        finite, count = report[:2]
        if finite != 1:
            return self._fail(row, sequence, "drafter" if finite == -1 else "target")
        nodes = 1 + len(report) // 2  # where they begin
        block, path = report[2 : 2 + count], report[nodes : nodes + count]
        stats = sequence.stats
        if drafted:  # up to the root, with which the draft began
            sequence.num_drafted_from = sequence.position + 1
        if self.adaptive_trees is not None:
            self.adaptive_trees.learn_path(tree, path)
            stats.calls_by_tree[tree.name] += 1
        result = self._keep(row, sequence, block)
        result.num_accepted = stats.count_call(tree, path, len(result.tokens))
        if sequence.finish_reason:
            stats.decode_s = time.perf_counter() - sequence.since
        return result

    def _keep(self, row: int, sequence: RunningSequence, block: list[int]) -> StepOutput:
        kept, sequence.finish_reason = sequence.stop.keep(block)
        chosen_by = self.adaptive_trees if sequence.tree is None else None
        if chosen_by is not None:
            chosen_by.learn_tokens(len(kept))
        if sequence.finish_reason:
            self.rows.active[row] = False
            if chosen_by is not None:
                chosen_by.learn_answer(*sequence.drafter_read_s)
        return StepOutput(row, kept, sequence.finish_reason)

    def _fail(self, row: int, sequence: RunningSequence, who: str) -> StepOutput:
        sequence.finish_reason = "error"
        self.rows.active[row] = False
        models = [(name, model) for name, model, _ in self.runner.step.models() if name == who]
        tokens = sequence.prompt + sequence.stop.tokens
        error = not_finite(who, models, sequence.stats.num_calls, tokens)
        return StepOutput(row, [], "error", error)


def _no_mark(phase: str) -> None: ...
