"""Workers that notice within seconds when one of them is gone, and say which.

Each listens to the next in a ring, on a connection of its own: one that dies closes it, whatever
the others compute at the time, and the listener passes the news on. Everything that was finished is
on the disk by then, so all leave, and the same command goes on with any number of processes.
A machine that hangs or loses its network closes nothing and is not noticed before the timeout.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from stree.errors import Preempted

# The listener has no timeout of its own: an evaluation may take days.
FOREVER = timedelta(days=365)
# So long a worker may take to leave by itself, after an error that all of them have.
GRACE_S = 5.0


class WorkerWatch:
    """Made by all workers of the process group together; `leave` ends it on all of them."""

    def __init__(self) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=FOREVER)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Say goodbye, and wait for the next worker's; after it workers may leave at any time."""
        self._pass_on(self.count)
        self._thread.join()

    def name_who_is_gone(self) -> None:
        """Called where the others did not answer: leave with the name of who is gone, if anybody
        is."""
        self._thread.join(2 * GRACE_S)

    def _listen(self) -> None:
        following = (self.rank + 1) % self.count
        news = torch.zeros(1, dtype=torch.long)
        try:
            dist.recv(news, src=following, group=self._group)
            gone = int(news)
        except RuntimeError:  # its connection is closed
            gone = following
        if gone == self.count:
            return
        self._pass_on(gone)
        time.sleep(GRACE_S)
        print(
            f"error: worker {gone} of {self.count} (counted from 0) is gone, see its own output; "
            f"worker {self.rank} leaves. Finished prompts are saved: run the same command to go on",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        # The main thread may be anywhere, in a kernel or waiting for the dead. What it writes, it
        # writes whole or not at all.
        os._exit(Preempted.exit_code)

    def _pass_on(self, gone: int) -> None:
        """Tell the worker before this one who is gone; the count itself is a goodbye."""
        try:
            dist.send(torch.tensor([gone]), dst=(self.rank - 1) % self.count, group=self._group)
        except RuntimeError:
            return  # it is the one that is gone
