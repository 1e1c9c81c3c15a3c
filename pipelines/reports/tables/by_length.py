"""Measure τ by prompt length, with the same questions after more and more text.

A ladder is several benchmarks of an evaluation that ask the same questions in prompts of other
lengths (`ask_conversations.py --lengths`). Everything is paired by question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from stree import metrics
from stree_pipelines.comparison.answers import Answers, acceptance_length, ratio
from stree_pipelines.evaluation.plan import AUTOREGRESSIVE
from stree_pipelines.evaluation.records import Reading, ReadingKey, SampleRow
from stree_pipelines.reports.run_data import RunData
from stree_pipelines.reports.settings import dtype_of

REPEATED = 4  # tokens in a row: fewer repeat in any text


@dataclass(frozen=True)
class Rung:
    """A length: a benchmark, its mean prompt in tokens, and the drafter's readings by question.

    readings: empty when the benchmark has no answers of the data.
    """

    benchmark: str
    num_tokens: float
    readings: tuple[Reading, ...]

    @property
    def length(self) -> str:
        return f"{self.num_tokens:,.0f}"


@dataclass(frozen=True)
class Change:
    """A figure, and its difference to the shortest prompts' (a ratio, for perplexities)."""

    value: float
    change: float
    interval: metrics.Interval | None

    @property
    def is_less(self) -> bool:
        return self.interval is not None and self.interval[1] < 0

    @property
    def is_more(self) -> bool:
        return self.interval is not None and self.interval[0] > 0


def ladders(data: RunData) -> list[list[Rung]]:
    """Return the ladders of a run, shortest prompts first; most runs have none."""
    found: dict[tuple[tuple[str, str], ...], list[Rung]] = {}
    rows = {row.benchmark: row for row in data.rows}
    for benchmark in data.benchmarks:
        samples = _samples(data, benchmark)
        if not samples:
            continue
        first = [sample.turns[0] for sample in samples]
        row = rows[benchmark]
        place = (
            row.target_sha256, dtype_of(row), row.chat_template_sha256, benchmark, row.prompts_hash
        )
        keys = (ReadingKey(s.checkpoint_sha256, *place, s.prompt_id) for s in samples)
        there = tuple(data.readings[key] for key in keys if key in data.readings)
        mean = sum(turn.num_prompt_tokens for turn in first) / len(first)
        rung = Rung(benchmark, mean, there if len(there) == len(samples) else ())
        questions = tuple((sample.prompt_id, sample.turns[0].user) for sample in samples)
        found.setdefault(questions, []).append(rung)
    return [
        sorted(rungs, key=lambda rung: rung.num_tokens)
        for rungs in found.values()
        if len({rung.num_tokens for rung in rungs}) > 1
    ]


def _samples(data: RunData, benchmark: str) -> Sequence[SampleRow]:
    """Return the samples of the drafter to judge by; of the target without a drafter."""
    cells = (
        data.cell(data.last, method, benchmark, temperature)
        for method in (*data.methods, AUTOREGRESSIVE)
        for temperature in data.temperatures
    )
    return next((cell.samples for cell in cells if cell and cell.samples), ())


def acceptance(
    data: RunData, rungs: Sequence[Rung], method: str, temperature: float
) -> list[Change | None]:
    """Return τ at each length."""
    name = "acceptance_length"
    cells = [data.cell(data.last, method, rung.benchmark, temperature) for rung in rungs]
    first, changes = cells[0], []
    for cell in cells:
        if cell is None or first is None or cell[name] is None or first[name] is None:
            changes.append(None)
            continue
        mine, shortest = (Answers.of(each.seeds, key=_question) for each in (cell, first))
        interval = mine.over(shortest, acceptance_length, np.subtract).interval
        changes.append(Change(cell[name], cell[name] - first[name], interval))
    return changes


def read(rungs: Sequence[Rung], name: str) -> list[Change | None]:
    """Return the mean over an answer's tokens of the readings' field `name`; None without it."""
    first = _sums(rungs[0], name)
    return [_change(_sums(rung, name), first) for rung in rungs]


def begun_anew(rung: Rung) -> Change | None:
    """Return the overlap that a drafter gains by having read the question only."""
    return _change(_sums(rung, "overlap_begun_anew"), _sums(rung, "overlap"))


def _sums(rung: Rung, name: str) -> Answers:
    counted = {"sums": attrgetter(name), "tokens": attrgetter("num_tokens")}
    return Answers.of([rung.readings], counted, _question)


def _change(mine: Answers, first: Answers) -> Change | None:
    """Return the mean over tokens and its gain over the first; None where a row lacks it."""
    mean = ratio("sums", "tokens")
    value, gain = mine.value(mean), mine.over(first, mean, np.subtract)
    if value is None or gain.value is None:
        return None
    return Change(value, gain.value, gain.interval)


def _question(row: Any) -> tuple[str]:
    """Return the key that pairs rows of several lengths, whose benchmarks differ."""
    return (row.prompt_id,)


def repeated(data: RunData, benchmark: str, temperature: float) -> float | None:
    """Return the share of the target's new tokens that end a repeated run of `REPEATED` tokens.

    The same answer had those tokens in this order before; repetition is easy to draft.
    """
    found = [
        cell
        for method in (AUTOREGRESSIVE, *data.methods)
        for checkpoint in ("", data.last)
        if (cell := data.cell(checkpoint, method, benchmark, temperature)) and cell.samples
    ]
    if not found:
        return None
    count = total = 0
    for turn in (turn for sample in found[0].samples for turn in sample.turns):
        runs = [turn.tokens[end - REPEATED : end] for end in range(REPEATED, len(turn.tokens) + 1)]
        count += len(runs) - len(set(runs))
        total += len(turn.tokens)
    return count / total if total else None
