"""Turn rows of the benchmarks into a page: bars and values, a table and a plot per kind.

python pipelines/stree_lab/bench_report.py docs/results/h200-step   # reads *.jsonl there
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import stree.common.threads  # noqa: F401  (before other libraries are loaded)

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from stree.common.errors import BadData, UsageError, exit_with_reason, first_line
from stree.common.files import write_atomically
from stree.common.plain_data import parse_json
from stree_pipelines.console.command_line import CommandParser
from stree_pipelines.evaluation.result_store import is_json
from stree_pipelines.reports.plots import add_legend, new_figure, to_svg
from stree_pipelines.reports.rendering import markdown_page
from stree_pipelines.reports.tables.tables import MISSING, Table

Row = dict[str, Any]
CHAIN_NODES = 5  # STree's N1: a tree has to beat a chain of four drafts

# Name, bar, fields of the rows it is for, and the field with the value in the bar's unit
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
]
SPEEDUP = ("speedup per τ, 13-node tree", 0.80, dict(what="step", shape="8b"), "speedup_per_tau")

# By kind of rows (`what`, or op): a title, the fields that identify a row, and the measured fields.
# A time is the median, in µs; `us_parts data` is in a row's field `us_parts`.
TABLES: dict[str, tuple[str, str, str]] = {
    "op": ("Kernels, µs a layer", "op shape batch num_nodes context",
           "us_naive us_fused us_multi_step us_mamba_ssm_updates us_updates us_chunk_scan"),
    "target call": ("Target calls", "shape num_nodes context",
                    "us_floor us_tree us_chain over_floor over_step step_over_floor"),
    "fit": ("Fits of a target call's µs over N", "shape", "us_call us_chain"),
    "orders": ("Tree attention by the order of nodes", "shape num_nodes order",
               "blocks_read blocks_below us_sparse us_dense"),
    "draft": ("Drafts", "shape drafter tree num_nodes", "us_draft us_draft_sampled us_growth"),
    "draft_lengths": ("Drafts by the length of the context",
                      "shape drafter tree level_nodes context",
                      "us_draft us_level us_read cache_bytes peak_bytes"),
    "copied": ("Drafts by tree calls, and with states copied to children",
               "shape tree num_nodes context", "us_draft us_draft_copied copied_bytes"),
    "prompt": ("Reading a prompt", "shape target_dtype num_tokens",
               "us_graphs us_operations speedup peak_bytes"),
    "unrolled": ("A full binary tree, and its paths unrolled", "shape num_nodes",
                 "us_tree us_unrolled us_unrolled_chunk_scan us_unrolled_multi_step"),
    "beams": ("Beams packed and unrolled", "shape num_beams num_steps num_nodes leaves",
              "us_tree us_unrolled us_draft us_copy peak_bytes_tree peak_bytes_unrolled"),
    "parts": ("Steps of joint attainment by rows", "shape scan state_copy graphs",
              "num_steps ms_step ms_forward ms_verification ms_state_copy"),
    "kernel": ("Kernels of a call, beyond what already ran", "call shape num_nodes context kernel",
               "us count"),
    "step": ("Decoding at a given τ", "shape drafter tau",
             "us_plain us_tree host_share speedup speedup_per_tau"),
    "graphs": ("A step's graphs", "shape method temperature context verifier num_rows",
               "us_draft us_target us_both"),
    "rows": ("Steps of many rows",
             "shape target_dtype num_rows drafter tree temperature context",
             "us_draft us_target us_floor us_memory over_bound"),
    "joint": ("Ways to backtrack: target and acceptance", "shape num_rows tree context",
              "us_replay us_floor_replay us_joint us_floor_joint joint_over_replay "
              "kept_bytes_replay kept_bytes_joint peak_bytes_plain peak_bytes_replay "
              "peak_bytes_joint peak_bytes_replay_rows peak_bytes_joint_rows"),
    "serve": ("Serving, tokens/s of all rows", "shape num_rows tau context",
              "tokens_per_second_plain tokens_per_second_tree tokens_per_second_modes "
              "speedup_tree speedup_modes host_share_plain host_share_tree"),
    "queue": ("Requests that arrive by chance", "policy method rate",
              "latency_s_mean latency_s_p50 latency_s_p95 time_to_first_token_s_p50 throughput "
              "requests_per_second occupancy"),
    "distill": ("Distillation on several processes", "strategy num_processes",
                "tokens_per_second efficiency loss_distance"),
    "distillation step": (
        "A distillation step and its parts",
        "shape batch_size sequence_length teacher target_dtype features recipe options",
        "tokens_per_second tflops of_peak peak_bytes us_step us_parts_data us_parts_target "
        "us_parts_drafter us_rest us_parts_update"),
}

# A figure's name, kind of rows, x, y, and the fields whose combinations are its lines
FIGURES = [
    ("runtime_vs_nodes", "target call", "num_nodes", ["us_tree"], ["shape"]),
    ("required_tau", "required τ", "num_nodes", ["tau_over_chain"], ["shape"]),
    ("tree_vs_unrolled", "unrolled", "num_nodes", TABLES["unrolled"][2].split(), ["shape"]),
    ("speedup_vs_tau", "step", "tau", ["speedup"], ["shape", "drafter"]),
    ("speedup_vs_rows", "serve", "num_rows", ["speedup_tree", "speedup_modes"], ["shape", "tau"]),
    ("drafts_vs_length", "draft_lengths", "context", ["us_draft"], ["shape", "drafter", "tree"]),
    ("cache_vs_length", "draft_lengths", "context", ["cache_bytes"], ["shape", "drafter", "tree"]),
    ("losses", "loss", "step", ["loss"], ["num_processes", "strategy"]),
]
DOUBLING = ("num_rows", "context")  # on a logarithmic axis


def bars_table(rows: list[Row]) -> Table:
    """Make a line for each bar that rows are about: the worst row, and whether it meets the bar."""
    lines: list[tuple[str, ...]] = [("", "bar", "measured", "")]
    for name, bar, wanted, key in [*BARS, SPEEDUP]:
        values = [_flat(row)[key] for row in rows if _is(row, wanted) and key in row]
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


def table_of(
    rows: Iterable[Mapping[str, Any]], title: str, names: Sequence[str], fields: Sequence[str]
) -> Table:
    """Make a table with a line per row: the columns `names` to the left, then `fields`.

    Columns that no row has are left out.
    """
    frame = pd.DataFrame([_flat(row) for row in rows], dtype=object)
    names, fields = ([each for each in some if each in frame] for some in (names, fields))
    columns = {
        each.replace("_", " "): frame[each].map(lambda value, of=each: _cell(of, value))
        for each in [*names, *fields]
    }
    lines = zip(*columns.values(), strict=True)
    return Table(title, (tuple(columns), *lines), num_left=len(names))


def figure_of(
    rows: Iterable[Mapping[str, Any]], x: str, ys: Sequence[str], names: Sequence[str]
) -> Figure:
    """Draw the fields `ys` over the field `x`, a line for each value of `names`."""
    frame = pd.DataFrame([_flat(row) for row in rows])
    names, ys = ([each for each in some if each in frame] for some in (names, ys))
    figure, axes = new_figure()
    for name, group in frame.sort_values(x).groupby(names, dropna=False, sort=False):
        said = ", ".join(_cell(key, each) for key, each in zip(names, name, strict=True))
        for y in ys:
            label = f"{said}, {y.replace('_', ' ')}" if len(ys) > 1 else said
            axes.plot(group[x], group[y], "o-", label=label)
    if x in DOUBLING:
        ticks = sorted(frame[x].unique())
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    words = ys[0].replace("_", " ") if len(ys) == 1 else ""
    axes.set(xlabel=x.replace("_", " "), ylabel=words, ylim=(0, None))
    add_legend(figure, axes, ncols=2, handlelength=2)
    return figure


def _flat(row: Mapping[str, Any]) -> Row:
    """Flatten a row: the median of each spread, and FIELD_PART for a part of another field."""
    flat: Row = {}
    for name, value in row.items():
        if not isinstance(value, Mapping):
            flat[name] = value
        elif "median" in value:
            flat[name] = value["median"]
        else:
            flat |= {f"{name}_{part}": each for part, each in _flat(value).items()}
    return flat


def _cell(name: str, value: Any) -> str:
    """Format the value of the field `name`: MiB, a share, or four digits."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or MISSING
    if value is None or pd.isna(value):
        return MISSING
    if isinstance(value, (str, bool)):
        return str(value)
    if "bytes" in name:
        return f"{value / 2**20:,.2f} MiB"
    if "share" in name or name == "of_peak":
        return f"{value:.1%}"
    return f"{value:,.0f}" if value >= 1000 or float(value).is_integer() else f"{value:.4g}"


def kinds_of(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Group rows by kind, with the kinds of `TABLES` and `FIGURES` that are computed from rows."""
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        what = _kind(row)
        kinds.setdefault(what, []).append(row)
        if what == "graphs":
            flat = _flat(row)
            row["us_both"] = flat.get("us_draft", 0.0) + flat["us_target"]
        elif what == "prompt":
            row["speedup"] = row["us_operations"]["median"] / row["us_graphs"]["median"]
        elif what.startswith("profile"):
            kernels = sorted(row["kernels"].items(), key=lambda each: -each[1]["us"])
            every = [("all", {"us": row["us"]}), *kernels]
            kinds.setdefault("kernel", []).extend(
                {**row, "call": what, "kernel": name, **took} for name, took in every
            )
        elif what == "distill":
            points = zip(logged_steps(row["num_steps"]), row["losses"], strict=False)
            kinds.setdefault("loss", []).extend(
                {**row, "step": step, "loss": loss} for step, loss in points
            )
    calls: dict[str, list[Row]] = {}
    for row in kinds.get("target call", []):
        if row["context"] == 1024:
            calls.setdefault(row["shape"], []).append(row)
    for shape, some in calls.items():
        of_tree, of_chain = fit(some), fit(some, "us_chain")
        if of_tree is None:
            continue
        words = {"us_call": of_tree, "us_chain": of_chain}
        kinds.setdefault("fit", []).append({
            "shape": shape, **{name: in_words(each) for name, each in words.items() if each},
        })
        kinds.setdefault("required τ", []).extend(
            dict(
                shape=shape, num_nodes=nodes,
                tau_over_chain=required_tau(of_tree, of_chain or of_tree, nodes),
            )
            for nodes in range(CHAIN_NODES, max(row["num_nodes"] for row in some) + 1)
        )
    return kinds


def required_tau(of_tree: np.poly1d, of_chain: np.poly1d, num_nodes: int) -> float:
    """Return t2(N2) / t1(N1), the least τ2 / τ1 at which a tree of N2 nodes pays.

    So STree's section 4.3 has it: t1 is the time of a chain of N1 = 5 nodes by the multi-step
    update, and t2 that of a tree by the tree scan.
    """
    return float(of_tree(num_nodes) / of_chain(CHAIN_NODES))


def fit(rows: list[Row], field: str = "us_tree") -> np.poly1d | None:
    """Fit a call's time in µs over N; None with too few rows that have the field.

    STree's Eq. 7, t = kN + C, for shapes without attention, and its Eq. 8, t = aN² + bN + c, for
    hybrids.
    """
    degree = 1 if rows[0]["shape"].startswith("mamba2") else 2
    points = [(row["num_nodes"], row[field]["median"]) for row in rows if field in row]
    if len(points) <= degree:
        return None
    nodes, times = zip(*points, strict=True)
    return np.poly1d(np.polyfit(nodes, times, degree))


def in_words(polynomial: np.poly1d) -> str:
    """Format a polynomial of N as text."""
    powers = ("", "·N", "·N²")[polynomial.order :: -1]
    return " + ".join(
        f"{factor:.3g}{power}"
        for factor, power in zip(polynomial.coefficients, powers, strict=True)
    )


def interval(num_steps: int) -> int:
    """Return after how many steps a measured training logs: ten times, if it has the steps."""
    return max(num_steps // 10, 1)


def logged_steps(num_steps: int) -> list[int]:
    """Return the steps of a row's losses: the first, the ends of intervals, and the last."""
    ends = range(interval(num_steps), num_steps + 1, interval(num_steps))
    return sorted({1, *ends, num_steps})


def read_rows(directory: Path) -> list[Row]:
    """Read the rows of all *.jsonl of a folder. Raises UsageError and BadData."""
    rows = [row for path in sorted(directory.glob("*.jsonl")) for row in rows_of_file(path)]
    if not rows:
        raise UsageError(
            f"no rows (*.jsonl) in {directory}: bench_kernels.py and others write them"
        )
    return rows


def rows_of_file(path: Path) -> Iterator[Row]:
    """Yield a file's rows. A last line that a killed writer left torn is none."""
    *lines, last = path.read_bytes().split(b"\n")
    for number, line in enumerate([*lines, last] if is_json(last) else lines, 1):
        try:
            row = parse_json(line)
            if "git_sha" not in row["environment"] or not _kind(row):
                raise ValueError("no environment, or no kind")
        except (ValueError, TypeError, LookupError) as error:
            raise BadData(
                f"{path}, line {number} is no row of a benchmark ({first_line(error)}): write the "
                "file anew, or take it away"
            ) from error
        yield row


def _kind(row: Row) -> str:
    """Return the kind of a row. Raises KeyError for an object that is no row."""
    if "op" in row:
        return "op"
    return "queue" if "policy" in row else row["what"]


def _is(row: Row, wanted: dict[str, Any]) -> bool:
    return all(row.get(key) == value for key, value in wanted.items())


def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser("bench_report.py", description=__doc__)
    parser.add_argument("directory", type=str, help="folder with the rows; gets the page's parts")
    directory = Path(parser.parse_args(arguments).directory)
    rows = read_rows(directory)
    made_by = sorted(
        {(row["environment"]["git_sha"], row["environment"]["device"]) for row in rows}
    )
    bars, kinds = bars_table(rows), kinds_of(rows)
    parts = [bars.to_markdown()] if len(bars.rows) > 1 else []
    for kind, (title, names, fields) in TABLES.items():
        if kind in kinds:
            table = table_of(kinds[kind], title, names.split(), fields.split())
            parts.append(table.to_markdown())
    for name, kind, x, ys, lines in FIGURES:
        if len({row[x] for row in kinds.get(kind, [])}) > 1:
            drawn = figure_of(kinds[kind], x, ys, lines)
            write_atomically(directory / f"{name}.svg", to_svg(drawn, name.replace("_", " ")))
    parts.append("Rows made by: " + "; ".join(f"{sha} on {device}" for sha, device in made_by))
    text = markdown_page("\n".join(parts) + "\n")
    write_atomically(directory / "bars.md", text)
    print(text)


if __name__ == "__main__":
    exit_with_reason(main)
