"""How many sequences decoders have rows for, how many more there is memory for, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stree.common.device_memory import free_memory_bytes
from stree.common.words import counted, size
from stree_kernels import ops


class WithCaches(Protocol):
    """A decoder of several rows, as a `BatchDecoder`: its models, caches and their sizes."""

    target: Any
    drafter: Any
    cache: Any
    num_rows: int
    max_length: int


@dataclass(frozen=True)
class MemoryReport:
    """Rows that are there, and memory that is left.

    parts: bytes that a sequence takes in all decoders' caches, target's by part, then drafters'.
    free_bytes: of the device, or of the host as far as this process may use it, beside the rows
    that are there, models and graphs (`free_memory_bytes`); graphs of more rows need some of it,
    too.
    """

    num_rows: int
    max_length: int
    num_decoders: int
    parts: dict[str, int]
    free_bytes: int

    @classmethod
    def of(cls, decoders: Sequence[WithCaches]) -> MemoryReport:
        """Of decoders that have a row for each sequence, as the methods of an evaluation have."""
        device, parts = decoders[0].target.device, Counter[str]()
        for decoder in decoders:
            parts.update(decoder.cache.sequence_bytes())
            if (drafters := getattr(decoder.drafter, "cache", None)) is not None:
                parts["drafter"] += sum(drafters.sequence_bytes().values())
        with ops.current(device):
            free_bytes = free_memory_bytes(device.type == "cuda")
        return cls(
            num_rows=min(each.num_rows for each in decoders),
            max_length=max(each.max_length for each in decoders),
            num_decoders=len(decoders),
            parts=dict(parts),
            free_bytes=free_bytes,
        )

    @property
    def sequence_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def num_more(self) -> int:
        """How many more sequences there is memory for."""
        return self.free_bytes // self.sequence_bytes

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size(each)}" for name, each in self.parts.items() if each)
        several = f" in {self.num_decoders} decoders" if self.num_decoders > 1 else ""
        return (
            f"{counted(self.num_rows, 'sequence')} at once, of up to {self.max_length:,} tokens: "
            f"{size(self.sequence_bytes)} a sequence{several} ({parts}); {size(self.free_bytes)} "
            f"are free, enough for {self.num_more:,} more"
        )
