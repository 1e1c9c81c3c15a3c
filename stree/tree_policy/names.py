"""Names of trees and tree policies, as `stree.load` and the commands take them."""

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
# Forms of names that `as_tree_policy` takes
TREE_POLICIES = (
    f'{FORMS}; of several, each step\'s by measured cost ("A or B") or by a bandit '
    '("bandit A or B")'
)


def choice_of(name: str) -> tuple[type[AdaptiveTrees], list[str]] | None:
    """Return the tree policy of a name, and the names of its trees.

    "A or B" is `AdaptiveTrees`, "bandit A or B" is `BanditTrees`; None for one tree, or a file.
    """
    policy = BanditTrees if name.startswith(BANDIT) else AdaptiveTrees
    if (policy is AdaptiveTrees and OR not in name) or os.path.isfile(name):
        return None
    return policy, [each.strip() for each in name.removeprefix(BANDIT).split(OR)]


def require_policy_of(decoder: TokenTree | AdaptiveTrees, asked: TokenTree | AdaptiveTrees) -> None:
    """Raise `UsageError` if a request's tree does not fit a decoder with dynamic trees.

    In a step all rows have the same dynamic tree, or none has one. So no request of a decoder with
    dynamic trees may name a tree, and no request may bring a dynamic tree of its own.
    """
    others = trees_of(decoder)
    grow = any(isinstance(each, BeamTree) for each in (*trees_of(asked), *others))
    if grow and asked != decoder:
        raise UsageError(
            f"a request asks for {asked}, the decoder was made with "
            f"{', '.join(each.name for each in others)}: dynamic trees are the decoder's, the "
            "same for all its requests"
        )


def refuse_unknown(caller: str, unknown: Mapping[str, object]) -> None:
    """Raise `UsageError` for the argument `growth`, and `TypeError` for any other unknown one."""
    if "growth" in unknown:
        raise UsageError(f"{GROWTH_IS_TREE}: {caller}(…, tree={unknown['growth']!r})")
    for name in unknown:
        raise TypeError(f"{caller}() got an unexpected keyword argument {name!r}")


def as_tree_policy(
    tree: TokenTree | AdaptiveTrees | str | Path, find: Callable[[str], str] = str
) -> TokenTree | AdaptiveTrees:
    """Return a tree or tree policy as it is, or the one that a name or a YAML file describes.

    find maps a name to the path of its file. Raises `UsageError` for anything else.
    """
    if isinstance(tree, AdaptiveTrees):
        return tree
    choice = choice_of(tree) if isinstance(tree, str) else None
    if choice is not None:
        policy, names = choice
        return policy([as_tree(find(name)) for name in names])
    return as_tree(find(tree) if isinstance(tree, str) else tree)
