"""Row stores: buffers with a row for each sequence, of which a row can be saved and loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class SavedRow:
    """Copies of what a store holds in a row.

    Attributes:
        length: () int64 on the device, the tokens that it holds.
        parts: The copies, as the store that made them reads them.
    """

    length: Tensor
    parts: tuple[Any, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the copies."""
        return _bytes_of(self.parts)


def _bytes_of(part: Any) -> int:
    if isinstance(part, tuple):
        return sum(map(_bytes_of, part))
    return 0 if part is None else int(part.num_bytes if hasattr(part, "num_bytes") else part.nbytes)


class RowStore(Protocol):
    """Protocol of what holds a row for each sequence; nothing in it waits for the device."""

    def clear(self, row: Any) -> None:
        """Empty a row, given as an int or a tensor (1,) int64 on the device."""

    def save(self, row: int, most: int) -> SavedRow:
        """Return copies of a row that holds `most` tokens at most.

        An accepted path that is not replayed yet is left out.
        """
        ...

    def load(self, saved: SavedRow, row: int) -> None:
        """Write saved copies into a row, as if it had just read these tokens."""

    def bytes_per_row(self) -> int:
        """Return the bytes that a row takes."""
        ...
