"""Make benchmark prompts from users' questions in held-out conversations that name their source."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from stree.chat_encoding import ChatEncoder
from stree.common.errors import BadData
from stree_pipelines.evaluation.benchmarks import parse_prompts

Exchange = tuple[str, str]  # a user's text, and the answer
# Shares of a prompt's length that may stay free: below MIN_SHARE_LEFT the search ends, above
# MAX_SHARE_LEFT the text is too little. At most MAX_EXCHANGES_TRIED exchanges are tried.
MIN_SHARE_LEFT, MAX_SHARE_LEFT = 0.02, 0.1
MAX_EXCHANGES_TRIED = 300


class SourcedRow(NamedTuple):
    """A conversation with its source.

    said: the user's texts, turn by turn; exchanges: each with its answer.
    """

    line: str
    id: str
    source: str
    said: list[str]
    exchanges: list[Exchange]


def sourced_rows(file: Path) -> Iterator[SourcedRow]:
    """Read the lines of a ShareGPT file, JSONL or JSONL.gz. Raises BadData."""
    opened = gzip.open if file.suffix == ".gz" else open
    number = 0
    try:
        with opened(file, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                row = json.loads(line)
                turns = row["conversations"]
                said = [turn["value"] for turn in turns if turn["from"] == "human"]
                exchanges = [
                    (first["value"], second["value"])
                    for first, second in pairwise(turns)
                    if (first["from"], second["from"]) == ("human", "gpt")
                    and first["value"].strip()
                    and second["value"].strip()
                ]
                name = str(row.get("id", number))
                yield SourcedRow(line, name, str(row["source"]), said, exchanges)
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise BadData(
            f"{file}:{number}: {error!r}, wanted a conversation with its source"
        ) from error


def held_out_prompts(file: Path, source: str, limit: int, turns: int) -> str:
    """Make JSONL prompts of the first `limit` conversations whose source begins with `source`.

    A prompt has the first `turns` of its user, and the source as category. Returns "" when there is
    none. Raises BadData.
    """
    rows = (row for row in sourced_rows(file) if row.said and row.source.startswith(source))
    prompts = [_prompt(row, turns) for _, row in zip(range(limit), rows, strict=False)]
    return _lines(prompts, file)


def held_out_prompts_by_length(
    file: Path, source: str, limit: int, turns: int, lengths: Sequence[int], encoder: ChatEncoder
) -> dict[int, str]:
    """Make JSONL prompts by length in tokens: the same questions after other conversations'
    exchanges.

    A prompt holds as many exchanges as fit. The exchanges nearest to a question are the same at all
    lengths: a longer prompt begins earlier. Each prompt has the data's own answer to its question
    as its reference_answer. Raises BadData, also when the file has too little text.
    """
    rows = [row for row in sourced_rows(file) if row.exchanges and row.source.startswith(source)]

    @cache
    def size(exchange: Exchange) -> int:
        spoken = list(zip(("user", "assistant"), exchange, strict=True))
        return len(encoder.encode(spoken)[-1].tokens)

    prompts: dict[int, list[dict[str, Any]]] = {length: [] for length in lengths}
    for row in rows[:limit]:
        prompt = {**_prompt(row, turns), "reference_answer": row.exchanges[0][1]}
        question = len(encoder.encode_prompt([("user", row.said[0])]))
        history: list[str] = []
        room, unused = -question, _others(row, rows)
        for shorter, length in pairwise([0, *sorted(lengths)]):
            room += length - shorter
            before, left = _fitting(unused, room, length, size)
            room -= sum(map(size, before))
            if room > MAX_SHARE_LEFT * length and not left:
                raise BadData(
                    f"{file} has too little text for {length} tokens before {row.id}: take "
                    "shorter --lengths, or a larger file"
                )
            history = [text for each in reversed(before) for text in each] + history
            unused = chain(left, unused)
            prompts[length].append({**prompt, "history": history})
    return {length: _lines(each, file) for length, each in prompts.items()}


def _others(row: SourcedRow, rows: Sequence[SourcedRow]) -> Iterator[Exchange]:
    """Yield exchanges of other conversations, backwards from a row's question, in a random order.

    The order is a function of the row's id.
    """
    others = [each for each in rows if each.said[0] != row.said[0]]
    random.Random(row.id).shuffle(others)
    return chain.from_iterable(reversed(each.exchanges) for each in others)


def _fitting(
    unused: Iterator[Exchange], room: int, length: int, size: Callable[[Exchange], int]
) -> tuple[list[Exchange], list[Exchange]]:
    """Take the next exchanges that fit into `room` tokens; returns them, and those that do not fit.

    A longer prompt has room for the latter.
    """
    fitting: list[Exchange] = []
    left: list[Exchange] = []
    while room > MIN_SHARE_LEFT * length and len(left) < MAX_EXCHANGES_TRIED:
        exchange = next(unused, None)
        if exchange is None:
            break
        fits = size(exchange) <= room
        (fitting if fits else left).append(exchange)
        room -= size(exchange) if fits else 0
    return fitting, left


def _prompt(row: SourcedRow, turns: int) -> dict[str, Any]:
    return {"id": row.id, "category": row.source, "turns": row.said[:turns]}


def _lines(prompts: Sequence[dict[str, Any]], file: Path) -> str:
    text = "".join(json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in prompts)
    if prompts:
        parse_prompts(text.encode(), f"prompts of {file}")
    return text
