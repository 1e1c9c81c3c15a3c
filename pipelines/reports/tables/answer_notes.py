"""Sentences below a table about the answers behind it: how they end, repeat, and were held up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stree import metrics
from stree_pipelines.evaluation.answering.stalls import MOST_WAITING, stalled, waiting_share
from stree_pipelines.evaluation.records import SampleRow

MOST_NAMED = 5
UNRELIABLE = "do not rely on speeds and speed-ups here, but on medians of speed-ups"

Samples = Mapping[str, Sequence[SampleRow]]  # by what the table calls a method


def marks(samples: Samples) -> list[str]:
    """Return a sentence for each reason not to rely on a table's speeds."""
    every = dict.fromkeys(_prompt(each) for rows in samples.values() for each in rows)
    held_up = {_prompt(each) for rows in samples.values() for each in stalled(rows)}
    told = []
    if held_up:
        told.append(
            f"Marked: the machine held up answers to {len(held_up)} of {len(every)} prompts "
            f"({_named([each[1] for each in every if each in held_up])}); {UNRELIABLE}."
        )
    share = max((_waiting(rows) or 0.0 for rows in samples.values()), default=0.0)
    if share > MOST_WAITING:
        told.append(waiting_mark(share))
    return told


def waiting_mark(share: float) -> str:
    """Return the sentence for plain decoding that waited for this share of its time."""
    return (
        f"Marked: plain decoding waited between its steps for {100 * share:.0f} % of its time, so "
        "speed-ups over it are too high."
    )


def _waiting(rows: Sequence[SampleRow]) -> float | None:
    plain = [each if each.tree is None else each.baseline for each in rows]
    return waiting_share(metrics.time_ms([each for each in plain if each is not None]))


def _prompt(sample: SampleRow) -> tuple[str, str]:
    return sample.benchmark, sample.prompt_id


def _named(prompts: Sequence[str]) -> str:
    """Return a few of the prompts by name, and how many there are besides."""
    more = len(prompts) - MOST_NAMED
    return ", ".join(prompts[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
