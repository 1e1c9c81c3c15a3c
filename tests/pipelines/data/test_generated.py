"""Train on a target's answers: tokens, shares of a mix, and damage that is found before.

In fp64, so that which requests share a batch cannot round a token to another.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from damage import flip_last_byte
from generating import data_of, generate, refuses, rows_of
from tiny_run import distill_arguments, metric_rows, write_conversations

from stree.common.errors import BadData, CheckpointRefused, NotFound, UsageError, warn_once
from stree_pipelines.commands import distill
from stree_pipelines.data.datamodule import ConversationDataModule
from stree_pipelines.data.generated import GenerationSpec, num_answer_tokens, read_spec

# As data


def test_a_training_gets_the_very_tokens_and_learns_the_answers(workspace, whole):
    table = data_of(workspace, str(whole)).tables["train"]
    rows = rows_of(whole)
    assert len(table) == len(rows)
    for n, row in enumerate(rows):
        part = slice(table.offsets[n], table.offsets[n + 1])
        assert table.tokens[part].tolist() == row["prompt_tokens"] + row["answer_tokens"]
        counted = [False] * len(row["prompt_tokens"]) + [True] * len(row["answer_tokens"])
        assert table.mask[part].tolist() == counted
    few = data_of(workspace, str(whole), limit=7).tables["train"]
    assert len(few) == 7 and few.tokens.tolist() == table.tokens[: len(few.tokens)].tolist()


def test_what_was_drafted_worst_can_be_taken_alone(workspace, whole):
    rows = rows_of(whole)
    taus = [(len(row["answer_tokens"]) - 1) / max(row["num_calls"], 1) for row in rows]
    assert min(taus) < max(taus)
    table = data_of(workspace, str(whole), hardest=0.4).tables["train"]
    worst = sorted(sorted(range(len(rows)), key=taus.__getitem__)[: math.ceil(0.4 * len(rows))])
    kept = [token for n in worst for part in ("prompt_tokens", "answer_tokens")
            for token in rows[n][part]]
    assert table.tokens.tolist() == kept
    for share in (0.0, 1.5):
        with pytest.raises(UsageError, match=r"hardest is .*, wanted a share"):
            data_of(workspace, str(whole), hardest=share)


def test_a_distillation_takes_it_beside_chats(workspace, whole, tmp_path):
    sources = json.dumps([str(whole), str(workspace / "train.jsonl")])
    more = ("--data.train", sources, "--data.mix", "[0.5,0.5]", "--data.hardest", "0.5")
    run = tmp_path / "run"
    distill.main(distill_arguments(workspace, run, *more, "--data.valid", "null", steps=2))
    assert len([row for row in metric_rows(run) if row["loss"]]) == 2


def test_a_mix_has_its_shares_of_the_tokens_that_count(workspace, tmp_path):
    write_conversations(tmp_path / "other.jsonl", count=200)
    sources = [str(workspace / "train.jsonl"), str(tmp_path / "other.jsonl")]
    first, second = (data_of(workspace, source).tables["train"] for source in sources)
    mixed = data_of(workspace, sources, mix=[3.0, 1.0]).tables["train"]
    assert mixed.sha256 == data_of(workspace, sources, mix=[0.75, 0.25], seed=5).tables[
        "train"].sha256
    own = mixed.tokens[: len(first.tokens)]
    np.testing.assert_array_equal(own, first.tokens)  # the scarce one is used whole
    rest = mixed.mask[len(first.tokens) :].sum()
    assert rest == pytest.approx(first.mask.sum() / 3, abs=int(second.counted.max()))
    limited = data_of(workspace, sources, mix=[3.0, 1.0], limit=20).tables["train"]
    assert 15 <= len(limited) <= 20


@pytest.mark.parametrize(
    ("mix", "message"),
    [([0.5], "1 shares for 2 sources"), ([0.5, 0.0], "wanted shares above 0")],
)
def test_a_mix_that_makes_no_sense_is_refused(mix, message, workspace, whole):
    with pytest.raises(UsageError, match=message):
        data_of(workspace, [str(whole), str(workspace / "train.jsonl")], mix=mix)
    with pytest.raises(UsageError, match="for 1 sources"):
        data_of(workspace, str(whole), mix=[1.0])


def test_another_tokenizer_is_refused_and_another_template_warned_of(workspace, whole, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(workspace / "target", other)
    (other / "MANIFEST.json").unlink()
    template = other / "chat_template.jinja"
    template.write_text(template.read_text() + "{# #}")
    config = other / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "pad_token": "<|end|>"}))
    data = ConversationDataModule(str(whole), str(other))
    with pytest.warns(UserWarning, match="with another chat template, or other special tokens"):
        data.setup()
    same = ConversationDataModule(str(whole), str(workspace / "target"))
    same.setup()
    assert data._train[0].sha256 == same._train[0].sha256
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match="with another chat template, or other special tokens"):
        generate(workspace, whole, "--target", str(other))  # all shards are there
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token": "a"}))
    with pytest.raises(CheckpointRefused, match=r"with another tokenizer \(") as no:
        ConversationDataModule(str(whole), str(other)).setup()
    assert "\n" not in str(no.value)
    with pytest.raises(CheckpointRefused, match="does not use the tokenizer of the target"):
        generate(workspace, tmp_path / "data", "--target", str(other))
    with pytest.raises(NotFound):
        generate(workspace, tmp_path / "data", "--target", "nowhere")


# Damage


@pytest.fixture
def copied(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def shard(folder: Path, number: int = 1) -> Path:
    return folder / f"shard-{number:05d}-of-00004"


def test_damage_is_found_before_training_and_before_counting(workspace, copied, capsys):
    flip_last_byte(shard(copied) / "samples.parquet")
    refuses(workspace, copied, r"samples\.parquet .*delete that folder, and run the same gene")
    capsys.readouterr()
    with pytest.raises(BadData, match=r"shard-00001-of-00004.*delete that folder, and run"):
        generate(workspace, copied)
    assert "shards are there" not in capsys.readouterr().err
    shutil.rmtree(shard(copied))
    refuses(workspace, copied, r"shard-00001-of-00004 is missing, the data is not finished")
    shutil.copytree(shard(copied, 2), shard(copied))
    refuses(workspace, copied, "shard-00001-of-00004 holds shard 2, not 1")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 1}, "version 1, wanted 2"),
        ({"num_prompts": 10**30}, "num_prompts is 1000"),
        ({"samples": "3"}, "samples is '3'"),
        ({"temperatures": 1}, "not iterable"),
        ({"seed": 8}, "belongs to other data"),
    ],
)
def test_a_description_of_another_form_is_refused(changes, reason, workspace, copied):
    content = json.loads((copied / "generation.json").read_text())
    (copied / "generation.json").write_text(json.dumps({**content, **changes}))
    refuses(workspace, copied, reason)


@pytest.mark.parametrize("name", ["generation.json", "MANIFEST.json", "samples.parquet"])
@pytest.mark.parametrize("put", [lambda path: path.symlink_to("/dev/zero"), os.mkfifo])
def test_devices_and_pipes_are_refused_unread(name, put, workspace, copied):
    spec = read_spec(copied)
    path = copied / name if name == "generation.json" else shard(copied) / name
    path.unlink()
    put(path)
    refuses(workspace, copied, rf"{name} (is a link to /dev/zero|is no reg|cannot be.*no regular)")
    if path.parent != copied:
        with pytest.raises(CheckpointRefused, match=f"{name} (is a link to /dev/zero|is no reg)"):
            num_answer_tokens(copied, spec)


def test_greedy_samples_are_counted_without_listing_them():
    values = {**dict.fromkeys(GenerationSpec.__dataclass_fields__, 1), "verifier": "coupled"}
    spec = GenerationSpec(**{**values, "temperatures": (1.0,) * 5 + (0.0,), "samples": 11})
    assert [spec.temperature(n) for n in range(11)].count(0) == 1
    with pytest.raises(UsageError, match="more than one sample is greedy"):
        GenerationSpec(**{**values, "temperatures": (0.0, 1.0), "samples": 2**31})
