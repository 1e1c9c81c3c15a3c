"""Turn rows of the benchmarks into a page: bars and what was measured, fits, plots.

python pipelines/lab/bench_report.py docs/results/h200-step   # reads *.jsonl there
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import stree.common.threads  # noqa: F401  (before other libraries are loaded)

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from stree.common.errors import BadData, UsageError, exit_with_reason, first_line
from stree.common.files import write_atomically
from stree.common.plain_data import parse_json
from stree.common.words import size
from stree_pipelines.console.command_line import CommandParser
from stree_pipelines.lab.benches.intervals import logged_steps
from stree_pipelines.lab.benches.models import ATTENTION, OWN
from stree_pipelines.reports.plots import (
    COLOURS,
    MORE_COLOURS,
    SIZE_INCHES,
    STYLE,
    add_legend,
    new_figure,
    to_svg,
)
from stree_pipelines.reports.rendering import markdown_page
from stree_pipelines.reports.run_data import METHOD_LABELS
from stree_pipelines.reports.tables.tables import MISSING, Table

Row = dict[str, Any]
PALETTE = (*COLOURS.values(), *MORE_COLOURS)
CHAIN_NODES = 5  # what a tree has to beat: a chain of four drafts

# What, the bar, how to find its rows, and the value of a row in the bar's unit
BARS: list[tuple[str, float, dict[str, Any], str]] = [
    ("replay + conv + scan, µs a layer, N = 16", 7,
     dict(op="mamba_tree", shape="8b", num_nodes=16), "us_fused"),
    ("replay + conv + scan, µs a layer, N = 64", 12,
     dict(op="mamba_tree", shape="8b", num_nodes=64), "us_fused"),
    ("step over the floor of its matrix products, 1,024 committed", 1.12,
     dict(what="target call", shape="8b", context=1024), "step_over_floor"),
    ("tree call over a step, N = 16", 1.06,
     dict(what="target call", shape="8b", num_nodes=16, context=1024), "over_step"),
    ("tree call over a step, N = 64", 1.12,
     dict(what="target call", shape="8b", num_nodes=64, context=1024), "over_step"),
    ("tree call over a step, N = 16, context 8k", 1.15,
     dict(what="target call", shape="8b", num_nodes=16, context=8192), "over_step"),
    ("draft of the 13-node tree, µs", 600,
     dict(what="draft", shape="8b", drafter=None, tree=None), "us_draft"),
    ("host time not hidden, share of a step", 0.02, dict(what="step", shape="8b"), "host_share"),
    ("kept for a 64-node tree, share of a state a node", 0.02,
     dict(what="memory", shape="8b", num_nodes=64), "over_a_state_a_node"),
    ("2.7B Mamba-2, tree call over a step, N = 16", 1.25,
     dict(what="target call", shape="mamba2-2.7b", num_nodes=16), "over_step"),
    *[(f"{count} rows, step over products, states and keys", 1.12 if count <= 16 else 1.15,
       dict(what="rows", shape="8b", num_rows=count), "over_bound")
      for count in (1, 2, 4, 8, 16, 32, 64)],
]  # fmt: skip
SPEEDUP = ("speedup per τ, 13-node tree", 0.80, dict(what="step", shape="8b"), "speedup_per_tau")


def bars_table(rows: list[Row]) -> Table:
    """Each bar whose subject there are rows about, the worst row, and whether it is met."""
    lines: list[tuple[str, ...]] = [("", "bar", "measured", "")]
    for name, bar, wanted, key in [*BARS, SPEEDUP]:
        values = [_value(row[key]) for row in rows if _is(row, wanted) and key in row]
        upper = key != SPEEDUP[3]
        sign = "≤" if upper else "≥"
        if not values:
            about: Row = {each: wanted[each] for each in ("op", "what", "shape") if each in wanted}
            if any(_is(row, about) for row in rows):
                lines.append((name, f"{sign} {bar:g}", MISSING, "not measured"))
            continue
        worst = max(values) if upper else min(values)
        met = worst <= bar if upper else worst >= bar
        lines.append((name, f"{sign} {bar:g}", f"{worst:.4g}", "met" if met else "missed"))
    return Table("Bars", tuple(lines))


def kernels_table(rows: list[Row]) -> Table:
    """Medians of each way to do an op, a layer."""
    ways = list(dict.fromkeys(key for row in rows for key in row if key.startswith("us_")))
    heads = tuple(way.removeprefix("us_").replace("_", " ") for way in ways)
    lines = [
        (
            f"{row['op']}, N = {row['num_nodes']}, {row['context']:,} committed",
            *(f"{_value(row[way]):.1f}" if way in row else MISSING for way in ways),
        )
        for row in sorted(rows, key=lambda row: (row["op"], row["num_nodes"]))
    ]
    return Table("Kernels, µs a layer", (("", *heads), *lines))


def calls_table(rows: list[Row]) -> Table:
    """Target calls beside a step and the floor of the same run."""
    heads = ("", "floor", "call", "call ÷ floor", "call ÷ step", "step ÷ floor")
    lines = [
        (
            f"{row['shape']}, N = {row['num_nodes']}, {row['context']:,} committed",
            f"{_value(row['us_floor']):,.0f}", f"{_value(row['us_tree']):,.0f}",
            *(f"{row[key]:.3f}" for key in ("over_floor", "over_step", "step_over_floor")),
        )
        for row in rows
    ]  # fmt: skip
    return Table("Target calls, µs", (heads, *lines))


def profiles_table(rows: list[Row]) -> Table:
    """What kernels take of a call beyond what already ran, medians; the largest first."""
    rows = sorted(rows, key=lambda row: (row["shape"], row["context"], row["num_nodes"]))
    last = rows[-1]["kernels"]
    kinds = sorted(
        dict.fromkeys(kind for row in rows for kind in row["kernels"]),
        key=lambda kind: -last.get(kind, {"us": 0.0})["us"],
    )
    heads = [
        f"{row['shape']}, N = {row['num_nodes']}, {row['context']:,} committed" for row in rows
    ]
    lines = [("the whole", *(f"{row['us']:,.0f}" for row in rows))]
    for kind in kinds:
        cells = [row["kernels"].get(kind) for row in rows]
        lines.append((kind, *(
            f"{each['us']:,.1f} ({each['count']:.0f})" if each else MISSING for each in cells
        )))  # fmt: skip
    return Table("Where a call's time goes, µs (launches)", (("", *heads), *lines))


def steps_table(rows: list[Row]) -> Table:
    """Whole steps at given acceptance lengths."""
    heads = ("", "plain, µs", "tree, µs", "not hidden by the host", "speed-up", "speed-up ÷ τ")
    lines = [
        (
            f"{_drafter_of(row)}, τ = {row['tau']:.2f}", f"{_value(row['us_plain']):,.0f}",
            f"{_value(row['us_tree']):,.0f}", f"{row['host_share']:.1%}",
            f"{row['speedup']:.2f}", f"{row['speedup_per_tau']:.3f}",
        )
        for row in rows
    ]  # fmt: skip
    return Table("Decoding at a given τ", (heads, *lines))


def graphs_table(rows: list[Row]) -> Table:
    """What a step's graphs take, greedy and sampled."""
    lines = []
    for row in rows:
        draft, target = _value(row.get("us_draft", 0.0)), _value(row["us_target"])
        verifier, count = row.get("verifier", "coupled"), row.get("num_rows", 1)
        lines.append((
            f"{row['shape']}, {METHOD_LABELS[row['method']]}, T = {row['temperature']:g}, "
            f"{row['context']:,} committed" + (f", {verifier}" if verifier != "coupled" else "")
            + (f", {count} rows" if count > 1 else ""),
            f"{draft:,.0f}" if draft else MISSING, f"{target:,.0f}", f"{draft + target:,.0f}",
        ))  # fmt: skip
    return Table("A step's graphs, µs", (("", "draft", "target", "both"), *lines))


def training_table(rows: list[Row]) -> Table:
    """Distillation on several processes against one, with as many rows a step."""
    heads = ("", "tokens/s", "efficiency", "largest distance of a loss")
    lines = [
        (
            f"{row['num_processes']}, {row['strategy']}" if row["num_processes"] > 1 else "1",
            f"{_value(row['tokens_per_second']):,.0f}", f"{row['efficiency']:.2f}",
            f"{row['loss_distance']:.1e}" if row["num_processes"] > 1 else MISSING,
        )
        for row in sorted(rows, key=lambda row: (row["strategy"], row["num_processes"]))
    ]  # fmt: skip
    return Table("Processes, by strategy", (heads, *lines))


def training_steps_table(rows: list[Row]) -> Table:
    """A distillation step and its parts."""
    parts = ("data", "target", "drafter", "rest", "update")
    heads = ("", "tokens/s", "TFLOP/s", "of the peak", "memory", "step, ms",
             "data", "target", "drafter", "heads and loss", "update")  # fmt: skip
    lines = []
    for row in rows:
        used = {name: _value(each) for name, each in row["us_parts"].items()}
        used["rest"] = row["us_rest"]
        step = _value(row["us_step"])
        lines.append((
            f"{row['shape']}, {row['batch_size']} × {row['sequence_length']:,}, {row['teacher']}"
            + (" in 8 bits" if row.get("target_dtype") == "float8" else "")
            + (", features" if row["features"] else "")
            + (f", {row['recipe']}" if row.get("recipe") else "")
            + "".join(f", {each.removeprefix('--model.')}" for each in row.get("options", [])),
            f"{row['tokens_per_second']:,.0f}", f"{row['tflops']:.0f}",
            f"{row['of_peak']:.0%}" if "of_peak" in row else MISSING,
            size(row["peak_bytes"]) if row["peak_bytes"] else MISSING, f"{step / 1e3:,.1f}",
            *(f"{used[part] / 1e3:,.1f} ({used[part] / step:.0%})" if part in used else MISSING
              for part in parts),
        ))  # fmt: skip
    return Table("A distillation step by its teacher; parts in ms", (heads, *lines))


def orders_table(rows: list[Row]) -> Table:
    """Attention of large trees by the order of their nodes."""
    heads = (
        "",
        "blocks read",
        "of all below",
        "leaving out, µs a layer",
        "every block, µs a layer",
    )
    lines = [
        (
            f"{row['num_nodes']:,} nodes, {row['order']}",
            f"{row['blocks_read']:,}", f"{row['blocks_below']:,}",
            f"{_value(row['us_sparse']):.1f}", f"{_value(row['us_dense']):.1f}",
        )
        for row in rows if "us_sparse" in row
    ]  # fmt: skip
    return Table("Tree attention by the order of nodes", (heads, *lines))


def drafts_table(rows: list[Row]) -> Table:
    """Drafting a tree, by what the drafter is."""
    heads = ("", "tree", "nodes", "T = 0, µs", "T = 1, µs")
    lines = [
        (
            _drafter_of(row), row.get("tree", "paper"), str(row["num_nodes"]),
            *(f"{_value(row[key]):,.0f}" if key in row else MISSING
              for key in ("us_draft", "us_draft_sampled")),
        )
        for row in rows
    ]  # fmt: skip
    return Table("Drafts", (heads, *lines))


def draft_lengths_table(rows: list[Row]) -> Table:
    """Drafting after contexts of several lengths: time, and the drafter's cache for a sequence."""
    heads = ("", "drafter", "nodes a level", "committed", "draft, µs", "a level, µs", "cache, MiB")
    lines = [
        (
            row["shape"], called(row["drafter"]), str(row["level_nodes"]),
            f"{row['context']:,}", f"{_value(row['us_draft']):,.0f}", f"{row['us_level']:,.0f}",
            f"{row['cache_bytes'] / 2**20:,.2f}",
        )
        for group in by_length(rows).values() for row in group
    ]  # fmt: skip
    return Table("Drafting by the length of the context", (heads, *lines), 2)


def prompts_table(rows: list[Row]) -> Table:
    """Reading a prompt by graphs, and one operation after the other."""
    heads = ("", "tokens", "by graphs, ms", "by operations, ms", "times as fast")
    lines = []
    for row in rows:
        graphs, operations = (_value(row[key]) for key in ("us_graphs", "us_operations"))
        lines.append((
            row["shape"], f"{row['num_tokens']:,}", f"{graphs / 1e3:,.2f}",
            f"{operations / 1e3:,.2f}", f"{operations / graphs:.1f}",
        ))  # fmt: skip
    return Table("Reading a prompt", (heads, *lines))


def draft_lengths_figure(rows: list[Row]) -> Figure:
    """Time of a draft, and bytes of the drafter's cache, against the context's length."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(SIZE_INCHES[0], 1.7 * SIZE_INCHES[1]))
        time, memory = figure.subplots(2, sharex=True)
    drafters = list(dict.fromkeys((row["shape"], row["drafter"]) for row in rows))
    for (shape, drafter, nodes, _), group in by_length(rows).items():
        look: dict[str, Any] = {
            "color": PALETTE[1:][drafters.index((shape, drafter)) % (len(PALETTE) - 1)],
            "marker": "o", "linestyle": "-" if nodes > 1 else "--",
            "label": f"{shape}, {called(drafter)}, {nodes} a level",
        }  # fmt: skip
        contexts = [row["context"] for row in group]
        time.plot(contexts, [_value(row["us_draft"]) / 1e3 for row in group], **look)
        memory.plot(contexts, [row["cache_bytes"] / 2**20 for row in group], **look)
    ticks = sorted({row["context"] for row in rows})
    memory.set_xscale("log", base=2)
    memory.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    memory.set_yscale("log")
    time.set(ylabel="draft, ms", ylim=(0, None))
    memory.set(xlabel="committed tokens", ylabel="cache of a sequence, MiB")
    add_legend(figure, time, ncols=2, handlelength=3.2)
    return figure


def called(drafter: str) -> str:
    """A drafter of bench_decode.py's, as a table calls it."""
    return {OWN: "Mamba-2", ATTENTION: "Transformer"}.get(drafter, drafter)


def by_length(rows: list[Row]) -> dict[tuple[str, str, int, str], list[Row]]:
    """Rows of drafts by shape, drafter, nodes a level and tree, each from the shortest context
    on."""
    groups: dict[tuple[str, str, int, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["context"]):
        key = row["shape"], row["drafter"], row["level_nodes"], row["tree"]
        groups.setdefault(key, []).append(row)
    return groups


def _drafter_of(row: Row) -> str:
    """The target's shape, and the drafter where it is not the shape's own."""
    return row["shape"] + (f", {row['drafter']}" if row.get("drafter") else "")


def losses_figure(rows: list[Row]) -> Figure:
    """Loss against step, a curve for each number of processes and strategy."""
    figure, axes = new_figure()
    for i, (row, colour) in enumerate(zip(rows, PALETTE, strict=False)):
        steps = logged_steps(row["num_steps"])
        label = f"{row['num_processes']} ({row['strategy']})" if row["num_processes"] > 1 else "1"
        # The first ones wide: curves that are the same can all be seen
        width = 1 + 1.2 * (len(rows) - 1 - i)
        axes.plot(steps, row["losses"], "-", color=colour, linewidth=width, label=label)
    axes.set(xlabel="step", ylabel="loss", ylim=(0, None))
    axes.legend(title="processes")
    return figure


def fit(rows: list[Row], degree: int) -> np.ndarray:
    """Coefficients of the call's time in µs over N, highest power first (STree, section 4.3)."""
    nodes, times = _call_points(rows)
    return np.polyfit(nodes, times, degree)


def runtime_figure(rows_by_shape: dict[str, list[Row]]) -> Figure:
    """Time of a call against N with its fit (the paper's Figure 2, left and middle)."""
    figure, axes = new_figure()
    for (shape, rows), colour in zip(rows_by_shape.items(), PALETTE, strict=False):
        nodes, times = _call_points(rows)
        axes.plot(nodes, times / 1e3, "o", color=colour, label=shape)
        dense = np.linspace(1, nodes.max(), 100)
        axes.plot(dense, np.polyval(fit(rows, _degree(rows)), dense) / 1e3, "-", color=colour)
    axes.set(xlabel="nodes N", ylabel="target call, ms", ylim=(0, None))
    add_legend(figure, axes, ncols=2, handlelength=2)
    return figure


def required_tau_figure(rows_by_shape: dict[str, list[Row]]) -> Figure:
    """By how much τ has to rise over a chain's of 5 for a tree of N to pay (STree, Eq. 7-8)."""
    figure, axes = new_figure()
    for (shape, rows), colour in zip(rows_by_shape.items(), PALETTE, strict=False):
        nodes, _ = _call_points(rows)
        coefficients = fit(rows, _degree(rows))
        dense = np.linspace(CHAIN_NODES, nodes.max(), 100)
        ratio = np.polyval(coefficients, dense) / np.polyval(coefficients, CHAIN_NODES)
        axes.plot(dense, ratio, "-", color=colour, label=shape)
    axes.set(xlabel="nodes N", ylabel=f"τ ratio to a chain of {CHAIN_NODES}")
    add_legend(figure, axes, ncols=2, handlelength=2)
    return figure


def unrolled_figure(rows: list[Row]) -> Figure:
    """A full binary tree in one call, and its paths unrolled (the paper's Figure 3)."""
    figure, axes = new_figure()
    keys = sorted({key for row in rows for key in row if key.startswith("us_")})
    for key, colour in zip(keys, PALETTE, strict=False):
        points = [(row["num_nodes"], _value(row[key]) / 1e3) for row in rows if key in row]
        label = key.removeprefix("us_").replace("_", " ")
        axes.plot(*zip(*points, strict=True), "o-", color=colour, label=label)
    axes.set(xlabel="nodes of the full binary tree", ylabel="target call, ms", ylim=(0, None))
    add_legend(figure, axes, ncols=2, handlelength=2)
    return figure


def speedup_figure(rows_by_shape: dict[str, list[Row]]) -> Figure:
    """Speed-up over autoregressive decoding against a given τ."""
    figure, axes = new_figure()
    taus = sorted({row["tau"] for rows in rows_by_shape.values() for row in rows})
    axes.plot(taus, taus, ":", color=PALETTE[0], label="free drafts and trees")
    for (shape, rows), colour in zip(rows_by_shape.items(), PALETTE[2:], strict=False):
        points = sorted((row["tau"], row["speedup"]) for row in rows)
        axes.plot(*zip(*points, strict=True), "o-", color=colour, label=f"{shape}, 13-node tree")
    axes.set(xlabel="τ, given", ylabel="speed-up", ylim=(0, None))
    axes.legend()
    return figure


def batches_table(rows: list[Row]) -> Table:
    """Steps of many rows beside the bound of the same run: products, states and keys."""
    heads = ("", "draft", "target and acceptance", "products", "states and keys", "over the bound")
    lines = [
        (
            f"{row['shape']}, {row['num_rows']} rows, {row['tree']}, {row['context']:,} committed",
            f"{_value(row['us_draft']):,.0f}" if "us_draft" in row else MISSING,
            *(f"{_value(row[key]):,.0f}" for key in ("us_target", "us_floor", "us_memory")),
            f"{row['over_bound']:.3f}",
        )
        for row in rows
    ]
    return Table("Steps of many rows, µs", (heads, *lines))


def backtracking_table(rows: list[Row]) -> Table:
    """Target calls that replay the accepted path, and those that are fed it again."""
    heads = (
        "", "replay", "its products", "joint", "its products", "joint ÷ replay",
        "kept, MiB", "kept with joint, MiB",
    )  # fmt: skip
    lines = [
        (
            f"{row['shape']}, {row['num_rows']} rows, {row['tree']}, {row['context']:,} committed",
            *(
                f"{_value(row[f'us_{key}']):,.0f}"
                for key in ("replay", "floor_replay", "joint", "floor_joint")
            ),
            f"{row['joint_over_replay']:.3f}",
            *(f"{row[f'kept_bytes_{key}'] / 2**20:,.1f}" for key in ("replay", "joint")),
        )
        for row in rows
    ]
    return Table("Ways to backtrack: target and acceptance, µs", (heads, *lines))


def serving_table(rows: list[Row]) -> Table:
    """Total tokens/s of all rows, plain, with the tree, and as measured costs choose."""
    heads = (
        "", "plain", "tree", "chosen", "tree ÷ plain", "chosen ÷ plain",
        "not hidden by the host, plain / tree",
    )  # fmt: skip
    ways = ("plain", "tree", "modes")
    lines = [
        (
            f"{row['shape']}, {row['num_rows']} rows, τ = {row['tau']:g}, "
            f"{row['context']:,} committed",
            *(f"{row[f'tokens_per_second_{way}']:,.0f}" for way in ways),
            f"{row['speedup_tree']:.2f}", f"{row['speedup_modes']:.2f}",
            f"{row['host_share_plain']:.1%} / {row['host_share_tree']:.1%}",
        )
        for row in rows
    ]  # fmt: skip
    return Table("Serving, tokens/s of all rows", (heads, *lines))


def serving_figure(rows: list[Row]) -> Figure:
    """Speed-up over plain decoding at the same number of rows."""
    figure, axes = new_figure()
    kinds = dict.fromkeys((row["shape"], row["tau"]) for row in rows)
    for colour, (shape, tau) in zip(PALETTE, kinds, strict=False):
        points = sorted(
            (row["num_rows"], row["speedup_tree"], row["speedup_modes"])
            for row in rows
            if (row["shape"], row["tau"]) == (shape, tau)
        )
        counts, trees, chosen = zip(*points, strict=True)
        axes.plot(counts, chosen, "o-", color=colour, label=f"{shape}, τ = {tau:g}, chosen")
        axes.plot(counts, trees, "--", color=colour, label=f"{shape}, τ = {tau:g}, tree")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    ticks = sorted({row["num_rows"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(count) for count in ticks])
    axes.set(xlabel="sequences at once", ylabel="speed-up over plain decoding")
    add_legend(figure, axes, ncols=2, handlelength=2)
    return figure


def fits_text(rows_by_shape: dict[str, list[Row]]) -> str:
    lines = ["Fits of a target call's time in µs over N:", ""]
    for shape, rows in rows_by_shape.items():
        terms = [f"{value:.3g}" for value in fit(rows, _degree(rows))]
        form = "{}·N + {}" if len(terms) == 2 else "{}·N² + {}·N + {}"
        lines.append(f"- {shape}: t = {form.format(*terms)}")
    return "\n".join(lines) + "\n"


def read_rows(directory: Path) -> list[Row]:
    rows = [row for path in sorted(directory.glob("*.jsonl")) for row in rows_of_file(path)]
    if not rows:
        raise UsageError(
            f"no rows (*.jsonl) in {directory}: bench_kernels.py and others write them"
        )
    return rows


def rows_of_file(path: Path) -> Iterator[Row]:
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            row = parse_json(line)
            if "git_sha" not in row["environment"] or not {"op", "what"} & row.keys():
                raise ValueError("no environment, or neither op nor what")
        except (ValueError, TypeError, LookupError) as error:
            raise BadData(
                f"{path}, line {number} is no row of a benchmark ({first_line(error)}): write the "
                "file anew, or take it away"
            ) from error
        yield row


def _is(row: Row, wanted: dict[str, Any]) -> bool:
    return all(row.get(key) == value for key, value in wanted.items())


def _value(value: Any) -> float:
    return float(value["median"] if isinstance(value, dict) else value)


def _call_points(rows: list[Row]) -> tuple[np.ndarray, np.ndarray]:
    points = sorted((row["num_nodes"], _value(row["us_tree"])) for row in rows)
    nodes, times = zip(*points, strict=True)
    return np.array(nodes, dtype=float), np.array(times)


def _degree(rows: list[Row]) -> int:
    """Attention's part grows with N², a pure Mamba-2's with N."""
    return 1 if rows[0]["shape"].startswith("mamba2") else 2


def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser("bench_report.py", description=__doc__)
    parser.add_argument("directory", type=str, help="folder with the rows; gets the page's parts")
    directory = Path(parser.parse_args(arguments).directory)
    rows = read_rows(directory)
    made_by = sorted(
        {(row["environment"]["git_sha"], row["environment"]["device"]) for row in rows}
    )
    calls: dict[str, list[Row]] = {}
    for row in rows:
        if _is(row, dict(what="target call", context=1024)):
            calls.setdefault(row["shape"], []).append(row)
    calls = {shape: each for shape, each in calls.items() if len(each) > _degree(each)}
    bars = bars_table(rows)
    parts = [bars.to_markdown()] if len(bars.rows) > 1 else []
    for wanted, table in (
        ("op", kernels_table),
        ("target call", calls_table),
        ("orders", orders_table),
        ("draft", drafts_table),
        ("draft_lengths", draft_lengths_table),
        ("prompt", prompts_table),
        ("profile", profiles_table),
        ("step", steps_table),
        ("graphs", graphs_table),
        ("rows", batches_table),
        ("joint", backtracking_table),
        ("serve", serving_table),
        ("distill", training_table),
        ("distillation step", training_steps_table),
    ):
        about = [row for row in rows if wanted in row or row.get("what") == wanted]
        if about:
            parts.append(table(about).to_markdown())
    figures: dict[str, Figure] = {}
    if calls:
        parts.append(fits_text(calls))
        figures = {
            "runtime_vs_nodes": runtime_figure(calls),
            "required_tau": required_tau_figure(calls),
        }
    steps: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("what") == "step":
            steps.setdefault(_drafter_of(row), []).append(row)
    if steps := {pair: each for pair, each in steps.items() if len(each) > 1}:
        figures["speedup_vs_tau"] = speedup_figure(steps)
    for what, name, draw in (
        ("unrolled", "tree_vs_unrolled", unrolled_figure),
        ("serve", "speedup_vs_rows", serving_figure),
        ("draft_lengths", "drafts_vs_length", draft_lengths_figure),
        ("distill", "losses", losses_figure),
    ):
        chosen = [row for row in rows if row.get("what") == what]
        if chosen:
            figures[name] = draw(chosen)
    for name, figure in figures.items():
        write_atomically(directory / f"{name}.svg", to_svg(figure, name.replace("_", " ")))
    parts.append("Rows made by: " + "; ".join(f"{sha} on {device}" for sha, device in made_by))
    text = markdown_page("\n".join(parts) + "\n")
    write_atomically(directory / "bars.md", text)
    print(text)


if __name__ == "__main__":
    exit_with_reason(main)
