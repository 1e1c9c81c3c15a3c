"""SIGKILL at random moments: the same command again ends with what an undisturbed run ends with.

Moments come from a seeded generator. A third of training's kills fall inside a save, at a random
line of stree/common/files.py; the others at a random time after a random step (or the start).
Each seed is a chain of five kills: what one leaves is what the next starts from.
"""

from __future__ import annotations

import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import forked
import pytest
from lanes import lanes, quick_first
from run_checks import (
    assert_same_run,
    assert_visible_is_whole,
    last_logged,
    leftovers,
    steps_in,
    table_without_timings,
)

from stree_pipelines.evaluation.result_store import ResultStore

KILLS = 5
pytestmark = pytest.mark.timeout(1200)  # a busy machine only; a chain takes half a minute


@pytest.mark.parametrize("seed", quick_first([(0,)], [(seed,) for seed in range(20)], [(1,)]))
def test_training_killed_anywhere_goes_on_as_if_nothing_had_been(training, tmp_path, seed):
    moments = random.Random(seed)
    num_folders, num_kills = 1, 0
    run_dir = tmp_path / "run-1"
    while num_kills < KILLS:
        saved = max(steps_in(run_dir / "checkpoints"), default=0)
        inside = num_kills % 3 == seed % 3
        if inside:
            nth = moments.randint(1, max(1, min(3, (training.steps - saved) // training.interval)))
            line = moments.randint(1, training.lines_of_saves[nth - 1])
            before = ("planted:die_inside_a_save", {"nth": nth, "line": line})
            command = training.run(run_dir, before=before)
        else:
            step = saved + moments.randint(-1, 4)
            delay_s = moments.uniform(0, 1.0 if step < saved else 0.1)
            command = training.start(run_dir)
            wait_for_step(command, run_dir, saved, step)
            time.sleep(delay_s)
            command.send(signal.SIGKILL)
            command.wait()
        assert_visible_is_whole(run_dir)
        if command.poll() == 0:  # done before its moment came: on in a new folder
            assert_same_run(run_dir, training.whole)
            num_folders += 1
            run_dir = tmp_path / f"run-{num_folders}"
            continue
        assert command.poll() == -signal.SIGKILL, command
        num_kills += 1
        left = max(steps_in(run_dir / "checkpoints"), default=0)
        lost = last_logged(run_dir) - left
        assert left >= saved and lost <= training.interval
    assert training.run(run_dir).poll() == 0
    assert_same_run(run_dir, training.whole)


def wait_for_step(command: forked.Command, run_dir: Path, saved: int, step: int) -> None:
    """Wait until metrics.csv, which the command first cuts behind `saved`, has the step."""
    if step < saved:
        return
    resumed = run_dir / "metrics.csv"
    before = resumed.stat().st_ino if resumed.exists() else None

    def is_there() -> bool:
        if command.poll() is not None:
            return True
        if not resumed.exists() or resumed.stat().st_ino == before:
            return False
        return last_logged(run_dir) >= step

    forked.wait_until(is_there, lambda: f"step {step} of {command}")


# One kill at each place where something half done would show


def die(call: str, naming: str = "", when: str = "before", nth: int = 1) -> tuple[str, dict]:
    return "planted:die_at", {"call": call, "naming": naming, "when": when, "nth": nth}


SAVING = {
    "the state is written": die(
        "stree_pipelines.training.checkpoints.saving:_write", when="after"
    ),
    "before the manifest": die("stree.common.files:_write_manifest", "checkpoints"),
    "behind the manifest": die("stree.common.files:_write_manifest", "checkpoints", "after"),
    "before the rename": die("stree.common.files:_put_in_place", "checkpoints"),
    "behind the rename": die("stree.common.files:_put_in_place", "checkpoints", "after"),
    "before the oldest goes": die("stree_pipelines.training.checkpoints.saving:remove_directory"),
    "renamed, not deleted": die("shutil:rmtree", "checkpoints/.tmp-"),
    "half deleted": die("os:unlink", "state.", "after"),
}
EXPORTING = {
    "weights are written": die("stree.checkpoints.load_save:save_file", when="after"),
    "before the rename": die("stree.common.files:_put_in_place", "drafter"),
    "behind the rename": die("stree.common.files:_put_in_place", "drafter", "after"),
    "the new link is not in place": die("os:replace", "drafter/latest"),
    "the new link is in place": die("os:replace", "drafter/latest", "after"),
}
RESUMING = {
    "step 8": die("stree_pipelines.training.module:Training.on_validation_epoch_start", nth=2),
    "before leftovers go": die("stree_pipelines.training.checkpoints.saving:sweep_leftovers"),
    "config.yaml is not in place": die("os:replace", "config.yaml"),
    "command.json is in place": die("os:replace", "command.json", "after"),
    "the state is read": die(
        "stree_pipelines.training.checkpoints.saving:SafeCheckpointIO.load_checkpoint", when="after"
    ),
    "metrics.csv is not in place": die("os:replace", "metrics.csv"),
    "metrics.csv is in place": die("os:replace", "metrics.csv", "after"),
}


@pytest.mark.costly
@pytest.mark.parametrize(
    "places", [SAVING, EXPORTING, RESUMING], ids=["saving", "exporting", "resuming"]
)
def test_a_kill_at_each_place_leaves_the_old_or_the_new(training, tmp_path, places):
    run_dir = tmp_path / "run"
    for place, before in places.items():
        saved = max(steps_in(run_dir / "checkpoints"), default=0)
        command = training.run(run_dir, before=before)
        assert command.poll() == -signal.SIGKILL, f"{place} was not come to: {command}"
        assert_visible_is_whole(run_dir)
        assert max(steps_in(run_dir / "checkpoints"), default=0) >= saved
    assert training.run(run_dir).poll() == 0
    assert_same_run(run_dir, training.whole)


# Evaluation


@pytest.mark.costly
@pytest.mark.parametrize("seed", lanes(quick=1, long=20))
def test_an_evaluation_killed_anywhere_ends_with_the_same_table(
    evaluation, tmp_path, seed
):
    require_survival(evaluation, tmp_path, random.Random(1000 + seed))


@pytest.mark.parametrize("seed", lanes(quick=0, long=4))
def test_an_evaluation_killed_in_the_middle_of_a_batch_ends_with_the_same_table(
    evaluation_in_batches, tmp_path, seed
):
    require_survival(evaluation_in_batches, tmp_path, random.Random(2000 + seed))


def require_survival(evaluation, tmp_path, moments) -> None:
    out = tmp_path / "out-1"
    num_folders, num_kills = 1, 0
    while num_kills < KILLS:
        written, more = lines_written(out), moments.randint(0, 8)
        command = evaluation.start(out)
        forked.wait_until(
            lambda: lines_written(out) >= written + more or command.poll() is not None,
            lambda: f"{more} more lines of {command}",
        )
        time.sleep(moments.uniform(0, 1.5 if more == 0 else 0.05))
        command.send(signal.SIGKILL)
        command.wait()
        if command.poll() == 0:
            assert table_without_timings(out) == evaluation.table
            num_folders += 1
            out = tmp_path / f"out-{num_folders}"
            continue
        assert command.poll() == -signal.SIGKILL, command
        num_kills += 1
        store = ResultStore(out)
        keys = [row.key for row in store.results()]
        assert len(keys) == len(set(keys))
        assert all(len(store.samples(row)) == row.num_prompts for row in store.results())
        assert lines_written(out) >= written, "finished prompts were lost"
    assert evaluation.run(out).poll() == 0
    assert table_without_timings(out) == evaluation.table
    assert leftovers(out) == [] and not list((out / "journals").iterdir())


def lines_written(out: Path) -> int:
    """Count the finished prompts on the disk: those in journals, and those of published rows."""
    # Journals first: one that goes meanwhile has been published.
    waiting = {}
    for path in out.glob("journals/*.jsonl"):
        with suppress(FileNotFoundError):
            waiting[path.name.replace(".worker-00000", "")] = path.read_bytes().count(b"\n")
    published = {
        f"samples_{Path(row.samples).name.removesuffix('.gz')}": row.num_prompts
        for row in ResultStore(out).results()
    }
    return sum((waiting | published).values())
