"""Write a run's report (table6.md and .json, lossless.md, tau_vs_step.svg, report.html); print it.

python pipelines/report.py runs/quickstart
python pipelines/report.py runs/quickstart --records --out docs/results/cpu-quickstart
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from stree.errors import UsageError, exit_with_reason
from stree.files import write_atomically
from stree_pipelines.command_line import CommandParser
from stree_pipelines.evaluation.records import RESULTS_NAME, write_rows
from stree_pipelines.reports import plots
from stree_pipelines.reports.lossless import lossless_markdown
from stree_pipelines.reports.page import page_context
from stree_pipelines.reports.rendering import render_page
from stree_pipelines.reports.run_data import (
    COMMAND_NAME,
    CONFIG_NAME,
    CURVES_NAME,
    RunData,
    checkpoint_title,
    load_run,
    open_results,
)
from stree_pipelines.reports.settings import SHOW_HELP
from stree_pipelines.reports.simulation import parting_sentence
from stree_pipelines.reports.table_rows import table6_json
from stree_pipelines.reports.tables import advise, table6, table6_markdown


def write_report(data: RunData, out: str | Path | None = None) -> list[Path]:
    """Write the files into `out` (default: the run folder) and return their paths.

    Raises CannotWrite when the folder refuses.
    """
    folder = Path(out) if out is not None else data.folder
    files = {"table6.md": table6_markdown(data), "table6.json": table6_json(data)}
    lossless = lossless_markdown(data.folder)
    if lossless:
        files["lossless.md"] = lossless
    figure = plots.tau_vs_step(data)
    if figure is not None:
        files["tau_vs_step.svg"] = plots.to_svg(figure, "τ against distillation step")
    page = {**page_context(data), "figures": _figures(data)}
    files["report.html"] = render_page("report.html.j2", page)
    for name, content in files.items():
        write_atomically(folder / name, content)
    return [folder / name for name in files]


def write_records(data: RunData, out: str | Path) -> list[Path]:
    """Write what the report was made of into `out`: the rows shown, their samples, packed, and what
    the training left. `load_run` reads the folder as it reads the run. Returns the paths.

    Raises UsageError when it is the run's own folder, CannotWrite when it refuses.
    """
    store, folder = open_results(data.folder), Path(out)
    if folder.resolve() in (data.folder.resolve(), store.directory.resolve()):
        raise UsageError(f"--records copies {folder} into itself: give another --out")
    rows = []
    for row in data.rows:
        samples = store.samples(row)
        name = row.samples.removesuffix(".gz") + ".gz"
        if samples:
            write_rows(folder / name, samples)
        rows.append(row.model_copy(update={"samples": name}))
    write_rows(folder / RESULTS_NAME, rows)
    named = (folder / row.samples for row in rows)
    paths = [folder / RESULTS_NAME, *(path for path in named if path.exists())]
    for name in (CONFIG_NAME, CURVES_NAME, COMMAND_NAME):
        if (data.folder / name).is_file():
            write_atomically(folder / name, (data.folder / name).read_bytes())
            paths.append(folder / name)
    return paths


def _figures(data: RunData) -> list[dict[str, Any]]:
    """Title, remark and inline SVG of each figure that has something to show; what is of one
    temperature stands beside the same of the next."""
    wanted: list[tuple[str, str, Callable[[], Figure | None]]] = [
        ("Acceptance length", "Bands: 95 % intervals. Dotted: what training's simulated acceptance "
         "promises a chain at T = 1.", partial(plots.tau_vs_step, data)),
        ("Speed", "Of decoding, prefill excluded.", partial(plots.speed_vs_step, data)),
    ]  # fmt: skip
    for title, draw in (
        ("Drafts accepted per call", plots.acceptance_histogram),
        ("Acceptance by depth", plots.depth_rates),
        ("Where a call's time goes", plots.step_times),
    ):
        for temperature in data.temperatures:
            remark = f"T = {temperature:g}, {checkpoint_title(data, data.last)}"
            wanted.append((title, remark, partial(draw, data, temperature)))
    wanted.append(("Distillation loss", "", partial(plots.loss_vs_step, data)))
    drawn = [(title, remark, draw()) for title, remark, draw in wanted]
    return [
        {"title": title, "remark": remark, "svg": plots.to_svg(figure, title, inline=True)}
        for title, remark, figure in drawn
        if figure is not None
    ]


def summary(data: RunData) -> str:
    """What the command prints: Table 6 over all benchmarks, the advice, and what to know of it."""
    lines = []
    for temperature in data.temperatures:
        advice = advise(data, temperature)
        lines.append(table6(data, data.scopes[0], temperature).to_markdown())
        headline = f"{advice.headline}. " if advice.headline else ""
        lines.append(f"T = {temperature:g}: {headline}{advice.reason}\n")
    lines += [f"{note}\n" for note in (parting_sentence(data), *data.notes) if note]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandParser("report.py", description=__doc__)
    add = parser.add_argument
    add("run", type=str, help="run folder, or an evaluation's folder")
    add("--out", type=str | None, help="where to write (default: the run folder)")
    add("--show", type=str, nargs="+", default=[], help=SHOW_HELP)
    add("--records", action="store_true",
        help="into --out also the rows shown, their samples and the run's settings: all that it "
        "takes to compute every figure again")  # fmt: skip
    options = parser.parse_args(arguments)
    if options.records and options.out is None:
        raise UsageError("--records writes into another folder than the run's: give --out")
    data = load_run(options.run, options.show)
    records = write_records(data, options.out) if options.records else []
    paths = write_report(data, options.out)
    print(summary(data))
    print("\n".join(map(str, paths)))
    if records:
        print(f"and {len(records)} files of records in {options.out}")


if __name__ == "__main__":
    exit_with_reason(main)
