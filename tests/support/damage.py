"""Files with a bit flipped."""

from __future__ import annotations

from pathlib import Path


def flip_bit(path: Path, bit: int) -> None:
    """bit counts from the file's first one, or from the byte after its last one where negative."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def flip_last_byte(path: Path) -> None:
    """Its lowest bit."""
    flip_bit(path, -8)
