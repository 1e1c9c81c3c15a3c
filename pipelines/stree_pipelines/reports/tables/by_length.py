"""Measure τ by prompt length: the same questions after more and more text.

A ladder is several benchmarks of an evaluation that ask the same questions in prompts of other
lengths (`ask_conversations.py --lengths`). Everything is paired by question.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Self

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from stree import metrics
from stree_pipelines.comparison.answers import Answers, acceptance_length, ratio
from stree_pipelines.evaluation.plan import AUTOREGRESSIVE, method_label
from stree_pipelines.evaluation.records import Reading, ReadingKey, SampleRow
from stree_pipelines.reports import plots
from stree_pipelines.reports.run_data import Cell, RunData, checkpoint_title
from stree_pipelines.reports.settings import dtype_of
from stree_pipelines.reports.tables.tables import (
    MISSING,
    Advice,
    Table,
    advise,
    all_tables,
    below,
    figure,
    plain_speed,
    speed_of,
    tau_of,
)

REPEATED_TOKENS = 4  # tokens in a row: fewer repeat in any text
INTRO = (
    "The same questions after other conversations, in prompts of so many tokens. τ: new tokens per "
    "target call; behind it the difference to the shortest prompts. Repeated: of the target's new "
    "tokens, those that end four that its answer has had before. The data's answers are read by "
    "target and drafter as they stand: the loss of perplexity is the model's own, overlap is the "
    "chance that a single draft is accepted at T = 1, begun anew is that of a drafter that has "
    "read the question only. Brackets: 95 % bootstrap intervals over questions, paired."
)


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
    first = cells[0]
    changes: list[Change | None] = []
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
    """Return the share of the target's new tokens that end `REPEATED_TOKENS` repeated ones.

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
        ends = range(REPEATED_TOKENS, len(turn.tokens) + 1)
        runs = [turn.tokens[end - REPEATED_TOKENS : end] for end in ends]
        count += len(runs) - len(set(runs))
        total += len(turn.tokens)
    return count / total if total else None


@dataclass(frozen=True)
class LadderFindings:
    """Findings on a ladder."""

    rungs: list[Rung]
    tables: list[Table]
    verdicts: list[str]


def findings(data: RunData) -> list[LadderFindings]:
    """Return the findings of all ladders; most runs have none."""
    return [
        LadderFindings(rungs, tables(data, rungs), verdicts(data, rungs)) for rungs in ladders(data)
    ]


@dataclass(frozen=True)
class Findings:
    """Findings on a run or several: tables, the advice by temperature, and τ by prompt length.

    The first tables, one for each temperature, are over all benchmarks.
    """

    tables: list[Table]
    advice: dict[float, Advice]
    ladders: list[LadderFindings] = field(default_factory=list)

    @classmethod
    def of(cls, data: RunData) -> Self:
        """Return the findings on one run: Table 6 of each scope and temperature is its tables."""
        advice = {temperature: advise(data, temperature) for temperature in data.temperatures}
        return cls(all_tables(data), advice, findings(data))

    @property
    def main_tables(self) -> list[Table]:
        return self.tables[: len(self.advice)]


def introduction(data: RunData) -> str:
    """Explain the tables, and name the drafter that they are of."""
    if not data.last:
        return INTRO
    title, count = checkpoint_title(data, data.last), len(data.checkpoints)
    others = f", the last of {count} here; the others are not shown" if count > 1 else ""
    return f"{INTRO} The drafter is {title}{others}."


def decoding_table(data: RunData, rungs: Sequence[Rung], temperature: float) -> Table:
    def cells_of(method: str) -> list[Cell | None]:
        checkpoint = "" if method == AUTOREGRESSIVE else data.last
        return [data.cell(checkpoint, method, rung.benchmark, temperature) for rung in rungs]

    cells = {method: cells_of(method) for method in data.methods}
    repeats = (repeated(data, rung.benchmark, temperature) for rung in rungs)
    plain = [plain_speed(each[at] for each in cells.values()) for at in range(len(rungs))]
    columns = [
        ("tokens", [rung.length for rung in rungs]),
        ("repeated", [*map(figure, repeats)]),
        (f"tokens/s ({method_label(AUTOREGRESSIVE)})", plain),
    ]
    for method, mine in cells.items():
        label, changes = method_label(method), acceptance(data, rungs, method, temperature)
        columns += [
            (f"τ ({label})", [*map(tau_of, mine)]),
            ("difference", [MISSING, *map(_difference, changes[1:])]),
            (f"tokens/s ({label})", [*map(speed_of, mine)]),
        ]
    samples = {
        f"{method_label(method)}, {rung.length} tokens": cell.samples
        for at, rung in enumerate(rungs)
        for method in (AUTOREGRESSIVE, *data.methods)
        if (cell := cells_of(method)[at])
    }
    here = (cell for key, cell in data.cells.items() if key[2] == rungs[0].benchmark)
    title = f"By prompt length, T = {temperature:g} ({next(here).num_prompts} questions)"
    return Table.of_columns(title, columns, below(samples, data.rows))


def reading_table(rungs: Sequence[Rung]) -> Table | None:
    """Make the table of readings; None without any."""
    target, drafter = read(rungs, "target_loss"), read(rungs, "drafter_loss")
    if not any(target):
        return None
    overlap = read(rungs, "overlap")
    columns = [
        ("tokens", [rung.length for rung in rungs]),
        ("perplexity, target", [*map(_perplexity, target)]),
        ("times the shortest's", [*map(_times, target)]),
        ("perplexity, drafter", [*map(_perplexity, drafter)]),
        ("times the shortest's", [*map(_times, drafter)]),
        ("overlap", [*map(_value, overlap)]),
        ("difference", [MISSING, *(_difference(each, "+.3f") for each in overlap[1:])]),
        ("overlap, begun anew", [*map(_value, read(rungs, "overlap_begun_anew"))]),
        ("same choice", [*map(_value, read(rungs, "same_choice"))]),
    ]
    tokens = sum(each.num_tokens for each in rungs[0].readings)
    title = f"The data's own answers after the same prompts ({tokens:,} tokens)"
    return Table.of_columns(title, columns)


def tables(data: RunData, rungs: Sequence[Rung]) -> list[Table]:
    found = [decoding_table(data, rungs, temperature) for temperature in data.temperatures]
    answers = reading_table(rungs)
    return found if answers is None else [*found, answers]


def verdicts(data: RunData, rungs: Sequence[Rung]) -> list[str]:
    """Return a sentence per temperature and method, and one on the reason that the readings
    show."""
    lines, falls = [], False
    for temperature, method in itertools.product(data.temperatures, data.methods):
        changes = acceptance(data, rungs, method, temperature)
        change = changes[-1]
        if change is None:
            continue
        falls |= change.is_less
        what = "rises" if change.is_more else "does not change beyond noise"
        if change.is_less:
            what = f"falls, {_from(rungs, changes, 'is_less')}"
        if change.interval is None:
            what = "is of too few questions to say"
        lines.append(
            f"τ of {method_label(method)} at T = {temperature:g} {what}: {change.value:.2f} at "
            f"{rungs[-1].length} tokens, {_difference(change)} against {rungs[0].length}."
        )
    if rungs[0].readings and rungs[-1].readings:
        lines.append(_reason(rungs, falls))
    return lines


def _from(rungs: Sequence[Rung], changes: Sequence[Change | None], name: str) -> str:
    """Return the first length from which on all changes have this property; the longest has it."""
    first = len(rungs) - 1
    while first > 1 and getattr(changes[first - 1], name, False):
        first -= 1
    return f"from {rungs[first].length} tokens on"


def _reason(rungs: Sequence[Rung], falls: bool) -> str:
    """Say which model reads worse at the longest prompts; falls: True when some τ falls."""
    losses, overlaps = read(rungs, "target_loss"), read(rungs, "overlap")
    target, overlap, gain = losses[-1], overlaps[-1], begun_anew(rungs[-1])
    said = (
        f"The target reads the data's answers with a perplexity of {_perplexity(target)} there, "
        f"{_times(target)} times that after {rungs[0].length} tokens"
    )
    if overlap is not None:
        said += (
            f"; the drafter's overlap with it is {overlap.value:.3f}, "
            f"{_difference(overlap, '+.3f')} against there"
        )
    if target is not None and target.is_more:
        why = f"The target fails, {_from(rungs, losses, 'is_more')}: what is accepted of its text "
        return f"{said}. {why}there says little of the drafter."
    if overlap is None or not overlap.is_less:
        why = ": the target writes text that is harder to draft." if falls else " there."
        return f"{said}. Neither reads worse{why}"
    said += f"; begun anew at the question it gains {_difference(gain, '+.3f')}"
    if gain is not None and gain.is_more:
        return f"{said}. The drafter fails, {_from(rungs, overlaps, 'is_less')}: by its own state."
    return f"{said}. The drafter follows the target less, but not by what its state has read."


def drawn(data: RunData, rungs: Sequence[Rung]) -> Figure | None:
    """Draw τ against prompt length with its intervals."""
    picture, axes = plots.new_figure()
    lengths = [max(rung.num_tokens, 1) for rung in rungs]
    for temperature in data.temperatures:
        for method in data.methods:
            cells = [data.cell(data.last, method, rung.benchmark, temperature) for rung in rungs]
            taus = zip(lengths, cells, strict=True)
            points = plots.points_of((x, c.gain("acceptance_length")) for x, c in taus if c)
            colour, look = plots.colour_of(data, method), plots.look_of(data, temperature)
            label = f"{method_label(method)}, T = {temperature:g}"
            plots.draw_line(axes, points, colour, label=label, **look)
    if not axes.get_legend_handles_labels()[0]:
        return None
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens:,.0f}"))
    axes.minorticks_off()
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("τ, new tokens per call")
    plots.add_legend(picture, axes, ncols=2, handlelength=3.2)
    return picture


def markdown(data: RunData, found: Sequence[LadderFindings]) -> str:
    """Format all ladders of a run."""
    parts = []
    for each in found:
        parts += [f"- {line}" for line in each.verdicts]
        parts += ["", *(table.to_markdown() for table in each.tables)]
    return "\n".join(["# Acceptance length by prompt length\n", f"{introduction(data)}\n", *parts])


def _value(change: Change | None) -> str:
    return MISSING if change is None else figure(change.value, form=".3f")


def _difference(change: Change | None, form: str = "+.2f") -> str:
    return MISSING if change is None else figure(change.change, change.interval, form)


def _perplexity(loss: Change | None) -> str:
    return MISSING if loss is None else figure(math.exp(loss.value), form=".3g")


def _times(loss: Change | None) -> str:
    """Return a perplexity's ratio to the shortest prompts', given losses."""
    if loss is None:
        return MISSING
    interval = loss.interval and (math.exp(loss.interval[0]), math.exp(loss.interval[1]))
    return figure(math.exp(loss.change), interval)
