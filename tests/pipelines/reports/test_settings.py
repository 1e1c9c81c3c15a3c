"""Rows of several decoding settings are not joined: a reader refuses them, or shows the chosen."""

from __future__ import annotations

import re

import pytest
import yaml
from hand_made_run import (
    CALLS,
    NUM_PROMPTS,
    TREES,
    add_row,
    change_rows,
    labelled,
    make_row,
    make_run,
    make_sample,
)

from stree import metrics
from stree.common.errors import UsageError
from stree.speculation_profile import Tree
from stree_pipelines.commands.profile_drafter import main as profile_drafter
from stree_pipelines.commands.report import main as report
from stree_pipelines.commands.suggest_tree import main as suggest_tree
from stree_pipelines.evaluation.records import ResultRow
from stree_pipelines.evaluation.result_store import RESULTS_NAME, ResultStore, write_rows
from stree_pipelines.evaluation.sampling import OFF
from stree_pipelines.reports.profiles.drafter_profile import profile_of
from stree_pipelines.reports.profiles.model_card import _places
from stree_pipelines.reports.run_data import load_run, open_results
from stree_pipelines.reports.settings import differing, setting_of
from stree_pipelines.reports.tables.tables import table6, table6_markdown

DEVICE = "CPU: other"


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path, ("gsm8k",), (0.0,))


def measured_again(run, steps=(1000, 10000), calls=60, **changes):
    """Add rows of some checkpoints with these changes, as a second command leaves them."""
    store = ResultStore(run / "eval")
    environment, name = changes.pop("environment", {}), f"again_{len(store.results())}"
    for row in store.results():
        if row.step in (None, *steps) and "again" not in row.decoding_hash:
            samples = store.samples(row)
            if row.step is not None:
                samples = [
                    make_sample(row.method, row.step, row.benchmark, i, row.temperature, calls)
                    for i in range(NUM_PROMPTS)
                ]
            new = make_row(
                row.method, row.step, row.benchmark, samples, row.temperature,
                decoding_hash=f"{name} {row.decoding_hash}",
                samples=row.samples.replace("samples/", f"samples/{name}_"),
                environment=row.environment.model_copy(update=environment), **changes,
            )
            store.publish(new, labelled(samples, new))


def refusals(run):
    """Yield the message with which each reader refuses the run."""
    for command, arguments in (
        (report, []), (profile_drafter, ["--drafter", str(run)]), (suggest_tree, []),
    ):
        with pytest.raises(UsageError) as got:
            command([str(run), *arguments])
        assert "\n" not in str(got.value)
        yield str(got.value)


@pytest.mark.parametrize(
    ("changes", "said", "show"),
    [
        ({"max_new_tokens": 9}, "max_new_tokens is 61 (7 rows) or 9 (5 rows)", "max_new_tokens=9"),
        ({"ignore_eos": False}, "ignore_eos is true (7 rows) or false", "ignore_eos=false"),
        ({"seed": 3}, "seed is 0 (7 rows) or 3", "seed=3"),
        ({"top_p": 0.9}, "top_p is 1.0 (7 rows) or 0.9", "top_p=0.9"),
        ({"prompts_hash": "of fewer"}, "gsm8k.prompts is 6@p (7 rows) or 6@of fewer",
         "gsm8k.prompts=6@of fewer"),
        ({"target_sha256": "other"}, "target is 7a (7 rows) or other", "target=other"),
        ({"chat_template_sha256": "chatml"}, "chat_template is old (7 rows) or chatml",
         "chat_template=chatml"),
    ],
)
def test_every_reader_refuses_a_mix_and_names_the_settings(run, changes, said, show):
    store = change_rows(run, lambda row: row.model_copy(update={"chat_template_sha256": "old"}))
    rows = store.results()
    measured_again(run, **{"chat_template_sha256": "old", **changes})
    for message in refusals(run):
        name = show.partition("=")[0]
        assert f"{name} is " in message and "--show" in message
        assert len([each for each in setting_of(rows[0]) if f"{each} is " in message]) == 1
    with pytest.raises(UsageError) as got:
        load_run(run)
    assert said in str(got.value)
    data = load_run(run, [show])
    assert data.checkpoints == ["step-00001000", "step-00010000"]
    assert data.cell("step-00010000", "stree", "gsm8k", 0.0)["acceptance_length"] == 1
    assert not differing(data.rows)
    assert f"Shown are rows with {show}; 7 others are not." in table6_markdown(data, [])


def test_rows_of_two_batch_sizes_stand_in_no_one_table(run):
    measured_again(run, batch_size=8)
    with pytest.raises(UsageError, match=r"batch_size is 1 \(7 rows\) or 8 \(5 rows\)"):
        report([str(run)])
    report([str(run), "--show", "batch_size=8"])
    for name in ("table6.md", "report.html"):
        assert "gsm8k, T = 0 (6 prompts, 8 at once)" in (run / name).read_text()
    assert "in batches of 8" in (run / "report.html").read_text()
    report([str(run), "--show", "batch_size=1"])
    assert "at once" not in (run / "table6.md").read_text()


def test_a_profile_keeps_batch_sizes_apart(run):
    """The fastest tree in batches is no advice for one sequence."""
    measured_again(run, batch_size=8)
    profile = profile_of(open_results(run), run, "10000")
    assert {(m.batch_size, m.method) for m in profile.measurements} == {
        (size, method) for size in (1, 8) for method in ("autoregressive", "vanilla_sd", "stree")
    }
    assert profile.recommended("cuda", 0.0, "float32").method == "stree"
    batches = profile.recommended("cuda", 0.0, "float32", batch_size=8)
    assert batches.method == "autoregressive" and "plain decoding in batches of 8" in batches.reason
    assert profile.recommended("cuda", 0.0, "float32", batch_size=4) is None
    alone, together = (place["measured"] for place in _places(profile.measurements))
    assert "batches" not in alone and "Test device, in batches of 8" in together


def test_the_command_that_the_error_names_shows_the_setting_of_most_rows(run, capsys):
    environment = {"device": DEVICE, "dtypes": {"weights": "bfloat16", "state": "float32"}}
    measured_again(run, max_new_tokens=9, environment=environment)
    with pytest.raises(UsageError, match="dtype is float32") as got:
        report([str(run)])
    assert "device is Test device (7 rows) or CPU: other (5 rows)" in str(got.value)
    *_, shown = str(got.value).partition("--show ")
    report([str(run), "--show", *shown.split()])
    table = table6(load_run(run, shown.split()), "gsm8k", 0.0).to_markdown()
    assert table in (run / "table6.md").read_text()
    printed = capsys.readouterr().out
    assert "step 100 " in printed and "3.00 [3.00, 3.00]" in printed
    assert "step 100 " in table
    assert "3.00 [3.00, 3.00]" in table


@pytest.mark.parametrize("text", ["max_new_tokens=7", "max_tokens=61", "max_new_tokens", "=61"])
def test_a_setting_that_no_row_has_is_one_clear_line(run, text):
    with pytest.raises(UsageError) as got:
        report([str(run), "--show", text])
    assert f"--show {text}: no row of" in str(got.value) and "\n" not in str(got.value)
    assert "max_new_tokens=61" in str(got.value) or "dtype, device, max_new" in str(got.value)


def test_temperatures_of_other_lengths_are_a_mix_too(tmp_path):
    make_run(tmp_path, ("gsm8k",), (0.0, 1.0))
    longer = {"max_new_tokens": 9}
    change_rows(tmp_path, lambda row: row.model_copy(update=longer if row.temperature else {}))
    with pytest.raises(UsageError, match="max_new_tokens"):
        load_run(tmp_path)


def test_benchmarks_have_prompts_of_their_own(tmp_path):
    make_run(tmp_path, ("mt_bench", "gsm8k"), (0.0,))
    store = change_rows(
        tmp_path, lambda row: row.model_copy(update={"prompts_hash": row.benchmark})
    )
    rows = store.results()
    fewer = [
        row.model_copy(update={"prompts_hash": "fewer"})
        for row in rows if row.benchmark == "gsm8k" and row.method == "stree"
    ]
    assert load_run(tmp_path).benchmarks == ["mt_bench", "gsm8k"]
    write_rows(store.directory / RESULTS_NAME, [*rows, *fewer])
    with pytest.raises(UsageError, match=r"gsm8k\.prompts is 6@gsm8k \(7 rows\) or 6@fewer"):
        load_run(tmp_path)
    chosen = load_run(tmp_path, ["gsm8k.prompts=6@gsm8k"])
    assert chosen.benchmarks == ["mt_bench", "gsm8k"] and len(chosen.rows) == 14


def test_rows_that_only_their_hash_tells_apart_stand_in_no_table(run):
    measured_again(run)
    with pytest.raises(UsageError, match="decoded differently"):
        load_run(run)


def test_what_moves_speeds_only_is_said_in_the_table(run):
    store = ResultStore(run / "eval")
    rows = store.results()
    later = rows[-1].environment.model_copy(update={"git_sha": "def", "num_threads": 2})
    rows[-1] = rows[-1].model_copy(update={"environment": later})
    write_rows(store.directory / RESULTS_NAME, rows)
    text = table6_markdown(load_run(run), [])
    assert "several commits: abc, def" in text and "numbers of threads: 1, 2" in text
    assert "processes" not in text


def test_a_training_from_anew_replaces_the_rows_of_its_checkpoints(run):
    """The new training's rows stand alone: both methods of the old one go."""
    add_row(run, "stree", 100, 60, checkpoint_sha256="anew")
    data = load_run(run)
    assert data.cell("step-00000100", "stree", "gsm8k", 0.0)["acceptance_length"] == 1.0
    assert data.cell("step-00000100", "vanilla_sd", "gsm8k", 0.0) is None
    assert "2 rows are of checkpoints that were replaced since" in table6_markdown(data, [])


def test_drafters_of_one_step_from_two_trainings_have_columns_of_their_own(run):
    add_row(run, "stree", 100, 60, checkpoint="elsewhere/step-00000100",
            checkpoint_sha256="other")
    data = load_run(run)
    heads = table6(data, "gsm8k", 0.0).rows[0]
    assert set(heads[1:3]) == {"elsewhere/step-00000100", "run/drafter/step-00000100"}
    assert data.cell("elsewhere/step-00000100", "stree", "gsm8k", 0.0)["acceptance_length"] == 1


def test_trees_of_one_name_and_other_shapes_have_rows_of_their_own(run):
    changed = Tree(name="paper", parents=(-1, 0))
    add_row(run, "stree", 1000, 60, tree=changed, decoding_hash="changed")
    data = load_run(run)
    assert data.methods == ["vanilla_sd", "stree:paper (1)", "stree:paper (2)"]
    assert data.tree("stree:paper (2)") in (changed, TREES["stree"])
    assert {data.tree(name) for name in data.methods[1:]} == {changed, TREES["stree"]}
    heads = [row[0] for row in table6(data, "gsm8k", 0.0).rows]
    assert "τ (tree, paper (1))" in heads and "τ (tree, paper (2))" in heads


def test_a_profile_keeps_devices_apart_and_is_of_one_setting_on_each(run):
    measured_again(run, environment={"device": DEVICE}, max_new_tokens=9)
    profile = profile_of(open_results(run), run, "10000")
    assert {(m.device, m.max_new_tokens) for m in profile.measurements} == {
        ("Test device", 61), (DEVICE, 9),
    }
    assert [each.device for each in profile.recommendations] == ["Test device", DEVICE]
    # The trees that it suggests are by the calls that were measured last, not by those of both.
    assert profile.suggested_trees[0].num_calls == 2 * 60 * NUM_PROMPTS
    tables = [place["measured"] for place in _places(profile.measurements)]
    assert len(tables) == 2 and f"float32 on {DEVICE}" in tables[0]
    measured_again(run, environment={"device": DEVICE}, max_new_tokens=12)
    with pytest.raises(UsageError, match="max_new_tokens is 9"):
        profile_of(open_results(run), run, "10000")
    shown = profile_of(open_results(run), run, "10000", shown=["max_new_tokens=12"])
    assert {m.max_new_tokens for m in shown.measurements} == {12}


def test_a_suggested_tree_is_of_the_chosen_setting(run, capsys):
    measured_again(run, max_new_tokens=9)
    for tokens, calls in ((61, CALLS["stree"][2] + CALLS["vanilla_sd"][2]), (9, 120)):
        suggest_tree([str(run), "--nodes", "4", "--show", f"max_new_tokens={tokens}"])
        description = yaml.safe_load(capsys.readouterr().out)["description"]
        assert f"over {calls * NUM_PROMPTS} calls" in description


def test_a_lossless_table_has_a_column_for_what_differs(run):
    measured_again(run, max_new_tokens=9)
    report([str(run), "--show", "max_new_tokens=61"])
    text = (run / "lossless.md").read_text()
    assert re.search(r"\| Weights +\| max_new_tokens \| Benchmark \| +T \| Method", text), text
    assert "60 of 60 answers" in text


def test_a_row_of_an_evaluation_says_its_whole_setting():
    """A field that decides tokens and is not in `setting_of` would be joined silently."""
    said = {
        "target_sha256", "environment", "max_new_tokens", "ignore_eos", "seed", "prompts_hash",
        "num_prompts", "chat_template_sha256", "batch_size", "backtracking", *OFF,
    }
    of_the_table = {
        "step", "checkpoint", "checkpoint_sha256", "method", "tree", "benchmark", "temperature",
    }
    follows = {
        "version", "target", "verifier", "decoding_hash", "template_date", "samples", "lossless",
    }
    measured = {
        "end_nodes", "open_ends", "confidence_intervals", "measuring_costs_s", "costs",
        "num_stalled", "num_ended", "num_cut",
    }
    assert set(ResultRow.model_fields) == (
        said | of_the_table | follows | measured | set(metrics.summarise([]))
    )
