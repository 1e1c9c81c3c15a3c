"""What steps cost by rows and tree, and how that is saved: what a step's tree is chosen by."""

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
    """Seconds of a step by rows and tree; as many rows as lie between two that were measured cost
    what the larger number costs.

    catch_up, seconds a row that a drafter takes to read what plain decoding left it; device, dtype
    and temperature, of the steps that were timed (no device: made by hand, of any); took_s, how
    long all was measured, the capture of graphs included, which is not saved.
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
        )  # fmt: skip
        return (
            f"a step of {counted(most, 'row')}: {', '.join(times)}; measured in {self.took_s:.1f} s"
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> StepTimes:
        """Of a file that `save` wrote. Raises `NotFound`, or `BadData` for any other file."""
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
        """As JSON, whole or not at all. Raises `CannotWrite`."""
        write_atomically(path, self.record().model_dump_json(indent=2) + "\n")

    @classmethod
    def of_record(cls, record: StepTimesRecord) -> StepTimes:
        seconds = {
            (rows, each.tree.to_token_tree()): seconds
            for each in record.trees
            for rows, seconds in each.seconds.items()
        }
        return cls(
            seconds, record.catch_up_s,
            device=record.device, dtype=record.dtype, temperature=record.temperature,
        )  # fmt: skip

    def record(self) -> StepTimesRecord:
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
        )  # fmt: skip

    def misfit(
        self, target: Any, trees: Sequence[TokenTree], temperature: float, num_rows: int = 1
    ) -> str:
        """Why nothing is known here of steps of so many rows of a target's with each of these
        trees, greedy or sampled; empty where it is known."""
        here = device_name(target.device), dtype_name(target.dtype), _kind(temperature)
        there = self.device, self.dtype, _kind(self.temperature)
        if self.device and here != there:
            return f"of {', '.join(there)}, and here it is {', '.join(here)}"
        for tree in trees:
            if not any(rows >= num_rows and each == tree for rows, each in self.seconds):
                return f"none of {counted(num_rows, 'row')} with {tree}"
        return ""

    def of(self, num_rows: int, tree: TokenTree) -> float:
        if (found := self.seconds.get((num_rows, tree))) is not None:
            return found
        measured = sorted(rows for rows, each in self.seconds if each == tree)
        if not measured:
            raise UsageError(f"no cost of {tree} was measured: call measure_step_times first")
        rows = next((rows for rows in measured if rows >= num_rows), measured[-1])
        return self.seconds[rows, tree]


def _kind(temperature: float) -> str:
    return "greedy" if temperature == 0 else "sampled"
