"""Step times by number of rows and tree, by which a step's tree is chosen, and their file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from stree.common.errors import BadData, NotFound, UsageError
from stree.common.files import write_atomically
from stree.common.plain_data import read_text
from stree.common.words import counted, device_name, dtype_name
from stree.speculation_profile import StepTimesRecord, Tree, TreeStepTimes, first_fault
from stree.trees.token_tree import TokenTree


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

    seconds: dict[tuple[int, TokenTree], float] = field(default_factory=dict)
    catch_up: float = 0.0
    took_s: float = field(default=0.0, compare=False)
    device: str = ""
    dtype: str = ""
    temperature: float = 0.0

    def __str__(self) -> str:
        most = max((rows for rows, _ in self.seconds), default=0)
        times = (
            f"{tree.name} {1e3 * seconds:.1f} ms"
            for (rows, tree), seconds in self.seconds.items() if rows == most
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
            (rows, each.tree.to_token_tree()): seconds
            for each in record.trees
            for rows, seconds in each.seconds.items()
        }
        return cls(
            seconds, record.catch_up_s,
            device=record.device, dtype=record.dtype, temperature=record.temperature,
        )

    def record(self) -> StepTimesRecord:
        """Return a record to save."""
        times: dict[TokenTree, dict[int, float]] = {}
        for (rows, tree), seconds in self.seconds.items():
            times.setdefault(tree, {})[rows] = seconds
        return StepTimesRecord(
            device=self.device, dtype=self.dtype, temperature=self.temperature,
            catch_up_s=self.catch_up,
            trees=tuple(
                TreeStepTimes(tree=Tree(name=tree.name, parents=tree.parents), seconds=each)
                for tree, each in times.items()
            ),
        )

    def misfit(
        self, target: Any, trees: Sequence[TokenTree], temperature: float, num_rows: int = 1
    ) -> str:
        """Return why the times do not hold for such steps; "" if they do.

        Args:
            target: Has the device and the dtype of the steps.
            trees: Trees that may be chosen.
            temperature: 0 for greedy steps, else sampled ones.
            num_rows: Rows of the steps.
        """
        here = device_name(target.device), dtype_name(target.dtype), _kind(temperature)
        there = self.device, self.dtype, _kind(self.temperature)
        if self.device and here != there:
            return f"of {', '.join(there)}, and here it is {', '.join(here)}"
        for tree in trees:
            if not any(rows >= num_rows and each == tree for rows, each in self.seconds):
                return f"none of {counted(num_rows, 'row')} with {tree}"
        return ""

    def of(self, num_rows: int, tree: TokenTree) -> float:
        """Return the seconds of a step. Raises `UsageError` if the tree was not measured."""
        if (found := self.seconds.get((num_rows, tree))) is not None:
            return found
        measured = sorted(rows for rows, each in self.seconds if each == tree)
        if not measured:
            raise UsageError(f"no cost of {tree} was measured: call measure_step_times first")
        rows = next((rows for rows in measured if rows >= num_rows), measured[-1])
        return self.seconds[rows, tree]


def _kind(temperature: float) -> str:
    return "greedy" if temperature == 0 else "sampled"
