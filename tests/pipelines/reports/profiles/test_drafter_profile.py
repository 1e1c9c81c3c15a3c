"""The profile of a drafter says what the rows say, and the weights do not notice it."""

from __future__ import annotations

import json
import os
import re
import shutil

import huggingface_hub
import pytest
import torch
from hand_made_run import CALL_S, TREES, change_rows, make_run, relabelled, slow_down
from toys import tiny_model

from stree import metrics
from stree.checkpoints.identity import checkpoint_sha256
from stree.checkpoints.load_save import load_model, save_model
from stree.common.errors import BadData, CheckpointRefused, UsageError
from stree.common.files import add_files, publish_directory, verify_manifest
from stree.drafters.names import DrafterName
from stree.speculation_profile import PROFILE_NAME, Tree, load_profile
from stree.tree_policy.adaptive import PLAIN
from stree.tree_policy.step_times import StepTimes
from stree.trees.token_tree import TokenTree
from stree_pipelines.commands.profile_drafter import main
from stree_pipelines.evaluation.plan import form_sha256
from stree_pipelines.evaluation.result_store import RESULTS_NAME, ResultStore, write_rows
from stree_pipelines.reports.profiles.drafter_profile import profile_of
from stree_pipelines.reports.run_data import open_results

LAST = "drafter/step-00010000"


def give_drafters(folder, steps=(100, 1000, 10000)):
    """Write folders as exports are, and let the run's rows be about them."""
    hashes = {}
    for step in steps:
        drafter = folder / f"drafter/step-{step:08d}"
        model = tiny_model(step, dtype=torch.float32, num_layers=2, attn_layers=())
        provenance = {"step": step, "tokens_seen": 7 * step, "loss": 0.25, "git_sha": "c0ffee"}
        files = {"provenance.json": json.dumps(provenance)}
        save_model(model, drafter, extra_files=files, manifest_extra={"step": step})
        hashes[step] = checkpoint_sha256(drafter)
    store = ResultStore(folder / "eval")
    change_rows(folder, lambda row: (
        relabelled(store, row, checkpoint_sha256=hashes[row.step]) if row.step else row
    ))
    return hashes


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("made"))
    give_drafters(folder)
    return folder


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made, tmp_path / "run")


@pytest.fixture(scope="module")
def profiled(made, tmp_path_factory):
    """Return the last drafter's folder with its profile."""
    folder = shutil.copytree(made, tmp_path_factory.mktemp("profiled") / "run")
    main([str(folder)])
    return folder / LAST


@pytest.fixture
def profile_path(profiled, tmp_path):
    return shutil.copytree(profiled, tmp_path / "drafter") / PROFILE_NAME


def profile_last(run):
    """Profile the run's last drafter alone, and return its folder."""
    main([str(run), "--drafter", str(run / LAST)])
    return run / LAST


def test_each_export_gets_the_figures_of_its_own_rows(run):
    before = (run / "eval/results.jsonl").read_bytes()
    main([str(run)])
    store = ResultStore(run / "eval")
    for step in (100, 1000, 10000):
        folder = run / f"drafter/step-{step:08d}"
        profile = load_profile(folder)
        assert profile.step == step and profile.checkpoint_sha256 == checkpoint_sha256(folder)
        rows = {
            (row.method, row.benchmark, row.temperature): row
            for row in store.results()
            if row.step in (None, step)
        }
        assert len(profile.measurements) == len(rows) == 3 * 2 * 2
        for each in profile.measurements:
            row = rows[each.method, each.benchmark, each.temperature]
            assert each.acceptance_length == row.acceptance_length
            assert each.speedup_interval == row.confidence_intervals["speedup"]
            assert each.depth_accept_rates == row.depth_accept_rates
            assert each.time_ms == row.time_ms and each.tree == row.tree
            assert each.draft_length == (4 if row.tree else 0)
            assert each.device == "Test device" and each.git_sha == "abc"
    assert (run / "eval/results.jsonl").read_bytes() == before


def test_the_output_advises_on_the_last_drafter_alone(run, capsys):
    main([str(run)])
    printed = capsys.readouterr().out
    assert printed.count("speculation_profile.json") == 3
    assert printed.count("Use the tree") == 2  # temperatures
    assert "step 10000:\n  cuda, float32, T = 0: Use the tree." in printed


def test_a_loaded_machine_changes_no_recommendation_and_the_card_says_so(run, capsys):
    folder = profile_last(run)
    before = load_profile(folder)
    slow_down(run, {1000: 2.5})
    capsys.readouterr()
    profile_last(run)
    after = load_profile(folder)
    assert after.recommendations == before.recommendations != ()
    assert after.measurements == before.measurements
    card, printed = (folder / "README.md").read_text(encoding="utf-8"), capsys.readouterr().out
    for text in (card, printed):
        assert "T = 0: Plain decoding of" in text and "the machine had other work" in text
    without_one = profile_of(open_results(run), run, checkpoint_sha256(folder))
    assert without_one.recommendations == ()


def test_text_of_rows_is_printed_without_control_characters(run, capsys):
    results = run / "eval/results.jsonl"
    results.write_text(results.read_text().replace('"float32"', '"float32\\u001b[2J"'))
    profile_last(run)
    assert "cuda, float32\ufffd[2J, T = 0: " in capsys.readouterr().out


def slower_beside(store, step, factor):
    """Slow down plain decoding where this checkpoint was measured."""
    for row in store.results():
        if row.step != step:
            continue
        samples = [
            s.model_copy(update={"baseline": s.baseline.model_copy(update={
                "decode_s": factor * s.baseline.decode_s,
                "time_ms": {"verify": 1e3 * factor * s.baseline.decode_s},
            })})
            for s in store.samples(row)
        ]
        figures = metrics.summarise(samples, [s.baseline for s in samples])
        store.publish(row.model_copy(update=figures), samples)


def test_plain_decoding_s_speed_is_the_one_beside_this_drafter(tmp_path):
    make_run(tmp_path, ("gsm8k",), (0.0,))
    store = open_results(tmp_path)
    slower_beside(store, 10000, 2.0)
    speeds = []
    for sha256 in ("1000", "10000"):
        plain, chain, tree = profile_of(store, tmp_path, sha256).measurements
        assert plain.method == "autoregressive"
        for each in (chain, tree):
            assert each.speedup == pytest.approx(each.tokens_per_second / plain.tokens_per_second)
        speeds.append(plain.tokens_per_second)
    assert speeds[0] == pytest.approx(2 * speeds[1])
    assert plain.time_ms["verify"] == pytest.approx(1e3 / speeds[1])


def test_a_profile_changes_neither_the_weights_nor_what_identifies_them(run):
    folder = run / LAST
    identity, before = checkpoint_sha256(folder), verify_manifest(folder)
    profile_last(run)
    after = verify_manifest(folder)
    assert checkpoint_sha256(folder) == identity
    assert after["step"] == 10000
    assert {name: after["files"][name] for name in before["files"]} == before["files"]
    assert {PROFILE_NAME, "README.md", "tau_vs_step.svg"} <= after["files"].keys()
    load_model(folder)
    content = (folder / PROFILE_NAME).read_bytes()
    dead = run / "drafter/.tmp-of-someone-killed"
    dead.mkdir()
    os.utime(dead, (0, 0))
    profile_last(run)
    assert not dead.exists()
    assert (folder / PROFILE_NAME).read_bytes() == content


@pytest.mark.parametrize(
    ("seconds", "method", "tree"),
    [
        ((0.012, 0.013), "stree", TREES["stree"]),
        ((0.008, 0.020), "vanilla_sd", TREES["vanilla_sd"]),
        ((0.025, 0.040), "autoregressive", None),
    ],
)
def test_the_fastest_method_is_recommended_and_plain_decoding_when_nothing_wins(
    tmp_path, monkeypatch, seconds, method, tree
):
    """A prompt takes 30 calls of the chain, 20 of the tree and 60 plain ones."""
    monkeypatch.setitem(CALL_S, "vanilla_sd", seconds[0])
    monkeypatch.setitem(CALL_S, "stree", seconds[1])
    make_run(tmp_path)
    profile = profile_of(open_results(tmp_path), tmp_path, "10000")
    assert [(each.temperature, each.method) for each in profile.recommendations] == [
        (0.0, method), (1.0, method),
    ]
    greedy = profile.recommended("cuda", 0.0, "float32")
    assert greedy.tree == tree and greedy.num_prompts == 12
    assert greedy.benchmarks == ("mt_bench", "gsm8k")
    assert (greedy.speedup > 1) == (tree is not None)


def test_the_arm_that_won_a_comparison_is_recommended_with_its_own_verifier(run, capsys):
    """Arms may have one tree and differ in verifiers; rows by which chains were tuned are none."""
    store = ResultStore(run / "eval")
    arms = {
        "vanilla_sd": {"method": "narrow", "tree": TREES["stree"], "verifier": "naive"},
        "stree": {"method": "wide", "verifier": "traversal"},
    }
    rows = [relabelled(store, row, **arms.get(row.method, {})) for row in store.results()]
    tried = [
        relabelled(store, row, method="wide: chain-4", prompts_hash="fewer")
        for row in rows
        if row.method == "wide"
    ]
    write_rows(store.directory / RESULTS_NAME, tried + rows)
    folder = profile_last(run)
    assert "T = 1: Use the arm wide. wide is" in capsys.readouterr().out
    profile = load_profile(folder)
    for won in profile.recommendations:
        assert (won.method, won.tree, won.verifier) == ("wide", TREES["stree"], "traversal")
    measured = {(each.method, each.verifier) for each in profile.measurements}
    assert measured == {("autoregressive", None), ("narrow", "naive"), ("wide", "traversal")}
    card = (folder / "README.md").read_text()
    assert f"| wide, {TREES['stree'].name}, traversal |" in " ".join(card.split())
    # An evaluation's method has one verifier
    mixed = [relabelled(store, row, method="stree") if row.tree else row for row in rows]
    write_rows(store.directory / RESULTS_NAME, mixed)
    with pytest.raises(UsageError, match="verifier is"):
        profile_of(store, run, profile.checkpoint_sha256)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "form", ["float8:{}", "{}+ngram:6", "float8:{}+ngram:4", "independent:{}", "float8:top:{}"]
)
def test_the_form_of_the_drafter_that_won_a_comparison_is_recommended(run, form, capsys):
    """Its rows have a hash of their own, which is of the folder's files; forms with a corpus and
    other folders' are none of this drafter."""
    store, folder = ResultStore(run / "eval"), run / LAST
    other = run / "drafter/step-00001000"
    sha256 = checkpoint_sha256(folder)
    names = {form.format(folder): sha256, f"float8:{other}": checkpoint_sha256(other)}
    names[f"float8:{folder}+ngram:6,some.txt"] = "of a corpus"
    rows = [
        relabelled(store, row, method="as it is") if row.method == "vanilla_sd" else row
        for row in store.results()
        if row.checkpoint_sha256 in (None, sha256)
    ]
    more = []
    for row in (row for row in rows if row.method == "stree"):
        for number, (name, model) in enumerate(names.items()):
            identity = form_sha256(DrafterName.parse(name), model)
            changes = {"method": f"arm {number}", "checkpoint": name, "checkpoint_sha256": identity}
            more.append(relabelled(store, row, **changes))
    write_rows(
        store.directory / RESULTS_NAME, [*(row for row in rows if row.method != "stree"), *more]
    )
    main([str(run), "--drafter", str(folder)])
    recommended = form.format("FOLDER")
    assert f"It drafts with {recommended}." in capsys.readouterr().out
    profile = load_profile(folder)
    for won in profile.recommendations:
        assert (won.method, won.drafter) == ("arm 0", recommended)
    measured = {(each.method, each.drafter) for each in profile.measurements}
    assert measured == {("autoregressive", None), ("as it is", "FOLDER"), ("arm 0", recommended)}


def test_the_costs_by_which_the_winners_trees_were_chosen_come_with_it(run):
    """Each temperature has its own; a row that a resumed run completed may lack them."""
    choice, trees = Tree(name="chain-1 or paper", parents=(-1, 0, 0)), (PLAIN, TokenTree.paper())
    costs = {
        temperature: StepTimes(dict.fromkeys([(1, each) for each in trees], 1.0 + temperature),
                           device="Test device", dtype="float32", temperature=temperature)
        for temperature in (0.0, 1.0)
    }
    store = ResultStore(run / "eval")
    change_rows(run, lambda row: row if row.method != "stree" else relabelled(
        store, row, tree=choice,
        costs=None if row.benchmark == "mt_bench" else costs[row.temperature].record(),
    ))
    path = profile_last(run) / PROFILE_NAME
    for won in load_profile(path.parent).recommendations:
        assert won.tree == choice and StepTimes.of_record(won.costs) == costs[won.temperature]
    content = json.loads(path.read_text())
    content["recommendations"][0]["costs"]["trees"][1]["tree"]["parents"] = [-1, 2, 1]
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointRefused, match="parent"):
        load_profile(path.parent)


def test_what_was_measured_elsewhere_is_a_recommendation_of_its_own(tmp_path, monkeypatch):
    make_run(tmp_path, ("gsm8k",), (0.0, 1.0))
    store = ResultStore(tmp_path / "eval")
    here = store.results()
    monkeypatch.setitem(CALL_S, "stree", 0.05)
    monkeypatch.setitem(CALL_S, "vanilla_sd", 0.05)
    make_run(tmp_path / "slow", ("gsm8k",), (0.0,))
    elsewhere = ResultStore(tmp_path / "slow/eval")
    slow = [
        relabelled(
            elsewhere, row, decoding_hash="cpu",
            environment=row.environment.model_copy(update={"device": "CPU: slow"}),
        )
        for row in elsewhere.results()
    ]
    for row in slow:
        (elsewhere.directory / row.samples).rename(store.directory / row.samples)
    write_rows(store.directory / RESULTS_NAME, [*here, *slow])
    profile = profile_of(store, tmp_path, "10000")
    assert profile.recommended("cpu", 0.0, "float32").method == "autoregressive"
    assert profile.recommended("cuda", 0.0, "bfloat16").method == "stree"
    assert profile.recommended("cuda", 0.6, "float32").temperature == 1.0
    assert profile.recommended("cpu", 0.6, "float32") is None
    assert profile.recommended("mps", 0.0, "float32") is None


def test_a_drafter_without_rows_or_with_damage_is_named_and_the_others_get_theirs(run, capsys):
    (run / "drafter/step-00000100/config.json").write_text("{}")
    with pytest.raises(CheckpointRefused, match="1 of 3 drafters"):
        main([str(run)])
    assert "step-00000100 has no new profile" in capsys.readouterr().out
    assert load_profile(run / "drafter/step-00000100") is None
    assert load_profile(run / LAST) is not None
    with publish_directory(run / "other") as new:
        (new / "model.safetensors").write_bytes(b"other")
    with pytest.raises(UsageError, match="1 of 1"):
        main([str(run), "--drafter", str(run / "other")])
    for name in ("mtp", f"eagle:{run / 'other'}"):
        with pytest.raises(UsageError, match=f"--drafter is {name}, wanted the folder of an exp"):
            main([str(run), "--drafter", name])
    assert "no row of" in capsys.readouterr().out


def test_rows_that_do_not_say_where_paths_ended_still_make_a_profile(run):
    store = ResultStore(run / "eval")
    for row in store.results():
        unknown = {"end_node_per_call": None, "depth_per_call": None}
        samples = [each.model_copy(update=unknown) for each in store.samples(row)]
        unknown = {"end_nodes": {}, "open_ends": {}, "depth_accept_rates": {}}
        store.publish(row.model_copy(update=unknown), samples)
    profile = load_profile(profile_last(run))
    assert profile.suggested_trees == () and len(profile.recommendations) == 2


# The card


def test_the_card_has_front_matter_the_rows_figures_and_where_it_comes_from(run, drawn):
    (run / "command.json").write_text('{"command_line": "python pipelines/distill.py fit"}')
    (run / "config.yaml").write_text("data: {train: sharegpt.jsonl, valid: null}")
    folder = profile_last(run)
    card = huggingface_hub.ModelCard.load(folder / "README.md")
    assert card.data.pipeline_tag == "text-generation"
    assert "speculative-decoding" in card.data.tags
    row = next(
        r for r in ResultStore(run / "eval").results()
        if (r.step, r.method, r.benchmark, r.temperature) == (10000, "stree", "gsm8k", 1.0)
    )
    line = next(
        line for line in card.text.splitlines() if "gsm8k, T = 1" in line and "tree, paper" in line
    )
    low, high = row.confidence_intervals["speedup"]
    assert f" {row.acceptance_length:.2f} [" in line
    assert f" {row.speedup:.2f}× [{low:.2f}, {high:.2f}]" in line
    for fact in (
        "python pipelines/distill.py fit", "`sharegpt.jsonl`", "c0ffee", "70,000", "0.2500",
        "Use the tree", "![τ against distillation step](tau_vs_step.svg)", "a prediction, not",
    ):
        assert fact in card.text, fact
    assert "validation data" not in card.text
    assert (folder / "tau_vs_step.svg").read_text().startswith("<?xml")


def test_the_card_names_files_of_this_machine_without_their_folders(run):
    (run / "command.json").write_text(json.dumps({
        "command_line": "/home/ann/bin/stree distil --data.train '/home/ann lee/own.jsonl' "
        "--run_dir=~/runs/a --config configs/a.yaml --model.target https://hub.example/ann/t "
        "--data.valid file:///home/ann/v --model.drafter float8:/home/ann/d"
    }))
    (run / "config.yaml").write_text("data: {train: [/home/ann/a.jsonl, data/b.jsonl, me/set:t]}")
    store = ResultStore(run / "eval")
    change_rows(run, lambda row: relabelled(store, row, target="/home/ann/models/big"))
    card = (profile_last(run) / "README.md").read_text()
    assert "home" not in card and "~/" not in card and "ann lee" not in card
    for told in (
        "stree distil --data.train 'own.jsonl' --run_dir=a --config configs/a.yaml --model.target "
        "https://hub.example/ann/t --data.valid v --model.drafter float8:d`",
        "['a.jsonl', 'data/b.jsonl', 'me/set:t']",
        'stree.load("big", "path/of/this/folder")', "| drafts for | `big` (",
    ):
        assert told in card, told


def test_the_card_says_how_answers_ended_and_how_many_were_held_up(run):
    store = ResultStore(run / "eval")
    for row in store.results():
        counts = {"num_ended": 2, "num_cut": 4, "num_stalled": row.step == 10000}
        store.publish(row.model_copy(update=counts), store.samples(row))
    main([str(run)])
    cards = [run / f"drafter/step-{step:08d}/README.md" for step in (1000, 10000)]
    texts = [" ".join(card.read_text(encoding="utf-8").split()) for card in cards]
    steps = [row.step for row in store.results()]
    count = steps.count(None) + steps.count(10000)
    told = f"{2 * count} answers ended by themselves, {4 * count} were cut."
    assert all(told in text for text in texts)
    marks = [re.findall(r"held up answers to (\d+) prompts", text) for text in texts]
    assert marks == [[], [str(steps.count(10000))]]


def test_a_card_of_someones_own_stays_and_ours_follows_the_rows(run):
    own, ours = run / "drafter/step-00000100", run / "drafter/step-00001000"
    add_files(own, {"README.md": "# Mine"})
    main([str(run)])
    assert (own / "README.md").read_text() == "# Mine" and load_profile(own) is not None
    before = (ours / "README.md").read_text()
    change_rows(run, lambda row: row.model_copy(update={"max_new_tokens": 450}))
    main([str(run)])
    assert "450" in (ours / "README.md").read_text() and "450" not in before


@pytest.mark.quick(1)
@pytest.mark.parametrize("content", ["{", "[1]", "a: &a [*a]"])
def test_a_run_config_that_cannot_be_read_is_one_clear_line(run, content, capsys):
    (run / "config.yaml").write_text(content)
    with pytest.raises(BadData, match="3 of 3"):
        main([str(run)])
    assert capsys.readouterr().out.count(f"{run}/config.yaml") == 3


def test_odd_provenance_leaves_out_what_it_does_not_say(run):
    folder = run / "drafter/step-00000100"
    provenance = {
        "step": 100, "tokens_seen": "plenty", "loss": None, "versions": 3, "git_sha": "a|b",
    }
    add_files(folder, {"provenance.json": json.dumps(provenance)})
    main([str(run), "--drafter", str(folder)])
    card = (folder / "README.md").read_text()
    assert "| commit | a\\|b |" in card and "plenty" not in card and "versions" not in card


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda p: "{", "Invalid JSON"),
        (lambda p: json.dumps({**p, "version": 9}), "version 9"),
        (lambda p: json.dumps({**p, "more": 1}), "more"),
        (lambda p: json.dumps(spoil_tree(p)), "parent"),
        (lambda p: json.dumps(spoil_drafter(p, "FOLDER+ngram:6,/etc/hosts")), "drafter: String"),
        (lambda p: json.dumps(spoil_drafter(p, "elsewhere")), "drafter: String"),
    ],
)
def test_a_profile_that_cannot_be_used_is_one_clear_line(profile_path, change, reason):
    path = profile_path
    path.write_text(change(json.loads(path.read_text())))
    with pytest.raises(CheckpointRefused, match=reason) as got:
        load_profile(path.parent)
    assert str(path) in str(got.value) and "\n" not in str(got.value)


def spoil_drafter(profile, name):
    profile["recommendations"][0]["drafter"] = name
    return profile


def spoil_tree(profile):
    profile["recommendations"][0]["tree"]["parents"] = [-1, 2, 1]
    return profile
