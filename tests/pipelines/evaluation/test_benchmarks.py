from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from stree.checkpoints.tokenizer import load_tokenizer
from stree.common.errors import BadData, UsageError
from stree_pipelines.evaluation.answering.decoders import Decoders
from stree_pipelines.evaluation.benchmarks import DEFAULT_BENCHMARKS, load_benchmark

ROWS = [
    {"id": "one", "category": "x", "turns": ["First?", "Second?"], "reference": ["…"]},
    {"id": "two", "turns": ["Only?"]},
    {"id": 3, "turns": ["A number as id"]},
]


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


def test_by_name_and_by_path_are_the_same(tmp_path):
    path = write(tmp_path / "mt_bench.jsonl", ROWS)
    by_name, by_path = load_benchmark("mt_bench", tmp_path), load_benchmark(str(path))
    assert by_name == by_path
    assert by_name.name == "mt_bench"
    assert [prompt.id for prompt in by_name.prompts] == ["one", "two", "3"]
    assert by_name.prompts[0].turns == ("First?", "Second?")
    assert by_name.prompts[1].category == ""


@pytest.mark.parametrize("how", ["name", "file", "folder"])
def test_the_corpus_prompts_are_python_docs(tmp_path, how):
    rows = [{"id": "python-docs-json.dumps", "turns": ["What does it do?"]}]
    path = write(tmp_path / "corpus/prompts.jsonl", rows)
    given = {"name": "python_docs", "file": str(path), "folder": str(path.parent)}[how]
    assert load_benchmark(given, path.parent).name == "python_docs"


def test_other_prompts_are_not_called_python_docs(tmp_path):
    asked = {"id": "python-docs-json.dumps", "turns": ["What does it do?"]}
    mixed = [*ROWS, asked]
    assert load_benchmark(str(write(tmp_path / "sums/prompts.jsonl", ROWS))).name == "sums_prompts"
    assert load_benchmark(str(write(tmp_path / "both/prompts.jsonl", mixed))).name == "both_prompts"
    assert load_benchmark(str(write(tmp_path / "mine.jsonl", mixed))).name == "mine"
    assert load_benchmark(str(write(tmp_path / "long-512.jsonl", [asked]))).name == "long-512"


def test_one_ships(tmp_path, monkeypatch):
    """A command without --benchmarks runs in any folder."""
    monkeypatch.chdir(tmp_path)
    (name,) = DEFAULT_BENCHMARKS
    benchmark = load_benchmark(name)
    assert benchmark.name == "starter" and len(benchmark.prompts) == 16
    assert {len(prompt.turns) for prompt in benchmark.prompts} == {1, 2}
    with pytest.raises(UsageError, match=r"are starter\): fetch_benchmarks.py gets"):
        load_benchmark("mt_bench")
    write(tmp_path / "data/benchmarks/mt_bench.jsonl", ROWS)
    assert len(load_benchmark("mt_bench").prompts) == 3


def test_errors_show_what_a_line_looks_like(tmp_path):
    path = write(tmp_path / "b.jsonl", [{"prompt": "Hello"}])
    with pytest.raises(BadData, match=r'"turns": \["What the user says first"'):
        load_benchmark(str(path))
    with pytest.raises(UsageError, match=r'"turns": \['):
        load_benchmark("absent", tmp_path)


@pytest.mark.parametrize(("given", "text"), [("null", "None"), ('["a"]', "['a']"), ("1.5", "1.5")])
def test_a_category_of_any_kind_is_kept_as_text(given, text, tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text(f'{{"id": "x", "turns": ["y"], "category": {given}}}\n')
    assert load_benchmark(path).prompts[0].category == text


def test_limit_takes_the_first_and_the_hash_follows_the_prompts(tmp_path):
    path = str(write(tmp_path / "b.jsonl", ROWS))
    two = load_benchmark(path, limit=2)
    assert [prompt.id for prompt in two.prompts] == ["one", "two"]
    assert two.prompts_hash != load_benchmark(path).prompts_hash
    assert two.prompts_hash == load_benchmark(path, limit=2).prompts_hash
    assert load_benchmark(path, limit=99).prompts == load_benchmark(path).prompts


def test_unknown_name_lists_what_there_is(tmp_path):
    write(tmp_path / "humaneval.jsonl", ROWS)
    with pytest.raises(UsageError, match="there are humaneval, starter"):
        load_benchmark("mt_bench", tmp_path)
    with pytest.raises(UsageError, match="no benchmark file"):
        load_benchmark(str(tmp_path / "absent.jsonl"))
    with pytest.raises(UsageError, match="limit is 0"):
        load_benchmark("humaneval", tmp_path, limit=0)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "Expecting"),
        ("[]", "valid dictionary"),
        ('{"turns": ["x"]}', "id: Field required"),
        ('{"id": true, "turns": ["x"]}', "id: .*valid string"),
        ('{"id": 1.5, "turns": ["x"]}', "id: .*valid string"),
        ('{"id": "x"}', "turns: Field required"),
        ('{"id": "x", "turns": []}', "turns: .*at least 1"),
        ('{"id": "x", "turns": ["ok", " "]}', "turns.1: .*match"),
        ('{"id": "x", "turns": [1]}', "turns.0: .*valid string"),
        ('{"id": "two", "turns": ["again"]}', "line 2 already"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, why):
    path = write(tmp_path / "b.jsonl", ROWS)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(BadData, match=rf"b.jsonl:4: .*{why}"):
        load_benchmark(str(path))


def test_invalid_utf8_and_empty_files_are_refused(tmp_path):
    path = tmp_path / "b.jsonl"
    path.write_bytes(b'{"id": "\xff", "turns": ["x"]}\n')
    with pytest.raises(BadData, match=r"b\.jsonl:1"):
        load_benchmark(str(path))
    path.write_text("\n")
    with pytest.raises(BadData, match="no prompts"):
        load_benchmark(str(path))


def test_a_plain_prompt_is_given_without_a_chat_template(tmp_path):
    """Its prompts have a hash of their own, and its ids are the text's alone."""
    asked = {"id": "a", "turns": ["Once upon a time"]}
    chat, plain = (
        load_benchmark(str(write(tmp_path / f"{number}.jsonl", [row])))
        for number, row in enumerate((asked, {**asked, "plain": True}))
    )
    assert chat.prompts_hash != plain.prompts_hash and not chat.prompts[0].plain
    tokenizer = load_tokenizer("checkpoints/python-docs-hybrid")
    decoders = SimpleNamespace(tokenizer=tokenizer, settings=SimpleNamespace(chat_template=None))
    texts = [
        tokenizer.decode(Decoders.prompt_ids(decoders, each.prompts[0])) for each in (chat, plain)
    ]
    assert texts[1] == "Once upon a time" and texts[1] in texts[0] != texts[1]
    two = write(tmp_path / "two.jsonl", [{**asked, "turns": ["a", "b"], "plain": True}])
    with pytest.raises(BadData, match="wanted a single turn"):
        load_benchmark(str(two))
