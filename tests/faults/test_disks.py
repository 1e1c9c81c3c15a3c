"""Disks that refuse: the last good checkpoint verifies, one line says what was needed and what is
free (code 73), and once there is room the same command ends as if nothing had been."""

from __future__ import annotations

import random
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import forked
import pytest
from lanes import costly, lanes
from run_checks import (
    assert_same_run,
    assert_visible_is_whole,
    leftovers,
    logged_steps,
    table_without_timings,
)
from tiny_run import distill_arguments

from stree.common.files import verify_manifest
from stree_pipelines.evaluation.result_store import ResultStore
from stree_pipelines.training.checkpoints.saving import latest_valid

pytestmark = pytest.mark.timeout(1200)
FULL = (
    r"error: cannot write \S+: No space left on device "
    r"\((\d+) bytes needed, (\d+) bytes and (\d+) inodes free\): free some space or choose another"
)
PLENTY = "size=100m,nr_inodes=10000"


@dataclass(frozen=True)
class Disk:
    """A tmpfs, which needs root."""

    folder: Path

    def change(self, options: str) -> None:
        """Remount the disk while it is in use, with `size=…`, `nr_inodes=…`, `ro` or `rw`."""
        mount(f"remount,{options}", self.folder).check_returncode()


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Disk]:
    """Mount a disk at `folder`; the test is skipped where the user may not mount one."""
    folder.mkdir()
    done = mount(options, folder)
    if done.returncode:
        pytest.skip(f"needs root to mount a small disk: {done.stderr.strip()}")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def mount(options: str, folder: Path) -> subprocess.CompletedProcess:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def last_line(command: forked.Command) -> str:
    return command.text().splitlines()[-1]


def assert_refused(command: forked.Command, run_dir: Path, reason: str) -> re.Match:
    """Assert code 73, the reason as the last line, and that nothing half visible is left."""
    assert command.poll() == 73, command
    said = re.match(reason, last_line(command))
    assert said, command
    assert_visible_is_whole(run_dir)
    assert leftovers(run_dir) == []
    return said


@pytest.mark.parametrize("lacking", ["bytes", costly("inodes")])
@pytest.mark.parametrize("seed", lanes(quick=1, long=13))
def test_a_disk_too_small_for_the_run(training, tmp_path, seed, lacking):
    """The disk has from less than one checkpoint (340 kB) to a little less than the run needs."""
    draw = random.Random(seed)
    options = f"size={draw.randint(100, 1500)}k"
    if lacking == "inodes":
        options = f"size=100m,nr_inodes={draw.randint(9, 48)}"
    with mounted(tmp_path / "disk", options) as disk:
        run_dir = disk.folder / "run"
        said = assert_refused(training.run(run_dir, output=tmp_path / "out"), run_dir, FULL)
        needed, free, inodes = map(int, said.groups())
        if lacking == "inodes":
            assert free > needed and inodes < 10
        else:
            assert needed > 100_000, "a checkpoint or an export is what does not fit"
        disk.change(PLENTY)
        assert training.run(run_dir, output=tmp_path / "out").poll() == 0
        assert_same_run(run_dir, training.whole)


@pytest.mark.costly
def test_a_disk_that_fills_up_between_two_saves(training, tmp_path):
    """TensorBoard's rows are given up, the rows of metrics.csv are not."""
    with mounted(tmp_path / "disk", PLENTY) as disk:
        run_dir = disk.folder / "run"
        arguments = distill_arguments(
            training.workspace, run_dir, "--checkpoint.every_n_steps", "100",
            "--trainer.limit_val_batches", "0", steps=100,
        )
        step = "stree_pipelines.training.module:Training.training_step"
        full = {"folder": str(disk.folder), "call": step, "nth": 5}
        command = training.forks.run(
            forked.DISTILL, arguments, tmp_path / "out", before=("planted:fill_disk", full)
        )
        assert_refused(command, run_dir, FULL.replace(r"\S+", r"\S+/metrics\.csv"))
        assert "tensorboard ends here: No space left on device" in command.text()
        (disk.folder / "filler").unlink()
        again = training.forks.run(forked.DISTILL, arguments, tmp_path / "out")
        assert again.poll() == 0, again
        assert logged_steps(run_dir) == list(range(1, 101))


@pytest.mark.costly
def test_a_disk_that_becomes_read_only(training, tmp_path):
    with mounted(tmp_path / "disk", PLENTY) as disk:
        run_dir = disk.folder / "run"
        killed = training.start(run_dir, output=tmp_path / "out")
        forked.wait_until(
            lambda: latest_valid(run_dir, lambda line: None) is not None, lambda: str(killed)
        )
        killed.send(signal.SIGKILL)
        killed.wait()
        saved = latest_valid(run_dir)
        disk.change("ro")
        command = training.run(run_dir, output=tmp_path / "out")
        assert command.poll() == 73
        assert re.match(r"error: cannot write \S+: Read-only file system", last_line(command))
        assert saved is not None and verify_manifest(saved)
        disk.change("rw")
        assert training.run(run_dir, output=tmp_path / "out").poll() == 0
        assert_same_run(run_dir, training.whole)


@pytest.mark.costly
def test_a_limit_on_the_size_of_files(training, tmp_path):
    run_dir = tmp_path / "run"
    reason = (
        r"error: cannot write \S+/step-00000003: File too large "
        r"\((\d+) bytes needed, \d+ bytes free\): raise .* \(ulimit -f\)"
    )
    limit = ("planted:limit_files", {"num_bytes": 100_000})
    said = assert_refused(training.run(run_dir, before=limit), run_dir, reason)
    assert int(said[1]) > 100_000
    assert training.run(run_dir).poll() == 0
    assert_same_run(run_dir, training.whole)


@pytest.mark.long
def test_a_temporary_folder_is_not_needed(training, evaluation, tmp_path):
    """Nothing that matters goes through $TMPDIR."""
    nowhere = {"TMPDIR": "/proc/nowhere"}
    assert training.run(tmp_path / "run", environment=nowhere).poll() == 0
    assert_same_run(tmp_path / "run", training.whole)
    assert evaluation.run(tmp_path / "out", environment=nowhere).poll() == 0
    assert table_without_timings(tmp_path / "out") == evaluation.table


@pytest.mark.costly
@pytest.mark.parametrize("seed", lanes(quick=1, long=15))
def test_a_disk_too_small_for_an_evaluation(evaluation, tmp_path, seed):
    size_kib = random.Random(seed).randrange(12, 64, 4)
    with mounted(tmp_path / "disk", f"size={size_kib}k") as disk:
        out = disk.folder / "out"
        command = evaluation.run(out, output=tmp_path / "log")
        assert command.poll() == 73, command
        assert re.match(FULL, last_line(command)), command
        store = ResultStore(out)
        assert all(len(store.samples(row)) == row.num_prompts for row in store.results())
        assert leftovers(out) == []
        disk.change(PLENTY)
        assert evaluation.run(out, output=tmp_path / "log").poll() == 0
        assert table_without_timings(out) == evaluation.table
