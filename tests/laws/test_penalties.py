"""Biases, penalties, barred words and min-p: what the target says after what precedes each node.

A penalty asks for the prompt, the answer and the drafts down to the node, so each node of a tree
has another one.
"""

from __future__ import annotations

import random

import pytest
import torch
from enumerated import assert_targets, block_distribution, distance, random_case
from lanes import costly
from toys import TableDrafter, TableTarget, right_now_and_then, tiny_model
from transformers import RepetitionPenaltyLogitsProcessor

from stree import BatchDecoder, Decoder, GenerationConfig, Request, TokenTree
from stree.batching.state import BatchState
from stree.drafters.ngram import NGram
from stree.trees.tree_batch import NodePaths, TreeBatch
from stree.verifiers.rejection import Block, MultiStep, Naive, Traversal

TREES = [
    TokenTree.chain(3), TokenTree.paper(), TokenTree.load("beam-3-3-9"),
    TokenTree.load("dyspec-3-3-9"),
]
SETTINGS = [
    GenerationConfig(temperature=1.0, repetition_penalty=1.8),
    GenerationConfig(temperature=0.7, repetition_penalty=0.5),
    GenerationConfig(temperature=1.3, min_p=0.4),
    GenerationConfig(temperature=1.0, top_p=0.9, min_p=0.2, repetition_penalty=2.5),
    GenerationConfig(temperature=1.0, presence_penalty=1.0, frequency_penalty=0.7),
    GenerationConfig(
        temperature=1.2, top_p=0.95, logit_bias={0: 1.5, 1: -1.0},
        bad_words_ids=[[2, 0], [0, 2, 1], [2, 1, 0]],
    ),
    GenerationConfig(temperature=0.9, frequency_penalty=-0.5, min_new_tokens=2, eos_token_id=0),
]


def setting_of(rng: random.Random) -> GenerationConfig:
    return GenerationConfig(
        16, rng.choice([0.0, 0.7, 1.3]), rng.choice([0, 9]), rng.choice([1.0, 0.8]),
        seed=rng.randrange(2**40), min_p=rng.choice([0.0, 0.1]),
        repetition_penalty=rng.choice([1.0, 1.4, 3.0, 0.7]),
    )


def by_hand(target, prompt: list[int], setting: GenerationConfig) -> list[int]:
    """Return greedy tokens by whole forwards and transformers' own penalty."""
    tokens, penalise = list(prompt), RepetitionPenaltyLogitsProcessor(setting.repetition_penalty)
    with torch.no_grad():
        for _ in range(setting.max_new_tokens):
            text = torch.tensor([tokens])
            tokens.append(int(penalise(text, target(text)[:, -1]).argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("kind", ["model", costly("n-grams grafted")])
def test_answers_are_plain_decodings(kind, monkeypatch, captured_on_cpu):
    """Greedy answers are also those made by hand."""
    target, rng = tiny_model(1), random.Random(3)
    drafter = right_now_and_then(target)
    if kind != "model":
        drafter = NGram(2, (), drafter)
    served = [
        Request([rng.randrange(61) for _ in range(rng.randint(1, 9))], setting_of(rng))
        for _ in range(5)
    ]
    served.append(Request([5, 6], GenerationConfig(16, repetition_penalty=1.4)))
    plain = BatchDecoder(target, num_rows=2, max_length=64)
    wanted = [plain.generate([each])[0].tokens for each in served]
    for each, tokens in zip(served, wanted, strict=True):
        if each.generation.temperature == 0:
            assert tokens == by_hand(target, list(each.prompt_ids), each.generation)
    accepted = 0
    for tree in TREES[1:] if kind == "model" else TREES[1:2]:
        decoder = BatchDecoder(target, drafter, tree, num_rows=4, max_length=64)
        outputs = decoder.generate(served)
        assert [each.tokens for each in outputs] == wanted
        accepted += sum(sum(each.stats.accepted_per_call) for each in outputs)
    assert accepted > 40
    unpenalised = [Request(each.prompt_ids, GenerationConfig(16)) for each in served]
    changed = [out.tokens for out in plain.generate(unpenalised)]
    assert sum(a != b for a, b in zip(changed, wanted, strict=True)) >= 3


@pytest.mark.quick(2)
@pytest.mark.parametrize("verifier", [costly(Naive), MultiStep, Traversal, costly(Block)])
@pytest.mark.parametrize(
    "settings",
    [SETTINGS[:4:3], pytest.param(SETTINGS[1:3], marks=pytest.mark.long), SETTINGS[4:]],
    ids=["0,3", "1,2", "4,5,6"],
)
def test_output_distribution_is_the_targets(verifier, settings):
    trees = [TokenTree.chain(2), TokenTree((-1, 0, 0))]
    trees = {Block: trees[:1], Naive: [TokenTree.chain(1)]}.get(verifier, trees)
    for seed, setting in enumerate(settings):
        target, drafter, tree, _ = random_case(seed, trees)
        tables = TableTarget(target), TableDrafter(drafter)
        blocks = block_distribution(*tables, tree, setting, verifier)
        assert_targets(blocks, target, setting, tree)


@pytest.mark.costly
@pytest.mark.parametrize("verifier", [MultiStep, Traversal])
def test_output_distribution_of_an_expansion_is_the_targets(verifier):
    target, drafter, _, _ = random_case(1, [TokenTree.chain(1)])
    tables, tree = (TableTarget(target), TableDrafter(drafter)), TokenTree.load("expand-2-1")
    blocks = block_distribution(*tables, tree, SETTINGS[0], verifier)
    assert_targets(blocks, target, SETTINGS[0], tree)


MISTAKES = {
    "drafts do not count": lambda self, tokens, penalised: None,
    "the parent's, without the node": lambda self, tokens, penalised: NodePaths(
        tokens.gather(1, self.parents.clamp(min=0))[..., None], self.depths.long()
    ),
    "all of the tree's": lambda self, tokens, penalised: NodePaths(
        tokens[:, None].expand(-1, tokens.shape[1], -1), torch.full_like(tokens, tokens.shape[1])
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("number", [0, *map(costly, (4, 5, 6))])
def test_a_penalty_of_other_drafts_is_caught(mistake, number, monkeypatch):
    monkeypatch.setattr(TreeBatch, "paths_of", MISTAKES[mistake])
    (target, drafter, tree, _), setting = random_case(0, [TokenTree.chain(2)]), SETTINGS[number]
    blocks = block_distribution(TableTarget(target), TableDrafter(drafter), tree, setting)
    assert distance(blocks, target, setting, tree.max_depth + 1) > 1e-4


def test_a_row_forgets_what_the_one_before_had():
    """One row serves all: tokens of the last request are not penalised in the next."""
    target, drafter = tiny_model(1), tiny_model(2)
    setting = GenerationConfig(12, repetition_penalty=5.0)
    requests = [Request([1, 2, 3], setting), Request([7, 8], setting), Request([1, 2, 3], setting)]
    together = BatchDecoder(target, drafter, num_rows=1, max_length=64).generate(requests)
    for each, got in zip(requests, together, strict=True):
        alone = BatchDecoder(target, num_rows=1, max_length=64).generate([each])[0]
        assert got.tokens == alone.tokens


def test_drafts_are_penalised_too():
    """Else none would be accepted where a penalty changes every token."""
    target = tiny_model(1)
    out = Decoder(target, target, TokenTree.chain(4), max_length=64).generate(
        [1, 2, 3], GenerationConfig(20, repetition_penalty=4.0)
    )
    assert out.stats.acceptance_length > 4


def test_nothing_is_held_for_penalties_until_one_is_asked_for():
    decoder = Decoder(tiny_model(1), max_length=64)
    decoder.generate([1, 2], GenerationConfig(4, temperature=1.0, min_p=0.1, seed=0))
    assert decoder.batch.worker.state.rules.seen is None
    decoder.generate([1, 2], GenerationConfig(4, repetition_penalty=1.1))
    assert decoder.batch.worker.state.rules.seen.shape == (1, 62)


def test_an_idle_row_learns_nothing_of_a_step():
    rows = BatchState.new(2, 4)
    for row in range(2):
        rows.set(row, GenerationConfig(repetition_penalty=2.0), [row], 9)
    rows.begin(1, 1, 5)
    rows.block[:, :3] = torch.tensor([[2, 7, 8], [2, 3, 4]])
    rows.narrow(0, 2, [GenerationConfig(repetition_penalty=2.0)]).remember()
    seen = [row[:-1].nonzero()[:, 0].tolist() for row in rows.rules.seen]
    assert seen == [[0], [1, 3, 4, 5]]
