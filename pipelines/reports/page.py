"""What the HTML page says, gathered into plain values for its template."""

from __future__ import annotations

from typing import Any

from stree_pipelines.evaluation.plan import AUTOREGRESSIVE
from stree_pipelines.reports.run_data import RunData, checkpoint_title, method_label
from stree_pipelines.reports.simulation import parting_sentence
from stree_pipelines.reports.tables import advise, table6

MAX_SAMPLES_PER_BENCHMARK = 3
MAX_DIVERGENCES_SHOWN = 50


def page_context(data: RunData) -> dict[str, Any]:
    """Values of the template but for the figures."""
    tables = [
        {"table": table6(data, scope, temperature), "main": scope == data.scopes[0]}
        for scope in data.scopes
        for temperature in data.temperatures
    ]
    return {
        "name": data.folder.resolve().name,
        "last": checkpoint_title(data, data.last) if data.last else "",
        "advice": [
            {"temperature": f"{t:g}", **advise(data, t)._asdict()} for t in data.temperatures
        ],
        "tables": tables,
        "lossless": _lossless(data),
        "samples": _samples(data),
        "environment": _environment(data),
        "parting": parting_sentence(data),
        "notes": data.notes,
    }


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
    """A few conversations of the last checkpoint, by the method listed last (the tree)."""
    shown = []
    for benchmark in data.benchmarks:
        method = data.methods[-1] if data.methods else AUTOREGRESSIVE
        cell = data.cell(data.last, method, benchmark, data.temperatures[0])
        for sample in (cell.samples if cell else ())[:MAX_SAMPLES_PER_BENCHMARK]:
            tau = sample.num_new_tokens / sample.num_calls if sample.num_calls else None
            shown.append({
                "title": f"{benchmark}: {sample.prompt_id}",
                "method": method_label(method),
                "tau": tau,
                "turns": sample.turns,
            })  # fmt: skip
    return shown


def _environment(data: RunData) -> list[tuple[str, str]]:
    """What made the rows, one line a fact; several values where rows differ."""
    rows = data.rows
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
        "Trees": [str(r.tree.to_token_tree()) for r in rows if r.tree],
        "Seed": [str(row.seed) for row in rows],
        "Commit": [row.environment.git_sha or "not in a clone" for row in rows],
        "Versions": [
            ", ".join(f"{k} {v}" for k, v in row.environment.versions.items()) for row in rows
        ],
        "Evaluated by": [row.environment.command_line for row in rows],
    }
    if "command_line" in data.command:
        facts["Trained by"] = [str(data.command["command_line"])]
    return [(name, "\n".join(dict.fromkeys(values))) for name, values in facts.items()]
