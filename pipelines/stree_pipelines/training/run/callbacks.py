"""Log rows and progress of a training, and evaluate its exports while it goes on."""

from __future__ import annotations

import random
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import torch

from stree.common.errors import Interrupted, StreeError, require_owned
from stree.common.words import size
from stree_pipelines.evaluation.context import Workers
from stree_pipelines.evaluation.launch import start_process, submit_job
from stree_pipelines.training.checkpoints.export import Exports
from stree_pipelines.training.lightning_internals import is_validation_due, is_within_step
from stree_pipelines.training.module import Training
from stree_pipelines.training.run.console import say
from stree_pipelines.training.run.progress import Pace, TrainingBar

EVALUATION = (sys.executable, "-m", "stree", "eval")  # in a process of its own
# Prompts that an evaluation of exports decodes at once: its table is for watching a training, and
# costs a fraction of decoding one prompt at a time.
BATCH_SIZE = 8


class LogMetrics(pl.Callback):
    """Callback that logs a row every `trainer.log_every_n_steps` steps.

    The row goes to every logger and to the terminal's bar, or as a line to other output. Rows hold
    the step's own values, not averages since the last row: a resumed run then logs exactly the rows
    of an uninterrupted one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last = (0, 0.0, 0.0)  # tokens seen, time, untimed
        self._pace = Pace(0)
        self._logged_step = -1
        self._told_peak = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: Training) -> None:
        self._last = (pl_module.tokens_seen, time.perf_counter(), pl_module.untimed_s)
        self._pace = Pace(trainer.global_step)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Training, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if is_within_step(trainer) or step == self._logged_step:
            return
        self._pace.note(step)
        bar = trainer.progress_bar_callback
        if isinstance(bar, TrainingBar):
            bar.show(step)
        if not self._told_peak and pl_module.device.type == "cuda" and trainer.is_global_zero:
            peak = size(torch.cuda.max_memory_allocated(pl_module.device))
            say(f"peak of GPU memory in the first step: {peak} (--dry_run has the estimate)")
        self._told_peak = True
        interval = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if step % interval and step not in (1, trainer.max_steps):
            return
        self._logged_step = step
        row = pl_module.global_step_metrics()
        row["lr"] = trainer.optimizers[0].param_groups[0]["lr"]
        row["tokens_per_second"] = self._rate(pl_module)
        row["tokens_seen"] = pl_module.tokens_seen
        for logger in trainer.loggers:
            logger.log_metrics(row, step)
        if not trainer.is_global_zero:
            return
        figures = (
            f"loss {row['loss']:.4f}  {_acceptance(row, 'simulated_acceptance')}"
            f"{row['tokens_per_second']:,.0f} tok/s"
        )
        if isinstance(bar, TrainingBar):
            bar.show(step, figures)
        elif bar is None:
            eta = self._pace.eta(step, trainer.max_steps)
            print(f"step {step}/{trainer.max_steps}  {figures}  ETA {eta}", flush=True)

    def _rate(self, pl_module: Training) -> float:
        """Compute tokens per second since the last row, without exports, evaluations and
        validation."""
        tokens, then, untimed = self._last
        now = time.perf_counter()
        self._last = (pl_module.tokens_seen, now, pl_module.untimed_s)
        busy_s = (now - then) - (pl_module.untimed_s - untimed)
        return (pl_module.tokens_seen - tokens) / max(busy_s, 1e-9)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Training) -> None:
        self._validation_start = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Training) -> None:
        pl_module.untimed_s += time.perf_counter() - self._validation_start
        row = pl_module.validation_metrics
        for logger in trainer.loggers:
            logger.log_metrics(row, trainer.global_step)
        if trainer.is_global_zero:
            print(
                f"step {trainer.global_step}/{trainer.max_steps}  "
                f"validation loss {row['val_loss']:.4f}  "
                f"{_acceptance(row, 'val_simulated_acceptance')}".rstrip(),
                flush=True,
            )


class EvaluationFailed(StreeError):
    """Error of a finished training with failed evaluations; its exit code is the first one's."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class EvaluateExports(pl.Callback):
    """Callback that evaluates each export while training goes on, in batches of prompts.

    `eval_spec.py --run RUN` with the same --config and --batch_size gives the same rows.

    `inline` evaluates in this process, between two steps, and leaves the random numbers of the
    training as they were. `process` starts `eval_spec.py` and waits for it at the training's end.
    `slurm` submits `slurm/eval_spec.sh` and never waits; a warning has the command to type when the
    submission is refused. In all modes options, benchmarks and trees are checked before the first
    step, and the training state of the same step is saved first. An evaluation that fails is
    reported and stops nothing: `finish` raises at the end.
    """

    def __init__(
        self,
        mode: Literal["off", "inline", "process", "slurm"] = "off",
        config: str | None = None,
        batch_size: int | None = None,
        visible_devices: str | None = None,
        sbatch_options: list[str] | None = None,
    ) -> None:
        """
        Args:
            mode: inline, between two steps of the training; process, in a process of its own while
                the training goes on; slurm, a job.
            config: YAML file of eval_spec.py's options (benchmarks, methods, limit, …).
            batch_size: prompts decoded at once (default: `config`'s, or 8).
            visible_devices: of `process`: its CUDA_VISIBLE_DEVICES, such as a GPU that the training
                leaves free (default: the training's).
            sbatch_options: of `slurm`: options before the script's name, such as
                ["--gpus-per-node=1", "--time=30"].
        """
        super().__init__()
        self.mode, self.config, self.batch_size = mode, config, batch_size
        self.visible_devices, self.sbatch_options = visible_devices, sbatch_options
        require_owned(self, {
            "visible_devices": ("mode", "process"), "sbatch_options": ("mode", "slurm"),
        }, "evaluation.")
        # Set by the entry point before `fit`.
        self.exports: Exports | None = None
        self.target: str = ""
        self.out: Path | None = None
        self._evaluation: Any = None
        self._processes: list[tuple[str, subprocess.Popen]] = []
        self._evaluated_step = -1
        self._evaluate_after_validation = False
        self._failures: list[tuple[str, int]] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self.mode == "inline":
            self._evaluation = self._make(self._settings_on(trainer.strategy.root_device))
        else:
            self.require_settings()

    def require_settings(self) -> None:
        """Raise now every error that the evaluations would raise after an export."""
        if self.mode != "off":
            self._make(self._settings(), workers=Workers())

    def _make(self, settings: Any, **options: Any) -> Any:
        from stree_pipelines.evaluation.evaluate import Evaluation

        with untouched_training_state():
            return Evaluation(settings, **options)

    def _options(self) -> list[str]:
        return [*self._decoding_options(), "--target", self.target, "--out", str(self.out)]

    def _decoding_options(self) -> list[str]:
        """Return the options in rising order of precedence: our default, the config, the user's
        own."""
        options = [] if self.batch_size is not None else ["--batch_size", str(BATCH_SIZE)]
        options += ["--config", self.config] if self.config else []
        if self.batch_size is not None:
            options += ["--batch_size", str(self.batch_size)]
        return options

    def _completing_command(self) -> str:
        assert self.out is not None
        return shlex.join(
            ["eval_spec.py", "--run", str(self.out.parent), *self._decoding_options()]
        )

    def _settings(self) -> Any:
        from stree_pipelines.commands.eval_spec import build_parser
        from stree_pipelines.evaluation.plan import settings_of

        return settings_of(build_parser().parse_args(self._options()).as_dict())

    def _settings_on(self, training: torch.device) -> Any:
        """Return the settings, with device `auto` as the GPU that this process trains on."""
        settings = self._settings()
        if training.type == "cuda" and settings.device in ("auto", "cuda"):
            return replace(settings, device=str(training))
        return settings

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Training, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if self.mode == "off" or step == self._evaluated_step or is_within_step(trainer):
            return
        assert self.exports is not None
        if step not in self.exports.export_steps(trainer.max_steps):
            return
        self._evaluated_step = step
        # TrainingCheckpoints saves after a validation that is due now, and before this.
        self._evaluate_after_validation = is_validation_due(trainer)
        if not self._evaluate_after_validation:
            self._evaluate(trainer, pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Training) -> None:
        if self._evaluate_after_validation:
            self._evaluate_after_validation = False
            self._evaluate(trainer, pl_module)

    def _evaluate(self, trainer: pl.Trainer, pl_module: Training) -> None:
        assert self.exports is not None
        path = str(self.exports.path_of(trainer.global_step))
        if self.mode == "inline":
            with pl_module.untimed(), untouched_training_state():
                self._evaluate_here(path)
        elif trainer.is_global_zero:
            arguments = [*self._options(), "--checkpoint", path]
            if self.mode == "process":
                process = start_process(EVALUATION, arguments, self.visible_devices)
                self._processes.append((path, process))
                return
            assert self.out is not None
            with pl_module.untimed():
                name = f"eval-{self.out.resolve().parent.name}"
                message, submitted = submit_job(arguments, self.sbatch_options or [], name)
            if submitted:
                print(f"evaluation of {path}: {message}", flush=True)
            else:
                print(f"warning: no evaluation of {path}: {message}", file=sys.stderr, flush=True)

    def _evaluate_here(self, path: str) -> None:
        try:
            self._evaluation.evaluate(path)
        except Exception as error:
            # The training is worth more than a row that `eval_spec.py --run` can still add.
            if isinstance(error, StreeError):
                self._fail(path, error.exit_code, str(error))
            else:
                self._fail(path, 1, f"{type(error).__name__}: {error}")

    def finish(self) -> None:
        """Wait for the processes that were started; for the end of the command.

        Raises EvaluationFailed when an evaluation failed, and Interrupted.
        """
        if self._processes:
            print(f"waiting for {len(self._processes)} evaluations", flush=True)
        try:
            for path, process in self._processes:
                code = process.wait()
                if code:
                    self._fail(path, code, f"it ended with code {code}")
        except KeyboardInterrupt:
            raise Interrupted(
                f"interrupted; the training is done: {self._completing_command()} completes the "
                "rows"
            ) from None
        if self._failures:
            first_code = self._failures[0][1]
            raise EvaluationFailed(
                f"the training is done, but {len(self._failures)} of its evaluations failed (see "
                f"above): {self._completing_command()} completes the rows",
                first_code if first_code > 0 else 1,  # a signal's number is negative
            )

    def _fail(self, path: str, code: int, reason: str) -> None:
        print(f"evaluation of {path} failed: {reason}", file=sys.stderr, flush=True)
        self._failures.append((path, code))


@contextmanager
def untouched_training_state() -> Iterator[None]:
    """Run the block like a process of its own, and restore the training's random numbers.

    Inside, PyTorch has its default precision and algorithms.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    python_state, numpy_state = random.getstate(), np.random.get_state()
    precision = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _acceptance(row: Mapping[str, float], name: str) -> str:
    """Format the simulated acceptance for a line of 80 columns; "" when no drafter is trained."""
    return f"acceptance {row[name]:.3f}  " if name in row else ""
