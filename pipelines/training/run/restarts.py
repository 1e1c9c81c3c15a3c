"""End a run that is restarted again and again without progress.

Without the limit, every requeued job would run again into a node or a step that kills it.
RUN/restarts.json counts the starts from one step with one configuration.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lightning.pytorch as pl

from stree.common.errors import BadData, CheckpointRefused, Interrupted, InvariantBroken, UsageError
from stree.common.files import write_atomically
from stree.common.plain_data import read_json

MAX_RESTARTS = 3
FILE_NAME = "restarts.json"


def note_start(run_dir: Path, step: int, config: str) -> int:
    """Count a start of RUN from the checkpoint of `step`; returns the restarts without progress.

    Progress is a checkpoint of a later step. A changed `config` (text) means that the user has
    looked at the run, and counts from 0 again. On the main process only.
    """
    path = run_dir / FILE_NAME
    start = {"step": step, "config_sha256": hashlib.sha256(config.encode()).hexdigest()}
    try:
        before = read_json(path)
        is_restart = {name: before[name] for name in start} == start
        restarts = int(before["restarts"]) + 1 if is_restart else 0
    except (OSError, ValueError, KeyError, TypeError):
        restarts = 0
    write_atomically(path, json.dumps({**start, "restarts": restarts}) + "\n")
    return restarts


def forget_starts(run_dir: Path) -> None:
    """Count from 0 again."""
    (run_dir / FILE_NAME).unlink(missing_ok=True)


@contextmanager
def uncounted_ends(run_dir: Path) -> Iterator[None]:
    """Forget the starts when the block is refused (exit codes 2, 65, 66) or interrupted.

    A refused run lost no work: the next start comes with another input. Interrupting is the user's
    own choice.
    """
    try:
        yield
    except (UsageError, BadData, CheckpointRefused, Interrupted, KeyboardInterrupt):
        forget_starts(run_dir)
        raise


class RestartLimit(pl.Callback):
    """Callback that ends a run with InvariantBroken, on all ranks, after too many vain restarts."""

    def __init__(self, run_dir: Path, restarts: int) -> None:
        """
        Args:
            restarts: what `note_start` returned; any number on other ranks than the main one.
        """
        super().__init__()
        self.run_dir, self.restarts = run_dir, restarts

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.strategy.broadcast(self.restarts) > MAX_RESTARTS:
            raise InvariantBroken(
                f"{MAX_RESTARTS} restarts of {self.run_dir} saved no step after the one they "
                f"started from: see what ended them, then delete {self.run_dir / FILE_NAME} and "
                "run the same command again"
            )
