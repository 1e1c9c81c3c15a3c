"""A child process that answers questions, and that the kernel stops when one costs too much.

For what others wrote and only looks like data: a chat template or a tokenizer can loop for ever or
fill the memory, in code that holds no signal's handler. The limits are processor time, which a busy
machine does not use up, and address space. The two speak JSON, a line each.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any


class ChildEnded(Exception):
    """Why there is no answer."""


class LimitedChild:
    """Runs a script that calls `serve`; started at the first question, and anew when it ended."""

    def __init__(self, script: str) -> None:
        self.script = str(Path(script).resolve())
        self._process: subprocess.Popen[str] | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def ask(self, question: Any, cpu_s: float) -> Any:
        """The answer to a question, both of JSON. Raises ChildEnded when the child ends over it,
        such as for taking more than `cpu_s` of processor time."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps([cpu_s, question]) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            return json.loads(line)
        self._process = None
        code = process.wait()
        if code == -signal.SIGPROF:
            raise ChildEnded(f"it takes more than {cpu_s:g} s of processor time")
        raise ChildEnded(f"the process that tried it ended with code {code}")

    def _start(self) -> subprocess.Popen[str]:
        # By its path: the child needs little of this package, whose import brings PyTorch along.
        process = subprocess.Popen(
            [sys.executable, "-P", self.script],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="ascii",
            start_new_session=True, env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )  # fmt: skip
        weakref.finalize(self, _end, process)
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{self.script} did not start")
        return process


def serve(answer: Callable[[Any], Any], memory_bytes: int) -> None:
    """The child: an answer for each question, until there are no more. Beyond `memory_bytes` of
    further address space it gets none."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # meant for the parent, with whom it ends
    print("ready", flush=True)
    # What a library says when it panics or is out of memory comes as the reason, too.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    _limit_memory(memory_bytes)
    for line in sys.stdin:
        cpu_s, question = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # SIGPROF ends a process
        answered = json.dumps(answer(question))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answered, flush=True)


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.kill()  # it holds nothing that could be lost
    process.wait()
    process.stdin.close()
    process.stdout.close()


def _limit_memory(more_bytes: int) -> None:
    """Allow the process so much address space beyond what it has (where the system tells)."""
    pages = Path("/proc/self/statm")
    if pages.exists():
        used = int(pages.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + more_bytes, used + more_bytes))
