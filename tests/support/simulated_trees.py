"""Simulate steps of adaptive trees with known rates of acceptance and costs."""

import random

from stree import TokenTree
from stree.tree_policy.adaptive import PLAIN, AdaptiveTrees
from stree.tree_policy.step_times import StepTimes
from stree.trees.token_tree import balanced

CHAIN, WIDE = TokenTree.chain(2), balanced([3, 2])


def simulated(
    adaptive_trees: AdaptiveTrees, num_rows: int, steps: int, rates: list[float], seed: int = 0
):
    """Steps whose children of rank r are accepted with rates[r]; what each was, and all tokens."""
    rng, used, tokens = random.Random(seed), [], 0
    for _ in range(steps):
        tree = adaptive_trees.choose(num_rows)
        used.append(tree)
        for _ in range(num_rows):
            node, wanted = 0, None
            while tree.children[node]:
                draw = rng.random()
                wanted = None
                for rank, child in enumerate(tree.children[node]):
                    draw -= rates[rank]
                    if draw < 0:
                        wanted = child
                        break
                if wanted is None:
                    break
                node = wanted
            adaptive_trees.learn_path(tree, tree.path_to(node))
            tokens += tree.depths[node] + 1
    return used, tokens


def costs(plain: float, chain: float, wide: float, rows: int = 1) -> StepTimes:
    seconds = {(rows, PLAIN): plain, (rows, CHAIN): chain, (rows, WIDE): wide}
    return StepTimes(seconds, catch_up=plain / 2)
