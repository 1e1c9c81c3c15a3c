"""Clock of a generation: measure the prefill, and decoding by phase."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

PHASES = ("draft", "verify", "accept", "host")
PAUSED = "paused"  # the caller (a streamer, for example) runs: its time is not decoding


def now(device: torch.device) -> float:
    """Wait until a device has finished all work, and return the time in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class HostEvent:
    """A moment on the host, under the names of `torch.cuda.Event`."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: HostEvent) -> float:
        return (later.at - self.at) * 1e3


def recorded(device: torch.device) -> Any:
    """Record an event: on a GPU's stream it happens when all work started before is done."""
    event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else HostEvent()
    event.record()
    return event


class Stopwatch:
    """Time that a device spends on blocks of work; nothing waits for it.

    Attributes:
        num_blocks: Blocks so far.
        seconds: Seconds of the blocks that were done at the last `drain`.
    """

    def __init__(self) -> None:
        self.num_blocks = 0
        self.seconds = 0.0
        self._marks: deque[tuple[Any, Any]] = deque()  # when blocks began and were done

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """Time the work that is started inside the block."""
        begun = recorded(device)
        yield
        self._marks.append((begun, recorded(device)))
        self.num_blocks += 1

    @property
    def is_drained(self) -> bool:
        """True if `seconds` has all blocks."""
        return not self._marks

    def drain(self) -> None:
        """Add the blocks that are done by now to `seconds`, and drop their events."""
        while self._marks and self._marks[0][1].query():
            begun, done = self._marks.popleft()
            self.seconds += begun.elapsed_time(done) / 1e3


class PhaseClock:
    """Clock that times the prefill, and decoding by phase (on a GPU by events of its stream).

    On a GPU a call is launched before the report of the last one is read, so that one extra call is
    in flight at the end. Decoding ends with the last call that counts, and nothing waits for the
    extra one. The prefill begins when the device has finished earlier work.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[tuple[str, Any]] = []
        self.ends: list[int] = []  # of calls: how many marks there were
        self.started = now(device)

    def start_decoding(self) -> float:
        """Begin the first call; returns the seconds since construction (prefill)."""
        prefill_s = now(self.device) - self.started
        self.mark("start")
        return prefill_s

    def mark(self, phase: str) -> None:
        """End the phase of that name here, and begin the next."""
        self.marks.append((phase, recorded(self.device)))

    def end_call(self) -> None:
        """Note that the last mark is the end of a call."""
        self.ends.append(len(self.marks))

    def stop(self, num_calls: int) -> tuple[float, dict[str, float]]:
        """Return the seconds of the first `num_calls` calls of decoding, and their ms by phase.

        `host` takes the time that no other phase has.
        """
        marks = self.marks[: self.ends[num_calls - 1]]
        (_, first), (_, last) = marks[0], marks[-1]
        last.synchronize()
        times = dict.fromkeys((*PHASES, PAUSED), 0.0)
        for (_, before), (phase, after) in itertools.pairwise(marks):
            times[phase] += before.elapsed_time(after)
        decode_ms = first.elapsed_time(last) - times.pop(PAUSED)
        times["host"] += max(0.0, decode_ms - sum(times.values()))
        return decode_ms / 1e3, times
