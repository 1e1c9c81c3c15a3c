"""Make DySpec's Table 5: non-empty blocks of a tree's mask by node order, and attention's times."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from stree_pipelines.lab.papers import numbers as theirs
from stree_pipelines.lab.papers.node_order import num_blocks
from stree_pipelines.lab.papers.numbers import Cells
from stree_pipelines.lab.papers.order_bench import BLOCK, ORDERS, random_tree
from stree_pipelines.lab.papers.tables import OURS, Made, bench_rows, made, require_rows
from stree_pipelines.reports.tables.tables import MISSING

NUM_TREES = 10


def dyspec_5(folder: Path) -> Made:
    """Make the table; blocks are counted, times come from `bench_decode.py --what "[orders]"`."""
    rows = {(row["num_nodes"], row["order"]): row for row in bench_rows(folder, what="orders")}
    require_rows(rows, "orders", folder)
    head, *paper = theirs.DYSPEC_5
    counted = (f"{name}, {OURS}" for name in ORDERS)
    timed = (f"{name}, {OURS}, µs" for name in ORDERS)
    lines: list[Cells] = [(*head, *counted, *timed, f"every block, {OURS}, µs")]
    for size, *cells in paper:
        trees = [random_tree(int(size), seed) for seed in range(NUM_TREES)]
        blocks = (mean(num_blocks(order(t), BLOCK) for t in trees) for order in ORDERS.values())
        found = [rows.get((int(size), name), {}) for name in ORDERS]
        times = (_us(row, "us_sparse") for row in found)
        lines.append((
            size, *cells, *(f"{each:.1f}" for each in blocks), *times, _us(found[0], "us_dense")
        ))  # fmt: skip
    title = "DySpec, Table 5: blocks of 32 × 32 that are not empty, and attention of a layer"
    return made(title, lines, rows.values())


def _us(row: dict[str, Any], way: str) -> str:
    return f"{row[way]['median']:.1f}" if way in row else MISSING
