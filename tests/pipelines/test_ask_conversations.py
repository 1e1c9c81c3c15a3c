"""Conversations that were held out of training become prompts."""

from __future__ import annotations

import gzip
import json

import pytest

from stree.common.errors import BadData, NotFound, UsageError
from stree_pipelines.commands.ask_conversations import main
from stree_pipelines.evaluation.benchmarks import load_benchmark


def written(folder) -> str:
    said = [("human", "ask"), ("gpt", "say"), ("human", "more"), ("gpt", "say"), ("human", "bye")]
    turns = [{"from": who, "value": text} for who, text in said]
    rows = [
        {"id": f"row-{number}", "source": source, "conversations": turns}
        for number, source in enumerate(["a/x", "b", "a/y", "a/z"])
    ]
    path = folder / "valid.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return str(path)


def test_the_first_turns_of_a_source_become_a_benchmark(tmp_path, capsys):
    out = tmp_path / "new" / "dialogues.jsonl"
    main([written(tmp_path), "--out", str(out), "--source", "a", "--limit", "2"])
    assert "2 prompts" in capsys.readouterr().out
    benchmark = load_benchmark(str(out))
    assert benchmark.name == "dialogues"
    assert [(each.id, each.category, each.turns) for each in benchmark.prompts] == [
        ("row-0", "a/x", ("ask", "more")),
        ("row-2", "a/y", ("ask", "more")),
    ]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--source", "z"], "no conversation whose source begins with 'z'"),
        (["--limit", "0"], "--limit is 0"),
        (["--turns", "-1"], "--turns is -1"),
    ],
)
def test_what_would_write_no_prompts_is_refused(tmp_path, more, words):
    with pytest.raises(UsageError, match=words):
        main([written(tmp_path), "--out", str(tmp_path / "out.jsonl"), *more])
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("line", ["{}", "[1]", "no json", '{"source": "a", "conversations": [1]}'])
def test_a_line_that_is_no_conversation_is_named(tmp_path, line):
    path = tmp_path / "bad.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(BadData, match=r"bad\.jsonl:1: "):
        main([str(path), "--out", str(tmp_path / "out.jsonl")])
    with pytest.raises(NotFound, match="no file"):
        main([str(tmp_path / "none.jsonl"), "--out", str(tmp_path / "out.jsonl")])
