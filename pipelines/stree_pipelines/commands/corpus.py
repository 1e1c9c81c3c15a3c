"""Unpack the embedded corpus: Python's own documentation as conversations, without a network.

`train.jsonl` and `valid.jsonl` are ShareGPT rows, `prompts.jsonl` rows of a benchmark (id,
category, turns, reference). Each module of the standard library is in one of the three only.
The README.md of pipelines/stree_pipelines/data/python_docs/ says how they were made, its
LICENSE.txt the terms.
"""

from __future__ import annotations

import gzip
import os
from pathlib import Path

from stree.common.files import write_atomically
from stree_pipelines.console.command_line import PlainParser

SHIPPED = Path(__file__).parents[1] / "data/python_docs"
FILES = {
    "train.jsonl": "training conversations",
    "valid.jsonl": "validation conversations",
    "prompts.jsonl": "prompts",
}


def unpack_corpus(out_dir: str | Path) -> dict[str, int]:
    """Write the corpus' three files into `out_dir` and return the number of rows of each.

    Raises `CannotWrite` when the folder refuses.
    """
    rows = {}
    for name in FILES:
        content = gzip.decompress((SHIPPED / f"{name}.gz").read_bytes())
        write_atomically(Path(out_dir) / name, content)
        rows[name] = content.count(b"\n")
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = PlainParser("stree corpus", description="Unpack the embedded corpus of Python's docs.")
    parser.add_argument("out", help="folder for train.jsonl, valid.jsonl and prompts.jsonl")
    options = parser.parse_args(arguments)
    rows = unpack_corpus(options.out)
    said = ", ".join(f"{rows[name]:,} {what}" for name, what in FILES.items())
    licences = os.path.relpath(SHIPPED / "LICENSE.txt")
    print(f"{said} -> {options.out} (licences: {licences})")
