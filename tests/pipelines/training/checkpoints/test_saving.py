"""Every value of a checkpoint comes back, nothing damaged is used, and a resumed run is the same.

"The same" is bit for bit: rows of metrics.csv as text and every value of the final state.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from lanes import costly, quick_first
from run_checks import assert_same_state, is_equal
from tiny_run import distill_arguments, metric_rows

from stree.common.errors import CheckpointRefused, Interrupted, Preempted, UsageError
from stree_pipelines.commands import distill
from stree_pipelines.training.checkpoints.saving import (
    STATE_KEYS,
    SafeCheckpointIO,
    TrainingCheckpoints,
    latest_valid,
)
from stree_pipelines.training.run.stopping import STOP_SIGNALS

STEPS = 8


@pytest.fixture(scope="module")
def uninterrupted(workspace, tmp_path_factory) -> Path:
    """Run a training with a checkpoint of every step."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    distill.main(distill_arguments(workspace, run_dir, steps=STEPS))
    return run_dir


def assert_same_run(run_dir: Path, reference: Path) -> None:
    assert metric_rows(run_dir) == metric_rows(reference)
    assert_same_state(*(run / f"checkpoints/step-{STEPS:08d}" for run in (run_dir, reference)))


# The format


def test_nested_state_comes_back_exactly(tmp_path):
    tied = torch.randn(3, 2)
    state = {
        **dict.fromkeys(STATE_KEYS, 0),
        "state_dict": {"a": tied, "b": tied, "row": tied[1], "bf16": torch.ones(2).bfloat16()},
        0: {"exp_avg": torch.zeros(0), "step": torch.tensor(3.0)},
        "tuple": (1, (2.5, None), [True, "x"]),
        "odd floats": [math.inf, -math.inf, 0.1 + 0.2, 5e-324],
        (1, 2): "tuple key",
    }
    SafeCheckpointIO().save_checkpoint(state, tmp_path / "step-0")
    back = SafeCheckpointIO().load_checkpoint(tmp_path / "step-0")
    assert list(back) == list(state) and is_equal(back, state)
    names = {path.name for path in (tmp_path / "step-0").iterdir()}
    assert names == {"state.pt", "MANIFEST.json"}


@pytest.mark.parametrize("value", [object(), lambda: 0, np.float64(0.3), ValueError])
def test_what_no_resume_could_read_is_refused_when_saving(value, tmp_path):
    state = {**dict.fromkeys(STATE_KEYS, 0), "callbacks": {"mine": value}}
    with pytest.raises(UsageError, match="the training state holds what a checkpoint cannot"):
        SafeCheckpointIO().save_checkpoint(state, tmp_path / "step-0")
    assert not list(tmp_path.iterdir())


def test_manifest_names_step_config_and_tokenizer(uninterrupted):
    path = uninterrupted / "checkpoints/step-00000003/MANIFEST.json"
    manifest = json.loads(path.read_text())
    assert manifest["step"] == 3 and manifest["version"] == 1
    assert len(manifest["config_hash"]) == len(manifest["tokenizer_fingerprint"]) == 64


# Which one to resume from


@pytest.fixture
def copy_of_run(uninterrupted, tmp_path):
    def copy(last_step: int) -> Path:
        """Copy the run as a kill after step `last_step`'s checkpoint would have left it, with the
        rows of the steps after it already logged."""
        run_dir = tmp_path / f"from-{last_step}"
        shutil.copytree(uninterrupted, run_dir, symlinks=True)
        for path in (run_dir / "checkpoints").iterdir():
            if int(path.name.removeprefix("step-")) > last_step:
                shutil.rmtree(path)
        return run_dir

    return copy


def test_the_highest_valid_step_wins_and_skipped_ones_are_named(copy_of_run):
    run_dir = copy_of_run(7)
    with open(run_dir / "checkpoints/step-00000007/state.pt", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    (run_dir / "checkpoints/step-00000006/MANIFEST.json").unlink()
    (run_dir / "checkpoints/.tmp-1-00000000-elsewhere").mkdir()
    lines: list[str] = []
    assert latest_valid(run_dir, lines.append) == run_dir / "checkpoints/step-00000005"
    assert "step-00000007" in lines[0] and "sha256" in lines[0]
    assert "step-00000006" in lines[1] and "MANIFEST" in lines[1]


def test_a_checkpoint_under_another_step_s_name_is_skipped(copy_of_run):
    run_dir = copy_of_run(3)
    (run_dir / "checkpoints/step-00000003").rename(run_dir / "checkpoints/step-00000099")
    assert latest_valid(run_dir, lambda line: None).name == "step-00000002"


def test_only_invalid_checkpoints_are_an_error_and_none_is_a_start(copy_of_run, tmp_path):
    run_dir = copy_of_run(1)
    (run_dir / "checkpoints/step-00000001/state.pt").write_text("{}")
    with pytest.raises(CheckpointRefused, match="none of the checkpoints"):
        latest_valid(run_dir, lambda line: None)
    assert latest_valid(tmp_path / "new") is None


def test_a_published_folder_that_is_no_training_state_is_refused(workspace):
    with pytest.raises(CheckpointRefused, match="no training state"):
        SafeCheckpointIO().load_checkpoint(workspace / "target")


@pytest.mark.costly
def test_old_checkpoints_go_and_the_newest_stay(workspace, tmp_path):
    arguments = distill_arguments(workspace, tmp_path / "run", steps=5)
    distill.main([*arguments, "--checkpoint.keep_last", "2"])
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert names == ["step-00000004", "step-00000005"]


# Resuming


@pytest.mark.parametrize("step", quick_first([(4,)], [(1,), (7,)]))
def test_resuming_at_a_step_gives_the_uninterrupted_run(
    step, workspace, uninterrupted, copy_of_run
):
    """Step 4 validates, too: the row of the validation must be there once."""
    run_dir = copy_of_run(step)
    distill.main(distill_arguments(workspace, run_dir, steps=STEPS))
    assert_same_run(run_dir, uninterrupted)


@pytest.mark.costly
def test_random_numbers_go_on_where_they_were(workspace, uninterrupted, copy_of_run, monkeypatch):
    """Nothing in a tiny drafter draws numbers, so a callback does: at the same steps it must see
    the same numbers from torch, NumPy and Python."""
    import random

    drawn: dict[int, tuple] = {}
    original = TrainingCheckpoints.on_train_batch_end

    def draw(self, trainer, *arguments):
        drawn[trainer.global_step] = (torch.rand(1).item(), np.random.rand(), random.random())
        original(self, trainer, *arguments)

    monkeypatch.setattr(TrainingCheckpoints, "on_train_batch_end", draw)
    run_dir = uninterrupted.parent / "drawing"
    distill.main(distill_arguments(workspace, run_dir, steps=STEPS))
    whole = dict(drawn)
    drawn.clear()
    for step in range(5, STEPS + 1):
        shutil.rmtree(run_dir / f"checkpoints/step-{step:08d}")
    distill.main(distill_arguments(workspace, run_dir, steps=STEPS))
    assert drawn == {step: numbers for step, numbers in whole.items() if step > 4}


@pytest.mark.costly
def test_gradient_accumulation_resumes_exactly(workspace, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    more = ("--trainer.accumulate_grad_batches", "2", "--trainer.val_check_interval", "4")
    distill.main(distill_arguments(workspace, whole, *more, steps=STEPS))
    shutil.copytree(whole, cut, symlinks=True)
    for step in range(4, STEPS + 1):
        shutil.rmtree(cut / f"checkpoints/step-{step:08d}")
    distill.main(distill_arguments(workspace, cut, *more, steps=STEPS))
    assert_same_run(cut, whole)


def test_a_finished_run_says_so(workspace, uninterrupted, capsys):
    distill.main(distill_arguments(workspace, uninterrupted, steps=STEPS))
    assert "is finished: 8 of 8 steps" in capsys.readouterr().out


def test_asking_a_finished_run_for_less_changes_nothing(workspace, copy_of_run, capsys):
    run_dir = copy_of_run(6)
    before = {path: path.read_bytes() for path in run_dir.glob("*.*")}
    assert {"config.yaml", "command.json", "metrics.csv"} <= {path.name for path in before}
    distill.main(distill_arguments(workspace, run_dir, steps=3))
    assert "finished: 6 steps are done, trainer.max_steps asks for 3" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in run_dir.glob("*.*")} == before


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("trainer.precision", "bf16-mixed"),
        ("trainer.gradient_clip_val", "0.5"),
        ("trainer.accumulate_grad_batches", "2"),
        ("trainer.deterministic", "false"),
        ("model.optimizer.lr", "0.5"),
    ],
)
def test_other_settings_do_not_go_on_in_the_same_folder(option, value, workspace, copy_of_run):
    arguments = distill_arguments(workspace, copy_of_run(2), steps=STEPS)
    with pytest.raises(UsageError, match=rf"{option} was .*, now"):
        distill.main([*arguments, f"--{option}", value])


def test_longer_and_with_other_rows_it_is_the_same_run(workspace, copy_of_run):
    run_dir = copy_of_run(7)
    more = ("--trainer.log_every_n_steps", "2")
    distill.main(distill_arguments(workspace, run_dir, *more, steps=STEPS + 1))
    assert (run_dir / f"checkpoints/step-{STEPS + 1:08d}").is_dir()


def test_a_folder_without_a_checkpoint_takes_any_settings(workspace, copy_of_run):
    run_dir = copy_of_run(0)
    distill.main(distill_arguments(workspace, run_dir, "--model.optimizer.lr", "0.5", steps=1))
    assert [row["step"] for row in metric_rows(run_dir)] == ["1"]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("number", "kind", "said"),
    [
        (signal.SIGTERM, Preempted, r"stopped by SIGTERM after step 3; .*: run the same command"),
        costly(signal.SIGINT, Interrupted,
               r"interrupted after step 3; .*: to go on, run: python pipe"),
    ],
)
def test_a_signal_saves_at_the_step_s_end_and_the_run_goes_on_later(
    number, kind, said, workspace, uninterrupted, tmp_path, monkeypatch
):
    original = TrainingCheckpoints.on_train_batch_start

    def raise_signal(self, trainer, *arguments):
        original(self, trainer, *arguments)
        if trainer.global_step == 2:
            signal.raise_signal(number)

    monkeypatch.setattr(TrainingCheckpoints, "on_train_batch_start", raise_signal)
    arguments = distill_arguments(workspace, tmp_path, steps=STEPS)
    monkeypatch.setattr(sys, "argv", ["pipelines/distill.py", *arguments])
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    with pytest.raises(kind, match=said) as stopped:
        # Not due at this step: the signal is what saves.
        distill.main([*arguments, "--checkpoint.every_n_steps", "100"])
    assert stopped.value.exit_code == (130 if number == signal.SIGINT else 75)
    for each, handler in before.items():
        # Until it has left, no further one takes its exit code away; Ctrl-C ends it at once.
        left = signal.signal(each, handler)
        assert callable(left) if each == signal.SIGINT else left == signal.SIG_IGN
    assert not (tmp_path / "restarts.json").exists() or number != signal.SIGINT
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
    monkeypatch.undo()
    distill.main(arguments)
    assert_same_run(tmp_path, uninterrupted)
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == before
