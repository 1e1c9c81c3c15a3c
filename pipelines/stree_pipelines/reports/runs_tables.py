"""Make tables, data and verdicts of several runs.

The first column is the reference of the others: a difference has an interval of its own, over the
same prompts on both sides.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from stree import metrics
from stree_pipelines.comparison.answers import HOW
from stree_pipelines.evaluation.plan import AUTOREGRESSIVE, method_label
from stree_pipelines.reports.run_data import Cell, checkpoint_title
from stree_pipelines.reports.runs import Runs
from stree_pipelines.reports.tables.by_length import Findings
from stree_pipelines.reports.tables.table_rows import QUANTILES, gains_of
from stree_pipelines.reports.tables.table_rows import figures_of as cell_figures
from stree_pipelines.reports.tables.tables import (
    MISSING,
    Advice,
    Table,
    acceptance_gain,
    below,
    figure,
    figures_of,
    plain_speed,
    speed_ratio,
)

INTERVALS = {
    "quantiles": QUANTILES,
    "resampled": "prompts, the same ones of both sides of a difference, and the seeds of each side "
    "where it has several, apart from the prompts",
    "draws": f"numpy.random.default_rng(0).integers(Q, size=({metrics.NUM_RESAMPLES}, Q)) of Q "
    "prompts in the order of the first run's samples; numpy.random.default_rng(side).integers(S, "
    f"size=({metrics.NUM_RESAMPLES}, S)) of S seeds in the order of `runs`, side 1 or 2 (the one "
    "that is compared with)",
}


def intro(runs: Runs) -> str:
    """Explain the numbers."""
    first = runs.columns[0].name
    compared = (
        f" Differences are from {first}, prompt by prompt: where the interval holds 0, or 1 of a "
        "ratio, the two are not told apart."
    )
    return (
        "Speed: new tokens per second of decoding, with its ratio to plain decoding of "
        "the same prompts in the same process. τ: new tokens per target call, bonus included."
        f"{compared if len(runs.columns) > 1 else ''} Brackets: {HOW}"
    )


def last_table(runs: Runs, benchmark: str, temperature: float) -> Table:
    """Make a column per run, at its last checkpoint, with the gain over the first run below."""
    columns, first = runs.columns, runs.columns[0].name
    cells = {m: [c.last(m, benchmark, temperature) for c in columns] for m in runs.methods}
    last = [checkpoint_title(column.data, column.data.last) for column in columns]
    lines = [("", *(column.title for column in columns)), ("Checkpoint", *last)]
    plain = [plain_speed(each[at] for each in cells.values()) for at in range(len(columns))]
    lines.append((f"Speed ({method_label(AUTOREGRESSIVE)})", *plain))
    for method, mine in cells.items():
        label = method_label(method)
        lines += figures_of(method, mine)
        if any(len(column.runs) > 1 for column in columns):
            lines.append((f"τ of each seed ({label})", *map(_of_seeds, mine)))
        if len(columns) > 1:
            speeds = (figure(*speed_ratio(each, mine[0]), unit="×") for each in mine[1:])
            gains = (figure(*acceptance_gain(each, mine[0]), "+.2f") for each in mine[1:])
            lines.append((f"Speed-up over {first}'s ({label})", "", *speeds))
            lines.append((f"τ over {first}'s ({label})", "", *gains))
    counts = sorted({cell.num_prompts for each in cells.values() for cell in each if cell})
    prompts = f" ({'/'.join(map(str, counts))} prompts)" if counts else ""
    title = f"{benchmark}, T = {temperature:g}{prompts}: last checkpoints"
    samples = {
        f"{column.title}, {method_label(method)}": cell.samples if cell else ()
        for number, column in enumerate(columns)
        for method in runs.methods
        for cell in [cells[method][number]]
    }
    return Table(title, tuple(lines), note=below(samples, runs.rows))


def findings(runs: Runs) -> Findings:
    """Work out a report's findings: tables of the last checkpoints, and verdicts."""
    tables = [last_table(runs, scope, t) for scope in runs.scopes for t in runs.temperatures]
    return Findings(tables, {t: verdict(runs, t) for t in runs.temperatures})


def markdown(runs: Runs, found: Findings) -> str:
    parts = ["# Runs compared\n", f"{intro(runs)}\n"]
    parts += [f"- T = {t:g}: {each.reason}" for t, each in found.advice.items()]
    parts += ["", *(f"{note}\n" for note in runs.notes)]
    return "\n".join(parts + [table.to_markdown() for table in found.tables])


def verdict(runs: Runs, temperature: float) -> Advice:
    """Rank the runs by the method listed last (a tree, if any), at each run's last checkpoint."""
    if not runs.methods:
        return Advice("", "No run was decoded with a drafter.")
    method = runs.methods[-1]
    found = {c.name: c.last(method, runs.scopes[0], temperature) for c in runs.columns}
    cells = {name: cell for name, cell in found.items() if cell and cell.samples}
    if len(cells) < 2:
        return Advice("", "There are no two runs with their samples to compare.")
    tau, ahead = _ranked(cells, "acceptance_length")
    reason = f"τ ({method_label(method)}): {tau}"
    timed = {name: cell for name, cell in cells.items() if cell["speedup"]}
    if len(timed) > 1:
        reason += f" Speed-up: {_ranked(timed, 'speedup')[0]}"
    return Advice(f"{ahead} has the longest τ" if ahead else "Not told apart by τ", reason)


def _ranked(cells: Mapping[str, Cell], name: str) -> tuple[str, str]:
    """Describe the best run's gain over each other; returns its name when every gain is beyond
    noise."""
    compare, form, unit, than, none = (
        (acceptance_gain, "+.2f", "", "over", 0.0) if name == "acceptance_length"
        else (speed_ratio, ".2f", "×", "that of", 1.0)
    )
    best = max(cells, key=lambda run: cells[run][name])
    gains = {run: compare(cells[best], cell) for run, cell in cells.items() if run != best}
    differences = ", ".join(
        f"{figure(*gain, form, unit)} {than} {run}" for run, gain in gains.items()
    )
    text = f"{best} has {cells[best][name]:.2f}{unit}, {differences}."
    apart = all(gain.interval and gain.interval[0] > none for gain in gains.values())
    return text, best if apart else ""


def table_rows(runs: Runs) -> Iterator[dict[str, Any]]:
    """Yield a row per run, checkpoint, method, temperature and benchmark.

    `over_first` compares with the first run's checkpoint of the same step; a run's last one with
    its last.
    """
    first = runs.columns[0]
    for place in itertools.product(runs.scopes, runs.temperatures, runs.columns):
        benchmark, temperature, column = place
        for label, method in itertools.product(column.data.checkpoints, runs.methods):
            cell = column.data.cell(label, method, benchmark, temperature)
            if cell is None:
                continue
            row = {
                "benchmark": benchmark, "temperature": temperature, "run": column.name,
                "runs": [str(run.folder) for run in column.runs], "num_seeds": len(column.runs),
                "checkpoint": label, "step": column.data.steps[label], "method": method,
                **cell_figures(cell),
            }
            beside = first.data.last if label == column.data.last else label
            other = first.data.cell(beside, method, benchmark, temperature)
            if column is not first and other is not None:
                row["over_first"] = {"checkpoint": beside, **gains_of(cell, other)}
            yield row


def _of_seeds(cell: Cell | None) -> str:
    taus = [metrics.acceptance_length(samples) or 0.0 for samples in cell.seeds] if cell else []
    return " ".join(f"{tau:.2f}" for tau in sorted(taus)) or MISSING
