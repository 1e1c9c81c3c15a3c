"""Make text of files and models safe to show."""

from __future__ import annotations

import re

# Control characters but tab and newline; embeddings, overrides and isolates of direction; halves of
# surrogate pairs, which no stream can encode
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def shown(text: str, mark: str = "\ufffd") -> str:
    """Replace characters that a terminal would obey, and those that reorder a line, by `mark`."""
    return _OBEYED.sub(mark, text)
