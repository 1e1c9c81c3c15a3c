"""Step times by number of rows and tree, their file, and the speeds of trees by them."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from stree.common.errors import BadData, NotFound, UsageError
from stree.common.files import write_atomically
from stree.common.plain_data import read_text
from stree.common.words import counted, device_name, held_dtype
from stree.speculation_profile import StepTimesRecord, Tree, TreeStepTimes, first_fault
from stree.trees.token_tree import PLAIN, StepTree

ANSWERS_MEMORY = 0.98  # weight of an answer one answer later
STEPS_SEEN = 25  # last steps of a tree, whose lower quartile is what one takes
MIN_STEPS_SEEN = 8  # below which the times measured apart count
STEPS_VALID = 128  # steps with drafts, of all trees, for which the seen times of a tree count


@dataclass
class StepTimes:
    """Step times of a decoder.

    A number of rows between two that were measured takes the time of the larger one.

    Attributes:
        seconds: Seconds of a step by number of rows and tree.
        catch_up: Seconds a row that the drafter takes to catch up after plain decoding.
        took_s: Seconds of the measurement, capture of graphs included; not saved.
        device: Device of the timed steps; "" fits any device.
        dtype: Dtype of the timed steps.
        temperature: Temperature of the timed steps; 0 is greedy.

    Example:
        >>> import stree
        >>> times = stree.StepTimes({(8, stree.TokenTree.chain(2)): 0.004})
        >>> times.of(5, stree.TokenTree.chain(2))
        0.004
    """

    seconds: dict[tuple[int, StepTree], float] = field(default_factory=dict)
    catch_up: float = 0.0
    took_s: float = field(default=0.0, compare=False)
    device: str = ""
    dtype: str = ""
    temperature: float = 0.0

    @property
    def most_rows(self) -> int:
        """The largest number of rows that was timed; 0 before any measurement."""
        return max((num_rows for num_rows, _ in self.seconds), default=0)

    def __str__(self) -> str:
        most = self.most_rows
        times = (
            f"{tree.name} {1e3 * seconds:.1f} ms"
            for (num_rows, tree), seconds in self.seconds.items() if num_rows == most
        )
        return (
            f"a step of {counted(most, 'row')}: {', '.join(times)}; measured in {self.took_s:.1f} s"
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> StepTimes:
        """Read a file that `save` wrote.

        Raises `NotFound` for no file, and `BadData` for any other file.
        """
        path = Path(path)
        if not path.exists():
            raise NotFound(f"there are no costs at {path}: measure them, and save them there")
        try:
            return cls.of_record(StepTimesRecord.model_validate_json(read_text(path)))
        except (OSError, ValueError) as error:
            reason = first_fault(error) if isinstance(error, ValidationError) else error
            raise BadData(
                f"{path} holds no costs of steps ({reason}): measure them anew"
            ) from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file, whole or not at all. Raises `CannotWrite`."""
        write_atomically(path, self.record().model_dump_json(indent=2) + "\n")

    @classmethod
    def of_record(cls, record: StepTimesRecord) -> StepTimes:
        """Return the step times of a saved record."""
        seconds = {
            (num_rows, each.tree.to_token_tree()): seconds
            for each in record.trees
            for num_rows, seconds in each.seconds.items()
        }
        return cls(
            seconds, record.catch_up_s,
            device=record.device, dtype=record.dtype, temperature=record.temperature,
        )

    def record(self) -> StepTimesRecord:
        """Return a record to save."""
        times: dict[StepTree, dict[int, float]] = {}
        for (num_rows, tree), seconds in self.seconds.items():
            times.setdefault(tree, {})[num_rows] = seconds
        return StepTimesRecord(
            device=self.device, dtype=self.dtype, temperature=self.temperature,
            catch_up_s=self.catch_up,
            trees=tuple(
                TreeStepTimes(tree=Tree(name=tree.name, parents=tree.parents), seconds=each)
                for tree, each in times.items()
            ),
        )

    def misfit(
        self, target: Any, trees: Sequence[StepTree], temperature: float, num_rows: int = 1
    ) -> str:
        """Return why the times do not hold for such steps; "" if they do.

        Args:
            target: Has the device and the dtype of the steps.
            trees: Trees that may be chosen.
            temperature: 0 for greedy steps, else sampled ones.
            num_rows: Rows of the steps.
        """
        here = device_name(target.device), held_dtype(target), _kind(temperature)
        there = self.device, self.dtype, _kind(self.temperature)
        if self.device and here != there:
            return f"of {', '.join(there)}, and here it is {', '.join(here)}"
        for tree in trees:
            if not any(timed >= num_rows and each == tree for timed, each in self.seconds):
                return f"none of {counted(num_rows, 'row')} with {tree}"
        return ""

    def of(self, num_rows: int, tree: StepTree) -> float:
        """Return the seconds of a step. Raises `UsageError` if the tree was not measured."""
        if (found := self.seconds.get((num_rows, tree))) is not None:
            return found
        measured = sorted(timed for timed, each in self.seconds if each == tree)
        if not measured:
            raise UsageError(f"no cost of {tree} was measured: call measure_step_times first")
        timed = next((timed for timed in measured if timed >= num_rows), measured[-1])
        return self.seconds[timed, tree]


def _without_waits(seconds: Collection[float]) -> float:
    """Return the lower quartile: a busy host makes steps longer, and nothing makes them shorter."""
    return sorted(seconds)[len(seconds) // 4]


def _kind(temperature: float) -> str:
    return "greedy" if temperature == 0 else "sampled"


class MovingAverage:
    """Moving average in which recent numbers count most; `initial` before any number."""

    def __init__(self, initial: float) -> None:
        self.value, self._weight = initial, 0.0

    def __bool__(self) -> bool:
        """Return whether any number was learned."""
        return self._weight > 0

    def learn(self, number: float) -> None:
        self._weight = ANSWERS_MEMORY * self._weight + 1
        share = 1 / self._weight
        self.value = number if share == 1 else self.value + share * (number - self.value)


class _Seen:
    """Seconds of the last steps of a number of rows and a tree, and the number of the last one."""

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=STEPS_SEEN)
        self.number = 0


class Speeds:
    """Expected tokens per second and row of steps with each tree.

    The time of a step includes its share of the drafter's prefills.

    Args:
        costs: Step times.
        expected: Expected tokens of a step with each tree.

    Attributes:
        num_tokens: New tokens of all requests since the last answer ended. When many requests begin
            at once, the first answers that end are the short ones, and their own lengths would
            promise too few tokens.
    """

    def __init__(self, costs: StepTimes, expected: dict[StepTree, float]) -> None:
        self._answer_tokens = MovingAverage(math.inf)
        self.num_tokens = 0
        self.rest_on(costs)
        self.expect(expected)

    def rest_on(self, costs: StepTimes) -> None:
        """Rest on other step times, and forget the drafter's prefills and the steps seen."""
        self.costs = costs
        self._seen: dict[tuple[int, StepTree], _Seen] = {}  # by number of rows and tree
        self._num_steps = 0  # with drafts
        self._last: dict[int, StepTree] = {}  # by rows, the last tree of which enough were seen
        # The drafter's seconds a request: to read a prompt, and to catch up after plain steps
        self._prefills_s, self._catch_ups_s = (MovingAverage(costs.catch_up) for _ in range(2))
        # As of the last revision: a step of the smallest models takes the host's time as well
        self._by_rows: dict[int, dict[StepTree, float]] = {}
        self._step_s: dict[tuple[int, StepTree], float] = {}

    def expect(self, expected: dict[StepTree, float]) -> None:
        """Rest on other expected tokens of steps, and on what steps have taken until now."""
        self._expected, self._by_rows, self._step_s = expected, {}, {}

    def learn_step(self, num_rows: int, tree: StepTree, seconds: float) -> None:
        """Learn what a step has taken, the host's work included."""
        seen = self._seen.get((num_rows, tree))
        if seen is None or self._is_old(seen, tree):
            self.forget_steps(num_rows, tree)
            seen = self._seen[num_rows, tree] = _Seen()
        if tree.num_nodes > 1:
            self._num_steps += 1
        seen.number = self._num_steps
        seen.seconds.append(seconds)
        count = len(seen.seconds)
        if count >= MIN_STEPS_SEEN:
            self._last[num_rows] = tree
        if count == MIN_STEPS_SEEN:
            self._step_s = {}

    def is_timed(self, num_rows: int, tree: StepTree) -> bool:
        """Return whether enough steps were seen to know what one takes."""
        return self._times_of(num_rows, tree) is not None

    def _times_of(self, num_rows: int, tree: StepTree) -> deque[float] | None:
        """Return the seconds of the last such steps; None if there are too few, or old ones."""
        seen = self._seen.get((num_rows, tree))
        if seen is None or len(seen.seconds) < MIN_STEPS_SEEN or self._is_old(seen, tree):
            return None
        return seen.seconds

    def _is_old(self, seen: _Seen, tree: StepTree) -> bool:
        """Return whether the last such step was too long ago to tell what one takes now.

        Otherwise a tree whose first steps happened to wait for the host would never be tried again.
        Explorer renews the times of plain decoding.
        """
        return self._num_steps - seen.number > STEPS_VALID and tree != PLAIN

    def forget_steps(self, num_rows: int, tree: StepTree) -> None:
        """Forget what steps of a tree have taken."""
        self._seen.pop((num_rows, tree), None)
        self._step_s = {}
        if self._last.get(num_rows) == tree:
            del self._last[num_rows]

    def step_s(self, num_rows: int, tree: StepTree) -> float:
        """Return what a step takes: by the last ones of this tree, if enough were seen.

        Otherwise it is the time measured apart, changed as for the tree that was seen last: by what
        that took longer, as the host's work is much the same for all trees, or by its share.
        It is worked out again when enough steps of a tree were seen, at each call of `expect`, and
        when an answer ends.
        """
        if (found := self._step_s.get((num_rows, tree))) is None:
            found = self._step_s[num_rows, tree] = self._time_of(num_rows, tree)
        return found

    def _time_of(self, num_rows: int, tree: StepTree) -> float:
        if (times := self._times_of(num_rows, tree)) is not None:
            return _without_waits(times)
        measured = self.costs.of(num_rows, tree)
        if (last := self._last.get(num_rows)) is None:
            return measured
        times = self._seen[num_rows, last].seconds
        took, guess = _without_waits(times), self.costs.of(num_rows, last)
        return measured + took - guess if took >= guess else measured * took / guess

    def learn_answer(self, prefill_s: float | None, catch_up_s: float | None) -> None:
        """Learn that an answer has ended (`TreePolicy.learn_answer`)."""
        self._answer_tokens.learn(self.num_tokens)
        self.num_tokens = 0
        if prefill_s is not None:
            self._prefills_s.learn(prefill_s)
        if catch_up_s is not None:
            self._catch_ups_s.learn(catch_up_s)
        self._by_rows, self._step_s = {}, {}

    @property
    def prefill_s(self) -> float:
        """Seconds of a drafter's prefill; before any prefill, seconds of a catch-up."""
        return (self._prefills_s or self._catch_ups_s).value

    @property
    def catch_up_s(self) -> float:
        """Seconds of a drafter's catch-up; before any catch-up, seconds of a prefill."""
        return (self._catch_ups_s or self._prefills_s).value

    def of(self, num_rows: int) -> dict[StepTree, float]:
        """Return the expected tokens per second and row, by tree."""
        if num_rows not in self._by_rows:
            self._by_rows[num_rows] = {
                tree: self.with_tokens(num_rows, tree, tokens)
                for tree, tokens in self._expected.items()
            }
        return self._by_rows[num_rows]

    def with_tokens(self, num_rows: int, tree: StepTree, tokens: float) -> float:
        """Return tokens per second and row of steps that yield `tokens` tokens."""
        seconds = self.step_s(num_rows, tree)
        if tree.num_nodes > 1:
            answer_tokens = max(self._answer_tokens.value, 1.0)
            seconds += num_rows * self.prefill_s * tokens / answer_tokens
        return tokens / seconds

    def might_pay(self, num_rows: int, tree: StepTree) -> bool:
        """Return whether a tree would be faster than plain decoding if all drafts were accepted."""
        most = self.with_tokens(num_rows, tree, tree.max_depth + 1)
        return most > self.with_tokens(num_rows, PLAIN, 1.0)
