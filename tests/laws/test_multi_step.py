"""Multi-step sampling keeps each row's target distribution exactly, whatever its neighbour.

All random choices of a step are enumerated instead of sampled (tests/support/enumerated.py).
"""

from __future__ import annotations

import itertools

import pytest
import torch
from enumerated import (
    CONTEXT,
    SETTINGS,
    Repetitive,
    assert_targets,
    block_distribution,
    is_caught,
    plain_distribution,
    random_case,
)
from lanes import quick_first
from planted import edited
from toys import (
    TableDrafter,
    TableTarget,
    Undrawn,
    choose_by,
    drawing_in_turn,
    exact_distribution,
    tiny_model,
)

from stree import Decoder, GenerationConfig, TokenTree
from stree.drafters import Proposal, SiblingSampling
from stree.verifiers.rejection import MultiStep, Traversal
from stree_kernels.naive.sampling import verification


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", [TableDrafter, Undrawn, Repetitive])
@pytest.mark.parametrize(
    "part", quick_first([(0,)], [(part,) for part in range(16)], [(1,)])
)
def test_output_distribution_is_the_targets(part, kind):
    accepted = 0.0
    for seed in range(part * 12, part * 12 + 12):
        target, drafter, tree, setting = random_case(seed)
        blocks = block_distribution(TableTarget(target), kind(drafter), tree, setting)
        assert_targets(blocks, target, setting, tree)
        accepted += sum(prob * (len(block) - 1) for block, prob in blocks.items())
    assert accepted > 0.3 * 12


def test_acceptance_equals_its_closed_form():
    """A chain of one draft is accepted with probability Σ min(p, q)."""
    target, drafter, _, _ = random_case(0)
    setting = SETTINGS[0]
    tables = TableTarget(target), TableDrafter(drafter)
    blocks = block_distribution(*tables, TokenTree.chain(1), setting)
    got = sum(prob for block, prob in blocks.items() if len(block) == 2)
    p, q = (plain_distribution(each[CONTEXT], setting) for each in (target, drafter))
    assert got == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-12)


def test_acceptance_of_drafts_that_were_not_drawn():
    """Siblings are accepted with the sum of their probabilities."""
    target, drafter, _, _ = random_case(2)
    tables = TableTarget(target), Undrawn(drafter)
    blocks = block_distribution(*tables, TokenTree((-1, 0, 0)), SETTINGS[0])
    got = sum(prob for block, prob in blocks.items() if len(block) == 2)
    siblings = drafter[CONTEXT].topk(2).indices
    p = plain_distribution(target[CONTEXT], SETTINGS[0])
    assert got == pytest.approx(float(p[siblings].sum()), abs=1e-12)


def enumerated_answers(tree, drafter_layers, monkeypatch):
    """Return how probable each two tokens after the first are, by models and by plain decoding.

    Two calls are enumerated, so that the second one reads what the first one committed.
    """
    config = dict(vocab_size=3, num_layers=2, d_model=16, num_heads=2, num_kv_heads=1,
                  num_ssm_heads=2, num_x_groups=1, num_b_groups=1, num_c_groups=2,
                  gated_norm_groups=2, intermediate_size=16)
    target = tiny_model(1, attn_layers=(1,), **config)
    drafter = tiny_model(2, attn_layers=drafter_layers, **config)
    generation = GenerationConfig(max_new_tokens=3, temperature=1.3, seed=3)
    prompt = [0, 1]
    first = Decoder(target).generate(prompt, generation).tokens[0]  # not enumerated
    decoder = Decoder(target, drafter, tree, max_length=16, verifier=MultiStep())
    # Graphs, if steps are graphs, are captured before choices are enumerated, which the host does
    decoder.generate(prompt, generation)

    def run(choose):
        decoder.batch.verifier.choose = lambda probs, places: choose(probs)
        choose_by(monkeypatch, drawing_in_turn(choose))
        tokens = decoder.generate(prompt, generation).tokens
        assert tokens[0] == first
        return tuple(tokens[1:])

    blocks, wanted = exact_distribution(run), {}
    with torch.no_grad():
        for tokens in itertools.product(range(3), repeat=2):
            wanted[tokens], context = 1.0, [*prompt, first]
            for token in tokens:
                logits = target(torch.tensor([context]))[0, -1]
                wanted[tokens] *= float(plain_distribution(logits, generation)[token])
                context.append(token)
    return blocks, wanted


def by_graphs(request, monkeypatch):
    """Let steps be graphs, none launched ahead: its choices would be enumerated for nothing."""
    request.getfixturevalue("captured_on_cpu")
    monkeypatch.setattr("stree.batching.runners.GraphRunner.num_in_flight", 1)


@pytest.mark.costly
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize(
    "tree, drafter_layers",
    quick_first(
        [(TokenTree.chain(2), (1,))],
        [(tree, layers) for tree in (TokenTree.chain(2), TokenTree((-1, 0, 0, 1)))
         for layers in ((), (1,))],
    ),
)
def test_output_distribution_with_real_models(tree, drafter_layers, graphs, request, monkeypatch):
    if graphs:
        by_graphs(request, monkeypatch)
    blocks, wanted = enumerated_answers(tree, drafter_layers, monkeypatch)
    assert sum(blocks.values()) == pytest.approx(1, abs=1e-12)
    for tokens, probability in wanted.items():
        assert blocks.get(tokens, 0.0) == pytest.approx(probability, abs=1e-10)


SEEDS = (4, 10, 16, 26, 39)
MISTAKES = {
    "no residual": ("torch.where(rejected, left, target)", "target"),
    "residual not renormalised": ("left / total", "left"),
    "one sibling forgotten": ("siblings.take(token, rejected & ~is_point)", "None"),
    "too generous": ("ratio.clamp(max=1.0)", "(1.02 * ratio).clamp(max=1.0)"),
    "the neighbour's drafts": ("drafts.tokens[at, child]", "drafts.tokens[0 * at + 1, child]"),
    "the neighbour's settings": (
        "distribution(logits[at, node], temperature)",
        "distribution(logits[at, node].flip(0), temperature).flip(0)",
    ),
    "the parent's distribution after an accepted draft": (
        "torch.where(accepted[:, None], distribution(logits[at, node], temperature), target)",
        "target",
    ),
}


def plant(mistake, monkeypatch):
    mistaken = edited(verification.accept_multi_step, *MISTAKES[mistake])
    monkeypatch.setattr(verification, "accept_multi_step", mistaken)


@pytest.mark.costly
@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistake_is_caught(mistake, monkeypatch):
    plant(mistake, monkeypatch)
    beside = None if mistake == "the neighbour's drafts" else TokenTree.chain(2)
    assert is_caught(SEEDS, beside=beside)


@pytest.mark.costly
@pytest.mark.parametrize(
    "mistake",
    quick_first([("too generous",)], [("no residual",), ("residual not renormalised",)]),
)
def test_planted_mistake_is_caught_in_graphs(mistake, request, monkeypatch):
    by_graphs(request, monkeypatch)
    plant(mistake, monkeypatch)
    blocks, wanted = enumerated_answers(TokenTree.chain(2), (1,), monkeypatch)
    assert max(abs(blocks.get(each, 0.0) - wanted[each]) for each in wanted) > 1e-4


class Claiming(Undrawn):
    """Drafter of the best tokens that claims a distribution from which they were not drawn."""

    drawn = TableDrafter.drawn

    def draft(self, rows, tree_batch, longest_block, bound, keep_logits) -> Proposal:
        best = super().draft(rows, tree_batch, longest_block, bound, False)
        for row in range(len(rows.active)):
            self.sequences[row].pop()  # it reads its block again
        drawn = TableDrafter.draft(self, rows, tree_batch, longest_block, bound, True)
        return Proposal(best.tokens, best.finite, drawn.logits)


class ClaimingToBeIndependent(TableDrafter):
    """Drafter that draws siblings without replacement and claims another way."""

    drawn = SiblingSampling.INDEPENDENT


@pytest.mark.parametrize("verifier", [MultiStep, Traversal])
def test_siblings_that_claim_to_be_independent_are_caught(verifier):
    """The other way round two siblings that are alike have odds of 0 / 0."""
    trees = [TokenTree((-1, 0, 0))]
    assert is_caught(range(6), verifier, trees, drafter_of=ClaimingToBeIndependent)


def test_drafts_that_claim_to_be_drawn_are_caught():
    assert is_caught([4], drafter_of=Claiming)


class Stale(TableTarget):
    """Target that forgets the last committed token, wholly or in part."""

    share = 1.0

    def after(self, context):
        right = super().after(context)
        if len(context) <= len(CONTEXT):
            return right
        stale = self.table[context[-3], context[-2]]
        return ((1 - self.share) * right.softmax(-1) + self.share * stale.softmax(-1)).log()


@pytest.mark.parametrize("share", [1.0, 0.01])
def test_a_stale_state_is_caught(share, monkeypatch):
    monkeypatch.setattr(Stale, "share", share)
    assert is_caught(SEEDS, target_of=Stale)
