"""Make tables, data and verdicts of several runs.

The first column is the reference of the others: a difference has an interval of its own, over the
same prompts on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from stree import metrics
from stree_pipelines.comparison import answers as figures
from stree_pipelines.comparison.answers import Answers, Gain
from stree_pipelines.evaluation.plan import AUTOREGRESSIVE
from stree_pipelines.reports.run_data import checkpoint_title, method_label
from stree_pipelines.reports.runs import Column, Runs
from stree_pipelines.reports.settings import common_setting, sampling_note
from stree_pipelines.reports.tables.table_rows import QUANTILES, as_json, of_gain
from stree_pipelines.reports.tables.tables import (
    MISSING,
    Table,
    below,
    bracket,
    figure,
    in_lines,
)

NAMED = {
    "acceptance_length": figures.acceptance_length,
    "tokens_per_second": figures.tokens_per_second,
    "speedup": figures.speedup,
}
INTERVALS = {
    "quantiles": QUANTILES,
    "resampled": "prompts, the same ones of both sides of a difference, and the seeds of each side "
    "where it has several, apart from the prompts",
    "draws": f"numpy.random.default_rng(0).integers(Q, size=({metrics.NUM_RESAMPLES}, Q)) of Q "
    "prompts in the order of the first run's samples; numpy.random.default_rng(side).integers(S, "
    f"size=({metrics.NUM_RESAMPLES}, S)) of S seeds in the order of `runs`, side 1 or 2 (the one "
    "that is compared with)",
}


@dataclass(frozen=True)
class RunsFindings:
    """Findings of several runs, as `Findings` of one."""

    runs: Runs
    tables: list[Table]
    verdicts: list[Verdict]

    @classmethod
    def of(cls, runs: Runs) -> Self:
        verdicts = [verdict(runs, temperature) for temperature in runs.temperatures]
        return cls(runs, tables(runs), verdicts)

    @property
    def main_tables(self) -> list[Table]:
        """Tables of the last checkpoints over all benchmarks."""
        return self.tables[: len(self.runs.temperatures)]


def intro(runs: Runs) -> str:
    """Explain the numbers."""
    first = runs.columns[0].name
    compared = (
        f" Differences are from {first}, prompt by prompt: where the interval holds 0, or 1 of a "
        "ratio, the two are not told apart."
    )
    return (
        "Speed: new tokens per second of decoding, with its ratio to autoregressive decoding of "
        "the same prompts in the same process. τ: new tokens per target call, bonus included."
        f"{compared if len(runs.columns) > 1 else ''} Brackets: {figures.HOW}"
    )


def last_table(runs: Runs, benchmark: str, temperature: float) -> Table:
    """Make a column per run, at its last checkpoint, with the gain over the first run below."""
    place = benchmark, temperature
    columns = runs.columns
    at = [checkpoint_title(column.runs[0], column.last) for column in columns]
    lines = [("", *(column.title for column in columns)), ("Checkpoint", *at)]
    plain = [_plain(runs, column, *place) for column in columns]
    lines.append((f"Speed ({method_label(AUTOREGRESSIVE)})", *map(_value, plain)))
    for method in runs.methods:
        label = method_label(method)
        answers = [_at_last(runs, column, method, *place) for column in columns]
        speeds = [figure(*_speed_ratio(each, answers[0]), unit="×") for each in answers[1:]]
        gains = [figure(*_tau_gain(each, answers[0]), "+.2f") for each in answers[1:]]
        lines.append((f"Speed ({label})", *map(_speed, answers)))
        lines.append((f"Median speed-up ({label})", *map(_median, answers)))
        if speeds:
            lines.append((f"Speed-up over {columns[0].name}'s ({label})", "", *speeds))
        lines.append((f"τ ({label})", *(_of(each, figures.acceptance_length) for each in answers)))
        if any(len(column.runs) > 1 for column in columns):
            lines.append((f"τ of each seed ({label})", *map(_of_seeds, answers)))
        if gains:
            lines.append((f"τ over {columns[0].name}'s ({label})", "", *gains))
    checked = [_identical(runs, column, *place) for column in columns]
    if any(text != MISSING for text in checked):
        lines.append(("Answers as plain decoding's", *checked))
    title = f"{_title(runs, *place)}: last checkpoints"
    samples = {
        f"{column.title}, {method_label(method)}": [
            sample
            for cell in runs.cells(column, column.last, method, *place)
            for sample in cell.samples
        ]
        for column in columns
        for method in runs.methods
    }
    return Table(title, tuple(lines), note=below(samples, runs.rows))


def step_table(runs: Runs, method: str, temperature: float) -> Table | None:
    """Make the table of every checkpoint's τ over all benchmarks, and of gains over the first
    column.

    Returns None when no run has several checkpoints.
    """
    labels = _steps(runs)
    if len(labels) < 2:
        return None
    first, *others = runs.columns
    heads = [column.title for column in runs.columns]
    heads += [f"{column.name} − {first.name}" for column in others]
    lines: list[tuple[str, ...]] = [("Step", *heads)]
    for step, label in labels:
        found = [
            runs.answers(column, label, method, runs.scopes[0], temperature)
            if label in column.checkpoints else None
            for column in runs.columns
        ]
        gains = [figure(*_tau_gain(each, found[0]), "+.2f") for each in found[1:]]
        taus = (_of(each, figures.acceptance_length) for each in found)
        lines.append((str(step), *taus, *gains))
    where = _title(runs, runs.scopes[0], temperature)
    title = f"{where}: τ ({method_label(method)}) against distillation step"
    return Table(title, tuple(lines), note=sampling_note(runs.rows))


def tables(runs: Runs) -> list[Table]:
    """Make all tables, those over all benchmarks first."""
    places = [(scope, t) for scope in runs.scopes for t in runs.temperatures]
    steps = [step_table(runs, m, t) for t in runs.temperatures for m in runs.methods]
    main = [last_table(runs, *place) for place in places]
    count = len(runs.temperatures)
    return [*main[:count], *(table for table in steps if table), *main[count:]]


def markdown(findings: RunsFindings) -> str:
    runs = findings.runs
    parts = ["# Runs compared\n", f"{intro(runs)}\n"]
    parts += [f"- {each.title}: {each.reason}" for each in findings.verdicts]
    parts += ["", *(f"{note}\n" for note in runs.notes)]
    return "\n".join(parts + [table.to_markdown() for table in findings.tables])


@dataclass(frozen=True)
class Verdict:
    """The best run at a temperature, and the reason; headline is empty without a comparison."""

    title: str
    headline: str
    reason: str


def verdict(runs: Runs, temperature: float) -> Verdict:
    """Rank the runs by the method listed last (a tree, if any), at each run's last checkpoint."""
    title = f"T = {temperature:g}"
    if not runs.methods:
        return Verdict(title, "", "No run was decoded with a drafter.")
    method, scope = runs.methods[-1], runs.scopes[0]
    found = {c.name: _at_last(runs, c, method, scope, temperature) for c in runs.columns}
    told = {name: answers for name, answers in found.items() if answers}
    if len(told) < 2:
        return Verdict(title, "", "There are no two runs with their samples to compare.")
    label = method_label(method)
    tau, ahead = _ranked(told, figures.acceptance_length, "+.2f", "", np.subtract, 0.0)
    reason = f"τ ({label}): {tau}"
    timed = {name: answers for name, answers in told.items() if answers.value(figures.speedup)}
    if len(timed) > 1:
        speed, _ = _ranked(timed, figures.speedup, ".2f", "×", np.divide, 1.0)
        reason += f" Speed-up: {speed}"
    return Verdict(title, f"{ahead} has the longest τ" if ahead else "Not told apart by τ", reason)


def _ranked(
    answers: dict[str, Answers], of: figures.Figure, form: str, unit: str,
    compare: Callable[..., Any], none: float,
) -> tuple[str, str]:
    """Describe the best run's gain over each other; returns its name when every gain is beyond
    noise."""
    values = {name: each.value(of) or 0.0 for name, each in answers.items()}
    best = max(values, key=lambda name: values[name])
    gains = {
        name: answers[best].over(other, of, compare)
        for name, other in answers.items()
        if name != best
    }
    than = "over" if compare is np.subtract else "that of"
    told = ", ".join(f"{figure(*gain, form, unit)} {than} {name}" for name, gain in gains.items())
    text = f"{best} has {values[best]:.2f}{unit}, {told}."
    apart = all(gain.interval and gain.interval[0] > none for gain in gains.values())
    return text, best if apart else ""


def rows_json(runs: Runs, rows: Iterable[Mapping[str, Any]]) -> str:
    """Format `table_rows` as JSON, like `table6_json`."""
    setting = common_setting(runs.rows)
    return as_json({"setting": setting, "intervals": INTERVALS}, rows)


def table_rows(runs: Runs) -> Iterator[dict[str, Any]]:
    """Yield a row per run, checkpoint, method, temperature and benchmark.

    `over_first` compares with the first run's checkpoint of the same step; a run's last one with
    its last.
    """
    for benchmark in runs.scopes:
        for temperature in runs.temperatures:
            for column in runs.columns:
                for checkpoint in column.checkpoints:
                    for method in runs.methods:
                        place = checkpoint, method, benchmark, temperature
                        yield from _row(runs, column, *place)


def _row(
    runs: Runs, column: Column, checkpoint: str, method: str, benchmark: str, temperature: float
) -> Iterator[dict[str, Any]]:
    answers = runs.answers(column, checkpoint, method, benchmark, temperature)
    if answers is None:
        return
    row: dict[str, Any] = {
        "benchmark": benchmark, "temperature": temperature, "run": column.name,
        "runs": [str(run.folder) for run in column.runs], "num_seeds": len(column.runs),
        "checkpoint": checkpoint, "step": column.step(checkpoint), "method": method,
        "num_prompts": len(answers.prompts),
    }
    row |= {name: of_gain(answers.figure(of)) for name, of in NAMED.items()}
    plain = answers.value(figures.plain_tokens_per_second)
    row["autoregressive_tokens_per_second"] = plain
    first = runs.columns[0]
    if column is not first:
        label = first.last if checkpoint == column.last else checkpoint
        other = runs.answers(first, label, method, benchmark, temperature)
        if other is not None:
            row["over_first"] = {
                "checkpoint": label,
                "acceptance_length_gain": of_gain(_tau_gain(answers, other)),
                "speed_ratio": of_gain(_speed_ratio(answers, other)),
            }
    yield row


def summary(findings: RunsFindings) -> str:
    """Format the text that the command prints."""
    lines = [table.to_text() for table in findings.main_tables]
    told = [*(f"{each.title}: {each.reason}" for each in findings.verdicts), *findings.runs.notes]
    return "\n".join([*lines, *(f"{in_lines(each)}\n" for each in told)])


def _at_last(
    runs: Runs, column: Column, method: str, benchmark: str, temperature: float
) -> Answers | None:
    return runs.answers(column, column.last, method, benchmark, temperature)


def _steps(runs: Runs) -> list[tuple[int, str]]:
    """Return (step, label) of the checkpoints of all columns."""
    found = {
        (step, label)
        for column in runs.columns
        for label in column.checkpoints
        if (step := column.step(label)) is not None
    }
    return sorted(found)


def _title(runs: Runs, benchmark: str, temperature: float) -> str:
    answers = (_at_last(runs, c, m, benchmark, temperature) for c in runs.columns
               for m in runs.methods)
    counts = sorted({len(each.prompts) for each in answers if each})
    prompts = f" ({'/'.join(map(str, counts))} prompts)" if counts else ""
    return f"{benchmark}, T = {temperature:g}{prompts}"


def _tau_gain(mine: Answers | None, first: Answers | None) -> Gain:
    if mine is None or first is None:
        return Gain(None, None)
    return mine.over(first, figures.acceptance_length, np.subtract)


def _speed_ratio(mine: Answers | None, first: Answers | None) -> Gain:
    """Return the ratio of speed-ups, each over plain decoding in its own process."""
    if mine is None or first is None:
        return Gain(None, None)
    return mine.over(first, figures.speedup, np.divide)


def _plain(runs: Runs, column: Column, benchmark: str, temperature: float) -> Gain:
    for method in runs.methods:
        answers = _at_last(runs, column, method, benchmark, temperature)
        if answers is not None:
            return answers.figure(figures.plain_tokens_per_second)
    return Gain(None, None)


def _value(gain: Gain) -> str:
    return figure(gain.value)


def _of(answers: Answers | None, of: figures.Figure) -> str:
    return MISSING if answers is None else figure(*answers.figure(of))


def _speed(answers: Answers | None) -> str:
    if answers is None:
        return MISSING
    speed, ratio = answers.figure(figures.tokens_per_second), answers.figure(figures.speedup)
    if ratio.value is None:
        return figure(*speed)
    return f"{figure(speed.value)} ({ratio.value:.2f}×){bracket(ratio.interval)}"


def _median(answers: Answers | None) -> str:
    return MISSING if answers is None else figure(figures.median_speedup(answers), unit="×")


def _of_seeds(answers: Answers | None) -> str:
    if answers is None:
        return MISSING
    taus = answers.counts["tokens"].sum(1) / answers.counts["calls"].sum(1)
    return " ".join(f"{tau:.2f}" for tau in sorted(taus))


def _identical(runs: Runs, column: Column, benchmark: str, temperature: float) -> str:
    """Count the answers of all methods that equal plain decoding's token for token, of those
    checked."""
    checks = [
        cell.lossless
        for method in runs.methods
        for cell in runs.cells(column, column.last, method, benchmark, temperature)
        if cell.lossless is not None
    ]
    if not checks:
        return MISSING
    return f"{sum(c.num_identical for c in checks)} of {sum(c.num_prompts for c in checks)}"
