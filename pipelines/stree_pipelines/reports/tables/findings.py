"""Work out a report's findings once, for its files, its page and the terminal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from stree_pipelines.reports.run_data import RunData
from stree_pipelines.reports.tables import by_length
from stree_pipelines.reports.tables.by_length import LadderFindings
from stree_pipelines.reports.tables.tables import Advice, Table, advise, all_tables


@dataclass(frozen=True)
class Findings:
    """Findings on a run or several: tables, the advice by temperature, and τ by prompt length.

    The first tables, one for each temperature, are over all benchmarks.
    """

    tables: list[Table]
    advice: dict[float, Advice]
    ladders: list[LadderFindings] = field(default_factory=list)

    @classmethod
    def of(cls, data: RunData) -> Self:
        """Return the findings on one run: Table 6 of each scope and temperature is its tables."""
        advice = {temperature: advise(data, temperature) for temperature in data.temperatures}
        return cls(all_tables(data), advice, by_length.findings(data))

    @property
    def main_tables(self) -> list[Table]:
        """Tables over all benchmarks."""
        return self.tables[: len(self.advice)]
