"""Watch what a process does while it loads a file that it should not trust.

`install` cannot be undone, so it belongs into a process of its own. The first forbidden event ends
the process with code 99 and its name: running a program or foreign code, a connection, a write
outside the given folder. Code that the interpreter itself imports from its own or the project's
folders is allowed, and may be kept compiled there.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import resource
import sys
import sysconfig
import typing
from collections.abc import Sequence
from pathlib import Path
from types import CodeType
from typing import Any

FORBIDDEN_CODE = 99
REPOSITORY = Path(__file__).parents[2]
OWN_FOLDERS = tuple(
    {str(REPOSITORY), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))}
)
MAKERS_OF_CLASSES = (typing.__file__, collections.__file__, dataclasses.__file__)
FORBIDDEN = {
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn",
    "os.startfile", "os.kill", "os.killpg", "subprocess.Popen", "pickle.find_class", "marshal.load",
    "ctypes.dlsym",
    "socket.connect", "socket.bind", "socket.getaddrinfo", "socket.sendto",
    "urllib.Request", "ftplib.connect", "smtplib.connect", "webbrowser.open",
}
# Their first argument is a path.
WRITES = {
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.truncate",
    "os.link", "os.symlink", "os.utime", "shutil.rmtree", "shutil.move", "shutil.copyfile",
}


def install(folder: str, memory_bytes: int, cpu_s: int, allowed_code: Sequence[str] = ()) -> None:
    """Limit this process's processor time and memory, and watch it from now on (see `watch`).

    Args:
        folder: the only folder below which this process may write.
        memory_bytes: address space that it may map beyond what it has now.
        cpu_s: seconds of processor time after which the kernel stops it.
        allowed_code: see `watch`.
    """
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    watch(folder, allowed_code)


def watch(folder: str, allowed_code: Sequence[str] = ()) -> None:
    """End this process at the first forbidden event, from now on.

    Args:
        folder: the only folder below which this process may write.
        allowed_code: prefixes of the file names of code that may run, besides the project's own.
    """
    folder = os.path.abspath(folder)
    names_of_code = ("<frozen", *OWN_FOLDERS, *allowed_code)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if _is_allowed(event, arguments, folder, names_of_code):
            return
        os.write(2, f"\nforbidden: {event} {arguments!r:.300}\n".encode())
        os._exit(FORBIDDEN_CODE)

    sys.addaudithook(hook)


def _is_allowed(
    event: str, arguments: tuple[Any, ...], folder: str, names_of_code: tuple[str, ...]
) -> bool:
    if event == "ctypes.dlopen":
        return _is_for_own_code()
    if event in FORBIDDEN:
        return False
    if event == "exec":
        return arguments[0].co_filename.startswith(names_of_code) or _is_for_own_code()
    if event in ("compile", "code.__new__"):
        name = arguments[1]
        name = os.fsdecode(name) if isinstance(name, str | bytes) else ""
        return name.startswith(names_of_code) or _is_for_own_code()
    if event in WRITES:
        return _is_below(arguments[0], folder) or _keeps_compiled_code(arguments[0])
    if event == "open":
        path, mode, flags = arguments
        writes = any(letter in (mode or "") for letter in "wax+") or (flags or 0) & (
            os.O_WRONLY | os.O_RDWR | os.O_CREAT
        )
        known = isinstance(path, int) or _is_below(path, folder)
        return not writes or known or _keeps_compiled_code(path)
    return True


def _keeps_compiled_code(path: Any) -> bool:
    """Tell whether the interpreter is writing the compiled code of a module that it imports."""
    asks = sys._getframe(3).f_code.co_filename  # behind the hook
    return (
        asks == "<frozen importlib._bootstrap_external>"
        and "__pycache__" in Path(os.fsdecode(path)).parts
        and any(_is_below(path, folder) for folder in OWN_FOLDERS)
    )


def _is_for_own_code() -> bool:
    """Tell whether code that is trusted asked to compile or run a text.

    That is so while a module is imported (its own code was checked, and may make classes from text,
    as dataclasses do), and in the functions of the standard library that make classes.
    """
    frame = sys._getframe(3)  # behind the hook: who asked for it
    if frame.f_code.co_filename in MAKERS_OF_CLASSES:
        return True
    while frame is not None:
        code: CodeType = frame.f_code
        if code.co_filename == "<frozen importlib._bootstrap>" and code.co_name == "_load_unlocked":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _is_below(path: Any, folder: str) -> bool:
    if isinstance(path, int) or os.fspath(path) == os.devnull:
        return True
    return os.path.abspath(os.fsdecode(path)).startswith(folder + os.sep)
