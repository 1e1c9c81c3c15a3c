"""Reports from records written by hand, so that every number in them is known."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from hand_made_run import CALL_S, NUM_PROMPTS, STEPS, make_row, make_run, make_sample

from stree.errors import BadData, CannotWrite, UsageError
from stree_pipelines.evaluation.records import Divergence, ResultStore, Tree
from stree_pipelines.report import main, write_report
from stree_pipelines.reports.run_data import POOLED, load_run
from stree_pipelines.reports.tables import advise, table6


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("run"))
    write_report(load_run(folder))
    return folder


def test_table6_has_the_papers_layout_and_the_records_numbers(run):
    data = load_run(run)
    rows = {(r.step, r.method): r for r in data.rows
            if (r.benchmark, r.temperature) == ("mt_bench", 0)}  # fmt: skip
    (
        head, plain, chain_speed, chain_tau, tree_speed, tree_tau, gains,
    ) = table6(data, "mt_bench", 0.0).rows  # fmt: skip
    assert head == ("", "step 100", "step 1000", "step 10000")
    assert [row[0] for row in (plain, chain_speed, chain_tau, tree_speed, tree_tau)] == [
        "Speed (Autoregressive)", "Speed (Vanilla SD)", "τ (Vanilla SD)", "Speed (STree)",
        "τ (STree)",
    ]  # fmt: skip
    assert gains[0] == "τ gain (STree − Vanilla SD)"
    for column, step in enumerate(STEPS, start=1):
        for method, speed, tau in (
            ("vanilla_sd", chain_speed, chain_tau),
            ("stree", tree_speed, tree_tau),
        ):
            row = rows[step, method]
            assert speed[column].startswith(f"{row.tokens_per_second:.2f} ({row.speedup:.2f}×)")
            assert tau[column].startswith(f"{row.acceptance_length:.2f} [")
            low, high = row.confidence_intervals["speedup"]
            assert speed[column].endswith(f" [{low:.2f}, {high:.2f}]")
        assert plain[column] == f"{rows[None, 'autoregressive'].tokens_per_second:.2f}"


def test_table6_by_hand(run):
    """Step 10000: the tree takes 20 calls of 13 ms for what plain decoding takes 60 of 10 ms."""
    table = table6(load_run(run), "mt_bench", 1.0)
    assert table.rows[5][3] == "3.00 [3.00, 3.00]"
    assert table.rows[6][3] == "+1.00 [+1.00, +1.00]"  # the chain takes 30
    assert "(2.31×) [2.31, 2.31]" in table.rows[4][3]  # 600 / 260


def test_the_pool_holds_all_prompts_of_all_benchmarks(run):
    cell = load_run(run).cell("step-00001000", "stree", POOLED, 0.0)
    assert cell.num_prompts == 2 * NUM_PROMPTS
    assert cell["acceptance_length"] == 2.0


def test_markdown_is_a_table_that_lines_up(run):
    text = (run / "table6.md").read_text(encoding="utf-8")
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert len(tables) == 6  # (pool + 2 benchmarks) × 2 temperatures
    for table in tables:
        lines = table.splitlines()
        assert len(lines) == 8
        assert len({len(line) for line in lines}) == 1
        assert len({line.count("|") for line in lines}) == 1


class Resources(HTMLParser):
    """Collects whatever a browser would fetch, and checks that elements nest."""

    VOID = ("meta", "br", "link", "img", "input", "hr", "path", "use", "rect", "line", "circle")

    def __init__(self):
        super().__init__()
        self.fetched, self.open, self.texts = [], [], []

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "srcset", "data", "action"):
                self.fetched.append(value)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_data(self, data):
        self.texts.append(data)


def test_page_is_self_contained_and_well_formed(run):
    html = (run / "report.html").read_text(encoding="utf-8")
    page = Resources()
    page.feed(html)
    assert page.open == []
    assert all(target.startswith("#") for target in page.fetched)
    for outside in ("http:", "https:", "//cdn", "@import", "<script", "<link"):
        assert outside not in html
    assert not [url for url in re.findall(r"url\((.*?)\)", html) if not url.startswith("#")]


def test_page_shows_every_section(run):
    html = (run / "report.html").read_text(encoding="utf-8")
    for title in (
        "Use the tree", "Speed and acceptance length", "Acceptance length", "Distillation loss",
        "Drafts accepted per call", "Acceptance by depth", "Where a call&#39;s time goes",
        "Losslessness", "Sample outputs", "Environment", "Test device",
    ):  # fmt: skip
        assert title in html, title
    assert html.count("<svg") == 9
    assert "72 of 72 greedy answers" in html
    # a model's text is text
    assert "<b>answer</b>" not in html and "&lt;b&gt;answer&lt;/b&gt; ünï" in html


def test_reports_are_reproducible(run, tmp_path):
    for path in write_report(load_run(run), tmp_path):
        assert path.read_bytes() == (run / path.name).read_bytes()


def test_divergences_are_listed_with_their_gap(tmp_path):
    divergence = Divergence(
        prompt_id="q0", turn=0, position=17, token=3, autoregressive_token=4, logit_gap=0.00123
    )
    make_run(tmp_path, ("gsm8k",), (0.0,), divergence)
    write_report(load_run(tmp_path))
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "35 of 36 greedy answers" in html
    assert "at most\n0.0012 logits" in html and "0.00123" in html
    text = (tmp_path / "lossless.md").read_text(encoding="utf-8")
    assert "35 of 36 greedy answers" in text and text.count("| 6 of 6 ") == 5
    assert re.search(r"float32 \| gsm8k .*\| 0\.00123 \|", text), text


def test_losslessness_counts_every_evaluation_of_a_run(tmp_path):
    make_run(tmp_path, ("gsm8k",), (0.0,))
    (tmp_path / "eval").rename(tmp_path / "eval-fp32")
    make_run(tmp_path, ("gsm8k",), (0.0,))
    write_report(load_run(tmp_path))
    text = (tmp_path / "lossless.md").read_text(encoding="utf-8")
    assert "72 of 72 greedy answers" in text and "Divergences" not in text


def test_works_without_training_files_or_samples(tmp_path):
    make_run(tmp_path, ("gsm8k",), (0.0,))
    (tmp_path / "metrics.csv").unlink()
    for path in (tmp_path / "eval").glob("samples_*"):
        path.unlink()
    write_report(load_run(tmp_path))
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "No metrics.csv" in html and "Distillation loss" not in html
    assert "2.31×" in (tmp_path / "table6.md").read_text()


def test_works_on_the_baseline_alone(tmp_path):
    samples = [make_sample("autoregressive", None, "b", i, 0.0, 60) for i in range(2)]
    store = ResultStore(tmp_path)
    store.publish(make_row("autoregressive", None, "b", samples, 0.0), samples)
    assert {path.name for path in write_report(load_run(tmp_path))} == {
        "table6.md",
        "table6.json",
        "report.html",
    }  # no check


def test_a_missing_cell_is_a_dash(tmp_path):
    make_run(tmp_path, ("gsm8k",), (0.0,))
    store = ResultStore(tmp_path / "eval")
    lost = next(r for r in store.results() if (r.step, r.method) == (1000, "vanilla_sd"))
    store.forget({lost.key: lost.samples})
    assert [row[2] for row in table6(load_run(tmp_path), "gsm8k", 0.0).rows[2:4]] == ["–", "–"]


def test_two_trees_get_rows_of_their_own(tmp_path):
    make_run(tmp_path, ("gsm8k",), (0.0,))
    store = ResultStore(tmp_path / "eval")
    samples = [make_sample("stree", 100, "gsm8k", i, 0.0, 30) for i in range(NUM_PROMPTS)]
    wide = Tree(name="wide", parents=(-1, 0))
    other = make_row("stree", 100, "gsm8k", samples, 0.0, decoding_hash="x",
                     tree=wide, samples="samples_w.jsonl")  # fmt: skip
    store.publish(other, samples)
    heads = [row[0] for row in table6(load_run(tmp_path), "gsm8k", 0.0).rows]
    assert "τ (STree, paper)" in heads and "τ (STree, wide)" in heads
    assert "τ gain (STree, wide − Vanilla SD)" in heads


def test_many_temperatures_are_drawn(tmp_path):
    make_run(tmp_path, ("gsm8k",), (0.0, 0.25, 0.5, 0.75, 1.0))
    write_report(load_run(tmp_path))
    assert "T = 0.75" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("place", ["/proc/x", "file/x", "/dev/null/x"])
def test_a_folder_that_refuses_is_one_clear_error(run, tmp_path, place):
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite, match="cannot write"):
        write_report(load_run(run), tmp_path / place)


@pytest.mark.parametrize(
    ("seconds", "headline"),
    [
        # seconds of a call of (chain, tree); a prompt is 30 chain calls, 20 tree calls, 60 plain
        ((0.012, 0.013), "Use the tree"),
        ((0.008, 0.020), "Use the chain"),
        ((0.025, 0.040), "Use plain decoding"),
        ((0.010, 0.015), "Use the chain"),  # equal: the simpler one
    ],
)
def test_advice_follows_the_measured_speeds(tmp_path, monkeypatch, seconds, headline):
    monkeypatch.setitem(CALL_S, "vanilla_sd", seconds[0])
    monkeypatch.setitem(CALL_S, "stree", seconds[1])
    make_run(tmp_path, ("gsm8k",), (0.0,))
    assert advise(load_run(tmp_path), 0.0)[0] == headline


def test_command_prints_table6_and_paths(run, capsys):
    main([str(run)])
    printed = capsys.readouterr().out
    assert "| τ (STree) " in printed and str(run / "report.html") in printed
    assert "T = 0: Use the tree." in printed


def test_no_results_is_one_clear_error(tmp_path):
    with pytest.raises(UsageError, match=r"run eval_spec\.py first"):
        write_report(load_run(tmp_path))
    make_run(tmp_path, ("gsm8k",), (0.0,))
    (tmp_path / "command.json").write_text("{")
    with pytest.raises(BadData, match=r"command\.json"):
        write_report(load_run(tmp_path))
