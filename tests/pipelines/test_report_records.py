"""Compute a report's figures anew from the records beside it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest
from hand_made_run import make_run

from stree import metrics
from stree.common.errors import UsageError
from stree_pipelines.commands.report import main, write_report
from stree_pipelines.evaluation.result_store import ResultStore, write_rows
from stree_pipelines.reports.run_data import POOLED, load_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("run"))
    write_report(load_run(folder))
    return folder


# What a table's figures can be computed from


def recomputed(folder, row, intervals):
    """Compute a row's figures and intervals as table6.json says, with pyarrow and numpy alone.
    Tables from before intervals of few prompts were widened say other quantiles."""

    archive = parquet.read_table(folder / "samples.parquet").to_pylist()

    def column(files, name):
        lines = [
            json.loads(line["sample"]) for file in files for line in archive if line["file"] == file
        ]
        return np.array(
            [line[name] if name in line else line["baseline"][name[6:]] for line in lines]
        )

    def figures(files):
        tokens, calls = column(files, "num_new_tokens"), column(files, "num_calls")
        seconds = column(files, "decode_s")
        plain = [column(files, f"plain {name}") for name in ("num_new_tokens", "decode_s")]

        def figure(index):
            speed = tokens[index].sum(-1) / seconds[index].sum(-1)
            plain_speed = plain[0][index].sum(-1) / plain[1][index].sum(-1)
            return tokens[index].sum(-1) / calls[index].sum(-1), speed, speed / plain_speed

        return figure, len(tokens)

    mine, num_prompts = figures(row["samples"])
    draws = np.random.default_rng(0).integers(num_prompts, size=(2000, num_prompts))
    names = ("acceptance_length", "tokens_per_second", "speedup")
    found = {name: each for name, *each in zip(names, mine(slice(None)), mine(draws), strict=True)}
    if "over_chain" in row:
        other, _ = figures(row["over_chain"]["samples"])
        for name, combine in (
            ("acceptance_length_gain", lambda i: mine(i)[0] - other(i)[0]),
            ("speed_ratio", lambda i: mine(i)[2] / other(i)[2]),
        ):
            found[name] = [combine(slice(None)), combine(draws)]
    quantiles = intervals["quantiles"]
    if isinstance(quantiles, str):
        quantiles = metrics.quantiles_of(num_prompts)
    return {
        name: (point, *np.quantile(resampled, quantiles))
        for name, (point, resampled) in found.items()
    }


def uneven(run):
    """Give the run answers of uneven lengths, so that intervals have a width."""
    store = ResultStore(run / "eval")
    for row in store.results():
        if row.step is None:
            continue
        samples = [
            sample.model_copy(update={
                "num_new_tokens": sample.num_new_tokens - 7 * (index % 3) * len(row.method) % 20
            })
            for index, sample in enumerate(store.samples(row))
        ]
        summary = metrics.summarise(samples, [sample.baseline for sample in samples])
        store.publish(row.model_copy(update=summary), samples)
    return run


def test_every_interval_of_the_table_can_be_computed_from_the_records_beside_it(tmp_path):
    """Pooled ones and gains follow, too, from the folder and numpy alone."""
    run = uneven(make_run(tmp_path / "run"))
    main([str(run), "--out", str(tmp_path / "page"), "--records"])
    table = json.loads((tmp_path / "page/table6.json").read_text(encoding="utf-8"))
    assert table["setting"]["max_new_tokens"] == "61" and table["setting"]["dtype"] == "float32"
    printed = set(re.findall(r"\[[^\]]+\]", (tmp_path / "page/table6.md").read_text("utf-8")))
    explained = set()
    drafting = [row for row in table["rows"] if row["checkpoint"]]
    assert {row["benchmark"] for row in drafting} == {POOLED, "mt_bench", "gsm8k"}
    for row in drafting:
        stated = {name: row[name] for name in ("acceptance_length", "tokens_per_second", "speedup")}
        over = row.get("over_chain", {})
        stated |= {name: over[name] for name in over if name != "samples"}
        assert len(stated) == (5 if row["method"] == "stree" else 3)
        for name, (point, low, high) in recomputed(
            tmp_path / "page", row, table["intervals"]
        ).items():
            assert stated[name]["value"] == pytest.approx(point)
            assert stated[name]["interval"] == pytest.approx((low, high))
            form = "+.2f" if name == "acceptance_length_gain" else ".2f"
            explained.add(f"[{low:{form}}, {high:{form}}]".replace("-", "−"))
    assert len(printed) > 20 and printed <= explained


def test_a_page_of_records_is_reported_as_the_run_is(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "config.yaml").write_text("data: {}\n")
    main([str(run), "--out", str(tmp_path / "page"), "--records"])
    names = {path.name for path in (tmp_path / "page").iterdir()}
    assert {"results.jsonl", "samples.parquet", "config.yaml", "metrics.csv"} <= names
    files = parquet.read_table(tmp_path / "page/samples.parquet")["file"].to_pylist()
    assert len(set(files)) == 2 * 2 * 7
    main([str(tmp_path / "page"), "--out", str(tmp_path / "again")])
    for path in (tmp_path / "again").iterdir():
        if path.name != "report.html":  # which says the folder's name
            assert path.read_bytes() == (tmp_path / "page" / path.name).read_bytes(), path.name


def test_records_hold_what_is_shown_and_samples_that_are_not_packed(tmp_path):
    run = make_run(tmp_path / "run", ("gsm8k",), (0.0,))
    store = ResultStore(run / "eval")
    rows = store.results()
    other = rows[-1].model_copy(update={"seed": 3})
    earlier = rows[0].model_copy(update={"samples": "samples/earlier.jsonl"})
    write_rows(store.directory / earlier.samples, store.samples(rows[0]))
    write_rows(store.directory / "results.jsonl", [earlier, *rows[1:], other])
    main([str(run), "--show", "seed=0", "--out", str(tmp_path / "page"), "--records"])
    data = load_run(tmp_path / "page")
    assert len(data.rows) == 7 and "samples/earlier.jsonl" in {r.samples for r in data.rows}
    assert all(ResultStore(tmp_path / "page").samples(row) for row in data.rows)


@pytest.mark.parametrize("out", [[], ["--out", "."], ["--out", "eval"]])
def test_records_are_not_copied_into_the_run(tmp_path, monkeypatch, out):
    make_run(tmp_path, ("gsm8k",), (0.0,))
    before = (tmp_path / "eval/results.jsonl").read_bytes()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="--out"):
        main([".", "--records", *out])
    assert (tmp_path / "eval/results.jsonl").read_bytes() == before


PUBLISHED = Path(__file__).resolve().parents[2] / "docs" / "results"


@pytest.mark.parametrize(
    "page", sorted(PUBLISHED.glob("*/table6.json")), ids=lambda p: p.parent.name
)
def test_a_published_table_follows_from_the_records_beside_it(page):
    table = json.loads(page.read_text(encoding="utf-8"))
    for row in table["rows"]:
        if row["checkpoint"]:
            again = recomputed(page.parent, row, table["intervals"])
            for name, (point, low, high) in again.items():
                stated = row.get(name) or row["over_chain"][name]
                assert stated["value"] == pytest.approx(point)
                assert stated["interval"] == pytest.approx((low, high))


@pytest.mark.long
def test_a_published_page_says_which_intervals_it_has():
    """A page has plain percentiles of earlier versions, or today's."""
    checked = set()
    for path in sorted(PUBLISHED.rglob("*.md")):
        text, store = path.read_text(encoding="utf-8"), ResultStore(path.parent)
        if "95 % bootstrap intervals over prompts" not in text:
            continue
        for row in store.results():
            interval, samples = row.confidence_intervals["acceptance_length"], store.samples(row)
            if interval and interval[0] < interval[1] and samples:
                is_plain = interval != pytest.approx(
                    metrics.confidence_intervals(samples)["acceptance_length"]
                )
                assert ("intervals over prompts, plain percentiles" in text) == is_plain, path
                checked.add(is_plain)
                break
    assert checked == {True, False}
