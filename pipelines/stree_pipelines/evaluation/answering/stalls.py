"""Detect answers distorted by machine stalls, which are marked.

Two things are judged of each answer, against the medians of its own row (method, benchmark and
temperature): the time per step, and the waiting between steps, in which the device had no work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from stree_pipelines.evaluation.records import BaselineTiming, SampleRow

MIN_ANSWERS = 5  # of a row; the median of fewer says little
MIN_SLOWNESS = 2.0  # times the median step
MIN_WAITED_STEPS = 0.5  # median steps that each step waited beyond the median, on average
MIN_SHARE_LOST = 0.1  # of the median answer's time; what is lost below that moves no figure
PARTS_OF_PLAIN = "verify", "accept"  # in which plain decoding works
MAX_WAITING_SHARE = 0.2  # of plain decoding's time

Answered = SampleRow | BaselineTiming


def waiting_s(timing: Answered) -> float | None:
    """Return the seconds between steps; None where calls are not timed by part (batches).

    Plain decoding drafts nothing: what its parts do not take is waiting.
    """
    if not timing.time_ms or not timing.num_calls:
        return None
    if isinstance(timing, SampleRow) and timing.tree is not None:
        return timing.time_ms.get("host", 0.0) / 1e3
    busy_ms = sum(timing.time_ms.get(part, 0.0) for part in PARTS_OF_PLAIN)
    return max(0.0, timing.decode_s - busy_ms / 1e3)


def outliers(answers: Sequence[Answered]) -> list[int]:
    """Return which answers of one row waited, or took, far longer a step than its median answer."""
    steps = {  # one that is shared among n rows counts 1/n, as its seconds do
        number: each.num_calls if each.call_share is None else each.call_share
        for number, each in enumerate(answers) if each.decode_s
    }
    steps = {number: count for number, count in steps.items() if count}
    if len(steps) < MIN_ANSWERS:
        return []
    waits = {number: waiting_s(answers[number]) or 0.0 for number in steps}
    step_s = median(answers[number].decode_s / count for number, count in steps.items())
    wait_s = median(waits[number] / count for number, count in steps.items())
    least_s = MIN_SHARE_LOST * median(answers[number].decode_s for number in steps)
    found = []
    for number, count in steps.items():
        took_s, waited_s = answers[number].decode_s / count, waits[number] / count - wait_s
        slow = took_s > MIN_SLOWNESS * step_s and (took_s - step_s) * count > least_s
        if slow or (waited_s > MIN_WAITED_STEPS * step_s and waited_s * count > least_s):
            found.append(number)
    return found


def stalled(samples: Iterable[SampleRow]) -> list[SampleRow]:
    """Return the samples whose own answer, or plain decoding's beside it, is an outlier.

    samples: of any number of rows; each is judged among those of its own row.
    """
    rows: dict[tuple[object, ...], list[SampleRow]] = {}
    for each in samples:
        row = (each.checkpoint_sha256, each.method, each.tree, each.benchmark, each.temperature)
        rows.setdefault(row, []).append(each)
    return [sample for row in rows.values() for sample in _stalled_of_row(row)]


def waiting_share(plain_ms: Mapping[str, float]) -> float | None:
    """Return the share of its steps that plain decoding waited; None where it is not known.

    plain_ms: its `metrics.time_ms`, as a row's `baseline_time_ms`.
    """
    total = sum(plain_ms.values())
    busy = sum(plain_ms.get(part, 0.0) for part in PARTS_OF_PLAIN)
    return (total - busy) / total if total else None


def _stalled_of_row(samples: Sequence[SampleRow]) -> list[SampleRow]:
    found = set(outliers(samples))
    beside = [number for number, each in enumerate(samples) if _is_timed(each)]
    plain = [samples[number].baseline for number in beside]
    found |= {beside[at] for at in outliers([each for each in plain if each is not None])}
    return [samples[number] for number in sorted(found)]


def _is_timed(sample: SampleRow) -> bool:
    """Return True if a sample's plain answer was timed, in a batch by its share of the calls."""
    plain = sample.baseline
    return plain is not None and (sample.batch_size == 1 or plain.call_share is not None)
