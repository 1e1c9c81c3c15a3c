"""Draw the report's figures, as SVG text that fits a phone and follows the page's colours."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from stree import metrics
from stree_pipelines.comparison.answers import Gain
from stree_pipelines.evaluation.plan import AUTOREGRESSIVE, CHAIN, TREE, method_label
from stree_pipelines.reports.run_data import Cell, RunData, in_batches
from stree_pipelines.reports.simulation import num_drafts_of, simulated_curve

SIZE_INCHES = (4.6, 3.1)  # about a phone's width, so that text needs no shrinking there
INK = "#1f2328"  # text and axes; the page replaces it with its own colour
PLAIN_COLOUR = "#8b949e"
COLOURS = {AUTOREGRESSIVE: PLAIN_COLOUR, CHAIN: "#2f81d6", TREE: "#e0702b"}
MORE_COLOURS = ("#8250df", "#2da44e", "#bf3989")
PART_COLOURS = dict(
    zip(metrics.STEP_PARTS, ("#159a9c", "#c09a2b", "#e58fb0", "#b9c0c8"), strict=True)
)  # no method's
MAX_TICKS = 8
Point = tuple[float, float, float, float]  # at x the value, and the ends of its interval
# A line and a marker per temperature, filled or hollow, distinct without colour.
LINES = ("-", "--", "-.", (0, (1, 1)))
MARKERS = ("o", "s", "^", "D")
STYLE: Any = {
    "svg.hashsalt": "stree", "font.family": "sans-serif", "font.size": 9,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": INK,
    "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.grid": True, "grid.color": "#8b949e", "grid.alpha": 0.25, "legend.frameon": False,
    "legend.fontsize": 8, "lines.linewidth": 1.8, "lines.markersize": 4.5,
    "figure.constrained_layout.use": True,
}


def tau_vs_step(data: RunData) -> Figure | None:
    """Draw τ over steps with its intervals, and the chain's τ that training's acceptance
    promises."""
    figure, axes = new_figure()
    num_drafts = num_drafts_of(data)
    promised = [
        (step, metrics.expected_acceptance_length(acceptance, num_drafts))
        for step, acceptance in simulated_curve(data)
    ]
    for temperature in data.temperatures:
        for method in data.methods:
            _plot_over_steps(axes, data, method, temperature, "acceptance_length")
        if promised and temperature == data.temperatures[0]:  # the legend's columns are even so
            label = f"chain of {num_drafts}, simulated"
            draw_curve(axes, promised, linestyle=":", color=PLAIN_COLOUR, label=label, lw=1.4)
    return _finish(figure, axes, "τ, new tokens per call", data)


def speed_vs_step(data: RunData) -> Figure | None:
    """Draw the ratio to plain decoding measured beside each checkpoint, with its intervals.

    Tokens/s would show the machine's noise between checkpoints, which the ratio divides out.
    """
    figure, axes = new_figure()
    for temperature in data.temperatures:
        for method in data.methods:
            _plot_over_steps(axes, data, method, temperature, "speedup")
    if axes.lines:
        axes.axhline(1.0, color=PLAIN_COLOUR, lw=1.4, label="plain decoding")
    return _finish(figure, axes, f"times plain decoding{in_batches(data.batch_size, ', ')}", data)


def loss_vs_step(data: RunData) -> Figure | None:
    figure, axes = new_figure()
    for name, label, width, colour in (
        ("loss", "training", 1.1, PLAIN_COLOUR),
        ("val_loss", "validation", 1.8, "#159a9c"),
    ):
        points = data.curves.get(name)
        if points:
            draw_curve(axes, points, label=label, lw=width, color=colour)
    return _finish(figure, axes, "distillation loss", data)


def acceptance_histogram(data: RunData, temperature: float) -> Figure | None:
    """Draw the share of calls by the number of drafts they accepted, at the last checkpoint."""
    figure, axes = new_figure()
    cells = _last_cells(data, temperature)
    width = 0.8 / max(len(cells), 1)
    for number, (method, cell) in enumerate(cells):
        histogram = cell["acceptance_histogram"]
        calls = sum(histogram.values()) or 1
        depths = range(max(histogram, default=0) + 1)
        offset = (number - (len(cells) - 1) / 2) * width
        axes.bar(
            [depth + offset for depth in depths],
            [100 * histogram.get(depth, 0) / calls for depth in depths],
            width * 0.92, color=colour_of(data, method), label=method_label(method),
        )
    axes.set_xlabel("draft tokens accepted in a call")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _finish(figure, axes, "% of calls", None)


def depth_rates(data: RunData, temperature: float) -> Figure | None:
    """Draw how often a draft of each depth is accepted once its parent was."""
    figure, axes = new_figure()
    for method, cell in _last_cells(data, temperature):
        rates = cell["depth_accept_rates"]
        if rates:
            axes.plot(
                list(rates), [100 * rate for rate in rates.values()], "o-",
                color=colour_of(data, method), label=method_label(method),
            )
    axes.set_ylim(0, 102)
    axes.set_xlabel("depth in the tree")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _finish(figure, axes, "% accepted, parent given", None)


def step_times(data: RunData, temperature: float) -> Figure | None:
    """Draw a call's parts in milliseconds as stacked bars, at the last checkpoint.

    Returns None when they were not timed, as in batches.
    """
    figure, axes = new_figure()
    cells = _last_cells(data, temperature)[::-1]
    bars = [(method, cell["time_ms"]) for method, cell in cells if cell["time_ms"]]
    plain = _plain_times(data, [cell for _, cell in cells], temperature)
    if plain:
        bars.append((AUTOREGRESSIVE, plain))
    left = [0.0] * len(bars)
    for part in metrics.STEP_PARTS:
        widths = [times.get(part, 0.0) for _, times in bars]
        axes.barh(range(len(bars)), widths, 0.55, left, color=PART_COLOURS[part], label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for height, total in enumerate(left):
        axes.annotate(
            f"{total:.2f}", (total, height), (4, 0), textcoords="offset points", va="center",
            fontsize=8, color=INK,
        )
    axes.set_yticks(range(len(bars)), [method_label(method) for method, _ in bars])
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.14)
    axes.set_xlabel("ms per call")
    if not bars:
        return None
    add_legend(figure, axes, ncols=len(metrics.STEP_PARTS), handlelength=1.0)
    return figure


def to_svg(figure: Figure, title: str, inline: bool = False) -> str:
    """Return SVG text, the same for the same figure.

    inline: a bare element for an HTML page, which takes its text colour from there and refers to
    nothing outside.
    """
    buffer = io.StringIO()
    # Inline text takes the page's font; as shapes it looks the same everywhere.
    with mpl.rc_context({**STYLE, "svg.fonttype": "none" if inline else "path"}):
        figure.savefig(buffer, format="svg", transparent=inline, metadata={"Date": None})
    svg = buffer.getvalue()
    if not inline:
        return svg
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r' width="[\d.]+pt" height="[\d.]+pt"', "", svg, count=1)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
    return svg.replace(INK, "currentColor")


def to_pdf(figure: Figure) -> bytes:
    """Return PDF bytes, the same for the same figure; fonts as publishers want them."""
    buffer = io.BytesIO()
    with mpl.rc_context({**STYLE, "pdf.fonttype": 42}):
        figure.savefig(buffer, format="pdf", metadata={"CreationDate": None})
    return buffer.getvalue()


def new_figure() -> tuple[Figure, Axes]:
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=SIZE_INCHES)
        return figure, figure.subplots()


def _finish(figure: Figure, axes: Axes, label: str, data: RunData | None) -> Figure | None:
    """Add label and legend; returns None when nothing was drawn. With `data` the x axis is the
    step's."""
    if not axes.get_legend_handles_labels()[0]:
        return None
    axes.set_ylabel(label)
    if data is not None:
        over_steps(axes, sorted(step for step in data.steps.values() if step))
    add_legend(figure, axes, ncols=2, handlelength=3.2)
    return figure


def over_steps(axes: Axes, steps: Sequence[int]) -> None:
    """Label the x axis by distillation step; it is logarithmic when steps spread far."""
    axes.set_xlabel("distillation step")
    if steps and steps[-1] >= 30 * steps[0]:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:g}"))
        axes.minorticks_off()
        if len(steps) <= MAX_TICKS:
            axes.set_xticks(steps)


def add_legend(figure: Figure, axes: Axes, ncols: int, handlelength: float) -> None:
    """Add a legend above the axes, so that it hides nothing; its handles show a line's dashes."""
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(
        unique.values(), unique.keys(), loc="outside upper center", ncols=ncols, frameon=False,
        fontsize=8, columnspacing=1.2, handlelength=handlelength, labelcolor=INK,
    )


def points_of(gains: Iterable[tuple[float, Gain]]) -> list[Point]:
    """Return the points of pairs (x, figure), as far as there is a figure."""
    return [(x, y, *(ends or (y, y))) for x, (y, ends) in gains if y is not None]


def over_checkpoints(
    data: RunData, method: str, temperature: float, gain: Callable[[Cell, str], Gain]
) -> list[Point]:
    """Return the points over all benchmarks of each checkpoint, by step.

    gain: the figure of a cell at a checkpoint's label.
    """
    found = []
    for label in data.checkpoints:
        cell, step = data.cell(label, method, data.scopes[0], temperature), data.steps[label]
        if cell is not None and step is not None:
            found.append((step, gain(cell, label)))
    return points_of(found)


def draw_line(
    axes: Axes, points: Sequence[Point], colour: str, alpha: float = 0.13, **look: Any
) -> None:
    """Draw a line and the band of its intervals, if there are points."""
    if points:
        at, values, low, high = zip(*points, strict=True)
        axes.plot(at, values, color=colour, **look)
        if len(points) == 1:  # a band would have no width
            axes.vlines(at, low, high, color=colour)
        else:
            axes.fill_between(at, low, high, color=colour, alpha=alpha, linewidth=0)


def draw_curve(axes: Axes, points: Sequence[tuple[float, float]], **look: Any) -> None:
    """Draw a line without intervals; a single point has a marker, since its line has no length."""
    axes.plot(*zip(*points, strict=True), marker="o" if len(points) == 1 else "", **look)


def _plot_over_steps(axes: Axes, data: RunData, method: str, temperature: float, name: str) -> None:
    found = over_checkpoints(data, method, temperature, lambda cell, _: cell.gain(name))
    label = f"{method_label(method)}, T = {temperature:g}"
    draw_line(axes, found, colour_of(data, method), label=label, **look_of(data, temperature))


def look_of(data: RunData, temperature: float) -> dict[str, Any]:
    """Return the line style of a temperature: the first solid with filled markers, the others
    hollow."""
    number = data.temperatures.index(temperature)
    look = {"linestyle": LINES[number % len(LINES)], "marker": MARKERS[number % len(MARKERS)]}
    return look if number == 0 else {**look, "markerfacecolor": "none"}


def _plain_times(data: RunData, cells: Sequence[Cell], temperature: float) -> dict[str, float]:
    """Return the times of plain decoding of the same prompts; of its own row when the cells lack
    them."""
    plain = data.cell("", AUTOREGRESSIVE, data.scopes[0], temperature)
    times = [cell["baseline_time_ms"] for cell in cells]
    return next(filter(None, times), plain["time_ms"] if plain is not None else {})


def _last_cells(data: RunData, temperature: float) -> Sequence[tuple[str, Any]]:
    cells = [(m, data.cell(data.last, m, data.scopes[0], temperature)) for m in data.methods]
    return [(method, cell) for method, cell in cells if cell is not None]


def colour_of(data: RunData, method: str) -> str:
    name = method.partition(":")[0]
    same = [other for other in data.methods if other.partition(":")[0] == name]
    position = same.index(method) if method in same else 0
    if position == 0 and name in COLOURS:
        return COLOURS[name]
    return MORE_COLOURS[position % len(MORE_COLOURS)]
