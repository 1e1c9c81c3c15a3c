"""Model drafters that draw siblings independently, or draft their best tokens: the output is the
target's with every verifier, and the drafts are what they are said to be."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from eager import by_fused_kernels, by_graphs
from enumerated import CONTEXT, SETTINGS, assert_targets, block_distribution, chance_of
from lanes import costly, quick_first
from toys import TableTarget, choose_by, mixed_requests, right_now_and_then, tiny_model, with_head

from stree import BatchDecoder, Decoder, GenerationConfig, Request, TokenTree
from stree.batching.state import BatchState
from stree.common.errors import UsageError
from stree.drafters import SiblingSampling
from stree.drafters.model import ModelDrafter, ModelDrafterSpec
from stree.drafters.ngram import NGram
from stree.trees.build import make_tree_batch
from stree.trees.token_tree import balanced
from stree.trees.tree_batch import NOISE_STRIDE, Level
from stree.verifiers.rejection import Block, MultiStep, Naive, Traversal
from stree_kernels import ops

INDEPENDENT, POINT = SiblingSampling.INDEPENDENT, SiblingSampling.DETERMINISTIC
KINDS = pytest.mark.parametrize("siblings", [INDEPENDENT, POINT], ids=["independent", "top"])
FORKED, LATE = TokenTree((-1, 0, 0)), TokenTree((-1, 0, 0, 2))


def tiny(vocabulary: int, seed: int = 2):
    """Return a model of few tokens, which takes a millisecond."""
    return tiny_model(
        seed, vocab_size=vocabulary, num_layers=1, attn_layers=(), d_model=16, num_ssm_heads=2,
        num_x_groups=1, num_b_groups=1, num_c_groups=2, gated_norm_groups=2, intermediate_size=16,
    )


def made(siblings: SiblingSampling, vocabulary: int, grafted: bool, num_rows: int = 2):
    model = tiny(vocabulary)
    drawing = (
        NGram(2, [1, 2, 0, 1], model, siblings) if grafted else ModelDrafterSpec(model, siblings)
    )
    return drawing.for_decoder(TableTarget(torch.zeros(3, 3, vocabulary)), num_rows, 32, 8)


CASES = [
    (MultiStep, FORKED), (Traversal, FORKED), (Naive, FORKED), (Block, TokenTree.chain(2)),
    (MultiStep, LATE), (Traversal, LATE),
]


@pytest.mark.quick(5)
@KINDS
@pytest.mark.parametrize("grafted", [False, True], ids=["alone", "grafted"])
@pytest.mark.parametrize(
    ("verifier", "tree", "seed"),
    quick_first(
        [(*case, 2) for case in CASES[:3]],
        [(*case, seed) for case in CASES for seed in (2, 5)],
    ),
)
def test_output_distribution_is_the_targets(verifier, tree, seed, grafted, siblings):
    """All draws and coins of a step are enumerated, with a greedy row in the same batch."""
    torch.manual_seed(seed)
    target, setting = 1.5 * torch.randn(3, 3, 3, dtype=torch.float64), SETTINGS[seed % 5]
    drafter = made(siblings, 3, grafted)
    blocks = block_distribution(TableTarget(target), drafter, tree, setting, verifier)
    assert_targets(blocks, target, setting, tree)
    assert setting.top_k or any(len(block) > 1 for block in blocks)


def improbable(siblings, tree, verifier, grafted=False, count: int = 1000) -> float:
    """Return how probable answers of several steps, a seed each, are at most."""
    torch.manual_seed(11)
    table, model = 1.5 * torch.randn(3, 3, 3, dtype=torch.float64), tiny(3)
    drafter = NGram(2, [0, 1, 2], model, siblings) if grafted else ModelDrafterSpec(model, siblings)
    decoder = BatchDecoder(
        TableTarget(table), drafter, tree, num_rows=100, max_length=16, verifier=verifier
    )
    served = [Request([0, 1], GenerationConfig(3, 1.0, seed=seed)) for seed in range(count)]
    outputs = decoder.generate(served)
    assert sum(sum(out.stats.accepted_per_call) for out in outputs) > count / 4
    return chance_of([out.tokens for out in outputs], table, GenerationConfig(temperature=1.0))


TREES = {
    "naive": balanced([3, 1]), "multi_step": balanced([3, 1]), "traversal": balanced([2, 1]),
    "coupled": balanced([3, 1]), "block": TokenTree.chain(2),
}


@pytest.mark.costly
@pytest.mark.parametrize(
    ("siblings", "verifier", "grafted"),
    quick_first(
        [(INDEPENDENT, "multi_step", False), (INDEPENDENT, "traversal", True),
         (POINT, "naive", False)],
        [(kind, verifier, grafted) for kind in (INDEPENDENT, POINT)
         for verifier in TREES for grafted in (False, True)],
    ),
)
def test_answers_of_several_steps_follow_the_targets_distribution(siblings, verifier, grafted):
    """The bound's false-alarm rate is one in a million."""
    assert improbable(siblings, TREES[verifier], verifier, grafted) > 1e-6


def claiming(self, *given, draft=ModelDrafter.draft):
    return replace(draft(self, *given), independent=False)


@pytest.mark.costly
@pytest.mark.parametrize(
    "verifier", ["multi_step", pytest.param("traversal", marks=pytest.mark.long)]
)
def test_independent_siblings_that_claim_to_be_drawn_without_replacement_are_caught(
    verifier, monkeypatch
):
    monkeypatch.setattr(ModelDrafter, "draft", claiming)
    assert improbable(INDEPENDENT, TREES[verifier], verifier) < 1e-6


def drafts_of_seeds(siblings: SiblingSampling, unshared: bool, batch: int = 2000):
    """Return two siblings of rows with a seed each, every second one greedy, and their logits."""
    model = tiny(3)
    drafter = ModelDrafter(model, batch, 16, 3, siblings)
    rows, setting = BatchState.new(batch, 3), GenerationConfig(temperature=1.4)
    for row in range(batch):
        rows.set(row, replace(setting, seed=row, temperature=0.0 if row % 2 else 1.4))
        rows.begin(row, 1, CONTEXT[1])
        drafter.read(row, torch.tensor(CONTEXT[:1]))
    tree_batch = make_tree_batch([FORKED] * batch, torch.device("cpu"))
    proposal = drafter.draft(rows.narrow(0, batch, [setting]), tree_batch, 1, 8, unshared)
    with torch.no_grad():
        return proposal, model(torch.tensor([CONTEXT]))[0, -1]


def unlike_products(proposal, logits) -> float:
    """Return χ² of 9 cells of the rows that sample, above 49.0 once in a million if each sibling is
    drawn by itself."""
    q, pairs = (logits / 1.4).softmax(-1), proposal.tokens[::2, 1:].tolist()
    seen, statistic = Counter(map(tuple, pairs)), 0.0
    for first, second in itertools.product(range(3), repeat=2):
        wanted = len(pairs) * float(q[first] * q[second])
        statistic += (seen[first, second] - wanted) ** 2 / wanted
    return statistic


@pytest.mark.costly
@KINDS
@pytest.mark.parametrize("unshared", [True, pytest.param(False, marks=pytest.mark.long)])
def test_drafts_are_what_they_are_said_to_be(siblings, unshared):
    """Shared noise is the target's for the first sibling."""
    proposal, logits = drafts_of_seeds(siblings, unshared)
    best = logits.topk(2).indices.tolist()
    pairs = proposal.tokens[:, 1:].tolist()
    assert pairs[1::2] == [best] * 1000
    assert proposal.independent is (siblings is INDEPENDENT)
    if siblings is POINT:
        assert pairs[::2] == [best] * 1000
        assert proposal.logits is None and proposal.points is None
        return
    assert proposal.points.tolist() == [[row % 2 == 1] * 3 for row in range(2000)]
    assert (proposal.logits is not None) == unshared
    assert unlike_products(proposal, logits) < 49.0


@pytest.mark.costly
def test_siblings_of_one_noise_are_caught(monkeypatch):
    def shared(self, unshared):
        return self.noise_at(unshared)[..., None].expand_as(self.places).contiguous()

    monkeypatch.setattr(Level, "noise_of_each", shared)
    assert unlike_products(*drafts_of_seeds(INDEPENDENT, True)) > 49.0


def test_no_noise_is_drawn_with_twice_but_the_targets_own(monkeypatch):
    """Bottom-up rules see drafts that the next step, or another node, must not depend on. With
    `coupled` the first of the siblings has the noise that its position has for the target."""
    target, seen, drawing = tiny_model(1), [], ops.choose_children

    def recorded(logits, depths, sampling, places, *others, **more):
        if sampling is not None:
            positions = sampling.position[:, None] + depths
            seen.extend(positions[places[..., 0] >= 0].tolist())
        drawing(logits, depths, sampling, places, *others, **more)

    choose_by(monkeypatch, recorded)
    drafter = ModelDrafterSpec(tiny_model(2), INDEPENDENT)
    for verifier in ("traversal", "multi_step", "coupled"):
        seen.clear()
        decoder = Decoder(target, drafter, balanced([2, 2]), max_length=64, verifier=verifier)
        decoder.generate([1, 2], GenerationConfig(12, temperature=1.0, seed=0))
        if verifier == "coupled":
            seen[:] = [each for each in seen if each >= NOISE_STRIDE]
            assert seen
        assert len(set(seen)) == len(seen)


HEADS = {
    "whole": lambda model: model, "fewer tokens": lambda model: with_head(model, torch.arange(40)),
    "low rank": lambda model: with_head(model, rank=20), "8 bits": lambda model: in_8_bits(model),
}


def in_8_bits(model):
    model.put_head_in_8_bits()
    return model


@pytest.mark.parametrize(
    "siblings", [INDEPENDENT, pytest.param(POINT, marks=pytest.mark.costly)],
    ids=["independent", "top"],
)
@pytest.mark.parametrize(
    ("verifier", "head", "penalty"),
    quick_first(
        [("coupled", "fewer tokens", 1.0)],
        [(verifier, head, penalty) for verifier in ("coupled", "naive", "multi_step", "traversal")
         for head in HEADS for penalty in (1.0, 1.3)],
        [("multi_step", "whole", 1.0), ("naive", "low rank", 1.3), ("traversal", "8 bits", 1.0)],
    ),
)
def test_graphs_give_what_eager_steps_give(
    verifier, head, penalty, siblings, captured_on_cpu, monkeypatch
):
    """Greedy rows, and with `coupled` all rows, have plain decoding's tokens."""
    target = tiny_model(1)
    drafter = ModelDrafterSpec(HEADS[head](right_now_and_then(target)), siblings)
    trees = [TokenTree.chain(3), TokenTree.paper(), balanced([3, 2]), TokenTree((-1, 0, 0, 2))]
    served = [
        replace(each, generation=replace(each.generation, repetition_penalty=penalty))
        for each in mixed_requests(6, trees, seed=1)
    ]
    options = dict(num_rows=4, max_nodes=13, verifier=verifier)
    outputs = by_graphs(monkeypatch, served, target, drafter, **options)
    plain = BatchDecoder(target, num_rows=4, max_length=64).generate(
        [replace(each, tree=None) for each in served]
    )
    for request, got, alone in zip(served, outputs, plain, strict=True):
        if verifier == "coupled" or request.generation.temperature == 0:
            assert got.tokens == alone.tokens
    assert len({each for out in outputs for each in out.stats.accepted_per_call}) > 2


@pytest.mark.costly
@pytest.mark.parametrize(
    ("siblings", "verifier", "grafted"),
    quick_first(
        [(INDEPENDENT, "multi_step", False)],
        itertools.product((INDEPENDENT, POINT), TREES, (False, True)),
    ),
)
def test_steps_of_fused_kernels_give_the_same_tokens(
    verifier, grafted, siblings, monkeypatch, captured_on_cpu
):
    """A greedy row and one that samples have a tree each."""
    target = tiny_model(1, torch.float32, num_layers=2)
    own = right_now_and_then(target)
    drafter = NGram(2, (), own, siblings) if grafted else ModelDrafterSpec(own, siblings)
    trees = [TokenTree.chain(2)] * 2 if verifier == "block" else [balanced([2, 2]), FORKED]
    served = [
        Request([5, 6, 7], GenerationConfig(4, temperature=1.0, seed=3), trees[0]),
        Request([9] * 4, GenerationConfig(4), trees[1]),
    ]
    options = dict(tree=trees[0], verifier=verifier)
    assert any(by_fused_kernels(monkeypatch, served, target, drafter, **options))


@pytest.mark.parametrize(
    ("name", "verifier"), [("beam-3-3-9", "naive"), costly("dyspec-3-3-9", "traversal")]
)
def test_trees_grow_by_the_best_tokens(name, verifier, monkeypatch, captured_on_cpu):
    target = tiny_model(1)
    drafter = ModelDrafterSpec(right_now_and_then(target), POINT)
    served = mixed_requests(6, [TokenTree.load(name)], seed=3)
    options = dict(num_rows=3, verifier=verifier)
    outputs = by_graphs(monkeypatch, served, target, drafter, name, **options)
    assert sum(sum(each.stats.accepted_per_call) for each in outputs) > 12


def test_a_tree_of_best_tokens_is_one_whatever_the_seed():
    """A beam, whose values know no temperature, has the greedy row's tree."""
    model, tree, grown = tiny_model(1), TokenTree.load("beam-3-3-9"), set()
    for temperature, seed in ((0.0, 0), (0.5, 1), (1.5, 2)):
        setting = GenerationConfig(temperature=temperature, seed=seed, top_p=0.5)
        drafter = ModelDrafterSpec(model, POINT).for_decoder(model, 1, 64, 10)
        rows, tree_batch = BatchState.new(1, 10), make_tree_batch([tree], torch.device("cpu")).own()
        rows.set(0, setting)
        drafter.read(0, torch.tensor([3, 1]))
        rows.begin(0, 2, 4)
        proposal = drafter.draft(rows.narrow(0, 1, [setting]), tree_batch, 1, 32, True)
        grown.add((tuple(proposal.tokens[0].tolist()), tuple(tree_batch.parents[0].tolist())))
    assert len(grown) == 1


@pytest.mark.parametrize("name", ["beam-3-3-9", "dyspec-3-3-9", "chain-2 or beam-3-3-9"])
def test_trees_that_grow_are_refused_for_siblings_that_may_be_alike(name):
    model = tiny_model(1)
    with pytest.raises(UsageError, match="whose siblings are no two alike"):
        BatchDecoder(model, ModelDrafterSpec(model, INDEPENDENT), name, num_rows=1, max_length=64)
