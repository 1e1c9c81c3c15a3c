"""Run `generate_data` on a tiny workspace and read what it has written."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from pyarrow import parquet

from stree.common.errors import BadData
from stree_pipelines.commands import generate_data
from stree_pipelines.data.datamodule import ConversationDataModule

NUM_PROMPTS, TEMPERATURES = 6, (0.0, 0.7, 1.0)


def arguments(workspace: Path, out: Path, *more: str) -> list[str]:
    return [
        "--target", str(workspace / "target"), "--drafter", str(workspace / "drafter"),
        "--prompts", str(workspace / "train.jsonl"), "--limit", str(NUM_PROMPTS),
        "--samples", "3", "--temperatures", *map(str, TEMPERATURES), "--max_new_tokens", "12",
        "--max_length", "128", "--num_rows", "4", "--shard_samples", "5", "--seed", "7",
        "--dtype", "float64", "--device", "cpu", "--compare", "0", "--out", str(out), *more,
    ]


def generate(workspace: Path, out: Path, *more: str) -> Path:
    generate_data.main(arguments(workspace, out, *more))
    return out


def rows_of(folder: Path) -> list[dict]:
    shards = sorted(folder.glob("shard-*/samples.parquet"))
    return [row for shard in shards for row in parquet.read_table(shard).to_pylist()]


def shards_of(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.glob("shard-*/*"))
    }


def data_of(workspace: Path, train, **changes) -> ConversationDataModule:
    options = {"sequence_length": 64, "batch_size": 2, **changes}
    data = ConversationDataModule(train, str(workspace / "target"), **options)
    data.setup()
    return data


def refuses(workspace: Path, folder: Path, message: str) -> None:
    with pytest.raises(BadData, match=message) as refused:
        data_of(workspace, str(folder))
    assert refused.value.exit_code == 65
