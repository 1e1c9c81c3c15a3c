"""Draft for a model of transformers: drafters, trees, further settings, conversations."""

import inspect

import pytest
import torch
from families import VOCAB
from hf_models import TREE, assert_same, decoder_of, prompts, reference

import stree
from stree.batching.batch_decoder import BatchDecoder
from stree.batching.step_timing import context_of, room_to_time
from stree.checkpoints.shared_weights import shared_model
from stree.common.errors import UsageError
from stree.common.words import device_name, dtype_name
from stree.hf_model import generate
from stree.models.model import HybridModel
from stree.models.slicing import slice_drafter
from stree.verifiers.rejection import MultiStep


@pytest.fixture(scope="module")
def granite():
    return reference("granite", 1)


# What drafts


@pytest.mark.parametrize("kind", ["theirs", "folder", "ngram", "none"])
def test_drafters(granite, kind, tmp_path):
    drafter = None
    if kind == "theirs":
        drafter = reference("lfm2")
    elif kind == "ngram":
        drafter = "ngram:2"
    elif kind == "folder":
        from stree.checkpoints.load_save import save_model

        save_model(slice_drafter(shared_model(granite), [0]), tmp_path / "drafter")
        drafter = str(tmp_path / "drafter")
    decoder, (ids, _) = stree.from_transformers(granite, drafter), prompts((6,))
    assert_same(granite, decoder, ids, max_new_tokens=8, do_sample=False)
    assert ("drafter NGram, tree" in repr(decoder)) == (kind == "ngram")
    assert ("TransformersDecoder(" in repr(decoder)) and decoder.outputs[0].stats.num_new_tokens
    assert isinstance(decoder.target, HybridModel)


@pytest.mark.parametrize(
    "name",
    ["chain-2 or paper", pytest.param("bandit chain-2 or paper", marks=pytest.mark.long)],
)
def test_a_tree_may_be_chosen_step_by_step(granite, name):
    drafter = slice_drafter(shared_model(granite), [0, 2])
    decoder = stree.from_transformers(granite, drafter, name)
    assert f"tree {name}" in repr(decoder)
    for lengths in ((6,), (9, 4)):  # of more rows, costs are measured again
        ids, mask = prompts(lengths)
        assert_same(granite, decoder, ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
        for each in decoder.outputs:
            assert each.stats.calls_by_tree.keys() <= {"plain", "chain-2", "paper"}
            assert each.stats.calls_by_tree.total() == each.stats.num_calls
    got = generate(granite, drafter=drafter, tree=name, inputs=ids, max_new_tokens=4)
    assert got.shape == (2, ids.shape[1] + 4)
    assert granite._stree_decoder.decoder.tree_policy.name == name


@pytest.mark.costly
def test_a_choice_with_costs_of_such_steps_measures_none(granite, monkeypatch):
    """Costs of one greedy row serve neither two rows nor sampled ones."""
    timed, measure = [], BatchDecoder.measure_step_times
    monkeypatch.setattr(
        BatchDecoder, "measure_step_times", lambda self, **options: (
            timed.append(options["generation"].temperature) or measure(self, **options)
        ),
    )
    place = dict(device=device_name(granite.device), dtype=dtype_name(granite.dtype))
    adaptive_trees = stree.AdaptiveTrees(["chain-2", "paper"])
    adaptive_trees.costs = stree.StepTimes(
        {(1, tree): 1.0 for tree in adaptive_trees.trees}, **place
    )
    decoder = stree.from_transformers(
        granite, slice_drafter(shared_model(granite), [0]), adaptive_trees
    )
    ids, mask = prompts((9, 4))
    decoder.generate(ids[:1], max_new_tokens=4, do_sample=False)
    assert timed == []
    decoder.generate(ids[:1], max_new_tokens=244, do_sample=True)
    assert timed == [1.0]
    decoder.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=True)
    assert timed == [1.0, 1.0]


def test_it_says_how_many_sequences_fit(granite):
    decoder = stree.from_transformers(granite, slice_drafter(shared_model(granite), [0]), "chain-2")
    assert decoder.room is None
    for lengths in ((6,), (9, 4)):
        ids, mask = prompts(lengths)
        decoder.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False)
        assert decoder.room.num_rows == len(lengths) and decoder.room.parts["drafter"] > 0
    assert "2 sequences at once, of up to 256 tokens: " in str(decoder.room)


@pytest.mark.costly
def test_a_choice_of_a_deep_tree_has_room_to_be_timed(granite):
    """The answers alone would fit buffers in which three steps of the tree do not."""
    decoder = stree.from_transformers(
        granite, slice_drafter(shared_model(granite), [0]), "chain-80"
    )
    ids, _ = prompts((6,))
    decoder.generate(ids, max_new_tokens=1, do_sample=False)
    without_choice = decoder._batch.max_length
    decoder = stree.from_transformers(granite, decoder.drafter, "chain-1 or chain-80")
    deepest = decoder.tree_policy.deepest
    assert room_to_time(deepest, without_choice, context_of(deepest, without_choice)) < 1
    assert_same(granite, decoder, ids, max_new_tokens=2, do_sample=False)
    assert not decoder.tree_policy.misfit(decoder.target, temperature=0.0, num_rows=1)


def test_generate_by_a_folder_of_custom_code(granite, tmp_path, monkeypatch):
    """transformers copies the folder's code to its cache and runs it, offline."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.setattr("sys.path", [str(tmp_path), *__import__("sys").path])
    ids, mask = prompts()
    drafter = slice_drafter(shared_model(granite), [0, 2])
    options = dict(attention_mask=mask, max_new_tokens=8, do_sample=False)
    wanted = granite.generate(ids, **options)
    door = dict(custom_generate=stree.CUSTOM_GENERATE, trust_remote_code=True)
    for _ in range(2):
        got = granite.generate(ids, **options, **door, drafter=drafter, tree=TREE)
        assert torch.equal(got, wanted)
    decoder = granite._stree_decoder.decoder
    assert decoder.drafter is drafter and decoder.tree is TREE
    assert torch.equal(granite.generate(ids, **options, **door), wanted)
    assert granite._stree_decoder.decoder is not decoder
    with pytest.raises(UsageError, match="num_beams = 2"):
        granite.generate(ids, num_beams=2, **door)
    with pytest.raises(ValueError, match="trust_remote_code"):
        granite.generate(ids, custom_generate=stree.CUSTOM_GENERATE, trust_remote_code=False)


def test_the_other_settings_of_load(granite):
    """Settings that neither transformers' generate nor the model has are those of `stree.load`."""
    taken = inspect.signature(stree.load).parameters.keys()
    of_the_model_or_call = {
        "target", "revision", "device", "dtype", "max_length", "temperature", "num_rows",
        "unknown", "offload", "target_dtype",
    }
    for door in (stree.from_transformers, generate):
        offered = inspect.signature(door).parameters.keys()
        assert taken - of_the_model_or_call <= offered
    ids, mask = prompts()
    options = dict(attention_mask=mask, max_new_tokens=8, do_sample=False)
    decoder = decoder_of(granite, verifier="multi_step", backtracking="joint", num_prefixes=2)
    assert_same(granite, decoder, ids, **options)
    batch = decoder._batch
    assert isinstance(batch.verifier, MultiStep) and batch.cache.last_tree is not None
    assert sum(sum(each.stats.accepted_per_call) for each in decoder.outputs) > 0
    told = dict(verifier="multi_step", backtracking="joint", num_prefixes=1)
    got = generate(granite, drafter=decoder.drafter, tree=TREE, **told, inputs=ids, **options)
    assert torch.equal(got, granite.generate(ids, **options))
    kept = granite._stree_decoder.decoder
    generate(granite, drafter=decoder.drafter, tree=TREE, inputs=ids, **options)
    assert granite._stree_decoder.decoder is not kept and kept._batch.cache.last_tree is not None
    for wrong in (dict(backtracking="undo"), dict(num_prefixes=-1), dict(verifier="none")):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            stree.from_transformers(granite, **wrong)


def test_an_unknown_tree_is_refused_before_the_drafter_is_loaded(granite, monkeypatch):
    monkeypatch.setattr("stree.hf_model._drafter", lambda *_: pytest.fail("loads the drafter"))
    with pytest.raises(UsageError, match="chian-2"):
        stree.from_transformers(granite, "drafter", "chian-2")


def test_a_conversation_reads_only_what_is_new(granite):
    decoder, (ids, _) = decoder_of(granite, num_prefixes=2), prompts((6,))
    options = dict(max_new_tokens=8, do_sample=False)
    first = assert_same(granite, decoder, ids, **options)
    second = torch.cat([first, ids], dim=1)
    assert_same(granite, decoder, second, **options)
    assert decoder.outputs[0].stats.num_reused_tokens >= ids.shape[1]
    plain = decoder_of(granite)
    plain.generate(ids, **options)
    plain.generate(second, **options)
    assert plain.outputs[0].stats.num_reused_tokens == 0


def test_buffers_serve_calls_that_fit_them(granite):
    decoder, (ids, mask) = decoder_of(granite), prompts()
    decoder.generate(ids, attention_mask=mask, max_new_tokens=4)
    kept = decoder._batch
    decoder.generate(ids[:1], max_new_tokens=8)
    assert decoder._batch is kept
    decoder.generate(
        torch.cat([ids, ids]), attention_mask=torch.cat([mask, mask]), max_new_tokens=4
    )
    assert decoder._batch is not kept and decoder._batch.num_rows == 6


def test_a_prompt_that_is_refused_leaves_no_row_taken(granite):
    decoder, (ids, _) = decoder_of(granite), prompts((6, 6))
    foreign = ids.clone()
    foreign[1, 2] = VOCAB
    for _ in range(2):
        with pytest.raises(UsageError, match=f"the prompt has the token {VOCAB}"):
            decoder.generate(foreign, max_new_tokens=4)
    assert_same(granite, decoder, ids, max_new_tokens=4, do_sample=False)
