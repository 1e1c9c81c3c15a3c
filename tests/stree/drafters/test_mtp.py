"""The MTP head of a checkpoint as a drafter: its logits are transformers' own, and the same tokens
come out as without it."""

import functools
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_folders import edit_json
from enumerated import SETTINGS, assert_targets, block_distribution
from families import random_reference
from lanes import quick_first
from mtp_heads import VOCAB, head_logits, save_with_head
from safetensors.torch import load_file, save_file
from toys import TableTarget, mixed_requests, tiny_model
from watched import watch

import stree
from stree import BatchDecoder, Decoder, GenerationConfig, TokenTree
from stree.checkpoints.load_save import load_model
from stree.checkpoints.mtp import load_mtp
from stree.common.errors import CheckpointRefused, UsageError
from stree.drafters.model import ModelDrafter
from stree.models.hidden_states import HiddenStateTap
from stree.trees.token_tree import as_tree
from stree.verifiers.rejection import Block, MultiStep, Naive, Traversal

DENSE, EXPERTS, NEXT = ("qwen3_5", 0), ("qwen3_5", 1), ("qwen3_next", 1)
NEMOTRON = "nemotron", 0
CHAIN, PAPER = TokenTree.chain(3), TokenTree.paper()
PROMPTS = [[7, 3, 0, 1, 5, 5, 2], [4]]


@functools.cache
def saved(family, seed):
    """Return the folder of a checkpoint with an MTP head, and transformers' target and head."""
    folder = Path(tempfile.mkdtemp(prefix=family))
    return folder, *save_with_head(folder, family, seed)


def pair(folder, dtype=torch.float32):
    target, drafter = load_model(folder, dtype=dtype), load_mtp(folder, dtype=dtype)
    drafter.share_ends(target)
    return target, drafter


def require_drafts_of(theirs, head, drafts, text):
    """Require the logits of all drafts to be those of transformers' head."""
    depths = set()
    for _, at, tree, tokens, drawn_by, logits in drafts:
        for node in range(tree.num_nodes):
            if tree.children[node]:
                path = [tokens[each] for each in tree.path_to(node)]
                given = torch.tensor([text[:at] + path])
                wanted = head_logits(theirs, head, given, at + 1)[-1]
                assert (logits[drawn_by[node]] - wanted).abs().max() <= 1e-4 * wanted.abs().max()
                depths.add(len(path))
    assert depths >= {1, 2, 3}


@pytest.mark.parametrize("tree", [CHAIN, PAPER], ids=str)
@pytest.mark.parametrize(
    "of", [DENSE, EXPERTS, NEXT, NEMOTRON], ids=["dense", "experts", "next", "nemotron"]
)
def test_logits_at_each_depth_are_those_of_transformers_head(of, tree, either_way):
    folder, theirs, head = saved(*of)
    target, drafter = pair(folder)
    accepted = []
    for prompt, num_tokens in zip(PROMPTS, (16, 6), strict=True):
        watched = watch(drafter, 1, 64, tree.num_nodes)
        decoder = Decoder(target, watched, tree, max_length=64)
        out = decoder.generate(prompt, GenerationConfig(num_tokens, ignore_eos=True))
        require_drafts_of(theirs, head, watched.drafts, prompt + out.tokens)
        accepted += out.stats.accepted_per_call
    assert len(set(accepted)) > 1


@torch.no_grad()
def test_packed_samples_are_read_as_in_decoding():
    folder, theirs, head = saved(*DENSE)
    target, drafter = pair(folder)
    tokens, features = torch.tensor([PROMPTS[0]]), HiddenStateTap(drafter.config.feature_layers)
    target.hidden_states(tokens, features=features)
    segments, read = torch.tensor([[0] * 7 + [1] * 7]), features.values.repeat(1, 2, 1)
    hidden = drafter.hidden_states(tokens.repeat(1, 2), segments, read=read)
    wanted = head_logits(theirs, head, tokens, 7)[0]
    for at in (6, 13):
        assert torch.allclose(drafter.logits(hidden[0, at]), wanted, atol=1e-4)


@pytest.mark.parametrize(
    ("verifier", "graphs"),
    quick_first(
        [("coupled", True), ("traversal", False)], [("multi_step", True), ("naive", False)]
    ),
)
def test_it_changes_no_token_of_the_output(verifier, graphs, request):
    if graphs:
        request.getfixturevalue("captured_on_cpu")
    target, drafter = pair(saved(*DENSE)[0], torch.float64)
    served = [
        replace(each, prompt_ids=[token % VOCAB for token in each.prompt_ids])
        for each in mixed_requests(6, [TokenTree.chain(1), CHAIN, PAPER], seed=3)
    ]
    decoder = BatchDecoder(
        target, drafter, num_rows=3, max_length=64, max_nodes=13, verifier=verifier
    )
    outputs = decoder.generate(served)
    for each, out in zip(served, outputs, strict=True):
        if verifier == "coupled" or not each.generation.temperature:
            plain = Decoder(target, max_length=64).generate(each.prompt_ids, each.generation)
            assert out.tokens == plain.tokens
    assert len({num for out in outputs for num in out.stats.accepted_per_call}) > 2


def test_it_fills_trees_that_grow():
    target, drafter = pair(saved(*DENSE)[0], torch.float64)
    generation = GenerationConfig(20, temperature=1.0, seed=3, ignore_eos=True)
    out = Decoder(target, drafter, as_tree("beam-3-3-8")).generate(PROMPTS[0], generation)
    assert out.tokens == Decoder(target).generate(PROMPTS[0], generation).tokens
    assert out.stats.acceptance_length > 1


def test_it_has_the_same_place_after_a_kept_prefix(either_way):
    """It reads one token less than the target, the first."""
    target, drafter = pair(saved(*DENSE)[0], torch.float64)
    turns = []
    for num_prefixes in (0, 3):
        watched, text = watch(drafter, 1, 128, PAPER.num_nodes), list(PROMPTS[0])
        decoder = Decoder(target, watched, PAPER, max_length=128, num_prefixes=num_prefixes)
        for turn in range(3):
            out = decoder.generate(text, GenerationConfig(9))
            text = [*text, *out.tokens, turn, 4]
        assert (out.stats.num_reused_tokens > 7) == bool(num_prefixes)
        turns.append((text, watched.drafts))
    assert turns[0][0] == turns[1][0]
    for mine, wanted in zip(turns[1][1], turns[0][1], strict=True):
        assert mine[:4] == wanted[:4]
        assert torch.allclose(mine[-1], wanted[-1], atol=1e-9)


class TargetWithStreams(TableTarget):
    """A table with a residual stream of width 32, which depends on a node's token alone."""

    def tree_batch_forward(self, tokens, tree_batch, cache, bound, features=None):
        if features is not None:
            torch.manual_seed(1)
            stream = torch.randn(3, 32, dtype=self.dtype)[tokens]
            features.take(features.layers[0], stream)
        return super().tree_batch_forward(tokens, tree_batch, cache, bound)


@pytest.mark.parametrize(
    ("verifier", "tree"),
    quick_first(
        [(MultiStep, TokenTree((-1, 0, 0))), (Block, TokenTree.chain(2))],
        [(Traversal, TokenTree((-1, 0, 0, 2))), (Naive, TokenTree((-1, 0, 0)))],
    ),
)
def test_output_distribution_is_the_targets(verifier, tree):
    """All draws and coins of a step are enumerated."""
    torch.manual_seed(2)
    table = 1.5 * torch.randn(3, 3, 3, dtype=torch.float64)
    model = tiny_model(
        1, vocab_size=3, num_layers=1, attn_layers=(), layer_types=("attention mlp",),
        feature_layers=(1,), target_width=32, target_num_layers=2, own_features=True,
        fused_inputs=True,
    )
    drafter = ModelDrafter(model, 2, 16, 4)
    blocks = block_distribution(TargetWithStreams(table), drafter, tree, SETTINGS[0], verifier)
    assert_targets(blocks, table, SETTINGS[0], tree)
    assert any(len(block) > 1 for block in blocks)


def without(*left_out):
    """Return a change of weight files: leave tensors out of them."""

    def change(folder):
        path = folder / "model.safetensors"
        save_file(
            {name: each for name, each in load_file(path).items() if not name.startswith(left_out)},
            path,
        )

    return change


def reshaped(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"][:, :-1].contiguous()
    save_file(tensors, path)


def announced_elsewhere(folder):
    """Leave an index that names a shard which was not copied."""
    path = folder / "model.safetensors"
    names = dict.fromkeys(load_file(path), "model-00001-of-00002.safetensors")
    names |= {name: "model-00002-of-00002.safetensors" for name in names if name.startswith("mtp.")}
    path.rename(folder / "model-00001-of-00002.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (without("mtp."), "holds no MTP head .* whatever its config announces"),
        (without("mtp.fc"), r"mtp\.fc\.weight missing"),
        (without("mtp.layers.0.mlp"), r"mtp\.layers\.0\.mlp\.gate_proj\.weight, .* missing"),
        (reshaped, r"mtp\.fc\.weight in .* has shape"),
        (announced_elsewhere, "00002-of-00002.* is missing"),
        (lambda folder: edit_json(folder / "config.json", mtp_num_hidden_layers=2),
         "mtp_num_hidden_layers = 2; only 1"),
        (lambda folder: edit_json(folder / "config.json", mtp_use_dedicated_embeddings=True),
         "mtp_use_dedicated_embeddings = True; only False"),
    ],
)
def test_heads_that_are_not_whole_are_refused(change, complaint, tmp_path, monkeypatch):
    """No target is read before."""
    save_with_head(tmp_path, *DENSE)
    change(tmp_path)
    monkeypatch.setattr("stree.loading.load_model", lambda *_: pytest.fail("a target was read"))
    monkeypatch.setattr("stree.loading.load_tokenizer", lambda folder: None)
    with pytest.raises(CheckpointRefused, match=complaint):
        stree.load(tmp_path, "mtp", device="cpu")


def test_other_families_have_no_head_that_is_known(tmp_path):
    random_reference("bamba", 0).save_pretrained(tmp_path)
    with pytest.raises(CheckpointRefused, match="Bamba, of which no MTP head is known"):
        load_mtp(tmp_path)


@pytest.mark.parametrize(
    "name", ["mtp", "float8:mtp", "top:mtp", "temperature=0.6:mtp", "mtp+ngram:3"]
)
def test_both_entrances_take_it_by_its_name(name, tmp_path, monkeypatch):
    """The head lies apart here, in mtp.safetensors."""
    theirs, _ = save_with_head(tmp_path, *DENSE, apart=True)
    monkeypatch.setattr("stree.loading.load_tokenizer", lambda folder: None)
    decoder = stree.load(tmp_path, name, tree=CHAIN, device="cpu", max_length=64)
    wanted = theirs.generate(
        torch.tensor(PROMPTS[:1]), max_new_tokens=9, do_sample=False, eos_token_id=None
    )
    out = decoder.generate(PROMPTS[0], GenerationConfig(9, ignore_eos=True))
    assert PROMPTS[0] + out.tokens == wanted[0].tolist()
    model = type(theirs).from_pretrained(tmp_path)
    decoder = stree.from_transformers(model, name, CHAIN)
    got = decoder.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=9, eos_token_id=None)
    assert torch.equal(got, wanted)


def test_a_model_without_a_checkpoint_has_no_head_to_load():
    with pytest.raises(UsageError, match="not loaded from one: load it by from_pretrained"):
        stree.from_transformers(random_reference(*DENSE), "mtp")
