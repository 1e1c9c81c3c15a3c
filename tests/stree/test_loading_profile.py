"""Load a decoder with the tree, costs and verifier that the drafter's profile recommends."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from tokenizers.normalizers import Lowercase
from toys import load_quietly

import stree
from stree import AdaptiveTrees, BanditTrees, Decoder, StepTimes, loading
from stree.checkpoints.identity import checkpoint_sha256
from stree.checkpoints.load_save import load_model, save_model
from stree.checkpoints.tokenizer import load_tokenizer
from stree.common.errors import CheckpointRefused, NotFound, UsageError
from stree.common.files import add_files
from stree.common.words import device_name
from stree.drafters.names import DrafterName
from stree.speculation_profile import PROFILE_NAME, Recommendation, SpeculationProfile, Tree
from stree.trees.token_tree import TokenTree
from stree.verifiers.coupled import Coupled
from stree.verifiers.rejection import MultiStep, Naive

pytestmark = pytest.mark.usefixtures("without_a_gpu")
WIDE = Tree(name="wide", parents=(-1, 0, 0, 0))
DEEP = Tree(name="deep", parents=(-1, 0, 1, 2, 3, 4))


def recommendation(tree: Tree | None, temperature: float = 0.0, **changes) -> Recommendation:
    values = {
        "device": "CPU: some", "device_type": "cpu", "dtype": "float32", "batch_size": 1,
        "temperature": temperature, "benchmarks": ("sums",), "num_prompts": 8,
        "method": "stree" if tree else "autoregressive", "tree": tree, "verifier": None,
        "backtracking": None, "drafter": None, "costs": None, "acceptance_length": 2.0,
        "speedup": 1.5 if tree else 0.8, "speedup_interval": None, "reason": "Measured so.",
    }
    return Recommendation(**{**values, **changes})


def give_profile(
    workspace: Path, drafter: Path, *recommendations: Recommendation, **changes
) -> None:
    shas = {
        "checkpoint_sha256": checkpoint_sha256(drafter),
        "target_sha256": checkpoint_sha256(workspace / "target"),
    }
    profile = SpeculationProfile(
        step=1, target="runs/some/target", measurements=(), recommendations=recommendations,
        suggested_trees=(), **{**shas, **changes},
    )
    add_files(drafter, {PROFILE_NAME: profile.model_dump_json()})


def test_the_profile_decides_on_the_tree_by_temperature(workspace, drafter):
    give_profile(workspace, drafter, recommendation(WIDE), recommendation(DEEP, temperature=1.0))
    greedy = load_quietly(workspace / "target", drafter)
    assert greedy.tree == WIDE.to_token_tree()
    sampled = load_quietly(str(workspace / "target"), str(drafter), temperature=0.7)
    assert sampled.tree == DEEP.to_token_tree()
    prompt = greedy.tokenizer("What is 1 plus 2?")["input_ids"]
    out = greedy.generate(prompt, stree.GenerationConfig(max_new_tokens=9, ignore_eos=True))
    assert out.tokens == (
        load_quietly(workspace / "target")
        .generate(prompt, stree.GenerationConfig(max_new_tokens=9, ignore_eos=True))
        .tokens
    )
    assert out.stats.acceptance_length == 2  # one level, and the drafter is always right


UNMEASURED = "no greedy decoding of one sequence was measured"


@pytest.mark.parametrize(
    ("given", "warning"),
    [
        ((), UNMEASURED),
        ((recommendation(WIDE, device_type="cuda"),), UNMEASURED),
        ((recommendation(WIDE, temperature=1.0),), UNMEASURED),
        (None, r"no speculation_profile\.json"),
    ],
)
def test_without_a_fitting_measurement_the_papers_tree_is_used_and_that_is_said(
    workspace, drafter, given, warning
):
    if given is not None:
        give_profile(workspace, drafter, *given)
    with pytest.warns(UserWarning, match=f"{drafter}: {warning}.*the paper's tree") as said:
        decoder = stree.load(workspace / "target", drafter, device="cpu")
    assert decoder.tree == TokenTree.paper() and len(said) == 1
    assert said[0].filename == __file__


@pytest.mark.parametrize(
    ("changes", "other"),
    [
        ({"target_sha256": "7a"}, r"another target \(runs/some/target\) than .*/target"),
        ({"checkpoint_sha256": "7a"}, r"another drafter than .*/drafter"),
    ],
)
def test_what_was_measured_of_others_is_not_followed(workspace, drafter, changes, other):
    give_profile(workspace, drafter, recommendation(WIDE), **changes)
    with pytest.warns(UserWarning, match=f"measured with {other}, so the paper's tree") as said:
        decoder = stree.load(workspace / "target", drafter, device="cpu")
    assert decoder.tree == TokenTree.paper() and len(said) == 1
    named = load_quietly(workspace / "target", drafter, tree="chain-2")
    assert named.tree.num_nodes == 3


def test_where_plain_decoding_was_fastest_the_drafter_is_left_out(workspace, drafter):
    give_profile(workspace, drafter, recommendation(None, reason="Measured\x1b]0;x\x07 so."))
    with pytest.warns(UserWarning, match=r"Measured \]0;x so\.") as said:
        decoder = stree.load(workspace / "target", drafter, device="cpu")
    assert decoder.drafter is None and decoder.tree.num_nodes == 1
    assert not any(char in str(each.message) for each in said for char in "\x1b\x07")


def test_with_its_head_in_8_bits_the_profile_is_followed_and_that_is_said(workspace, drafter):
    give_profile(workspace, drafter, recommendation(WIDE))
    with pytest.warns(UserWarning, match="measured with FOLDER, not float8:FOLDER"):
        decoder = stree.load(workspace / "target", f"float8:{drafter}", max_length=64)
    assert decoder.tree.parents == WIDE.parents


def test_siblings_that_were_asked_for_are_kept_and_trees_that_they_cannot_fill_are_not(
    workspace, drafter
):
    grown = WIDE.model_copy(update={"name": "beam-2-2-4"})
    for tree, name, taken in (
        (WIDE, "independent", WIDE.parents), (grown, "independent", TokenTree.paper().parents),
        (grown, "top", TokenTree.load("beam-2-2-4").parents),
    ):
        give_profile(workspace, drafter, recommendation(tree))
        with pytest.warns(UserWarning, match=f"measured with FOLDER, not {name}:FOLDER") as said:
            decoder = stree.load(workspace / "target", f"{name}:{drafter}", max_length=64)
        assert decoder.tree.parents == taken
        assert decoder.drafter.siblings is DrafterName.parse(f"{name}:x").siblings
        refused = "no two of which are alike: the paper's tree is used" in str(said[0].message)
        assert refused == (taken == TokenTree.paper().parents)


@pytest.mark.parametrize(
    ("form", "in_8_bits", "context"),
    [
        ("FOLDER", False, 0),
        ("float8:FOLDER", True, 0),
        ("float8:FOLDER+ngram:3", True, 3),
        ("top:FOLDER", False, 0),
    ],
)
def test_the_form_of_drafter_that_won_is_taken(workspace, drafter, form, in_8_bits, context):
    give_profile(workspace, drafter, recommendation(WIDE, drafter=form))

    def taken(decoder):
        text = getattr(decoder.drafter, "text", None)
        assert decoder.drafter.siblings is DrafterName.parse(form).siblings
        return decoder.drafter.model.head_in_8_bits is not None, text.context if text else 0

    decoder = load_quietly(workspace / "target", drafter, max_length=64)
    assert taken(decoder) == (in_8_bits, context) and decoder.tree.parents == WIDE.parents
    form = "FOLDER"
    named = load_quietly(workspace / "target", drafter, tree="chain-2", max_length=64)
    assert taken(named) == (False, 0)


def test_a_gpu_without_products_in_8_bits_takes_the_head_as_it_is(workspace, drafter, monkeypatch):
    give_profile(workspace, drafter, recommendation(WIDE, drafter="float8:FOLDER"))
    load_quietly(workspace / "target", f"float8:{drafter}", max_length=64)
    monkeypatch.setattr(loading, "has_products_in_8_bits", lambda device: False)
    with pytest.warns(UserWarning, match="recommends float8:FOLDER, but GPUs of before"):
        decoder = stree.load(workspace / "target", drafter, device="cpu", max_length=64)
    assert decoder.drafter.model.head_in_8_bits is None and decoder.tree.parents == WIDE.parents


def test_the_profiles_verifier_comes_with_its_tree(workspace, drafter):
    give_profile(workspace, drafter, recommendation(WIDE, verifier="multi_step"))
    target = workspace / "target"
    assert isinstance(load_quietly(target, drafter).batch.verifier, MultiStep)
    chosen = load_quietly(target, drafter, verifier="naive")
    assert isinstance(chosen.batch.verifier, Naive) and chosen.tree == WIDE.to_token_tree()
    assert isinstance(load_quietly(target, drafter, tree="paper").batch.verifier, Coupled)


def test_the_profiles_backtracking_comes_with_its_tree(workspace, drafter):
    give_profile(workspace, drafter, recommendation(WIDE, backtracking="joint"))
    joint = [
        load_quietly(workspace / "target", drafter, **options).batch.cache.last_tree is not None
        for options in ({}, {"backtracking": "replay"}, {"tree": "paper"})
    ]
    assert joint == [True, False, False]


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("name", "policy", "by"),
    [
        ("chain-1 or paper", AdaptiveTrees, "name"),
        ("bandit chain-1 or paper", BanditTrees, "profile"),
    ],
)
def test_several_trees_go_by_the_name_that_commands_take(workspace, drafter, name, policy, by):
    give_profile(
        workspace, drafter, recommendation(Tree(name=name, parents=TokenTree.paper().parents))
    )
    options = {"tree": name} if by == "name" else {}
    decoder = load_quietly(workspace / "target", drafter, max_length=256, **options)
    adaptive_trees = decoder.batch.tree_policy
    assert type(adaptive_trees) is policy and {
        tree for _, tree in adaptive_trees.costs.seconds
    } == set(adaptive_trees.trees)
    assert [tree.name for tree in adaptive_trees.trees] == ["plain", "chain-1", "paper"]
    plain = load_quietly(workspace / "target", max_length=256)
    settings = stree.GenerationConfig(max_new_tokens=9, ignore_eos=True)
    assert decoder.complete("What", settings).tokens == plain.complete("What", settings).tokens


@pytest.fixture
def measured(monkeypatch) -> list[Decoder]:
    """List the decoders whose steps were timed."""
    timed, measure = [], Decoder.measure_step_times
    monkeypatch.setattr(
        Decoder, "measure_step_times", lambda self, **options: (
            timed.append(self) or measure(self, **options)
        ),
    )
    return timed


CHOICE = Tree(name="chain-1 or paper", parents=TokenTree.paper().parents)


def costs_of_choice(**changes) -> StepTimes:
    seconds = {
        (1, tree): 0.25 * tree.num_nodes for tree in AdaptiveTrees(["chain-1", "paper"]).trees
    }
    place = {"device": device_name(torch.device("cpu")), "dtype": "float32"}
    return StepTimes(seconds, **{**place, **changes})


def test_the_profiles_costs_are_chosen_by_and_not_measured(workspace, drafter, measured):
    costs = costs_of_choice()
    give_profile(workspace, drafter, recommendation(CHOICE, costs=costs.record()))
    decoder = load_quietly(workspace / "target", drafter, max_length=256)
    assert not measured and decoder.batch.tree_policy.costs == costs
    plain = load_quietly(workspace / "target", max_length=256)
    settings = stree.GenerationConfig(max_new_tokens=9, ignore_eos=True)
    assert decoder.complete("What", settings).tokens == plain.complete("What", settings).tokens
    for own in ({"verifier": "naive"}, {"backtracking": "joint"}):  # of others nothing is known
        decoder = load_quietly(workspace / "target", drafter, max_length=256, **own)
        assert measured.pop() is decoder and decoder.batch.tree_policy.costs != costs


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"device": "CPU: another"}, "of CPU: another, float32, greedy, and here it is CPU: "),
        ({"dtype": "bfloat16"}, "bfloat16, greedy, and here it is .*float32, greedy"),
        ({"temperature": 1.0}, "float32, sampled, and here it is"),
        ({"seconds": {(1, TokenTree.paper()): 1.0}}, "none of 1 row with plain"),
    ],
)
@pytest.mark.parametrize("by", ["profile", pytest.param("hand", marks=pytest.mark.long)])
def test_costs_of_other_steps_are_not_chosen_by_and_that_is_said(
    workspace, drafter, measured, changes, warning, by
):
    costs = costs_of_choice(**{key: each for key, each in changes.items() if key != "seconds"})
    costs.seconds = changes.get("seconds", costs.seconds)
    give_profile(workspace, drafter, recommendation(CHOICE, costs=costs.record()))
    options = {} if by == "profile" else {"tree": AdaptiveTrees(["chain-1", "paper"], costs)}
    with pytest.warns(UserWarning, match=f"{warning}.*measured here") as said:
        decoder = stree.load(workspace / "target", drafter, device="cpu", max_length=256, **options)
    assert measured == [decoder] and len(said) == 1 and said[0].filename == __file__
    assert not decoder.batch.tree_policy.costs.misfit(
        decoder.target, decoder.batch.tree_policy.trees, 0.0
    )


@pytest.mark.costly
def test_in_another_form_costs_are_measured(workspace, drafter, measured, monkeypatch):
    given = recommendation(CHOICE, costs=costs_of_choice().record(), drafter="float8:FOLDER")
    give_profile(workspace, drafter, given)
    monkeypatch.setattr(loading, "has_products_in_8_bits", lambda device: False)
    with pytest.warns(UserWarning, match="recommends float8:FOLDER, but"):
        decoder = stree.load(workspace / "target", drafter, device="cpu", max_length=256)
    assert measured == [decoder]


@pytest.mark.costly
def test_saved_costs_are_given_by_hand(workspace, drafter, measured, tmp_path):
    first = load_quietly(workspace / "target", drafter, tree="chain-1 or paper", max_length=256)
    assert measured.pop() is first
    first.batch.tree_policy.costs.save(tmp_path / "costs.json")
    adaptive_trees = AdaptiveTrees(["chain-1", "paper"], StepTimes.load(tmp_path / "costs.json"))
    decoder = load_quietly(workspace / "target", drafter, tree=adaptive_trees, max_length=256)
    assert not measured and decoder.batch.tree_policy.costs == first.batch.tree_policy.costs


def test_several_trees_of_which_one_is_none_are_refused(workspace, drafter):
    for name, kind, reason in (
        ("chain-1 or nope", NotFound, "no tree 'nope'"),
        ("bandit chain-2", UsageError, "needs two trees"),
    ):
        with pytest.raises(kind, match=reason):
            stree.load(workspace / "target", drafter, tree=name, device="cpu")
    gone = Tree(name="chain-1 or my-own", parents=(-1, 0))
    give_profile(workspace, drafter, recommendation(gone))
    with pytest.warns(UserWarning, match="its profile recommends no tree 'my-own'"):
        decoder = stree.load(workspace / "target", drafter, device="cpu")
    assert decoder.tree == TokenTree.paper()


def test_a_tree_that_is_named_needs_no_profile(workspace, drafter):
    give_profile(workspace, drafter, recommendation(None))
    (drafter / "MANIFEST.json").unlink()
    (drafter / PROFILE_NAME).write_text("{")
    assert load_quietly(workspace / "target", drafter, tree="chain-3").tree.num_nodes == 4
    with pytest.raises(CheckpointRefused, match=PROFILE_NAME):
        stree.load(workspace / "target", drafter, device="cpu")


def test_a_profile_may_say_that_drafts_go_over_as_text(workspace, drafter, tmp_path):
    """Another tokenizer is then no obstacle."""
    tokenizer = load_tokenizer(workspace / "target")
    tokenizer.backend_tokenizer.normalizer = Lowercase()
    other = tmp_path / "other"
    save_model(load_model(drafter), other, tokenizer)
    give_profile(workspace, other, recommendation(WIDE, drafter="text:FOLDER"))
    decoder = load_quietly(workspace / "target", other, max_length=64)
    generation, prompt = stree.GenerationConfig(9, ignore_eos=True), [5, 6, 7]
    plain = load_quietly(workspace / "target", max_length=64).generate(prompt, generation)
    assert decoder.generate(prompt, generation).tokens == plain.tokens
    with pytest.raises(CheckpointRefused, match="the normalisers differ"):
        load_quietly(workspace / "target", other, tree="chain-2")


def test_rows_get_what_the_profile_recommends(workspace, drafter):
    give_profile(workspace, drafter, recommendation(WIDE))
    options = dict(device="cpu", max_length=64)
    with warnings.catch_warnings(action="ignore"):
        one = stree.load(workspace / "target", drafter, **options)
        batch = stree.load(workspace / "target", drafter, num_rows=3, **options)
    assert isinstance(batch, stree.BatchDecoder) and batch.num_rows == 3
    assert batch.tree.parents == one.tree.parents == WIDE.parents
    texts = ["json", "a list"]
    outputs = batch.complete(texts, max_new_tokens=5)
    assert [each.text for each in outputs] == [
        one.complete(each, max_new_tokens=5).text for each in texts
    ]
    with pytest.raises(UsageError, match="num_rows is 0"):
        stree.load("nowhere", device="cpu", num_rows=0)
