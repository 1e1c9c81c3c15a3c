"""Simulate steps of adaptive trees with known rates of acceptance and costs."""

import random

from toys import right_now_and_then, tiny_model

from stree import BatchDecoder, TokenTree
from stree.tree_policy.adaptive import PLAIN, AdaptiveTrees
from stree.tree_policy.step_times import StepTimes
from stree.trees.token_tree import balanced

CHAIN, WIDE = TokenTree.chain(2), balanced([3, 2])


def simulated(
    policy: AdaptiveTrees, num_rows: int, steps: int, rates: list[float], seed: int = 0,
    takes: StepTimes | None = None,
):
    """Steps whose children of rank r are accepted with rates[r]; what each was, and all tokens.

    The policy is told what steps take if `takes` says it, give or take a tenth.
    """
    rng, used, tokens = random.Random(seed), [], 0
    for _ in range(steps):
        tree = policy.choose(num_rows)
        used.append(tree)
        is_observed = policy.observes(num_rows)
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
            if is_observed:
                policy.learn_paths(tree, [tree.path_to(node)])
            tokens += tree.depths[node] + 1
        if takes is not None and is_observed:
            policy.learn_step(num_rows, tree, takes.of(num_rows, tree) * rng.uniform(0.95, 1.05))
    return used, tokens


def decoder_of(policy: AdaptiveTrees, num_rows: int = 1, seed: int = 1, **options) -> BatchDecoder:
    """Decoder of a tiny target, and of a drafter that is right now and then."""
    target, options = tiny_model(seed), {"max_length": 64, **options}
    return BatchDecoder(target, right_now_and_then(target), policy, num_rows=num_rows, **options)


def costs(plain: float, chain: float, wide: float, rows: int = 1) -> StepTimes:
    seconds = {(rows, PLAIN): plain, (rows, CHAIN): chain, (rows, WIDE): wide}
    return StepTimes(seconds, catch_up=plain / 2)
