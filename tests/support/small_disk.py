"""Mount a disk of a few hundred kilobytes: a tmpfs, which needs root."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Disk:
    folder: Path

    def change(self, options: str) -> None:
        """Remount the disk while it is in use, with `size=…`, `nr_inodes=…`, `ro` or `rw`."""
        _mount(f"remount,{options}", self.folder).check_returncode()


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Disk]:
    """Mount a disk at `folder`; the test is skipped where the user may not mount one."""
    folder.mkdir()
    done = _mount(options, folder)
    if done.returncode:
        pytest.skip(f"needs root to mount a small disk: {done.stderr.strip()}")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def _mount(options: str, folder: Path) -> subprocess.CompletedProcess:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)
