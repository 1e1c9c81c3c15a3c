"""Start the product's commands as processes in a tenth of a second each.

A helper process imports everything once and forks for each command. A test gets a process of its
own, with its own memory, files and signals, that runs the real script to its real exit code. It
saves the five seconds of importing; and at the end the imported modules are not taken apart, which
is a third of a short command's time. The helper has one thread and has computed nothing when it
forks (`start` refuses otherwise), so no lock or pool of PyTorch's is inherited half used.

As a script this file is the helper: it reads one JSON request a line, and answers each with one.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
DISTILL, EVAL_SPEC = (REPOSITORY / "pipelines" / name for name in ("distill.py", "eval_spec.py"))
PATIENCE_S = 240.0  # for anything that a busy machine may take long for


@dataclass(repr=False)
class Command:
    """Represents a started command; `output` is the file of its standard output and error
    together."""

    forks: Forks
    pid: int
    output: Path
    _code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, −N after signal N, None while the command runs."""
        if self._code is None:
            self._code = self.forks._ask({"poll": self.pid})["code"]
        return self._code

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        wait_until(lambda: self.poll() is not None, lambda: f"the end of {self}", timeout_s)
        assert self._code is not None
        return self._code

    def send(self, number: int) -> None:
        """Send the command a signal; do nothing where it has ended.

        Its process number is not used anew before `poll` has seen the end.
        """
        if self.poll() is None:
            os.kill(self.pid, number)

    def text(self) -> str:
        """Return what the command printed so far."""
        return without_leaks(self.output.read_text(encoding="utf-8", errors="replace"))

    def __repr__(self) -> str:
        return f"process {self.pid}, whose output is\n{self.text()}"


def without_leaks(said: str) -> str:
    """Cut off what nanobind prints at a command's end about objects that `gc.freeze` kept alive."""
    return said.partition("nanobind: leaked")[0]


class Forks:
    """Runs the helper process, and starts commands in it."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._helper = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment, start_new_session=True, cwd=REPOSITORY,
        )
        threads = self._read()["threads"]
        assert len(threads) == 1, f"the helper wants to be alone when it forks: {threads}"

    def start(
        self, script: Path, arguments: list[str], output: Path,
        before: tuple[str, Mapping[str, Any]] | None = None,
        environment: Mapping[str, str | None] | None = None,
    ) -> Command:
        """Start `python script arguments` in a process of its own.

        Args:
            script: one of the project's scripts.
            output: the file that gets standard output and error; it is created where missing.
            before: ("module:function", keyword arguments), called in the new process first: a test
                puts its fault there.
            environment: variables to set on top of the test's own; None removes one.
        """
        request = {
            "script": str(script), "arguments": arguments, "output": str(output),
            "before": before, "environment": dict(environment or {}),
        }
        output.touch()
        return Command(self, self._ask(request)["pid"], output)

    def run(self, *arguments: Any, **options: Any) -> Command:
        """Start a command as `start` does, and wait for its end."""
        command = self.start(*arguments, **options)
        command.wait()
        return command

    def close(self) -> None:
        os.killpg(self._helper.pid, signal.SIGKILL)
        self._helper.communicate()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._helper.stdin is not None
        self._helper.stdin.write(json.dumps(request) + "\n")
        self._helper.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._helper.stdout is not None
        line = self._helper.stdout.readline()
        assert line, "the helper process is gone"
        return json.loads(line)


@contextmanager
def forks() -> Iterator[Forks]:
    started = Forks()
    try:
        yield started
    finally:
        started.close()


def wait_until(
    holds: Callable[[], bool], wanted: Callable[[], str], timeout_s: float = PATIENCE_S
) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"after {timeout_s:g} s still not: {wanted()}"
        time.sleep(0.002)


# The helper


def _serve() -> None:
    gc.disable()  # what is imported stays
    import torch.utils.tensorboard  # noqa: F401 (Lightning's logger imports it when it starts)

    for name in ("distill", "train_target", "eval_spec", "report"):
        importlib.import_module(f"stree_pipelines.commands.{name}")
    from stree_pipelines.evaluation.answering import gc_freeze
    from stree_pipelines.training.teachers import on_policy_check

    # With the defaults the check would take half the time of a tiny training.
    on_policy_check.NUM_ROWS, on_policy_check.NEW_TOKENS = 2, 4
    gc.freeze()  # or each command would look through all of it
    gc.enable()
    gc_freeze.collect = gc.collect
    _answer({"threads": _threads()})
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            _answer({"code": os.waitstatus_to_exitcode(status) if pid else None})
            continue
        assert len(_threads()) == 1
        pid = os.fork()
        if pid:
            _answer({"pid": pid})
            continue
        _become(request)
        return


def _threads() -> list[str]:
    """Return the names of this process's threads, without jemalloc's own.

    Some builds of pyarrow have that one; it is stopped for a fork and started again.
    """
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return [name for name in names if name != "jemalloc_bg_thd"]


def _become(request: Mapping[str, Any]) -> None:
    """Turn this forked process into the requested command; does not return.

    A command that ends by itself does what the interpreter does at exit, up to taking its modules
    apart; any other way to end is left to the interpreter.
    """
    _use_files(request["output"])
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 (as long as the process)
    for name, value in request["environment"].items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    script = request["script"]
    sys.argv = [script, *request["arguments"]]
    sys.path[0] = os.path.dirname(script)
    from lightning.pytorch.utilities import rank_zero_only

    # Read from the environment when imported, which was before this process had one of its own.
    rank_zero_only.rank = int(os.environ.get("LOCAL_RANK", "0"))
    if request["before"] is not None:
        place, options = request["before"]
        module, function = place.split(":")
        sys.path.append(str(Path(__file__).parent))
        getattr(importlib.import_module(module), function)(**options)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if not isinstance(end.code, int):
            raise
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code)


def _use_files(output: str) -> None:
    """Make standard input empty, and append standard output and error to the file `output`."""
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, output, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    os.dup2(1, 2)


def _answer(content: Mapping[str, Any]) -> None:
    print(json.dumps(content), flush=True)


if __name__ == "__main__":
    _serve()
