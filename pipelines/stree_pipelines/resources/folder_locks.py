"""Locks of the folders that a run or an evaluation fills, so that one process at a time does."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stree.common.files import reporting_refusals
from stree.common.locks import take_lock

LOCK_NAME = ".lock"


@contextmanager
def locked(
    path: Path, on_wait: Callable[[], None], shared: bool = False, patience_s: float = 0.0
) -> Iterator[None]:
    """Hold a lock file, made with its folder where there is none, inside the block.

    Waits until it is free, after calling `on_wait()` when it was not within `patience_s`; a killed
    holder's lock is gone. A `shared` lock keeps out those alone that do not share it. Raises
    CannotWrite when the disk refuses.
    """
    with reporting_refusals(path, codes=None):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a")  # noqa: SIM115 (closed below)
    with file:
        deadline = time.monotonic() + patience_s
        while not take_lock(file.fileno(), shared):
            if time.monotonic() >= deadline:
                on_wait()
                fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
                break
            time.sleep(0.1)
        yield
