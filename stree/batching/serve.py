"""The loop that serves requests with a batch: admit, step, release, and clean up."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from stree.batching.sequences import Request, StepOutput
from stree.common.errors import UsageError
from stree.generation import GenerationOutput


class BatchDecoderLike(Protocol):
    """The rows that `serve` gives to requests: a `BatchDecoder`, or one under a clock."""

    @property
    def num_free_rows(self) -> int: ...
    def admit(self, request: Request) -> int: ...
    def step(self) -> list[StepOutput]: ...
    def release(self, row: int, keep: bool = False) -> GenerationOutput: ...


@dataclass(slots=True)
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
    decoder: BatchDecoderLike,
    requests: Iterable[Request | None],
    on_admitted: Callable[[int], object] = lambda row: None,
) -> Generator[Served, None, None]:
    """Serve requests, as many at once as there are rows, and yield each one after each report.

    A request is drawn when a row is free. None says that no request is there now: the next is
    asked for after the next step, or at once where nothing is under way. A finished request is
    released after it was yielded, unless its `release` was called. All rows are free again when
    the generator ends, is closed, or raises.

    Args:
        decoder: Whose rows are used; all reports must be of requests that are served here.
        requests: Any number of them, drawn one by one.
        on_admitted: Called with each new row, before the step that follows.

    Raises:
        UsageError: For a request that cannot be served, and for rows that are not served here.
        StreeError: The error of a request that ends with one, unless the caller released it.
    """
    under_way: dict[int, Served] = {}

    def release(served: Served) -> GenerationOutput:
        del under_way[served.row]
        return decoder.release(served.row, keep=served.request.keep_prompt)

    drawn, number, is_drained = iter(requests), 0, False
    try:
        while under_way or not is_drained:
            while not is_drained and decoder.num_free_rows:
                try:
                    request = next(drawn)
                except StopIteration:
                    is_drained = True
                    break
                if request is None:
                    break
                row = decoder.admit(request)
                under_way[row] = Served(number, request, row, StepOutput(row, []), _release=release)
                number += 1
                on_admitted(row)
            if not under_way:
                continue
            before = dict(under_way)
            for report in decoder.step():
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
        for row in under_way:
            decoder.release(row)
