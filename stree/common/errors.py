"""Errors that a user can act on, their exit codes, and text that is safe to show."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from threading import current_thread, main_thread

# The extra of pyproject.toml that has a library, where decoding does without it.
EXTRA_OF = {
    "lightning": "train",
    "tensorboard": "train",
    "datasets": "train",
    "accelerate": "report",
    "matplotlib": "report",
    "pandas": "report",
    "pyarrow": "report",
    "fastapi": "serve",
    "starlette": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
    "llguidance": "serve",
    "opentelemetry": "serve",  # newer FastAPI needs its API
    "ray": "ray",
    "deepspeed": "deepspeed",
}
_LONGEST_REASON = 2000
# Control characters but tab and newline; embeddings, overrides and isolates of direction; halves of
# surrogate pairs, which no stream can encode
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def shown(text: str, mark: str = "\ufffd") -> str:
    """Replace control characters, and characters that reorder a line, by `mark`."""
    return _OBEYED.sub(mark, text)


class StreeError(ValueError):
    """Error that the user can act on: it says what was got, what was wanted, and what to do.

    Its message may quote files: control characters in it are replaced.
    """

    exit_code = 2

    def __init__(self, message: object = "") -> None:
        super().__init__(shown(str(message)))


class UsageError(StreeError):
    """Wrong arguments or configuration."""


def require_fitting(
    values: object, wanted: Mapping[str, tuple[bool, str]], prefix: str = ""
) -> None:
    """Raise UsageError for the first attribute of `values` that does not fit.

    wanted: by attribute's name, whether its value fits, and what was wanted. prefix: before the
    name in the message, such as "--" or "model.head.".
    """
    for name, (fits, what) in wanted.items():
        if not fits:
            raise UsageError(f"{prefix}{name} is {getattr(values, name)}, wanted {what}")


def require_owned(values: object, owners: Mapping[str, tuple[str, str]], prefix: str = "") -> None:
    """Raise UsageError for an attribute that is given though its owner is not chosen.

    owners: by attribute's name, the attribute that chooses, and the choice that the first is an
    option of; an attribute that is None is not given. prefix: as in `require_fitting`.
    """
    for name, (key, owner) in owners.items():
        if getattr(values, name) is not None and getattr(values, key) != owner:
            raise UsageError(
                f"{prefix}{name} is an option of {owner}, {prefix}{key} is {getattr(values, key)}: "
                "leave one of them out"
            )


class NotFound(UsageError):
    """A named file or folder that does not exist (a wrong one has the error of its kind)."""


class BadData(StreeError):
    """Conversations or benchmark files that cannot be used."""

    exit_code = 65


class CheckpointRefused(StreeError):
    """A checkpoint or tokenizer that is damaged, foreign or does not fit its partner."""

    exit_code = 66


class InvariantBroken(StreeError):
    """Losslessness broken, NaN met, or no progress: the results would be wrong."""

    exit_code = 70


class OutOfMemory(StreeError):
    """Something did not fit; the message names it and the setting that shrinks it."""

    exit_code = 71


class CannotWrite(StreeError):
    """The disk or folder refuses a write."""

    exit_code = 73


class QueueFull(StreeError):
    """A queue that takes no more requests now: ask again later."""

    exit_code = 75


class Preempted(StreeError):
    """Stopped from outside with everything saved: run the same command to go on."""

    exit_code = 75


class Interrupted(Preempted):
    """Stopped by Ctrl-C with everything saved."""

    exit_code = 128 + signal.SIGINT


def kind_of_code(code: int) -> type[StreeError]:
    """Return the kind of error that ends a command with an exit code; else InvariantBroken."""
    kinds = (UsageError, BadData, CheckpointRefused, OutOfMemory, CannotWrite, Preempted)
    return next((kind for kind in kinds if kind.exit_code == code), InvariantBroken)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out: on a GPU, in PyTorch or in Python.

    PyTorch has no type of its own for the host's memory.
    """
    is_torch = type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)
    return is_torch or isinstance(error, MemoryError)


@contextlib.contextmanager
def naming_what_does_not_fit(remedy: str, what: str = "") -> Iterator[None]:
    """Turn running out of memory inside the block into an `OutOfMemory`.

    Its message has `what` the memory was for, and the `remedy`.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        named = f"{what}: " if what else ""
        raise OutOfMemory(f"{named}{first_line(error)}; {remedy}") from error


def error_of_request(error: BaseException) -> Exception:
    """Return what a request's own code has raised as an error that ends this request alone.

    SystemExit and others that would end a thread become a `UsageError`. In the main thread they are
    raised: Ctrl-C and handlers of signals raise there, and mean the whole process.
    """
    if isinstance(error, Exception):
        return error
    if current_thread() is main_thread():
        raise error
    named = UsageError(f"code of a request raised {error!r}, wanted an Exception if it fails")
    named.__cause__ = error
    return named


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error, or its type if it has no message."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def exit_with_reason(main: Callable[[], object]) -> None:
    """Run an entry point, and end the process with its exit code.

    A `StreeError`, or a library that is not installed, becomes one line on stderr and a code.

    One of several processes leaves without the interpreter's own shutdown: a thread of PyTorch's
    that asks for the interpreter then aborts the process (seen, rarely, on a busy machine), and the
    launcher would end the others for it.
    """
    code: object = 0
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # τ in a terminal of ASCII
    try:
        main()
        sys.stdout.flush()
    except StreeError as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        code = error.exit_code
    except BrokenPipeError:  # `… | head` has seen enough
        _drop_output()
        code = 128 + signal.SIGPIPE
    except ModuleNotFoundError as error:
        if error.name is None or "." in error.name:  # no library as a whole
            raise
        print(f"error: {_without_library(error.name)}", file=sys.stderr)
        code = UsageError.exit_code
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            name = one_line(str(error.filename))
            print(f"error: {name:.60}… is longer than a path can be: name another", file=sys.stderr)
            code = UsageError.exit_code
        elif error.errno == errno.ENOSPC:
            _drop_output()
            print(f"error: {error}: free some space, then run again", file=sys.stderr)
            code = CannotWrite.exit_code
        else:
            raise
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        code = Interrupted.exit_code
    except SystemExit as leaving:
        code = 0 if leaving.code is None else leaving.code
    if isinstance(code, int) and _one_of_many():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)  # type: ignore[arg-type]


def _without_library(name: str) -> str:
    """Return what to do about a library that this Python does not have."""
    extra = EXTRA_OF.get(name)
    if extra is None:
        return (
            f"{sys.executable} has no library {name!r}: install stree there with all that it "
            "needs, or use an environment that has it, in a clone .venv/bin/stree"
        )
    program = Path(sys.argv[0]).name
    if program in ("stree", "__main__.py"):
        program = " ".join(["stree", *sys.argv[1:2]])
    return (
        f"{program} needs stree[{extra}], {name} is not installed: type {sys.executable} -m pip "
        f"install 'stree-spec[{extra}]', or in a clone make install"
    )


def _drop_output() -> None:
    """Discard output that cannot be flushed: the interpreter's own flush at exit would fail."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def warn(message: str) -> None:
    """Warn the caller of the function that calls this one, in one line; it may quote files."""
    warnings.warn(one_line(message), stacklevel=3)


@functools.cache
def warn_once(message: str) -> None:
    """Warn as `warn` does, but only once of each message while the process runs."""
    warnings.warn(one_line(message), stacklevel=3)


def one_line(text: str) -> str:
    """Return a reason as one line that a terminal can show.

    Texts of libraries and files may have many lines, any length, or characters that move the
    cursor.
    """
    line = " ".join(shown(text[: 4 * _LONGEST_REASON], " ").split())
    return line if len(line) <= _LONGEST_REASON else line[:_LONGEST_REASON] + " …"


def _one_of_many() -> bool:
    counts = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "SLURM_NTASKS"))
    return any(count.isdigit() and int(count) > 1 for count in counts)
