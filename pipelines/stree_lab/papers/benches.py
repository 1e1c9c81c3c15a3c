"""Make the papers' tables and figures from rows of `bench_decode.py` and `bench_kernels.py`.

The rows are times and bytes of random weights. The builders are as in `tables.py`.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from stree.trees.token_tree import balanced
from stree_lab.bench_report import fit, in_words, read_rows
from stree_lab.benches.models import ATTENTION, EAGLE, OWN
from stree_lab.papers.node_order import num_blocks
from stree_lab.papers.order_bench import BLOCK, ORDERS, random_tree
from stree_lab.papers.tables import OURS, Cells, Rows, of_paper
from stree_pipelines.reports.tables.tables import MISSING, figure

CHAIN_NODES, TREE_NODES = 5, 13  # of the paper's chain and tree, roots included
STREE_1_SHAPES = {
    "mamba2-2.7b": "Mamba2-2.7B", "mamba2-7b": "7B", "mamba2-13b": "13B", "mamba2-23b": "23B",
    "8b": "MambaInLlama-8B's shape",
}
ORDER_TREES = 10  # of which blocks are counted, for each size
SNAKES_4_SHAPES = ("mamba2-1.3b", "mamba2-2.7b", "mamba2-7b", "mamba2-13b")
PNG = re.compile(r"png-(\d+)-(\d+)|chain-(\d+)")  # speculations and drafts; a chain is one draft

Row = dict[str, Any]


def bench_rows(folder: Path, **wanted: Any) -> list[Row]:
    """Read the benchmark rows that have these values."""
    rows = read_rows(folder) if folder.is_dir() else []
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def stree_1(folder: Path, paper: Sequence[Cells]) -> tuple[list[Cells], Rows]:
    calls = _calls(folder)
    used, columns = [], []
    for shape, name in STREE_1_SHAPES.items():
        if not {CHAIN_NODES, TREE_NODES} <= calls.get(shape, {}).keys():
            continue
        tree, chain = calls[shape][TREE_NODES], calls[shape][CHAIN_NODES]
        used += [tree, chain]
        plain, cells = _ms(tree, "us_step"), []
        for call, key in ((tree, "us_tree"), (chain, _chain_key(chain))):
            ms = _ms(call, key)
            over = f"{ms / plain:.2f}x" if key == "us_chain" and ms and plain else (
                f"{call['over_step']:.2f}x"
            )
            cells.append(f"{figure(ms)} ({over})")
        columns.append((f"{name}, {OURS}", figure(plain), *cells))
    return [
        (*line, *ours) for line, *ours in zip(paper, *columns, strict=True)
    ], used


def stree_figure_2(folder: Path, paper: Sequence[Cells]) -> tuple[list[Cells], Rows]:
    found = _calls(folder)
    shapes = ("8b", "mamba2-2.7b")  # the paper's
    calls = {shape: found[shape] for shape in shapes if CHAIN_NODES in found.get(shape, {})}
    columns = ("ms", "ms, chain by updates", "τ that it needs")
    lines: list[Cells] = [("N", *(f"{shape}, {what}" for shape in calls for what in columns))]
    for count in sorted({count for each in calls.values() for count in each}):
        cells = []
        for each in calls.values():
            ms, ms_chain = _ms(each.get(count), "us_tree"), _ms(each.get(count), "us_chain")
            base = each[CHAIN_NODES]
            over = _ms(base, _chain_key(base))
            cells += [
                figure(ms), figure(ms_chain), figure(ms / over if ms and over else None, unit="×")
            ]
        lines.append((str(count), *cells))
    fits = []
    for each in calls.values():
        both = (fit(list(each.values()), field) for field in ("us_tree", "us_chain"))
        fits += [*(in_words(found) if found else MISSING for found in both), MISSING]
    lines.append(("µs, fitted", *fits))
    return lines, [row for each in calls.values() for row in each.values()]


def _chain_key(row: Row) -> str:
    """Return the field of a chain's time: by the multi-step update, in older rows by the scan."""
    return "us_chain" if "us_chain" in row else "us_tree"


def _calls(folder: Path) -> dict[str, dict[int, Row]]:
    """Read the target calls after 1,024 tokens, by shape and number of nodes."""
    calls: dict[str, dict[int, Row]] = {}
    for row in bench_rows(folder, what="target call", context=1024):
        calls.setdefault(row["shape"], {})[row["num_nodes"]] = row
    return calls


def stree_2(folder: Path, paper: Sequence[Cells]) -> tuple[list[Cells], Rows]:
    rows = {
        (row["num_beams"], row["num_steps"]): row
        for row in bench_rows(folder, what="beams", shape="mamba2-2.7b")
    }
    lines: list[Cells] = [paper[0]]
    for name, told, of_ways in (
        ("Speed", "ms a step", {"tree": ("draft",), "unrolled": ("draft", "copy")}),
        ("Speed", "ms a target call", {}),
        ("Memory", "GB", {}),
    ):
        of_measure = [cells for cells in paper if cells[0] == name]
        if of_ways and not any("us_draft" in row for row in rows.values()):
            continue  # rows of an older command
        if (f"{name}, paper", *of_measure[0][1:]) not in lines:
            lines += of_paper(of_measure)
        field, measured = MEASURES[name]
        for _, steps, *_ in of_measure:
            cells = []
            for count in (2, 3, 4, 5):
                row = rows.get((count, int(steps)))
                tree, unrolled = (
                    _sum(measured(row, f"{field}_{part}") for part in (way, *of_ways.get(way, ())))
                    for way in ("tree", "unrolled")
                )
                over = f" ({unrolled / tree:.2f}×)" if of_ways and tree and unrolled else ""
                cells += [figure(tree) + over, figure(unrolled)]
            lines.append((f"{told}, {OURS}", steps, *cells))
    return lines, rows.values()


def _sum(parts: Iterable[float | None]) -> float | None:
    """Return the sum of the parts, None when one is missing."""
    found = list(parts)
    return None if None in found else sum(part for part in found if part is not None)


def stree_figure_3(folder: Path, paper: Sequence[Cells]) -> tuple[list[Cells], Rows]:
    found = bench_rows(folder, what="unrolled")
    of_paper_shape = [row for row in found if row["shape"] == "mamba2-2.7b"]
    rows = {row["num_nodes"]: row for row in of_paper_shape or found}
    (*labels, states, tokens, runtime), *lines_of_paper = paper
    lines: list[Cells] = [
        (*labels, states, OURS, tokens, OURS, runtime, OURS, f"{OURS}, by chunk scan")
    ]
    used: list[Row | None] = []
    for depth, way, states, tokens, runtime in lines_of_paper:
        tree = balanced([2] * (int(depth) - 1))
        row = rows.get(tree.num_nodes)
        leaves, computed, key, scanned = 1, tree.num_nodes, "us_tree", MISSING
        if way == "Unrolled":
            leaves, key = len(tree.levels[-1]), "us_unrolled"
            computed = leaves * int(depth)
            if row and f"{key}_multi_step" in row:
                key = f"{key}_multi_step"
            scanned = figure(_ms(row, "us_unrolled_chunk_scan"))
        used.append(row)
        ours = str(leaves), tokens, str(computed), runtime, figure(_ms(row, key)), scanned
        lines.append((depth, way, states, *ours))
    return lines, used


def snakes_1(folder: Path, paper: Sequence[Cells]) -> tuple[list[Cells], Rows]:
    ways = {
        "SSU": ("us_mamba_ssm_updates", "us_updates"), "chunk scan": ("us_chunk_scan",),
        "multi-step": ("us_multi_step",), "tree scan with conv and replay": ("us_fused",),
    }
    found = {
        (row.get("batch", 1), row["num_nodes"]): row
        for row in bench_rows(folder, op="mamba_tree", shape="8b")
        if row["num_nodes"] <= 16 and "us_multi_step" in row
    }
    (batch, label, *heads), *lines_of_paper = paper
    theirs = {(int(size), int(count)): cells for size, count, *cells in lines_of_paper}
    ours = (f"{name}, {OURS}" for name in ways)
    lines: list[Cells] = [(batch, label, *(f"{name}, paper" for name in heads), *ours)]
    for at in sorted(theirs.keys() | found.keys()):
        row = found.get(at, {})
        measured = (next((key for key in keys if key in row), keys[0]) for keys in ways.values())
        cells = (figure(_ms(row, key), form=".4f") for key in measured)
        lines.append((*map(str, at), *theirs.get(at, [MISSING] * 3), *cells))
    return lines, found.values()


def snakes_2(folder: Path, paper: Sequence[Cells]) -> tuple[list[Cells], Rows]:
    rows = bench_rows(folder, what="parts", shape="mamba2-2.7b")
    found: dict[tuple[Any, ...], Row] = {
        (row["scan"], row["state_copy"], row["graphs"]): row for row in rows
    }
    (scan, copy, step), *lines_of_paper = paper
    fields = {
        "step": "ms_step", "forward": "ms_forward", "verification": "ms_verification",
        "copy": "ms_state_copy",
    }
    ours = (f"{name}, {OURS}" for name in (*fields, "step without graphs"))
    lines: list[Cells] = [(scan, copy, f"{step}, paper", *ours)]
    for *way, ms in lines_of_paper:
        captured, launched = (found.get((*way, graphs), {}) for graphs in (True, False))
        numbers = (*(captured.get(key) for key in fields.values()), launched.get("ms_step"))
        lines.append((*way, ms, *map(figure, numbers)))
    return lines, rows


def snakes_3(folder: Path, paper: Sequence[Cells]) -> tuple[list[Cells], Rows]:
    """Build the table by shape and number of speculations, from trees that are one or several
    drafts."""
    found: dict[tuple[str, int], dict[int, Row]] = {}
    for row in bench_rows(folder, what="joint", num_rows=1):
        drafts = PNG.fullmatch(row["tree"])
        if drafts and row["shape"] in ("8b", "mamba2-2.7b"):
            length, count, of_one = drafts.groups()
            found.setdefault((row["shape"], int(length or of_one)), {})[int(count or 1)] = row
    lines = [paper[0], *of_paper(paper[1:])]
    for (shape, length), rows in sorted(found.items()):
        cells = [
            figure(_ms(rows.get(count), f"us_{way}"))
            for count in (1, 2, 3, 4) for way in ("replay", "joint")
        ]
        lines.append((f"{length} ({shape}), {OURS}", *cells))
    used = [row for rows in found.values() for row in rows.values()]
    for shape in sorted({shape for shape, _ in found}):
        plain = [_ms(row, "us_plain") for row in used if row["shape"] == shape]
        times = [ms for ms in plain if ms is not None]
        if times:
            median = figure(statistics.median(times))
            lines.append((f"0 ({shape}), {OURS}", *[median] * 8))
    return lines, used


def snakes_4(folder: Path, paper: Sequence[Cells]) -> tuple[list[Cells], Rows]:
    rows = {
        row["shape"]: row
        for row in bench_rows(folder, what="joint", num_rows=1, tree="png-6-1")
        if row["shape"] in SNAKES_4_SHAPES
    }
    lines: list[Cells] = [paper[0]]
    for name, told in (("Speed", "Speed"), ("Memory", "Memory")):
        field, measured = MEASURES[name]
        lines += of_paper(cells for cells in paper if cells[0] == name)
        some, none = [], []
        for row in map(rows.get, SNAKES_4_SHAPES):
            plain, *both = (measured(row, f"{field}_{way}") for way in ("plain", "replay", "joint"))
            for mine in both:
                some.append(f"{mine:.2f} ({mine / plain:.2f}×)" if mine and plain else MISSING)
                none.append(figure(plain))
        lines += [(f"{told}, {OURS}", "6", *some), (f"{told}, {OURS}", "0", *none)]
    if any("peak_bytes_joint_rows" in row for row in rows.values()):
        cells = []
        for row in map(rows.get, SNAKES_4_SHAPES):
            plain = _gb(row, "peak_bytes_plain")
            for way in ("replay", "joint"):
                peak = (row or {}).get(f"peak_bytes_{way}_rows")
                over = peak and plain and f"{peak / 1e9:.2f} ({peak / 1e9 / plain:.2f}×)"
                cells.append(over or MISSING)
        lines.append((f"Memory, drafts as rows, {OURS}", "6", *cells))
    return lines, rows.values()


def snakes_figure_4(folder: Path, paper: Sequence[Cells]) -> tuple[list[Cells], Rows]:
    rows = bench_rows(folder, what="serve")
    titles = {"plain": "plain", "tree": "tree", "modes": "chosen"}
    speedups = ("tree", "modes")
    lines: list[Cells] = [(
        "batch size", "τ", *(f"tokens/s, {title}" for title in titles.values()),
        *(titles[way] for way in speedups),
    )]
    for row in sorted(rows, key=lambda row: (row["tau"], row["num_rows"])):
        lines.append((
            str(row["num_rows"]), f"{row['tau']:g}",
            *(f"{row[f'tokens_per_second_{way}']:.0f}" for way in titles),
            *(figure(row[f"speedup_{way}"], unit="×") for way in speedups),
        ))
    return lines, rows


def drafters_figure_1(folder: Path, paper: Sequence[Cells]) -> tuple[list[Cells], Rows]:
    rows = bench_rows(folder, what="draft_lengths")
    contexts = sorted({row["context"] for row in rows})
    lines: list[Cells] = [("", "", *(f"{context / 1024:g}k" for context in contexts))]
    lengths: dict[tuple[Any, ...], dict[int, Row]] = {}
    for row in rows:
        drafted = row["shape"], row["drafter"], row["level_nodes"], row["tree"]
        lengths.setdefault(drafted, {})[row["context"]] = row
    for (_, drafter, nodes, _), found in lengths.items():
        called = {OWN: "Mamba-2", ATTENTION: "Transformer", EAGLE: "EAGLE-3"}.get(drafter, drafter)
        name = f"{called}, {nodes} a level, {OURS}"
        for what, key, unit, form in (
            ("µs a level", "us_level", 1, ".0f"), ("cache, MiB", "cache_bytes", 2**20, ".2f"),
            ("prefill, ms", "us_read", 1000, ".2f"), ("peak, MiB", "peak_bytes", 2**20, ".0f"),
        ):
            if not any(key in row for row in found.values()):  # rows of an older command
                continue
            values = (found[each].get(key) if each in found else None for each in contexts)
            numbers = (each["median"] if isinstance(each, dict) else each for each in values)
            cells = (None if number is None else number / unit for number in numbers)
            lines.append((name, what, *(figure(cell, form=form) for cell in cells)))
    return lines, rows


def dyspec_5(folder: Path, paper: Sequence[Cells]) -> tuple[list[Cells], Rows]:
    """Count the blocks of a tree's mask that are not empty, by node order, and time attention."""
    rows = {(row["num_nodes"], row["order"]): row for row in bench_rows(folder, what="orders")}
    head, *lines_of_paper = paper
    counted = (f"{name}, {OURS}" for name in ORDERS)
    timed = (f"{name}, {OURS}, µs" for name in ORDERS)
    by_masks = {
        key: name
        for key, name in (("manual", "manual attention"), ("xformers", "PyTorch's xFormers kernel"))
        if any(f"us_{key}" in row for row in rows.values())
    }
    masked = (f"{name}, {OURS}, µs" for name in by_masks.values())
    lines: list[Cells] = [(*head, *counted, *timed, f"every block, {OURS}, µs", *masked)]
    for size, *cells in lines_of_paper if rows else []:
        trees = [random_tree(int(size), seed) for seed in range(ORDER_TREES)]
        blocks = (
            statistics.mean(num_blocks(order(tree), BLOCK) for tree in trees)
            for order in ORDERS.values()
        )
        found = [rows.get((int(size), name)) for name in ORDERS]
        times = [_us(row, "us_sparse") for row in found]
        times += [_us(found[0], f"us_{key}") for key in ("dense", *by_masks)]
        lines.append((
            size, *cells, *(f"{each:.1f}" for each in blocks),
            *(figure(each, form=".1f") for each in times),
        ))
    return lines, rows.values()


def _us(row: Row | None, key: str) -> float | None:
    return row[key]["median"] if row and key in row else None


def _ms(row: Row | None, key: str) -> float | None:
    us = _us(row, key)
    return None if us is None else us / 1000


def _gb(row: Row | None, key: str) -> float | None:
    """Return the GB of a row's measured peak; in older rows, of weights and the cache."""
    if row is None:
        return None
    counted: int = row["weight_bytes"] + row[key.replace("peak", "cache")]
    return row.get(key, counted) / 1e9


MEASURES = {"Speed": ("us", _ms), "Memory": ("peak_bytes", _gb)}  # by the papers' names
