"""Heads of a target as drafters, MTP and EAGLE-3: their logits are a reference's, and the same
tokens come out as without them."""

import functools
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import eagle_heads
import pytest
import torch
from checkpoint_folders import edit_json
from enumerated import SETTINGS, assert_targets, block_distribution
from families import random_reference
from lanes import costly, quick_first
from mtp_heads import VOCAB, head_logits, save_with_head
from safetensors.torch import load_file, save_file
from toys import TableTarget, answered_as_plain, mixed_requests, tiny_model
from watched import watch

import stree
from stree import Decoder, GenerationConfig, TokenTree
from stree.checkpoints.heads.eagle import plan_eagle
from stree.checkpoints.heads.mtp import plan_mtp
from stree.checkpoints.load_save import load_model
from stree.checkpoints.plan.build import build
from stree.common.errors import CheckpointRefused, UsageError
from stree.drafters.model import ModelDrafter
from stree.drafters.names import DrafterName
from stree.drafters.ngram import NGram
from stree.models.hidden_states import HiddenStateTap
from stree.models.slicing import share_ends
from stree.trees.token_tree import as_tree
from stree.verifiers.rejection import Block, MultiStep, Naive, Traversal

DENSE, EXPERTS, NEXT = ("qwen3_5", 0), ("qwen3_5", 1), ("qwen3_next", 1)
NEMOTRON = "nemotron", 0
EAGLE = "llama-8", ("seed", 11)  # in SafeAILab's layout; options are those of `save_head`
SPECULATORS = (
    "qwen3_5", ("seed", 7), ("speculators", True), ("kind", "qwen3"), ("layers", (1, 2)),
    ("options", ("norm_before_residual",)),
)
LATER = (
    "qwen3_5", ("seed", 5), ("speculators", True), ("layers", (1, 2)), ("own_embedding", True),
    ("options", ("norm_before_residual", "fc_norm", "norm_output")),
)
WHOLE = "bamba", ("layers", (1,)), ("whole_head", True), ("options", ("norm_before_fc",))
CHAIN, PAPER = TokenTree.chain(3), TokenTree.paper()
PROMPTS = [[7, 3, 0, 1, 5, 5, 2], [4]]


@functools.cache
def saved(family, *options):
    """Return the folder of a target with a head, and the reference's logits of that head.

    An MTP head is in the target's checkpoint, an EAGLE-3 head in the folder `eagle` in it.
    """
    folder = Path(tempfile.mkdtemp(prefix=family))
    if options and isinstance(options[0], int):
        return folder, functools.partial(head_logits, *save_with_head(folder, family, *options))
    theirs = eagle_heads.random_target(family)
    theirs.save_pretrained(folder)
    head = eagle_heads.save_head(folder / "eagle", theirs, **dict(options))
    return folder, functools.partial(eagle_heads.head_logits, theirs, head)


def pair(of, dtype=torch.float32):
    folder, _ = saved(*of)
    target, eagle = load_model(folder, dtype=dtype), folder / "eagle"
    if eagle.exists():
        drafter = build(plan_eagle(eagle, target.config), dtype=dtype)
    else:
        drafter = build(plan_mtp(folder), dtype=dtype)
    share_ends(drafter, target)
    return target, drafter


def require_drafts_of(reference, drafts, text):
    """Require the logits of all drafts to be those of the reference."""
    depths = set()
    for _, at, tree, tokens, drawn_by, logits in drafts:
        for node in range(tree.num_nodes):
            if tree.children[node]:
                path = [tokens[each] for each in tree.path_to(node)]
                given = torch.tensor([text[:at] + path])
                wanted, got = reference(given, at + 1)[-1], logits[drawn_by[node]]
                there = wanted.isfinite()
                assert torch.equal(got.isfinite(), there)
                got, wanted = got[there], wanted[there]
                assert (got - wanted).abs().max() <= 1e-4 * wanted.abs().max()
                depths.add(len(path))
    assert depths >= {1, 2, 3}


@pytest.mark.quick(4)
@pytest.mark.parametrize("tree", [costly(CHAIN), PAPER], ids=str)
@pytest.mark.parametrize(
    "of", [DENSE, EXPERTS, NEXT, NEMOTRON, EAGLE, SPECULATORS, LATER, WHOLE],
    ids=["dense", "experts", "next", "nemotron", "eagle", "speculators", "later", "whole"],
)
def test_logits_at_each_depth_are_the_references(of, tree, either_way):
    """Of MTP heads it is transformers' class, of EAGLE-3 heads transformers' layer."""
    _, reference = saved(*of)
    target, drafter = pair(of)
    accepted = []
    for prompt, num_tokens in zip(PROMPTS, (16, 6), strict=True):
        watched = watch(drafter, 1, 64, tree.num_nodes)
        decoder = Decoder(target, watched, tree, max_length=64)
        out = decoder.generate(prompt, GenerationConfig(num_tokens, ignore_eos=True))
        require_drafts_of(reference, watched.drafts, prompt + out.tokens)
        accepted += out.stats.accepted_per_call
    assert len(set(accepted)) > 1


@pytest.mark.parametrize("of", [DENSE, EAGLE], ids=["mtp", "eagle"])
@torch.no_grad()
def test_packed_samples_are_read_as_in_decoding(of):
    _, reference = saved(*of)
    target, drafter = pair(of)
    tokens, features = torch.tensor([PROMPTS[0]]), HiddenStateTap(drafter.config.feature_layers)
    target.hidden_states(tokens, features=features)
    segments, read = torch.tensor([[0] * 7 + [1] * 7]), features.values.repeat(1, 2, 1)
    hidden = drafter.hidden_states(tokens.repeat(1, 2), segments, read=read)
    wanted = reference(tokens, 7)[0]
    for at in (6, 13):
        assert torch.allclose(drafter.logits(hidden[0, at]), wanted, atol=1e-4)


@pytest.mark.quick(1)
@pytest.mark.parametrize("of", [DENSE, EAGLE], ids=["mtp", "eagle"])
@pytest.mark.parametrize(
    ("verifier", "graphs"),
    quick_first(
        [("coupled", True)], [("multi_step", True), ("naive", False)], [("traversal", False)]
    ),
)
def test_it_changes_no_token_of_the_output(verifier, graphs, of, request):
    if graphs:
        request.getfixturevalue("captured_on_cpu")
    target, drafter = pair(of, torch.float64)
    served = [
        replace(each, prompt_ids=[token % VOCAB for token in each.prompt_ids])
        for each in mixed_requests(6, [TokenTree.chain(1), CHAIN, PAPER], seed=3)
    ]
    outputs = answered_as_plain(target, drafter, served, verifier)
    assert len({num for out in outputs for num in out.stats.accepted_per_call}) > 2


@pytest.mark.parametrize("of", [DENSE, SPECULATORS], ids=["mtp", "eagle"])
def test_it_fills_trees_that_grow(of):
    target, drafter = pair(of, torch.float64)
    generation = GenerationConfig(20, temperature=1.0, seed=3, ignore_eos=True)
    out = Decoder(target, drafter, as_tree("beam-3-3-8")).generate(PROMPTS[0], generation)
    assert out.tokens == Decoder(target).generate(PROMPTS[0], generation).tokens
    assert out.stats.acceptance_length > 1


def test_the_text_that_is_grafted_on_it_has_the_first_token(either_way):
    target, drafter = pair(DENSE)
    decoder = Decoder(target, NGram(3, model=drafter), PAPER, max_length=64)
    out = decoder.generate(PROMPTS[0], GenerationConfig(9, ignore_eos=True))
    text, wanted = decoder.batch.drafter.text, PROMPTS[0] + out.tokens
    known = text.texts[0, text.start :].tolist()[: int(text.num_read[0])]
    assert len(known) > len(PROMPTS[0]) and known == wanted[: len(known)]


@pytest.mark.parametrize("of", [DENSE, EAGLE], ids=["mtp", "eagle"])
def test_it_has_the_same_place_after_a_kept_prefix(of, either_way):
    """It reads one token less than the target, the first."""
    target, drafter = pair(of, torch.float64)
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


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("verifier", "tree"),
    quick_first(
        [(MultiStep, TokenTree((-1, 0, 0))), (Block, TokenTree.chain(2))],
        [(Traversal, TokenTree((-1, 0, 0, 2))), (Naive, TokenTree((-1, 0, 0)))],
    ),
)
@pytest.mark.parametrize("kind", ["fused_inputs", "eagle_inputs"])
def test_output_distribution_is_the_targets(verifier, tree, kind):
    """All draws and coins of a step are enumerated; the EAGLE head never drafts token 1."""
    torch.manual_seed(2)
    table = 1.5 * torch.randn(3, 3, 3, dtype=torch.float64)
    model = tiny_model(
        1, vocab_size=3, num_layers=1, attn_layers=(), layer_types=("attention mlp",),
        feature_layers=(1,), target_width=32, target_num_layers=2, own_features=True,
        head_vocab_size=2 * (kind == "eagle_inputs"), **{kind: True},
    )
    if model.head_ids is not None:
        model.head_ids.copy_(torch.tensor([0, 2]))
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


def changed(name, change):
    """Return a change of weight files: that of one tensor."""

    def change_file(folder):
        path = folder / "model.safetensors"
        tensors = load_file(path)
        tensors[name] = change(tensors[name]).contiguous()
        save_file(tensors, path)

    return change_file


def keys(table=None, **values):
    """Return a change of config.json, or of a table in it."""

    def change(folder):
        path = folder / "config.json"
        if table is None:
            return edit_json(path, **values)
        return edit_json(path, **{table: json.loads(path.read_text())[table] | values})

    return change


def refuse_targets(monkeypatch):
    """Let `stree.load` build drafters alone."""

    def build_drafter(plan, *given):
        assert plan.zeros, "a target was read"
        return build(plan, *given)

    monkeypatch.setattr("stree.loading.build", build_drafter)


def announced_elsewhere(folder):
    """Leave an index that names a shard which was not copied."""
    path = folder / "model.safetensors"
    names = dict.fromkeys(load_file(path), "model-00001-of-00002.safetensors")
    names |= {name: "model-00002-of-00002.safetensors" for name in names if name.startswith("mtp.")}
    path.rename(folder / "model-00001-of-00002.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))


def test_a_head_for_each_of_several_depths_is_refused(tmp_path):
    """Nemotron's key counts depths, and its pattern the layers of one depth."""
    save_with_head(tmp_path, "nemotron", 0)
    assert plan_mtp(tmp_path).config.num_layers > 1
    keys(num_nextn_predict_layers=2)(tmp_path)
    with pytest.raises(CheckpointRefused, match="num_nextn_predict_layers = 2; only 1"):
        plan_mtp(tmp_path)


LAYER = "transformer_layer_config"


@pytest.mark.parametrize(
    ("of", "change", "complaint"),
    [
        (DENSE, without("mtp."), "holds no MTP head .* whatever its config announces"),
        (DENSE, without("mtp.fc"), r"mtp\.fc\.weight missing"),
        (DENSE, without("mtp.layers.0.mlp"), r"mtp\.layers\.0\.mlp\.gate_proj\.weight, .* missing"),
        (DENSE, changed("mtp.fc.weight", lambda fc: fc[:, :-1]), r"mtp\.fc\.weight .* has shape"),
        (DENSE, announced_elsewhere, "00002-of-00002.* is missing"),
        (DENSE, keys(mtp_num_hidden_layers=2), "mtp_num_hidden_layers = 2; only 1"),
        (DENSE, keys(mtp_use_dedicated_embeddings=True), "mtp_use_dedicated_embeddings = Tr"),
        (EAGLE, without("d2t"), "EAGLE-3 model .* d2t missing"),
        (EAGLE, without("lm_head"), r"lm_head\.weight missing"),
        (EAGLE, without("midlayer.hidden_norm"), r"midlayer\.hidden_norm\.weight missing"),
        (EAGLE, changed("d2t", lambda d2t: d2t.flip(0)), "not ascending token ids below 8"),
        (EAGLE, changed("d2t", lambda d2t: d2t + 1), "not ascending token ids below 8"),
        (EAGLE, changed("fc.weight", lambda fc: fc[:, :-1]), r"fc\.weight .* has shape"),
        (EAGLE, keys(draft_vocab_size=5), r"d2t in .* has shape \(6,\), its config"),
        (EAGLE, keys(vocab_size=9), "a target of vocabulary 9, this one has 8: take the head"),
        (EAGLE, keys(target_hidden_size=64), "a target of width 64, this one has 32: take"),
        (EAGLE, keys(hidden_size=16, target_hidden_size=32), "its width 16 is not the target's"),
        (EAGLE, keys(draft_vocab_size=None), "describes no EAGLE-3 head"),
        (EAGLE, keys(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state = F"),
        (EAGLE, keys(parallel_drafting=True), "parallel_drafting = True; only False"),
        (EAGLE, keys(rope_scaling={"type": "dynamic", "factor": 2.0}), "rope type 'dynamic'"),
        (SPECULATORS, keys(eagle_aux_hidden_state_layer_ids=[1, 9]), "of layers .1, 9., the targ"),
        (SPECULATORS, keys(eagle_aux_hidden_state_layer_ids=[1]), r"fc\.weight in .* has shape"),
        (SPECULATORS, keys(speculators_model_type="eagle"), "'eagle'; only 'eagle3' is supp"),
        (SPECULATORS, keys(LAYER, model_type="gpt2"), "model_type 'gpt2', wanted llama or qwen3"),
        (SPECULATORS, keys(LAYER, hidden_act="gelu"), "hidden_act = 'gelu'; only 'silu'"),
    ],
)
def test_heads_that_are_not_whole_or_do_not_fit_are_refused(
    of, change, complaint, tmp_path, monkeypatch
):
    """No target is read before."""
    folder = shutil.copytree(saved(*of)[0], tmp_path / "target")
    head = folder if of is DENSE else folder / "eagle"
    change(head)
    refuse_targets(monkeypatch)
    monkeypatch.setattr("stree.loading.load_tokenizer", lambda folder: None)
    with pytest.raises(CheckpointRefused, match=complaint):
        name = "mtp" if of is DENSE else f"eagle:{head}"
        stree.load(folder, name, tree="paper", device="cpu")


def test_an_eagle_head_is_loaded_by_its_name(monkeypatch):
    folder, _ = saved(*EAGLE)
    monkeypatch.setattr("stree.loading.load_tokenizer", lambda folder: None)
    plain = stree.load(folder, device="cpu").generate(PROMPTS[0], GenerationConfig(12))
    for form in ("eagle:{}", "float8:eagle:{}", "eagle:{}+ngram:3"):
        decoder = stree.load(folder, form.format(folder / "eagle"), tree="paper", device="cpu")
        assert decoder.generate(PROMPTS[0], GenerationConfig(12)).tokens == plain.tokens
    with pytest.raises(CheckpointRefused, match="name it as the drafter eagle:FOLDER"):
        stree.load(folder, folder / "eagle", tree="paper", device="cpu")
    for name in ("eagle:ngram", "eagle:mtp", "eagle:float8:x", "eagle:text:x"):
        with pytest.raises(UsageError, match="wanted eagle:FOLDER"):
            DrafterName.parse(name)


def test_other_families_have_no_head_that_is_known(tmp_path):
    random_reference("bamba", 0).save_pretrained(tmp_path)
    with pytest.raises(CheckpointRefused, match="Bamba, of which no MTP head is known"):
        plan_mtp(tmp_path)


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    "name", ["mtp", "float8:mtp", "top:mtp", "temperature=0.6:mtp", "mtp+ngram:3", "eagle"]
)
def test_both_entrances_take_it_by_its_name(name, tmp_path, monkeypatch):
    """The MTP head lies apart here, in mtp.safetensors."""
    theirs, _ = save_with_head(tmp_path, *DENSE, apart=True)
    if name == "eagle":
        eagle_heads.save_head(tmp_path / "head", theirs, layers=[1, 2])
        name = f"eagle:{tmp_path / 'head'}"
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
