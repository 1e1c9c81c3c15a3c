"""Trees and choices among several, by the names that `stree.load` and the commands take."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from stree.common.errors import UsageError
from stree.tree_policy.adaptive import AdaptiveTrees, trees_of
from stree.tree_policy.bandit import BanditTrees
from stree.trees.token_tree import FORMS, BeamTree, TokenTree, as_tree

GROWTH_IS_TREE = "growth is called tree"  # to those who have the word from a paper
OR, BANDIT = " or ", "bandit "
# Of what `as_tree_policy` takes
TREE_POLICIES = (
    f'{FORMS}; of several, each step\'s by measured cost ("A or B") or by a bandit '
    '("bandit A or B")'
)


def choice_of(name: str) -> tuple[type[AdaptiveTrees], list[str]] | None:
    """Who chooses in each step, and among which names: `AdaptiveTrees` for "A or B", `BanditTrees`
    for "bandit A or B". None for what names one tree, or a file."""
    policy = BanditTrees if name.startswith(BANDIT) else AdaptiveTrees
    if (policy is AdaptiveTrees and OR not in name) or os.path.isfile(name):
        return None
    return policy, [each.strip() for each in name.removeprefix(BANDIT).split(OR)]


def require_policy_of(decoder: TokenTree | AdaptiveTrees, asked: TokenTree | AdaptiveTrees) -> None:
    """Raises `UsageError` for a request with a tree of its own where trees grow, or with one that
    grows where they do not: in a step all rows' trees grow alike, or none does."""
    others = trees_of(decoder)
    grow = any(isinstance(each, BeamTree) for each in (*trees_of(asked), *others))
    if grow and asked != decoder:
        raise UsageError(
            f"a request asks for {asked}, the decoder was made with "
            f"{', '.join(each.name for each in others)}: trees that grow are the decoder's, the "
            "same for all its requests"
        )


def refuse_unknown(caller: str, unknown: Mapping[str, object]) -> None:
    """Raises `UsageError` for `growth`, and what Python raises for any other argument that a
    function does not have."""
    if "growth" in unknown:
        raise UsageError(f"{GROWTH_IS_TREE}: {caller}(…, tree={unknown['growth']!r})")
    for name in unknown:
        raise TypeError(f"{caller}() got an unexpected keyword argument {name!r}")


def as_tree_policy(
    tree: TokenTree | AdaptiveTrees | str | Path, find: Callable[[str], str] = str
) -> TokenTree | AdaptiveTrees:
    """A tree or a choice, or the one of a name or file: the one reading of names, for all who take
    them. `find` says where a file is that a name may be of. Raises `UsageError` for anything else.
    """
    if isinstance(tree, AdaptiveTrees):
        return tree
    choice = choice_of(tree) if isinstance(tree, str) else None
    if choice is not None:
        policy, names = choice
        return policy([as_tree(find(name)) for name in names])
    return as_tree(find(tree) if isinstance(tree, str) else tree)
