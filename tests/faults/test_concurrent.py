"""Two commands on one folder: evaluations take turns, trainings do not mix, readers see the whole.

Two evaluations of different checkpoints are in
tests/pipelines/evaluation/test_interrupted_evaluation.py.
"""

from __future__ import annotations

import signal

import forked
import pytest
from run_checks import assert_same_run, steps_in, table_without_timings
from tiny_run import distill_arguments

from stree.checkpoints.load_save import load_model
from stree_pipelines.evaluation.plan import DrafterIdentity
from stree_pipelines.training.checkpoints.saving import latest_valid


@pytest.mark.costly
def test_an_evaluation_takes_over_when_the_one_before_it_is_killed(evaluation, tmp_path):
    """The first of two equal commands dies while the other waits for the folder."""
    out = tmp_path / "out"
    both = [evaluation.start(out, output=tmp_path / f"{name}.log") for name in "ab"]
    forked.wait_until(
        lambda: any("waiting for another evaluation" in each.text() for each in both),
        lambda: f"one that waits: {both}",
    )
    first, second = sorted(both, key=lambda each: "waiting for another" in each.text())
    first.send(signal.SIGKILL)
    assert second.wait() == 0, second
    assert first.wait() in (-signal.SIGKILL, 0)
    assert table_without_timings(out) == evaluation.table


def test_a_second_training_in_a_folder_is_refused(training, tmp_path):
    run_dir = tmp_path / "run"
    first = training.start(run_dir, before=("planted:pause", {"at_step": 4}))
    forked.wait_until(lambda: bool(steps_in(run_dir / "checkpoints")), lambda: str(first))
    patience = {"name": "stree_pipelines.training.run.run_folder:LOCK_PATIENCE_S", "value": 0.5}
    second = training.run(
        run_dir, output=tmp_path / "second.out", before=("planted:set_to", patience)
    )
    assert second.poll() == 2
    assert f"error: another training is running in {run_dir}: wait" in second.text()
    (run_dir / "go on").touch()
    assert first.wait() == 0
    (run_dir / "go on").unlink()
    assert_same_run(run_dir, training.whole)


@pytest.mark.costly
@pytest.mark.parametrize("steps", [25, pytest.param(100, marks=pytest.mark.long)])
def test_readers_beside_a_training_that_rotates(training, tmp_path, steps):
    """Each step saves and exports, and one save is kept: a reader gets a whole checkpoint, and by
    `latest` the weights whose hash it gets."""
    run_dir = tmp_path / "run"
    arguments = distill_arguments(
        training.workspace, run_dir, "--checkpoint.keep_last", "1",
        "--export.every_n_steps", "1", "--trainer.limit_val_batches", "0", steps=steps,
    )
    trainer = training.forks.start(forked.DISTILL, arguments, tmp_path / "out")
    seen = set()
    while trainer.poll() is None:
        found = latest_valid(run_dir, warn=lambda line: None)
        if found is not None:
            seen.add(found.name)
        if (run_dir / "drafter/latest").exists():
            load_model(run_dir / "drafter/latest")
            drafter = DrafterIdentity.at(run_dir / "drafter/latest")
            assert drafter.path.endswith(f"step-{drafter.step:08d}")
    assert trainer.poll() == 0, trainer
    assert len(seen) > 3, "the training was over too soon: nothing was read beside it"
