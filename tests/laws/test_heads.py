"""A drafter's head over some tokens, or of low rank: exact, and drafting as the same drafter would
whose whole head gives all other tokens −∞."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from captures import nothing_waits
from enumerated import SETTINGS, block_distribution, distance, length_of
from lanes import quick_first
from safetensors.torch import load_file, save_file
from toys import (
    TableTarget,
    mixed_requests,
    reading,
    right_now_and_then,
    tiny_config,
    tiny_model,
    with_head,
)

from stree import AdaptiveTrees, BatchDecoder, Decoder, GenerationConfig, Request, TokenTree
from stree.batching.state import BatchState
from stree.checkpoints.load_save import load_model, save_model
from stree.common.errors import CheckpointRefused, UsageError
from stree.drafters.model import ModelDrafter
from stree.drafters.ngram import NGram
from stree.models.model import HybridModel
from stree.trees.build import make_tree_batch
from stree.trees.token_tree import BeamTree
from stree.verifiers.rejection import Block, MultiStep, Naive, Traversal
from stree_kernels import ops

IDS = [0, 3, 4, 7, 11, 12, 13, 20, 21, 22, 23, 30, 31, 33, 40, 41, 42, 50, 55, 60]


class Masked(HybridModel):
    """Model with a whole head that gives all tokens but IDS −∞."""

    def head_logits(self, hidden):
        ids = torch.tensor(IDS)
        logits = super().head_logits(hidden)
        return torch.full_like(logits, -torch.inf).index_copy(-1, ids, logits[..., ids])

    def draw_children(self, hidden, *others, slots=None):
        logits = self.head_logits(hidden if isinstance(hidden, torch.Tensor) else ops.norm(hidden))
        ops.choose_children(logits, *others)
        return logits


def drafters() -> tuple[HybridModel, HybridModel, HybridModel]:
    """Return a target, a drafter with a head over IDS, and its twin with a masked whole head."""
    target = tiny_model(1, tie_embeddings=True)
    whole = right_now_and_then(target)
    masked = Masked(whole.config).double().eval()
    masked.load_state_dict(whole.state_dict())
    return target, with_head(whole, ids=torch.tensor(IDS)), masked


def accepted_by_twins(target, own, twin, tree, verifier="coupled"):
    """Return what each call of `own` accepts, and assert that it drafts as its twin does.

    Requests of all settings give the same token for token and call for call; with `coupled` their
    text is plain decoding's.
    """
    requests = mixed_requests(5, [tree], seed=4)
    mine, twins = (
        BatchDecoder(target, drafter, tree, num_rows=3, max_length=80, verifier=verifier).generate(
            requests
        )
        for drafter in (own, twin)
    )
    accepted = [each.stats.accepted_per_call for each in mine]
    assert [each.tokens for each in mine] == [each.tokens for each in twins]
    assert accepted == [each.stats.accepted_per_call for each in twins]
    assert sum(map(sum, accepted)) > max(5, 0.1 * sum(map(len, accepted)))
    if verifier == "coupled":
        roots = [dataclasses.replace(each, tree=TokenTree.chain(0, "root")) for each in requests]
        plain = BatchDecoder(target, num_rows=3, max_length=80).generate(roots)
        assert [each.tokens for each in plain] == [each.tokens for each in mine]
    return accepted


@pytest.mark.parametrize(
    "tree, verifier",
    quick_first(
        [(BeamTree.of(3, 3, 9), "coupled")],
        [(TokenTree.paper(), "coupled"), (TokenTree.chain(3), "traversal")],
        [(TokenTree((-1, 0, 0, 1)), "multi_step")],
    ),
)
def test_it_drafts_as_its_masked_twin_does(tree, verifier):
    """Noise of a column in place of its token's would show in what is accepted."""
    accepted_by_twins(*drafters(), tree, verifier)


@pytest.mark.costly
@pytest.mark.parametrize("tree", quick_first([(TokenTree.paper(),)], [(BeamTree.of(3, 3, 9),)]))
def test_a_drafter_that_reads_features_drafts_as_its_masked_twin_does(tree, captured_on_cpu):
    target, ids = tiny_model(1), torch.tensor(IDS)
    whole = reading(target)
    masked = Masked(whole.config).double().eval()
    masked.load_state_dict(whole.state_dict())
    accepted = accepted_by_twins(target, with_head(whole, ids=ids), masked, tree)
    blind = [with_head(right_now_and_then(target), ids=ids)] * 2
    assert accepted_by_twins(target, *blind, tree) != accepted  # so features are read


def test_with_n_grams_and_with_fed_paths_it_stays_lossless():
    target, own, _ = drafters()
    setting = GenerationConfig(24, temperature=0.8, seed=3)
    wanted = Decoder(target, max_length=64).generate([5, 6, 7], setting).tokens
    for drafter, more in ((NGram(3, model=own), {}), (own, {"backtracking": "joint"})):
        decoder = Decoder(target, drafter, TokenTree.paper(), max_length=64, **more)
        assert decoder.generate([5, 6, 7], setting).tokens == wanted


@pytest.mark.quick(2)
@pytest.mark.parametrize("verifier", [Naive, MultiStep, Traversal, Block])
def test_output_distribution_is_the_targets(verifier):
    """The target goes where the drafter cannot."""
    trees = {Naive: [TokenTree((-1, 0, 0))], Block: [TokenTree.chain(2)]}.get(
        verifier, [TokenTree.chain(2), TokenTree((-1, 0, 0))]
    )
    longest = 0.0
    for seed, tree in enumerate(trees):
        torch.manual_seed(seed)
        target = 1.5 * torch.randn(3, 3, 3, dtype=torch.float64)
        model = tiny_model(seed, vocab_size=3, head_vocab_size=2, num_layers=1, attn_layers=())
        model.head_ids.copy_(torch.tensor([seed, 2]))
        drafter = ModelDrafter(model, 2, 16, 4)
        blocks = block_distribution(TableTarget(target), drafter, tree, SETTINGS[seed], verifier)
        assert distance(blocks, target, SETTINGS[seed], tree.max_depth + 1) <= 1e-10, tree
        longest = max(longest, length_of(blocks))
    assert longest > 1.2


def test_a_low_rank_head_is_the_product_of_its_two():
    model = tiny_model(3, head_rank=5, head_vocab_size=len(IDS))
    model.head_ids.copy_(torch.tensor(IDS))
    tokens = torch.arange(12)[None] % 61
    hidden = model.hidden_states(tokens)
    product = model.lm_head.weight @ model.head_down.weight
    logits = model(tokens)
    torch.testing.assert_close(logits[..., IDS], hidden @ product.T)
    others = [token for token in range(61) if token not in IDS]
    assert logits[..., others].eq(-torch.inf).all() and logits.shape[-1] == 61


def test_cutting_a_head_keeps_its_rows_and_the_best_approximation_of_its_rank():
    whole = tiny_model(2, tie_embeddings=True)
    ids = torch.tensor(IDS)
    cut = with_head(whole, ids=ids)
    assert torch.equal(cut.lm_head.weight, whole.head_weight[ids])
    assert torch.equal(cut.model.embed_tokens.weight, whole.model.embed_tokens.weight)
    low = with_head(whole, ids=ids, rank=4)
    rows = whole.head_weight[ids]
    left, sizes, right = torch.linalg.svd(rows, full_matrices=False)
    best = left[:, :4] * sizes[:4] @ right[:4]
    torch.testing.assert_close(low.lm_head.weight @ low.head_down.weight, best)
    with pytest.raises(UsageError, match="a head of its own already"):
        with_head(cut, rank=4)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"head_vocab_size": 62}, "head_vocab_size is 62, it must be at most 61"),
        ({"head_rank": -1}, "head_rank is -1"),
        ({"head_rank": 4, "tie_embeddings": True}, "set tie_embeddings to false"),
    ],
)
def test_heads_that_cannot_be_are_refused(changes, said):
    with pytest.raises(UsageError, match=said):
        tiny_config(**changes)


def test_more_siblings_than_tokens_of_the_head_are_refused():
    target, _, _ = drafters()
    drafter = with_head(right_now_and_then(target), ids=torch.tensor([3, 9]))
    with pytest.raises(UsageError, match="3 siblings for 2 tokens"):
        decoder = Decoder(target, drafter, TokenTree((-1, 0, 0, 0)), max_length=32)
        decoder.generate([1, 2], GenerationConfig(4))
    adaptive_trees = AdaptiveTrees(
        ["chain-3", TokenTree((-1, 0, 0, 0))]
    )  # the deepest is not the widest
    chosen = BatchDecoder(target, drafter, adaptive_trees, num_rows=1, max_length=96)
    with pytest.raises(UsageError, match="3 siblings for 2 tokens"):
        chosen.admit(Request([1, 2], GenerationConfig(4)))


def test_a_copy_with_a_head_keeps_what_is_wider_and_whose_it_is():
    model = tiny_model(1).to(torch.bfloat16)
    mixer = model.model.layers[0].mamba
    mixer.A_log.data = mixer.A_log.data.float()
    model.tokens_sha256 = "f"
    copy = with_head(model, ids=torch.tensor(IDS), rank=4)
    assert copy.model.layers[0].mamba.A_log.dtype == torch.float32
    assert copy.dtype == torch.bfloat16 and copy.tokens_sha256 == "f"
    copy.model.norm.weight.data.zero_()
    assert model.model.norm.weight.any()  # which it does not share


@pytest.mark.parametrize("keep_logits", [False, True])
def test_a_draft_waits_for_nothing(keep_logits):
    """A draft can be a graph."""
    _, own, _ = drafters()
    tree = TokenTree.paper()
    drafter = ModelDrafter(own, 1, 32, tree.num_nodes)
    drafter.read(0, torch.tensor([1, 2, 3]))
    everyone, tree_batch = BatchState.new(1, 8), make_tree_batch([tree], own.device)
    setting = GenerationConfig(temperature=0.9, top_k=5)
    everyone.set(0, setting)
    everyone.begin(0, 3, 4)
    rows = everyone.narrow(0, 1, [setting])
    with torch.no_grad(), nothing_waits():
        proposal = drafter.draft(rows, tree_batch, 1, 32, keep_logits)
    assert set(proposal.tokens[0, 1:].tolist()) <= set(IDS)
    assert (proposal.logits is not None) == keep_logits
    if keep_logits:
        assert proposal.logits.shape[-1] == 61 and proposal.logits.isfinite().sum(-1).max() == 5


# Checkpoints


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, HybridModel]:
    model = tiny_model(5, torch.float32, head_vocab_size=len(IDS), head_rank=6)
    model.head_ids.copy_(torch.tensor(IDS))
    folder = tmp_path_factory.mktemp("headed") / "drafter"
    save_model(model, folder, dtype=torch.bfloat16)
    return folder, model


def test_it_is_saved_and_loaded_with_its_tokens(saved):
    folder, model = saved
    for dtype in (torch.float32, torch.bfloat16):
        loaded = load_model(folder, dtype=dtype)
        assert loaded.config == model.config
        assert loaded.head_ids.dtype == torch.long and loaded.head_ids.tolist() == IDS
        assert loaded.head_down.weight.dtype == dtype
    weight = model.lm_head.weight.to(torch.bfloat16)
    assert torch.equal(loaded.lm_head.weight, weight)


DAMAGES = {
    "not ascending": (lambda ids: ids.flip(0), "not ascending token ids below 61"),
    "one twice": (lambda ids: ids[[0, 0, *range(2, len(IDS))]], "not ascending"),
    "out of range": (lambda ids: ids + 1, "not ascending token ids below 61"),
    "negative": (lambda ids: ids - 1, "not ascending"),
    "too few": (lambda ids: ids[1:], r"head_ids in .* has shape \(19,\)"),
    "fractions": (lambda ids: ids.float(), "stored as F32, wanted one of I64"),
    "missing": (lambda ids: None, "head_ids missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_ids_are_refused(saved, tmp_path, damage):
    change, said = DAMAGES[damage]
    folder = Path(shutil.copytree(saved[0], tmp_path / "drafter"))
    (folder / "MANIFEST.json").unlink()
    weights = load_file(folder / "model.safetensors")
    ids = change(weights.pop("head_ids"))
    if ids is not None:
        weights["head_ids"] = ids.contiguous()
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointRefused, match=said):
        load_model(folder)


def test_a_config_whose_head_cannot_be_is_refused(saved, tmp_path):
    folder = Path(shutil.copytree(saved[0], tmp_path / "drafter"))
    (folder / "MANIFEST.json").unlink()
    content = json.loads((folder / "config.json").read_text())
    content["hybrid_config"]["head_vocab_size"] = 10**6
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointRefused, match="head_vocab_size is 1000000"):
        load_model(folder)


# In 8 bits


@pytest.mark.costly
@pytest.mark.parametrize(
    "tree, verifier, rank",
    [
        (TokenTree.paper(), "coupled", None), (BeamTree.of(3, 3, 9), "coupled", None),
        (TokenTree((-1, 0, 0, 1)), "multi_step", 8),
    ],
    ids=["paper", "grown", "multi-step, low rank"],
)
def test_in_8_bits_it_drafts_as_a_head_of_those_numbers_does(tree, verifier, rank):
    target, _, _ = drafters()
    own, twin = (
        with_head(right_now_and_then(target), ids=torch.tensor(IDS), rank=rank) for _ in range(2)
    )
    own.put_head_in_8_bits()
    held = own.head_in_8_bits
    twin.lm_head.weight.data = held.values.double() * held.scale.double()
    assert not torch.equal(twin.lm_head.weight, own.lm_head.weight)
    accepted_by_twins(target, own, twin, tree, verifier)


@pytest.mark.parametrize("verifier", quick_first([(MultiStep,)], [(Traversal,)]))
def test_in_8_bits_the_output_distribution_is_the_targets(verifier):
    """Drafts are judged by the logits that they were drawn by."""
    torch.manual_seed(1)
    target = 1.5 * torch.randn(3, 3, 3, dtype=torch.float64)
    model = tiny_model(1, vocab_size=3, num_layers=1, attn_layers=(), tie_embeddings=True)
    model.put_head_in_8_bits()
    drafter, tree = ModelDrafter(model, 2, 16, 4), TokenTree((-1, 0, 0))
    blocks = block_distribution(TableTarget(target), drafter, tree, SETTINGS[1], verifier)
    assert distance(blocks, target, SETTINGS[1], tree.max_depth + 1) <= 1e-10
    assert length_of(blocks) > 1.2


def test_in_8_bits_a_head_follows_its_weights():
    """It follows when a cache is made, at the same address. Tied embeddings stay whole, and nothing
    of it is saved."""
    model = tiny_model(2, tie_embeddings=True)
    before, saved = model.model.embed_tokens.weight.clone(), set(model.state_dict())
    model.put_head_in_8_bits()
    held = model.head_in_8_bits
    assert torch.equal(model.model.embed_tokens.weight, before)
    assert set(model.state_dict()) == saved
    tokens = torch.arange(12)[None]
    logits, values = model(tokens), held.values.data_ptr()
    weight = held.values.double() * held.scale.double()
    torch.testing.assert_close(logits, model.hidden_states(tokens) @ weight.T)
    assert not torch.equal(weight, before)
    with torch.no_grad():
        model.model.embed_tokens.weight[3] *= 2
    model.new_cache(16, 1)
    assert model.head_in_8_bits is held and held.values.data_ptr() == values
    ratio = model.head_logits(model.hidden_states(tokens[:, :3]))[..., 3] / logits[:, :3, 3]
    torch.testing.assert_close(ratio, torch.full_like(ratio, 2.0))


def test_in_8_bits_on_a_gpu_without_them_is_refused(monkeypatch):
    model = tiny_model(2)
    monkeypatch.setattr(HybridModel, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A10")
    with pytest.raises(UsageError, match=r"compute capability 8\.9 or more, NVIDIA A10 is older"):
        model.put_head_in_8_bits()
