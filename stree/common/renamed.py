"""Public names of the last version, which work for one more version and say the new name."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, ClassVar


def say_renamed(old: str, new: str, stacklevel: int = 3) -> None:
    """Warn that a public name has changed."""
    warnings.warn(f"{old} is called {new} now", DeprecationWarning, stacklevel)


class Renamed:
    """Base of a class with attributes whose names have changed: `RENAMED` maps old to new."""

    RENAMED: ClassVar[dict[str, str]] = {}

    if not TYPE_CHECKING:  # or type checkers would take any name

        def __getattr__(self, name: str) -> Any:
            new = type(self).RENAMED.get(name)
            if new is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            say_renamed(f"{type(self).__name__}.{name}", new)
            return getattr(self, new)
