"""Simulate steps of adaptive trees with known rates of acceptance and costs."""

import random
from collections import deque

from toys import right_now_and_then, tiny_model

from stree import BatchDecoder, GenerationConfig, TokenTree
from stree.engine.plan import Limits, Report, RowReport
from stree.engine.scheduler import Scheduler
from stree.engine.sequence import RunningSequence
from stree.engine.stop_rule import StopRule
from stree.generation import DecodingStats
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
        is_observed, paths = policy.observes(num_rows), []
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
            paths.append(tree.path_to(node))
            tokens += tree.depths[node] + 1
        if is_observed:
            policy.learn_paths(tree, paths)
        if takes is not None:
            policy.learn_step(num_rows, tree, takes.of(num_rows, tree) * rng.uniform(0.95, 1.05))
    return used, tokens


def scheduled(policy: AdaptiveTrees, num_rows: int, steps: int, num_in_flight: int):
    """Let a scheduler plan steps of that policy, `num_in_flight` at once; yield the trees.

    The reports are made up: each row accepts one draft, if there is one.
    """
    scheduler = Scheduler(
        Limits(num_rows, num_in_flight=num_in_flight, has_drafter=True), policy, CHAIN
    )
    for _ in range(num_rows):
        settings = GenerationConfig(10**6, ignore_eos=True)
        stop = StopRule(settings, [], None)
        scheduler.admit(RunningSequence([1, 2], settings, None, 0, stop, DecodingStats()))
    plans, number = deque(), 0
    while number < steps:
        while len(plans) < num_in_flight and (plan := scheduler.plan()) is not None:
            plans.append(plan)
        scheduler.look_ahead()
        plan = plans.popleft()
        number += bool(plan.trees)
        rows = {
            row: RowReport(1, [7, 7][: tree.num_nodes], [0, 1][: tree.num_nodes])
            for row, tree in plan.trees.items()
        }
        firsts = {row: (7, True, []) for row in plan.begins}
        yield from list(plan.trees.values())[:1]
        scheduler.take(Report(plan.number, float(number), rows, firsts))


def decoder_of(policy: AdaptiveTrees, num_rows: int = 1, seed: int = 1, **options) -> BatchDecoder:
    """Decoder of a tiny target, and of a drafter that is right now and then."""
    target, options = tiny_model(seed), {"max_length": 64, **options}
    return BatchDecoder(target, right_now_and_then(target), policy, num_rows=num_rows, **options)


def costs(plain: float, chain: float, wide: float, rows: int = 1) -> StepTimes:
    seconds = {(rows, PLAIN): plain, (rows, CHAIN): chain, (rows, WIDE): wide}
    return StepTimes(seconds, catch_up=plain / 2)
