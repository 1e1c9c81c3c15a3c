"""Verifiers and drafters by name, in evaluations and for `stree.load`."""

from __future__ import annotations

import pytest
from eagle_heads import save_head
from lanes import costly
from mtp_heads import save_with_head
from tiny_evaluation import export, quiet, settings_for

import stree
from stree import GenerationConfig, TokenTree
from stree.checkpoints.configs import load_config
from stree.checkpoints.tokenizer import load_tokenizer
from stree.common.errors import CheckpointRefused, NotFound, UsageError
from stree.drafters import SiblingSampling
from stree.drafters.names import DrafterName
from stree_pipelines.evaluation.estimates import memory_of
from stree_pipelines.evaluation.plan import DrafterIdentity, require_fillable
from stree_pipelines.reports import settings
from stree_pipelines.reports.settings import dtype_of
from stree_pipelines.resources.estimates import held_bytes


@pytest.fixture(scope="module")
def corpus(world):
    (world / "corpus.txt").write_text("some text to learn from, and to draft from")
    return world / "corpus.txt"


def test_rows_say_their_verifier_and_never_share_a_table(world, tmp_path):
    """Plain decoding's rows serve all verifiers of a folder."""
    rows = []
    for verifier in ("coupled", "traversal"):
        chosen = settings_for(
            world, tmp_path, limit=1, temperatures=(0.0, 1.0), verifier=verifier, max_new_tokens=6
        )
        rows.append(quiet(chosen).evaluate(export(world, 10)))
    for verifier, mine in zip(("coupled", "traversal"), rows, strict=True):
        assert {row.verifier for row in mine} == {None, verifier}
    keys = [{row.key for row in mine} for mine in rows]
    assert len(keys[0] & keys[1]) == 2  # plain decoding at both temperatures
    assert "verifier" in settings.differing(rows[0] + rows[1])
    with pytest.raises(UsageError, match="verifier is"):
        settings.require_one({"run": rows[0] + rows[1]})
    settings.require_one({"run": settings.chosen(rows[1], ["verifier=traversal"], tmp_path)})


@pytest.mark.costly
def test_rows_say_how_they_backtrack_and_hold_the_same_answers(world, tmp_path):
    rows, answers = [], []
    for backtracking in ("replay", "joint"):
        chosen = settings_for(
            world, tmp_path, limit=1, temperatures=(0.0,), backtracking=backtracking,
            methods=("autoregressive", "stree"),
        )
        evaluation = quiet(chosen)
        rows += [row for row in evaluation.evaluate(export(world, 10)) if row.tree]
        answers.append([each.turns for each in evaluation.store.samples(rows[-1])])
    assert [row.backtracking for row in rows] == ["replay", "joint"]
    assert answers[0] == answers[1] and rows[0].acceptance_length == rows[1].acceptance_length
    with pytest.raises(UsageError, match="backtracking is"):
        settings.require_one({"run": rows})
    with pytest.raises(UsageError, match="wanted one of replay, joint"):
        settings_for(world, tmp_path, backtracking="copies")


def test_unknown_trees_and_verifiers_of_chains_alone_are_refused_at_once(world, tmp_path):
    with pytest.raises(UsageError, match="no tree"):
        quiet(settings_for(world, tmp_path, tree="oak"))
    with pytest.raises(UsageError, match="judges chains only"):
        quiet(settings_for(world, tmp_path, verifier="block"))
    with pytest.raises(UsageError, match=r"wanted one of coupled.* each of them is greedy"):
        settings_for(world, tmp_path, verifier="greedy")
    quiet(settings_for(world, tmp_path, verifier="block", methods=("autoregressive", "vanilla_sd")))


@pytest.mark.quick(1)
@pytest.mark.parametrize("grafted", [costly(False), True])
def test_n_grams_are_evaluated_beside_checkpoints(grafted, world, corpus, tmp_path):
    name = f"ngram:3,{corpus}"
    name = f"{export(world, 10)}+{name}" if grafted else name
    chosen = settings_for(world, tmp_path, limit=1, max_new_tokens=24)
    rows = quiet(chosen).evaluate(name)
    assert [row.checkpoint for row in rows] == [None, name, name]
    assert all(row.lossless is None or row.lossless.share == 1 for row in rows)
    assert rows[2].acceptance_length > 1 and rows[2].step == (10 if grafted else None)
    corpus.write_text(corpus.read_text() + " more")
    assert rows[2].key not in {job.result_key for job in quiet(chosen).plan(name)}


@pytest.mark.costly
def test_a_head_in_8_bits_has_rows_of_its_own(world, tmp_path):
    name = f"float8:{export(world, 10)}"
    chosen = settings_for(world, tmp_path, limit=1, max_new_tokens=24, tree="beam-2-2-4")
    own = quiet(chosen).plan(export(world, 10))
    evaluation = quiet(chosen)
    rows = evaluation.evaluate(name)
    assert [(row.checkpoint, row.step) for row in rows[1:]] == [(name, 10)] * 2
    assert all(row.lossless is None or row.lossless.share == 1 for row in rows)
    assert rows[2].key not in {job.result_key for job in own}
    drafter = next(job.drafter for job in evaluation.plan(name) if job.drafter)
    config = load_config(drafter.name.folder)
    head = memory_of(evaluation, evaluation.plan(name)).parts["heads in 8 bits"]
    assert head == config.vocab_size * config.d_model
    assert evaluation.decoders.drafter_model(drafter).head_in_8_bits is not None


def test_a_dry_run_counts_a_target_in_8_bits_as_such(world, tmp_path):
    config = load_config(world / "target")
    for name, in_8_bits in ((None, False), ("float8", True)):
        evaluation = quiet(settings_for(world, tmp_path, target_dtype=name))
        counted = memory_of(evaluation, evaluation.plan(None)).parts["target"]
        assert counted == held_bytes(config, evaluation.decoders.dtype, in_8_bits)


@pytest.mark.costly
def test_the_targets_own_heads_are_evaluated(world, tmp_path):
    target = tmp_path / "target"
    theirs, _ = save_with_head(target, "qwen3_5", 0, vocab=320)
    save_head(tmp_path / "eagle", theirs, layers=[1, 2])
    load_tokenizer(world / "target").save_pretrained(target)
    chosen = settings_for(world, tmp_path / "out", target=str(target), limit=1)
    evaluation = quiet(chosen)
    rows = evaluation.evaluate("float8:mtp")
    assert [row.checkpoint for row in rows] == [None, "float8:mtp", "float8:mtp"]
    assert all(row.lossless is None or row.lossless.share == 1 for row in rows)
    parts = memory_of(evaluation, evaluation.plan("float8:mtp")).parts
    config = load_config(target)
    assert parts["heads in 8 bits"] == config.vocab_size * config.d_model and parts["drafter"]
    for row in evaluation.evaluate(f"eagle:{tmp_path / 'eagle'}"):
        assert row.lossless is None or row.lossless.share == 1
    other = quiet(settings_for(world, tmp_path / "other"))
    with pytest.raises(CheckpointRefused, match="no MTP head is known"):
        other.plan("mtp")
    with pytest.raises(CheckpointRefused, match="a head for a target of width 16, this one has"):
        other.plan(f"eagle:{tmp_path / 'eagle'}")


@pytest.mark.costly
def test_a_target_in_8_bits_has_rows_of_its_own(world, tmp_path):
    """Plain decoding's too; trees give the text of the target in 8 bits, and the rows say so."""
    name, options = export(world, 10), dict(limit=1, max_new_tokens=24)
    stored = quiet(settings_for(world, tmp_path, **options)).plan(name)
    evaluation = quiet(settings_for(world, tmp_path, target_dtype="float8", **options))
    rows = evaluation.evaluate(name)
    assert evaluation.decoders.target.is_in_8_bits
    assert {dtype_of(row) for row in rows} == {"float8"}
    assert {row.environment.dtypes["weights"] for row in rows} == {"float32"}
    assert all(row.lossless is None or row.lossless.share == 1 for row in rows)
    assert not {row.key for row in rows} & {job.result_key for job in stored}
    with pytest.raises(UsageError, match="target_dtype is 'int8', wanted float8"):
        settings_for(world, tmp_path, target_dtype="int8")


@pytest.mark.costly
def test_siblings_drawn_otherwise_have_rows_of_their_own(world, tmp_path):
    """Greedy ones have the same τ; what sampling accepts is their own."""
    own = export(world, 10)
    forms = [f"{own}", f"independent:{own}", f"top:{own}"]
    chosen = settings_for(world, tmp_path, limit=1, max_new_tokens=24, verifier="multi_step")
    evaluation = quiet(chosen)
    trees = [
        next(row for row in evaluation.evaluate(form) if row.method == "stree") for form in forms
    ]
    assert [row.checkpoint for row in trees] == forms and {row.step for row in trees} == {10}
    assert len({row.checkpoint_sha256 for row in trees}) == 3
    assert len({row.acceptance_length for row in trees if row.temperature == 0}) == 1
    assert all(row.lossless is None or row.lossless.share == 1 for row in trees)
    with pytest.raises(UsageError, match="independent siblings, which may be alike"):
        require_fillable(TokenTree.load("beam-2-2-4"), DrafterName.parse(forms[1]))
    require_fillable(TokenTree.load("beam-2-2-4"), DrafterName.parse(forms[2]))


def test_a_link_is_what_it_names_now_in_every_form(world, tmp_path):
    own, link = export(world, 10), tmp_path / "latest"
    link.symlink_to(own)
    for form in ("{}", "float8:{}", "{}+ngram:3", "top:{}"):
        assert DrafterIdentity.at(form.format(link)) == DrafterIdentity.at(form.format(own))


@pytest.mark.costly
def test_load_takes_the_same_names(world, corpus):
    generation, prompt = GenerationConfig(12, ignore_eos=True), [5, 6, 7, 5, 6]
    plain = stree.load(world / "target").generate(prompt, generation).tokens
    own = export(world, 10)
    forms = "{}+ngram:4", "float8:{}+ngram:4", "independent:{}", "float8:top:{}", "top:{}+ngram:4"
    for drafter in ("ngram", f"ngram:2,{corpus}", *(each.format(own) for each in forms)):
        for verifier in ("coupled", "traversal"):
            decoder = stree.load(
                world / "target", drafter, tree="paper", verifier=verifier, max_length=64
            )
            assert decoder.generate(prompt, generation).tokens == plain


FORMS = {
    "a/b": DrafterName("a/b"),
    "ngram:6": DrafterName(None, 6),
    "mtp": DrafterName(None, mtp=True),
    "float8:top:mtp+ngram:4": DrafterName(
        None, 4, float8=True, siblings=SiblingSampling.DETERMINISTIC, mtp=True
    ),
    "a/b+ngram:4,c,d.txt": DrafterName("a/b", 4, "c,d.txt"),
    "float8:a/b": DrafterName("a/b", float8=True),
    "float8:a/b+ngram:4": DrafterName("a/b", 4, float8=True),
    "float8:text:a": DrafterName("a", retokenised=True, float8=True),
    "independent:a/b": DrafterName("a/b", siblings=SiblingSampling.INDEPENDENT),
    "temperature=0.6:a/b": DrafterName("a/b", temperature=0.6),
    "float8:temperature=1.5:independent:a/b": DrafterName(
        "a/b", float8=True, siblings=SiblingSampling.INDEPENDENT, temperature=1.5
    ),
    "float8:top:a/b+ngram:4": DrafterName(
        "a/b", 4, float8=True, siblings=SiblingSampling.DETERMINISTIC
    ),
}


def test_names_of_drafters(tmp_path):
    for name, parsed in FORMS.items():
        assert DrafterName.parse(name) == parsed and str(parsed) == name
    assert DrafterName.parse("ngram") == FORMS["ngram:6"]
    assert DrafterName.parse("top:float8:a/b+ngram:4") == FORMS["float8:top:a/b+ngram:4"]
    assert FORMS["float8:a/b"].is_folder and FORMS["independent:a/b"].is_folder
    assert not FORMS["independent:a/b"].is_plain and not FORMS["independent:a/b"].grows
    assert DrafterName.parse("top:a/b").grows and FORMS["temperature=0.6:a/b"].grows
    assert not FORMS["temperature=0.6:a/b"].is_plain
    for name in ("x+ngram", "top:x"):  # folders that are called so
        (tmp_path / name).mkdir()
        assert DrafterName.parse(str(tmp_path / name)).is_plain
    with pytest.raises(NotFound, match="no corpus"):
        DrafterName.parse("ngram:3,nowhere.txt").corpus_text()


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("top: top:ngram independent:text:a top:top:a independent:top:a",
         "has no model that may draw siblings so"),
        ("float8: float8:ngram float8:float8:a", "no head to put in 8 bits, wanted float8:FOLDER"),
        ("temperature=0:a temperature=x:a temperature=-1:a temperature=0.6:top:a "
         "temperature=0.6:ngram temperature=1:text:a temperature=1:temperature=1:a",
         "draws nothing at a temperature of its own"),
        ("ngram:0 ngram:x ngram:-1,f", "wanted a whole number"),
    ],
)
def test_names_that_name_no_drafter_are_refused(names, said):
    for name in names.split():
        with pytest.raises(UsageError, match=said):
            DrafterName.parse(name)
