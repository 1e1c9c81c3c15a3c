"""Gather the HTML page's content into plain values for its template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from stree import metrics
from stree_pipelines.comparison.repeats import repeats
from stree_pipelines.evaluation.plan import AUTOREGRESSIVE, method_label
from stree_pipelines.evaluation.records import ResultRow
from stree_pipelines.evaluation.sampling import sampling_text
from stree_pipelines.reports import plots, runs_tables
from stree_pipelines.reports.run_data import RunData, checkpoint_title
from stree_pipelines.reports.runs import Runs
from stree_pipelines.reports.simulation import parting_sentence
from stree_pipelines.reports.tables import by_length
from stree_pipelines.reports.tables.findings import Findings

MAX_SAMPLES_PER_BENCHMARK = 3
MAX_DIVERGENCES_SHOWN = 50
INTRO = (
    "Speed in new tokens per second, with its ratio to plain decoding of the same prompts in the "
    "same process; τ in new tokens per target call. Plain decoding has no drafts; a chain has one "
    "draft after another, a tree several beside each other. Brackets: 95 % intervals over prompts, "
    "of the ratio and of τ."
)
Drawn = Iterable[tuple[str, str, Figure | None]]  # title, remark and figure of each


def page_context(data: RunData, findings: Findings, figures: Drawn) -> dict[str, Any]:
    """Return the template's values for the page of a run."""
    name = data.folder.resolve().name
    at_last = f" · drafter at {checkpoint_title(data, data.last)}" if data.last else ""
    return {
        "title": f"{name}: speculative decoding report",
        "heading": f"{name}{at_last}",
        "intro": INTRO,
        "more": "By benchmark",
        "by_length": findings.ladders,
        "lengths_intro": by_length.introduction(data),
        "lossless": _lossless(data),
        "samples": _samples(data),
        "environment": environment(data.rows, [data.command]),
        "parting": parting_sentence(data),
        "notes": data.notes,
        **_common(findings, figures),
    }


def runs_context(runs: Runs, findings: Findings, figures: Drawn) -> dict[str, Any]:
    """Return the template's values for the page of several runs."""
    name = " · ".join(column.title for column in runs.columns)
    return {
        "title": f"{name}: runs compared",
        "heading": name,
        "intro": runs_tables.intro(runs),
        "more": "By benchmark",
        "runs": [
            (column.name, run.folder, run.command.get("seed", ""),
             str(run.command.get("git_sha") or "")[:12])
            for column in runs.columns
            for run in column.runs
        ],
        "environment": environment(runs.rows, [run.command for run in runs.every]),
        "notes": runs.notes,
        **_common(findings, figures),
    }


def _common(findings: Findings, figures: Drawn) -> dict[str, Any]:
    """Return the values that both pages have."""
    return {
        "advice": {f"{temperature:g}": advice for temperature, advice in findings.advice.items()},
        "main_tables": findings.main_tables,
        "tables": findings.tables[len(findings.main_tables) :],
        "figures": [
            (title, remark, plots.to_svg(figure, title, inline=True))
            for title, remark, figure in figures
            if figure is not None
        ],
    }


def _lossless(data: RunData) -> dict[str, Any]:
    """Return the checks, (checkpoint, method, benchmark, result) each, and their divergences."""
    checks = [
        (checkpoint_title(data, checkpoint), method_label(method), benchmark, cell.lossless)
        for (checkpoint, method, benchmark, _), cell in data.cells.items()
        if cell.lossless is not None and benchmark in data.benchmarks
    ]
    divergences = [(*place, each) for *place, result in checks for each in result.divergences]
    gaps = [each.logit_gap for *_, result in checks for each in result.divergences]
    return {
        "checked": sum(result.num_prompts for *_, result in checks),
        "identical": sum(result.num_identical for *_, result in checks),
        "checks": checks,
        "divergences": divergences[:MAX_DIVERGENCES_SHOWN],
        "num_divergences": len(divergences),
        "largest_gap": max(gaps, default=None),
    }


def _samples(data: RunData) -> list[dict[str, Any]]:
    """Pick a few conversations of the last checkpoint, by the method listed last (the tree)."""
    shown = []
    for benchmark in data.benchmarks:
        method = data.methods[-1] if data.methods else AUTOREGRESSIVE
        cell = data.cell(data.last, method, benchmark, data.temperatures[0])
        for sample in (cell.samples if cell else ())[:MAX_SAMPLES_PER_BENCHMARK]:
            shown.append({
                "title": f"{benchmark}: {sample.prompt_id}"
                + (" (repeats itself)" if repeats(sample) else ""),
                "method": method_label(method),
                "tau": metrics.acceptance_length([sample]),
                "turns": sample.turns,
            })
    return shown


def environment(
    rows: Sequence[ResultRow], trainings: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str]]:
    """List facts about the rows' machine and code, a line each; several values when rows differ."""
    facts: dict[str, list[str]] = {
        "Target": [row.target for row in rows],
        "Device": [f"{r.environment.num_processes} × {r.environment.device}" for r in rows],
        "Number formats": [
            ", ".join(f"{k} {v}" for k, v in row.environment.dtypes.items()) for row in rows
        ],
        "Prompts at once": [str(row.batch_size) for row in rows],
        "New tokens a turn": [
            f"{r.max_new_tokens}" + (", EOS ignored" if r.ignore_eos else "") for r in rows
        ],
        "Sampling beside the temperature": [sampling_text(row) or "off" for row in rows],
        "Trees": [str(r.tree.to_token_tree()) for r in rows if r.tree],
        "Seed": [str(row.seed) for row in rows],
        "Commit": [row.environment.git_sha or "not in a clone" for row in rows],
        "Versions": [
            ", ".join(f"{k} {v}" for k, v in row.environment.versions.items()) for row in rows
        ],
        "Evaluated by": [row.environment.command_line for row in rows],
    }
    commands = [str(each["command_line"]) for each in trainings if "command_line" in each]
    if commands:
        facts["Trained by"] = commands
    return [(name, "\n".join(dict.fromkeys(values))) for name, values in facts.items()]
