"""Write a run's report: table6.md, lossless.md, tau_vs_step.svg and report.html; print Table 6.

python pipelines/report.py runs/quickstart
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure

from stree.errors import exit_with_reason
from stree.files import write_atomically
from stree_pipelines.command_line import CommandParser
from stree_pipelines.reports import plots
from stree_pipelines.reports.lossless import lossless_markdown
from stree_pipelines.reports.page import page_context
from stree_pipelines.reports.run_data import RunData, load_run
from stree_pipelines.reports.tables import advise, table6, table6_markdown

TEMPLATES = Path(__file__).parent / "reports" / "templates"


def write_report(run: str | Path, out: str | Path | None = None) -> list[Path]:
    """Write the files into `out` (default: the run folder) and return their paths.

    Raises UsageError when the run has no results, CannotWrite when the folder refuses.
    """
    data = load_run(run)
    folder = Path(out) if out is not None else Path(run)
    files = {"table6.md": table6_markdown(data)}
    lossless = lossless_markdown(Path(run))
    if lossless:
        files["lossless.md"] = lossless
    figure = plots.tau_vs_step(data)
    if figure is not None:
        files["tau_vs_step.svg"] = plots.to_svg(figure, "τ against distillation step")
    files["report.html"] = render_page(data)
    for name, content in files.items():
        write_atomically(folder / name, content)
    return [folder / name for name in files]


def render_page(data: RunData) -> str:
    """The self-contained HTML page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    context = {**page_context(data), "figures": _figures(data)}
    return environment.get_template("report.html.j2").render(context)


def _figures(data: RunData) -> list[dict[str, Any]]:
    """Title, remark and inline SVG of each figure that has something to show."""
    wanted: list[tuple[str, str, Callable[[], Figure | None]]] = [
        ("Acceptance length", "Bands: 95 % intervals. Dotted: what training's simulated acceptance "
         "promises a chain of 4 at T = 1.", partial(plots.tau_vs_step, data)),
        ("Speed", "Of decoding, prefill excluded.", partial(plots.speed_vs_step, data)),
        ("Distillation loss", "", partial(plots.loss_vs_step, data)),
    ]  # fmt: skip
    for temperature in data.temperatures:
        at = f"T = {temperature:g}, last checkpoint"
        wanted += [
            (
                "Drafts accepted per call",
                at,
                partial(plots.acceptance_histogram, data, temperature),
            ),
            ("Acceptance by depth", at, partial(plots.depth_rates, data, temperature)),
            ("Where a call's time goes", at, partial(plots.step_times, data, temperature)),
        ]
    drawn = [(title, remark, draw()) for title, remark, draw in wanted]
    return [
        {"title": title, "remark": remark, "svg": plots.to_svg(figure, title, inline=True)}
        for title, remark, figure in drawn
        if figure is not None
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser("report.py", description=__doc__)
    parser.add_argument("run", type=str, help="run folder, or an evaluation's folder")
    parser.add_argument("--out", type=str | None, help="where to write (default: the run folder)")
    options = parser.parse_args(arguments)
    paths = write_report(options.run, options.out)
    data = load_run(options.run)
    for temperature in data.temperatures:
        advice = advise(data, temperature)
        print(table6(data, data.scopes[0], temperature).to_markdown())
        headline = f"{advice.headline}. " if advice.headline else ""
        print(f"T = {temperature:g}: {headline}{advice.reason}\n")
    print("\n".join(map(str, paths)))


if __name__ == "__main__":
    exit_with_reason(main)
