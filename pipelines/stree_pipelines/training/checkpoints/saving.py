"""Save training state on disk: whole or absent, and verified before use.

A checkpoint is a folder `RUN/checkpoints/step-%08d/` of state.pt, which PyTorch reads without
running code (`weights_only`), and MANIFEST.json. Lightning's own writer is not used: it copies
across filesystems without fsync.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import Tensor
from torch.utils._pytree import tree_leaves

from stree.checkpoints.plan.pickles import load_without_code
from stree.common.errors import (
    CheckpointRefused,
    Interrupted,
    Preempted,
    UsageError,
    first_line,
)
from stree.common.files import (
    make_directory,
    publish_directory,
    remove_directory,
    sweep_leftovers,
    verify_manifest,
)
from stree_pipelines.console.command_line import typed_command
from stree_pipelines.data.datamodule import recount_micro_batches
from stree_pipelines.training.lightning_internals import (
    is_validation_due,
    is_within_step,
    uncount_next_batch,
)
from stree_pipelines.training.run.stopping import StopSignals

STATE_NAME = "state.pt"
STATE_KEYS = ("state_dict", "optimizer_states", "loops", "global_step", "random_state")
_STEP_DIRECTORY = re.compile(r"step-(\d{8,})")


def step_directory(parent: Path, step: int) -> Path:
    """Return parent/step-%08d."""
    return parent / f"step-{step:08d}"


def latest_valid(
    run_dir: str | os.PathLike[str], warn: Callable[[str], None] | None = None
) -> Path | None:
    """Return the checkpoint of the highest step under RUN/checkpoints that verifies, or None.

    Each one skipped is named through `warn` (default: a line on stderr). Raises CheckpointRefused
    when there are checkpoints and none is valid: starting over silently would lose the run.
    """
    warn = warn or (lambda line: print(line, file=sys.stderr))
    found = _steps_under(Path(run_dir) / "checkpoints")
    skipped = []
    for step, path in reversed(found):
        try:
            manifest = verify_manifest(path)
            if manifest.get("step") != step:
                raise CheckpointRefused(f"{path} says step {manifest.get('step')}")
        except (CheckpointRefused, FileNotFoundError) as error:
            if not path.exists():
                continue  # a training that is running has made room for later ones
            skipped.append(path.name)
            warn(f"skipping checkpoint {path.name}: {error}")
            continue
        return path
    if found != _steps_under(Path(run_dir) / "checkpoints"):
        return latest_valid(run_dir, warn)
    if skipped:
        raise CheckpointRefused(
            f"none of the checkpoints in {run_dir}/checkpoints is valid ({', '.join(skipped)}): "
            "restore one, or start in another run folder"
        )
    return None


def _steps_under(parent: Path) -> list[tuple[int, Path]]:
    """List (step, path) of every step-* folder, ascending."""
    if not parent.is_dir():
        return []
    matches = ((_STEP_DIRECTORY.fullmatch(path.name), path) for path in parent.iterdir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def remove_all_but(keep_last: int, directory: Path) -> None:
    """Keep the checkpoints of the highest steps in `directory`."""
    for _, path in _steps_under(directory)[:-keep_last]:
        remove_directory(path)


class SafeCheckpointIO(CheckpointIO):
    """Writer and reader of Lightning's checkpoint dict as a published directory.

    `storage_options` of `Trainer.save_checkpoint` are added to its manifest.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str],
        storage_options: Mapping[str, object] | None = None,
    ) -> None:
        tensors = (each for each in tree_leaves(checkpoint) if isinstance(each, Tensor))
        needed_bytes = sum(tensor.nbytes for tensor in tensors)
        extra = {"step": checkpoint["global_step"], **(storage_options or {})}
        # An existing folder here failed verification at start, or it would have been resumed from.
        with publish_directory(path, extra, overwrite=True, needed_bytes=needed_bytes) as folder:
            _write(checkpoint, folder / STATE_NAME)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read the checkpoint dict, tensors on the CPU.

        Raises CheckpointRefused when it does not verify.
        """
        folder = Path(path)
        verify_manifest(folder)
        try:
            state: dict[str, Any] = load_without_code(folder / STATE_NAME, mmap=False)
            if missing := [name for name in STATE_KEYS if name not in state]:
                raise ValueError(f"it lacks {', '.join(missing)}")
            return state
        except Exception as error:  # the unpickler raises whatever damaged bytes make of it
            raise CheckpointRefused(
                f"{folder} holds no training state of this program ({first_line(error)}): resume "
                "from a folder under RUN/checkpoints"
            ) from error

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        remove_directory(path)


def _write(state: dict[str, Any], path: Path) -> None:
    """Write the state, and read it as a resume will, which would refuse some values."""
    try:
        with open(path, "wb") as file:
            torch.save(state, file)
        load_without_code(path, mmap=True)
    except Exception as error:
        if isinstance(error.__context__, OSError):  # PyTorch's own error follows the disk's
            raise error.__context__ from None
        if isinstance(error, OSError | MemoryError | RuntimeError):
            raise
        raise UsageError(
            f"the training state holds what a checkpoint cannot ({first_line(error)}): "
            "keep numbers, strings, tensors, lists and dicts only"
        ) from error


class TrainingCheckpoints(pl.Callback):
    """Callback that saves the training state every N steps, at the end, and when told to stop.

    SIGTERM, SIGUSR1 and SIGINT are only noted; at the next step's end all ranks agree to stop, the
    state is saved and `Preempted` (exit code 75; 130 after SIGINT) ends the run. The same command
    then goes on from there.
    """

    def __init__(self, every_n_steps: int = 500, keep_last: int = 2) -> None:
        """
        Args:
            every_n_steps: optimiser steps between two saves; at most this much work is lost.
            keep_last: how many checkpoints stay on the disk.
        """
        super().__init__()
        if every_n_steps < 1 or keep_last < 1:
            raise UsageError(
                f"checkpoint.every_n_steps = {every_n_steps} and checkpoint.keep_last = "
                f"{keep_last} must both be at least 1"
            )
        self.every_n_steps = every_n_steps
        self.keep_last = keep_last
        # Set by the entry point before `fit`.
        self.run_dir: Path | None = None
        self.manifest_extra: dict[str, object] = {}
        self._saved_step = -1
        self._save_after_validation = False
        self._stopping = False
        self.signals = StopSignals()
        self._hosts: Any = None  # the process group of all ranks' hosts, of several
        self._random_state: list[dict[str, Any]] | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.signals.waits_for_others = False
        if trainer.world_size > 1:
            self._hosts = torch.distributed.new_group(backend="gloo")
        if trainer.is_global_zero:
            make_directory(self.directory)
            sweep_leftovers(self.directory)

    @property
    def directory(self) -> Path:
        assert self.run_dir is not None
        return self.run_dir / "checkpoints"

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._saved_step = trainer.global_step

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # Set this late, because building loaders and iterators draws random numbers, too.
        if self._random_state is not None:
            states, self._random_state = self._random_state, None
            if trainer.global_rank < len(states):
                _set_random_state(states[trainer.global_rank])

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any,
        batch_idx: int,
    ) -> None:
        step = trainer.global_step
        if is_within_step(trainer) or step == self._saved_step:
            return
        self._stopping = self.must_stop(trainer)
        if self._stopping or step % self.every_n_steps == 0 or step == trainer.max_steps:
            # Save after a validation that is due now: resuming would not repeat it.
            self._save_after_validation = is_validation_due(trainer)
            if not self._save_after_validation:
                self._save_and_maybe_stop(trainer)

    @classmethod
    def of(cls, trainer: pl.Trainer) -> TrainingCheckpoints:
        """Find the callback among the trainer's."""
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        return next(each for each in callbacks if isinstance(each, cls))

    def must_stop(self, trainer: pl.Trainer) -> bool:
        """Return True when any rank has got a signal to stop; a collective of all ranks.

        The hosts ask each other, so that none of them waits for what its device still does.
        """
        is_signalled = self.signals.number is not None
        if trainer.world_size == 1:
            return is_signalled
        flag = torch.tensor(int(is_signalled))
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=self._hosts)
        return bool(flag)

    def stop_before_batch(self, trainer: pl.Trainer) -> None:
        """Save the state of the last step's end, when the next batch has been taken already, and
        stop."""
        if trainer.global_step != self._saved_step:
            uncount_next_batch(trainer)
            self._save(trainer)
        self._stop(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._save_after_validation:
            self._save_after_validation = False
            self._save_and_maybe_stop(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save a run that ended before max_steps (max_time, a stopping callback)."""
        if trainer.global_step != self._saved_step:
            self._save(trainer)

    def _save_and_maybe_stop(self, trainer: pl.Trainer) -> None:
        self._save(trainer)
        if self._stopping:
            self._stop(trainer)

    def _stop(self, trainer: pl.Trainer) -> None:
        number = self.signals.number
        saved = f"after step {self._saved_step}; everything is saved in {self.run_dir}: "
        if trainer.strategy.reduce_boolean_decision(number == signal.SIGINT, all=False):
            # Lightning starts the other processes itself unless a launcher has.
            environment = getattr(trainer.strategy, "cluster_environment", LightningEnvironment())
            alone = isinstance(environment, LightningEnvironment)
            raise Interrupted(
                f"interrupted {saved}to go on, run{'' if alone else ' under the same launcher'}: "
                f"{typed_command()}"
            )
        name = signal.Signals(number).name if number else "a signal to another rank"
        raise Preempted(f"stopped by {name} {saved}run the same command to go on")

    def _save(self, trainer: pl.Trainer) -> None:
        step = trainer.global_step
        trainer.save_checkpoint(
            step_directory(self.directory, step),
            weights_only=False,
            storage_options=self.manifest_extra,
        )
        self._saved_step = step
        if trainer.is_global_zero:
            remove_all_but(self.keep_last, self.directory)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        states: list[Any] = [_random_state()]
        if trainer.world_size > 1:
            states = [None] * trainer.world_size
            torch.distributed.all_gather_object(states, _random_state())
        checkpoint["random_state"] = states

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._random_state = checkpoint["random_state"]
        recount_micro_batches(checkpoint, trainer.accumulate_grad_batches)


def _random_state() -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    state = {
        "torch": torch.get_rng_state(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, np.int64)), *rest),
        "python": random.getstate(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy(), *rest))
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
