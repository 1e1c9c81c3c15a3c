"""Show a training on a terminal: steps, time left, and the figures logged last."""

from __future__ import annotations

import time
from contextlib import ExitStack

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar

from stree_pipelines.console.progress import EvaluationProgress, Task, clock


class Pace:
    """Estimate of the time left, by the steps since this process's first.

    The first step compiles kernels, and says nothing about the others.
    """

    def __init__(self, step: int) -> None:
        self._start, self._first, self._then = step, step, time.perf_counter()

    def note(self, step: int) -> None:
        if step == self._start + 1:
            self._first, self._then = step, time.perf_counter()

    def eta(self, step: int, max_steps: int) -> str:
        """Return the time left as h:mm:ss, or a question mark."""
        num_steps = step - self._first
        if not num_steps and step != max_steps:
            return "?"
        return clock((time.perf_counter() - self._then) * (max_steps - step) / max(num_steps, 1))


class TrainingBar(ProgressBar):
    """Progress bar of steps with the last figures; Lightning's own counts batches, without a loss.

    Lightning enables and disables it, the latter on all processes but the main one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._progress = EvaluationProgress()
        self._task: Task | None = None
        self._open = ExitStack()
        self._figures = ""

    def enable(self) -> None:
        self._progress.enabled = True

    def disable(self) -> None:
        self._progress.enabled = False

    def show(self, step: int, figures: str = "") -> None:
        """Show the steps done, with new figures or those shown last."""
        self._figures = figures or self._figures
        if self._task is not None:
            self._task.show(step, self._figures)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        steps = self._progress.task("step", trainer.max_steps, trainer.global_step)
        self._task = self._open.enter_context(steps)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._open.close()
        self._task = None

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self.on_train_end(trainer, pl_module)
