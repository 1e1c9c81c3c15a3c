"""Make a comparison's tables, verdicts and figures: the best drafter, tree and verifier by
benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from stree import metrics
from stree_pipelines.evaluation.arms import Tuning
from stree_pipelines.evaluation.plan import AUTOREGRESSIVE
from stree_pipelines.evaluation.records import ResultRow
from stree_pipelines.evaluation.result_store import ResultStore
from stree_pipelines.reports import plots
from stree_pipelines.reports.page import Section, environment
from stree_pipelines.reports.page import page as html_page
from stree_pipelines.reports.run_data import Cell, drafter_label, told_shares
from stree_pipelines.reports.tables.tables import (
    MISSING,
    Advice,
    Column,
    Table,
    advise_among,
    below,
    figure,
    tau_of,
)

PLAIN = "plain decoding"
NO_VERDICT = "No verdict"
INTRO = (
    "τ: new tokens a target call, the target's own included. Speed-up: tokens per second over "
    "plain decoding's of the same prompts in the same process, which each arm answered in turn; "
    "beside it the median of each prompt's own. "
    "Nodes: tokens that the target verifies a call. Draft to host: shares of a call's time. "
    "Brackets: 95 % bootstrap intervals over prompts, paired."
)


@dataclass(frozen=True)
class Place:
    """All arms on a benchmark at a temperature, plain decoding included."""

    benchmark: str
    temperature: float
    rows: dict[str, ResultRow]
    cells: dict[str, Cell]
    tunings: dict[str, Tuning] = field(default_factory=dict)  # of the arms whose chain was tuned

    @property
    def remarks(self) -> list[str]:
        """Sentences on how chains were tuned, and on the shares of chosen trees."""
        chosen = (
            f"Steps of {arm} by tree: {told_shares(row)}"
            + ("." if (took := row.measuring_costs_s) is None
               else f"; what they cost was measured before, in {took:.1f} s.")
            for arm, row in self.rows.items()
            if row.tree_shares
        )
        return [*map(str, self.tunings.values()), *chosen]

    @property
    def title(self) -> str:
        count = next(iter(self.rows.values())).num_prompts
        return f"{self.benchmark}, T = {self.temperature:g} ({count} prompts)"


def places_of(
    rows: Sequence[ResultRow], store: ResultStore, tunings: Sequence[Tuning] = ()
) -> list[Place]:
    """Group the rows of one comparison by benchmark and temperature, in their order."""
    places: dict[tuple[str, float], Place] = {}
    for row in rows:
        key = row.benchmark, row.temperature
        place = places.setdefault(key, Place(*key, {}, {}))
        place.rows[row.method] = row
        place.cells[row.method] = Cell.of(row, store.samples(row))
    for each in tunings:
        places[each.benchmark, each.temperature].tunings[each.arm] = each
    return list(places.values())


def table(place: Place) -> Table:
    """Make the table of a place: a line per arm, plain decoding first."""
    rows, cells = place.rows, place.cells

    def over_plain(arm: str, name: str) -> float | None:
        return 1.0 if arm == AUTOREGRESSIVE else cells[arm][name]

    columns: list[Column[str]] = [
        ("arm", _label),
        ("drafter", lambda arm: drafter_label(rows[arm])),
        ("tree", lambda arm: _tree(rows[arm], place)),
        ("verifier", lambda arm: rows[arm].verifier or ""),
        ("backtracking", lambda arm: rows[arm].backtracking or ""),
        ("τ", lambda arm: tau_of(cells[arm])),
        ("tokens/s", lambda arm: figure(*cells[arm].gain("tokens_per_second"), ".1f")),
        ("speed-up", lambda arm: figure(
            over_plain(arm, "speedup"), cells[arm].interval("speedup"), unit="×"
        )),
        ("median speed-up", lambda arm: figure(over_plain(arm, "speedup_prompt_median"), unit="×")),
        ("speed-up per τ", lambda arm: MISSING if arm == AUTOREGRESSIVE
         else figure(*cells[arm].gain("speedup_per_tau"))),
        ("nodes a call", lambda arm: figure(cells[arm]["nodes_per_call"], form=".1f")),
        *((part, partial(_share, cells, part)) for part in metrics.STEP_PARTS),
    ]
    samples = {_label(name): cell.samples for name, cell in cells.items()}
    return Table.of_rows(place.title, rows, columns, 4, below(samples, [*rows.values()]))


def verdict(place: Place) -> Advice:
    """Advise on an arm, or on plain decoding, by this place alone."""
    rows = {name: row for name, row in place.rows.items() if name != AUTOREGRESSIVE}
    trees = {name: row.tree for name, row in rows.items()}
    batch_size = max(row.batch_size for row in place.rows.values())
    return advise_among({name: place.cells[name] for name in rows}, trees, place.title, batch_size)


def markdown(places: Sequence[Place]) -> str:
    """Format the winners, then the tables."""
    parts = ["# Drafters, trees and verifiers compared\n"]
    advice = ((place.title, verdict(place)) for place in places)
    parts += [f"- {title}: {each.headline or NO_VERDICT}. {each.reason}" for title, each in advice]
    parts += ["", f"{INTRO}\n"]
    for place in places:
        parts.append(table(place).to_markdown())
        parts += [f"{remark}\n" for remark in place.remarks]
    return "\n".join(parts)


def page(places: Sequence[Place], name: str) -> str:
    """Return the HTML page."""
    advice = ((place.title, verdict(place)) for place in places)
    heading = "drafters, trees and verifiers compared"
    return html_page(
        f"{name}: {heading}", f"{name} · {heading}",
        [(title, each.headline or NO_VERDICT, each.reason) for title, each in advice],
        [Section("Tables", [INTRO]),
         *(Section(place.title, place.remarks, [table(place)]) for place in places)],
        [("Speed-ups over plain decoding", "", overview(places))],
        environment([row for place in places for row in place.rows.values()], []),
    )


def overview(places: Sequence[Place]) -> Figure:
    """Draw a point per arm with its interval; plain decoding is the line at 1.

    There is a row per benchmark, and a column per temperature.
    """
    benchmarks = list(dict.fromkeys(place.benchmark for place in places))
    temperatures = sorted({place.temperature for place in places})
    # In reverse: figures are drawn upwards, and the first arm is on top
    names = [name for name in dict.fromkeys(name for place in places for name in place.cells)
             if name != AUTOREGRESSIVE][::-1]
    width = 0.08 * max(map(len, names), default=0) + 2.3 * len(temperatures)
    size = width, 0.6 + (0.5 + 0.19 * len(names)) * len(benchmarks)
    with mpl.rc_context(plots.STYLE):
        drawn = Figure(figsize=size, layout=ConstrainedLayoutEngine(h_pad=0.08))
        panels = drawn.subplots(
            len(benchmarks), len(temperatures), sharex=True, sharey=True, squeeze=False
        )
        for place in places:
            row, column = benchmarks.index(place.benchmark), temperatures.index(place.temperature)
            axes = panels[row, column]
            _draw_speedups(axes, place, names)
            axes.set_title(f"{place.benchmark}, T = {place.temperature:g}", fontsize=9)
        for axes in panels[-1]:
            axes.set_xlabel("times plain decoding")
    return drawn


def _draw_speedups(axes: Axes, place: Place, names: Sequence[str]) -> None:
    for at, name in enumerate(names):
        cell = place.cells.get(name)
        if cell is None or cell["speedup"] is None:
            continue
        low, high = cell.interval("speedup") or (cell["speedup"],) * 2
        axes.plot([low, high], [at, at], "-", color=plots.MORE_COLOURS[0])
        axes.plot(cell["speedup"], at, "o", color=plots.MORE_COLOURS[0])
    axes.axvline(1.0, color=plots.PLAIN_COLOUR, lw=1.2)
    axes.set_yticks(range(len(names)), names)


def _label(arm: str) -> str:
    return PLAIN if arm == AUTOREGRESSIVE else arm


def _tree(row: ResultRow, place: Place) -> str:
    if row.tree is None:
        return ""
    return f"{row.tree.name}, tuned" if row.method in place.tunings else row.tree.name


def _share(cells: Mapping[str, Cell], part: str, arm: str) -> str:
    times = cells[arm]["time_ms"]
    total = sum(times.values())
    return figure(100 * times.get(part, 0.0) / total if total else None, form=".0f", unit=" %")
