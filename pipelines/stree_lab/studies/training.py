"""Train the drafters of a study, several at once."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from stree.common.errors import UsageError, kind_of_code
from stree.common.files import write_atomically
from stree.common.plain_data import parse_yaml
from stree.common.words import counted
from stree_lab.studies.plan import DONE, StudyRun, in_order
from stree_pipelines.console.progress import EvaluationProgress
from stree_pipelines.evaluation.launch import end_with_parent
from stree_pipelines.training.run.run_folder import changes_since

DISTIL = (sys.executable, "-m", "stree", "distil")
LOG = "train.log"  # output of distill.py, in a run's folder
NUM_REASON_LINES = 3
LINKED = {"data.seed", "data.tokenizer"}  # in a run's config.yaml; other options set them


def train(
    runs: Sequence[StudyRun], more: dict[str, Any], at_once: int, progress: EvaluationProgress
) -> None:
    """Train each run that is not finished, `at_once` at a time on every GPU.

    A run that reads another's drafter comes after it, and is not trained when that one failed. A
    stopped run goes on where it was. more: options of distill.py for all.

    Raises the kind of error that a run ended with, after the others have ended.
    """
    gpus: list[int | None] = list(range(torch.cuda.device_count())) or [None]
    places: SimpleQueue[int | None] = SimpleQueue()
    for _ in range(at_once):
        for gpu in gpus:
            places.put(gpu)
    failures: list[tuple[int, str]] = []
    failed: list[StudyRun] = []
    children: set[subprocess.Popen[bytes]] = set()
    lock = threading.Lock()
    with (
        progress.task("drafters", len(runs)) as task,
        ThreadPoolExecutor(at_once * len(gpus)) as pool,
    ):

        def run_one(run: StudyRun) -> None:
            if unread := [other.name for other in failed if run.reads(other)]:
                with lock:
                    failed.append(run)
                    task.advance(f"{run.name} waits for {unread[0]}")
                return
            gpu = places.get()
            try:
                code = _distil(run, more, gpu, children)
            finally:
                places.put(gpu)
            with lock:
                if not code:
                    write_atomically(run.folder / DONE, "")
                else:
                    failed.append(run)
                    failures.append((code, f"{run.name}: {_reason(run.folder / LOG)}"))
                task.advance(f"{run.name} {'failed' if code else 'is trained'}")

        try:
            for stage in in_order(runs):
                for done in [pool.submit(run_one, run) for run in stage]:
                    done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in list(children):
                child.terminate()  # each saves its state and leaves
            raise
    if failures:
        reasons = "; ".join(reason for _, reason in failures)
        waiting = len(failed) - len(failures)
        also = f"; {counted(waiting, 'drafter')} that read from these were not trained"
        raise kind_of_code(failures[0][0])(
            f"{counted(len(failures), 'drafter')} failed: {reasons}{also if waiting else ''}"
        )


def require_understood(runs: Sequence[StudyRun], more: Mapping[str, Any]) -> None:
    """Raise UsageError, before anything is trained, for an arm whose options distill.py refuses.

    more: options of distill.py for all, as `train` gets them.
    """
    for run in {run.arm.name: run for run in reversed(runs)}.values():
        _resolved(run, more)


def require_as_trained(runs: Sequence[StudyRun], more: Mapping[str, Any]) -> None:
    """Raise UsageError for a drafter whose training differs from the study's file.

    more: options of distill.py for all, as `train` got them.
    """
    for run in runs:
        if changed := changes_since(run.folder, _resolved(run, more), but=LINKED):
            raise UsageError(
                f"{run.name} was trained otherwise than the study says now ({changed}): restore "
                f"the file, or give the arm another name and train it"
            )


def _resolved(run: StudyRun, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration that distill.py makes of a run's arguments."""
    from stree_pipelines.commands.distill import main  # brings the trainer along

    said, refused = io.StringIO(), io.StringIO()
    with redirect_stdout(said), redirect_stderr(refused), suppress(SystemExit):  # it prints, leaves
        main([*run.arguments(more), "--print_config"])
    if not said.getvalue():
        raise UsageError(f"{run.name}: {refused.getvalue().strip().removeprefix('error: ')}")
    return parse_yaml(said.getvalue())


def _distil(
    run: StudyRun, more: dict[str, Any], gpu: int | None, children: set[subprocess.Popen[bytes]]
) -> int:
    run.folder.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    if gpu is not None:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        environment["CUDA_VISIBLE_DEVICES"] = seen.split(",")[gpu] if seen else str(gpu)
    command = [*DISTIL, *run.arguments(more)]
    with open(run.folder / LOG, "ab") as log:
        child = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, preexec_fn=end_with_parent
        )
        children.add(child)
        try:
            return child.wait()
        finally:
            children.discard(child)


def _reason(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"{' | '.join(lines[-NUM_REASON_LINES:])} ({log})"
