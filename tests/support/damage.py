"""Flip bits in files."""

from __future__ import annotations

from pathlib import Path


def flip_bit(path: Path, bit: int) -> None:
    """Flip one bit of a file, in place.

    `bit` counts from the file's first bit, or where negative, from the end of the file: −8 is the
    lowest bit of the last byte.
    """
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def flip_last_byte(path: Path) -> None:
    """Flip the lowest bit of a file's last byte."""
    flip_bit(path, -8)
