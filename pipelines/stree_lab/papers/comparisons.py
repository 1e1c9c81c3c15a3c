"""Make more of the papers' tables and figures from rows of `compare.py`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from stree_lab.bench_report import rows_of_file
from stree_lab.papers.tables import (
    BENCHMARKS,
    LABELS,
    MISSING,
    OURS,
    Cells,
    Rows,
    arm_rows,
    is_model,
    of_paper,
    speed_and_tau,
    tree_name,
)
from stree_pipelines.evaluation.plan import AUTOREGRESSIVE, CHAIN, TREE
from stree_pipelines.evaluation.records import ResultRow
from stree_pipelines.evaluation.result_store import RESULTS_NAME
from stree_pipelines.reports.run_data import load_run
from stree_pipelines.reports.tables import by_length
from stree_pipelines.reports.tables.tables import figure

MEMORY = "memory.jsonl"  # rows of prompt_memory.py
SHARES = ("50", "25", "0")  # of attention layers in percent, as targets' folders name them
STREE_5_WAYS = {  # tree and verifier
    (None, None): AUTOREGRESSIVE, ("chain-4", "multi_step"): CHAIN, ("paper", "multi_step"): TREE,
}


def stree_5(folder: Path, paper: Sequence[Cells]) -> tuple[list[Cells], Rows]:
    """Build the table of targets that differ in their share of attention (`runs/attention-50`)."""
    rows: dict[tuple[str, str], ResultRow] = {}
    for row in arm_rows(folder):
        found = re.search(r"attention-(\d+)", row.target)
        method = STREE_5_WAYS.get((tree_name(row), row.verifier))
        if found is None or found[1] not in SHARES or method is None:
            continue
        is_there = (row.benchmark, row.temperature, row.batch_size) == ("mt_bench", 1.0, 1)
        if is_there and (method == AUTOREGRESSIVE or is_model(row)):
            rows[found[1], LABELS[method]] = row
    lines: list[Cells] = [paper[0]]
    for line in paper[1:]:
        cells: list[str] = []
        for share in SHARES:
            of_share = rows.get((share, line[0]))
            per_tau = MISSING if of_share is None or of_share.tree is None else figure(
                of_share.speedup_per_tau
            )
            cells += [*speed_and_tau(of_share), per_tau]
        lines += [*of_paper([line]), (f"{line[0]}, {OURS}", *cells)]
    return lines, rows.values() if len({share for share, _ in rows}) > 1 else []


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


def drafters_3(folder: Path, paper: Sequence[Cells]) -> tuple[list[Cells], Rows]:
    """Build the table; our columns are prompt lengths to the nearest 1,024 tokens, also further
    ones. Peaks of memory are of `prompt_memory.py`'s rows of the same benchmarks, if any."""
    data = load_run(folder) if (folder / RESULTS_NAME).is_file() else None
    ladders = by_length.ladders(data) if data is not None else []
    if data is None or not ladders:
        return [], []
    found = {f"{round(rung.num_tokens / 1024)}k": rung.benchmark for rung in ladders[0]}
    head, *lines_of_paper = paper
    lengths = [*head[1:], *(length for length in found if length not in (*head, "0k"))]
    missing = [MISSING] * (len(lengths) - len(head) + 1)
    lines: list[Cells] = [("Method", *lengths)]
    lines += [(*cells, *missing) for cells in of_paper(lines_of_paper)]
    rows = [row for row in data.rows if row.temperature == 0 and row.benchmark in found.values()]
    last: dict[str, int] = {}  # step of the drafter that was trained longest, by method
    for each in rows:
        last[each.method] = max(last.get(each.method, 0), each.step or 0)
    used = {
        (each.method, each.benchmark): each for each in rows
        if (each.step or 0) == last[each.method]
    }
    methods = list(last)
    for method in methods:
        cells = []
        for length in lengths:
            row = used.get((method, found[length])) if length in found else None
            drafted = row is not None and method != AUTOREGRESSIVE
            tau = f" ({figure(row.acceptance_length)})" if row and drafted else ""
            cells.append(figure(row.tokens_per_second if row else None) + tau)
        lines.append((f"{LABELS.get(method, method)}, {OURS}", *cells))
    measured = rows_of_file(folder / MEMORY) if (folder / MEMORY).is_file() else ()
    peaks = {(row["method"], row["benchmark"]): row for row in measured if "peak_bytes" in row}
    for method in methods if peaks else ():
        at_lengths = [peaks.get((method, found.get(length))) for length in lengths]
        cells = [figure(each["peak_bytes"] / 1e9 if each else None) for each in at_lengths]
        lines.append((f"Peak memory, GB, {LABELS.get(method, method)}, {OURS}", *cells))
    return lines, [*used.values(), *peaks.values()]
