"""Many sequences at once: requests come and go while others go on.

Every sequence has a row of the caches. A step decodes all rows that are active in one target call,
each with its own tree, length, settings and random numbers; what a row generates does not depend on
what shares the batch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stree import threads
from stree.errors import StreeError, UsageError, naming_what_does_not_fit
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
from stree.rows import AFTER, RowChooser, Rows
from stree.step import Choose, Drafter, ModelDrafter, Step
from stree.tokenizer import eos_token_ids
from stree.tree import TokenTree
from stree_kernels import ops

PREFILL_CHUNK = 512  # prompt tokens that a row reads between two steps of the others


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
    unread: list[int] = field(default_factory=list)  # by the drafter, the root last
    finish_reason: str = ""
    since: float = field(default_factory=time.perf_counter)

    @property
    def decoding(self) -> bool:
        return bool(self.unread) and not self.finish_reason

    @property
    def num_committed(self) -> int:
        """Tokens that are, or are about to be, in the target's cache: all but the root."""
        return len(self.prompt) + len(self.stop.tokens) - 1


class BatchDecoder:
    """A target, optionally with a drafter and a tree, and the caches to decode many sequences.

    Args: drafter, a model or anything that fills trees (`stree.step.Drafter`). tree, what requests
    decode with that name none (default with a drafter: the paper's). num_rows, how many sequences
    at once. max_length, the longest sequence, prompt included. max_nodes, the largest tree of any
    request (default: of `tree`). tokenizer, needed for stop strings only. choose, the source of
    randomness (default: the requests' own seeds).
    Raises `UsageError` when target and drafter do not fit each other, `OutOfMemory`.
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
        choose: Choose | None = None,
    ) -> None:
        require_whole("max_length", max_length)
        warn_beyond_positions(target.config, max_length)
        require_whole("num_rows", num_rows)
        if tree is None:
            tree = TokenTree.chain(0, "root") if drafter is None else TokenTree.paper()
        if isinstance(drafter, HybridModel):
            require_partners(target, drafter)
        self.max_nodes = max(max_nodes, tree.num_nodes)
        with naming_what_does_not_fit(
            "lower num_rows or max_length, take smaller trees, or use bfloat16 or a larger GPU",
            f"buffers for {num_rows} sequences of {max_length} tokens, {self.max_nodes} nodes each",
        ):
            if isinstance(drafter, HybridModel):
                drafter = ModelDrafter(drafter, num_rows, max_length, self.max_nodes)
            self.cache = target.new_cache(max_length, self.max_nodes, num_rows)
        self.cache.variant.copy_(torch.arange(num_rows))
        self.target, self.drafter, self.tree = target, drafter, tree
        self.num_rows, self.max_length, self.tokenizer = num_rows, max_length, tokenizer
        self.eos_token_ids = eos_token_ids(target.config, tokenizer)
        self.rows = Rows.new(num_rows, target.device)
        self._choose = choose
        self._step = Step(target, self.cache, drafter)
        self._sequences: dict[int, _Sequence] = {}

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
        self._sequences[row] = _Sequence(prompt, generation, tree, stop, stats)
        self.cache.narrow(row, 1).reset()
        if self.drafter is not None:
            self.drafter.clear(row)
        self.rows.set(row, generation)
        return row

    @torch.no_grad()
    def step(self) -> list[Report]:
        """Read a piece of each new prompt, and decode one step of every other row.

        A row whose logits are not finite ends with its error; the others do not notice.
        """
        reports = []
        with ops.current(self.target.device), threads.for_decoding(self.target):
            for row, sequence in self._sequences.items():
                if not sequence.unread and not sequence.finish_reason:
                    reports += self._read(row, sequence)
            decoding = {row: each for row, each in self._sequences.items() if each.decoding}
            return reports + (self._decode(decoding) if decoding else [])

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

    def _read(self, row: int, sequence: _Sequence) -> list[Report]:
        """A piece of the row's prompt; the first token when it was the last piece."""
        piece = sequence.prompt[sequence.num_read : sequence.num_read + PREFILL_CHUNK]
        tokens = torch.tensor(piece, device=self.target.device)
        logits = self.target.prefill(tokens[None], self.cache.at(row))
        if self.drafter is not None:
            self.drafter.read(row, tokens)
        sequence.num_read += len(piece)
        if sequence.num_read < len(sequence.prompt):
            return []
        self.rows.position[row] = len(sequence.prompt) - 1
        token, finite = self._first_token(row, sequence, logits)
        now = time.perf_counter()
        sequence.stats.prefill_s, sequence.since = now - sequence.since, now
        if not finite:
            return [self._fail(row, sequence, "target")]
        self.rows.active[row] = True
        sequence.unread = [token]
        return [self._keep(row, sequence, [token])]

    def _first_token(self, row: int, sequence: _Sequence, logits: Tensor) -> tuple[int, bool]:
        rows = self.rows.narrow(row, 1, [sequence.generation])
        choose = self._choose or RowChooser(rows)
        place = torch.full((1, 1), AFTER, device=logits.device)
        token = choose(rows.distribution(logits)[:, None], place)
        return int(token), bool(logits.amax().isfinite())

    def _decode(self, decoding: dict[int, _Sequence]) -> list[Report]:
        """One step of all rows up to the last that is decoding."""
        batch = max(decoding) + 1
        root = TokenTree.chain(0)
        trees = [decoding[row].tree if row in decoding else root for row in range(batch)]
        forest = Forest.of(trees, self.target.device)
        self._catch_up(decoding)
        longest = max(len(each.unread) for each in decoding.values())
        block = [[0] * (1 + longest) for _ in range(batch)]
        for row, each in decoding.items():
            block[row][: 1 + len(each.unread)] = [len(each.unread), *each.unread]
        used = max(each.num_committed for each in decoding.values()) + forest.num_nodes
        rows = self.rows.narrow(0, batch, [each.generation for each in decoding.values()])
        positions = [each.num_committed for each in decoding.values()]
        rows.position[list(decoding)] = torch.tensor(positions, device=rows.position.device)
        report = self._step.run(
            torch.tensor(block, device=self.target.device), forest, rows,
            self._choose or RowChooser(rows), used,
        ).tolist()  # fmt: skip
        return [self._account(row, each, report[row]) for row, each in decoding.items()]

    def _catch_up(self, decoding: dict[int, _Sequence]) -> None:
        """A drafter reads at most as many tokens in a draft as a tree has nodes."""
        if self.drafter is None:
            for each in decoding.values():
                each.unread = each.unread[-1:]
            return
        for row, each in decoding.items():
            if len(each.unread) > self.max_nodes:
                tokens = torch.tensor(each.unread[:-1], device=self.target.device)
                self.drafter.read(row, tokens)
                each.unread = each.unread[-1:]

    def _account(self, row: int, sequence: _Sequence, report: list[int]) -> Report:
        finite, count, *rest = report
        if finite != 1:
            return self._fail(row, sequence, "drafter" if finite == -1 else "target")
        block, path = rest[:count], rest[len(rest) // 2 :][:count]
        drafted = sequence.tree.num_nodes > 1
        sequence.unread = block if drafted else [*sequence.unread, *block]
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
        model = self.target if who == "target" else getattr(self.drafter, "model", None)
        models = [(who, model)] if isinstance(model, HybridModel) else []
        tokens = sequence.prompt + sequence.stop.tokens
        error = not_finite(who, models, sequence.stats.num_calls, tokens)
        return Report(row, [], "error", error)
