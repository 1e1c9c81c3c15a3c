"""Read training configs that were written when there were more options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stree.common.errors import UsageError

LAST_COMMIT = "a8baf29f"  # that had them
# Each option that is gone, with its default: a resolved config of that time says it always.
RETIRED: dict[tuple[str, ...], Any] = {
    ("data", "strict"): False,
    ("tokenizer", "template"): "stree-chat",
    ("model", "loss", "reference"): None,
    ("model", "loss", "keep"): None,
}


def without_retired(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without the options that are gone and had their defaults."""
    kept = dict(config)
    for path, _ in _set_in(config, at_default=True):
        section = kept
        for name in path[:-1]:
            section[name] = dict(section[name])
            section = section[name]
        del section[path[-1]]
    return kept


def require_none_retired(config: Mapping[str, Any]) -> None:
    """Raise UsageError for an option that is gone and had another value than its default."""
    for path, value in _set_in(config, at_default=False):
        raise UsageError(
            f"{'.'.join(path)} is {value!r}: the option is gone since commit {LAST_COMMIT}; leave "
            "it out, or use that commit"
        )


def _set_in(config: Mapping[str, Any], at_default: bool) -> Iterator[tuple[tuple[str, ...], Any]]:
    for path, default in RETIRED.items():
        section: Any = config
        for name in path[:-1]:
            section = section.get(name) if isinstance(section, Mapping) else None
        if isinstance(section, Mapping) and path[-1] in section:
            value = section[path[-1]]
            if (value == default) == at_default:
                yield path, value
