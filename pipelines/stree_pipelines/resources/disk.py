"""Foresee whether a folder can be written, and whether its disk has room for a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from stree.common.device_memory import free_disk_bytes
from stree.common.errors import CannotWrite
from stree.common.words import size


def itemised(parts: Mapping[str, int]) -> str:
    """Format total and parts: "1.5 GiB (weights 1.0 GiB, …)"."""
    listed = ", ".join(f"{name} {size(value)}" for name, value in parts.items() if value)
    return f"{size(sum(parts.values()))} ({listed})"


def require_writable(path: str | os.PathLike[str]) -> None:
    """Raise CannotWrite when a folder `path` could not be made or filled."""
    absolute = Path(path).absolute()
    existing = next(each for each in (absolute, *absolute.parents) if os.path.lexists(each))
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise CannotWrite(f"cannot write in {path} ({existing} forbids it): choose another folder")


def disk_shortage(path: str | os.PathLike[str], parts: Mapping[str, int]) -> str:
    """Return a sentence if the disk of `path` has less room than these bytes by part, else ""."""
    free = free_disk_bytes(path)
    if sum(parts.values()) <= free:
        return ""
    return (
        f"{path} needs up to {itemised(parts)}, {size(free)} are free: free some or choose another "
        "folder"
    )


def require_disk(path: str | os.PathLike[str], parts: Mapping[str, int]) -> str:
    """Return a line about the disk. Raises CannotWrite when it may be too small."""
    if shortage := disk_shortage(path, parts):
        raise CannotWrite(shortage)
    return f"disk: {itemised(parts)}; {size(free_disk_bytes(path))} are free at {path}"
