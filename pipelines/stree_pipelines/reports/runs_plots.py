"""Draw figures of several runs: a line each, in one colour and with one marker throughout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stree_pipelines.comparison.answers import Gain
from stree_pipelines.evaluation.plan import method_label
from stree_pipelines.reports import plots
from stree_pipelines.reports.run_data import Cell
from stree_pipelines.reports.runs import Runs
from stree_pipelines.reports.tables.tables import acceptance_gain

COLOURS = (
    "#2f81d6", "#e0702b", "#2da44e", "#8250df", "#bf3989", "#159a9c", "#c09a2b", "#59636e",
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


class Kind(NamedTuple):
    """Content of a figure: of(cell, the first run's cell of that step) is the value at a step.

    level: the value without a gain, drawn as a line. relative: the first run has no line itself.
    """

    title: str
    label: str
    of: Callable[[Cell, Cell | None], Gain]
    level: float | None = None
    relative: bool = False


ACCEPTANCE_LENGTH = Kind(
    "Acceptance length", "τ, new tokens per call",
    lambda cell, first: cell.gain("acceptance_length"),
)
GAIN = Kind(
    "Difference of acceptance length", "difference of τ", acceptance_gain, 0.0, relative=True
)
SPEEDUP = Kind("Speed", "times plain decoding", lambda cell, first: cell.gain("speedup"), 1.0)


def grid(
    runs: Runs, kind: Kind, methods: Sequence[str], temperatures: Sequence[float]
) -> Figure | None:
    """Draw a panel for each method and temperature, in columns and rows with common axes.

    Returns None when there is nothing to show.
    """
    alone = len(methods) * len(temperatures) == 1
    width, height = (side if alone else 0.8 * side for side in plots.SIZE_INCHES)
    num_rows, num_columns = len(temperatures), max(len(methods), 1)
    with mpl.rc_context(plots.STYLE):
        figure = Figure(figsize=(width * num_columns, height * num_rows))
        panels = figure.subplots(num_rows, num_columns, squeeze=False, sharex=True, sharey="row")
    drawn = False
    for row, temperature in zip(panels, temperatures, strict=True):
        for axes, method in zip(row, methods, strict=False):
            drawn |= _draw(axes, runs, kind, method, temperature)
            if not alone:
                axes.set_title(f"{method_label(method)}, T = {temperature:g}", fontsize=9)
                axes.label_outer()
        row[0].set_ylabel(kind.label)
    if not drawn:
        return None
    num_labels = 2 if alone else min(len(runs.columns), 4)
    plots.add_legend(figure, panels[0, 0], ncols=num_labels, handlelength=3.2)
    return figure


def page_figures(runs: Runs) -> Iterator[tuple[str, str, Figure | None]]:
    """Yield title, remark and figure of each; None for one that has nothing to show."""
    kinds = [ACCEPTANCE_LENGTH, GAIN, SPEEDUP]
    for kind in kinds if len(runs.columns) > 1 else kinds[::2]:
        for temperature in runs.temperatures:
            for method in runs.methods:
                remark = f"{method_label(method)}, T = {temperature:g}"
                yield kind.title, remark, grid(runs, kind, [method], [temperature])


def _draw(axes: Axes, runs: Runs, kind: Kind, method: str, temperature: float) -> bool:
    """Draw a line per run; returns True when there was one."""
    steps: set[int] = set()
    first = runs.columns[0]

    def gain(cell: Cell, label: str) -> Gain:
        return kind.of(cell, first.data.cell(label, method, runs.scopes[0], temperature))

    for number, column in enumerate(runs.columns):
        points = plots.over_checkpoints(column.data, method, temperature, gain)
        if not points or (kind.relative and column is first):
            continue
        name = f"{column.title} − {first.name}" if kind.relative else column.title
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        plots.draw_line(axes, points, colour, 0.08, marker=marker, label=name)
        at, _, *edges = zip(*points, strict=True)
        for edge in edges:  # makes overlapping bands distinct
            axes.plot(at, edge, ":", alpha=0.7, lw=1.0, color=colour)
        steps.update(at)
    if kind.level is not None and steps:
        axes.axhline(kind.level, color=plots.PLAIN_COLOUR, lw=1.2, zorder=0)
    plots.over_steps(axes, sorted(steps))
    return bool(steps)
