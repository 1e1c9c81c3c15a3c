"""What users say in conversations whose rows name their source, as benchmark prompts."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from stree.errors import BadData
from stree_pipelines.evaluation.benchmarks import parse_prompts


class SourcedRow(NamedTuple):
    """A conversation; `said` is what its user says, turn by turn."""

    line: str
    id: str
    source: str
    said: list[str]


def sourced_rows(file: Path) -> Iterator[SourcedRow]:
    """The lines of a ShareGPT file, JSONL or JSONL.gz. Raises BadData."""
    opened = gzip.open if file.suffix == ".gz" else open
    number = 0
    try:
        with opened(file, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                row = json.loads(line)
                turns = row["conversations"]
                said = [turn["value"] for turn in turns if turn["from"] == "human"]
                yield SourcedRow(line, str(row.get("id", number)), str(row["source"]), said)
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise BadData(
            f"{file}:{number}: {error!r}, wanted a conversation with its source"
        ) from error


def prompts_asked(file: Path, source: str, limit: int, turns: int) -> str:
    """JSONL of the first `limit` conversations whose source begins with `source`: their user's
    first `turns`, with the source as category. Empty when there is none. Raises BadData."""
    prompts: list[str] = []
    for row in sourced_rows(file):
        if row.said and row.source.startswith(source) and len(prompts) < limit:
            prompt = {"id": row.id, "category": row.source, "turns": row.said[:turns]}
            prompts.append(json.dumps(prompt, ensure_ascii=False) + "\n")
    text = "".join(prompts)
    if prompts:
        parse_prompts(text.encode(), f"prompts of {file}")
    return text
