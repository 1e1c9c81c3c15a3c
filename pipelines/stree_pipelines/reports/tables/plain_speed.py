"""Measure how far plain decoding's speed varied between checkpoints, which is the machine's noise.

Each checkpoint of a run is evaluated beside plain decoding of the same prompts, whose speed does
not depend on the drafter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stree_pipelines.evaluation.records import ResultRow
from stree_pipelines.reports.settings import dtype_of

MAX_SPEED_RATIO = 1.25  # fastest over slowest; quiet machines had up to 1.15 (docs/results)
TOLD_SPREAD = 1.01  # what is less is no news


@dataclass(frozen=True)
class PlainSpread:
    """The slowest and the fastest tokens/s of plain decoding beside a run's checkpoints."""

    benchmark: str
    slowest: float
    fastest: float

    @property
    def ratio(self) -> float:
        return self.fastest / self.slowest

    @property
    def is_noisy(self) -> bool:
        """True when the machine had other work, so that no speed is to be relied on."""
        return self.ratio > MAX_SPEED_RATIO

    def __str__(self) -> str:
        return (
            f"Plain decoding of {self.benchmark} made {self.slowest:,.0f} to {self.fastest:,.0f} "
            f"tokens/s beside the checkpoints ({self.ratio:.2f}×)"
        )


def plain_spread(rows: Iterable[ResultRow], temperature: float) -> PlainSpread | None:
    """Return the widest spread of a benchmark; None where plain decoding's speed was the same.

    Speeds of several devices, dtypes, batch sizes or numbers of processes are not compared.
    """
    speeds: dict[tuple[object, ...], list[float]] = {}
    for row in rows:
        if row.temperature == temperature and row.tokens_per_second and row.speedup:
            where = row.environment
            alike = (
                row.benchmark, row.prompts_hash, row.batch_size, dtype_of(row), where.device,
                where.num_processes, where.num_threads,
            )
            speeds.setdefault(alike, []).append(row.tokens_per_second / row.speedup)
    spreads = [PlainSpread(str(at[0]), min(each), max(each)) for at, each in speeds.items()]
    widest = max(spreads, key=lambda each: each.ratio, default=None)
    return widest if widest is not None and widest.ratio >= TOLD_SPREAD else None
