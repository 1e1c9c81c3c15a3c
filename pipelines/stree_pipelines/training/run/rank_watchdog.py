"""End the other ranks within a minute when one of several processes dies, and name it.

Without the watchdog they would hang: gloo's error names a port, NCCL waits for half an hour, and a
host that is gone closes no connection. So each rank counts in the processes' common store, and
reads the counts of the others. A rank that fails writes the reason there, and the others leave with
it.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist

from stree.common.errors import (
    CannotWrite,
    OutOfMemory,
    Preempted,
    StreeError,
    first_line,
    is_out_of_memory,
)
from stree.common.files import FULL_DISK

BEAT_S = 3.0
# Counted in this rank's own beats, not by the clock: a job that was suspended as a whole goes on.
PATIENCE_BEATS = 12
LEFT, FAILED = "left", "failed "


class RankWatchdog(pl.Callback):
    """Callback that ends this process when another rank of the training has died or failed."""

    def __init__(self) -> None:
        super().__init__()
        self._rank = 0
        self._keys: list[str] = []  # of the ranks' values in the store
        self._store: Any = None
        # Each rank's last value, and this rank's beat when it was new.
        self._seen: list[tuple[str, int]] = []
        self._leaving = threading.Event()
        self._thread: threading.Thread | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.world_size == 1 or self._thread is not None:
            return
        self._rank = trainer.global_rank
        self._keys = [f"stree/peer/{rank}" for rank in range(trainer.world_size)]
        # A connection of its own: the main thread may block on the other one.
        self._store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=BEAT_S * PATIENCE_BEATS))
        self._say(_alive(0))
        trainer.strategy.barrier("peers")
        self._seen = [(value, 0) for value in self._values()]
        self._thread = threading.Thread(target=self._watch, daemon=True, name="peer-watch")
        self._thread.start()

    def _say(self, word: str) -> None:
        self._store.set(self._keys[self._rank], word)

    def _values(self) -> list[str]:
        return [value.decode() for value in self._store.multi_get(self._keys)]

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._thread is not None and not self._leaving.is_set():
            self._leave(LEFT)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if self._thread is None:
            return
        if _comes_from_a_peer(exception):
            # The watch finds the rank that failed, and ends this process.
            self._thread.join(BEAT_S * (PATIENCE_BEATS + 4))
        # All ranks agree on being told to stop, and each has its own last things to do.
        if isinstance(exception, Preempted):
            self._leave(LEFT)
            return
        self._leave(f"{FAILED}{_code_of(exception)} {first_line(exception)}")
        self._wait_for_readers()

    def _leave(self, word: str) -> None:
        self._leaving.set()
        assert self._thread is not None
        self._thread.join()
        with suppress(RuntimeError):  # the rank that keeps the store may have left already
            self._say(word)

    def _wait_for_readers(self) -> None:
        """Let rank 0 leave last, if it can: the store goes with the process that keeps it."""
        deadline = time.monotonic() + 3 * BEAT_S
        while self._rank == 0 and time.monotonic() < deadline:
            if all(value.startswith((LEFT, FAILED)) for value in self._values()):
                return
            time.sleep(0.1)

    def _watch(self) -> None:
        beat = 0
        try:
            while not self._leaving.wait(BEAT_S):
                beat += 1
                self._say(_alive(beat))
                for rank, value in enumerate(self._values()):
                    if rank != self._rank:
                        self._look_at(rank, value, beat)
        except RuntimeError:
            # The store answers no more. If all is over, this process will know in a moment.
            if not self._leaving.wait(2 * BEAT_S):
                _end(Preempted.exit_code, _is_gone(0, self._seen[0][0]))

    def _look_at(self, rank: int, value: str, beat: int) -> None:
        before, since = self._seen[rank]
        if value != before:
            self._seen[rank] = value, beat
        if value == LEFT:
            return
        if value.startswith(FAILED):
            if self._leaving.wait(BEAT_S):  # the same has happened here
                return
            code, _, reason = value.removeprefix(FAILED).partition(" ")
            self._say(LEFT)
            _end(int(code), f"rank {rank} failed: {reason.rstrip('.')}")
        if value == before and (beat - since >= PATIENCE_BEATS or _is_dead(value)):
            self._say(LEFT)
            _end(Preempted.exit_code, _is_gone(rank, value))


def _alive(beat: int) -> str:
    return f"{beat} {_here()} {os.getpid()}"


def _here() -> str:
    """Return this host and its namespace of process ids (a container has its own)."""
    numbering = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()} {os.readlink(numbering) if numbering.is_symlink() else '-'}"


def _is_dead(value: str) -> bool:
    """Return True when a process on this host is known to have ended."""
    _, host, numbering, pid = value.split(" ")
    if f"{host} {numbering}" != _here() or numbering == "-":
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2][0]
    except OSError:
        return True
    return state in "ZX"  # ended, and its parent has not looked yet


def _is_gone(rank: int, value: str) -> str:
    _, host, _, pid = value.split(" ")
    return f"rank {rank} (process {pid} on {host}) is gone"


def _comes_from_a_peer(exception: BaseException) -> bool:
    """Return True for an exception that a collective raises when another rank is gone."""
    return isinstance(exception, dist.DistError) or (
        isinstance(exception, RuntimeError) and "gloo" in str(exception)
    )


def _code_of(exception: BaseException) -> int:
    """Return the exit code of the rank that raised the exception."""
    if isinstance(exception, StreeError):
        return exception.exit_code
    if is_out_of_memory(exception):
        return OutOfMemory.exit_code
    is_disk = isinstance(exception, OSError) and exception.errno in FULL_DISK
    return CannotWrite.exit_code if is_disk else 1


def _end(code: int, reason: str) -> None:
    """Leave at once: the main thread may wait in a collective for ever."""
    print(
        f"error: {reason}; this rank leaves with it: run the same command to go on from the last "
        "checkpoint",
        file=sys.stderr,
        flush=True,
    )
    sys.stdout.flush()
    os._exit(code)
