"""Serve a list of requests with a batch: admit, step, release and clean up, in one loop."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from threading import RLock
from typing import Any, Protocol, Unpack

from stree.common.threads import one_at_a_time

from stree.batching.sequences import Request, requests_of
from stree.batching.step_timing import row_counts
from stree.common.errors import UsageError
from stree.common.words import counted
from stree.engine.sequence import StepOutput
from stree.generation import GenerationOptions, GenerationOutput, PromptOptions
from stree.prompts import EncodedPrompt, chat_prompt, is_several_chats, text_prompt
from stree.settings import asked_of_texts

LOG = logging.getLogger(__name__)


class Rows(Protocol):
    """Protocol of what gives rows to requests: a `BatchDecoder`, or one under a clock."""

    @property
    def num_free_rows(self) -> int: ...
    def admit(self, request: Request) -> int: ...
    def step(self) -> list[StepOutput]: ...
    def release(self, row: int, keep: bool = False) -> GenerationOutput: ...


@dataclass(eq=False, slots=True)
class Served:
    """A request under way.

    Attributes:
        number: Place among the requests, from 0.
        request: The request.
        row: Its row while it is under way.
        report: What the last step gave it.
        output: All that it got, once its row is released.
    """

    number: int
    request: Request
    row: int
    report: StepOutput
    output: GenerationOutput | None = None
    _release: Callable[[Served], GenerationOutput] = field(repr=False, kw_only=True)

    def release(self) -> GenerationOutput:
        """Free the row and return the output; an unfinished request ends as "released".

        A row whose request has `keep_prompt` is kept as a prefix. A second call returns the same.
        """
        if self.output is None:
            self.output = self._release(self)
        return self.output


def serve(
    rows: Rows, requests: Iterable[Request | None],
    on_admitted: Callable[[int], object] = lambda row: None,
) -> Generator[Served, None, None]:
    """Serve requests in the rows, all free at first, as `RequestServer.serve` describes."""
    under_way: dict[int, Served] = {}  # by row
    drawn, numbers, is_drained = iter(requests), itertools.count(), False

    def release(served: Served) -> GenerationOutput:
        del under_way[served.row]
        return rows.release(served.row, keep=served.request.keep_prompt)

    try:
        while under_way or not is_drained:
            while not is_drained and rows.num_free_rows:
                try:
                    request = next(drawn)
                except StopIteration:
                    is_drained = True
                    break
                if request is None:
                    break
                row = rows.admit(request)
                report = StepOutput(row, [])
                under_way[row] = Served(next(numbers), request, row, report, _release=release)
                on_admitted(row)
            if not under_way:
                continue
            before = dict(under_way)
            for report in rows.step():
                if report.row not in before:
                    raise UsageError(
                        f"row {report.row} was admitted by another caller, wanted none while "
                        "requests are served: give it to serve, too"
                    )
                served = before[report.row]
                if served.output is not None:
                    continue  # released by the caller between two reports
                served.report = report
                yield served
                if report.finish_reason and served.output is None:
                    served.release()
                    if report.error is not None:
                        raise report.error
    finally:
        for row in list(under_way):
            del under_way[row]
            rows.release(row)


class RequestServer(Rows):
    """Methods of a batch decoder that serve whole requests, by its rows and steps.

    A batch decoder inherits them; it brings the attributes and what raises NotImplementedError.
    """

    num_rows: int
    tokenizer: Any
    lock: RLock

    def prepare(self) -> None:
        """Capture the graphs that the taken rows need."""
        raise NotImplementedError

    def forgetting(self) -> AbstractContextManager[None]:
        """Let adaptive trees learn nothing inside the block."""
        raise NotImplementedError

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
