"""Export the trained model at chosen steps, as checkpoint folders that load by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch

from stree.checkpoints.load_save import save_model
from stree.checkpoints.partners import TARGET_WEIGHTS
from stree.common.errors import CheckpointRefused, UsageError
from stree.common.files import make_directory, point_to, sweep_leftovers, verify_manifest
from stree_pipelines.training.checkpoints.decay_phase import as_it_was, run_decay
from stree_pipelines.training.checkpoints.saving import TrainingCheckpoints, step_directory
from stree_pipelines.training.lightning_internals import is_within_step
from stree_pipelines.training.module import Training
from stree_pipelines.training.optimization import OptimizerConfig
from stree_pipelines.training.parallel.sharding import whole_model
from stree_pipelines.training.run.console import say


def log_spaced_steps(first: int, last: int, count: int) -> list[int]:
    """Return `count` steps from `first` to `last` at equal ratios, rounded; fewer where they
    coincide."""
    if not 1 <= first <= last or count < 1:
        raise UsageError(
            f"export: wanted 1 <= first <= last step and at least 1 point, got first {first}, "
            f"last {last}, {count} points"
        )
    ratio = (last / first) ** (1 / max(count - 1, 1))
    return sorted({round(first * ratio**index) for index in range(count - 1)} | {last})


class Exports(pl.Callback):
    """Writes RUN/<folder>/step-%08d/ and moves RUN/<folder>/latest to it, both atomically.

    Each has the MambaInLlama layout with tokenizer, provenance.json and MANIFEST.json. The last
    step is always exported. With a learning rate that decays for each export (`decays`), all but
    the last are made before their step, at the end of a branch (decay_phase.py).
    """

    def __init__(
        self,
        steps: list[int] | None = None,
        every_n_steps: int | None = None,
        log_spaced: int | None = None,
        first: int = 10,
        dtype: Literal["float32", "bfloat16"] = "float32",
    ) -> None:
        """
        Args:
            steps: the steps to export at. Give one of `steps`, `every_n_steps` and `log_spaced`;
                with none of them only the last step is exported.
            every_n_steps: export at its multiples.
            log_spaced: number of exports from step `first` to the last, at equal ratios.
            first: step at which log spacing starts.
            dtype: of the stored weights (dt_bias, A_log and D stay fp32).
        """
        super().__init__()
        given = [value for value in (steps, every_n_steps, log_spaced) if value is not None]
        if len(given) > 1:
            raise UsageError(
                "export: give one of steps, every_n_steps and log_spaced (the others null)"
            )
        counts = [*(steps or []), *(n for n in (every_n_steps, log_spaced, first) if n is not None)]
        if any(count < 1 for count in counts):
            raise UsageError("export: steps, every_n_steps, log_spaced and first are at least 1")
        self.steps, self.every_n_steps = steps, every_n_steps
        self.log_spaced, self.first = log_spaced, first
        self.dtype = getattr(torch, dtype)
        # Set by the entry point before `fit`.
        self.directory: Path | None = None
        self.tokenizer: Any = None
        self.provenance: dict[str, Any] = {}
        self.decays: OptimizerConfig | None = None
        self._done_step = -1

    def export_steps(self, max_steps: int) -> list[int]:
        """Return all steps at which a run of `max_steps` exports, ascending."""
        if self.log_spaced is not None:
            return log_spaced_steps(min(self.first, max_steps), max_steps, self.log_spaced)
        if self.every_n_steps is not None:
            return sorted({*range(self.every_n_steps, max_steps, self.every_n_steps), max_steps})
        return sorted({step for step in self.steps or [] if step < max_steps} | {max_steps})

    def branches(self, max_steps: int) -> list[tuple[int, int]]:
        """Return (first, last) step of the decay of each export but the last, in optimiser steps.

        Empty when the exports have no decay phases.
        """
        if self.decays is None:
            return []
        early = self.export_steps(max_steps)[:-1]
        return [(self.decays.decay_begin(step), step) for step in early]

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.is_global_zero:
            assert self.directory is not None
            make_directory(self.directory)
            sweep_leftovers(self.directory)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Training, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if is_within_step(trainer) or step == self._done_step:
            return
        early = {last for _, last in self.branches(trainer.max_steps)}
        if step in self.export_steps(trainer.max_steps) and step not in early:
            self._done_step = step
            with pl_module.untimed():
                self._export(trainer, pl_module, step)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: Training, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % trainer.accumulate_grad_batches:
            return
        for first, last in self.branches(trainer.max_steps):
            if first == trainer.global_step and not self._exists_everywhere(trainer, last):
                checkpoints = TrainingCheckpoints.of(trainer)
                say(f"step {first}: {last - first} steps of the decay of export {last} begin")
                with pl_module.untimed(), as_it_was(trainer, pl_module):
                    is_done = run_decay(
                        trainer, pl_module, first, last, partial(checkpoints.must_stop, trainer)
                    )
                    if is_done:
                        self._export(trainer, pl_module, last, {"decayed_from_step": first})
                if not is_done:
                    checkpoints.stop_before_batch(trainer)

    def _exists_everywhere(self, trainer: pl.Trainer, step: int) -> bool:
        here = not trainer.is_global_zero or self._exists(self.path_of(step))
        return trainer.strategy.reduce_boolean_decision(here)

    def path_of(self, step: int) -> Path:
        assert self.directory is not None
        return step_directory(self.directory, step)

    def _export(
        self, trainer: pl.Trainer, pl_module: Training, step: int, more: Mapping[str, Any] = {}
    ) -> None:
        pl_module.finite.require_weights()
        path = self.path_of(step)
        metrics = pl_module.global_step_metrics()
        model = whole_model(pl_module.exported, trainer.strategy)
        if trainer.is_global_zero:
            if not self._exists(path):
                provenance = {
                    "step": step,
                    **self.provenance,
                    "tokens_seen": pl_module.tokens_seen,
                    "loss": metrics["loss"],
                    **more,
                }
                names = ("config_hash", "tokenizer_fingerprint", TARGET_WEIGHTS)
                kept = {name: provenance[name] for name in names if name in provenance}
                if "simulated_acceptance" in metrics:
                    provenance["simulated_acceptance"] = metrics["simulated_acceptance"]
                save_model(
                    model,
                    path,
                    tokenizer=self.tokenizer,
                    extra_files={"provenance.json": json.dumps(provenance, indent=2) + "\n"},
                    dtype=self.dtype,
                    manifest_extra={"step": step, **kept},
                    overwrite=True,
                )
            point_to(path.parent / "latest", path.name)
        trainer.strategy.barrier("export")

    def _exists(self, path: Path) -> bool:
        """Return True when a valid export of this run is there already, from before a resume."""
        if not path.is_dir():
            return False
        try:
            manifest = verify_manifest(path)
        except CheckpointRefused:
            return False
        return manifest.get("config_hash") == self.provenance.get("config_hash")
