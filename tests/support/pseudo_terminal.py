"""Run a command on a terminal of a given width: record what it writes, and type keys."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Sequence
from dataclasses import dataclass

CTRL_C = b"\x03"
_ROWS = 40
_DECISIVE = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "CI")
# Colours, cursor movements and other escape sequences; a bar that is drawn anew begins with some.
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-Z\\-_])")


@dataclass(frozen=True)
class Shown:
    """Holds what a command wrote to its terminal, and its exit code (−N after signal N)."""

    raw: str
    code: int

    @property
    def lines(self) -> list[str]:
        """List every line that the terminal ever showed, in the order of writing.

        Codes that move the cursor or set a colour are left out.
        """
        lines = re.split(r"[\r\n]+", _ESCAPE.sub("", self.raw))
        return [line.rstrip() for line in lines if line.strip()]


def run_on_terminal(
    command: Sequence[str], columns: int, keys: Sequence[tuple[str, bytes]] = ()
) -> Shown:
    """Run a command in a session of its own, on a terminal `columns` wide, and wait for its end.

    `keys` are typed one after the other, each when the text before it has been written (again).
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, columns, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in _DECISIVE}
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # or keys would be no signals
        env={**kept, "TERM": "xterm-256color"},
    )
    os.close(slave)
    written, left, seen = b"", list(keys), 0
    with os.fdopen(master, "r+b", buffering=0) as terminal:
        while True:
            try:
                piece = terminal.read(65536)
            except OSError:  # Linux's way to say that nobody has the terminal open any more
                break
            if not piece:
                break
            written += piece
            while left and left[0][0].encode() in written[seen:]:
                seen = len(written)
                terminal.write(left.pop(0)[1])
    return Shown(written.decode(errors="replace"), process.wait())
