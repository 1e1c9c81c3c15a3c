"""Make tables of the papers' figures from rows of `compare.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stree_lab.papers.tables import (
    BENCHMARKS,
    Cells,
    Rows,
    arm_rows,
    speed_and_tau,
    tree_name,
)
from stree_pipelines.evaluation.records import ResultRow
from stree_pipelines.reports.tables.tables import figure


def snakes_figure_4_text(folder: Path, paper: Sequence[Cells]) -> tuple[list[Cells], Rows]:
    """Build the table: tokens/s by benchmark and batch size, a column for each number of drafts."""
    found: dict[tuple[str, int], dict[str | None, ResultRow]] = {}
    for row in arm_rows(folder):
        name = tree_name(row)
        if row.temperature == 0 and (name is None or name.startswith("png-")):
            found.setdefault((row.benchmark, row.batch_size), {})[name] = row
    trees = sorted({name for rows in found.values() for name in rows if name is not None})
    lines: list[Cells] = [("benchmark", "batch size", "plain", *trees)]
    for benchmark, size in sorted(found):
        rows = found[benchmark, size]
        speeds = (speed_and_tau(rows.get(name))[0] for name in (None, *trees))
        lines.append((BENCHMARKS.get(benchmark, benchmark), str(size), *speeds))
    return lines, [row for rows in found.values() for row in rows.values()]


def drafters_figure_2(folder: Path, paper: Sequence[Cells]) -> tuple[list[Cells], Rows]:
    """Build the table: an arm a line, with what a draft of its drafter takes."""
    rows = [row for row in arm_rows(folder) if row.tree is not None]
    lines: list[Cells] = [("Drafter", "T", "τ", "drafting, ms", "tokens/s")]
    for row in rows:
        speed, tau = speed_and_tau(row)
        drafting = figure(row.time_ms.get("draft"))
        lines.append((row.method, f"{row.temperature:g}", tau, drafting, speed))
    return lines, rows
