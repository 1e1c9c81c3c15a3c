"""Show a training on a terminal: steps, time left, and the figures logged last."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from stree_pipelines.console.progress import clock


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
    """Progress bar of steps with the last loss; Lightning's own counts batches, without a loss."""

    def __init__(self) -> None:
        super().__init__()
        self._is_enabled = True
        self._bar: _Bar | None = None

    def enable(self) -> None:
        self._is_enabled = True

    def disable(self) -> None:
        """Hide the bar, on all processes but the main one."""
        self._is_enabled = False

    def show(self, figures: str) -> None:
        """Put `figures` below the bar."""
        if self._bar is not None:
            self._bar.figures = figures

    def advance_to(self, step: int, eta: str) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task, completed=step, eta=eta)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._is_enabled:
            self._bar = _Bar(trainer.global_step, trainer.max_steps)
            self._bar.start()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self.on_train_end(trainer, pl_module)


class _Bar(Progress):
    """Bar with the figures on a line of their own, so that both fit 80 columns."""

    def __init__(self, step: int, max_steps: int) -> None:
        self.figures = ""
        super().__init__(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("ETA {task.fields[eta]}"),
            console=Console(stderr=True),
            redirect_stdout=sys.stdout.isatty(),
            expand=True,
        )
        self.task = self.add_task("", total=max_steps, completed=step, eta="?")

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if self.figures:
            yield Text(self.figures, no_wrap=True, overflow="ellipsis")
