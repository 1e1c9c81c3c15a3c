"""DySpec's Table 5, but for times: blocks of a tree's mask that are not empty, by node order."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

from stree.node_order import num_blocks
from stree_pipelines.benches.orders import BLOCK, ORDERS, random_tree
from stree_pipelines.reports import paper_numbers as theirs
from stree_pipelines.reports.paper_numbers import Cells
from stree_pipelines.reports.paper_tables import OURS, Made, made

NUM_TREES = 10


def dyspec_5(folder: Path) -> Made:
    """Needs no rows; the folder is not read."""
    head, *paper = theirs.DYSPEC_5
    lines: list[Cells] = [(*head, *(f"{name}, {OURS}" for name in ORDERS))]
    for size, *cells in paper:
        trees = [random_tree(int(size), seed) for seed in range(NUM_TREES)]
        blocks = (mean(num_blocks(order(t), BLOCK) for t in trees) for order in ORDERS.values())
        lines.append((size, *cells, *(f"{each:.1f}" for each in blocks)))
    table = made("DySpec, Table 5: blocks of 32 × 32 that are not empty", lines, ())
    return Made(table.table, (f"the mean of {NUM_TREES} random trees, counted",))
