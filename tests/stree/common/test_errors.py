"""A command ends with an exit code and one line that says why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

import stree
from stree.common.errors import BadData, one_line

# In the package's place an empty one: what it imports takes more than a second, and is not needed.
SCRIPT = f"""
import atexit, sys, types
sys.modules["stree"] = types.ModuleType("stree")
sys.modules["stree"].__path__ = [{os.path.dirname(stree.__file__)!r}]
from stree.common.errors import CheckpointRefused, exit_with_reason
atexit.register(lambda: print("shut down", flush=True))
def main():
    print("said", end="")
    {{ending}}
exit_with_reason(main)
"""


def test_a_message_moves_no_terminal():
    """A message may quote a file."""
    assert str(BadData("a\x1b[2Jb\r\u202ec\nd")) == "a\ufffd[2Jb\ufffd\ufffdc\nd"
    assert one_line("a\x1b[2Jb\r\u202ec\nd") == "a [2Jb c d"
    assert one_line("می\u200cخواهم 👩\u200d👧") == "می\u200cخواهم 👩\u200d👧"


@pytest.mark.parametrize(
    ("num_processes", "ending", "code", "reason"),
    [
        (1, "pass", 0, ""),
        (2, "pass", 0, ""),
        (2, "raise CheckpointRefused('no weights')", 66, "error: no weights\n"),
        (1, "open('x' * 5000)", 2,
         f"error: {'x' * 60}… is longer than a path can be: name another\n"),
        (2, "sys.exit(3)", 3, ""),
        (2, "sys.exit()", 0, ""),
        (2, "sys.exit('because')", 1, "because\n"),
    ],
)
def test_exit_code_reason_and_output_come_through(num_processes, ending, code, reason):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(ending=ending)],
        env={**os.environ, "WORLD_SIZE": str(num_processes)}, capture_output=True, text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (code, reason)
    assert done.stdout.startswith("said")
    # One of several processes must not run the interpreter's shutdown.
    skipped = num_processes > 1 and code in (0, 3, 66)
    assert ("shut down" in done.stdout) != skipped


def test_an_exception_that_is_no_reason_keeps_its_traceback():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(ending="raise RuntimeError('a mistake')")],
        capture_output=True, text=True, timeout=60,
    )
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "a mistake" in done.stderr


def test_a_reader_that_has_seen_enough_is_no_success():
    """A gate with `pipefail` must not pass by a pipe that was cut."""
    script = SCRIPT.format(ending="[print('line') for _ in range(100_000)]")
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f'{sys.executable} -c "$0" | head -n 1', script],
        capture_output=True, text=True, timeout=60,
    )
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize(
    ("ending", "environment", "output", "code", "reason"),
    [
        ("raise KeyboardInterrupt", {}, os.devnull, 130, "error: interrupted\n"),
        ("print('x')", {}, "/dev/full", 73, "error: [Errno 28] No space left on device: free"),
        ("print('τ')", {"PYTHONIOENCODING": "ascii"}, os.devnull, 0, ""),
    ],
)
def test_no_traceback_for_what_is_no_mistake(ending, environment, output, code, reason):
    with open(output, "w") as stdout:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT.format(ending=ending)],
            env={**os.environ, **environment}, stdout=stdout, stderr=subprocess.PIPE,
            text=True, timeout=60,
        )
    assert done.returncode == code
    assert done.stderr.startswith(reason) and done.stderr.count("\n") == (code != 0)
