"""Choose the steps at which a measured training logs."""

from __future__ import annotations

NUM_INTERVALS = 10  # per run; each has a rate, the first warms up


def interval(num_steps: int) -> int:
    """Return the number of steps of an interval."""
    return max(num_steps // NUM_INTERVALS, 1)


def logged_steps(num_steps: int) -> list[int]:
    """Return the steps of a row's losses: the first, the ends of intervals, and the last."""
    ends = range(interval(num_steps), num_steps + 1, interval(num_steps))
    return sorted({1, *ends, num_steps})
