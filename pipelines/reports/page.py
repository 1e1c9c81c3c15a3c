"""Gather the HTML page's content into plain values for its template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stree_pipelines.comparison.repeats import repeats
from stree_pipelines.evaluation.plan import AUTOREGRESSIVE
from stree_pipelines.evaluation.records import ResultRow
from stree_pipelines.evaluation.sampling import told_sampling
from stree_pipelines.reports import runs_tables
from stree_pipelines.reports.run_data import RunData, checkpoint_title, method_label
from stree_pipelines.reports.runs_tables import RunsFindings
from stree_pipelines.reports.simulation import parting_sentence
from stree_pipelines.reports.tables import by_length_tables
from stree_pipelines.reports.tables.findings import Findings
from stree_pipelines.reports.tables.tables import Table

MAX_SAMPLES_PER_BENCHMARK = 3
MAX_DIVERGENCES_SHOWN = 50


def page_context(findings: Findings) -> dict[str, Any]:
    """Return the template's values, without the figures."""
    data = findings.data
    return {
        "name": data.folder.resolve().name,
        "last": checkpoint_title(data, data.last) if data.last else "",
        "advice": [
            {"temperature": f"{temperature:g}", **advice._asdict()}
            for temperature, advice in findings.advice.items()
        ],
        "tables": _folded(findings.tables, findings.main_tables),
        "by_length": findings.ladders,
        "lengths_intro": by_length_tables.introduction(data),
        "lossless": _lossless(data),
        "samples": _samples(data),
        "environment": environment(data.rows, [data.command]),
        "parting": parting_sentence(data),
        "notes": data.notes,
    }


def _folded(tables: Sequence[Table], main: Sequence[Table]) -> list[dict[str, Any]]:
    """Mark the main tables, which come first; the page folds up the others."""
    return [{"table": table, "main": number < len(main)} for number, table in enumerate(tables)]


def _lossless(data: RunData) -> dict[str, Any]:
    checks: list[dict[str, Any]] = []
    divergences: list[dict[str, Any]] = []
    for (checkpoint, method, benchmark, _), cell in data.cells.items():
        if cell.lossless is None or benchmark not in data.benchmarks:
            continue
        place = {
            "checkpoint": checkpoint_title(data, checkpoint),
            "method": method_label(method),
            "benchmark": benchmark,
        }
        checks.append({**place, "result": cell.lossless})
        divergences += [{**place, "at": each} for each in cell.lossless.divergences]
    checked = sum(check["result"].num_prompts for check in checks)
    identical = sum(check["result"].num_identical for check in checks)
    return {
        "checked": checked,
        "identical": identical,
        "checks": checks,
        "divergences": divergences[:MAX_DIVERGENCES_SHOWN],
        "num_divergences": len(divergences),
        "largest_gap": max((each["at"].logit_gap for each in divergences), default=None),
    }


def _samples(data: RunData) -> list[dict[str, Any]]:
    """Pick a few conversations of the last checkpoint, by the method listed last (the tree)."""
    shown = []
    for benchmark in data.benchmarks:
        method = data.methods[-1] if data.methods else AUTOREGRESSIVE
        cell = data.cell(data.last, method, benchmark, data.temperatures[0])
        for sample in (cell.samples if cell else ())[:MAX_SAMPLES_PER_BENCHMARK]:
            tau = sample.num_new_tokens / sample.num_calls if sample.num_calls else None
            shown.append({
                "title": f"{benchmark}: {sample.prompt_id}"
                + (" (repeats itself)" if repeats(sample) else ""),
                "method": method_label(method),
                "tau": tau,
                "turns": sample.turns,
            })
    return shown


def runs_context(findings: RunsFindings) -> dict[str, Any]:
    """Return the values of the template for several runs, without the figures."""
    runs = findings.runs
    every = [(column, run) for column in runs.columns for run in column.runs]
    return {
        "name": " · ".join(column.title for column in runs.columns),
        "verdicts": findings.verdicts,
        "intro": runs_tables.intro(runs),
        "tables": _folded(findings.tables, findings.main_tables),
        "runs": [
            {
                "name": column.name, "folder": run.folder, "seed": run.command.get("seed", ""),
                "commit": str(run.command.get("git_sha") or "")[:12],
            }
            for column, run in every
        ],
        "environment": environment(runs.rows, [run.command for _, run in every]),
        "notes": runs.notes,
    }


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
        "Sampling beside the temperature": [told_sampling(row) or "off" for row in rows],
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
