"""Arms compared on one target: rows that resume, tables that are the samples', honest verdicts."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml
from tiny_evaluation import export, make_world

from stree import metrics
from stree.batching.batch_decoder import BatchDecoder
from stree.checkpoints.configs import load_config
from stree.checkpoints.identity import checkpoint_sha256
from stree.checkpoints.load_save import save_model
from stree.checkpoints.tokenizer import load_tokenizer
from stree.common.errors import UsageError
from stree.models.model import HybridModel
from stree.tree_policy.adaptive import AdaptiveTrees
from stree.trees.token_tree import TokenTree
from stree_pipelines.commands import compare
from stree_pipelines.console.progress import EvaluationProgress
from stree_pipelines.evaluation.arms import (
    TRIED_CHAINS,
    Comparison,
    Tuning,
    read_comparison,
    without_trials,
)
from stree_pipelines.evaluation.context import Workers
from stree_pipelines.evaluation.plan import AUTOREGRESSIVE, EvaluationSettings, tree_named
from stree_pipelines.evaluation.result_store import ResultStore
from stree_pipelines.reports import arms as report
from stree_pipelines.reports.profiles.drafter_profile import profile_of
from stree_pipelines.reports.run_data import Cell
from stree_pipelines.reports.tables import tables
from stree_pipelines.reports.tables.tables import Gain

SHIPPED = sorted((Path(__file__).parents[2] / "configs/compare").glob("*.yaml"))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"))


def content(world, out, **changes) -> dict:
    drafter = str(export(world, 10))
    return {
        "target": str(world / "target"), "out": str(out), "device": "cpu", "ignore_eos": True,
        "benchmarks": [str(world / "talk.jsonl")], "temperatures": [0.0, 1.0],
        "max_new_tokens": 6, "limit": 2,
        "arms": [
            {"name": "chain", "drafter": drafter, "tree": "chain-2", "verifier": "block"},
            {"name": "tree", "drafter": drafter, "verifier": "traversal"},
            {"name": "both", "drafter": f"{drafter}+ngram:3", "backtracking": "joint"},
            {"name": "text", "drafter": "ngram:3", "tree": "chain-3"},
            {"name": "grown", "drafter": drafter, "tree": "beam-2-2-4", "backtracking": "joint"},
            {"name": "tuned", "drafter": drafter, "tree": "chain-tuned"},
        ],
        **changes,
    }


def written(folder, what) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "arms.yaml"
    path.write_text(yaml.safe_dump(what))
    return path


def comparison_of(folder, given) -> Comparison:
    return Comparison(
        *read_comparison(written(folder, given), {}), workers=Workers(),
        progress=EvaluationProgress(enabled=False),
    )


@pytest.fixture(scope="module")
def done(world, tmp_path_factory):
    out = tmp_path_factory.mktemp("compared")
    compare.main([str(written(out, content(world, out)))])
    return out


@pytest.mark.costly
def test_every_arm_has_a_row_beside_plain_decoding(done):
    rows = ResultStore(done).results()
    names = [AUTOREGRESSIVE, "chain", "tree", "both", "text", "grown", "tuned"]
    for temperature in (0.0, 1.0):
        here = [row for row in rows if row.temperature == temperature and row.method in names]
        assert [row.method for row in here] == names
        assert [row.verifier for row in here] == [None, "block", "traversal", *["coupled"] * 4]
        joint, replay = "joint", "replay"
        ways = [None, replay, replay, joint, replay, joint, replay]
        assert [row.backtracking for row in here] == ways
        assert here[5].tree.name == "beam-2-2-4" and here[5].nodes_per_call == 4
        assert all(row.speedup for row in here[1:]) and here[1].lossless == here[2].lossless
        samples = [ResultStore(done).samples(row) for row in here]
        assert all(s.baseline is not None for each in samples[1:] for s in each)


@pytest.mark.costly
def test_a_tuned_chain_is_the_fastest_of_those_that_were_tried(done):
    rows = ResultStore(done).results()
    text, page = ((done / f"comparison.{kind}").read_text() for kind in ("md", "html"))
    for temperature in (0.0, 1.0):
        here = {row.method: row for row in rows if row.temperature == temperature}
        tried = [here[f"tuned: {name}"] for name in TRIED_CHAINS]
        assert [row.tree.name for row in tried] == list(TRIED_CHAINS)
        fastest = max(tried, key=lambda row: row.tokens_per_second).tree.name
        assert here["tuned"].tree.name == fastest
        for name, content in (("md", text), ("html", page)):
            assert f"tuned has {fastest}, the fastest of those" in content, name
            assert f"{fastest}, tuned" in content, name
        assert all(f"{row.tree.name} {row.tokens_per_second:.1f}" in text for row in tried)


def test_a_drafter_s_profile_has_its_arms_and_the_verifiers_that_they_had(world, done):
    sha256 = checkpoint_sha256(export(world, 10))
    profile = profile_of(ResultStore(done), done, sha256)
    drafted = [each for each in profile.measurements if each.tree and each.temperature == 0]
    measured = {each.method: (each.tree.name, each.verifier, each.drafter) for each in drafted}
    tuned = measured.pop("tuned")
    assert tuned[0] in TRIED_CHAINS
    assert measured == {
        "chain": ("chain-2", "block", "FOLDER"), "tree": ("paper", "traversal", "FOLDER"),
        "both": ("paper", "coupled", "FOLDER+ngram:3"),
        "grown": ("beam-2-2-4", "coupled", "FOLDER"),
    }


@pytest.mark.costly
def test_chains_may_differ_by_temperature_and_each_decodes_with_its_own(
    world, tmp_path, monkeypatch
):
    longest = {0.0: "chain-1", 1.0: "chain-3"}
    monkeypatch.setattr(Tuning, "tree", property(lambda self: longest[self.temperature]))
    arms = [{"name": "tuned", "drafter": str(export(world, 100)), "tree": "chain-tuned"}]
    given = content(world, tmp_path / "out", arms=arms, limit=1, max_new_tokens=9)
    rows = comparison_of(tmp_path, given).evaluate()
    # The drafter is the target: a call gives as many tokens as the chain has nodes.
    assert [(row.method, row.acceptance_length) for row in rows if row.tree] == [
        ("tuned", 2.0), ("tuned", 4.0)
    ]


def test_an_arm_may_choose_its_tree_step_by_step(world, tmp_path, monkeypatch):
    seen = []
    choose = AdaptiveTrees.choose
    monkeypatch.setattr(
        AdaptiveTrees, "choose", lambda self, rows: seen.append(choose(self, rows)) or seen[-1]
    )
    name = "chain-3 or beam-2-2-4"
    arms = [{"name": "chosen", "drafter": str(export(world, 100)), "tree": name}]
    for batch_size in (1, 2):
        out = tmp_path / f"out{batch_size}"
        given = content(world, out, arms=arms, batch_size=batch_size, temperatures=[0.0])
        comparison = comparison_of(tmp_path, given)
        rows = comparison.evaluate()
        assert rows[1].tree.name == name and rows[1].lossless.share == 1.0
        assert rows[1].end_nodes == {} and 1 <= rows[1].nodes_per_call <= 4
        shares = rows[1].tree_shares
        assert set(shares) <= {"plain", "chain-3", "beam-2-2-4"}
        assert sum(shares.values()) == pytest.approx(1.0) and rows[0].tree_shares == {}
        text = report.markdown(report.places_of(rows, comparison.store))
        assert name in text and f"Steps of chosen by tree: {next(iter(shares))} " in text
    assert {tree.name for tree in seen} <= {"plain", "chain-3", "beam-2-2-4"} and seen


@pytest.mark.costly
def test_in_batches_a_chain_is_tuned_for_full_ones_and_a_choice_is_by_their_rows(
    world, tmp_path, monkeypatch
):
    monkeypatch.setattr("stree_pipelines.evaluation.plan.NUM_FIRST_PROMPTS", 1)
    monkeypatch.setattr("stree_pipelines.evaluation.arms.TRIAL_PROMPTS", 1)
    asked = []
    choose = AdaptiveTrees.choose
    monkeypatch.setattr(
        AdaptiveTrees, "choose", lambda self, rows: asked.append(rows) or choose(self, rows)
    )
    timed, measure = [], BatchDecoder.measure_step_times
    monkeypatch.setattr(
        BatchDecoder, "measure_step_times", lambda self, **options: (
            timed.append(options["generation"].temperature) or measure(self, **options)
        ),
    )
    drafter = str(export(world, 100))
    arms = [
        {"name": "tuned", "drafter": drafter, "tree": "chain-tuned"},
        {"name": "chosen", "drafter": drafter, "tree": "chain-1 or paper or beam-2-2-4"},
    ]
    given = content(world, tmp_path / "out", arms=arms, batch_size=2, temperatures=[0.0, 1.0])
    comparison = comparison_of(tmp_path, given)
    assert {len(job.benchmark.prompts) for job in comparison.trials()} == {2}
    rows = comparison.evaluate()
    assert {row.method for row in rows} == {"autoregressive", "tuned", "chosen"}
    assert {row.batch_size for row in rows} == {2} and rows[1].lossless.share == 1.0
    assert any(row.rows_per_call > 1 for row in rows if row.method == "chosen")
    assert set(asked) == {1, 2}
    assert timed == [0.0, 1.0]  # of steps as they are then made
    took_s = {row.measuring_costs_s for row in rows if row.method == "chosen"}
    assert len(took_s) == 2 and None not in took_s
    for row in rows:
        if row.method == "chosen":
            assert row.costs.temperature == row.temperature
            assert all(each.seconds.keys() == {1, 2} for each in row.costs.trees)


def test_what_is_recorded_of_several_trees_holds_all_of_them():
    tree = tree_named("chain-3 or paper or beam-3-2-6")
    assert tree.max_depth == 4 and tree.choices[0].name == "chain-3"
    assert tree.parents == TokenTree.paper().parents
    assert tree_named("chain-6 or beam-2-1-3").parents == (-1, 0, 0, 1, 3, 4, 5, 6)


def test_a_dry_run_says_what_is_left_and_writes_nothing(world, done, tmp_path, capsys):
    path = written(tmp_path, content(world, tmp_path / "out"))
    compare.main([str(path), "--dry_run"])
    printed = capsys.readouterr().out
    assert "arm tree: " in printed and "paper (13 nodes, 4 deep), verifier traversal" in printed
    assert "a chain, tuned: 6 lengths tried on the first prompts" in printed
    # 2 temperatures; tried: 2 prompts of 3 turns in all, by 6 chains and plain; then by 7 methods
    assert "rows: 26 (12 of chains that are tried, 6 arms and plain decoding × 2" in printed
    assert "answers: 56 to go, 28 of them to tune chains by, at most 504 tokens" in printed
    calls = 2 * 3 * ((6 + 3 + 2 + 2 + 2 + 1 + 1) + (6 + 2 + 2 + 2 + 2 + 2 + 1))
    assert f"calls of the target: {calls} where all drafts are accepted to 504" in printed
    assert "memory: about" in printed and "disk: " in printed
    assert not (tmp_path / "out").exists()
    compare.main([str(written(tmp_path, content(world, done))), "--dry_run"])
    printed = capsys.readouterr().out
    found = [row for row in ResultStore(done).results() if row.method == "tuned"]
    assert all(f"{row.tree.name} (" in printed for row in found)
    assert "rows: 26" in printed and "26 are there" in printed and "answers: 0 to go" in printed


def test_what_the_command_says_goes_before_the_file(world, tmp_path, drawn):
    given = content(world, tmp_path / "file", target="absent", ignore_eos=False)
    path = str(written(tmp_path, {**given, "arms": given["arms"][3:4]}))
    more = {
        "out": str(tmp_path / "try"), "target": str(world / "target"), "max_new_tokens": 3,
        "limit": 1, "temperatures": [0.5], "seed": 7, "chat_template": "chatml",
        "dtype": "float64", "batch_size": 2,
    }
    options = [
        word for name, value in more.items()
        for word in (f"--{name}", *map(str, value if isinstance(value, list) else [value]))
    ]
    (tmp_path / "few.jsonl").write_bytes((world / "talk.jsonl").read_bytes())
    benchmarks = ["--benchmarks", str(tmp_path / "few.jsonl")]
    compare.main([path, *options, *benchmarks, "--ignore_eos"])
    for row in ResultStore(tmp_path / "try").results():
        assert (row.benchmark, row.num_prompts, row.temperature) == ("few", 1, 0.5)
        assert (row.max_new_tokens, row.seed, row.batch_size, row.ignore_eos) == (3, 7, 2, True)
        assert row.environment.dtypes["weights"] == "float64"
    assert (tmp_path / "try/comparison.md").exists() and not (tmp_path / "file").exists()
    assert "<svg" in (tmp_path / "try/comparison.svg").read_text(encoding="utf-8")


def test_every_option_of_what_is_measured_may_be_typed(capsys):
    """An arm's own options alone are missing."""
    with pytest.raises(SystemExit):
        compare.main(["--help"])
    told = set(re.findall(r"--(\w+)", capsys.readouterr().out))
    known = {field.name for field in fields(EvaluationSettings)}
    assert known - told == {"methods", "tree", "verifier", "backtracking", "num_chain_drafts"}


def test_the_table_and_the_page_hold_the_rows_figures(done):
    store = ResultStore(done)
    text, page = ((done / f"comparison.{kind}").read_text() for kind in ("md", "html"))
    for row in store.results():
        if row.method != AUTOREGRESSIVE and ": " not in row.method:
            tau = metrics.acceptance_length(store.samples(row))
            assert f"{tau:.2f}" in text and f"{row.speedup:.2f}×" in text
            assert f"{row.speedup:.2f}×" in page
    assert text.count("\n- talk, T = ") == 2 and "<svg" in page
    assert not re.search(r'(?:src|href)="(?!#)', page)  # nothing from elsewhere


def test_the_drafter_s_column_names_its_form(world, done):
    store = ResultStore(done)
    (place, _) = report.places_of(without_trials(store.results()), store)
    drafter = f"{export(world, 10)}"
    more = {
        f"float8:{drafter}": (10, "float8:step 10"),
        f"text:{drafter}": (10, "text:step 10"),
        f"float8:independent:{drafter}": (10, "float8:independent:step 10"),
        "float8:elsewhere/own+ngram:4,some/where/arms.yaml": (None, "float8:own+ngram:4,arms.yaml"),
        "ngram:6,/some/where/arms.yaml": (None, "ngram:6,arms.yaml"),
    }
    for name, (step, _) in more.items():
        place.rows[name] = place.rows["tree"].model_copy(update={"checkpoint": name, "step": step})
        place.cells[name] = place.cells["tree"]
    shown = {line[0]: line[1] for line in report.table(place).rows}
    assert shown["tree"] == "step 10" and shown["both"] == "step 10+ngram:3"
    assert shown["text"] == "ngram:3" and shown[report.PLAIN] == ""
    assert all(shown[name] == label for name, (_, label) in more.items())


def test_notes_below_a_table_call_plain_decoding_so(done):
    store = ResultStore(done)
    place, _ = report.places_of(without_trials(store.results()), store)
    plain = place.cells[AUTOREGRESSIVE]
    turns = [turn.model_copy(update={"finish_reason": "eos"}) for turn in plain.samples[0].turns]
    sample = plain.samples[0].model_copy(update={"turns": tuple(turns)})
    place.cells[AUTOREGRESSIVE] = replace(plain, seeds=((sample, *plain.samples[1:]),))
    (note,) = re.findall("Answers that ended by themselves[^.]*", report.table(place).note)
    assert report.PLAIN in note and AUTOREGRESSIVE not in note


def test_it_goes_on_where_it_was_stopped(world, done, tmp_path, monkeypatch):
    asked = []
    comparison = comparison_of(tmp_path, content(world, done))
    monkeypatch.setattr(
        comparison.decoders, "make_decoder", lambda *_, **parts: asked.append(parts) or 1 / 0
    )
    rows = comparison.evaluate(None)  # all is there: nothing is decoded
    assert not asked and len(rows) == 14
    fewer = comparison_of(tmp_path, content(world, done, arms=content(world, done)["arms"][:1]))
    assert [row.method for row in fewer.evaluate(None)] == [AUTOREGRESSIVE, "chain"] * 2


def test_rounds_that_are_journalled_are_not_asked_again(world, tmp_path):
    given = content(world, tmp_path / "out", temperatures=[0.0])
    comparison = comparison_of(tmp_path, {**given, "arms": given["arms"][2:4]})
    jobs = comparison.plan()
    assert len({job.result_key for job in jobs}) == len({job.decoder_key for job in jobs}) == 3
    comparison.evaluate(None)
    samples = comparison.store.samples(comparison.store.results()[2])
    comparison.store.forget({jobs[2].result_key: jobs[2].samples_name})
    comparison.store.journal(jobs[2].samples_name, 0, samples[0])
    left = comparison.rounds([jobs[2]])
    assert [each.prompt.id for each in left] == [sample.prompt_id for sample in samples[1:]]


def place(speedups: dict[str, tuple[float, tuple[float, float]]], done) -> report.Place:
    """A place whose speed-ups, and the intervals of them, are these; a chain's name ends in it."""
    rows = {row.method: row for row in ResultStore(done).results()}
    found = report.Place("sums", 0.0, {}, {})
    for name, (speedup, interval) in speedups.items():
        summary = dict.fromkeys(Cell.figures())
        summary |= {
            "speedup": speedup, "confidence_intervals": {"speedup": interval},
            "acceptance_length": 2.0,
        }
        found.cells[name] = Cell(summary, 3)
        found.rows[name] = rows["chain" if name.endswith("chain") else "tree"]
    return found


def test_the_overview_has_a_panel_a_place_and_a_row_an_arm(done):
    cold = place({"a": (0.9, (0.8, 0.95)), "b": (0.7, (0.6, 0.8))}, done)
    warm = replace(place({"b": (1.4, (1.2, 1.5))}, done), temperature=1.0)
    left, right = report.overview([warm, cold]).axes
    assert [each.get_title() for each in (left, right)] == ["sums, T = 0", "sums, T = 1"]
    assert [each.get_text() for each in left.get_yticklabels()] == ["a", "b"]
    points = [
        [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines
         if line.get_marker() == "o"]
        for axes in (left, right)
    ]
    assert points == [[(0.9, 0), (0.7, 1)], [(1.4, 1)]]


def test_verdicts_say_when_plain_decoding_or_a_chain_wins(done, monkeypatch):
    plain, between = "Use plain decoding", {}
    for speeds, said in [
        ({"a": (0.9, (0.8, 0.95)), "b": (0.7, (0.6, 0.8))}, "The fastest speculation, a, is 0.90×"),
        ({"a": (1.1, (0.9, 1.3))}, "a is 1.10× plain decoding [0.90, 1.30], τ 2.00: the interval"),
        ({"a": (1.1, None)}, "a is 1.10× plain decoding, τ 2.00: one prompt has no interval"),
    ]:
        advice = report.verdict(place(speeds, done))
        assert advice.headline == plain and advice.reason.startswith(said)
    monkeypatch.setattr(tables, "speed_ratio", lambda *_: Gain(1.05, between["is"]))
    told = place({"a": (1.1, (0.9, 1.3)), "b": (1.08, (1.02, 1.2))}, done)
    both = place({"tree": (1.5, (1.4, 1.6)), "b": (1.45, (1.3, 1.6)),
                  "a chain": (1.4, (1.3, 1.5))}, done)
    between["is"] = (1.01, 1.1)
    assert report.verdict(told).headline == "Use the arm b"
    assert report.verdict(both).headline == "Use the arm tree"
    between["is"] = (0.99, 1.1)
    assert report.verdict(told).reason.endswith("× a [0.99, 1.10]: they can't be told apart.")
    assert report.verdict(both) == report.Advice(
        "Use the arm a chain", "a chain is 1.40× plain decoding [1.30, 1.50], τ 2.00. tree is "
        "1.50× plain decoding [1.40, 1.60], τ 2.00 and 1.05× a chain [0.99, 1.10]: they can't be "
        "told apart, and a chain verifies fewer tokens.", "a chain", "tree",
    )
    chains = place({"chain": (1.5, (1.4, 1.6)), "a chain": (1.4, (1.3, 1.5))}, done)
    reason = report.verdict(chains).reason
    assert reason.endswith("× a chain [0.99, 1.10]: they can't be told apart.")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"arms": []}, "wanted at least one"),
        ({"arms": [{"name": "x"}]}, "wanted name and drafter"),
        ({"arms": [{"name": "x", "drafter": "d", "size": "2"}]}, "wanted name and drafter"),
        ({"arms": [{"name": "x", "drafter": 3}]}, "each a text"),
        ({"arms": [{"name": "x/y", "drafter": "d"}]}, "the name without /"),
        ({"arms": [{"name": "autoregressive", "drafter": "d"}]}, "takes part anyhow"),
        ({"arms": None}, "must hold `arms"),
        ({"methods": ["stree"]}, "no options of a comparison"),
        ({"widht": 3}, "no options of a comparison"),
        ({"target": None}, "does not say target"),
        ({"max_new_tokens": "many"}, "max_new_tokens is .many., wanted a whole number"),
    ],
)
def test_a_file_that_is_no_comparison_is_one_line(world, tmp_path, changes, said):
    with pytest.raises(UsageError, match=said) as got:
        read_comparison(written(tmp_path, content(world, tmp_path, **changes)), {})
    assert "\n" not in str(got.value)


def test_arms_that_name_no_drafter_have_the_files_or_the_one_that_is_asked_for(world, tmp_path):
    drafter, other = str(export(world, 10)), str(export(world, 20))
    arms = [{"name": "x"}, {"name": "y", "drafter": "ngram:3", "tree": "chain-2"}]
    path = written(tmp_path, content(world, tmp_path, arms=arms, drafter=drafter))
    for more, wanted in (({}, drafter), ({"drafter": other}, other)):
        assert [arm.drafter for arm in read_comparison(path, more)[1]] == [wanted, "ngram:3"]


def test_an_arm_whose_verifier_does_not_fit_its_tree_is_refused_at_once(world, tmp_path):
    refused = {
        "judges chains only": {"tree": "paper", "verifier": "block"},
        "cannot judge beam-2-2-4": {"tree": "beam-2-2-4", "verifier": "multi_step"},
        "n-grams fill trees of one shape": {"tree": "beam-2-2-4"},
        "judges chains only, and paper": {"tree": "chain-2 or paper", "verifier": "block"},
    }
    for said, options in refused.items():
        given = content(world, tmp_path, arms=[{"name": "x", "drafter": "ngram", **options}])
        with pytest.raises(UsageError, match=said):
            comparison_of(tmp_path, given)


def test_an_arm_whose_drafter_does_not_fit_is_refused_before_any_chain_is_tuned(world, tmp_path):
    target = load_config(world / "target")
    fitting = load_config(export(world, 10))
    drafters = {
        "reads features of its target": ("text:", fitting.reading((0,), target, False)),
        "of a target of 9 layers": ("", fitting.reading((0,), target.replace(num_layers=9), False)),
        "vocabulary has": ("", fitting.replace(vocab_size=fitting.vocab_size + 1)),
    }
    for number, (said, (prefix, config)) in enumerate(drafters.items()):
        folder = tmp_path / f"drafter-{number}"
        save_model(HybridModel(config), folder, load_tokenizer(world / "target"))
        tuned = {"name": "tuned", "drafter": str(export(world, 10)), "tree": "chain-tuned"}
        arms = [tuned, {"name": "x", "drafter": f"{prefix}{folder}", "tree": "chain-2"}]
        path = str(written(tmp_path, content(world, tmp_path / "out", arms=arms)))
        for more in (["--dry_run"], []):
            with pytest.raises(UsageError, match=said):
                compare.main([path, *more])
        assert not ResultStore(tmp_path / "out").results()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_config_is_a_comparison(path):
    _, arms = read_comparison(path, {})
    assert all(arm.method(tree).tree.num_nodes > 1 for arm in arms for tree in arm.trees)


def test_the_shipped_n_gram_tree_is_two_chains_of_six():
    tree = TokenTree.load(SHIPPED[0].parents[1] / "trees/png-6-2.yaml")
    assert tree.max_depth == 6 and [len(level) for level in tree.levels] == [1] + [2] * 6
