"""Sentences about the answers behind a table: how they end, repeat, and were held up."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hand_made_run import make_run

from stree import metrics
from stree.common.errors import UsageError
from stree_lab.papers.tables import made
from stree_pipelines.commands.report import write_report
from stree_pipelines.evaluation.plan import AUTOREGRESSIVE
from stree_pipelines.evaluation.records import BaselineTiming
from stree_pipelines.evaluation.result_store import ResultStore
from stree_pipelines.reports.run_data import POOLED, load_run
from stree_pipelines.reports.settings import require_one_ending
from stree_pipelines.reports.tables.answer_notes import endings, marks, repeating
from stree_pipelines.reports.tables.tables import below, table6

RESULTS = Path(__file__).parents[4] / "docs/results"
PAGES = ("comparison.md", "study.md", "table6.md")


def of_one_place(store, benchmark, temperature):
    rows = [r for r in store.results() if (r.benchmark, r.temperature) == (benchmark, temperature)]
    samples = {}
    for row in rows:
        samples.setdefault(row.method, []).extend(store.samples(row))
    return samples


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path, ("gsm8k",), (0.0,))


def test_quiet_answers_have_no_mark(run):
    assert marks(of_one_place(ResultStore(run / "eval"), "gsm8k", 0.0)) == []
    assert "Marked" not in table6(load_run(run), "gsm8k", 0.0).note


def test_a_table_of_a_stalled_answer_is_marked_and_has_the_median_beside(tmp_path):
    run = make_run(tmp_path, ("gsm8k",), (0.0, 1.0))
    store = ResultStore(run / "eval")
    for row in store.results():
        if row.method != AUTOREGRESSIVE and row.temperature == 0:
            samples = store.samples(row)
            waited = BaselineTiming(num_new_tokens=60, prefill_s=0.01, decode_s=9.0)
            samples[2] = samples[2].model_copy(update={"baseline": waited})
            figures = metrics.summarise(samples, [each.baseline for each in samples])
            store.publish(row.model_copy(update=figures), samples)
    write_report(load_run(run))
    told = "Marked: the machine held up answers to 1 of 6 prompts (q2)"
    data = load_run(run)
    assert told in table6(data, "gsm8k", 0.0).note
    assert told not in table6(data, "gsm8k", 1.0).note
    for page in ("table6.md", "report.html"):
        assert (run / page).read_text(encoding="utf-8").count(told) == 1, page
    (median,) = (r for r in table6(data, "gsm8k", 0.0).rows if r[0] == "Median speed-up (tree)")
    calls = (40, 30, 20)  # 60 steps of 10 ms over those of 13 ms, whatever one prompt waited
    assert median[1:] == tuple(f"{60 * 10 / (count * 13):.2f}×" for count in calls)


LOOP = (7, 8, 9, *range(10, 26), *range(10, 26), *range(10, 26))


def answered(run, of):
    """Load the run with other answers: of(method, prompt) gives tokens and why they end."""
    store = ResultStore(run / "eval")
    for row in store.results():
        samples = []
        for sample in store.samples(row):
            tokens, reason = of(row.method, sample.prompt_id)
            turn = sample.turns[0].model_copy(update={"tokens": tokens, "finish_reason": reason})
            samples.append(sample.model_copy(update={"turns": (turn,)}))
        store.publish(row, samples)
    return load_run(run)


def test_each_table_says_how_many_answers_ended_and_how_many_were_cut(run):
    data = answered(
        run, lambda method, prompt: ((1,), "eos" if prompt in ("q0", "q1") else "length")
    )
    assert endings({"A": data.cell("", AUTOREGRESSIVE, "gsm8k", 0.0).samples}) == [
        "Answers that ended by themselves and that were cut: 2 and 4."
    ]
    # of three checkpoints each, but plain decoding
    wanted = "that were cut: 2 and 4 (plain); 6 and 12 (chain, tree)."
    assert wanted in table6(data, "gsm8k", 0.0).note
    write_report(data)
    for page in ("table6.md", "report.html"):
        assert wanted in (run / page).read_text(encoding="utf-8"), page
    rows = json.loads((run / "table6.json").read_text(encoding="utf-8"))["rows"]
    assert {(row["num_ended"], row["num_cut"]) for row in rows} == {(2, 4)}


def test_answers_that_repeat_are_flagged_and_figures_stand_with_and_without_them(run):
    """The tree's answer to q5, the slowest prompt there, goes in a circle."""
    data = answered(
        run,
        lambda method, prompt: (
            (LOOP, "length") if (method, prompt) == ("stree", "q5") else (tuple(range(60)), "eos")
        ),
    )
    table = table6(data, "gsm8k", 0.0)
    assert "The last quarter of answers to q5 repeats, which is easy to draft." in table.note
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["Answers without repeats (tree)"] == ("5 of 6",) * 3
    for column, checkpoint in enumerate(data.checkpoints):
        samples = data.cell(checkpoint, "stree", "gsm8k", 0.0).samples[:5]
        tau = metrics.acceptance_length(samples)
        times = metrics.speedup(samples, [each.baseline for each in samples])
        assert rows["τ without repeats (tree)"][column] == f"{tau:.2f}"
        assert rows["Speed-up without repeats (tree)"][column] == f"{times:.2f}×"
    assert not any("without repeats (chain)" in name for name in rows)
    write_report(data)
    assert "(repeats itself)" not in (run / "report.html").read_text(encoding="utf-8")  # first 3
    row = next(row for row in json.loads((run / "table6.json").read_text())["rows"]
               if row["method"] == "stree")
    assert row["without_repeats"]["num_prompts"] == 5
    data = answered(run, lambda method, prompt: (LOOP, "length"))
    write_report(data)
    assert "gsm8k: q0 (repeats itself)" in (run / "report.html").read_text(encoding="utf-8")
    assert {row[0]: row[1:] for row in table6(data, "gsm8k", 0.0).rows}[
        "τ without repeats (tree)"
    ] == ("–", "–", "–")


def test_notes_of_tables_without_rows_for_it_have_the_figures_without_repeats(run):
    data = answered(
        run,
        lambda method, prompt: (LOOP if prompt == "q5" else tuple(range(60)), "eos"),
    )
    samples = data.cell(data.last, "stree", "gsm8k", 0.0).samples
    (told,) = repeating({"tree": samples})
    times = metrics.speedup(samples[:5], [each.baseline for each in samples[:5]])
    assert told.endswith(f"Without these answers: tree τ 3.00, {times:.2f}× (5 of 6).")


def test_rows_with_and_without_ignore_eos_are_joined_in_no_table(run):
    data = load_run(run)
    other = data.rows[0].model_copy(update={"ignore_eos": not data.rows[0].ignore_eos})
    require_one_ending(data.rows, "a table")
    for join in (
        lambda: below({}, [*data.rows, other]),
        lambda: made("A paper's table", [("", "a")], [*data.rows, other]),
    ):
        with pytest.raises(UsageError, match="7 rows with ignore_eos and 1 without"):
            join()


def test_a_table_whose_plain_decoding_waits_is_marked(tmp_path):
    samples = of_one_place(ResultStore(make_run(tmp_path) / "eval"), "gsm8k", 0.0)
    plain = [
        each.model_copy(update={"decode_s": 1.5 * each.decode_s, "time_ms": {
            "verify": 1e3 * each.decode_s, "host": 500 * each.decode_s}})
        for each in samples[AUTOREGRESSIVE]
    ]
    (told,) = marks({AUTOREGRESSIVE: plain})
    assert "for 33 % of its time at the worst (a step took 15.38 ms, 10.25 without" in told


@pytest.mark.quick(8)
@pytest.mark.parametrize(
    "folder",
    sorted(path.parent for path in RESULTS.rglob("results.jsonl")
           if any((path.parent / page).exists() for page in PAGES)),
    ids=lambda path: str(path.relative_to(RESULTS)),
)
def test_a_committed_page_has_the_marks_of_its_rows(folder):
    """The marks stand until the rows are measured again."""
    store, text = ResultStore(folder), ""
    for page in PAGES:
        if (folder / page).exists():
            text += (folder / page).read_text(encoding="utf-8")
    places = dict.fromkeys((row.benchmark, row.temperature) for row in store.results())
    wanted = {
        f"{benchmark}, T = {temperature:g}: {mark}"
        for benchmark, temperature in places
        for mark in marks(of_one_place(store, benchmark, temperature))
    }
    lines = re.findall(r"^- (.*?: )(Marked: .*)$", text, re.M)  # above the tables, or in a note
    tables = re.findall(r"^\*\*(.*?) \(.*?\*\*\n(.*?)(?=^\*\*|\Z)", text, re.M | re.S)
    for place, table in tables:
        shown = re.findall("Marked: .*?(?=Marked: |$)", table, re.M)
        lines += [(f"{place}: ", each) for each in shown]
    found = [place + mark for place, mark in lines if not place.startswith(POOLED)]
    assert all(any(each.startswith(mark) for each in found) for mark in wanted)
    assert len(found) == len(wanted)
    if not wanted:
        assert "Marked: " not in text
