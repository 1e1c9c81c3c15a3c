"""End a run that is restarted again and again without progress.

Without the limit, every requeued job would run again into a node or a step that kills it.
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


class Restarts(pl.Callback):
    """Callback that ends a run with InvariantBroken, on all ranks, after too many vain restarts.

    RUN/restarts.json counts the starts from one step with one configuration.
    """

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        self.path = run_dir / "restarts.json"
        self.vain = 0  # restarts without progress, on the main process

    @contextmanager
    def counted(self, step: int, config: str) -> Iterator[None]:
        """Count a start from the checkpoint of `step`, unless the block is refused or interrupted.

        Progress is a checkpoint of a later step. A changed `config` (text) means that the user has
        looked at the run, and counts from 0 again. A refused run (exit codes 2, 65, 66) lost no
        work: the next start comes with another input. Interrupting is the user's own choice. On
        the main process only.
        """
        start = {"step": step, "config_sha256": hashlib.sha256(config.encode()).hexdigest()}
        try:
            before = read_json(self.path)
            is_restart = {name: before[name] for name in start} == start
            self.vain = int(before["restarts"]) + 1 if is_restart else 0
        except (OSError, ValueError, KeyError, TypeError):
            self.vain = 0
        write_atomically(self.path, json.dumps({**start, "restarts": self.vain}) + "\n")
        try:
            yield
        except (UsageError, BadData, CheckpointRefused, Interrupted, KeyboardInterrupt):
            self.forget()
            raise

    def forget(self) -> None:
        """Count from 0 again."""
        self.path.unlink(missing_ok=True)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.strategy.broadcast(self.vain) > MAX_RESTARTS:
            raise InvariantBroken(
                f"{MAX_RESTARTS} restarts of {self.path.parent} saved no step after the one they "
                f"started from: see what ended them, then delete {self.path} and run the same "
                "command again"
            )
