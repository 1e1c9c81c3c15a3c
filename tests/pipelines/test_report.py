"""Reports from records written by hand, so that every number in them is known."""

from __future__ import annotations

import re

import pytest
from hand_made_run import (
    CALL_S,
    CALLS,
    NUM_PROMPTS,
    STEPS,
    add_row,
    change_rows,
    make_row,
    make_run,
    make_sample,
)
from html_pages import require_self_contained

from stree.common.errors import BadData, CannotWrite, UsageError
from stree_pipelines.commands.report import main, write_report
from stree_pipelines.evaluation.records import Divergence, Tree
from stree_pipelines.evaluation.result_store import ResultStore
from stree_pipelines.reports import plots
from stree_pipelines.reports.run_data import POOLED, load_run
from stree_pipelines.reports.tables import tables
from stree_pipelines.reports.tables.tables import advise, table6, table6_markdown


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("run"))
    write_report(load_run(folder))
    return folder


@pytest.mark.costly
def test_table6_has_the_papers_layout_and_the_records_numbers(run):
    data = load_run(run)
    rows = {(r.step, r.method): r for r in data.rows
            if (r.benchmark, r.temperature) == ("mt_bench", 0)}
    (
        head, plain, chain_speed, chain_median, chain_tau, tree_speed, tree_median, tree_tau, gains,
    ) = table6(data, "mt_bench", 0.0).rows
    assert [chain_median[0], tree_median[0]] == [
        "Median speed-up (chain)", "Median speed-up (tree)",
    ]
    assert head == ("", "step 100", "step 1000", "step 10000")
    assert [row[0] for row in (plain, chain_speed, chain_tau, tree_speed, tree_tau)] == [
        "Speed (plain)", "Speed (chain)", "τ (chain)", "Speed (tree)",
        "τ (tree)",
    ]
    assert gains[0] == "τ gain (tree − chain)"
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


def test_where_a_call_s_time_goes_has_plain_decoding_beside_the_last_checkpoint(tmp_path):
    data = load_run(make_run(tmp_path, ("gsm8k",), (0.0,)))

    def longest_bar():
        texts = plots.step_times(data, 0.0).axes[0].texts
        return max(float(text.get_text()) for text in texts)

    assert longest_bar() == pytest.approx(13.3, abs=0.1)  # the tree's
    for key, cell in data.cells.items():
        if key[0] == data.last:
            cell.summary["baseline_time_ms"] = {"verify": 99.0}
    assert longest_bar() == 99
    for cell in data.cells.values():  # as of batches, whose calls are not timed by part
        cell.summary.update(time_ms={}, baseline_time_ms={})
    assert plots.step_times(data, 0.0) is None


def test_table6_by_hand(run):
    """At step 10000 the tree takes 20 calls of 13 ms, plain decoding 60 of 10 ms."""
    table = table6(load_run(run), "mt_bench", 1.0)
    assert table.rows[7][3] == "3.00 [3.00, 3.00]"
    assert table.rows[8][3] == "+1.00 [+1.00, +1.00]"  # the chain takes 30
    assert "(2.31×) [2.31, 2.31]" in table.rows[5][3]  # 600 / 260


def test_the_pool_holds_all_prompts_of_all_benchmarks(run):
    cell = load_run(run).cell("step-00001000", "stree", POOLED, 0.0)
    assert cell.num_prompts == 2 * NUM_PROMPTS
    assert cell["acceptance_length"] == 2.0


def test_markdown_is_a_table_that_lines_up(run):
    text = (run / "table6.md").read_text(encoding="utf-8")
    found = [table.splitlines() for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)]
    assert [len(lines) for lines in found] == [10] * 6  # (pool + 2 benchmarks) × 2 temperatures
    for lines in found:
        assert len({(len(line), line.count("|")) for line in lines}) == 1


def test_records_put_neither_markup_nor_control_characters_into_pages(tmp_path, capsys):
    make_run(tmp_path, ("<img src=x>",), (0.0,))
    rows = tmp_path / "eval/results.jsonl"
    rows.write_text(rows.read_text().replace("Test device", "Test \\u001b[2J<script>device"))
    main([str(tmp_path)])
    pages = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.*")
             if path.suffix in (".md", ".html")}
    assert "Test \ufffd[2J&lt;script&gt;device" in pages["report.html"]
    assert "&lt;img src=x>" in pages["table6.md"] and "&lt;img src=x>" in pages["lossless.md"]
    for page in [*pages.values(), capsys.readouterr().out]:
        assert "\x1b" not in page
    for page in pages.values():
        assert "<img" not in page and "<script>" not in page


def test_page_shows_every_section(run):
    html = (run / "report.html").read_text(encoding="utf-8")
    require_self_contained(html)
    for title in (
        "Use the tree", "Speed and acceptance length", "Acceptance length", "Distillation loss",
        "Drafts accepted per call", "Acceptance by depth", "Where a call&#39;s time goes",
        "Losslessness", "Sample outputs", "Environment", "Test device",
    ):
        assert title in html, title
    assert html.count("<svg") == 9
    assert "72 of 72 answers" in html
    # a model's text is text
    assert "<b>answer</b>" not in html and "&lt;b&gt;answer&lt;/b&gt; ünï" in html


@pytest.mark.costly
def test_reports_are_reproducible(run, tmp_path, drawn):
    for path in write_report(load_run(run), tmp_path)[0]:
        assert path.read_bytes() == (run / path.name).read_bytes()


def test_divergences_are_listed_with_their_gap(tmp_path):
    divergence = Divergence(
        prompt_id="q0", turn=0, position=17, token=3, autoregressive_token=4, logit_gap=0.00123
    )
    make_run(tmp_path, ("gsm8k",), (0.0,), divergence)
    write_report(load_run(tmp_path))
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "35 of 36 answers" in html
    assert ">0.0012<" in html and ">0.00123<" in html
    text = (tmp_path / "lossless.md").read_text(encoding="utf-8")
    assert "35 of 36 answers" in text and text.count("| 6 of 6 ") == 5
    assert re.search(r"float32 \| gsm8k .*\| 0\.00123 \|", text), text


def test_losslessness_counts_every_evaluation_of_a_run(tmp_path):
    make_run(tmp_path, ("gsm8k",), (0.0,))
    (tmp_path / "eval").rename(tmp_path / "eval-fp32")
    make_run(tmp_path, ("gsm8k",), (0.0,))
    write_report(load_run(tmp_path))
    text = (tmp_path / "lossless.md").read_text(encoding="utf-8")
    assert "72 of 72 answers" in text and "Divergences" not in text


def test_works_without_training_files_or_samples(tmp_path):
    make_run(tmp_path, ("gsm8k",), (0.0,))
    (tmp_path / "metrics.csv").unlink()
    for path in (tmp_path / "eval/samples").iterdir():
        path.unlink()
    write_report(load_run(tmp_path))
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "No metrics.csv" in html and "Distillation loss" not in html
    assert "2.31×" in (tmp_path / "table6.md").read_text()


def test_samples_that_are_not_there_are_not_pooled_and_that_is_said(tmp_path):
    make_run(tmp_path, temperatures=(0.0,))
    store = ResultStore(tmp_path / "eval")
    row = next(r for r in store.results() if (r.step, r.method) == (10000, "stree"))
    (store.directory / row.samples).unlink()
    data = load_run(tmp_path)
    assert data.cell("step-00010000", "stree", POOLED, 0.0) is None
    assert data.cell("step-00010000", "vanilla_sd", POOLED, 0.0) is not None
    assert "The samples of 1 rows are not there" in table6_markdown(data, [])


def test_intervals_are_computed_from_the_samples_where_they_are_there(tmp_path):
    make_run(tmp_path, ("gsm8k",), (0.0,))
    key = "step-00010000", "stree", "gsm8k", 0.0
    today = load_run(tmp_path).cell(*key).interval("tokens_per_second")
    store = change_rows(tmp_path, lambda row: row.model_copy(update={
        "confidence_intervals": {"tokens_per_second": (row.tokens_per_second,) * 2},
    }))
    assert today[0] < today[1]
    assert load_run(tmp_path).cell(*key).interval("tokens_per_second") == today
    row = next(r for r in store.results() if (r.step, r.method) == (10000, "stree"))
    (store.directory / row.samples).unlink()
    data = load_run(tmp_path)
    assert data.cell(*key).interval("tokens_per_second") == (row.tokens_per_second,) * 2
    assert "their intervals are those of the version that measured them" in " ".join(data.notes)


def test_works_on_the_baseline_alone(tmp_path):
    samples = [make_sample("autoregressive", None, "b", i, 0.0, 60) for i in range(2)]
    store = ResultStore(tmp_path)
    store.publish(make_row("autoregressive", None, "b", samples, 0.0), samples)
    paths, _ = write_report(load_run(tmp_path))
    forms = (f"table6.{form}" for form in ("md", "tex", "csv", "json"))
    assert {path.name for path in paths} == {*forms, "report.html"}  # no check


def test_a_missing_cell_is_a_dash(tmp_path):
    make_run(tmp_path, ("gsm8k",), (0.0,))
    store = ResultStore(tmp_path / "eval")
    lost = next(r for r in store.results() if (r.step, r.method) == (1000, "vanilla_sd"))
    store.forget({lost.key: lost.samples})
    assert [row[2] for row in table6(load_run(tmp_path), "gsm8k", 0.0).rows[2:4]] == ["–", "–"]


def test_two_trees_get_rows_of_their_own(tmp_path):
    make_run(tmp_path, ("gsm8k",), (0.0,))
    wide = Tree(name="wide", parents=(-1, 0))
    add_row(tmp_path, "stree", 100, 30, tree=wide, decoding_hash="x")
    heads = [row[0] for row in table6(load_run(tmp_path), "gsm8k", 0.0).rows]
    assert "τ (tree, paper)" in heads and "τ (tree, wide)" in heads
    assert "τ gain (tree, wide − chain)" in heads


@pytest.mark.long
def test_many_temperatures_are_drawn(tmp_path):
    make_run(tmp_path, ("gsm8k",), (0.0, 0.25, 0.5, 0.75, 1.0))
    write_report(load_run(tmp_path))
    assert "T = 0.75" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("place", ["/proc/x", "file/x", "/dev/null/x"])
def test_a_folder_that_refuses_is_one_clear_error(run, tmp_path, place, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(plots, "new_figure", None)  # before anything is drawn
    with pytest.raises(CannotWrite, match="cannot write"):
        write_report(load_run(run), tmp_path / place)


@pytest.mark.parametrize(
    ("chain_s", "tree_s", "advice"),
    [
        # seconds of a call; a prompt is 30 chain calls, 20 tree calls, 60 plain ones of 0.01 s
        (0.012, 0.013, ("Use the tree", "stree", "stree")),
        (0.008, 0.020, ("Use the chain", "vanilla_sd", "vanilla_sd")),
        (0.025, 0.040, ("Use plain decoding", "autoregressive", "vanilla_sd")),
        (0.010, 0.015, ("Use the chain", "vanilla_sd", "vanilla_sd")),  # equal: the simpler one
    ],
)
def test_advice_follows_the_measured_speeds(tmp_path, monkeypatch, chain_s, tree_s, advice):
    monkeypatch.setitem(CALL_S, "vanilla_sd", chain_s)
    monkeypatch.setitem(CALL_S, "stree", tree_s)
    given = advise(load_run(make_run(tmp_path, ("gsm8k",), (0.0,))), 0.0)
    assert (given.headline, given.method, given.fastest) == advice
    if given.method == "autoregressive":
        assert "a step takes 2.50 times as long as a plain one" in given.reason
        assert "so it pays from τ 2.50 on" in given.reason


def test_the_advice_has_the_figure_of_what_it_recommends(tmp_path, monkeypatch):
    """The tree's call takes 14.9 ms, the chain's 10: 2.01 and 2.00 times plain decoding."""
    monkeypatch.setitem(CALL_S, "vanilla_sd", 0.010)
    monkeypatch.setitem(CALL_S, "stree", 0.0149)
    monkeypatch.setattr(tables, "speed_ratio", lambda *_: tables.Gain(1.01, (0.99, 1.03)))
    advice = advise(load_run(make_run(tmp_path, ("gsm8k",), (0.0,))), 0.0)
    assert advice[::2] == ("Use the chain", "vanilla_sd") and advice.fastest == "stree"
    assert advice.reason.startswith("The chain is 2.00× plain decoding [2.00, 2.00], τ 2.00. ")
    assert "and 1.01× the chain [0.99, 1.03]: they can't be told apart, and" in advice.reason


def test_temperatures_are_told_apart_without_colour_and_parts_of_a_step_from_methods(run):
    data = load_run(run)
    for draw in (plots.tau_vs_step, plots.speed_vs_step):
        (axes,) = draw(data).axes
        looks = {}
        for line in axes.lines:
            *_, temperature = line.get_label().split(", T = ")
            if temperature in ("0", "1"):
                filled = line.get_markerfacecolor() != "none"
                look = (line.get_linestyle(), line.get_marker(), filled)
                looks.setdefault(temperature, set()).add(look)
        assert set(looks) == {"0", "1"}
        for each in zip(*(next(iter(look)) for look in looks.values()), strict=True):
            assert len(set(each)) == 2
        assert all(len(look) == 1 for look in looks.values())
    methods = {*plots.COLOURS.values(), *plots.MORE_COLOURS}
    assert not methods & set(plots.PART_COLOURS.values())


def test_a_run_with_one_checkpoint_shows_its_points_and_intervals():
    """A line or a band through one point would have no length."""
    points = [(10.0, 2.0, 1.5, 2.5)]
    _, axes = plots.new_figure()
    plots.draw_line(axes, points, "black", marker="s")
    (bar,) = axes.collections
    assert bar.get_segments()[0].tolist() == [[10.0, 1.5], [10.0, 2.5]]
    plots.draw_curve(axes, [(10.0, 2.0)], label="one")
    assert [line.get_marker() for line in axes.lines] == ["s", "o"]
    plots.draw_curve(axes, [(10.0, 2.0), (20.0, 2.0)])
    plots.draw_line(axes, [*points, (20.0, 2.0, 1.5, 2.5)], "black")
    assert axes.lines[2].get_marker() == "" and len(axes.collections) == 2


def test_negative_numbers_have_a_minus_sign(tmp_path, monkeypatch):
    monkeypatch.setitem(CALLS, "stree", (60, 60, 60))
    make_run(tmp_path, ("gsm8k",), (0.0,))
    write_report(load_run(tmp_path))
    for name in ("table6.md", "report.html"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert "−0.50" in text and "[−0.50, −0.50]" in text
        assert not re.search(r"[\s>\[]-\d\.\d\d\b", text)


# What a table's figures can be computed from


def test_command_prints_table6_and_paths(run, capsys):
    main([str(run)])
    printed = capsys.readouterr().out
    assert "\nτ (tree) " in printed and "T = 0: Use the tree." in printed
    assert all(len(line) <= 100 or str(run) in line for line in printed.splitlines())
    *_, lossless, empty, last = printed.splitlines()
    (told,) = re.findall(r"\d+ of \d+ answers", (run / "lossless.md").read_text(encoding="utf-8"))
    assert lossless.startswith(f"{told} are token for token plain decoding's") and not empty
    assert last == f"Open {run / 'report.html'} in a browser."


def test_a_table_in_a_terminal_is_cut_between_columns():
    head = ("", *(f"step {number}" for number in range(9)))
    rows = [(f"row {row}", *(f"{row}.{number:0>12}" for number in range(9))) for row in range(2)]
    text = tables.Table("Speeds", (head, *rows), note="A word. " * 30).to_text()
    assert max(map(len, text.splitlines())) <= 100
    blocks = [block.splitlines() for block in text.split("\n\n")][1:-1]
    assert [len(block[0].split("step ")) - 1 for block in blocks] == [5, 4]
    for number, row in enumerate(rows, start=2):
        assert [cell for block in blocks for cell in block[number].split()[2:]] == [*row[1:]]


def test_no_results_is_one_clear_error(tmp_path):
    with pytest.raises(UsageError, match=r"run eval_spec\.py first"):
        write_report(load_run(tmp_path))
    make_run(tmp_path, ("gsm8k",), (0.0,))
    (tmp_path / "command.json").write_text("{")
    with pytest.raises(BadData, match=r"command\.json"):
        write_report(load_run(tmp_path))
