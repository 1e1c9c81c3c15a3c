"""Serve a list of requests with a batch: admit, step, release and clean up, in one loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from stree.batching.sequences import Request
from stree.common.errors import UsageError
from stree.engine.sequence import StepOutput
from stree.generation import GenerationOutput


class Rows(Protocol):
    """Protocol of what gives rows to requests, as a `BatchDecoder` does."""

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
    """Serve requests in the rows, all free at first, as `BatchDecoder.serve` describes."""
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
