"""A bandit over shapes: UCB, by what each shape's own steps were worth."""

from __future__ import annotations

import math
import random

import pytest
from simulated_trees import decoder_of
from toys import tiny_model

from stree import BanditTrees, BatchDecoder, Decoder, GenerationConfig, Request, TokenTree
from stree.common.errors import UsageError
from stree.tree_policy.adaptive import PLAIN
from stree.tree_policy.bandit import UCBTrees
from stree.tree_policy.names import as_tree_policy
from stree.tree_policy.step_times import StepTimes
from stree.trees.token_tree import BeamTree, expanded

TREES = [expanded(each) for each in ((3, 3, 2, 1), (3, 2, 2, 1, 1), (2, 2, 2, 1, 1, 1))]
COSTS = StepTimes({(1, PLAIN): 1.0} | {(1, tree): 1 + 0.1 * tree.max_depth for tree in TREES})


def played(bandit: BanditTrees, accepted, rounds: int, seed: int = 0) -> list[TokenTree]:
    """Return the choices where steps of a tree accept as many drafts as accepted(tree, rng)."""
    rng, chosen = random.Random(seed), []
    for _ in range(rounds):
        tree = bandit.choose(1)
        bandit.learn_paths(tree, [range(1 + accepted(tree, rng))])
        chosen.append(tree)
    return chosen


def require_choices(policy, exploration, reward_of, unit_of=lambda tree: 1.0) -> None:
    """Require the trees of the bound of Eq. 1 by hand, in which rewards count in a tree's unit."""
    units = [unit_of(tree) for tree in TREES]
    counts, rewards = [0, 0, 0], [0.0, 0.0, 0.0]
    for step, number in enumerate([2, 0, 3, 1, 1, 4, 2, 2, 0, 5]):
        wanted = step
        if step >= 3:
            bounds = [
                reward / count + exploration * unit * math.sqrt(2 * math.log(step) / count)
                for reward, count, unit in zip(rewards, counts, units, strict=True)
            ]
            wanted = bounds.index(max(bounds))
        tree = policy.choose(1)
        assert tree == TREES[wanted]
        policy.learn_paths(tree, [range(1 + number)])
        counts[wanted] += 1
        rewards[wanted] += reward_of(tree, 1 + number)


def test_it_takes_the_tree_of_the_papers_equations():
    """Rewards by hand are −(T_tree / T_plain) / N; the bound of Eq. 1 is in parts of that cost."""

    def cost(tree):
        return 1 + 0.1 * tree.max_depth

    bandit = BanditTrees(TREES, COSTS, exploration=0.3)
    require_choices(bandit, 0.3, lambda tree, tokens: -cost(tree) / tokens, cost)


@pytest.mark.parametrize("share", [None, 0.25])
def test_equations_1_and_2_as_they_are_written(share):
    """Rewards by hand are −(1/N + λ·γ/N), the bound is in their unit; an answer's end begins anew.

    λ is given, or what the deepest tree's step takes beyond a plain one: 0.1 a level.
    """
    bandit = UCBTrees(TREES, COSTS, exploration=0.7, draft_share=share)
    for _ in range(2):
        require_choices(
            bandit, 0.7, lambda tree, tokens: -(1 + (share or 0.1) * tree.max_depth) / tokens
        )
        bandit.learn_answer()
    with pytest.raises(UsageError, match="draft_share is -1"):
        UCBTrees(TREES, COSTS, draft_share=-1)


def test_the_best_is_taken_nearly_always_in_the_end_and_the_others_now_and_then():
    best = TREES[1]
    chosen = played(
        BanditTrees(TREES, COSTS), lambda tree, rng: (rng.random() < 0.5) + (tree == best), 3000
    )
    late = chosen[1500:]
    assert late.count(best) > 0.95 * len(late)
    assert set(chosen[100:]) == set(TREES)


@pytest.mark.parametrize("cost", [1.5, 3.0])
def test_a_bad_first_step_is_no_end(cost):
    costs = StepTimes({(1, PLAIN): 1.0} | {(1, tree): cost for tree in TREES[:2]})
    bandit = BanditTrees(TREES[:2], costs)
    played(bandit, lambda tree, rng: 0 if tree == TREES[0] else 3, 2)
    assert TREES[0] in played(bandit, lambda tree, rng: 4 if tree == TREES[0] else 3, 100)


def test_what_rounds_have_accepted_counts_at_the_costs_of_now():
    """The best tree loses the next round when it takes four times as long from now on."""
    deepest = TREES[2]
    bandit = BanditTrees(TREES, COSTS)
    chosen = played(bandit, lambda tree, rng: 5 if tree == deepest else 1, 300)
    assert chosen[200:].count(deepest) > 90
    bandit.costs = StepTimes({**COSTS.seconds, (1, deepest): 4 * COSTS.of(1, deepest)})
    assert deepest not in played(bandit, lambda tree, rng: 1, 10)


def test_a_history_decides_alone():
    def accepted(tree, rng):
        return rng.randrange(tree.max_depth + 1)

    first, second = (played(BanditTrees(TREES, COSTS), accepted, 300) for _ in range(2))
    assert first == second != played(BanditTrees(TREES, COSTS), accepted, 300, seed=1)


@pytest.mark.quick(1)
@pytest.mark.parametrize("graphs", [pytest.param(False, marks=pytest.mark.long), True])
def test_whatever_it_takes_tokens_are_plain_decodings(graphs, request):
    """Trees may be dynamic; with graphs, a step is chosen before the last one is known."""
    if graphs:
        request.getfixturevalue("captured_on_cpu")
    trees = [TokenTree.chain(2), BeamTree.of(2, 3, 6), TokenTree.load("dyspec-2-3-6")]
    bandit = BanditTrees(trees)
    decoder = decoder_of(bandit, 2)
    decoder.measure_step_times(num_steps=2)
    seen, choose = set(), bandit.choose
    bandit.choose = lambda num_rows: seen.add(tree := choose(num_rows)) or tree
    served = [Request([1, 2], GenerationConfig(20, t, seed=3)) for t in (0.0, 1.0, 0.0)]
    plain = BatchDecoder(tiny_model(1), num_rows=2, max_length=64).generate(served)
    assert [e.tokens for e in decoder.generate(served)] == [each.tokens for each in plain]
    assert seen == set(trees)


def test_the_papers_bandit_has_a_name():
    policy = as_tree_policy("ucb chain-2 or chain-3")
    assert isinstance(policy, UCBTrees) and policy.name == "ucb chain-2 or chain-3"


def test_one_tree_is_nothing_to_choose_among():
    with pytest.raises(UsageError, match="two trees at least"):
        BanditTrees(["chain-2", PLAIN])


def test_trees_that_requests_name_themselves_teach_it_too():
    bandit = BanditTrees([TokenTree.chain(2), TokenTree.chain(3)])
    decoder = decoder_of(bandit)
    decoder.measure_step_times(num_steps=2)
    request = Request([1, 2], GenerationConfig(12), TokenTree.chain(2))
    plain = Decoder(tiny_model(1)).generate([1, 2], GenerationConfig(12))
    assert decoder.generate([request])[0].tokens == plain.tokens
