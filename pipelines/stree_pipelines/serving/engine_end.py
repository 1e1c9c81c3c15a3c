"""The engine's end of the connection to the process that speaks HTTP, and what trees cost there."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from threading import Lock
from typing import Any

from stree.batching.batch_decoder import BatchDecoder
from stree.batching.sequences import Request, samples_of
from stree.common.errors import StreeError, UsageError
from stree.engine.engine import Engine, Handle
from stree.engine.sequence import StepOutput
from stree.logits.log_probs import log_probs_of_text
from stree.tree_policy.step_times import StepTimes
from stree.trees.token_tree import PLAIN
from stree_pipelines.serving.grammar import AskedGrammar, Grammars
from stree_pipelines.serving.messages import Call, Facts, Result, packed, received

LOG = logging.getLogger(__name__)


class EngineEnd:
    """An engine whose requests come over a socket, and whose steps go over it, a message each.

    No texts are made here, but for requests with stop strings: these end at the token that
    completes one, so that no step decodes beyond it.

    Args:
        decoder: All its rows are the engine's.
        max_waiting: As for `Engine`.
        link: The socket; closed by the other end, it ends everything.
    """

    def __init__(self, decoder: BatchDecoder, max_waiting: int | None, link: socket.socket) -> None:
        self.decoder, self.link = decoder, link
        self._handles: dict[int, Handle] = {}
        self._sending = Lock()
        self.engine = Engine(decoder, max_waiting, self._tell)

    def run(self) -> None:
        """Take calls until the other end closes; then cancel what is under way.

        Raises `InvariantBroken` if the engine cannot go on after an error.
        """
        with self.link, self.link.makefile("rb") as stream:
            self._send(Facts.of(self.decoder))
            try:
                while True:
                    self._take(received(stream))
            except (EOFError, OSError):
                self.engine.close(drain=False)
        self.decoder.require_working()

    def _send(self, message: Any) -> None:
        with self._sending, suppress(OSError):  # the other end is gone: `run` sees it, too
            self.link.sendall(packed(message))

    def _tell(self, reports: list[tuple[Handle, StepOutput]]) -> None:
        """Send what a step gave, all rows in one message."""
        self._send([
            self._gain(handle, each) if each.finish_reason or each.logprobs
            else (handle.tag, each.tokens, each.num_accepted)
            for handle, each in reports
        ])
        if not self.engine.is_alive:
            with suppress(OSError):
                self.link.shutdown(socket.SHUT_RDWR)  # which ends `run`, and then this process

    def _gain(self, handle: Handle, report: StepOutput) -> tuple[Any, ...]:
        """Return all values of a `Gain`."""
        number, error, stats = handle.tag, "", None
        if report.finish_reason:
            self._handles.pop(number, None)
            stats = handle.output.stats
        if report.error is not None:
            LOG.error("a request has failed", exc_info=report.error)
            error = str(report.error) or type(report.error).__name__
        return (
            number, report.tokens, report.num_accepted, report.finish_reason, report.logprobs,
            stats, error,
        )

    # Calls

    def _take(self, call: Call) -> None:
        try:
            value = getattr(self, call.name)(*call.arguments)
        except Exception as error:
            self._send(Result(call.number, error=_sendable(error)))
            return
        if isinstance(value, Future):
            value.add_done_callback(partial(self._send_result, call.number))
        else:
            self._send(Result(call.number, value))

    def _send_result(self, number: int, future: Future[Any]) -> None:
        error = future.exception()
        if error is None:
            self._send(Result(number, future.result()))
        else:
            self._send(Result(number, error=_sendable(error)))

    def submit(
        self, numbers: Sequence[int], prompts: Sequence[tuple[Request, AskedGrammar | None]]
    ) -> None:
        """Submit the answers to prompts, by their numbers; none is under way if one is refused."""
        if self.engine.max_waiting is not None:
            most = self.engine.max_waiting + self.decoder.num_rows
            if len(numbers) > most:
                raise UsageError(
                    f"the request asks for {len(numbers)} answers, wanted at most {most} (rows and "
                    "places to wait): divide it into several requests"
                )
        left = iter(numbers)
        try:
            for request, grammar in prompts:
                for sample in samples_of(request):
                    number = next(left)
                    handle = self.engine.submit(self._constrained(sample, grammar), number)
                    self._handles[number] = handle
                    if handle.has_ended:  # before it stood there
                        self._handles.pop(number, None)
        except BaseException:
            self.cancel(numbers)
            raise

    def _constrained(self, request: Request, grammar: AskedGrammar | None) -> Request:
        if grammar is None:
            return request
        processor = self.grammars.processor(grammar)
        return replace(
            request, generation=replace(request.generation, logits_processor=processor)
        )

    @cached_property
    def grammars(self) -> Grammars:
        """Grammars over the tokenizer."""
        return Grammars(Facts.of(self.decoder))

    def cancel(self, numbers: Sequence[int]) -> None:
        """Cancel what is under way."""
        for number in numbers:
            if (handle := self._handles.get(number)) is not None:
                self.engine.cancel(handle)

    def check(self, requests: Sequence[Request]) -> None:
        """Raise the `UsageError` of a request that cannot be served."""
        for request in requests:
            self.decoder.check(request)

    def log_probs(self, tokens: Sequence[int], num_top: int) -> Future[Any]:
        """Return the log-probabilities of a text (`log_probs_of_text`), once they are there."""
        return self.engine.call(partial(log_probs_of_text, self.decoder.target, tokens, num_top))

    def speculation(self) -> Future[Any]:
        """Return the table of trees' costs, once no step changes it."""
        return self.engine.call(partial(speculation_table, self.decoder))


def _sendable(error: BaseException) -> Exception:
    """Return an error that can be pickled, whatever its class."""
    if isinstance(error, StreeError):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def speculation_table(decoder: BatchDecoder) -> dict[str, Any]:
    """Return the policy, and for each number of rows and tree the step's time and break-even.

    A tree is as fast as plain decoding at an acceptance length of its step's time by the plain
    step's. Without measured step times there are no rows.
    """
    costs = getattr(decoder.tree_policy, "costs", None)
    rows = []
    if isinstance(costs, StepTimes):
        for (count, tree), seconds in sorted(
            costs.seconds.items(), key=lambda each: (each[0][0], each[0][1].num_nodes)
        ):
            plain = costs.seconds.get((count, PLAIN))
            rows.append({
                "rows": count, "tree": tree.name, "step_ms": 1e3 * seconds,
                "break_even_acceptance_length": seconds / plain if plain else None,
            })
    return {
        "policy": decoder.tree_policy.name, "drafts": decoder.drafter is not None,
        "num_rows": decoder.num_rows, "max_length": decoder.max_length, "steps": rows,
    }


def speculation_lines(decoder: BatchDecoder) -> list[str]:
    """Return the same as lines of a table; none without measured step times."""
    steps = speculation_table(decoder)["steps"]
    if not steps:
        return []
    width = max(len(each["tree"]) for each in steps)
    lines = [f"rows  {'tree':<{width}}  step ms  pays from τ"]
    for each in steps:
        pays = each["break_even_acceptance_length"]
        told = "" if each["tree"] == PLAIN.name or pays is None else f"{pays:.2f}"
        tree, step_ms = each["tree"], each["step_ms"]
        lines.append(f"{each['rows']:>4}  {tree:<{width}}  {step_ms:7.2f}  {told:>11}")
    return lines
