"""Make the HTML pages of a run, of several runs and of a comparison, by one template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from stree import metrics
from stree_pipelines.comparison.answers import repeats
from stree_pipelines.evaluation.plan import AUTOREGRESSIVE, method_label
from stree_pipelines.evaluation.records import ResultRow
from stree_pipelines.evaluation.sampling import sampling_text
from stree_pipelines.reports import plots, runs_tables
from stree_pipelines.reports.rendering import render_page
from stree_pipelines.reports.run_data import RunData, checkpoint_title
from stree_pipelines.reports.runs import Runs
from stree_pipelines.reports.simulation import parting_sentence
from stree_pipelines.reports.tables import by_length
from stree_pipelines.reports.tables.by_length import Findings
from stree_pipelines.reports.tables.lossless import counted_answers, lossless_tables
from stree_pipelines.reports.tables.tables import Table

MAX_SAMPLES_PER_BENCHMARK = 3
INTRO = (
    "Speed in new tokens per second, with its ratio to plain decoding of the same prompts in the "
    "same process; τ in new tokens per target call. Plain decoding has no drafts; a chain has one "
    "draft after another, a tree several beside each other. Brackets: 95 % intervals over prompts, "
    "of the ratio and of τ."
)
Drawn = Iterable[tuple[str, str, Figure | None]]  # title, remark and figure of each


class Section(NamedTuple):
    """Part of a page: sentences and tables below a heading, and tables folded under `more`."""

    title: str
    lines: Sequence[str] = ()
    tables: Sequence[Table] = ()
    more: str = ""
    folded: Sequence[Table] = ()


def page(
    title: str, heading: str, cards: Iterable[tuple[str, str, str]], sections: Iterable[Section],
    figures: Drawn, environment: Sequence[tuple[str, str]], notes: Iterable[str] = (),
    samples: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Return a self-contained HTML page.

    cards: a place, a headline and its reason each. notes: empty ones are left out.
    """
    drawn = [
        (name, remark, plots.to_svg(figure, name, inline=True))
        for name, remark, figure in figures
        if figure is not None
    ]
    return render_page("page.html.j2", {
        "title": title, "heading": heading, "cards": cards, "notes": filter(None, notes),
        "sections": sections, "figures": drawn, "samples": samples, "environment": environment,
    })


def run_page(data: RunData, findings: Findings, figures: Drawn) -> str:
    """Return the page of a run."""
    name = data.folder.resolve().name
    at_last = f" · drafter at {checkpoint_title(data, data.last)}" if data.last else ""
    compared = [row for row in data.rows if row.lossless]
    lossless = Section(
        "Losslessness", [counted_answers(compared)], more="Checks", folded=lossless_tables(compared)
    ) if compared else Section(
        "Losslessness", ["Not checked: that takes a run at temperature 0 with plain decoding."]
    )
    ladders = [
        Section("By prompt length", [by_length.introduction(data), *each.verdicts], each.tables)
        for each in findings.ladders
    ]
    return page(
        f"{name}: speculative decoding report", f"{name}{at_last}", _cards(findings, "No advice"),
        [_speeds(findings, INTRO), *ladders, lossless], figures,
        environment(data.rows, [data.command]), [parting_sentence(data), *data.notes],
        _samples(data),
    )


def runs_page(runs: Runs, findings: Findings, figures: Drawn) -> str:
    """Return the page of several runs."""
    name = " · ".join(column.title for column in runs.columns)
    lines = [("Name", "Folder", "Seed", "Commit of the training")] + [
        (column.name, str(run.folder), str(run.command.get("seed", "")),
         str(run.command.get("git_sha") or "")[:12])
        for column in runs.columns
        for run in column.runs
    ]
    return page(
        f"{name}: runs compared", name, _cards(findings, "No comparison"),
        [_speeds(findings, runs_tables.intro(runs)),
         Section("Runs", tables=[Table("Runs", tuple(lines))])],
        figures, environment(runs.rows, [run.command for run in runs.every]), runs.notes,
    )


def _cards(findings: Findings, otherwise: str) -> list[tuple[str, str, str]]:
    return [
        (f"Temperature {temperature:g}", advice.headline or otherwise, advice.reason)
        for temperature, advice in findings.advice.items()
    ]


def _speeds(findings: Findings, intro: str) -> Section:
    main = findings.main_tables
    rest = findings.tables[len(main) :]
    return Section("Speed and acceptance length", [intro], main, "By benchmark", rest)


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
