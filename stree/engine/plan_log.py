"""Plan log: a run of a scheduler as JSON lines, and its replay without a model or by a worker.

Each line is an `Event`: a call of the scheduler, with what the call told it or what it planned. A
number that JSON lacks is a string: "Infinity", "-Infinity" or "NaN".
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from stree.common.errors import BadData
from stree.common.files import reporting_refusals
from stree.engine.plan import Limits, Report, SavedSettings, SavedTree, StepPlan
from stree.engine.scheduler import Scheduler
from stree.engine.sequence import RunningSequence, SharedPrompt, StepOutput
from stree.engine.stop_rule import StopRule
from stree.generation import DecodingStats
from stree.speculation_profile import first_fault
from stree.tree_policy.policy import TreePolicy
from stree.trees.token_tree import StepTree

if TYPE_CHECKING:
    from stree.engine.worker import Worker  # replays by the scheduler need no PyTorch


@dataclass(frozen=True)
class Admission:
    """A sequence as it is admitted (`RunningSequence`); `shared` numbers its `SharedPrompt`."""

    prompt: list[int]
    generation: SavedSettings
    eos_ids: tuple[int, ...]
    tree: SavedTree | None
    num_to_keep: int
    shared: int | None
    left: int


@dataclass(frozen=True)
class Event:
    """A line of a plan log; only what its call has is written.

    Attributes:
        call: The scheduler's method; "begin" in the first line, and "drop_shared" where no request
            of several answers to one prompt is left that could still be admitted.
        limits, tree, policy: Arguments of the scheduler; of the policy its name.
        budget, bytes_each: Arguments of `limit_prefixes`.
        sequence: The sequence of `admit`.
        row, keep: Arguments of `release`.
        number: Plan of `abandon`, None for the oldest without a report; prompt of `drop_shared`.
        count: Number of plans that `drop_useless` has dropped.
        plan: The plan that was made; None if there was nothing to plan.
        report: Argument of `take`.
    """

    call: Literal[
        "begin", "admit", "release", "limit_prefixes", "forget_prefixes", "drop_shared",
        "drop_useless", "plan", "plan_changes", "abandon", "take",
    ]
    limits: Limits | None = None
    tree: SavedTree | None = None
    policy: str = ""
    budget: float = 0.0
    bytes_each: tuple[int, int] = (0, 0)
    sequence: Admission | None = None
    row: int = 0
    keep: bool = False
    number: int | None = None
    count: int = 0
    plan: StepPlan | None = None
    report: Report | None = None

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", ser_json_inf_nan="strings")


EVENT = TypeAdapter(Event)


class LoggedScheduler(Scheduler):
    """Scheduler that writes each call to a file as soon as it is done.

    Args:
        path: A new file, or one to replace.
        limits, tree_policy, tree: As for `Scheduler`; the policy has learned nothing yet.

    Raises:
        CannotWrite: If the file cannot be made. A disk that fills up later ends the file with a
            warning, and decoding goes on.
    """

    def __init__(
        self, path: str | os.PathLike[str], limits: Limits, tree_policy: TreePolicy, tree: StepTree
    ) -> None:
        super().__init__(limits, tree_policy, tree)
        with reporting_refusals(Path(path), codes=None):
            self._file: IO[bytes] | None = open(path, "wb", 0)  # noqa: SIM115
        self._shared = weakref.WeakKeyDictionary[SharedPrompt, int]()
        self._num_shared = 0
        self._dropped: deque[int] = deque()  # shared prompts that nobody holds any more
        self._write(Event("begin", limits=limits, tree=tree, policy=tree_policy.name))

    def close(self) -> None:
        """End the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _write(self, event: Event) -> None:
        while self._dropped:
            number = self._dropped.popleft()
            self._write(Event("drop_shared", number=number))
        if self._file is not None:
            try:
                self._file.write(EVENT.dump_json(event, exclude_defaults=True) + b"\n")
            except (OSError, ValueError) as error:  # a stop string may be none that UTF-8 has
                warnings.warn(f"the plan log ends here: {error}", stacklevel=3)
                self.close()

    def admit(self, sequence: RunningSequence) -> int:
        shared, number = sequence.shared, None
        if shared is not None and (number := self._shared.get(shared)) is None:
            self._num_shared, number = self._num_shared + 1, self._num_shared
            self._shared[shared] = number
            weakref.finalize(shared, self._dropped.append, number).atexit = False
        row = super().admit(sequence)
        self._write(Event("admit", sequence=Admission(
            sequence.prompt, sequence.generation, tuple(sorted(sequence.stop.eos_ids)),
            sequence.tree, sequence.num_to_keep, number, 0 if shared is None else shared.left,
        )))
        return row

    def release(self, row: int, keep: bool = False) -> RunningSequence:
        sequence = super().release(row, keep)
        self._write(Event("release", row=row, keep=keep))
        return sequence

    def limit_prefixes(self, budget: float, bytes_each: tuple[int, int]) -> None:
        super().limit_prefixes(budget, bytes_each)
        self._write(Event("limit_prefixes", budget=budget, bytes_each=bytes_each))

    def forget_prefixes(self) -> None:
        super().forget_prefixes()
        self._write(Event("forget_prefixes"))

    def drop_useless(self) -> int:
        if count := super().drop_useless():
            self._write(Event("drop_useless", count=count))
        return count

    def plan(self) -> StepPlan | None:
        plan = super().plan()
        self._write(Event("plan", plan=plan))
        return plan

    def plan_changes(self) -> StepPlan | None:
        if plan := super().plan_changes():
            self._write(Event("plan_changes", plan=plan))
        return plan

    def abandon(self, plan: StepPlan | None = None) -> list[int]:
        self._write(Event("abandon", number=None if plan is None else plan.number))
        return super().abandon(plan)

    def take(self, report: Report) -> list[StepOutput]:
        self._write(Event("take", report=report))
        return super().take(report)


def read_plan_log(path: str | os.PathLike[str]) -> Iterator[Event]:
    """Yield the events of a plan log. Raises `BadData` for a line that is none."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield EVENT.validate_json(line)
            except ValidationError as error:
                raise BadData(
                    f"{path} is no plan log: line {number}: {first_fault(error)}; "
                    "write another (BatchDecoder.log_plans)"
                ) from error


def replay_by_scheduler(
    events: Iterable[Event], tree_policy: TreePolicy, tokenizer: Any = None
) -> Iterator[tuple[StepPlan | None, StepPlan | None]]:
    """Tell a new scheduler what a log tells; yield each plan that it makes, and that of the log.

    Args:
        events: All lines of a log.
        tree_policy: A new one, as the log's was at its first line, with the same costs.
        tokenizer: Finds stop strings; None if no request has any.

    The plans are equal, or the scheduler depends on something that is not in the log: `BadData` is
    raised after the first plan that is not the log's, on which the rest of the log depends.
    """
    (begin, *rest), shared = events, dict[int, SharedPrompt]()
    assert begin.call == "begin" and begin.limits is not None and begin.tree is not None
    scheduler, plans = Scheduler(begin.limits, tree_policy, begin.tree), dict[int, StepPlan]()
    for event in rest:
        match event.call:
            case "admit" if (given := event.sequence) is not None:
                stop = StopRule(given.generation, (), tokenizer)
                stop.eos_ids = frozenset(given.eos_ids)
                prompt = None if given.shared is None else shared.setdefault(
                    given.shared, SharedPrompt(given.left)
                )
                scheduler.admit(RunningSequence(
                    given.prompt, given.generation, given.tree, given.num_to_keep, stop,
                    DecodingStats(), prompt,
                ))
                del prompt  # only `shared` holds it, and the rows
            case "release":
                scheduler.release(event.row, event.keep)
            case "drop_shared":
                shared.pop(event.number or 0, None)
            case "limit_prefixes":
                scheduler.limit_prefixes(event.budget, event.bytes_each)
            case "abandon":
                scheduler.abandon(None if event.number is None else plans[event.number])
            case "take" if event.report is not None:
                scheduler.take(event.report)
            case "plan" | "plan_changes":
                plan = scheduler.plan() if event.call == "plan" else scheduler.plan_changes()
                if plan is not None:
                    plans = {plan.number: plan}
                yield plan, event.plan
                if plan != event.plan:
                    raise BadData(
                        "the scheduler makes another plan than the log has: replay the log with "
                        "the version and the step times that it was written with"
                    )
            case _:
                getattr(scheduler, event.call)()


def replay_by_worker(events: Iterable[Event], worker: Worker) -> Iterator[tuple[Report, Report]]:
    """Let a new worker execute the plans of a log; yield each report of it, and that of the log.

    Plans that failed are left out.
    """
    events = list(events)
    failed = {each.number for each in events if each.call == "abandon"}
    for event in events:
        if event.plan is not None and event.plan.number not in failed:
            worker.execute(event.plan)
        elif event.report is not None:
            yield worker.report(), event.report
        for _ in range(event.count + (event.call == "abandon" and event.number is None)):
            worker.drop()
