"""Report the memory of decoders: bytes per sequence, rows, and how many more would fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from stree.batching.step import Step
from stree.common.device_memory import free_memory_bytes
from stree.common.words import counted, size
from stree_kernels import ops


@dataclass(frozen=True)
class MemoryReport:
    """Rows of decoders, and the memory that is left.

    Attributes:
        num_rows: Sequences at once.
        max_length: Tokens of the longest sequence.
        num_decoders: Decoders that hold a row for each sequence.
        parts: Bytes of a sequence in the caches of all decoders: the target's by part, then the
            drafters'.
        free_bytes: Bytes that are free on the device, or on the host for this process
            (`free_memory_bytes`). Graphs of more rows need some of them, too.
    """

    num_rows: int
    max_length: int
    num_decoders: int
    parts: dict[str, int]
    free_bytes: int

    @classmethod
    def of(cls, step: Step, num_rows: int, max_length: int) -> MemoryReport:
        """Return the report of one decoder, by its step."""
        device, parts = step.target.device, Counter[str](step.cache.sequence_bytes())
        if step.drafter is not None and step.drafter.row_store is not None:
            parts["drafter"] += step.drafter.row_store.bytes_per_row()
        with ops.current(device):
            free_bytes = free_memory_bytes(device.type == "cuda")
        return cls(num_rows, max_length, 1, dict(parts), free_bytes)

    @classmethod
    def together(cls, reports: Sequence[MemoryReport]) -> MemoryReport:
        """Return the report of decoders that each hold a row for every sequence."""
        parts = Counter[str]()
        for each in reports:
            parts.update(each.parts)
        return cls(
            num_rows=min(each.num_rows for each in reports),
            max_length=max(each.max_length for each in reports),
            num_decoders=sum(each.num_decoders for each in reports),
            parts=dict(parts), free_bytes=reports[-1].free_bytes,
        )

    @property
    def sequence_bytes(self) -> int:
        """Bytes of a sequence in all decoders."""
        return sum(self.parts.values())

    @property
    def num_more(self) -> int:
        """Number of further sequences that fit in the free memory."""
        return self.free_bytes // self.sequence_bytes

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size(each)}" for name, each in self.parts.items() if each)
        several = f" in {self.num_decoders} decoders" if self.num_decoders > 1 else ""
        return (
            f"{counted(self.num_rows, 'sequence')} at once, of up to {self.max_length:,} tokens: "
            f"{size(self.sequence_bytes)} a sequence{several} ({parts}); {size(self.free_bytes)} "
            f"are free, enough for {self.num_more:,} more"
        )
