"""Drafts that are drawn at a temperature of their own: the output is the target's all the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from enumerated import (
    CONTEXT,
    GREEDY,
    SETTINGS,
    assert_targets,
    block_distribution,
    distance,
    length_of,
)
from lanes import costly
from toys import TableTarget, tiny_config, tiny_model

from stree import BatchDecoder, GenerationConfig, Request, TokenTree
from stree.batching.state import BatchState
from stree.drafters import model as model_drafter
from stree.drafters.model import ModelDrafter, ModelDrafterSpec
from stree.drafters.ngram import NGram
from stree.models.model import HybridModel
from stree.trees.build import make_tree_batch
from stree.verifiers.rejection import MultiStep, Naive, Traversal
from stree_kernels import naive

ALONE = TokenTree.chain(0)  # of the row beside, whose drafts would be drawn, too
FORKED = TokenTree((-1, 0, 0, 1))


def tiny(vocabulary: int = 3) -> HybridModel:
    torch.manual_seed(2)
    model = HybridModel(tiny_config(vocab_size=vocabulary)).double().eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(8)  # sure enough that temperatures differ
    return model


@pytest.mark.parametrize("setting", [SETTINGS[2], GREEDY, *map(costly, SETTINGS[:5:4])], ids=str)
@pytest.mark.parametrize(
    ("verifier", "tree"),
    [(MultiStep, FORKED), (Traversal, TokenTree((-1, 0, 0))), (Naive, TokenTree.chain(1))],
)
def test_output_distribution_is_the_targets(verifier, tree, setting):
    """All draws and coins of a step are enumerated; greedy rows have drawn drafts, too."""
    torch.manual_seed(5)
    table = 1.5 * torch.randn(3, 3, 3, dtype=torch.float64)
    drafter = ModelDrafter(tiny(), 2, 16, 4, temperature=0.6)
    blocks = block_distribution(TableTarget(table), drafter, tree, setting, verifier, ALONE)
    assert_targets(blocks, table, setting, tree)
    assert length_of(blocks) > 1


@pytest.mark.costly
def test_logits_of_another_temperature_than_the_drafts_are_caught(monkeypatch):
    monkeypatch.setattr(model_drafter, "as_drawn_at", lambda logits, *temperatures: logits)
    torch.manual_seed(5)
    table = 1.5 * torch.randn(3, 3, 3, dtype=torch.float64)
    drafter = ModelDrafter(tiny(), 2, 16, 4, temperature=0.6)
    given = TableTarget(table), drafter, FORKED, SETTINGS[0], MultiStep, ALONE
    assert distance(block_distribution(*given), table, SETTINGS[0], 3) > 1e-4


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_drafts_are_the_best_with_noise_at_their_own_temperature(dtype):
    """Of a warm, a cool and a greedy row; verifiers see the distribution of the drafts."""
    model = tiny(40).to(dtype)
    drafter, temperatures = ModelDrafter(model, 3, 16, 4, temperature=0.6), (1.4, 0.3, 0.0)
    everyone = BatchState.new(3, 3)
    for row, temperature in enumerate(temperatures):
        everyone.set(row, GenerationConfig(temperature=temperature, seed=row))
        everyone.begin(row, 1, CONTEXT[1])
        drafter.read(row, torch.tensor(CONTEXT[:1]))
    rows = everyone.narrow(0, 3, [GenerationConfig(temperature=1.0)])
    tree_batch = make_tree_batch([TokenTree((-1, 0, 0))] * 3, torch.device("cpu"))
    proposal = drafter.draft(rows, tree_batch, 1, 8, False)
    with torch.no_grad():
        logits = model(torch.tensor([CONTEXT]))[0, -1].double()
    noise = naive.token_noise(rows.seed, torch.full((3, 1), 2), 40)[:, 0]
    best = (logits / 0.6 + noise).topk(2).indices
    if dtype is torch.float64:
        assert proposal.tokens[:, 1:].tolist() == best.tolist()
    assert proposal.logits is None and proposal.points is None
    proposal = ModelDrafter(model, 3, 16, 4, temperature=0.6).draft(rows, tree_batch, 1, 8, True)
    assert proposal.points.tolist() == [[False] * 3] * 2 + [[True] * 3]
    assert proposal.logits.dtype is torch.promote_types(dtype, torch.float32)
    seen = naive.distribution(proposal.logits[:2, 0], rows.temperature[:2])
    plain = ModelDrafter(model, 3, 16, 4).draft(rows, tree_batch, 1, 8, True).logits[:2, 0]
    assert torch.allclose(seen, (plain.double() / 0.6).softmax(-1), rtol=1e-5)


@pytest.mark.quick(1)
@pytest.mark.parametrize("verifier", ["coupled", "multi_step"])
@pytest.mark.parametrize(
    "tree", [costly("chain-3"), "dyspec-2-3-5", costly("paper")]
)
def test_greedy_texts_are_plain_decodings(tree, verifier, captured_on_cpu):
    """Rows of all temperatures decode together; some greedy drafts are not the best tokens."""
    target, drafts = tiny_model(1), tiny_model(1)
    prompts = [
        Request([1, 2, at], GenerationConfig(12, t, seed=3)) for at, t in ((3, 0.0), (4, 0.9))
    ]
    wanted = BatchDecoder(target, num_rows=2, max_length=64).generate(prompts)
    spec = ModelDrafterSpec(drafts, temperature=3.0)
    decoder = BatchDecoder(target, spec, tree, num_rows=2, max_length=64, verifier=verifier)
    outputs = decoder.generate(prompts)
    assert outputs[0].tokens == wanted[0].tokens
    assert verifier != "coupled" or outputs[1].tokens == wanted[1].tokens
    cool = replace(spec, temperature=None)
    decoder = BatchDecoder(target, cool, tree, num_rows=2, max_length=64, verifier=verifier)
    surer = decoder.generate(prompts[:1])[0].stats
    assert sum(outputs[0].stats.accepted_per_call) < sum(surer.accepted_per_call)


def test_n_grams_are_grafted_on_it():
    target = tiny_model(1)
    request = Request([1, 2, 1, 2, 1], GenerationConfig(12))
    (wanted,) = BatchDecoder(target, num_rows=1, max_length=64).generate([request])
    drafter = NGram(2, (), target, temperature=0.6)
    for verifier in ("coupled", "multi_step"):
        decoder = BatchDecoder(
            target, drafter, "paper", num_rows=1, max_length=64, verifier=verifier
        )
        assert decoder.generate([request])[0].tokens == wanted.tokens
