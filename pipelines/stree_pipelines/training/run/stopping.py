"""Note signals to stop a training; the state is saved at the next step's end.

Saving inside a handler would corrupt a running computation, and Lightning's own handlers start a
collective there.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from torch.distributed import DistError

from stree.common.errors import Interrupted, Preempted

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_SHOW_CURSOR = b"\x1b[?25h"  # which a progress bar hides
# A child that is forked while signals are watched must not write to its parent's pipe.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


class StopSignals:
    """Record of SIGTERM, SIGUSR1 and SIGINT (Ctrl-C) that come while a training runs."""

    def __init__(self) -> None:
        self.number: int | None = None  # the signal that came; SIGINT goes before the others
        # True under srun until all processes have met: SIGTERM then says that one has ended.
        self.waits_for_others = False

    def note(self, number: int, frame: FrameType | None) -> None:
        if self.number != signal.SIGINT:
            self.number = number

    @contextmanager
    def noted(self, tells: bool, before_leaving: Callable[[], None]) -> Iterator[None]:
        """Only note signals in the block; a second SIGINT ends the process at once with code 130.

        A process that leaves because of a signal ignores further ones, which could only take its
        exit code away, except SIGINT. One that leaves because another process is gone ignores the
        SIGTERM by which its launcher ends it.

        Args:
            tells: True when this process prints that it was interrupted; one of several is enough.
            before_leaving: called when the second SIGINT has come.
        """
        before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        for number in STOP_SIGNALS:
            signal.signal(number, self.note)
        try:
            with self._watched(tells, before_leaving):
                yield
        except Preempted:
            before = dict.fromkeys(STOP_SIGNALS, signal.SIG_IGN)
            before[signal.SIGINT] = lambda number, frame: _leave(tells)
            raise
        except RuntimeError as error:
            if _is_of_a_lost_rank(error):
                before[signal.SIGTERM] = signal.SIG_IGN
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def _watched(self, tells: bool, before_leaving: Callable[[], None]) -> Iterator[None]:
        """Read signals in a thread: a handler would wait for the main thread, which may hang."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

        def watch() -> None:
            interrupts = 0
            while came := os.read(reader, 1):
                if came[0] == signal.SIGTERM and self.waits_for_others:
                    os._exit(128 + signal.SIGTERM)
                interrupts += came[0] == signal.SIGINT
                if interrupts == 2:
                    before_leaving()
                    _leave(tells)
                if tells and came[0] == signal.SIGINT:
                    print(
                        "\ninterrupted: stopping where the next step ends, with everything saved "
                        "(Ctrl-C again: at once, without saving)",
                        file=sys.stderr,
                        flush=True,
                    )

        thread = threading.Thread(target=watch, daemon=True, name="interrupts")
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            os.close(writer)
            thread.join()
            os.close(reader)


def _is_of_a_lost_rank(error: RuntimeError) -> bool:
    """Return True for an error that a collective raises when another rank is gone."""
    return isinstance(error, DistError) or "gloo" in str(error)


def _leave(tells: bool) -> None:
    """End the process at once: every finished file on the disk is whole at any time."""
    if tells:
        cursor = _SHOW_CURSOR if os.isatty(2) else b""
        os.write(
            2, cursor + b"\nerror: interrupted twice: left without saving; run the same command to "
            b"go on from the last checkpoint\n"
        )
    os._exit(Interrupted.exit_code)
