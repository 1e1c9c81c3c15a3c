"""Trees that change by what was accepted: answers keep the target's distribution.

All random choices of an answer's steps are enumerated, drafts and coins.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from growing import Telling
from lanes import quick_first
from toys import TableDrafter, TableTarget, drawing_in_turn, exact_distribution

from stree import BanditTrees, Decoder, GenerationConfig, TokenTree
from stree.tree_policy.adaptive import PLAIN, AdaptiveTrees
from stree.tree_policy.step_times import StepTimes
from stree.trees.token_tree import as_tree
from stree.verifiers import named
from stree_kernels import ops

PROMPT = [0, 1]
FIXED, GROWN = ("chain-1", "expand-2"), ("dyspec-1-1-2", "dyspec-2-1-2")


class Fickle(AdaptiveTrees):
    """Policy that takes the next tree but one after an accepted draft, else the next."""

    last = 1

    def choose(self, num_rows: int) -> TokenTree:
        return self.trees[self.last]

    def learn_paths(self, tree, paths) -> None:
        for path in paths:
            self.last = (self.last + (2 if len(path) > 1 else 1)) % len(self.trees)


class Trusting(BanditTrees):
    """Bandit that takes what was best so far: in a few steps an exploring one tries its trees."""

    def __init__(self, trees, costs) -> None:
        super().__init__(trees, costs, exploration=0)


class Drafting(TableDrafter):
    """Drafter of trees of one shape whose draws are enumerated."""

    def __init__(self, table, choose) -> None:
        super().__init__(table)
        self.draw = drawing_in_turn(choose)

    def draft(self, *given):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ops, "choose_children", self.draw)
            return super().draft(*given)


class Late(Drafting):
    """Drafter that says of a step what the last one's drafts were drawn from."""

    before = None

    def draft(self, *given):
        proposal = super().draft(*given)
        now, last = proposal.logits, self.before
        self.before = now
        if now is not None and last is not None and last.shape == now.shape:
            proposal.logits = last
        return proposal


def furthest(policy, names, verifier, drafting, num_tokens: int, vocabulary: int) -> float:
    """Return the largest error of the probability of an answer of `num_tokens` tokens."""
    torch.manual_seed(3)
    target, drafter = 1.5 * torch.randn(2, *[vocabulary] * 3, dtype=torch.float64)
    generation = GenerationConfig(1 + num_tokens, temperature=1.0, seed=3)
    first = Decoder(TableTarget(target)).generate(PROMPT, generation).tokens[0]  # not enumerated
    trees, sequences = [as_tree(name) for name in names], set()
    costs = StepTimes({(1, tree): 1.0 for tree in (PLAIN, *trees)})

    def run(choose):
        judge = named(verifier)
        judge.choose = lambda probs, places: choose(probs)
        adaptive_trees, used = policy(trees, costs), []
        choosing = adaptive_trees.choose
        adaptive_trees.choose = lambda num_rows: used.append(choosing(num_rows)) or used[-1]
        decoder = Decoder(
            TableTarget(target), drafting(drafter, choose), adaptive_trees, max_length=16,
            verifier=judge,
        )
        tokens = decoder.generate(PROMPT, generation).tokens
        assert tokens[0] == first
        sequences.add(tuple(tree.name for tree in used))
        return tuple(tokens[1:])

    answers = exact_distribution(run)
    assert sum(answers.values()) == pytest.approx(1, abs=1e-12)
    chosen = {(step, name) for each in sequences for step, name in enumerate(each)}
    assert len(chosen) > max(map(len, sequences))  # or no choice depended on what was accepted
    furthest = 0.0
    for answer in itertools.product(range(vocabulary), repeat=num_tokens):
        wanted, text = 1.0, [PROMPT[-1], first]
        for token in answer:
            wanted *= float(target[text[-2], text[-1]].softmax(-1)[token])
            text.append(token)
        furthest = max(furthest, abs(answers.get(answer, 0.0) - wanted))
    return furthest


COINS = ("multi_step", "traversal")


@pytest.mark.parametrize(
    ("policy", "names", "verifier", "num_tokens", "vocabulary"),
    quick_first(
        [(Fickle, GROWN, "naive", 3, 2)],
        [
            *((Fickle, names, "naive", 3, 2) for names in (FIXED, GROWN)),
            *((Fickle, names, verifier, 3, 3) for names in (FIXED, GROWN) for verifier in COINS),
            *((policy, names, verifier, num_tokens, 2) for verifier in COINS
              for policy, names, num_tokens in ((Trusting, FIXED, 7), (BanditTrees, GROWN, 5))),
        ],
        [(Fickle, GROWN, "traversal", 3, 3), (Fickle, FIXED, "multi_step", 3, 3)],
    ),
)
def test_answers_have_the_targets_distribution(policy, names, verifier, num_tokens, vocabulary):
    drafting = Drafting if names is FIXED else Telling
    assert furthest(policy, names, verifier, drafting, num_tokens, vocabulary) <= 1e-10


@pytest.mark.parametrize("verifier", ["multi_step", "traversal"])
def test_drafts_judged_by_the_last_steps_are_caught(verifier):
    assert furthest(Fickle, FIXED, verifier, Late, 3, 2) > 1e-4
