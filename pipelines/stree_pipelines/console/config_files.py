"""Read YAML files of options, and say in one sentence why a file is not what a command wants."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import TypeAdapter

from stree.common.errors import UsageError
from stree.common.plain_data import parse_yaml, read_text

# The keys that mark a file of each kind, for a file that another command is given. Order counts: a
# config of `stree eval` has no key that one of `stree gate` could not have.
MARKS: dict[str, tuple[str, ...]] = {
    "a config of `stree study`": ("distil", "hold_back", "seeds"),
    "a config of `stree compare`": ("arms",),
    "a config of `stree distil`": (
        "model.target", "model.drafter", "model.drafter_layers", "model.features"
    ),
    "a config of `stree train`": ("model.architecture", "model.loss_on", "tokenizer"),
    "a config of `stree distil` or `stree train`": ("model", "data", "trainer", "export"),
    "a config of `stree gate`": ("baseline", "fail_below"),
    "a config of `stree answers`": ("prompts", "num_rows", "shard_samples"),
    "a config of `stree eval`": ("run", "methods", "benchmarks", "temperatures"),
    "a tree, for an option `tree`": ("parents",),
}
WORDS: dict[Any, str] = {
    int: "a whole number", float: "a number", bool: "true or false", str: "text",
    list: "a list", tuple: "a list", dict: "keys with values", NoneType: "null",
}
NUM_EXAMPLES = 5  # keys that the error for another command's file names


def read_yaml(path: Path) -> Any:
    """Read a YAML file. Raises UsageError for a file that is missing or cannot be read."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder, wanted a YAML file")
    try:
        return parse_yaml(read_text(path))
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is no text in UTF-8 (byte {error.start + 1}), wanted a YAML file"
        ) from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): give a YAML file") from error
    except ValueError as error:
        raise UsageError(f"{path} cannot be read as YAML: {error}") from error


def require_options(content: Any, path: Path, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a YAML file of a command's options by dotted name.

    kinds: the types (as `require_type` takes them) of the command's options by dotted name, such as
        "model.optimizer.lr"; None where the parser looks at the value.

    Raises UsageError for a file that holds no keys with values, is the config of another command
    (`MARKS`), or has a value of another type.
    """
    values = dotted(require_keys(content, str(path)))
    parts = [name.split(".") for name in kinds]
    sections = {".".join(each[:depth]) for each in parts for depth in range(1, len(each))}
    tables = tuple(f"{name}." for name in kinds if name not in sections)  # read as they are
    require_own(
        path,
        [each for each in values if each not in sections and not each.startswith(tables)],
        kinds,
    )
    for name, value in values.items():
        is_file = isinstance(value, str) and os.path.isfile(value)
        if name in sections and not is_file:
            require_type(value, dict, f"{path}: {name}")
        if kinds.get(name) is not None:
            require_type(value, kinds[name], f"{path}: {name}")
    return values


def require_own(place: Path | str, names: Iterable[str], known: Collection[str]) -> None:
    """Raise UsageError for a file with a key that marks the config of another command (`MARKS`).

    place: the file, or the file and the key, for the error. names: its keys. known: the command's.
    """
    unknown = set(names) - set(known)
    for kind, marks in MARKS.items():
        if not unknown.isdisjoint(marks):
            examples = list(dict.fromkeys(name.partition(".")[0] for name in known))
            raise UsageError(
                f"{place} is {kind}; this command wants keys such as "
                f"{', '.join(examples[:NUM_EXAMPLES])}"
            )


def require_keys(value: Any, place: str, known: Iterable[str] = ()) -> dict[str, Any]:
    """Return a mapping whose keys are text, some of `known` unless that is empty.

    place: the file, or the file and the key, for the error. Raises UsageError for another value.
    """
    if not isinstance(value, Mapping):
        kind = {NoneType: "is empty", list: "is a list"}.get(type(value), f"is {value!r:.80}")
        raise UsageError(f"{place} {kind}, wanted keys with values")
    if others := [key for key in value if not isinstance(key, str)]:
        raise UsageError(f"{place} has the key {others[0]!r}, wanted keys that are text")
    if unknown := sorted(value.keys() - set(known)) if known else []:
        raise UsageError(f"{place} has {unknown}, wanted some of {', '.join(known)}")
    return dict(value)


def require_type(value: Any, kind: Any, place: str) -> None:
    """Raise UsageError for a value of a YAML file that is not of a type.

    kind: a plain type, a list or tuple of one, an alternative of types or a Literal.
    place: the file and the key, for the error.
    """
    if not _fits(value, kind):
        given = WORDS[NoneType] if value is None else f"{value!r:.80}"
        raise UsageError(f"{place} is {given}, wanted {_in_words(kind)}")


def dotted(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a mapping's values and those of the mappings in it by dotted name."""
    values = {}
    for key, value in content.items():
        values[f"{prefix}{key}"] = value
        if isinstance(value, Mapping):
            values |= dotted(value, f"{prefix}{key}.")
    return values


def _fits(value: Any, kind: Any) -> bool:
    try:
        TypeAdapter(kind).validate_json(json.dumps(value), strict=True)
    except (TypeError, ValueError):  # a value that JSON does not have, or of another type
        return False
    return True


def _in_words(kind: Any) -> str:
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType):
        return listed(_in_words(each) for each in inner)
    if origin is Literal:
        return listed(map(str, inner))
    if origin in (list, tuple) and inner:
        return f"a list of {_in_words(inner[0]).removeprefix('a ')}s"
    return WORDS[origin]


def listed(words: Iterable[str]) -> str:
    """Return alternatives in a sentence: a, b or c."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last
