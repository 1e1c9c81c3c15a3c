"""Many sequences at once: requests come and go while others go on.

Every sequence has a row of the caches. A step decodes all rows that are active in one target call,
each with its own tree, length, settings and random numbers; what a row generates does not depend on
what shares the batch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stree import threads, verifiers
from stree.clock import PhaseClock
from stree.drafters import Drafter
from stree.drafters.model import ModelDrafter
from stree.errors import StreeError, UsageError, naming_what_does_not_fit
from stree.executors import executor_of
from stree.forest import Forest
from stree.generation import (
    DecodingStats,
    GenerationConfig,
    GenerationOutput,
    StopRule,
    not_finite,
    one_prompt,
    require_partners,
    require_room,
    require_whole,
    warn_beyond_positions,
)
from stree.models.hybrid import HybridModel
from stree.rows import Rows
from stree.step import Step
from stree.tokenizer import eos_token_ids
from stree.tree import TokenTree
from stree.verifiers import Verifier
from stree_kernels import ops

PREFILL_CHUNK = 512  # prompt tokens that a row reads between two steps of others


@dataclass(frozen=True)
class Request:
    """A prompt, how to go on after it, and the tree to do it with (None: the decoder's)."""

    prompt_ids: Sequence[int] | Tensor
    generation: GenerationConfig = GenerationConfig()
    tree: TokenTree | None = None


@dataclass
class Report:
    """What a step gave a row: its new tokens, and why it ends ("" while it goes on; "error", with
    the error beside)."""

    row: int
    tokens: list[int]
    finish_reason: str = ""
    error: StreeError | None = None


@dataclass
class _Sequence:
    """The host's side of a row."""

    prompt: list[int]
    generation: GenerationConfig
    tree: TokenTree
    stop: StopRule
    stats: DecodingStats
    num_read: int = 0  # tokens of the prompt that are in the caches
    finish_reason: str = ""
    since: float = field(default_factory=time.perf_counter)

    @property
    def reading(self) -> bool:
        return self.num_read < len(self.prompt)

    @property
    def decoding(self) -> bool:
        return not self.reading and not self.finish_reason

    @property
    def longest(self) -> int:
        """The most tokens of a block."""
        return self.tree.max_depth + 1

    @property
    def position(self) -> int:
        """Where the root stands in the sequence: all before it is committed."""
        return len(self.prompt) + len(self.stop.tokens) - 1


class BatchDecoder:
    """A target, optionally with a drafter and a tree, and the caches to decode many sequences.

    Args: drafter, a model or anything that fills trees (`stree.drafters.Drafter`). tree, what
    requests decode with that name none (default with a drafter: the paper's). num_rows, how many
    sequences at once. max_length, the longest sequence, prompt included. max_nodes, the largest
    tree of any request (default: of `tree`). tokenizer, needed for stop strings only. verifier, by
    name (`stree.verifiers.named`) or one of your own.
    Raises `UsageError` when target, drafter and verifier do not fit each other, `OutOfMemory`.
    """

    def __init__(
        self,
        target: Any,
        drafter: HybridModel | Drafter | None = None,
        tree: TokenTree | None = None,
        *,
        num_rows: int = 8,
        max_length: int = 2048,
        max_nodes: int = 1,
        tokenizer: Any = None,
        verifier: str | Verifier = "coupled",
    ) -> None:
        require_whole("max_length", max_length)
        warn_beyond_positions(target.config, max_length)
        require_whole("num_rows", num_rows)
        if tree is None:
            tree = TokenTree.chain(0, "root") if drafter is None else TokenTree.paper()
        if isinstance(drafter, HybridModel):
            require_partners(target, drafter)
        self.verifier = verifiers.named(verifier)
        self.max_nodes = max(max_nodes, tree.num_nodes)
        fewer = "num_rows or max_length" if num_rows > 1 else "max_length"
        with naming_what_does_not_fit(
            f"lower {fewer}, take smaller trees, or use bfloat16 or a larger GPU",
            f"{num_rows} × buffers for {max_length} tokens and {self.max_nodes} nodes",
        ):
            if isinstance(drafter, HybridModel):
                drafter = ModelDrafter(drafter, num_rows, max_length, self.max_nodes)
            self.cache = target.new_cache(max_length, self.max_nodes, num_rows)
        self.cache.variant.copy_(torch.arange(num_rows))
        verifiers.require_fit(self.verifier, drafter)
        self.target, self.drafter, self.tree = target, drafter, tree
        self.num_rows, self.max_length, self.tokenizer = num_rows, max_length, tokenizer
        self.eos_token_ids = eos_token_ids(target.config, tokenizer)
        self.rows = Rows.new(num_rows, self.max_nodes, target.device)
        self.phase_clock: PhaseClock | None = None  # told of the phases of each step, if given
        self.read_s = 0.0  # what steps have spent on prompts so far
        self.executor = executor_of(Step(target, self.cache, drafter, self.verifier))
        self._sequences: dict[int, _Sequence] = {}
        self._launched: deque[dict[int, _Sequence]] = deque()  # whose steps are not collected

    @property
    def num_free_rows(self) -> int:
        """How many more requests can be admitted now."""
        return self.num_rows - len(self._sequences)

    def admit(self, request: Request) -> int:
        """Give a request a row; the steps that follow read its prompt and go on after it.

        Raises `UsageError` when no row is free, or for a request that cannot be served.
        """
        if not isinstance(request, Request):
            raise UsageError(
                f"a request is a {type(request).__name__}, wanted stree.Request(prompt_ids, …)"
            )
        free = (row for row in range(self.num_rows) if row not in self._sequences)
        row = next(free, None)
        if row is None:
            raise UsageError(
                f"all {self.num_rows} rows are taken: release one, or make the decoder with more"
            )
        generation, tree = request.generation, request.tree or self.tree
        prompt = one_prompt(request.prompt_ids).tolist()
        if tree.num_nodes > self.max_nodes:
            raise UsageError(
                f"{tree} has {tree.num_nodes} nodes, the decoder was made for {self.max_nodes}: "
                "give it max_nodes"
            )
        if tree.num_nodes > 1 and self.drafter is None:
            raise UsageError(f"{tree} needs a drafter to fill it")
        vocabulary = self.target.config.vocab_size
        require_room(prompt, generation, tree, vocabulary, self.max_length)
        stop = StopRule(generation, self.eos_token_ids, self.tokenizer)
        stats = DecodingStats(tree_max_depth=tree.max_depth)
        self._require_same_models()
        self.executor.follow_weights()
        self._sequences[row] = _Sequence(prompt, generation, tree, stop, stats)
        self.cache.narrow(row, 1).reset()
        if self.drafter is not None:
            self.drafter.clear(row)
        self.rows.set(row, generation)
        return row

    @torch.no_grad()
    def step(self) -> list[Report]:
        """Decode one step of every row whose prompt has been read, and read a piece of the others'.

        A row whose logits are not finite ends with its error; the others do not notice.
        """
        with ops.current(self.target.device), threads.for_decoding(self.target):
            decoding = {row: each for row, each in self._sequences.items() if each.decoding}
            reading = {row: each for row, each in self._sequences.items() if each.reading}
            while self._launched and not any(map(self._lives, self._launched[0].items())):
                self._launched.popleft()
                self.executor.drop()
            while decoding and len(self._launched) <= self.executor.ahead:
                self._launch(decoding)
            reports = []
            if reading:
                started = self._now()
                for row, each in reading.items():
                    reports += self._read(row, each, alone=not decoding)
                self.read_s += self._now() - started
            return reports + (self._collect() if decoding else [])

    def release(self, row: int) -> GenerationOutput:
        """Take a row back; returns what it generated. "released" ends an unfinished request."""
        sequence = self._sequences.pop(row)
        self.rows.active[row] = False
        reason = sequence.finish_reason or "released"
        return GenerationOutput(list(sequence.stop.tokens), reason, sequence.stats)

    def generate(self, requests: Sequence[Request]) -> list[GenerationOutput]:
        """Serve all of them, as many at once as there are rows; in the order given.

        Raises the error of a request that ends with one, or cannot be served; the others end too,
        and their rows are free again.
        """
        if self._sequences:
            raise UsageError(
                f"{len(self._sequences)} rows are taken: release them, or go on with admit and step"
            )
        outputs: dict[int, GenerationOutput] = {}
        served: dict[int, int] = {}
        waiting = list(enumerate(requests))[::-1]
        try:
            while waiting or served:
                while waiting and self.num_free_rows:
                    index, request = waiting.pop()
                    served[self.admit(request)] = index
                for report in self.step():
                    if report.error is not None:
                        raise report.error
                    if report.finish_reason:
                        outputs[served.pop(report.row)] = self.release(report.row)
        finally:
            for row in served:
                self.release(row)
        return [outputs[index] for index in range(len(requests))]

    def _now(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

    def _lives(self, item: tuple[int, _Sequence]) -> bool:
        """Whether a row still has the sequence that a step was launched for, unfinished."""
        row, sequence = item
        return self._sequences.get(row) is sequence and sequence.decoding

    def _read(self, row: int, sequence: _Sequence, alone: bool) -> list[Report]:
        """A piece of the row's prompt; the first token when it was the last piece."""
        end = len(sequence.prompt) if alone else sequence.num_read + PREFILL_CHUNK
        tokens = torch.tensor(sequence.prompt[sequence.num_read : end], device=self.target.device)
        logits = self.target.prefill(tokens[None], self.cache.at(row))
        if self.drafter is not None:
            self.drafter.read(row, tokens)
        sequence.num_read += len(tokens)
        if sequence.reading:
            return []
        token, finite = self._first_token(row, sequence, logits)
        now = time.perf_counter()
        sequence.stats.prefill_s, sequence.since = now - sequence.since, now
        if not finite:
            return [self._fail(row, sequence, "target")]
        self.rows.begin(row, len(sequence.prompt), token)
        return [self._keep(row, sequence, [token])]

    def _first_token(self, row: int, sequence: _Sequence, logits: Tensor) -> tuple[int, bool]:
        rows = self.rows.narrow(row, 1, [sequence.generation])
        rows.position.fill_(len(sequence.prompt) - 1)  # as after a tree's root there
        depths = torch.zeros(1, 1, dtype=torch.int32, device=logits.device)
        token, score = ops.choose_best(rows.kept(logits)[:, None], depths, rows.sampling)
        return int(token), bool(score.isfinite())

    def prepare(self) -> None:
        """Make ready now what steps of the rows that are taken need (graphs), as the first of them
        would otherwise do."""
        if self._sequences:
            with ops.current(self.target.device):
                self.executor.prepare(*self._step_of(self._sequences))

    def _launch(self, decoding: dict[int, _Sequence]) -> None:
        clock = self.phase_clock
        self.executor.launch(*self._step_of(decoding), clock.mark if clock else _no_mark)
        if clock is not None:
            clock.end_call()
        self._launched.append(decoding)

    def _step_of(self, decoding: dict[int, _Sequence]) -> tuple[Rows, Forest, int, int]:
        """What a step is launched with; all rows that are taken take part, or their buffers would
        fall behind."""
        batch = self.executor.num_rows(max(self._sequences) + 1, self.num_rows)
        root = TokenTree.chain(0, "root")
        trees = [decoding[row].tree if row in decoding else root for row in range(batch)]
        forest = Forest.of(trees, self.target.device)
        rows = self.rows.narrow(0, batch, [each.generation for each in decoding.values()])
        longest = max(each.longest for each in decoding.values())
        # Steps that are still on their way commit at most a block each
        position = max(
            each.position + each.longest * sum(row in step for step in self._launched)
            for row, each in decoding.items()
        )
        return rows, forest, longest, position

    def _collect(self) -> list[Report]:
        launched, report = self._launched.popleft(), self.executor.collect()
        living = [item for item in launched.items() if self._lives(item)]
        return [self._account(row, each, report[row]) for row, each in living]

    def _account(self, row: int, sequence: _Sequence, report: list[int]) -> Report:
        finite, count, *rest = report
        if finite != 1:
            return self._fail(row, sequence, "drafter" if finite == -1 else "target")
        block, path = rest[:count], rest[len(rest) // 2 :][:count]
        stats = sequence.stats
        result = self._keep(row, sequence, block)
        num_kept = len(result.tokens)
        stats.num_calls += 1
        stats.num_nodes += sequence.tree.num_nodes
        stats.num_new_tokens += num_kept
        num_accepted = min(num_kept, len(block) - 1)
        stats.accepted_per_call.append(num_accepted)
        stats.end_node_per_call.append(path[num_accepted])
        if sequence.finish_reason:
            stats.decode_s = time.perf_counter() - sequence.since
        return result

    def _keep(self, row: int, sequence: _Sequence, block: list[int]) -> Report:
        kept, sequence.finish_reason = sequence.stop.keep(block)
        if sequence.finish_reason:
            self.rows.active[row] = False
        return Report(row, kept, sequence.finish_reason)

    def _fail(self, row: int, sequence: _Sequence, who: str) -> Report:
        sequence.finish_reason = "error"
        self.rows.active[row] = False
        models = [(name, model) for name, model, _ in self._models() if name == who]
        tokens = sequence.prompt + sequence.stop.tokens
        error = not_finite(who, models, sequence.stats.num_calls, tokens)
        return Report(row, [], "error", error)

    def _models(self) -> list[tuple[str, HybridModel, Any]]:
        """Those with weights, by what they are here, and the caches made for them."""
        models = []
        if isinstance(self.target, HybridModel):
            models.append(("target", self.target, self.cache))
        if isinstance(self.drafter, ModelDrafter):
            models.append(("drafter", self.drafter.model, self.drafter.cache))
        return models

    def _require_same_models(self) -> None:
        for name, model, cache in self._models():
            if (model.dtype, model.device) != (cache.dtype, cache.device):
                raise UsageError(
                    f"the {name} is {model.dtype} on {model.device} by now, this decoder was made "
                    f"for {cache.dtype} on {cache.device}: make a new decoder"
                )


def _no_mark(phase: str) -> None: ...
