"""Write a run's report, or that of several runs together; print its tables.

    stree report runs/quickstart
    stree report runs/quickstart --records --out docs/results/cpu-quickstart
    stree report runs/kl-s0 runs/kl-s1 runs/lk-s0 --names KL LK --out runs/losses

Writes report.html, table6 (.md, .tex, .csv, .json), tau_vs_step (.svg, .pdf) and lossless.md; for
several runs speed_vs_step (.svg, .pdf) in place of lossless.md. Runs whose configs differ by the
seed only share a column; the others are compared with the first one's, prompt by prompt. Runs with
different decoding settings are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import stree.common.threads  # noqa: F401  (before other libraries are loaded)

from matplotlib.figure import Figure

from stree.common.errors import UsageError
from stree.common.files import make_directory, write_atomically
from stree_pipelines.console.command_line import CommandParser
from stree_pipelines.evaluation.result_store import (
    ARCHIVE_NAME,
    READINGS_NAME,
    RESULTS_NAME,
    write_archive,
    write_rows,
)
from stree_pipelines.reports import plots, runs_plots, runs_tables
from stree_pipelines.reports.page import Drawn, run_page, runs_page
from stree_pipelines.reports.rendering import markdown_page
from stree_pipelines.reports.run_data import (
    COMMAND_NAME,
    CONFIG_NAME,
    CURVES_NAME,
    RunData,
    checkpoint_title,
    load_run,
    open_results,
)
from stree_pipelines.reports.runs import Runs, load_runs
from stree_pipelines.reports.settings import SHOW_HELP
from stree_pipelines.reports.simulation import parting_sentence
from stree_pipelines.reports.tables import by_length
from stree_pipelines.reports.tables.by_length import Findings
from stree_pipelines.reports.tables.lossless import lossless_markdown, lossless_sentence
from stree_pipelines.reports.tables.table_rows import INTERVALS, as_csv, as_json, table_rows
from stree_pipelines.reports.tables.tables import in_lines, table6_markdown, to_latex


def write_report(data: RunData, out: str | Path | None = None) -> tuple[list[Path], str]:
    """Write the files of a run's report into `out` (default: the run folder).

    Returns their paths, and the text that the command prints. Raises CannotWrite when the folder
    refuses, before anything is drawn.
    """
    out = Path(out) if out is not None else data.folder
    make_directory(out)
    findings, rows = Findings.of(data), list(table_rows(data))
    ladders = findings.ladders
    files: dict[str, str | bytes] = {
        "table6.md": table6_markdown(data, findings.tables),
        "table6.json": as_json(data.rows, INTERVALS, rows),
        "table6.tex": to_latex(findings.tables), "table6.csv": as_csv(rows),
        "lossless.md": lossless_markdown(data.folder),
        **_drawn("tau_vs_step", plots.tau_vs_step(data), "τ against distillation step"),
        "by_length.md": by_length.markdown(data, ladders) if ladders else "",
    }
    for number, ladder in enumerate(ladders, start=1):
        name = "tau_by_length" if number == 1 else f"tau_by_length_{number}"
        drawn = by_length.drawn(data, ladder.rungs)
        files |= _drawn(name, drawn, "τ against prompt length")
    files["report.html"] = run_page(data, findings, _figures(data, findings))
    notes = [by_length.introduction(data)] if ladders else []
    notes += [each for ladder in ladders for each in ladder.verdicts]
    notes += [note for note in (parting_sentence(data), *data.notes) if note]
    return _write(files, out), _summary(findings, notes)


def write_runs_report(runs: Runs, out: str | Path) -> tuple[list[Path], str]:
    """Write the files of a report on several runs; otherwise as `write_report`."""
    make_directory(out)
    findings, rows = runs_tables.findings(runs), list(runs_tables.table_rows(runs))
    every = runs.methods, runs.temperatures
    tau, speed = (runs_plots.grid(runs, kind, *every)
                  for kind in (runs_plots.ACCEPTANCE_LENGTH, runs_plots.SPEEDUP))
    files: dict[str, str | bytes] = {
        "table6.md": runs_tables.markdown(runs, findings),
        "table6.json": as_json(runs.rows, runs_tables.INTERVALS, rows),
        "table6.tex": to_latex(findings.tables), "table6.csv": as_csv(rows),
        **_drawn("tau_vs_step", tau, "τ against distillation step"),
        **_drawn("speed_vs_step", speed, "Speed-up against distillation step"),
        "report.html": runs_page(runs, findings, runs_plots.page_figures(runs)),
    }
    return _write(files, Path(out)), _summary(findings, runs.notes)


def _drawn(name: str, figure: Figure | None, title: str) -> dict[str, str | bytes]:
    """Return a figure's files."""
    if figure is None:
        return {}
    return {f"{name}.svg": plots.to_svg(figure, title), f"{name}.pdf": plots.to_pdf(figure)}


def _write(files: Mapping[str, str | bytes], folder: Path) -> list[Path]:
    """Write the files that have content, and return their paths."""
    kept = {name: content for name, content in files.items() if content}
    for name, content in kept.items():
        if isinstance(content, str) and name.endswith(".md"):
            content = markdown_page(content)
        write_atomically(folder / name, content)
    return [folder / name for name in kept]


def write_records(data: RunData, out: str | Path) -> list[Path]:
    """Write the inputs of a report into `out`: rows, their samples in one archive, training's
    files.

    `load_run` reads that folder like the run. Returns the paths. Raises UsageError when it is the
    run's own folder, CannotWrite when it refuses.
    """
    store, folder = open_results(data.folder), Path(out)
    if folder.resolve() in (data.folder.resolve(), store.directory.resolve()):
        raise UsageError(f"--records copies {folder} into itself: give another --out")
    write_rows(folder / RESULTS_NAME, data.rows)
    paths = [folder / RESULTS_NAME]
    if samples := {row.samples: store.samples(row) for row in data.rows}:
        write_archive(folder / ARCHIVE_NAME, samples)
        paths.append(folder / ARCHIVE_NAME)
    if readings := store.readings():
        write_rows(folder / READINGS_NAME, readings)
    for name in (CONFIG_NAME, CURVES_NAME, COMMAND_NAME):
        if (data.folder / name).is_file():
            write_atomically(folder / name, (data.folder / name).read_bytes())
            paths.append(folder / name)
    return paths


def _figures(data: RunData, findings: Findings) -> Drawn:
    """Yield the page's figures, temperatures side by side."""
    yield (
        "Acceptance length", "Bands: 95 % intervals. Dotted: what training's simulated acceptance "
        "promises a chain at T = 1, without a penalty.", plots.tau_vs_step(data),
    )
    yield (
        "Speed", "Over plain decoding of the same prompts, measured beside each checkpoint; no "
        "prefill. Tokens per second stand in the table.", plots.speed_vs_step(data),
    )
    for title, draw in (
        ("Drafts accepted per call", plots.acceptance_histogram),
        ("Acceptance by depth", plots.depth_rates),
        ("Where a call's time goes", plots.step_times),
    ):
        for temperature in data.temperatures:
            remark = f"T = {temperature:g}, {checkpoint_title(data, data.last)}"
            yield title, remark, draw(data, temperature)
    for ladder in findings.ladders:
        remark = f"The same questions after more text, {checkpoint_title(data, data.last)}"
        drawn = by_length.drawn(data, ladder.rungs)
        yield "Acceptance length by prompt length", remark, drawn
    yield "Distillation loss", "", plots.loss_vs_step(data)


def _summary(findings: Findings, notes: Sequence[str]) -> str:
    """Format the printed text: the tables over all benchmarks, the advice, and more sentences."""
    lines = []
    for table, (temperature, advice) in zip(
        findings.main_tables, findings.advice.items(), strict=True
    ):
        lines.append(table.to_text())
        headline = f"{advice.headline}. " if advice.headline else ""
        lines.append(f"{in_lines(f'T = {temperature:g}: {headline}{advice.reason}')}\n")
    lines += [table.to_text() for ladder in findings.ladders for table in ladder.tables]
    return "\n".join([*lines, *(f"{in_lines(each)}\n" for each in notes)])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandParser("stree report", description=__doc__)
    add = parser.add_argument
    add("run", type=str, nargs="+", help="run folders, or evaluations' folders")
    add("--out", type=str | None, help="where to write (default: the run folder; of several, "
        "`compared` beside the first)")
    add("--show", type=str, nargs="+", default=[], help=SHOW_HELP)
    add("--names", type=str, nargs="+", default=[],
        help="what the columns of several runs are called (default: as their folders)")
    add("--records", action="store_true",
        help="into --out also the rows shown, their samples and the run's settings: all that it "
        "takes to compute every figure again; of several runs, in a folder each")
    options = parser.parse_args(arguments)
    if options.records and options.out is None:
        raise UsageError("--records writes into another folder than the run's: give --out")
    out, records = options.out, []
    if len(options.run) == 1:
        if options.names:
            raise UsageError("--names are of several runs: one was given")
        data = load_run(options.run[0], options.show)
        records = write_records(data, out) if options.records else []
        paths, summary = write_report(data, out)
    else:
        runs = load_runs(options.run, options.show, options.names)
        out = Path(options.run[0]).resolve().parent / "compared" if out is None else Path(out)
        if out.resolve() in {run.folder.resolve() for run in runs.every}:
            raise UsageError(f"{out} is one of the runs: give another --out")
        if options.records:
            for number, run in enumerate(runs.every, start=1):
                records += write_records(run, out / f"run-{number}")
        paths, summary = write_runs_report(runs, out)
    print(summary)
    print("\n".join(map(str, paths)))
    if records:
        print(f"and {len(records)} files of records in {out}")
    if len(options.run) == 1 and (sentence := lossless_sentence(data.folder)):
        print(f"\n{sentence}")
    print(f"\nOpen {paths[-1]} in a browser.")
