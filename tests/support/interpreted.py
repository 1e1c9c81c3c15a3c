"""Triton's interpreter, without what it does anew at each call of a device function: look through
all of `triton.language` for what to replace by its own, although the launch has done so."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def replace_the_language_once_a_launch() -> None:
    """A third of the time of a kernel's test is saved; another version of Triton is left alone."""
    replace: Callable[[Any], Any] | None = getattr(interpreter, "_patch_lang", None)
    if replace is None or not hasattr(interpreter, "_LangPatchScope"):
        return
    replaced: set[frozenset[str]] = set()

    @cache
    def languages(function: Any) -> frozenset[str]:
        modules = function.__globals__.values()
        return frozenset(each.__name__ for each in modules if each is tl or each is tl.core)

    def once(function: Any) -> Any:
        if languages(function) in replaced:
            return interpreter._LangPatchScope()
        scope = replace(function)
        replaced.add(languages(function))
        restore = scope.restore

        def end_launch() -> None:  # calls inside a launch leave theirs as it is
            restore()
            replaced.clear()

        scope.restore = end_launch
        return scope

    interpreter._patch_lang = once
