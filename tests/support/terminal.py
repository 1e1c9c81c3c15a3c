"""Commands as on a real terminal of a given width: a pseudo-terminal, and what it shows at last."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_ROWS = 40
# Colours, cursor movements and other escape sequences; a bar that is drawn anew begins with some.
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-Z\\-_])")


@dataclass(frozen=True)
class Shown:
    """What a command wrote to its terminal, and its exit code (−N after signal N)."""

    raw: str
    code: int

    @property
    def lines(self) -> list[str]:
        """Every line that was ever on the screen, in the order of writing: without escape
        sequences and empty lines, what a bar showed before it was drawn anew included."""
        lines = re.split(r"[\r\n]+", _ESCAPE.sub("", self.raw))
        return [line.rstrip() for line in lines if line.strip()]


def run_on_terminal(
    command: Sequence[str], columns: int, environment: Mapping[str, str] | None = None
) -> Shown:
    """Run a command whose input, output and errors are a terminal of so many columns, and wait.

    `environment` holds variables beside the test's own, of which those that would decide the size
    or colours are left out.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, columns, 0, 0))
    decisive = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "CI")
    kept = {name: value for name, value in os.environ.items() if name not in decisive}
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        env={**kept, "TERM": "xterm-256color", **(environment or {})},
    )  # fmt: skip
    os.close(slave)
    written = b""
    with os.fdopen(master, "rb", buffering=0) as terminal:
        while True:
            try:
                piece = terminal.read(65536)
            except OSError:  # Linux's way to say that nobody has the terminal open any more
                break
            if not piece:
                break
            written += piece
    return Shown(written.decode(errors="replace"), process.wait())
