"""Check what must hold in a run's folder at any moment, or once it has finished after a fault."""

from __future__ import annotations

import csv
import gzip
import json
import os
from pathlib import Path
from typing import Any

import torch
from tiny_evaluation import TIMINGS
from tiny_run import metric_rows

from stree.common.files import verify_manifest
from stree_pipelines.training.checkpoints.saving import SafeCheckpointIO

# Of a result row and of a sample: what the clock decides, and who measured.
ROW_TIMINGS = {*TIMINGS, "rows_per_call"}
# What shares a prompt's batch depends on what was left to do, and its share of calls with it.
SAMPLE_TIMINGS = {
    "prefill_s", "decode_s", "time_ms", "baseline", "call_share", "is_stalled",
}


def steps_in(folder: Path) -> list[int]:
    """List the steps of the visible step-* folders, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name[5:]) for path in folder.glob("step-*"))


def leftovers(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob(".tmp-*")]


def last_logged(run_dir: Path) -> int:
    """Return the last step with a whole row in metrics.csv, 0 before there is one."""
    path = run_dir / "metrics.csv"
    if not path.is_file():
        return 0
    text = path.read_text(encoding="utf-8")
    rows = text[: text.rfind("\n") + 1].splitlines()[1:]
    return int(rows[-1].split(",")[0]) if rows else 0


def assert_visible_is_whole(run_dir: Path) -> None:
    """Assert that everything in a run's folder is complete, apart from names with `.tmp-`."""
    for folder in ("checkpoints", "drafter"):
        for step in steps_in(run_dir / folder):
            assert verify_manifest(run_dir / folder / f"step-{step:08d}")["step"] == step
        others = {path.name for path in (run_dir / folder).glob("[!.]*")} - {"latest"}
        assert all(name.startswith("step-") for name in others)
    latest = run_dir / "drafter/latest"
    if latest.is_symlink():
        assert verify_manifest(latest)
    for name in ("config.yaml", "command.json"):
        assert not (run_dir / name).exists() or (run_dir / name).read_text().endswith("\n")


def assert_same_run(run_dir: Path, whole: Path) -> None:
    """Assert that curve, checkpoints and exports equal those of an undisturbed run, bit for bit."""
    assert metric_rows(run_dir) == metric_rows(whole)
    for folder in ("checkpoints", "drafter"):
        assert steps_in(run_dir / folder) == steps_in(whole / folder)
        for step in steps_in(whole / folder):
            mine, theirs = (each / folder / f"step-{step:08d}" for each in (run_dir, whole))
            if folder == "checkpoints":
                assert_same_state(mine, theirs)
            else:
                assert _contents(mine) == _contents(theirs)
    assert os.readlink(run_dir / "drafter/latest") == os.readlink(whole / "drafter/latest")
    assert leftovers(run_dir) == []


def assert_same_state(mine: Path, theirs: Path) -> None:
    """Assert that two training states have equal values; equal values may have other bytes."""
    assert is_equal(*map(SafeCheckpointIO().load_checkpoint, (mine, theirs)))


def is_equal(mine: Any, theirs: Any) -> bool:
    """Compare nested values, tensors bit for bit."""
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(is_equal(mine[k], theirs[k]) for k in mine)
    if isinstance(mine, list | tuple):
        pairs = zip(mine, theirs, strict=True)
        return type(mine) is type(theirs) and all(is_equal(*pair) for pair in pairs)
    if isinstance(mine, torch.Tensor):
        return mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    return bool(mine == theirs)


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def table_without_timings(out: Path) -> str:
    """Return results.jsonl and the samples that it names as lines, without the timings."""
    lines = []
    for line in (out / "results.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        lines.append(_without(row, ROW_TIMINGS))
        samples = gzip.decompress((out / row["samples"]).read_bytes()).splitlines()
        lines += [_without(json.loads(sample), SAMPLE_TIMINGS) for sample in samples]
    return "\n".join(lines)


def _without(row: dict, names: set[str]) -> str:
    return json.dumps({name: value for name, value in row.items() if name not in names})


def logged_steps(run_dir: Path) -> list[int]:
    """List the steps of the rows of metrics.csv that have a loss."""
    with open(run_dir / "metrics.csv", newline="", encoding="utf-8") as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row["loss"]]


def ranks_of(agent: int) -> dict[int, int]:
    """Return the process numbers of an agent's children by RANK."""
    found = {}
    for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        environment = Path("/proc", pid, "environ").read_text().split("\0")
        found |= {int(each[5:]): int(pid) for each in environment if each.startswith("RANK=")}
    return found
