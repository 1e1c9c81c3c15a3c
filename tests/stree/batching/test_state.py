"""A row's settings make of logits what transformers' distributions are."""

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from stree import GenerationConfig
from stree.batching.state import BatchState
from stree.batching.step import StepInputsCache
from stree.trees.token_tree import TokenTree
from stree_kernels.naive.sampling.verification import Chooser

SETTINGS = [
    GenerationConfig(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty
    )
    for temperature, top_k, top_p, min_p, penalty in (
        (1, 0, 1, 0, 1), (0.7, 5, 1, 0, 1), (1.3, 0, 0.6, 0, 1), (0.9, 8, 0.8, 0, 1),
        (1, 1, 1, 0, 1), (1, 0, 1e-6, 0, 1), (1, 0, 1e-20, 0, 1), (1.5, 0, 1, 0.1, 1),
        (0.8, 9, 0.9, 0.02, 1.7), (1, 0, 1, 0, 1.3), (1.2, 0, 0.9, 0, 0.5), (1, 0, 1, 1, 1),
    )
]
GREEDY = GenerationConfig(top_k=3, top_p=0.5, min_p=0.3)
PROMPT = [3, 1, 4, 1, 5, 9]


def rows_of(settings):
    rows = BatchState.new(len(settings))
    for row, setting in enumerate(settings):
        rows.set(row, setting, PROMPT, 50)
    return rows.narrow(0, len(settings), settings)


def test_distributions_are_those_of_transformers():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(len(SETTINGS) + 1, 7, 50, dtype=torch.float64, generator=generator)
    rows = rows_of([*SETTINGS, GREEDY])
    got = rows.distribution(rows.processed(logits))
    for row, each in enumerate(SETTINGS):
        seen = torch.tensor([PROMPT] * 7)
        scores = RepetitionPenaltyLogitsProcessor(float(each.repetition_penalty))(seen, logits[row])
        scores = TemperatureLogitsWarper(float(each.temperature))(None, scores)
        if each.top_k:
            scores = TopKLogitsWarper(each.top_k)(None, scores)
        if each.top_p < 1:
            scores = TopPLogitsWarper(float(each.top_p))(None, scores)
        scores = MinPLogitsWarper(float(each.min_p))(None, scores)
        torch.testing.assert_close(got[row], scores.softmax(-1), rtol=1e-12, atol=1e-15)
        assert torch.equal(rows.processed(logits)[row].isfinite(), scores.isfinite())
    assert torch.equal(got[-1].argmax(-1), logits[-1].argmax(-1)) and (got[-1].sum(-1) == 1).all()
    assert torch.equal(rows.processed(logits)[-1], logits[-1])
    assert torch.equal(rows.distribution(rows.processed(logits[:, 0])), got[:, 0])


def test_what_a_row_keeps_does_not_depend_on_what_others_ask_for():
    """Tokens are put in order only where a row has a top-k or a top-p."""
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(len(SETTINGS), 7, 50, dtype=torch.float64, generator=generator)
    together = rows_of(SETTINGS).processed(logits)
    for row, each in enumerate(SETTINGS):
        alone = rows_of([each])
        assert alone.asked.ranked == (each.top_k > 0 or each.top_p < 1)
        assert torch.equal(alone.processed(logits[row : row + 1])[0], together[row])


@pytest.mark.parametrize("kept", range(1, 9))
def test_top_p_keeps_no_token_more_than_reach_it(kept):
    """Eight tokens of ⅛ each, so that sums are exact."""
    logits = torch.zeros(1, 8, dtype=torch.float64)
    rows = rows_of([GenerationConfig(temperature=1.0, top_p=kept / 8)])
    probs = rows.distribution(rows.processed(logits))
    assert probs.sort().values[0].tolist() == [0.0] * (8 - kept) + [1 / kept] * kept
    if kept < 8:  # transformers takes 1 for "off"
        theirs = TopPLogitsWarper(kept / 8)(None, logits)
        assert int(theirs.isfinite().sum()) == kept


def test_choices_follow_the_distribution_and_the_seed():
    probs = torch.tensor([0.1, 0.0, 0.6, 0.3], dtype=torch.float64).expand(2, 20_000, 4)
    settings = [GenerationConfig(temperature=1.0, seed=seed) for seed in (3, 4)]
    places = torch.arange(20_000).expand(2, -1)
    drawn = Chooser(rows_of(settings).sampling)(probs, places)
    for row in drawn:
        counts = torch.bincount(row, minlength=4) / 20_000
        assert counts[1] == 0
        assert (counts - probs[0, 0]).abs().max() < 5 * (0.25 / 20_000) ** 0.5
    assert not torch.equal(*drawn)
    assert torch.equal(Chooser(rows_of(settings[1:]).sampling)(probs[:1], places[:1])[0], drawn[1])


def test_requests_of_the_same_kinds_share_the_inputs_of_steps():
    """Requests come and go every few steps, and to make inputs takes the host's time."""
    rows, tree = BatchState.new(2), TokenTree.chain(1)
    cache = StepInputsCache(rows)

    def inputs(*generations):
        return cache.of(2, dict.fromkeys(range(len(generations)), tree), list(generations))

    first = inputs(GenerationConfig(5), GenerationConfig(6))
    assert inputs(GenerationConfig(7), GenerationConfig(8)) is first
    assert inputs(GenerationConfig(7)) is first
    sampled = inputs(GenerationConfig(7), GenerationConfig(8, temperature=1.0, seed=3))
    assert sampled is not first and sampled.rows.asked.sampled
    biased = [GenerationConfig(each, logit_bias={1: 2.0}) for each in (5, 6)]
    assert inputs(biased[0]) is not inputs(biased[1])  # other rules may have other tensors
