"""Several runs in one report, from records written by hand, so that every number is known."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from hand_made_run import CALLS, make_run
from html_pages import require_self_contained

from stree import metrics
from stree.common.errors import BadData, UsageError
from stree_pipelines.commands.report import main, write_runs_report
from stree_pipelines.comparison import answers as figures
from stree_pipelines.comparison.answers import Answers
from stree_pipelines.evaluation.result_store import ResultStore
from stree_pipelines.reports import runs_tables
from stree_pipelines.reports.run_data import load_run
from stree_pipelines.reports.runs import load_runs
from stree_pipelines.reports.tables.tables import Table, to_latex

CONFIG = Path(__file__).resolve().parents[3] / "docs/results/cpu-quickstart/config.yaml"
MADE = {
    *(f"table6.{form}" for form in ("md", "tex", "csv", "json")),
    *(f"{name}_vs_step.{form}" for name in ("tau", "speed") for form in ("svg", "pdf")),
    "report.html",
}


def trained(folder, seed=0, loss="forward_kl", calls=(40, 30, 20), benchmarks=("gsm8k",)):
    """Make a run whose tree takes these calls for a prompt's 60 tokens, some fewer in each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CALLS, "stree", calls)
        make_run(folder, benchmarks, (0.0,))
    store, spread = ResultStore(folder / "eval"), np.random.default_rng(seed)
    for row in store.results():
        samples = [
            sample.model_copy(update={"num_new_tokens": 60 - int(spread.integers(12))})
            for sample in store.samples(row)
        ]
        if row.step is not None:
            new = metrics.summarise(samples, [sample.baseline for sample in samples])
            store.publish(row.model_copy(update=new), samples)
    config = yaml.safe_load(CONFIG.read_text())
    config.update(seed_everything=seed, run_dir=str(folder))
    config["model"]["loss"]["kind"] = loss
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two seeds of a recipe, and another recipe that drafts better at the last step."""
    root = tmp_path_factory.mktemp("runs")
    return [
        trained(root / "kl/seed-0"),
        trained(root / "kl/seed-1", seed=1, calls=(40, 30, 24)),
        trained(root / "lk", loss="lk", calls=(40, 30, 15)),
    ]


@pytest.fixture(scope="module")
def runs(folders):
    return load_runs(folders)


def samples_of(folder, step, method):
    store = ResultStore(folder / "eval")
    (row,) = (row for row in store.results() if (row.step, row.method) == (step, method))
    return store.samples(row)


def row_of(runs, name, step, method):
    (row,) = (
        row
        for row in runs_tables.table_rows(runs)
        if (row["run"], row["step"], row["method"]) == (name, step, method)
    )
    return row


def test_runs_that_differ_by_their_seed_share_a_column(folders, runs):
    assert [column.title for column in runs.columns] == ["kl (2 seeds)", "lk"]
    table = runs_tables.last_table(runs, "gsm8k", 0.0)
    assert table.rows[0] == ("", "kl (2 seeds)", "lk")
    assert table.rows[1] == ("Checkpoint", "step 10000", "step 10000")
    taus = [
        sum(s.num_new_tokens for s in samples) / sum(s.num_calls for s in samples)
        for samples in (samples_of(folder, 10000, "stree") for folder in folders[:2])
    ]
    (line,) = (row for row in table.rows if row[0] == "τ of each seed (tree)")
    assert line[1] == f"{min(taus):.2f} {max(taus):.2f}"


def recomputed(mine, first, draws, seed_draws):
    """Compute the difference of τ as table6.json says, from samples in loops."""

    def tau(side, prompts, chosen):
        drawn = [side[seed][prompt] for seed in chosen for prompt in prompts]
        return sum(s.num_new_tokens for s in drawn) / sum(s.num_calls for s in drawn)

    return [
        tau(mine, prompts, own) - tau(first, prompts, theirs)
        for prompts, own, theirs in zip(draws, *seed_draws, strict=True)
    ]


def test_a_difference_is_paired_by_prompt_and_drawn_over_prompts_and_seeds(folders, runs):
    """The interval follows from the draws that table6.json names."""
    row = row_of(runs, "lk", 10000, "stree")
    first = [samples_of(folder, 10000, "stree") for folder in folders[:2]]
    mine = [samples_of(folders[2], 10000, "stree")]
    count = metrics.NUM_RESAMPLES
    draws = np.random.default_rng(0).integers(6, size=(count, 6))
    seed_draws = [
        np.random.default_rng(side).integers(len(each), size=(count, len(each)))
        for side, each in ((1, mine), (2, first))
    ]
    gains = recomputed(mine, first, draws, seed_draws)
    stated = row["over_first"]["acceptance_length_gain"]
    assert stated["interval"] == pytest.approx(np.quantile(gains, metrics.quantiles_of(6)))
    (point,) = recomputed(mine, first, [range(6)], [[[0]], [[0, 1]]])
    assert stated["value"] == pytest.approx(point)
    assert row["num_seeds"] == 1 and row["over_first"]["checkpoint"] == "step-00010000"


def test_a_run_alone_has_the_figures_of_its_own_report(folders, runs):
    data = load_run(folders[2])
    for method in ("vanilla_sd", "stree"):
        cell = data.cell("step-00001000", method, "gsm8k", 0.0)
        row = row_of(runs, "lk", 1000, method)
        for name in ("acceptance_length", "tokens_per_second", "speedup"):
            assert row[name] == {"value": cell[name], "interval": cell.interval(name)}


def test_intervals_cover_what_seeds_differ_by():
    """Drafters whose τ differs by seed with a deviation of 0.1, prompts with one of 0.1, too; 4
    seeds. Over prompts alone the interval would miss the mean of all seeds most of the time."""
    rng, missed, missed_alone = np.random.default_rng(0), 0, 0
    for _ in range(60):
        tau = 2 + 0.1 * rng.standard_normal((4, 1)) + 0.1 * rng.standard_normal((1, 60))
        counts = {"tokens": 100 * tau, "calls": np.full_like(tau, 100)}
        prompts = tuple(("b", str(number)) for number in range(60))
        pooled = {name: each.sum(0, keepdims=True) for name, each in counts.items()}
        low, high = Answers(prompts, counts).figure(figures.acceptance_length).interval
        missed += not low <= 2 <= high
        low, high = Answers(prompts, pooled).figure(figures.acceptance_length).interval
        missed_alone += not low <= 2 <= high
    assert missed <= 18 and missed_alone >= 27


def test_the_verdict_says_who_is_ahead_and_by_how_much(folders, runs):
    row, verdict = row_of(runs, "lk", 10000, "stree"), runs_tables.verdict(runs, 0.0)
    tau, gain = row["acceptance_length"], row["over_first"]["acceptance_length_gain"]
    assert verdict.headline == "lk has the longest τ" and gain["interval"][0] > 0
    low, high = gain["interval"]
    said = f"lk has {tau['value']:.2f}, {gain['value']:+.2f} [{low:+.2f}, {high:+.2f}] over kl."
    assert said in verdict.reason
    alike = runs_tables.verdict(load_runs([folders[0], trained_again(folders[0])]), 0.0)
    assert alike.headline == "Not told apart by τ"


def trained_again(folder):
    """Make the run again in another folder, with the same recipe, seed and answers."""
    again = folder.parent / "again"
    return again if again.exists() else trained(again)


def test_runs_of_one_recipe_and_one_seed_stand_apart(folders):
    runs = load_runs([folders[0], trained_again(folders[0]), folders[1]])
    assert [column.name for column in runs.columns] == ["kl/seed-0", "again", "kl/seed-1"]
    assert any("with the same seed, so each has a column" in note for note in runs.notes)


def test_a_recipe_does_not_take_the_name_of_another_run(folders, tmp_path):
    given = [tmp_path / name for name in ("a/kl-1", "a/kl-2", "a/kl")]
    for old, new in zip(folders, given, strict=True):
        shutil.copytree(old, new)
    assert [column.name for column in load_runs(given).columns] == ["kl-1", "kl"]


def test_seeds_that_different_commits_trained_are_told(folders, tmp_path):
    given = [tmp_path / folder.name for folder in folders[:2]]
    for folder, new in zip(folders, given, strict=False):
        shutil.copytree(folder, new)
        (new / "command.json").write_text(json.dumps({"git_sha": f"{new.name}-of-the-commit"}))
    wanted = "are taken together, trained by commits seed-0-of-th, seed-1-of-th."
    assert [note for note in load_runs(given).notes if note.endswith(wanted)]
    told = load_runs(folders[:2]).notes
    assert not [note for note in told if "taken together" in note]


def test_answers_without_repeats_are_paired_over_seeds(folders, runs):
    row = row_of(runs, "kl", 10000, "stree")
    assert row["without_repeats"]["num_prompts"] == row["num_prompts"]
    assert row["without_repeats"]["acceptance_length"] == row["acceptance_length"]["value"]


def test_runs_of_plain_decoding_alone_are_compared(folders, tmp_path):
    given = [tmp_path / folder.name for folder in folders[1:]]
    for folder, new in zip(folders[1:], given, strict=True):
        shutil.copytree(folder, new)
        results = new / "eval/results.jsonl"
        plain = [line for line in results.read_text().splitlines() if '"autoregressive"' in line]
        results.write_text("\n".join(plain) + "\n")
    found = runs_tables.last_table(load_runs(given), "gsm8k", 0.0)
    assert found.rows[-1] == ("Speed (plain)", "–", "–")


def test_a_tree_of_a_replaced_checkpoint_has_a_name(folders, tmp_path):
    """A path's newer content, on a benchmark that is not shared, hides nothing on a shared one."""
    new = tmp_path / "lk"
    shutil.copytree(folders[2], new)
    store = ResultStore(new / "eval")
    row = next(row for row in store.results() if (row.step, row.method) == (100, "stree"))
    wide = row.tree.model_copy(update={"name": "wide"})
    again = {"checkpoint": "again", "step": 7, "samples": "samples/gone.jsonl.gz"}
    with open(new / "eval/results.jsonl", "a") as results:
        for more in (
            {"checkpoint_sha256": "older", "tree": wide},
            {"checkpoint_sha256": "newer", "benchmark": "mt_bench"},
        ):
            results.write(row.model_copy(update=again | more).model_dump_json() + "\n")
    assert "stree:wide" in load_runs([folders[0], new]).methods


def test_what_is_another_recipe_is_not_a_seed(folders, tmp_path):
    config = yaml.safe_load((folders[1] / "config.yaml").read_text())
    for name, section, key, value in (
        ("rate", "model", "optimizer", {"lr": 1.0}), ("rows", "data", "batch_size", 8),
        ("steps", "trainer", "max_steps", 9), ("none", None, None, None),
    ):
        other = tmp_path / name
        shutil.copytree(folders[1] / "eval", other / "eval")
        if section:
            changed = {**config, section: {**config[section], key: value}}
            (other / "config.yaml").write_text(yaml.safe_dump(changed))
        assert len(load_runs([folders[0], other]).columns) == 2
    (other / "config.yaml").write_text("a: [")
    with pytest.raises(BadData, match=r"config\.yaml cannot be read: .*; restore it"):
        load_runs([folders[0], other])


@pytest.fixture(scope="module")
def written(folders, tmp_path_factory):
    out = tmp_path_factory.mktemp("compared")
    write_runs_report(load_runs(folders), out)
    return out


@pytest.mark.costly
def test_the_same_files_are_written_each_time_without_out_beside_the_first_run(
    written, folders, drawn
):
    assert {path.name for path in written.iterdir()} == MADE
    main([*map(str, folders)])
    for path in written.iterdir():
        again = folders[0].parent / "compared" / path.name
        assert again.read_bytes() == path.read_bytes(), path.name


def test_the_page_overlays_the_runs(written):
    html = (written / "report.html").read_text(encoding="utf-8")
    require_self_contained(html)
    assert html.count("<svg") == 6  # τ, its difference and speed-ups, of chain and tree
    for text in ("lk has the longest τ", "kl (2 seeds)", "lk − kl", "Difference of acceptance",
                 "τ over kl&#39;s (tree)", "over seeds where there are several"):
        assert text in html, text


def test_csv_has_every_figure_of_the_json(written):
    with open(written / "table6.csv", newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    rows = json.loads((written / "table6.json").read_text(encoding="utf-8"))["rows"]
    assert len(lines) == len(rows) == 2 * 3 * 2
    for line, row in zip(lines, rows, strict=True):
        assert float(line["acceptance_length"]) == row["acceptance_length"]["value"]
        assert float(line["speedup_low"]) == row["speedup"]["interval"][0]
        gain = row.get("over_first", {}).get("acceptance_length_gain", {"value": ""})["value"]
        assert line["over_first_acceptance_length_gain"] == str(gain)


def test_latex_is_what_latex_reads(written):
    text = (written / "table6.tex").read_text(encoding="utf-8")
    assert text.isascii() and r"$\tau$ (tree)" in text and r"{\scriptsize [" in text
    for name in ("table", "tabular"):
        assert text.count(rf"\begin{{{name}}}") == text.count(rf"\end{{{name}}}") >= 1
    table = Table("a_b & 50 %", (("", "x{y}"), ("[1]", r"\^~#$ – −1")))
    body = to_latex([table]).splitlines()
    assert r"\caption{a\_b \& 50 \%}" in body
    assert r" & x\{y\} \\" in body
    row = r"{\scriptsize [1]} & \textbackslash{}\textasciicircum{}\textasciitilde{}\#\$ -- $-$1 \\"
    assert row in body


def test_pdfs_embed_fonts_that_publishers_take(written):
    content = (written / "tau_vs_step.pdf").read_bytes()
    assert (
        content.startswith(b"%PDF") and b"/Type3" not in content and b"CreationDate" not in content
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_new_tokens": 9}, "max_new_tokens is 61 (7 rows in {0}) or 9 (7 rows in {1})"),
        ({"ignore_eos": False}, "ignore_eos is true (7 rows in {0}) or false (7 rows in {1})"),
        ({"seed": 3}, "seed is 0 (7 rows in {0}) or 3 (7 rows in {1})"),
        ({"target_sha256": "ab"}, "target is 7a (7 rows in {0}) or ab (7 rows in {1})"),
        ({"prompts_hash": "q"}, "gsm8k.prompts is 6@p (7 rows in {0}) or 6@q (7 rows in {1})"),
        ({"decoding_hash": "x"}, "decoded differently (by decoding_hash)"),
        ({"benchmark": "mine"}, "share no benchmark: {0} has gsm8k; {1} has mine"),
        ({"temperature": 1.0}, "share no temperature: {0} has 0.0; {1} has 1.0"),
    ],
)
def test_runs_that_were_decoded_differently_are_refused_by_name(folders, tmp_path, changes, said):
    other = make_run(tmp_path / "other", ("gsm8k",), (0.0,))
    store = ResultStore(other / "eval")
    for row in store.results():
        store.forget({row.key: "gone"})
        store.publish(row.model_copy(update=changes), store.samples(row))
    said = said.format("kl/seed-0", "other")
    with pytest.raises(UsageError, match=re.escape(said)) as got:
        main([str(folders[0]), str(other), "--out", str(tmp_path / "out")])
    assert "\n" not in str(got.value) and not (tmp_path / "out").exists()


def test_what_only_some_runs_have_is_left_out_and_that_is_said(folders, tmp_path):
    more = trained(tmp_path / "more", 3, "lk", benchmarks=("gsm8k", "mt_bench"))
    runs = load_runs([folders[0], more], titles=("kl", "more"))
    assert runs.scopes == ["gsm8k"] and row_of(runs, "more", 100, "stree")["num_prompts"] == 6
    assert "Not every run has benchmark mt_bench: left out." in runs.notes


def test_the_command_compares_names_and_keeps_records(folders, tmp_path, capsys):
    out = tmp_path / "out"
    main([*map(str, folders), "--names", "KL", "LK_2", "--out", str(out), "--records"])
    printed = capsys.readouterr().out
    printed = " ".join(printed.split())  # lines are wrapped
    assert "KL (2 seeds)" in printed
    assert "T = 0: LK_2 has the longest τ. τ (tree): LK_2 has" in printed
    assert len(load_run(out / "run-3").rows) == 7 and str(out / "report.html") in printed


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["{0}", "{1}", "{2}", "--names", "a"], r"--names are 1, wanted one for each of kl, lk"),
        (["{0}", "{1}", "{2}", "--names", "a", "a"], "two columns would have one name"),
        (["{0}", "--names", "a"], "--names are of several runs"),
        (["{0}", "{2}", "--out", "{0}"], "is one of the runs: give another --out"),
        (["{0}", "{2}", "--records"], "give --out"),
        (["{0}", "{0}/."], "is given twice"),
        (["{0}", "{0}/../.."], r"run eval_spec\.py first"),
    ],
)
def test_what_cannot_be_done_is_one_line(folders, given, said):
    with pytest.raises(UsageError, match=said):
        main([each.format(*folders) for each in given])
