"""Damage data from a seed: its bytes, or its structure."""

from __future__ import annotations

import copy
import random
from typing import Any

# Values of every kind, and those at which readers stumble.
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 255, 256, 2**31, 2**63, -(2**63), 10**400, 0.5, -0.0, 1e308,
    1e-320, float("inf"), float("-inf"), float("nan"), "", " ", "0", "x", "user", "gpt", "x" * 3000,
    "\0", "\ud800", "naïve 🦊", "\u202e", "<|end|>", "../../etc/passwd", "!!python/name:os.system",
    "²", [], {}, [[]], [None], {"": None}, [[[[[]]]]], {"a": {"a": {"a": []}}}, [0] * 300,
    ["x"] * 5,
)
PIECES = (
    b"\xff", b"\x00", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\\u0000", b"\\ud800", b'"', b"\\", b"{",
    b"}", b"[", b"]", b",", b":", b"null", b"NaN", b"1e999", b"9" * 5000, b"[" * 3000, b"- ",
    b"&a ", b"*a", b"!!int ", b"!!python/object:os.system ", b"? ", b"%", b"\t", b"#", b"|", b">",
    b"'",
)


def damaged_bytes(rng: random.Random, data: bytes, newlines: bool = False) -> bytes:
    """Return `data` with one to four flips, cuts, insertions or repetitions.

    No line end is added unless `newlines`.
    """
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        to = min(len(data), at + rng.choice((1, 1, 2, 5, 40)))
        kind = rng.randrange(5)
        if kind == 0:
            data = (
                data[:at]
                + bytes(byte ^ (1 << rng.randrange(8)) for byte in data[at:to])
                + data[to:]
            )
        elif kind == 1:
            data = data[:at] + data[to:]
        elif kind == 2:
            data = data[:at] + rng.choice(PIECES) + data[at:]
        elif kind == 3:
            data = data[:to] + data[at:]
        else:
            data = data[:at] if rng.random() < 0.3 else data[:at] + rng.randbytes(2) + data[to:]
    return data if newlines else data.replace(b"\n", b" ").replace(b"\r", b" ")


def damaged_value(rng: random.Random, value: Any) -> Any:
    """Copy a value, with one to three places removed, replaced, repeated, renamed or wrapped."""
    holder = [copy.deepcopy(value)]
    for _ in range(rng.randint(1, 3)):
        where, key = rng.choice(list(_places(holder)))
        kind = rng.randrange(5)
        if kind == 0 and where is not holder:
            del where[key]
        elif kind == 1 and isinstance(where, list):
            where.insert(key, copy.deepcopy(where[key]))
        elif kind == 2 and isinstance(where, dict):
            where[rng.choice(("from", "value", "id", "x", "", key + "_"))] = where.pop(key)
        elif kind == 3:
            where[key] = [where[key]] if rng.random() < 0.5 else {"x": where[key]}
        else:
            where[key] = copy.deepcopy(rng.choice(ODD_VALUES))
    return holder[0]


def _places(holder: Any):
    """Yield (container, key) of every value inside `holder`, at any depth."""
    keys = range(len(holder)) if isinstance(holder, list) else list(holder)
    for key in keys:
        yield holder, key
        if isinstance(holder[key], list | dict):
            yield from _places(holder[key])
