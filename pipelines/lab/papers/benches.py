"""Make the papers' tables and figures from rows of `bench_decode.py` and `bench_kernels.py`.

The rows are times and bytes of random weights.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stree.trees.token_tree import balanced
from stree_pipelines.evaluation.plan import AUTOREGRESSIVE
from stree_pipelines.lab.benches.models import ATTENTION, OWN
from stree_pipelines.lab.papers import numbers as theirs
from stree_pipelines.lab.papers.node_order import num_blocks
from stree_pipelines.lab.papers.numbers import Cells
from stree_pipelines.lab.papers.order_bench import BLOCK, ORDERS, random_tree
from stree_pipelines.lab.papers.tables import (
    LABELS,
    OURS,
    Made,
    bench_rows,
    made,
    require_rows,
)
from stree_pipelines.reports.tables.tables import MISSING, figure

CHAIN_NODES, TREE_NODES = 5, 13  # of the paper's chain and tree, roots included
STREE_1_SHAPES = {
    "mamba2-2.7b": "Mamba2-2.7B", "mamba2-7b": "7B", "mamba2-13b": "13B", "mamba2-23b": "23B",
    "8b": "MambaInLlama-8B's shape",
}
ORDER_TREES = 10  # of which blocks are counted, for each size
STREE_5_SHARES = {"8b": "50%", "8b-25": "25%", "8b-0": "0%"}
SNAKES_4_SHAPES = ("mamba2-1.3b", "mamba2-2.7b", "mamba2-7b", "mamba2-13b")
PNG = re.compile(r"png-(\d+)-(\d+)|chain-(\d+)")  # speculations and drafts; a chain is one draft


def stree_1(folder: Path) -> Made:
    rows = bench_rows(folder, what="target call", context=1024)
    used, columns = [], []
    for shape, name in STREE_1_SHAPES.items():
        calls = {row["num_nodes"]: row for row in rows if row["shape"] == shape}
        if not {CHAIN_NODES, TREE_NODES} <= calls.keys():
            continue
        tree, chain = calls[TREE_NODES], calls[CHAIN_NODES]
        used += [tree, chain]
        columns.append((
            f"{name}, {OURS}", f"{_ms(tree, 'us_step'):.2f}",
            *(f"{_ms(call, 'us_tree'):.2f} ({call['over_step']:.2f}x)" for call in (tree, chain)),
        ))
    require_rows(columns, "target call", folder)
    lines = [
        (*paper, *(column[at] for column in columns)) for at, paper in enumerate(theirs.STREE_1)
    ]
    return made("STree, Table 1: latency of a forward pass in ms", lines, used)


def stree_figure_2(folder: Path) -> Made:
    rows = bench_rows(folder, what="target call", context=1024)
    by_shape: dict[str, dict[int, Any]] = {}
    for row in rows:
        by_shape.setdefault(row["shape"], {})[row["num_nodes"]] = row
    shapes = ("8b", "mamba2-2.7b")  # the paper's
    calls = {shape: by_shape[shape] for shape in shapes if CHAIN_NODES in by_shape.get(shape, ())}
    require_rows(calls, "target call", folder)
    heads = [f"{shape}, {what}" for shape in calls for what in ("ms", "τ that it needs")]
    lines: list[Cells] = [("N", *heads)]
    for count in sorted({count for each in calls.values() for count in each}):
        cells = []
        for each in calls.values():
            call = each.get(count)
            needed = call and _ms(call, "us_tree") / _ms(each[CHAIN_NODES], "us_tree")
            cells += [figure(call and _ms(call, "us_tree")), figure(needed, unit="×")]
        lines.append((str(count), *cells))
    title = "STree, Figure 2: a call against nodes N, and the τ that it needs over N = 5"
    return made(title, lines, (row for each in calls.values() for row in each.values()))


def stree_2(folder: Path) -> Made:
    rows = {
        (row["num_beams"], row["num_steps"]): row
        for row in bench_rows(folder, what="beams", shape="mamba2-2.7b")
    }
    require_rows(rows, "beams", folder)
    measures: dict[str, tuple[str, Callable[[Any, str], float]]] = {
        "Speed": ("ms a target call", lambda row, way: _ms(row, f"us_{way}")),
        "Memory": ("GB of weights and caches", lambda row, way: _gb(row, f"cache_bytes_{way}")),
    }
    ways = ("tree", "unrolled")
    counts = (2, 3, 4, 5)
    lines: list[Cells] = [
        ("", "N", *(f"M={count}, {way}" for count in counts for way in ("STree", "FSS")))
    ]
    for name, (told, value) in measures.items():
        paper = [cells for cells in theirs.STREE_2 if cells[0] == name]
        lines += [(f"{name}, paper", *cells[1:]) for cells in paper]
        for _, steps, *_ in paper:
            found = [rows.get((count, int(steps))) for count in counts]
            cells = [figure(value(row, way) if row else None) for row in found for way in ways]
            lines.append((f"{told}, {OURS}", steps, *cells))
    return made("STree, Table 2: grown trees, packed and unrolled", lines, rows.values(), 2)


def stree_5(folder: Path) -> Made:
    rows = {
        (row["shape"], row["method"]): row
        for row in bench_rows(folder, what="graphs", temperature=1.0, num_rows=1)
        if row["shape"] in STREE_5_SHARES and row["verifier"] == "multi_step"
    }
    shares = [shape for shape in STREE_5_SHARES if (shape, AUTOREGRESSIVE) in rows]
    require_rows(len(shares) > 1, "graphs by multi_step of several shares of attention", folder)
    heads = [
        f"Mamba2-Llama3 ({share}), {what}"
        for share in STREE_5_SHARES.values() for what in ("speed", "τ", "speed-up/τ")
    ]
    lines: list[Cells] = [("Methods", *heads)]
    for (method, label), paper in zip(LABELS.items(), theirs.STREE_5, strict=True):
        assert paper[0] == label
        lines.append((f"{label}, paper", *paper[1:]))
        cells = []
        for at, shape in enumerate(STREE_5_SHARES):
            tau = paper[2 + 3 * at]
            row, plain = (rows.get((shape, each)) for each in (method, AUTOREGRESSIVE))
            if row is None or plain is None:
                cells += [MISSING] * 3
                continue
            speed, per_tau = 1e3 * float(tau) / _step_ms(row), _step_ms(plain) / _step_ms(row)
            over = "" if method == AUTOREGRESSIVE else f" ({float(tau) * per_tau:.2f}×)"
            cells += [f"{speed:.1f}{over}", tau, f"{per_tau:.2f}" if over else "-"]
        lines.append((f"{label}, {OURS}", *cells))
    title = "STree, Table 5: shares of attention layers, ours at the paper's τ"
    return made(title, lines, (row for (shape, _), row in rows.items() if shape in shares))


def stree_figure_3(folder: Path) -> Made:
    rows = {row["num_nodes"]: row for row in bench_rows(folder, what="unrolled")}
    ways = {"Packed": ("us_tree",), "Unrolled": ("us_unrolled_multi_step", "us_unrolled")}
    lines: list[Cells] = [(
        "Tree depth", "Methods", "#. of States", OURS, "Tokens Computed", OURS, "Runtime in ms",
        OURS,
    )]
    used = []
    for depth, way, *numbers in theirs.STREE_FIGURE_3:
        tree = balanced([2] * (int(depth) - 1))
        leaves = 1 if way == "Packed" else len(tree.levels[-1])
        tokens = tree.num_nodes if way == "Packed" else leaves * int(depth)
        row = rows.get(tree.num_nodes)
        key = next((key for key in ways[way] if row and key in row), None)
        if row and key:
            used.append(row)
        lines.append((
            depth, way, numbers[0], str(leaves), numbers[1], str(tokens),
            theirs.STREE_FIGURE_3_MS.get((depth, way), MISSING),
            figure(_ms(row, key) if row and key else None),
        ))
    require_rows(used, "unrolled", folder)
    return made("STree, Figure 3: full binary trees, packed and unrolled", lines, used, 2)


def snakes_1(folder: Path) -> Made:
    rows = {
        row["num_nodes"]: row for row in bench_rows(folder, op="mamba_tree") if row["shape"] == "8b"
    }
    keys = ("us_mamba_ssm_updates", "us_multi_step", "us_fused")
    ours = {count: row for count, row in rows.items() if count <= 16 and set(keys) <= row.keys()}
    require_rows(ours, "mamba_tree", folder)
    lines: list[Cells] = [(
        "seqlen", "SSU, paper", "CS, paper", "multi-step, paper", f"SSU, {OURS}",
        f"multi-step, {OURS}", f"tree scan with conv and replay, {OURS}",
    )]
    paper = {int(cells[0]): cells[1:] for cells in theirs.SNAKES_1}
    for count in sorted(paper.keys() | ours.keys()):
        row = ours.get(count)
        lines.append((
            str(count), *paper.get(count, (MISSING,) * 3),
            *(figure(_ms(row, key) if row else None, form=".4f") for key in keys),
        ))
    title = "Snakes and Ladders, Table 1, batch size 1: state update in ms"
    return made(title, lines, ours.values())


def snakes_3(folder: Path) -> Made:
    """Make the table by shape and number of speculations, from trees that are one or several
    drafts."""
    found: dict[tuple[str, int], dict[int, Any]] = {}
    for row in bench_rows(folder, what="joint", num_rows=1):
        drafts = PNG.fullmatch(row["tree"])
        if drafts and row["shape"] in ("8b", "mamba2-2.7b"):
            length, count, of_one = drafts.groups()
            found.setdefault((row["shape"], int(length or of_one)), {})[int(count or 1)] = row
    require_rows(found, "joint", folder)
    ways = {"ARP": "us_replay", "Joint": "us_joint"}
    counts = (1, 2, 3, 4)
    lines: list[Cells] = [
        ("# of spec.", *(f"# drafts = {count}, {way}" for count in counts for way in ways))
    ]
    lines += [(f"{name}, paper", *cells) for name, *cells in theirs.SNAKES_3]
    for (shape, length), rows in sorted(found.items()):
        cells = [
            figure(_ms(rows[count], key) if count in rows else None)
            for count in counts for key in ways.values()
        ]
        lines.append((f"{length} ({shape}), {OURS}", *cells))
    for shape in sorted({shape for shape, _ in found}):
        plain = [
            _ms(row, "us_plain") for (each, _), rows in found.items() if each == shape
            for row in rows.values() if "us_plain" in row
        ]
        if plain:
            lines.append((f"0 ({shape}), {OURS}", *[figure(statistics.median(plain))] * 8))
    title = "Snakes and Ladders, Table 3: ms of a step's target call"
    return made(title, lines, (row for rows in found.values() for row in rows.values()))


def snakes_4(folder: Path) -> Made:
    rows = {
        row["shape"]: row
        for row in bench_rows(folder, what="joint", num_rows=1, tree="png-6-1")
        if row["shape"] in SNAKES_4_SHAPES
    }
    require_rows(rows, "joint of png-6-1", folder)
    measures: dict[str, tuple[str, Callable[[Any, str], float]]] = {
        "Speed": ("Speed", lambda row, way: _ms(row, f"us_{way}")),
        "Memory": ("Weights and caches", lambda row, way: _gb(row, f"cache_bytes_{way}")),
    }
    sizes = [shape.removeprefix("mamba2-").upper() for shape in SNAKES_4_SHAPES]
    lines: list[Cells] = [
        ("", "# of spec.", *(f"{size}, {way}" for size in sizes for way in ("ARP", "Joint")))
    ]
    for name, (told, value) in measures.items():
        paper = [cells for cells in theirs.SNAKES_4 if cells[0] == name]
        lines += [(f"{name}, paper", *cells[1:]) for cells in paper]
        some, none = [], []
        for shape in SNAKES_4_SHAPES:
            row = rows.get(shape)
            plain = value(row, "plain") if row else None
            for way in ("replay", "joint"):
                mine = value(row, way) if row else None
                some.append(f"{mine:.2f} ({mine / plain:.2f}×)" if mine and plain else MISSING)
                none.append(figure(plain))
        lines += [(f"{told}, {OURS}", "6", *some), (f"{told}, {OURS}", "0", *none)]
    title = "Snakes and Ladders, Table 4: ms of a step's target call and GB, by size"
    return made(title, lines, rows.values(), 2)


def snakes_figure_4(folder: Path) -> Made:
    rows = bench_rows(folder, what="serve")
    require_rows(rows, "serve", folder)
    ways = ("plain", "tree", "modes")
    titles = ("plain", "tree", "chosen")
    heads = ("batch size", "τ", *(f"tokens/s, {title}" for title in titles), *titles[1:])
    lines: list[Cells] = [heads]
    for row in sorted(rows, key=lambda row: (row["tau"], row["num_rows"])):
        lines.append((
            str(row["num_rows"]), f"{row['tau']:g}",
            *(f"{row[f'tokens_per_second_{way}']:.0f}" for way in ways),
            *(figure(row[f"speedup_{way}"], unit="×") for way in ways[1:]),
        ))
    return made("Snakes and Ladders, Figure 4: throughput against batch size", lines, rows)


def _ms(row: dict[str, Any], key: str) -> float:
    value: float = row[key]["median"] / 1000
    return value


def _step_ms(row: dict[str, Any]) -> float:
    """Return the ms of a step's graphs."""
    return _ms(row, "us_target") + (_ms(row, "us_draft") if "us_draft" in row else 0.0)


def _gb(row: dict[str, Any], key: str) -> float:
    """Return the GB of a field with the weights."""
    size: int = row["weight_bytes"] + row[key]
    return size / 1e9


def drafters_figure_1(folder: Path) -> Made:
    rows = bench_rows(folder, what="draft_lengths")
    require_rows(rows, "draft_lengths", folder)
    contexts = sorted({row["context"] for row in rows})
    lines: list[Cells] = [("", "", *(f"{context / 1024:g}k" for context in contexts))]
    lengths: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    for row in rows:
        drafted = row["shape"], row["drafter"], row["level_nodes"], row["tree"]
        lengths.setdefault(drafted, {})[row["context"]] = row
    for (_, drafter, nodes, _), found in lengths.items():
        called = {OWN: "Mamba-2", ATTENTION: "Transformer"}.get(drafter, drafter)
        name = f"{called}, {nodes} a level, {OURS}"
        for what, key, unit, form in (
            ("µs a level", "us_level", 1, ".0f"), ("cache, MiB", "cache_bytes", 2**20, ".2f"),
        ):
            cells = (found[each][key] / unit if each in found else None for each in contexts)
            lines.append((name, what, *(figure(cell, form=form) for cell in cells)))
    title = "Mamba Drafters, Figure 1: drafting time and memory by context"
    return made(title, lines, rows, 2)


def dyspec_5(folder: Path) -> Made:
    """Count the blocks of a tree's mask that are not empty, by node order, and time attention."""
    rows = {(row["num_nodes"], row["order"]): row for row in bench_rows(folder, what="orders")}
    require_rows(rows, "orders", folder)
    head, *paper = theirs.DYSPEC_5
    counted = (f"{name}, {OURS}" for name in ORDERS)
    timed = (f"{name}, {OURS}, µs" for name in ORDERS)
    lines: list[Cells] = [(*head, *counted, *timed, f"every block, {OURS}, µs")]
    for size, *cells in paper:
        trees = [random_tree(int(size), seed) for seed in range(ORDER_TREES)]
        blocks = (
            statistics.mean(num_blocks(order(tree), BLOCK) for tree in trees)
            for order in ORDERS.values()
        )
        found = [rows.get((int(size), name), {}) for name in ORDERS]
        times = (_median(row, "us_sparse") for row in found)
        lines.append((
            size, *cells, *(f"{each:.1f}" for each in blocks), *times, _median(found[0], "us_dense")
        ))
    title = "DySpec, Table 5: blocks of 32 × 32 that are not empty, and attention of a layer"
    return made(title, lines, rows.values())


def _median(row: dict[str, Any], way: str) -> str:
    return f"{row[way]['median']:.1f}" if way in row else MISSING
