"""Parse JSON and YAML from untrusted files: plain data of limited size and depth, unique keys.

The parsers themselves recurse, repeat the values of aliases, and let the last of two equal keys
win. Text that makes them do so is refused before, by a `ValueError` with a reason.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

MAX_BYTES = 1 << 26  # a sharded index or a manifest has some megabytes at most
MAX_HEADER_BYTES = 1 << 24  # of safetensors: over 100,000 tensors; larger ones take seconds
MAX_DEPTH = 100
MAX_YAML_NODES = 100_000  # aliases counted as what they stand for
# Beyond these PyYAML's time grows with the square of a number in base 60 or of open brackets, and
# jsonargparse parses a string that it finds in YAML once more.
MAX_YAML_CHARS, MAX_YAML_SCALAR_CHARS = 1 << 20, 20_000

_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_text(path: Path) -> str:
    """Return the text of a regular file.

    Raises `OSError`, or `ValueError` for a file that is not regular (a pipe would be waited for, a
    device read without end), too large or no UTF-8.
    """
    if path.exists() and not path.is_file():
        raise ValueError("it is no regular file")
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"it has {size:,} bytes, at most {MAX_BYTES:,} are read")
    return path.read_text(encoding="utf-8")


def require_small_header(path: Path) -> None:
    """Raise `ValueError` for a safetensors file whose header would take seconds to parse.

    The header's size is the number in the file's first 8 bytes. Raises `OSError` as `open` does.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if size > MAX_HEADER_BYTES:
        raise ValueError(f"its header has {size:,} bytes, at most {MAX_HEADER_BYTES:,} are read")


def read_json(path: Path) -> Any:
    """Return a JSON file's content. Raises as `read_text` and `parse_json` do."""
    return parse_json(read_text(path))


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises `ValueError` also for NaN, keys given twice and too deep nesting. An infinity, as configs
    of transformers spell it, is a number.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_infinity)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text without Python's tags.

    Raises `ValueError` as `require_plain_yaml` does, and for a value that does not fit its tag.
    """
    require_plain_yaml(text)
    try:
        return yaml.load(text, Loader=_SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(_mistake(error)) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(" ".join(str(error).split())) from error


def require_plain_yaml(text: str) -> None:
    """Raise `ValueError` for text that is no YAML, gives a key twice, is nested too deep, or is too
    large when expanded.

    The limits are `MAX_DEPTH` and `MAX_YAML_NODES`: a few lines of aliases can stand for 10^9
    values.
    """
    sizes: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = []  # anchor, nodes before it
    num_nodes = 0
    if len(text) > MAX_YAML_CHARS:
        raise ValueError(f"it has {len(text):,} characters, at most {MAX_YAML_CHARS:,} are read")
    try:
        for event in yaml.parse(text, Loader=_SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                if event.anchor not in sizes:
                    raise ValueError(f"alias *{event.anchor} stands for nothing that is complete")
                num_nodes += sizes[event.anchor]
            elif isinstance(event, yaml.CollectionStartEvent):
                open_nodes.append((event.anchor, num_nodes))
                num_nodes += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, before = open_nodes.pop()
                if anchor is not None:
                    sizes[anchor] = num_nodes - before
            elif isinstance(event, yaml.ScalarEvent):
                num_nodes += 1
                if event.anchor is not None:
                    sizes[event.anchor] = 1
                if len(event.value) > MAX_YAML_SCALAR_CHARS:
                    raise ValueError(f"a value has more than {MAX_YAML_SCALAR_CHARS:,} characters")
            if len(open_nodes) > MAX_DEPTH:
                raise ValueError("it is nested too deep")
            if num_nodes > MAX_YAML_NODES:
                raise ValueError(f"it stands for more than {MAX_YAML_NODES:,} values")
    except yaml.YAMLError as error:
        # The scanner is ahead of the events, and since PyYAML 6.0.4 it has a limit of its own
        if "nesting depth" in str(error):
            raise ValueError("it is nested too deep") from None
        raise ValueError(_mistake(error)) from error
    _require_unique_keys(yaml.compose(text, Loader=_SafeLoader), set())


def _require_unique_keys(node: yaml.Node | None, done: set[int]) -> None:
    """Raise `ValueError` when a mapping inside `node` gives a key twice.

    done: the `id` of each node that was looked at, since aliases share nodes.
    """
    if not isinstance(node, yaml.CollectionNode) or id(node) in done:
        return
    done.add(id(node))
    lines: dict[tuple[str, str], int] = {}  # of each key
    for child in node.value:
        key, value = child if isinstance(node, yaml.MappingNode) else (None, child)
        if isinstance(key, yaml.ScalarNode):
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in lines:
                raise ValueError(
                    f"key {key.value[:80]!r} is given twice, in lines {lines[name]} and {line}"
                )
            lines[name] = line
        _require_unique_keys(key, done)
        _require_unique_keys(value, done)


def _mistake(error: yaml.YAMLError) -> str:
    """Return what PyYAML says is wrong with a text, and the place as people count it."""
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark) is not None:
        return f"{error.problem} (line {mark.line + 1}, column {mark.column + 1})"
    return " ".join(str(error).split()).replace(' in "<unicode string>",', " at")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"key {twice[:80]!r} is given twice")
    return content


def _infinity(name: str) -> float:
    if name == "NaN":
        raise ValueError("NaN is no number")
    return float(name)
