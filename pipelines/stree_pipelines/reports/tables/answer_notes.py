"""Sentences below a table about the answers behind it: how they end, repeat, and were held up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stree import metrics
from stree_pipelines.comparison.answers import (
    Answers,
    Figure,
    acceptance_length,
    repeats,
    speedup,
)
from stree_pipelines.evaluation.answering.stalls import MAX_WAITING_SHARE, stalled, waiting_share
from stree_pipelines.evaluation.records import SampleRow

MAX_PROMPTS_NAMED = 5
UNRELIABLE = "speeds and speed-ups here are not to be relied on"

Samples = Mapping[str, Sequence[SampleRow]]  # by what the table calls a method


def notes(samples: Samples) -> list[str]:
    """Return the notes below a table on its answers: endings, repeats, marks."""
    return [*endings(samples), *repeating(samples), *marks(samples)]


def endings(samples: Samples) -> list[str]:
    """Return how many answers ended by themselves, and how many were cut at the most tokens."""
    alike: dict[tuple[int, int], list[str]] = {}
    for label, rows in samples.items():
        cut = sum(row.num_cut for row in rows)
        if total := sum(len(row.turns) for row in rows):
            alike.setdefault((total - cut, cut), []).append(label)
    if not alike:
        return []
    counts = (
        f"{ended} and {cut}" + (f" ({', '.join(labels)})" if len(alike) > 1 else "")
        for (ended, cut), labels in alike.items()
    )
    each = " of each method" if len(samples) > 1 and len(alike) == 1 else ""
    return [f"Answers that ended by themselves and that were cut{each}: {'; '.join(counts)}."]


def repeating(samples: Samples) -> list[str]:
    """Return which answers end in a repetition, and each method's figures without its own."""
    found = {_prompt(row): None for rows in samples.values() for row in rows if repeats(row)}
    if not found:
        return []
    without = [
        f"{label} τ {_shown(kept, acceptance_length)}, {_shown(kept, speedup)}× "
        f"({len(kept)} of {len(rows)})"
        for label, rows in samples.items()
        if len(kept := without_repeats(rows)) < len(rows) and rows[0].tree is not None
    ]
    names = _named([prompt for _, prompt in found])
    return [
        f"The last quarter of answers to {names} repeats, which is easy to draft."
        + (f" Without these answers: {'; '.join(without)}." if without else "")
    ]


def without_repeats(rows: Sequence[SampleRow]) -> list[SampleRow]:
    return [row for row in rows if not repeats(row)]


def marks(samples: Samples) -> list[str]:
    """Return a sentence for each reason why a table's speeds are marked."""
    return [f"Marked: {reason}" for reason in doubts(samples)]


def doubts(samples: Samples) -> list[str]:
    """Return each reason not to rely on a table's speeds, as the rest of a sentence."""
    every = dict.fromkeys(_prompt(each) for rows in samples.values() for each in rows)
    held_up = {_prompt(each) for rows in samples.values() for each in stalled(rows)}
    reasons = []
    if held_up:
        reasons.append(
            f"the machine held up answers to {len(held_up)} of {len(every)} prompts "
            f"({_named([each[1] for each in every if each in held_up])}); {UNRELIABLE}."
        )
    return reasons + _waiting([_plain_ms(rows) for rows in samples.values()])


def _waiting(plain_ms: Sequence[Mapping[str, float]]) -> list[str]:
    """Return a reason where plain decoding waited for much of its time; none where it did not.

    plain_ms: `metrics.time_ms` of plain decoding, one for each row; the worst is told.
    """
    worst = max(plain_ms, key=lambda each: waiting_share(each) or 0.0, default={})
    share, step_ms = waiting_share(worst) or 0.0, sum(worst.values())
    if share <= MAX_WAITING_SHARE:
        return []
    return [
        f"plain decoding waited between its steps, for {100 * share:.0f} % of its time at "
        f"the worst (a step took {step_ms:.2f} ms, {step_ms * (1 - share):.2f} without waiting), "
        "so speed-ups over it are too high."
    ]


def _plain_ms(rows: Sequence[SampleRow]) -> dict[str, float]:
    plain = [each if each.tree is None else each.baseline for each in rows]
    return metrics.time_ms([each for each in plain if each is not None])


def _prompt(sample: SampleRow) -> tuple[str, str]:
    return sample.benchmark, sample.prompt_id


def _named(prompts: Sequence[str]) -> str:
    """Return a few of the prompts by name, and how many there are besides."""
    more = len(prompts) - MAX_PROMPTS_NAMED
    return ", ".join(prompts[:MAX_PROMPTS_NAMED]) + (f" and {more} more" if more > 0 else "")


def _shown(rows: Sequence[SampleRow], of: Figure) -> str:
    value = Answers.of([rows]).value(of) if rows else None
    return "–" if value is None else f"{value:.2f}"
