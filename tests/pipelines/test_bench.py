"""The benchmarks measure something, say what made it, and refuse to when a test is red."""

import json

import pytest
import torch

from stree.errors import InvariantBroken
from stree_pipelines import bench_decode, bench_kernels, timing

CPU = torch.device("cpu")


@torch.no_grad()
def test_rows(tmp_path):
    rows = bench_kernels.measure("tiny", [1, 5], 8, 2, 2, CPU)
    rows += bench_decode.measure("tiny", [3], 8, 2, CPU)
    timing.write_rows(tmp_path / "rows.jsonl", rows, CPU)
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [line.get("op", line.get("what")) for line in lines] == [
        "mamba_tree", "attend_tree", "mamba_tree", "attend_tree", "target call", "draft",
    ]  # fmt: skip
    for line in lines:
        assert line["environment"]["device"].startswith("CPU")
        times = [value for value in line.values() if isinstance(value, dict) and "median" in value]
        assert times and all(0 < each["p20"] <= each["median"] <= each["p80"] for each in times)


def test_no_number_when_red(tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_red.py").write_text("def test_red():\n    assert 1 == 2\n")
    (tmp_path / "tests" / "test_green.py").write_text("def test_green(): ...\n")
    monkeypatch.setattr(timing, "ROOT", tmp_path)
    timing.require_green(["test_green.py"])
    with pytest.raises(InvariantBroken, match="red"):
        timing.require_green(["test_green.py", "test_red.py"])
