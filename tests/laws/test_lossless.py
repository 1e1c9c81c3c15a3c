"""Sampling with drafts gives plain decoding's tokens, each of them; mistakes are caught.

The target chooses by common random numbers (`stree.verifiers.coupled`), so exactness has two parts:
every drafter and tree gives plain decoding's tokens, and these follow the target's distribution.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from eager import without_graphs
from enumerated import Repetitive, chance_of
from lanes import costly, quick_first
from node_orders import depth_first
from toys import (
    TableDrafter,
    TableTarget,
    Undrawn,
    random_tree,
    right_now_and_then,
    tiny_model,
)

from stree import BatchDecoder, Decoder, GenerationConfig, Request, TokenTree
from stree.batching.runners import GraphRunner
from stree.models.in_8_bits import put_in_8_bits
from stree.models.model import HybridModel
from stree.trees.token_tree import balanced
from stree.verifiers import VERIFIERS
from stree.verifiers.coupled import Coupled
from stree_kernels import naive, ops

TREES = [
    TokenTree.chain(1), TokenTree.chain(4), TokenTree((-1, 0, 0)), TokenTree((-1, 0, 0, 2)),
    TokenTree.paper(), balanced([4]), TokenTree((-1, 0, 1, 0, 2, 3, 3, 4, 0, 7)),
]


def random_setting(rng: random.Random) -> GenerationConfig:
    temperature = rng.choice([0.2, 0.6, 1.0, 1.7])
    top_k, top_p = rng.choice([0, 0, 2, 3]), rng.choice([1.0, 1.0, 0.8])
    return GenerationConfig(20, temperature, top_k, top_p, seed=rng.randrange(2**50))


def tables(seed: int) -> tuple[TableTarget, TableDrafter]:
    torch.manual_seed(seed)
    size = 4 + seed % 9
    table = 2 * torch.randn(size, size, size, dtype=torch.float64)
    return TableTarget(table), TableDrafter(table + torch.randn_like(table))


def differences(kind=TableDrafter, cases: int = 40) -> Iterator[bool]:
    """Yield for each case whether drafts change what is sampled; every tree has its turn."""
    accepted, calls = 0, 0
    for seed in range(cases):
        target, drafter = tables(seed)
        setting, prompt = random_setting(random.Random(seed)), [seed % 3, 1]
        wanted = Decoder(target).generate(prompt, setting).tokens
        decoder = Decoder(target, kind(drafter.table), TREES[seed % len(TREES)])
        got = decoder.generate(prompt, setting)
        yield got.tokens != wanted
        accepted += sum(got.stats.accepted_per_call)
        calls += got.stats.num_calls
    assert accepted > 0.3 * calls  # else this shows little


@pytest.mark.parametrize("kind", [TableDrafter, costly(Undrawn)])
def test_drafts_change_nothing_of_what_is_sampled(kind):
    assert sum(differences(kind, cases=21)) == 0


def test_repeated_drafts_change_nothing(monkeypatch):
    for seed in range(14):
        target, drafter = tables(seed)
        setting = random_setting(random.Random(seed))
        got = Decoder(target, Repetitive(drafter.table), TREES[seed % 7]).generate([0, 1], setting)
        assert got.tokens == Decoder(target).generate([0, 1], setting).tokens


KINDS = {  # the attention layers of a target's three and a drafter's two, or one kind of all
    "Mamba for Transformer": ((0, 1, 2), ()), "Transformer for Transformer": ((0, 1, 2), (0, 1)),
    "Transformer for Mamba": ((), (0, 1)), "Transformer for hybrid": ((1,), (0, 1)),
    "Mamba-1 for Mamba-1": ("mamba1", "mamba1"), "Mamba-1 for hybrid": ((1,), "mamba1 mlp"),
    "Mamba for hybrid in 8 bits": ((1,), ()),
    "Mamba for experts in 8 bits": ("mamba+attention experts", ()),
}


def of_kind(seed: int, num_layers: int, kind: str | tuple[int, ...]) -> HybridModel:
    if isinstance(kind, tuple):
        return tiny_model(seed, vocab_size=5, num_layers=num_layers, attn_layers=kind)
    return tiny_model(
        seed, vocab_size=5, num_layers=num_layers, attn_layers=(), mamba1_channels=40, dt_rank=3,
        num_experts=5, experts_per_token=2, expert_intermediate_size=12,
        layer_types=(kind,) * num_layers,
    )


@pytest.mark.parametrize(
    ("kinds", "backtracking"),
    quick_first(
        [("Mamba-1 for hybrid", "replay")],
        [(kinds, backtracking) for kinds in KINDS for backtracking in ("replay", "joint")],
        [("Mamba for Transformer", "replay"), ("Mamba for hybrid in 8 bits", "replay"),
         ("Transformer for hybrid", "joint"), ("Mamba-1 for Mamba-1", "joint"),
         ("Mamba for experts in 8 bits", "joint")],
    ),
)
def test_greedy_answers_with_drafters_of_another_kind(kinds, backtracking):
    """There are few tokens, so that models that have nothing in common agree now and then."""
    target_layers, drafter_layers = KINDS[kinds]
    target, drafter = of_kind(1, 3, target_layers), of_kind(2, 2, drafter_layers)
    if "in 8 bits" in kinds:
        put_in_8_bits(target)
    served = [Request(prompt, GenerationConfig(24)) for prompt in ([1, 2, 3], [4], [0, 3, 0, 2, 1])]
    plain = BatchDecoder(target, num_rows=1, max_length=64).generate(served)
    accepted = []
    for tree in ("chain-3", "paper", "expand-2-2", "beam-3-3-9", "dyspec-3-3-9"):
        decoder = BatchDecoder(
            target, drafter, tree, num_rows=2, max_length=64, backtracking=backtracking
        )
        outputs = decoder.generate(served)
        assert [each.tokens for each in outputs] == [each.tokens for each in plain], tree
        accepted += [each for out in outputs for each in out.stats.accepted_per_call]
    assert {0, 1, 2} <= set(accepted)


@pytest.mark.parametrize("drafter_layers", [(), costly((1,))])
def test_drafts_of_models_change_nothing_of_what_is_sampled(drafter_layers):
    """One batch has all trees; caches and replay are those of models."""
    target = tiny_model(1)
    drafter = right_now_and_then(target)
    if drafter_layers == ():
        drafter = tiny_model(2, num_layers=2, attn_layers=())
    rng = random.Random(5)
    served = [
        Request([rng.randrange(61) for _ in range(5)], random_setting(rng), tree)
        for tree in TREES
    ]
    decoder = BatchDecoder(target, drafter, num_rows=5, max_length=64, max_nodes=13)
    plain = BatchDecoder(target, num_rows=1, max_length=64)
    accepted = 0
    for each, got in zip(served, decoder.generate(served), strict=True):
        alone = Request(each.prompt_ids, each.generation)
        assert got.tokens == plain.generate([alone])[0].tokens
        accepted += sum(got.stats.accepted_per_call)
    assert accepted > 10 or drafter_layers == ()


LARGE = [
    TokenTree(depth_first(balanced([6, 7, 6]).parents, heaviest_first=True), "heavy"),
    *map(TokenTree.load, ("expand-4-4-4-4", "beam-9-6-300", "dyspec-9-6-300", "chain-299")),
    random_tree(1000), random_tree(2048),
]


@pytest.mark.parametrize(
    "tree", quick_first([(LARGE[at],) for at in (0, 2, 3)], [(tree,) for tree in LARGE])
)
def test_trees_of_more_than_256_nodes_change_nothing(tree):
    """Paths longer than 256 nodes are replayed."""
    target = tiny_model(1)
    # The chain is accepted as a whole
    drafter = target if tree.name == "chain-299" else right_now_and_then(target)
    settings = [GenerationConfig(310 if drafter is target else 8, t, seed=4) for t in (0.0, 1.0)]
    requests = [Request([3, 1, 4, 1, 5], setting) for setting in settings]
    plain = BatchDecoder(target, num_rows=2, max_length=700).generate(requests)
    got = BatchDecoder(target, drafter, tree, num_rows=2, max_length=700).generate(requests)
    assert [each.tokens for each in got] == [each.tokens for each in plain]
    accepted = [sum(each.stats.accepted_per_call) for each in got]
    assert min(accepted) > (250 if drafter is target else 0)


# Mistakes that are planted; each must change some tokens, or never accept.


class ByNode(Coupled):
    """Verifier whose noise is of the node's place in the tree, not of its position."""

    def choose(self, logits, proposal, tree_batch, rows):
        places = torch.arange(logits.shape[1], dtype=torch.int32).expand(len(logits), -1)
        return ops.choose_best(logits, places.contiguous(), rows.sampling)


class OneBehind(Coupled):
    """Verifier that chooses after a node what belongs after its parent."""

    def choose(self, logits, proposal, tree_batch, rows):
        best, highest = super().choose(logits, proposal, tree_batch, rows)
        return best.gather(1, tree_batch.parents.clamp(min=0)), highest


class Unfiltered(Coupled):
    """Verifier that chooses among the tokens that top-k and top-p leave out, too, in trees."""

    def accept(self, logits, proposal, tree_batch, rows, cache, report):
        if tree_batch.num_nodes > 1:
            logits = logits.masked_fill(logits == -torch.inf, 0.0)
        super().accept(logits, proposal, tree_batch, rows, cache, report)


class AlwaysFirst(Coupled):
    """Verifier that accepts the first child whatever the target chooses."""

    def choose(self, logits, proposal, tree_batch, rows):
        best, highest = super().choose(logits, proposal, tree_batch, rows)
        first = tree_batch.children[..., 0]
        drafted = proposal.tokens.gather(1, first.clamp(min=0))
        return torch.where(first >= 0, drafted, best), highest


def parts_by_graphs(monkeypatch) -> bool:
    """Return whether an answer by graphs, in a batch of all trees, is not plain decoding's."""
    target, rng = tiny_model(1), random.Random(5)
    served = [
        Request([rng.randrange(61) for _ in range(5)], random_setting(rng), tree) for tree in TREES
    ]
    drafter = right_now_and_then(target)
    decoder = BatchDecoder(target, drafter, num_rows=4, max_length=64, max_nodes=13)
    got = decoder.generate(served)
    assert isinstance(decoder.worker.runner, GraphRunner) and decoder.worker.runner.step_graphs
    alone = [Request(each.prompt_ids, each.generation) for each in served]
    plain = without_graphs(
        monkeypatch, lambda: BatchDecoder(target, num_rows=1, max_length=64).generate(alone)
    )
    return any(mine.tokens != each.tokens for mine, each in zip(got, plain, strict=True))


def test_drafts_change_nothing_of_what_graphs_sample(captured_on_cpu, monkeypatch):
    assert not parts_by_graphs(monkeypatch)


@pytest.mark.costly
@pytest.mark.parametrize("mistake", [ByNode, OneBehind, Unfiltered, AlwaysFirst])
def test_planted_mistake_of_the_verifier_is_caught_in_graphs(mistake, captured_on_cpu, monkeypatch):
    monkeypatch.setitem(VERIFIERS, "coupled", mistake)
    assert parts_by_graphs(monkeypatch)


class Stale(TableTarget):
    """Target that forgets the last committed token one time in eight."""

    def tree_batch_forward(self, tokens, tree_batch, cache, bound):
        logits = super().tree_batch_forward(tokens, tree_batch, cache, bound)
        committed = cache.rows[0].committed
        if tree_batch.num_nodes > 1 and len(committed) % 8 == 3:
            logits[0, 0] = self.table[committed[-2], committed[-1]]
        return logits


@pytest.mark.parametrize("mistake", [ByNode, OneBehind, Unfiltered, AlwaysFirst])
def test_planted_mistake_of_the_verifier_is_caught(mistake, monkeypatch):
    monkeypatch.setitem(VERIFIERS, "coupled", mistake)
    assert any(differences())


def test_a_stale_state_is_caught(monkeypatch):
    original = tables

    def stale(seed):
        target, drafter = original(seed)
        return Stale(target.table), drafter

    monkeypatch.setitem(globals(), "tables", stale)
    assert any(differences())


@pytest.mark.costly
def test_drafts_of_other_noise_are_accepted_less(monkeypatch):
    """Nothing is lost but speed when the drafter's noise is not the target's."""

    def length():
        total = calls = 0
        for seed in range(30):
            target, drafter = tables(seed)
            setting = GenerationConfig(20, 1.0, seed=seed)
            got = Decoder(target, drafter, balanced([3, 2])).generate([0, 1], setting)
            assert got.tokens == Decoder(target).generate([0, 1], setting).tokens
            total, calls = total + got.stats.num_new_tokens, calls + got.stats.num_calls
        return total / calls

    right, original = length(), ops.choose_children

    def shifted(logits, depths, sampling, *others):
        original(logits, depths + 1, sampling, *others)

    monkeypatch.setattr(ops, "choose_children", shifted)
    assert length() < 0.9 * right


# The distribution


@pytest.mark.costly
@pytest.mark.parametrize("setting", [
    GenerationConfig(4, 0.9), GenerationConfig(4, 1.4, top_k=2), GenerationConfig(4, 1.0, top_p=0.7)
], ids=str)
def test_sampled_answers_follow_the_targets_distribution(setting):
    """The bound's false-alarm rate is one in a million."""
    torch.manual_seed(11)
    table = torch.randn(2, 3, 3, 3, dtype=torch.float64)
    target = TableTarget(table[0])
    decoder = BatchDecoder(
        target, TableDrafter(table[1]), TokenTree((-1, 0, 0, 1)), num_rows=100, max_length=16
    )
    served = [
        Request([0, 1], GenerationConfig(4, setting.temperature, setting.top_k, setting.top_p,
                                         seed=seed))
        for seed in range(2000)
    ]
    answers = [out.tokens for out in decoder.generate(served)]
    assert chance_of(answers, target.table, setting) > 1e-6


def test_one_choice_follows_the_softmax():
    """χ² of the 30 cells of 200,000 choices along positions is above 79.5 once in a million."""
    torch.manual_seed(3)
    logits = 1.5 * torch.randn(31, dtype=torch.float64)
    for seed, start in ((0, 0), (0, 2**31), (2**62, 5)):
        best = torch.empty(0, dtype=torch.long)
        for part in range(40):  # what the processor keeps near
            positions = torch.arange(5_000)[None] + start + part * 5_000
            noise = naive.token_noise(torch.tensor([seed]), positions, 31)
            best = torch.cat([best, (logits + noise).argmax(-1)[0]])
        wanted = 2e5 * logits.softmax(-1)
        statistic = ((torch.bincount(best, minlength=31) - wanted) ** 2 / wanted).sum()
        assert float(statistic) < 79.5
