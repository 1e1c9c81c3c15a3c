"""Trees and choices among several, by the names that `stree.load` and the commands take."""

from __future__ import annotations

from pathlib import Path

from stree.bandit import Bandit
from stree.modes import Modes
from stree.tree import TokenTree, as_tree

OR, BANDIT = " or ", "bandit "


def choice_of(name: str) -> tuple[type[Modes], list[str]] | None:
    """Who chooses in each step, and among which names: `Modes` for "A or B", `Bandit` for
    "bandit A or B". None for what names one tree, or a file."""
    policy = Bandit if name.startswith(BANDIT) else Modes
    if (policy is Modes and OR not in name) or Path(name).is_file():
        return None
    return policy, name.removeprefix(BANDIT).split(OR)


def as_growth(tree: TokenTree | Modes | str | Path) -> TokenTree | Modes:
    """A tree or a choice, or the one of a name or file. Raises `UsageError` for anything else."""
    if isinstance(tree, Modes):
        return tree
    choice = choice_of(tree) if isinstance(tree, str) else None
    if choice is None:
        return as_tree(tree)
    policy, names = choice
    return policy(names)
