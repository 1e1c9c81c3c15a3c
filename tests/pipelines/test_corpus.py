"""The embedded corpus: real, the same every time, and split so that nothing is seen twice."""

import json
import os
import re
import subprocess
import sys

import pytest

from stree.common.errors import BadData, CannotWrite
from stree_pipelines import corpus
from stree_pipelines.corpus import (
    Entry,
    build_corpus,
    conversations_of,
    split_text,
    topic_sections,
)
from stree_pipelines.data.conversations import read_conversations

NAMES = ("train.jsonl", "valid.jsonl", "prompts.jsonl")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    out = tmp_path_factory.mktemp("corpus") / "made"
    return out, build_corpus(out)


def rows_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_it_is_large_and_every_row_is_good(built):
    out, made = built
    assert made["docstrings"] > 4000 and made["chars"] > 1_000_000
    for split, least in (("train", 1500), ("valid", 50)):
        found, report = read_conversations(out / f"{split}.jsonl", strict=True)
        rows = list(found)
        assert len(rows) == made[split] == report.given >= least
        assert len({row.id for row in rows}) == len(rows)
    train = rows_of(out / "train.jsonl")
    several = sum(len(row["conversations"]) > 2 for row in train)
    assert 0.2 < several / len(train) < 0.9


def test_prompts_are_benchmark_rows(built):
    out, made = built
    prompts = rows_of(out / "prompts.jsonl")
    assert len(prompts) == made["prompts"] >= 80
    for prompt in prompts:
        assert set(prompt) == {"id", "category", "turns", "reference"}
        assert 1 <= len(prompt["turns"]) == len(prompt["reference"]) <= 2
        assert all(text.strip() for text in prompt["turns"] + prompt["reference"])
    assert len({prompt["id"] for prompt in prompts}) == len(prompts)
    assert {prompt["category"] for prompt in prompts} >= {"module", "class", "function", "method"}


def test_splits_share_no_module_and_no_answer(built):
    out, _ = built
    splits = {name: rows_of(out / name) for name in NAMES}
    answers = {
        name: {t["value"] for row in rows for t in row["conversations"] if t["from"] == "gpt"}
        for name, rows in splits.items()
        if name != "prompts.jsonl"
    }
    answers["prompts.jsonl"] = {
        text for row in splits["prompts.jsonl"] for text in row["reference"]
    }
    units = {
        name: {row["source"] for row in splits[name]} for name in ("train.jsonl", "valid.jsonl")
    }
    assert not units["train.jsonl"] & units["valid.jsonl"]
    seen_modules = {unit.removeprefix("python-docs/") for unit in set().union(*units.values())}
    for row in splits["prompts.jsonl"]:
        if row["category"] == "module":
            assert row["id"].removeprefix("python-docs-") not in seen_modules
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert not answers[NAMES[one]] & answers[NAMES[other]]


def test_the_split_of_a_module_is_pinned():
    """It must not change with Python or a release: shipped weights were trained on "train"."""
    names = ["json", "xml.sax", "logging", "textwrap", "ast", "topic:IF"]
    assert [corpus.split_of(name) for name in names] == [
        "prompts", "prompts", "valid", "train", "train", "train"
    ]  # fmt: skip
    found = [corpus.split_of(f"m{i}") for i in range(4000)]
    shares = {name: found.count(name) / 4000 for name in set(found)}
    assert shares == pytest.approx({"train": 0.86, "prompts": 0.09, "valid": 0.05}, abs=0.01)


@pytest.mark.long
def test_another_process_builds_the_same_bytes(built, tmp_path):
    out, _ = built
    code = f"from stree_pipelines.corpus import build_corpus; build_corpus({str(tmp_path)!r})"
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONHASHSEED": "12345"}
    )
    for name in NAMES:
        assert (tmp_path / name).read_bytes() == (out / name).read_bytes()


def test_no_tests_no_licences_no_import(built):
    out, _ = built
    everything = "".join((out / name).read_text(encoding="utf-8") for name in NAMES)
    assert not re.search(r"IN NO EVENT SHALL|[Cc]opyright \(c\)", everything)
    assert not re.search(r'"python-docs/(test|idlelib|lib2to3|.*\.tests?)[."]', everything)


def test_docstrings_are_parsed_not_imported(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text('"""A package that explains itself."""\n')
    (tmp_path / "package/broken.py").write_text("def f(:\n")
    (tmp_path / "package/loud.py").write_text(
        '"""A module that must not run."""\nraise SystemExit(3)\n'
        "class A:\n"
        '    """A class with one method in it."""\n'
        "    async def go(self, far=1):\n"
        '        """Go as far as it was asked to go."""\n'
        "def terse():\n"
        '    """Short."""\n'
    )
    (tmp_path / "package/test").mkdir()
    (tmp_path / "package/test/skipped.py").write_text('"""A test module, not for the corpus."""\n')
    found = list(corpus.docstring_entries(tmp_path))
    assert [(e.unit, e.kind, e.name, e.signature) for e in found] == [
        ("package", "module", "package", ""),
        ("package.loud", "module", "package.loud", ""),
        ("package.loud", "class", "package.loud.A", ""),
        ("package.loud", "method", "package.loud.A.go", "async go(self, far=1)"),
    ]


def test_a_python_without_sources_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(BadData, match="no Python sources"):
        build_corpus(tmp_path / "out")


@pytest.mark.parametrize("place", ["/proc/x", "file", "file/x"])
def test_a_folder_that_refuses_is_told_before_anything_is_read(tmp_path, monkeypatch, place):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(corpus, "docstring_entries", None)
    with pytest.raises(CannotWrite, match="cannot write"):
        build_corpus(tmp_path / place)


def test_topics_split_at_their_headings():
    text = 'Intro text.\n\nThe "if" statement\n********\n\nBody one.\n\nMore\n====\n\nTwo.\n'
    assert [(title, body.strip()) for title, body in topic_sections(text)] == [
        ("", "Intro text."),
        ("The `if` statement", "Body one."),
        ("More", "Two."),
    ]


def test_long_text_goes_on_in_further_turns_and_loses_nothing():
    text = "\n\n".join(f"Paragraph {i} " + "word " * 40 for i in range(60))
    parts = split_text(text, 1600)
    assert max(map(len, parts)) <= 1600
    assert "".join("".join(parts).split()) == "".join(text.split())
    rows = conversations_of([Entry("m", "module", "m", text)])
    assert len(rows) > 1
    for row in rows:
        assert len(row["conversations"]) <= 2 * corpus.MAX_TURNS
        assert "`m`" in row["conversations"][0]["value"]  # never begins with "go on"
    answers = [t["value"] for row in rows for t in row["conversations"] if t["from"] == "gpt"]
    assert "".join("".join(answers).split()) == "".join(text.split())


PAGE = """<html><head><title>left out</title></head><body><div class="related">left out</div>
<section id="module-json"><h1>19.2. json — encoder<a class="headerlink">¶</a></h1>
<p>A module of <em>text</em>
that is long enough.</p>
<dl class="py function"><dt class="sig" id="json.loads">json.loads(s)</dt>
<dd><p>Return what a text of JSON
holds.</p><pre>&gt;&gt;&gt; json.loads("1")
1</pre><div class="versionchanged"><p>left out</p></div>
<dl class="field-list"><dt>s</dt><dd><p>the text that is read</p></dd></dl></dd></dl>
<p>What follows is the section's again.</p></section></body></html>"""


def test_pages_of_the_manual_become_conversations_of_training_modules(tmp_path, capsys):
    assert corpus.split_of("csv") == "train" and corpus.split_of("json") != "train"
    (tmp_path / "html").mkdir()
    (tmp_path / "html/json.html").write_text(PAGE)
    (tmp_path / "html/csv.html").write_text(PAGE.replace("json", "csv"))
    count = corpus.build_manual(tmp_path / "html", tmp_path / "out")
    rows = rows_of(tmp_path / "out/manual.jsonl")
    assert count == len(rows)
    said = [turn["value"] for row in rows for turn in row["conversations"]]
    assert "csv — encoder" in said[0] and "loads" in said[2] and len(said) == 4
    assert said[1] == (
        "A module of text that is long enough.\n\nWhat follows is the section's again."
    )
    assert said[3] == (
        'Return what a text of JSON holds.\n\n>>> csv.loads("1")\n1\n\nthe text that is read'
    )


def test_a_folder_without_pages_is_told(tmp_path):
    with pytest.raises(BadData, match="no pages of Python's HTML documentation"):
        corpus.build_manual(tmp_path, tmp_path)
