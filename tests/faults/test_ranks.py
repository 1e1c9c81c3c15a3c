"""Two ranks: signals to one or all at random moments, and a rank that dies under torchrun.

A seed is a chain of five signals: what one run saved is what the next starts from.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import forked
import pytest
from lanes import lanes
from ports import free_port
from process_group import start_together
from run_checks import (
    assert_same_run,
    assert_visible_is_whole,
    last_logged,
    ranks_of,
    steps_in,
)
from tiny_run import distill_arguments

from stree_pipelines.training.run.stopping import StopSignals

STEPS, SIGNALS = 20, 3
USR1, TERM, INT = signal.SIGUSR1, signal.SIGTERM, signal.SIGINT
pytestmark = pytest.mark.timeout(1200)


@dataclass(frozen=True)
class Pair:
    """A distillation on two processes, and the whole run of it."""

    forks: forked.Forks
    workspace: Path
    whole: Path
    accelerator: str

    def start(self, run_dir: Path, *more: str, steps: int = STEPS, before=None) -> list:
        """Start both ranks, as `srun` does."""
        (run_dir / "restarts.json").unlink(missing_ok=True)
        arguments = self.arguments(run_dir, *more, steps=steps)
        return start_together(self.forks, 2, arguments, run_dir, before)

    def arguments(self, run_dir: Path, *more: str, steps: int = STEPS) -> list[str]:
        return distill_arguments(
            self.workspace, run_dir, "--checkpoint.every_n_steps", "100",
            "--checkpoint.keep_last", "1",
            "--trainer.accelerator", self.accelerator,
            "--trainer.devices", "2", "--trainer.strategy", "ddp", *more, steps=steps,
        )

    def run(self, run_dir: Path, **options) -> list[int]:
        return [rank.wait() for rank in self.start(run_dir, **options)]


@pytest.fixture(scope="module", params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu(2))])
def pair(request, training, tmp_path_factory) -> Pair:
    """Make a pair over gloo, and over NCCL where there are two GPUs."""
    whole = tmp_path_factory.mktemp("pair") / "whole"
    started = Pair(training.forks, training.workspace, whole, request.param)
    assert started.run(started.whole) == [0, 0]
    return started


def wait_for(ranks: list, holds: Callable[[], bool]) -> None:
    forked.wait_until(
        lambda: holds() or any(rank.poll() is not None for rank in ranks), lambda: f"{ranks}"
    )


@pytest.mark.costly
@pytest.mark.parametrize("seed", lanes(quick=1, long=20))
def test_signals_at_any_moment_to_one_or_all_save_one_step(pair, tmp_path, seed):
    moments = random.Random(2000 + seed)
    num_folders, num_signals = 1, 0
    run_dir = tmp_path / "run-1"
    while num_signals < SIGNALS:
        saved = max(steps_in(run_dir / "checkpoints"), default=0)
        more_steps, delay_s = moments.choice([0, 0, 1, 2, 3]), moments.uniform(0, 0.1)
        numbers = moments.choice([(USR1,), (TERM,), (INT,), (USR1, TERM), (TERM, USR1)])
        told = moments.choice([(0,), (1,), (0, 1)])
        ranks = pair.start(run_dir)
        # The line is said when signals have begun to count; the step's row comes later.
        wait_for(ranks, lambda: f"{STEPS} steps of" in ranks[0].text())
        wait_for(ranks, lambda: all(rank_is_training(rank) for rank in ranks))
        if more_steps:
            wait_for(ranks, lambda: last_logged(run_dir) >= saved + more_steps)
        time.sleep(delay_s)
        for number in numbers:
            for rank in told:
                ranks[rank].send(number)
            time.sleep(moments.uniform(0, 0.05))
        codes = [rank.wait() for rank in ranks]
        assert_visible_is_whole(run_dir)
        if codes == [0, 0]:  # done before its moment came: on in a new folder
            assert_same_run(run_dir, pair.whole)
            num_folders += 1
            run_dir = tmp_path / f"run-{num_folders}"
            continue
        assert codes == [130 if INT in numbers else 75] * 2, ranks
        num_signals += 1
        told_to_stop = r"(?:stopped by .*|interrupted) after step (\d+);"
        said = [re.findall(told_to_stop, rank.text()) for rank in ranks]
        assert said[0] == said[1] == [str(max(steps_in(run_dir / "checkpoints")))]
    assert pair.run(run_dir) == [0, 0]
    assert_same_run(run_dir, pair.whole)


@pytest.mark.costly
def test_ctrl_c_reaches_all_ranks_and_they_save_one_step(pair, tmp_path):
    """A terminal sends it to every process of a command at once."""
    run_dir = tmp_path / "run"
    ranks = pair.start(run_dir, before=[("planted:pause", {"at_step": 4})] * 2)
    wait_for(ranks, lambda: last_logged(run_dir) >= 3)
    for rank in ranks:
        rank.send(INT)
    wait_for(ranks, lambda: "interrupted: stopping" in ranks[0].text())
    (run_dir / "go on").touch()
    assert [rank.wait() for rank in ranks] == [130, 130], ranks
    (step,) = steps_in(run_dir / "checkpoints")
    assert step in (3, 4)  # on a busy machine the third is logged before its end
    for rank in ranks:
        assert f"error: interrupted after step {step}; " in rank.text()
        assert "to go on, run: " in rank.text() and "Traceback" not in rank.text()
    assert not (run_dir / "restarts.json").exists()
    assert pair.run(run_dir) == [0, 0]
    (run_dir / "go on").unlink()
    assert_same_run(run_dir, pair.whole)


def rank_is_training(rank: forked.Command) -> bool:
    """Return whether a rank handles SIGUSR1 by now, as the system says."""
    status = Path(f"/proc/{rank.pid}/status").read_text(encoding="utf-8")
    caught = re.search(r"SigCgt:\s*([0-9a-f]+)", status)
    return caught is not None and bool(int(caught[1], 16) >> (USR1 - 1) & 1)


@pytest.mark.costly
def test_a_second_interrupt_leaves_at_once_even_where_a_rank_hangs(pair, tmp_path):
    """The first one waits for a step's end that does not come: the other rank is stopped."""
    run_dir = tmp_path / "run"
    ranks = pair.start(run_dir, steps=5000)
    wait_for(ranks, lambda: last_logged(run_dir) >= 5)
    ranks[1].send(signal.SIGSTOP)
    time.sleep(0.3)
    ranks[0].send(INT)
    wait_for(ranks, lambda: "interrupted: stopping" in ranks[0].text())
    assert ranks[0].poll() is None
    ranks[0].send(INT)
    assert ranks[0].wait(5) == 130
    assert "error: interrupted twice: left without saving" in ranks[0].text()
    assert not (run_dir / "restarts.json").exists()
    ranks[1].send(signal.SIGKILL)


@pytest.mark.costly
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.long)])
def test_torchrun_ends_the_other_rank_when_one_dies_and_the_run_goes_on(pair, tmp_path, victim):
    run_dir, said = tmp_path / "run", tmp_path / "torchrun.log"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
        f"--master-port={free_port()}", str(forked.DISTILL),
    ]
    slowly = ("--checkpoint.every_n_steps", "1", "--trainer.max_steps", "5000")
    with open(said, "w") as log:
        agent = subprocess.Popen(
            [*command, *pair.arguments(run_dir, *slowly)], stdout=log, stderr=log
        )
    forked.wait_until(lambda: last_logged(run_dir) >= 3 or agent.poll() is not None, said.read_text)
    workers = ranks_of(agent.pid)
    assert workers.keys() == {0, 1}, said.read_text()
    os.kill(workers[victim], signal.SIGKILL)
    assert agent.wait(60) == 1, said.read_text()
    assert not any(Path("/proc", str(pid)).exists() for pid in workers.values())
    assert f"local_rank: {victim}" in said.read_text() and "SIGKILL" in said.read_text()
    assert_visible_is_whole(run_dir)
    saved = max(steps_in(run_dir / "checkpoints"))
    assert pair.run(run_dir, steps=saved + 2) == [0, 0]
    assert last_logged(run_dir) == saved + 2


@pytest.mark.costly
def test_a_rank_that_lost_another_keeps_its_exit_code_from_the_launcher():
    """A job script goes by the highest code of all ranks, and that of SIGTERM is 143."""
    before = signal.getsignal(TERM)
    with pytest.raises(RuntimeError), StopSignals().noted(False, lambda: None):
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
    assert signal.signal(TERM, before) == signal.SIG_IGN
    with pytest.raises(RuntimeError), StopSignals().noted(False, lambda: None):
        raise RuntimeError("an error of this rank")
    assert signal.getsignal(TERM) == before
