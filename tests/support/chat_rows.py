"""Make rows of chat data, good ones and parts of bad ones."""

from __future__ import annotations

import json
from pathlib import Path

HUMAN = {"from": "human", "value": "hi"}
GPT = {"from": "gpt", "value": "hello"}
TURNS = [HUMAN, GPT]
GOOD = json.dumps({"id": "g", "conversations": [HUMAN, GPT]}).encode()
PAIR = (("user", "hi"), ("assistant", "hello"))


def row(*turns: object, **rest: object) -> bytes:
    """Encode a row of `turns` with the further keys `rest`."""
    return json.dumps({"conversations": list(turns), **rest}).encode()


def write(path: Path, lines: list[bytes]) -> Path:
    """Write rows to a file of lines, and return its path."""
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path
