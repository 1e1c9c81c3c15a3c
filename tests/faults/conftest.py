"""Commands in forked processes, a tiny target and data, and a run that nothing disturbed."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import forked
import pytest
from run_checks import table_without_timings
from tiny_run import distill_arguments, make_workspace

STEPS, INTERVAL = 15, 3


@dataclass(frozen=True)
class Training:
    """A distillation that can be started in any folder, and the whole run of it."""

    forks: forked.Forks
    workspace: Path
    whole: Path
    lines_of_saves: tuple[int, ...]  # of stree/common/files.py, executed by each of its saves
    steps: int = STEPS
    interval: int = INTERVAL

    def arguments(self, run_dir: Path) -> list[str]:
        return arguments_of(self.workspace, run_dir)

    def start(self, run_dir: Path, output: Path | None = None, **options) -> forked.Command:
        # These faults come in rows that tests/pipelines/training/run/test_restarts.py is about.
        if (run_dir / "restarts.json").exists() and os.access(run_dir, os.W_OK):
            (run_dir / "restarts.json").unlink()
        output = output or run_dir.with_name(f"{run_dir.name}.out")
        return self.forks.start(forked.DISTILL, self.arguments(run_dir), output, **options)

    def run(self, run_dir: Path, **options) -> forked.Command:
        command = self.start(run_dir, **options)
        command.wait()
        return command


def arguments_of(workspace: Path, run_dir: Path) -> list[str]:
    """Save each third step and keep two; validate at 4, 8 and 12; export at 5, 7 and 15."""
    return distill_arguments(
        workspace, run_dir, "--checkpoint.every_n_steps", str(INTERVAL),
        "--checkpoint.keep_last", "2", "--export.steps", "[5,7]", steps=STEPS,
    )


@pytest.fixture(scope="session")
def training(forks, tmp_path_factory) -> Training:
    folder = tmp_path_factory.mktemp("training")
    workspace, whole, lines = make_workspace(folder), folder / "whole", folder / "lines.txt"
    command = forks.run(
        forked.DISTILL, arguments_of(workspace, whole), folder / "whole.out",
        before=("planted:count_lines_of_saves", {"path": str(lines)}),
    )
    assert command.poll() == 0, command
    return Training(forks, workspace, whole, tuple(map(int, lines.read_text().split())))


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of two exports that can be started in any folder, and what comes of it."""

    forks: forked.Forks
    options: tuple[str, ...]
    table: str = ""

    def start(self, out: Path, output: Path | None = None, **options) -> forked.Command:
        output = output or out.with_name(f"{out.name}.log")
        arguments = [*self.options, "--out", str(out)]
        return self.forks.start(forked.EVAL_SPEC, arguments, output, **options)

    def run(self, out: Path, **options) -> forked.Command:
        command = self.start(out, **options)
        command.wait()
        return command


@pytest.fixture(scope="session")
def evaluation(training, tmp_path_factory) -> Evaluation:
    return make_evaluation(training, tmp_path_factory)


@pytest.fixture(scope="session")
def evaluation_in_batches(training, tmp_path_factory) -> Evaluation:
    return make_evaluation(training, tmp_path_factory, "--batch_size", "2")


def make_evaluation(training, tmp_path_factory, *more: str) -> Evaluation:
    """Evaluate three prompts, one of two turns, at T = 0 and 1."""
    folder = tmp_path_factory.mktemp("evaluation")
    turns = [["What is 3 plus 4?"], ["What is 1 plus 1?", "And 2 plus 2?"], ["What is 9 plus 9?"]]
    prompts = [{"id": str(i), "category": "sums", "turns": each} for i, each in enumerate(turns)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(each) + "\n" for each in prompts))
    options = (
        "--target", str(training.workspace / "target"),
        "--checkpoint", *(str(training.whole / f"drafter/step-{s:08d}") for s in (5, 15)),
        "--benchmarks", str(folder / "sums.jsonl"), "--temperatures", "0", "1",
        "--max-new-tokens", "6", "--device", "cpu", "--ignore-eos", *more,
    )
    command = Evaluation(training.forks, options).run(folder / "whole")
    assert command.poll() == 0, command
    return Evaluation(training.forks, options, table_without_timings(folder / "whole"))
