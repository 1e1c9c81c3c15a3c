"""Faults that a test plants into a command's process before its script starts (`Forks.start`).

The product has no hooks for them: these functions replace what it calls. Each is given by name and
JSON arguments, since it runs in another process.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any


def die_at(call: str, naming: str = "", when: str = "before", nth: int = 1) -> None:
    """SIGKILL before or after the nth call of `call` ("module:name", a dotted name) that has an
    argument with `naming` in it."""
    left = nth

    def instead(original: Callable) -> Callable:
        def dying(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= any(naming in str(each) for each in arguments)
            if left == 0 and when == "before":
                _die()
            result = original(*arguments, **options)
            if left == 0:
                _die()
            return result

        return dying

    _replace(call, instead)


def fill_disk(folder: str, call: str, nth: int = 1, spare_bytes: int = 0) -> None:
    """Before the nth call of `call`, leave so many bytes free on the disk of `folder`."""

    def instead(original: Callable) -> Callable:
        return _at(original, nth, fill)

    def fill() -> None:
        disk = os.statvfs(folder)
        with open(Path(folder, "filler"), "wb") as file:
            file.write(bytes(max(0, disk.f_bavail * disk.f_frsize - spare_bytes)))

    _replace(call, instead)


def run_out_of_memory(call: str, nth: int = 1) -> None:
    """What a GPU's allocator raises, at the nth call of `call`."""
    import torch

    def refuse() -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of "
            "139.00 GiB of which 3.00 GiB is free.\nIf reserved memory is large, try …"
        )

    _replace(call, lambda original: _at(original, nth, refuse))


def die_inside_a_save(nth: int, line: int) -> None:
    """SIGKILL when the nth save has executed so many lines of stree/files.py."""
    lines: list[int] = []

    def count(saves: int, executed: int) -> None:
        if (saves, executed) == (nth, line):
            _die()

    _watch_saves(lines, count)


def count_lines_of_saves(path: str) -> None:
    """Write the lines of stree/files.py that the saves of the run execute, one number a save."""
    lines: list[int] = []

    def note(saves: int, executed: int) -> None:
        Path(path).write_text(" ".join(map(str, lines)), encoding="utf-8")

    _watch_saves(lines, note, at_each_line=False)


def _watch_saves(
    lines: list[int], at: Callable[[int, int], None], at_each_line: bool = True
) -> None:
    from stree import files

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != files.__file__:
            return trace if event == "call" else None
        if event == "line":
            lines[-1] += 1
            if at_each_line:
                at(len(lines), lines[-1])
        return trace

    def instead(original: Callable) -> Callable:
        def saving(*arguments: Any) -> None:
            lines.append(0)
            sys.settrace(trace)
            try:
                original(*arguments)
            finally:
                sys.settrace(None)
            if not at_each_line:
                at(len(lines), lines[-1])

        return saving

    _replace("stree_pipelines.checkpointing:TrainingCheckpoints._save", instead)


def _at(original: Callable, nth: int, action: Callable[[], None]) -> Callable:
    left = nth

    def calling(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            action()
        return original(*arguments, **options)

    return calling


def _replace(call: str, instead: Callable[[Callable], Callable]) -> None:
    module, name = call.split(":")
    owner: Any = importlib.import_module(module)
    *path, last = name.split(".")
    for each in path:
        owner = getattr(owner, each)
    setattr(owner, last, instead(getattr(owner, last)))


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
