"""Decode many sequences at once: requests come and go while others go on.

Every sequence has a row of the caches. A step decodes all active rows in one target call, each with
its own tree, length, settings and random numbers. The tokens of a row do not depend on the other
rows of the batch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from os import PathLike
from threading import RLock
from typing import Any, Never, Unpack

from stree.common.threads import for_decoding, one_at_a_time

import torch

from stree import verifiers
from stree.batching.checks import RequestLimits, checked_sequence, require_partners
from stree.batching.memory_report import MemoryReport
from stree.batching.prefillers import LONGEST_CHUNK
from stree.batching.sequences import Request, requests_of
from stree.batching.serve import Served, serve
from stree.batching.step import Step
from stree.batching.step_loop import StepLoop
from stree.batching.step_timing import measure_step_times, row_counts
from stree.checkpoints.tokenizer import eos_token_ids
from stree.common.errors import InvariantBroken, UsageError, first_line
from stree.common.words import counted, described, placed
from stree.drafters import Drafter, DrafterSpec
from stree.drafters.model import ModelDrafterSpec
from stree.engine.plan import Limits
from stree.engine.plan_log import LoggedScheduler
from stree.engine.scheduler import Scheduler
from stree.engine.sequence import StepOutput
from stree.engine.worker import Worker
from stree.generation import (
    GenerationConfig,
    GenerationOptions,
    GenerationOutput,
    PromptOptions,
    require_whole,
)
from stree.models.model import HybridModel
from stree.prompts import EncodedPrompt, chat_prompt, is_several_chats, text_prompt
from stree.settings import asked_of_texts
from stree.tree_policy.names import as_tree_policy
from stree.tree_policy.policy import TreePolicy
from stree.tree_policy.step_times import StepTimes
from stree.trees.token_tree import StepTree, TokenTree
from stree.verifiers import Verifier

LOG = logging.getLogger(__name__)


class BatchDecoder:
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
        scheduler = Scheduler(limits, self.tree_policy, tree)
        self.loop = StepLoop(target, scheduler, self.worker)
        self.lock = RLock()  # held by a thread while it changes anything

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
    def scheduler(self) -> Scheduler:
        """Scheduler of the steps; `log_plans` replaces it."""
        return self.loop.scheduler

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
        if (failure := self.loop.failure) is not None:
            raise InvariantBroken(
                f"the decoder has failed and serves no more requests: {first_line(failure)}; "
                "start the process again"
            ) from failure

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
        return self.loop.admit(sequence)

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
        return self.loop.step()

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
        sequence = self.loop.release(row, keep)
        asked = sequence.generation
        return GenerationOutput(
            list(sequence.stop.tokens), sequence.finish_reason or "released", sequence.stats,
            self.tokenizer, seed=asked.seed if asked.temperature else None,
            logprobs=None if asked.logprobs is None else sequence.logprobs,
        )

    @one_at_a_time
    def generate(
        self, requests: Any = None, generation_config: Any = None, *, attention_mask: Any = None,
        **options: Unpack[PromptOptions],
    ) -> list[GenerationOutput]:
        """Serve requests, as many at once as there are rows; return their outputs in order.

        A request for several answers (`num_return_sequences`) has one output per answer, one after
        the other. The error of a request ends the others, too, and all rows are free again.

        Args:
            requests: `Request`s, each with its own settings; or prompts, as `Decoder.generate`
                takes them.
            generation_config: Settings for all prompts; None for requests.
            attention_mask: (B, T), 0 for padding of prompts (B, T); None for none.
            options: Settings by keyword, such as max_new_tokens.

        Raises:
            UsageError: When rows are taken, or a request cannot be served.
            StreeError: The error of a request that ends with one.
        """
        self.require_free()
        requests = requests_of(requests, generation_config, attention_mask, options, self.tokenizer)
        answers = {served.number: served for served in self.serve(requests)}
        return [answers[number].release() for number in range(len(requests))]

    def complete(
        self, text: str | Sequence[str], generation_config: Any = None,
        **options: Unpack[GenerationOptions],
    ) -> list[GenerationOutput]:
        """Continue a text, or each text of a list, as `generate` continues tokens.

        Args:
            text: A text or a list of texts, encoded with the tokenizer's special tokens.
            generation_config: Settings for all texts; None is the defaults.
            **options: Settings by keyword, such as max_new_tokens.

        Raises:
            UsageError: Without a tokenizer, or for a text that cannot be served.
        """
        several = isinstance(text, list | tuple)
        return self._generate_of(text_prompt, text, several, generation_config, options)

    def chat(
        self, messages: str | Sequence[Any], generation_config: Any = None, *,
        tools: Sequence[Any] | None = None, documents: Sequence[Any] | None = None,
        enable_thinking: bool | None = None, chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[GenerationOptions],
    ) -> list[GenerationOutput]:
        """Answer a conversation, or each of several at once, as `Decoder.chat` does.

        Args:
            messages: A text (one question), a list of messages, or a list of conversations.
            generation_config: Settings for all conversations; None is the defaults.
            tools: Functions or JSON schemas, for the template.
            documents: Mappings, for the template.
            enable_thinking: For templates that read it.
            chat_template_kwargs: Other variables of the template, and another `chat_template`.
            **options: Settings by keyword, such as max_new_tokens.

        Raises:
            UsageError: Without a tokenizer or a template, or for messages that it refuses.
        """
        variables = dict(tools=tools, documents=documents, enable_thinking=enable_thinking)
        encode = partial(chat_prompt, **{**variables, **(chat_template_kwargs or {})})
        several = is_several_chats(messages)
        return self._generate_of(encode, messages, several, generation_config, options)

    def _generate_of(
        self, encode: Callable[[Any, Any], EncodedPrompt], given: Any, several: bool,
        generation_config: Any, options: Mapping[str, Any],
    ) -> list[GenerationOutput]:
        asked, _ = asked_of_texts(
            encode, given, several, generation_config, options, self.tokenizer
        )
        requests = [Request(prompt, generation) for prompt, generation, _ in asked]
        return self.generate(requests)

    @one_at_a_time
    def warm_up(self, request: Request) -> None:
        """Prepare kernels, buffers and graphs for such requests, in any number of rows.

        It serves the request once in each row; nothing is learned or kept of that. Raises
        `UsageError` while rows are taken.
        """
        self.require_free()
        request = replace(request, keep_prompt=False)
        with self.forgetting():
            LOG.info("answering a first request in each of %s", counted(self.num_rows, "row"))
            self.generate([request] * self.num_rows)
            for count in row_counts(self.num_rows):
                LOG.info("preparing steps of %s", counted(count, "row"))
                rows = [self.admit(request) for _ in range(count)]
                try:
                    self.prepare()
                finally:  # graphs may not fit in memory, and others decode with it then
                    for row in rows:
                        self.release(row)

    def serve(
        self, requests: Iterable[Request | None],
        on_admitted: Callable[[int], object] = lambda row: None,
    ) -> Generator[Served, None, None]:
        """Serve requests, as many at once as there are rows, and yield each one after each report.

        A request is drawn when a row is free. None says that no request is there now: the next is
        asked for after the next step, or at once where nothing is under way. A finished request is
        released after it was yielded, unless its `release` was called. All rows are free again when
        the generator ends, is closed, or raises.

        Args:
            requests: Any number of them, drawn one by one.
            on_admitted: Called with each new row, before the step that follows.

        Raises:
            UsageError: When rows are taken, also by another caller meanwhile, or for a request that
                cannot be served.
            StreeError: The error of a request that ends with one, unless the caller released it.

        Example:
            >>> import stree
            >>> sizes = dict(attn_layers=(0,), num_heads=2, num_kv_heads=1, head_dim=8)
            >>> config = stree.HybridConfig(64, d_model=16, num_layers=1, **sizes)
            >>> batch = stree.BatchDecoder(stree.HybridModel(config), num_rows=2, max_length=64)
            >>> asked = stree.GenerationConfig(max_new_tokens=2)
            >>> requests = [stree.Request([5, 3], asked), stree.Request([8], asked)]
            >>> for served in batch.serve(requests):
            ...     if served.report.finish_reason:
            ...         print(served.number, len(served.release().tokens))
            0 2
            1 2
        """
        self.require_free()
        yield from serve(self, requests, on_admitted)

    def require_free(self) -> None:
        """Raise `UsageError` while rows are taken."""
        if taken := self.num_rows - self.num_free_rows:
            raise UsageError(
                f"rows are taken ({taken}): release them, or go on with admit and step"
            )

    @one_at_a_time
    def num_reusable(self, prompt: list[int]) -> int:
        """Return how many tokens of a prompt are in a kept prefix, and need not be read again.

        Waits as `await_prefixes` does.
        """
        self._follow_weights()
        self.await_prefixes()
        return self.scheduler.num_reusable(prompt)

    @one_at_a_time
    def await_prefixes(self) -> None:
        """Wait for the device to save the prefixes that were kept last."""
        while self.scheduler.prefixes.unsettled:
            self.loop.take_report()

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
        self.loop.settle()
        self.forget()
        scheduler.limit_prefixes(before.prefixes.budget, before.prefixes.bytes_each)
        if isinstance(before, LoggedScheduler):
            before.close()
        self.loop.scheduler = scheduler

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
        with for_decoding(self.target, self.worker.device):
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
            with for_decoding(self.target, self.worker.device):
                self.worker.prepare_reads(row, pieces, drafted, may_lag)

    @one_at_a_time
    def measure_step_times(
        self, context: int | None = None, num_steps: int = 8, counts: Sequence[int] | None = None,
        generation: GenerationConfig = GenerationConfig(),
    ) -> StepTimes:
        """Time steps with each tree of the policy; its choice rests on these times from now on.

        Args:
            context: Tokens of each row's prompt; None is 32, or less where max_length is short.
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
        self.tree_policy.costs = measure_step_times(
            self, self.scheduler, self.worker, self.tree_policy.trees, context, num_steps, counts,
            generation, self.max_length,
        )
        return self.tree_policy.costs

    def forget(self) -> None:
        """Let the tree policy forget everything that it has learned, except the step times."""
        self.scheduler.choice.forget()

    def forgetting(self) -> AbstractContextManager[None]:
        """Let the tree policy learn nothing inside the block, a warm-up for example."""
        return self.scheduler.choice.forgetting()
