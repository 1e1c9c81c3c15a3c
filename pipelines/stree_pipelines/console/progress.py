"""Show a long command's progress: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

if TYPE_CHECKING:
    from stree.batching.batch_decoder import BatchDecoder
    from stree.decoder import Decoder
    from stree.generation import GenerationConfig
    from stree.tree_policy.step_times import StepTimes

LINE_EVERY_S = 10.0


class EvaluationProgress:
    """Display of prompts done, τ and tokens/s so far, and the time left.

    Only the main process shows it, so that workers do not write over each other.
    """

    def __init__(self, stream: TextIO | None = None, enabled: bool = True) -> None:
        self.stream = stream or sys.stderr
        self.enabled = enabled
        self._console: Console | None = None  # of the bar, while there is one

    def say(self, message: str) -> None:
        if not self.enabled:
            return
        if self._console is None:
            print(message, file=self.stream, flush=True)
        else:  # above the bar, which would be drawn over it
            self._console.print(message, markup=False, highlight=False, emoji=False)

    @contextmanager
    def task(self, label: str, total: int, done: int = 0) -> Iterator[Task]:
        """Track `total` steps, of which some may be `done` before."""
        if not self.enabled or total == 0:
            yield Task(lambda done, detail: None)
        elif self.stream.isatty():
            self._console = Console(file=self.stream)
            try:
                with _Bar(self._console) as bar:
                    number = bar.add_task(label, total=total, completed=done, detail="")
                    yield Task(
                        lambda done, detail: bar.update(number, completed=done, detail=detail), done
                    )
            finally:
                self._console = None
        else:
            yield Task(self._lines(label, total, done), done)

    def _lines(self, label: str, total: int, before: int) -> Callable[[int, str], None]:
        started = last_line = time.monotonic()

        def show(done: int, detail: str) -> None:
            nonlocal last_line
            now = time.monotonic()
            if done == total or now - last_line >= LINE_EVERY_S:
                last_line = now
                left = clock((now - started) / (done - before) * (total - done))
                line = f"{label}  {done}/{total}  {detail}  ETA {left}"
                print(line, file=self.stream, flush=True)

        return show


class _Bar(Progress):
    """Bar with count and time left, and the last detail on a line of its own.

    There the figures have all of a narrow terminal, and take nothing from the bar.
    """

    def __init__(self, console: Console) -> None:
        columns = [
            TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(),
            TextColumn("ETA"), TimeRemainingColumn(),
        ]
        # What a command prints goes above the bar, or where the user has sent it
        super().__init__(*columns, console=console, redirect_stdout=sys.stdout.isatty())

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        for detail in (task.fields["detail"] for task in self.tasks):
            if detail:
                yield Text(f"  {detail}", no_wrap=True, overflow="ellipsis")


class Task:
    """Count of steps; show(steps done, detail) is called at each."""

    def __init__(self, show: Callable[[int, str], None], done: int = 0) -> None:
        self.show, self.done = show, done

    def advance(self, detail: str = "") -> None:
        """Count one step as done, and show `detail`."""
        self.done += 1
        self.show(self.done, detail)


def measured_step_times(
    decoder: Decoder | BatchDecoder, choice: str, generation: GenerationConfig,
    say: Callable[[str], None],
) -> StepTimes:
    """Measure step times, with a message before and after: many rows and trees take long.

    choice: the trees by their names; generation: the settings of the decoding to come.
    """
    say(
        f"measuring what steps cost, plain and with {choice}, at T = {generation.temperature:g}, "
        "to choose by"
    )
    costs = decoder.measure_step_times(generation=generation)
    say(str(costs))
    return costs


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Print the name of a command's stage, and at its end the seconds it took."""
    print(f"{name} …", end=" ", file=sys.stderr, flush=True)
    started = time.monotonic()
    try:
        yield
    finally:
        print(f"{time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    """Format seconds as h:mm:ss, without the hours when there are none."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
