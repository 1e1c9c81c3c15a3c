"""Step a batch: plan, execute and report, until rows have outputs."""

from __future__ import annotations

import warnings
from typing import Any

from stree.common.threads import for_decoding

from stree.batching.checks import not_finite
from stree.engine.plan import StepPlan
from stree.engine.scheduler import Scheduler
from stree.engine.sequence import RunningSequence, StepOutput
from stree.engine.worker import Worker


class StepLoop:
    """The steps of a decoder: a scheduler plans them, a worker executes and reports them.

    Attributes:
        target: The target.
        scheduler: Scheduler of the steps; a decoder may replace it while all rows are free.
        worker: Worker that executes the plans.
        failure: The error of stopping a freed row, after which no row can be freed; None before.
    """

    def __init__(self, target: Any, scheduler: Scheduler, worker: Worker) -> None:
        self.target, self.scheduler, self.worker = target, scheduler, worker
        self.failure: Exception | None = None
        self._outputs: list[StepOutput] = []  # of reports that were read between two steps

    def admit(self, sequence: RunningSequence) -> int:
        """Give a sequence a row, and return the row."""
        row = self.scheduler.admit(sequence)
        try:
            self._execute_changes()
        except BaseException:
            self.scheduler.release(row)
            self._clean_up()
            raise
        return row

    def release(self, row: int, keep: bool) -> RunningSequence:
        """Free a row, and return its sequence; warn if no prefix can be kept of it."""
        sequence = self.scheduler.release(row, keep)
        self._outputs = [each for each in self._outputs if each.row != row]
        try:
            self._execute_changes()
        except Exception as error:
            self._clean_up()
            if keep:
                warnings.warn(f"no prefix is kept of row {row}: {error}", stacklevel=4)
        return sequence

    def step(self) -> list[StepOutput]:
        """Plan, execute and report until rows have outputs; return these, in order."""
        scheduler = self.scheduler
        with for_decoding(self.target, self.worker.device):
            is_told = False
            while not is_told:
                for _ in range(scheduler.drop_useless()):
                    self.worker.drop()
                reads_alone = False
                while scheduler.awaits_steps < scheduler.limits.num_in_flight and not reads_alone:
                    if (plan := scheduler.plan()) is None:
                        break
                    try:
                        self._execute(plan)
                    except Exception as error:
                        is_told = self._end(scheduler.abandon(plan), error)
                        break
                    reads_alone = not plan.trees  # the first tokens come before any step
                if is_told or not scheduler.awaits_reports:
                    break
                scheduler.look_ahead()
                is_told = self.take_report()
                while reads_alone and scheduler.awaits_reports:
                    is_told |= self.take_report()
        outputs, self._outputs = self._outputs, []
        return outputs

    def _execute_changes(self) -> None:
        if (plan := self.scheduler.plan_changes()) is not None:
            with for_decoding(self.target, self.worker.device):
                try:
                    self._execute(plan)
                except Exception:
                    self.scheduler.abandon(plan)
                    raise

    def settle(self) -> None:
        """Execute the changes of rows, and take all reports that are awaited."""
        self._execute_changes()
        while self.scheduler.awaits_reports:
            self.take_report()

    def _execute(self, plan: StepPlan) -> None:
        try:
            self.worker.execute(plan)
        except Exception:
            raise
        except BaseException:  # the user stops it
            self.scheduler.abandon(plan)
            raise

    def take_report(self) -> bool:
        """Wait for the oldest report and keep its outputs; return whether it tells of any row."""
        try:
            report = self.worker.report()
        except Exception as error:
            return self._end(self.scheduler.abandon(), error)
        for output in self.scheduler.take(report):
            if output.finish_reason == "error" and output.error is None:
                sequence = self.scheduler.taken(output.row)
                output.error = self.worker.error_of(output.row) or not_finite(
                    output.culprit, self.worker.step.models(), sequence
                )
            self._outputs.append(output)
        return bool(report.rows or report.firsts or report.failed)

    def _end(self, rows: list[int], error: Exception) -> bool:
        """Keep the outputs of rows that an error has ended; raise it if it has ended none."""
        if not rows:
            raise error
        self._outputs += [StepOutput(row, [], "error", error=error) for row in rows]
        return True

    def _clean_up(self) -> None:
        """Stop the rows that a failed plan was to stop; what fails now, too, fails for good."""
        try:
            self._execute_changes()
        except Exception as error:
            self.failure = error
