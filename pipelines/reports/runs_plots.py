"""Draw figures of several runs: a line each, in one colour and with one marker throughout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stree_pipelines.comparison import answers as figures
from stree_pipelines.comparison.answers import Gain
from stree_pipelines.reports import plots
from stree_pipelines.reports.run_data import method_label
from stree_pipelines.reports.runs import Column, Runs

COLOURS = (
    "#2f81d6", "#e0702b", "#2da44e", "#8250df", "#bf3989", "#159a9c", "#c09a2b", "#59636e",
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

# Figure of a run's checkpoint: (runs, column, checkpoint, method, temperature) → its value
Of = Callable[[Runs, Column, str, str, float], Gain]


def acceptance_length(runs: Runs, column: Column, label: str, method: str, t: float) -> Gain:
    answers = runs.answers(column, label, method, runs.scopes[0], t)
    return answers.figure(figures.acceptance_length) if answers else Gain(None, None)


def speedup(runs: Runs, column: Column, label: str, method: str, t: float) -> Gain:
    answers = runs.answers(column, label, method, runs.scopes[0], t)
    return answers.figure(figures.speedup) if answers else Gain(None, None)


def gain(runs: Runs, column: Column, label: str, method: str, t: float) -> Gain:
    """Return τ minus the first run's at the same step."""
    mine, first = (runs.answers(each, label, method, runs.scopes[0], t)
                   for each in (column, runs.columns[0]))
    if mine is None or first is None:
        return Gain(None, None)
    return mine.over(first, figures.acceptance_length, np.subtract)


LABELS: dict[Of, str] = {
    acceptance_length: "τ, new tokens per call",
    speedup: "times plain decoding",
    gain: "difference of τ",
}
LEVELS: dict[Of, float] = {speedup: 1.0, gain: 0.0}  # the value without a gain


def panel(runs: Runs, of: Of, method: str, temperature: float) -> Figure | None:
    """Draw a figure against distillation step, with intervals; None without a point."""
    figure, axes = plots.new_figure()
    if not _draw(axes, runs, of, method, temperature):
        return None
    axes.set_ylabel(LABELS[of])
    plots.add_legend(figure, axes, ncols=2, handlelength=3.2)
    return figure


def grid(runs: Runs, of: Of) -> Figure | None:
    """Draw a panel per method and temperature, in rows and columns with common axes."""
    width, height = plots.SIZE_INCHES
    num_rows, num_columns = len(runs.temperatures), max(len(runs.methods), 1)
    with mpl.rc_context(plots.STYLE):
        figure = Figure(figsize=(0.8 * width * num_columns, 0.8 * height * num_rows))
        panels = figure.subplots(num_rows, num_columns, squeeze=False, sharex=True, sharey="row")
    drawn = False
    for row, temperature in zip(panels, runs.temperatures, strict=True):
        for axes, method in zip(row, runs.methods, strict=False):
            drawn |= _draw(axes, runs, of, method, temperature)
            axes.set_title(f"{method_label(method)}, T = {temperature:g}", fontsize=9)
            axes.label_outer()
        row[0].set_ylabel(LABELS[of])
    if not drawn:
        return None
    plots.add_legend(figure, panels[0, 0], ncols=min(len(runs.columns), 4), handlelength=3.2)
    return figure


def page_figures(runs: Runs) -> Iterator[tuple[str, str, Figure]]:
    """Yield title, remark and figure of each that has something to show."""
    more = ("Difference of acceptance length", gain)
    wanted: list[tuple[str, Of]] = [("Acceptance length", acceptance_length), ("Speed", speedup)]
    for title, of in [*wanted[:1], more, *wanted[1:]] if len(runs.columns) > 1 else wanted:
        for temperature in runs.temperatures:
            for method in runs.methods:
                figure = panel(runs, of, method, temperature)
                if figure is not None:
                    yield title, f"{method_label(method)}, T = {temperature:g}", figure


def _draw(axes: Axes, runs: Runs, of: Of, method: str, temperature: float) -> bool:
    """Draw a line per run; returns True when there was one."""
    steps: set[int] = set()
    for number, column in enumerate(runs.columns):
        if of is gain and number == 0:
            continue
        points = []
        for label in column.checkpoints:
            step, (value, interval) = (
                column.step(label),
                of(runs, column, label, method, temperature),
            )
            if step is not None and value is not None:
                points.append((step, value, *(interval or (value, value))))
        if not points:
            continue
        at, values, low, high = zip(*points, strict=True)
        steps.update(at)
        look: Any = {"color": COLOURS[number % len(COLOURS)]}
        marker = MARKERS[number % len(MARKERS)]
        name = f"{column.title} − {runs.columns[0].name}" if of is gain else column.title
        axes.plot(at, values, marker=marker, label=name, **look)
        axes.fill_between(at, low, high, alpha=0.08, linewidth=0, **look)
        for edge in (low, high):  # edges make overlapping bands distinct
            axes.plot(at, edge, ":", alpha=0.7, lw=1.0, **look)
    if of in LEVELS and steps:
        axes.axhline(LEVELS[of], color=plots.PLAIN_COLOUR, lw=1.2, zorder=0)
    plots.over_steps(axes, sorted(steps))
    return bool(steps)
