"""The benchmarks measure something, say what made it, and refuse to when a test is red."""

import json
from pathlib import Path

import pytest
import torch
from process_group import run_together

from stree.errors import InvariantBroken
from stree_pipelines import bench_decode, bench_kernels, bench_training, distill, timing

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


def test_processes_are_measured_against_one(tmp_path, monkeypatch):
    def distil(arguments):
        count = int(arguments[-1])
        log = tmp_path / "log"
        codes = run_together(count, distill.main, ["fit", *arguments], log)
        assert codes == [0] * count, Path(f"{log}.0").read_text()

    monkeypatch.setattr(bench_training, "_distil", distil)
    rows = bench_training.measure("tiny", ["fsdp2"], [1, 2], 2, 64, 4, [], CPU)
    assert [(row["strategy"], row["num_processes"]) for row in rows] == [("auto", 1), ("fsdp2", 2)]
    assert all(row["rows_a_step"] == 4 and row["loss_distance"] < 1e-5 for row in rows)
    assert all(row["tokens_per_second"]["median"] > 0 for row in rows)
    assert rows[0]["efficiency"] == 1.0 and rows[1]["efficiency"] > 0


def test_a_training_that_fails_is_named():
    with pytest.raises(InvariantBroken, match=r"--nonsense ended with code 2: error"):
        bench_training._distil(["--nonsense"])


def test_no_number_when_red(tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_red.py").write_text("def test_red():\n    assert 1 == 2\n")
    (tmp_path / "tests" / "test_green.py").write_text("def test_green(): ...\n")
    monkeypatch.setattr(timing, "ROOT", tmp_path)
    timing.require_green(["test_green.py"])
    with pytest.raises(InvariantBroken, match="red"):
        timing.require_green(["test_green.py", "test_red.py"])
