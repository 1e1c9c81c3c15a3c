"""Prompts of public data sets: rows with the columns that their pages name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stree.checkpoints.tokenizer import load_tokenizer
from stree.common.errors import BadData, NotFound, UsageError
from stree_pipelines.commands.fetch_benchmarks import main
from stree_pipelines.data.text_sources import TEXT_SOURCES, _num_tokens
from stree_pipelines.evaluation.benchmarks import load_benchmark

TOKENIZER = Path(__file__).resolve().parents[2] / "checkpoints/python-docs-hybrid"
WORDS = " ".join(f"word {number}." for number in range(400))
ROWS = {
    "alpaca": [
        {"instruction": "Name three colours.", "input": "", "output": "Red, green, blue."},
        {"instruction": "Count the words.", "input": WORDS, "output": "800"},
    ],
    "xsum": [{"id": "35232142", "document": WORDS, "summary": "Words."}],
    "c4": [{"text": WORDS, "timestamp": "2019-04-25T12:57:54Z", "url": "https://example.org"}],
    "openwebtext": [{"text": WORDS}],
    "cnn_dailymail": [{"id": "f001ec5c", "article": WORDS, "highlights": "Words."}],
}
TASKS = TEXT_SOURCES["longbench_single"].sets


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prompts(folder, name):
    return load_benchmark(name, folder).prompts


@pytest.mark.parametrize("name", ROWS)
def test_rows_become_prompts(tmp_path, capsys, name):
    rows = write(tmp_path / "rows.jsonl", ROWS[name])
    main([name, "--out", str(tmp_path), "--rows", rows])
    assert f"{name}.jsonl: {len(ROWS[name])} prompts (" in capsys.readouterr().out
    first, last = prompts(tmp_path, name)[0], prompts(tmp_path, name)[-1]
    assert WORDS in last.turns[0]
    assert first.turns[0] == "Name three colours." if name == "alpaca" else first == last
    main([name, "--out", str(tmp_path), "--rows", rows, "--limit", "1"])
    assert prompts(tmp_path, name) == (first,)


@pytest.mark.parametrize("name", ["alpaca", "xsum", "c4"])
def test_documents_are_cut_to_a_number_of_tokens(tmp_path, name):
    rows = write(tmp_path / "rows.jsonl", ROWS[name])
    options = ["--tokenizer", str(TOKENIZER), "--lengths", "128", "64"]
    main([name, "--out", str(tmp_path), "--rows", rows, *options])
    tokenizer = load_tokenizer(TOKENIZER)
    for length in (64, 128):
        prompt = prompts(tmp_path, f"{name}-{length}")[-1]
        text = prompt.turns[0]
        assert prompt.plain == (name == "c4")  # no chat template stands around it
        assert length - 8 <= _num_tokens(text, tokenizer, prompt.plain) <= length
        head, _, document = text.partition("\n\n")
        assert WORDS.startswith(head if name == "c4" else document) and head
        assert bool(document) == (name != "c4")


def long_bench(folder, contexts):
    folder.mkdir()
    for task in TASKS:
        write(folder / f"{task}.jsonl", [
            {"_id": f"{task}{number}", "context": context, "input": "Which word is first?",
             "answers": ["word"], "length": 9, "dataset": task, "language": "en"}
            for number, context in enumerate(contexts)
        ])
    return str(folder)


def test_questions_stay_and_documents_that_are_too_long_are_left_out(tmp_path):
    rows = long_bench(tmp_path / "data", [WORDS * 3, WORDS[:2000], WORDS[:900], "word"])
    options = ["--tokenizer", str(TOKENIZER), "--lengths", "200", "1500", "--limit", "6"]
    main(["longbench_single", "--out", str(tmp_path), "--rows", rows, *options])
    tokenizer = load_tokenizer(TOKENIZER)
    short, long = (prompts(tmp_path, f"longbench_single-{length}") for length in (200, 1500))
    assert [each.id for each in short] == [each.id for each in long]
    assert [each.category for each in long] == [task for task in TASKS for _ in range(2)]
    assert {each.id[-1] for each in long} == {"1", "2"}
    for before, after in zip(short, long, strict=True):
        assert _num_tokens(before.turns[0], tokenizer) <= 200
        assert len(before.turns[0]) < len(after.turns[0])
        for each in (before, after):
            assert each.turns[0].endswith("Question: Which word is first?\nAnswer:")


@pytest.mark.parametrize(("arguments", "error", "reason"), [
    (["gsm8k", "--rows", "x"], UsageError, "--rows are of a data set"),
    (["xsum", "alpaca", "--rows", "x"], UsageError, "--rows are of one data set"),
    (["xsum", "--lengths", "9"], UsageError, "give both, or neither"),
    (["xsum", "--limit", "0"], UsageError, "limit is 0"),
    (["longbench_multi", "--rows", "absent"], NotFound, "needs one with hotpotqa.jsonl"),
    (["longbench_multi", "--rows", "."], NotFound, "no file of hotpotqa"),
    (["xsum", "--rows", "other.jsonl"], BadData, "other.jsonl:1 is no row of xsum"),
    (["xsum", "--rows", "it.jsonl", "--tokenizer", str(TOKENIZER), "--lengths", "2"], BadData,
     "2 tokens are too few for the question of a prompt"),
])
def test_bad_input_is_refused(tmp_path, monkeypatch, arguments, error, reason):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "other.jsonl", [{"question": "What?"}])
    write(tmp_path / "it.jsonl", ROWS["xsum"])
    with pytest.raises(error, match=reason):
        main([*arguments, "--out", "out"])
    assert not Path("out").exists() or not any(Path("out").iterdir())
