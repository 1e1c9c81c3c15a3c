"""Draws the documentation's figures: python docs/figures/draw.py"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from stree.trees.token_tree import TokenTree

HERE = Path(__file__).parent
INK, GREY, KEPT, LOST, STATE = "#1f2328", "#8b949e", "#2da44e", "#b9c0c8", "#2f81d6"
WORDS = (
    "The", "cat", "dog", "old", "sat", "is", "barked", "on", "down", "asleep", "the", "a", "top",
)
ACCEPTED = (0, 1, 4, 7, 10)  # of the paper's tree


def main() -> None:
    style = {
        "svg.hashsalt": "stree", "font.size": 10, "text.color": INK, "font.family": "sans-serif"
    }
    with mpl.rc_context(style):
        for name, figure in (
            ("step", one_step()), ("tree_scan", tree_scan()), ("replay", replay()),
        ):
            figure.savefig(HERE / f"{name}.svg", metadata={"Date": None}, facecolor="white")


def one_step() -> Figure:
    """A tree of drafts, verified in one call of the target."""
    figure, axes = _canvas(8.0, 3.5)
    tree = TokenTree.paper()
    at = _places(tree, left=2.0, top=3.05, across=1.35, down=0.75)
    for node, parent in enumerate(tree.parents):
        if parent >= 0:
            kept = node in ACCEPTED and parent in ACCEPTED
            _line(axes, at[parent], at[node], KEPT if kept else LOST, 2.2 if kept else 1.2)
    for node, place in at.items():
        colour = KEPT if node in ACCEPTED else LOST
        _box(axes, place, WORDS[node], colour, filled=node in ACCEPTED)
    axes.text(2.6, 3.05, "the last certain token", va="center", ha="left", color=GREY)
    axes.text(0.1, 2.3, "a small model drafts\n12 ways to go on", va="center", color=GREY)
    axes.text(6.9, 1.9, "the target reads\nall 13 nodes\nin one call", va="center", ha="left")
    axes.text(6.9, 0.8, "accepts 4 drafts,\nadds 1 token:", va="center", ha="left", color=KEPT)
    axes.text(6.9, 0.25, "τ = 5", va="center", ha="left", color=KEPT, fontsize=13, weight="bold")
    axes.set(xlim=(0, 8.6), ylim=(-0.25, 3.5))
    return figure


def tree_scan() -> Figure:
    """One state, read once, for all nodes; against a state per node."""
    figure, axes = _canvas(9.4, 2.9)
    tree = TokenTree((-1, 0, 0, 1, 1, 2), "small")
    for left, title in ((0.2, "unrolled: a state per node"), (4.4, "tree scan: one state")):
        at = _places(tree, left + 0.7, top=1.95, across=0.95, down=0.75)
        axes.text(left, 2.7, title, weight="bold", va="center")
        for node, parent in enumerate(tree.parents):
            if parent >= 0:
                _line(axes, at[parent], at[node], LOST, 1.2)
        for x, y in at.values():
            _box(axes, (x, y), "yₙ", GREY, width=0.36)
            if left < 4:
                _state(axes, (x + 0.36, y + 0.02))
        if left > 4:
            _state(axes, (left + 0.1, 1.95), wide=True)
            axes.text(left - 0.1, 1.45, "h, read once", color=STATE, va="center", fontsize=9)
            axes.text(7.3, 1.95, "yₙ = Cₙ · (what is left of h at n)\n"
                      "      + what n's ancestors add", va="center", fontsize=9)
        else:
            axes.text(left, 0.02, "6 states written and read", color=STATE, fontsize=9)
    axes.set(xlim=(0, 10.1), ylim=(-0.15, 2.95))
    return figure


def replay() -> Figure:
    """What a call keeps, and what the next one does with it."""
    figure, axes = _canvas(8.0, 2.6)
    steps = [
        (0.9, "call k", "verifies its tree from h"),
        (3.6, "accept", "a path of the tree"),
        (6.3, "call k + 1", "replays the path into h,\nverifies the next tree"),
    ]
    for x, title, text in steps:
        _box(axes, (x + 0.35, 2.0), title, INK, width=1.5)
        axes.text(x + 0.35, 1.35, text, ha="center", va="center", fontsize=9)
    for x in (2.1, 4.8):
        _arrow(axes, (x, 2.0), (x + 0.95, 2.0), INK)
    _state(axes, (1.1, 0.55), wide=True)
    axes.text(1.5, 0.55, "h and each node's x, B, dt", va="center", fontsize=9)
    _arrow(axes, (3.55, 0.55), (5.7, 0.55), STATE)
    axes.text(
        4.6, 0.75, "kept: under 2 % of a state per node", ha="center", fontsize=9, color=STATE
    )
    _state(axes, (6.0, 0.55), wide=True)
    axes.text(6.4, 0.55, "h of the accepted path", va="center", fontsize=9)
    axes.text(4.6, 0.05, "no state is copied, none is thrown away", ha="center", color=GREY)
    axes.set(xlim=(0, 8.6), ylim=(-0.2, 2.5))
    return figure


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    return figure, axes


def _places(
    tree: TokenTree, left: float, top: float, across: float, down: float
) -> dict[int, tuple[float, float]]:
    """Each node's centre: a level a line, a parent over the middle of its leaves."""
    leaves = iter(range(tree.num_nodes))
    column: dict[int, float] = {}

    def place(node: int) -> float:
        children = tree.children[node]
        places = [place(child) for child in children]
        column[node] = sum(places) / len(places) if places else float(next(leaves))
        return column[node]

    place(0)
    squeeze = 4.4 / max(column.values())
    width = min(across, squeeze)
    return {
        node: (left + column[node] * width, top - tree.depths[node] * down)
        for node in range(tree.num_nodes)
    }


def _box(
    axes: Axes, at: tuple[float, float], text: str, colour: str, *, filled: bool = False,
    width: float = 0.62,
) -> None:
    x, y = at
    axes.add_patch(FancyBboxPatch(
        (x - width / 2, y - 0.15), width, 0.3, boxstyle="round,pad=0.02,rounding_size=0.08",
        facecolor=colour if filled else "white", edgecolor=colour, linewidth=1.3, zorder=2,
    ))
    ink = "white" if filled else INK
    axes.text(x, y, text, ha="center", va="center", fontsize=9, color=ink, zorder=3)


def _state(axes: Axes, at: tuple[float, float], *, wide: bool = False) -> None:
    """A square that stands for a layer's state."""
    side = 0.42 if wide else 0.2
    x, y = at
    axes.add_patch(FancyBboxPatch(
        (x - side / 2, y - side / 2), side, side, boxstyle="square,pad=0",
        facecolor=STATE, edgecolor="white", alpha=0.85, zorder=4,
    ))


def _line(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str, width: float
) -> None:
    axes.plot([start[0], end[0]], [start[1], end[1]], color=colour, linewidth=width, zorder=1)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="->", mutation_scale=12, color=colour))


if __name__ == "__main__":
    main()
