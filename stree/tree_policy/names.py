"""Names of trees and tree policies, as `stree.load` and the commands take them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from stree.tree_policy.adaptive import AdaptiveTrees
from stree.tree_policy.bandit import BanditTrees, UCBTrees
from stree.tree_policy.policy import FixedTree, TreePolicy
from stree.trees.token_tree import FORMS, StepTree, as_tree

OR, BANDIT, UCB = " or ", "bandit ", "ucb "
# Forms of names that `as_tree_policy` takes
TREE_POLICIES = (
    f'{FORMS}; of several, each step\'s by measured cost ("A or B") or by a bandit '
    '("bandit A or B", and "ucb A or B" with the equations of Mamba Drafters)'
)


def choice_of(name: str) -> tuple[type[TreePolicy], list[str]] | None:
    """Return the tree policy of a name, and the names of its trees.

    "A or B" is `AdaptiveTrees`, "bandit A or B" `BanditTrees`, "ucb A or B" `UCBTrees`; None for
    one tree, or a file.
    """
    bandits: dict[str, type[TreePolicy]] = {BANDIT: BanditTrees, UCB: UCBTrees}
    prefix = next((each for each in bandits if name.startswith(each)), "")
    if not (prefix or OR in name) or os.path.isfile(name):
        return None
    names = [each.strip() for each in name.removeprefix(prefix).split(OR)]
    return bandits.get(prefix, AdaptiveTrees), names


def as_tree_policy(
    tree: StepTree | TreePolicy | str | Path, find: Callable[[str], str] = str
) -> TreePolicy:
    """Return a policy; make one of a tree, a name or a YAML file.

    find maps a name to the path of its file. Raises `UsageError` for anything else.
    """
    if isinstance(tree, TreePolicy):
        return tree
    if isinstance(tree, str):
        if choice := choice_of(tree):
            policy, names = choice
            return policy([as_tree(find(name)) for name in names])
        tree = find(tree)
    return FixedTree(as_tree(tree))
