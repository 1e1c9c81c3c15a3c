"""Serve requests that arrive by chance with a decoder of several rows, and time their waits.

Traffic is a Poisson process: the gaps between arrivals are exponential. Two policies say when a
waiting request gets a row:

- continuous: as soon as a row is free, whatever the others hold.
- clearing, the periodic-clearing queue (Snakes and Ladders, section 4): the queue is cleared when
  it holds `queue_size` requests or its first one has waited `max_wait_s`. The cleared requests are
  a batch of their own: the next one begins when all of it is finished.

A request's latency is from its arrival to its last token, waiting included.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stree.batching.batch_decoder import BatchDecoder
from stree.batching.sequences import Request
from stree.generation import DecodingStats
from stree.metrics import tau

CONTINUOUS, CLEARING = POLICIES = ("continuous", "clearing")


@dataclass(frozen=True)
class Policy:
    """Rule by which waiting requests get rows; `queue_size` and `max_wait_s` are of clearing."""

    name: str
    queue_size: int = 1
    max_wait_s: float = 0.0

    def due_at(self, arrivals: Sequence[float], num_free: int, num_rows: int) -> float:
        """Return the moment at which the waiting requests get the free rows, in seconds.

        arrivals: their moments. Infinity when something else has to happen first.
        """
        if not arrivals or num_free == 0:
            return math.inf
        if self.name == CONTINUOUS:
            return arrivals[0]
        if num_free < num_rows:
            return math.inf  # a batch is under way
        is_full = len(arrivals) >= self.queue_size
        full_at = arrivals[self.queue_size - 1] if is_full else math.inf
        return min(full_at, arrivals[0] + self.max_wait_s)


class Clock(Protocol):
    def now(self) -> float: ...
    def wait_until(self, moment: float) -> None: ...


class WallClock:
    """Clock of the seconds since it was made."""

    def __init__(self) -> None:
        self.started = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.started

    def wait_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - self.now()))


@dataclass
class Served:
    """Moments of a request, in seconds of the clock, and its answer's statistics."""

    arrival: float
    admitted: float = math.nan
    first_token: float = math.nan
    finished: float = math.nan
    num_tokens: int = 0
    stats: DecodingStats | None = None


@dataclass(frozen=True)
class Traffic:
    """All requests of a run, by arrival."""

    requests: list[Served]
    num_rows: int

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival until the last token."""
        return max(r.finished for r in self.requests) - self.requests[0].arrival

    @property
    def occupancy(self) -> float:
        """Share of the rows that held a request, on average over the duration."""
        held = sum(r.finished - r.admitted for r in self.requests)
        return min(1.0, held / (self.num_rows * self.duration_s))


def poisson_arrivals(rate: float, count: int, seed: int) -> NDArray[np.float64]:
    """Draw moments (count,) in seconds at which requests arrive, `rate` per second on average.

    A seed gives the same traffic at any rate, only faster or slower.
    """
    return np.random.default_rng(seed).exponential(1.0, count).cumsum() / rate


def serve(
    decoder: BatchDecoder, requests: Sequence[Request], arrivals: Sequence[float], policy: Policy,
    clock: Clock, on_finished: Callable[[Served], object] = lambda _: None,
) -> Traffic:
    """Admit each request when its policy says so, after its arrival, and step until all are done.

    Raises the error of a request that ends with one.
    """
    served = [Served(float(moment)) for moment in arrivals]
    coming, waiting = deque(range(len(requests))), deque[int]()
    admitted: list[int] = []

    def due() -> Iterator[Request | None]:
        """Yield each request when the policy admits it, None where steps come first."""
        while coming or waiting:
            now = clock.now()
            while coming and served[coming[0]].arrival <= now:
                waiting.append(coming.popleft())
            num_free = decoder.num_free_rows
            moment = policy.due_at([served[i].arrival for i in waiting], num_free, decoder.num_rows)
            if moment <= now:
                for _ in range(min(num_free, len(waiting))):
                    admitted.append(waiting.popleft())
                    served[admitted[-1]].admitted = now
                    yield requests[admitted[-1]]
            elif num_free < decoder.num_rows:
                yield None
            else:
                clock.wait_until(min(moment, served[coming[0]].arrival if coming else math.inf))

    with closing(decoder.serve(due())) as reports:
        for each in reports:
            one, now = served[admitted[each.number]], clock.now()
            if each.report.tokens and math.isnan(one.first_token):
                one.first_token = now
            if each.report.finish_reason and each.report.error is None:
                output = each.release()
                one.finished, one.num_tokens, one.stats = now, len(output.tokens), output.stats
                on_finished(one)
    return Traffic(served, decoder.num_rows)


def figures_of(traffic: Traffic) -> dict[str, Any]:
    """Compute the measured fields of a row.

    - `latency_s`, `time_to_first_token_s`: from a request's arrival. `waiting_s`: until it had a
      row. Mean and percentiles over all requests.
    - `throughput`: new tokens of all requests, first ones included, per second of `duration_s`,
      which is from the first arrival until the last token. `requests_per_second` over the same
      time; when it is below the rate, the queue grew while requests came.
    - `occupancy`: share of the rows that held a request, on average over `duration_s`.
    - `acceptance_length`: None without a target call.
    """
    requests, seconds = traffic.requests, traffic.duration_s
    stats = [r.stats for r in requests if r.stats is not None]
    length = tau(sum(s.num_new_tokens for s in stats), sum(s.num_calls for s in stats))
    return {
        "latency_s": _spread([r.finished - r.arrival for r in requests]),
        "time_to_first_token_s": _spread([r.first_token - r.arrival for r in requests]),
        "waiting_s": _spread([r.admitted - r.arrival for r in requests]),
        "throughput": sum(r.num_tokens for r in requests) / seconds,
        "requests_per_second": len(requests) / seconds,
        "occupancy": traffic.occupancy,
        "acceptance_length": None if math.isnan(length) else length,
        "duration_s": seconds,
    }


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    p50, p95 = map(float, np.percentile(seconds, (50, 95)))
    return {"mean": float(np.mean(seconds)), "p50": p50, "p95": p95}
