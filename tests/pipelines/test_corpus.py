"""The embedded corpus: as its README says, good rows, and split so that nothing is seen twice."""

import hashlib
import json
import re
from pathlib import Path

import pytest

from stree.common.errors import CannotWrite
from stree_pipelines.commands import corpus
from stree_pipelines.commands.corpus import FILES, SHIPPED, unpack_corpus
from stree_pipelines.data.conversations import read_conversations


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    out = tmp_path_factory.mktemp("corpus") / "made/python-docs"
    return out, unpack_corpus(out)


def rows_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_it_is_what_its_readme_says(unpacked):
    out, rows = unpacked
    text = (SHIPPED / "README.md").read_text(encoding="utf-8")
    said = re.findall(r"^\| `(.+)\.gz` \| ([\d,]+) .* `([0-9a-f]{64})` \|$", text, re.MULTILINE)
    assert {name: int(count.replace(",", "")) for name, count, _ in said} == rows
    for name, _, sha256 in said:
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == sha256
    assert sorted(path.name for path in out.iterdir()) == sorted(FILES)


def test_every_row_is_good(unpacked):
    out, made = unpacked
    for name in ("train.jsonl", "valid.jsonl"):
        found, report = read_conversations(out / name)
        rows = list(found)
        assert len(rows) == made[name] == report.given
        assert len({row.id for row in rows}) == len(rows)


def test_prompts_are_benchmark_rows(unpacked):
    prompts = rows_of(unpacked[0] / "prompts.jsonl")
    for prompt in prompts:
        assert set(prompt) == {"id", "category", "turns", "reference"}
        assert 1 <= len(prompt["turns"]) == len(prompt["reference"]) <= 2
        assert all(text.strip() for text in prompt["turns"] + prompt["reference"])
    assert len({prompt["id"] for prompt in prompts}) == len(prompts)
    assert {prompt["category"] for prompt in prompts} >= {"module", "class", "function", "method"}


def test_splits_share_no_module_and_no_answer(unpacked):
    train, valid, prompts = (rows_of(unpacked[0] / name) for name in FILES)
    units = [
        {row["source"].removeprefix("python-docs/") for row in each} for each in (train, valid)
    ]
    units.append(
        {row["id"].removeprefix("python-docs-") for row in prompts if row["category"] == "module"}
    )
    answers = [
        {turn["value"] for row in each for turn in row["conversations"] if turn["from"] == "gpt"}
        for each in (train, valid)
    ]
    answers.append({text for row in prompts for text in row["reference"]})
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert not units[one] & units[other]
        assert not answers[one] & answers[other]


@pytest.mark.parametrize("place", ["/proc/x", "file", "file/x"])
def test_a_folder_that_refuses_is_told(tmp_path, place):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CannotWrite, match="cannot write"):
        unpack_corpus(tmp_path / place)


def test_the_command_says_what_it_wrote(tmp_path, capsys):
    corpus.main([str(tmp_path / "out")])
    told = capsys.readouterr().out
    assert told.startswith(
        "3,295 training conversations, 184 validation conversations, 149 prompts"
    )
    assert Path(told.rpartition("licences: ")[2].strip().rstrip(")")).is_file()
