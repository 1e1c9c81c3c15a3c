"""Learning rates decay for each export, in maths and in runs."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from lanes import quick_first
from process_group import run_together
from run_checks import assert_same_run, steps_in
from tiny_run import distill_arguments, metric_rows

from stree.checkpoints.load_save import load_model
from stree.common.errors import Preempted, UsageError
from stree_pipelines.commands import distill
from stree_pipelines.training.distillation import Distillation
from stree_pipelines.training.optimization import OptimizerConfig, learning_rate

WSD = (
    "--model.optimizer.schedule", "wsd", "--model.optimizer.decay_share", "0.4",
    "--model.optimizer.lr", "0.01", "--trainer.limit_val_batches", "0",
)


@pytest.fixture(scope="module")
def branching(workspace, tmp_path_factory) -> Path:
    """Train six steps with exports at 1, 4 and 6, two micro-batches a step."""
    run_dir = tmp_path_factory.mktemp("branching") / "run"
    distill.main(branching_arguments(workspace, run_dir))
    return run_dir


def branching_arguments(workspace: Path, run_dir: Path, *more: str) -> list[str]:
    options = (*WSD, "--trainer.accumulate_grad_batches", "2", "--export.steps", "[1,4]")
    return distill_arguments(workspace, run_dir, *options, *more, steps=6)


# Learning rates


def test_wsd_warms_up_stays_and_falls_with_the_root_of_its_progress():
    config = OptimizerConfig(
        lr=2.0, schedule="wsd", min_lr_ratio=0.1, warmup_steps=4, decay_share=0.25
    )
    rates = [learning_rate(step, 20, config) for step in (0, 3, 4, 14, 15, 16, 19, 20, 99)]
    falling = [2 * (0.1 + 0.9 * (1 - math.sqrt(done / 5))) for done in (0, 1, 4, 5)]
    assert rates == pytest.approx([0.5, 2, 2, 2, *falling, 0.2])


def test_a_schedule_s_stable_phase_is_the_same_however_long_it_is():
    config = OptimizerConfig(schedule="wsd", warmup_steps=3)
    for end in (1, 2, 10, 55):
        begin = config.decay_begin(end)
        assert 0 <= begin < end
        for step in range(begin):
            assert learning_rate(step, end, config) == learning_rate(step, 1000, config)
    assert (config.decay_begin(1), config.decay_begin(1600)) == (0, 1280)


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(decay_share=0.1), "decay_share is an option of wsd"),
        (dict(schedule="wsd", decay_steps=9), "decay_steps is an option of cosine"),
        (dict(schedule="wsd", decay_share=0.0), "decay_share is 0.0, wanted above 0"),
    ],
)
def test_options_of_the_other_schedule_are_refused(options, said):
    with pytest.raises(UsageError, match=said):
        OptimizerConfig(**options)


# Runs


def assert_equal_weights(folder: Path, other: Path) -> None:
    mine, theirs = load_model(folder).state_dict(), load_model(other).state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.costly
def test_an_early_export_is_what_a_shorter_training_ends_with(workspace, branching, tmp_path):
    """The weights are equal bit for bit, and the training goes on as without the export."""
    shorter = (
        *WSD, "--trainer.accumulate_grad_batches", "2", "--checkpoint.every_n_steps", "99"
    )
    distill.main(distill_arguments(workspace, tmp_path / "short", *shorter, steps=4))
    early = branching / "drafter/step-00000004"
    assert_equal_weights(early, tmp_path / "short/drafter/latest")
    origin = json.loads((early / "provenance.json").read_text())
    last = json.loads((tmp_path / "short/drafter/latest/provenance.json").read_text())
    assert (origin["step"], origin["decayed_from_step"]) == (4, 2)
    assert all(origin[name] == last[name] for name in ("tokens_seen", "loss"))
    distill.main(distill_arguments(workspace, tmp_path / "alone", *shorter, steps=6))
    assert_equal_weights(branching / "drafter/latest", tmp_path / "alone/drafter/latest")
    assert metric_rows(branching) == metric_rows(tmp_path / "alone")
    assert steps_in(branching / "drafter") == [1, 4, 6]


@pytest.mark.costly
def test_a_finished_run_that_is_given_more_steps_is_another_training(
    workspace, branching, tmp_path
):
    """It goes on from its decayed weights at the full rate, as docs/your-own.md says."""
    run_dir = Path(shutil.copytree(branching, tmp_path / "run", symlinks=True))
    state = run_dir / "checkpoints/step-00000006"
    finished = {path.name: path.read_bytes() for path in state.iterdir()}
    distill.main(branching_arguments(workspace, run_dir, "--trainer.max_steps", "12"))
    assert {path.name: path.read_bytes() for path in state.iterdir()} == finished
    rates = [float(row["lr"]) for row in metric_rows(run_dir)]
    config = OptimizerConfig(lr=0.01, schedule="wsd", decay_share=0.4, warmup_steps=3)
    wanted = [learning_rate(step, 6, config) for step in range(6)]
    wanted += [learning_rate(step, 12, config) for step in range(6, 12)]
    assert rates == pytest.approx(wanted)
    assert rates[5] < rates[6] == 0.01  # decayed to its end, and at once at the full rate


@pytest.mark.quick(1)
@pytest.mark.parametrize("stopped", quick_first([(2,)], [(1,), (2,), (3,)]))
def test_a_run_that_was_stopped_around_a_decay_is_the_same(workspace, branching, tmp_path, stopped):
    run_dir = Path(shutil.copytree(branching, tmp_path / "run", symlinks=True))
    for folder in ("checkpoints", "drafter"):
        for step in steps_in(run_dir / folder):
            # The export at 4 branches off at 2, before the step that follows
            if step > (stopped if folder == "checkpoints" or stopped <= 2 else 4):
                shutil.rmtree(run_dir / folder / f"step-{step:08d}")
    distill.main(branching_arguments(workspace, run_dir))
    assert_same_run(run_dir, branching)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("every_n_steps", "validation"), quick_first([(99, 0)], [(2, 0), (99, 2), (2, 2)])
)
def test_a_decay_that_is_told_to_stop_is_begun_again(
    workspace, tmp_path, monkeypatch, every_n_steps, validation
):
    """The state before it is saved, unless it was; what follows is as if nothing had been."""
    step = Distillation.training_step

    def told(module, batch, batch_idx):
        if module.last_step == 4:  # the decay of the export at 4, in its first of two steps
            os.kill(os.getpid(), signal.SIGTERM)
        return step(module, batch, batch_idx)

    monkeypatch.setattr(Distillation, "training_step", told)
    options = ["--checkpoint.every_n_steps", str(every_n_steps)]
    if validation:
        options += ["--trainer.limit_val_batches", "1", "--trainer.val_check_interval", "2"]
    run_dir, whole = tmp_path / "run", tmp_path / "whole"
    arguments = branching_arguments(workspace, run_dir, *options)
    with pytest.raises(Preempted, match="stopped by SIGTERM after step 2; everything is saved"):
        distill.main(arguments)
    assert steps_in(run_dir / "checkpoints") == [2] and steps_in(run_dir / "drafter") == [1]
    monkeypatch.undo()
    distill.main(arguments)
    distill.main(branching_arguments(workspace, whole, *options))
    if every_n_steps > 2:  # this one is there because of the stop
        shutil.rmtree(run_dir / "checkpoints/step-00000002")
    assert_same_run(run_dir, whole)


@pytest.mark.long
def test_two_processes_give_the_same_exports(workspace, branching, forks, tmp_path):
    """The exports are equal up to the order of sums; a step's micro-batches run at once."""
    more = (*WSD, "--export.steps", "[1,4]", "--data.batch_size", "2")
    ddp = ("--trainer.devices", "2", "--trainer.strategy", "ddp")
    log = tmp_path / "log"
    arguments = distill_arguments(workspace, tmp_path / "run", *more, *ddp, steps=6)
    assert run_together(forks, 2, arguments, log) == [0, 0], Path(f"{log}.0").read_text()
    for step in (1, 4, 6):
        folder = f"drafter/step-{step:08d}"
        mine, theirs = (load_model(run / folder) for run in (tmp_path / "run", branching))
        for weight, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(weight, other, rtol=0, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("told", [0, 1])
def test_two_processes_of_which_one_is_told_to_stop_in_a_decay(workspace, forks, tmp_path, told):
    """Both stop with the state before it, and go on bit for bit as if nothing had been."""
    more = (*WSD, "--export.steps", "[1,4]", "--checkpoint.every_n_steps", "99",
            "--trainer.devices", "2", "--trainer.strategy", "ddp")
    run_dir, whole = tmp_path / "run", tmp_path / "whole"

    def run(folder: Path, **options) -> list[int]:
        arguments = distill_arguments(workspace, folder, *more, steps=6)
        return run_together(forks, 2, arguments, Path(f"{folder}.log"), **options)

    # The decay of the export at 1, steps 1 and 2; the fourth begins the decay of the export at 4
    step = "stree_pipelines.training.distillation:Distillation.training_step"
    signalled = ("planted:tell", {"call": step, "nth": 4, "number": signal.SIGTERM})
    codes = run(run_dir, before=[signalled if rank == told else None for rank in range(2)])
    said = [Path(f"{run_dir}.log.{rank}").read_text() for rank in range(2)]
    assert codes == [Preempted.exit_code] * 2, said
    assert "step 2: 2 steps of the decay of export 4 begin" in said[0]
    assert "stopped by SIGTERM after step 2; everything is saved" in said[told]
    assert "stopped by a signal to another rank after step 2; ev" in said[1 - told]
    assert steps_in(run_dir / "checkpoints") == [2] and steps_in(run_dir / "drafter") == [1]
    assert run(run_dir) == run(whole) == [0, 0]
    shutil.rmtree(run_dir / "checkpoints/step-00000002")  # there because of the stop
    assert_same_run(run_dir, whole)


def test_a_dry_run_counts_the_steps_of_decays(workspace, tmp_path, capsys):
    distill.main(branching_arguments(workspace, tmp_path / "run", "--dry_run"))
    assert "exports at steps 1, 4, 6, with 3 further steps for decays" in capsys.readouterr().out
