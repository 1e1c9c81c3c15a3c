"""Conversations in: ShareGPT-style rows from JSONL(.gz), Parquet or `datasets`, each one checked.

A row is `{"conversations": [{"from": "human", "value": "…"}, …]}` or
`{"messages": [{"role": "user", "content": "…"}, …]}`, with an optional `id`. A bad row is counted
by reason and skipped; with `strict` it ends the run with its file and line. JSONL is read line by
line here and not by a library, because `load_dataset("json")` fails the whole file for one bad
line and lets wrong types pass. Memory stays flat: one row is held at a time, and a line that is
too long is never held at all.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from stree.errors import BadData, NotFound

Turn = tuple[str, str]  # (role, text), role one of "system", "user", "assistant"

NOT_JSON = "not JSON"
INVALID_UTF8 = "invalid UTF-8"
NO_TURNS = "no turns"
WRONG_ROLES = "wrong roles"
EMPTY_TEXT = "empty text"
WRONG_TYPES = "wrong types"
HUGE = "huge"
REASONS = (NOT_JSON, INVALID_UTF8, NO_TURNS, WRONG_ROLES, EMPTY_TEXT, WRONG_TYPES, HUGE)

ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
}
# JSON of conversations packs to a third or a fifth; of one row repeated, gzip makes a 200th.
MOST_EXPANSION = 500
MOST_EMPTY_LINES = 100_000
LINE_SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
# A character can take six bytes as \uXXXX; the rest of a row (ids, keys) gets a margin.
BYTES_PER_CHAR, LINE_MARGIN_BYTES = 6, 1 << 16
DATASET_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Conversation:
    """One accepted row: an optional system turn, then user and assistant in turn, ending with the
    assistant. `turns` holds (role, text)."""

    id: str
    turns: tuple[Turn, ...]


@dataclass
class ReadReport:
    """What became of the rows read so far: `accepted + rejected == given` at any moment."""

    source: str
    given: int = 0
    accepted: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    first_seen: dict[str, str] = field(default_factory=dict)  # reason -> file:line of its first row

    @property
    def rejected(self) -> int:
        return sum(self.reasons.values())

    def __str__(self) -> str:
        text = f"{self.source}: {self.accepted:,} of {self.given:,} conversations kept"
        if self.rejected:
            text += "; skipped " + ", ".join(
                f"{count:,} {reason} (first at {self.first_seen[reason]})"
                for reason, count in self.reasons.most_common()
            )
        return text


class BadRow(Exception):
    """Why a row is refused; `reason` is one of `REASONS`."""

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


def read_conversations(
    source: str | Path, strict: bool = False, limit: int | None = None, max_chars: int = 200_000
) -> tuple[Iterator[Conversation], ReadReport]:
    """Conversations of `source` one by one, and the report that fills up as they are taken.

    source: a `.jsonl`, `.jsonl.gz` or `.parquet` file, a folder of them, a folder written by
        `datasets.save_to_disk`, or a `datasets` name with an optional split (`owner/name:split`,
        split "train" when left out).
    strict: stop at the first bad row instead of skipping it.
    limit: stop after this many accepted conversations.
    max_chars: characters of text above which a row counts as huge.

    Raises `NotFound` when there is no such source, and `BadData`: it cannot be read, an archive
    breaks off, a bad row in strict mode, and, when the rows run out, if none was accepted.
    """
    report = ReadReport(str(source))
    return _accepted(_rows(source, max_chars), report, strict, limit, max_chars), report


def _accepted(
    rows: Iterator[tuple[str, Any]],
    report: ReadReport,
    strict: bool,
    limit: int | None,
    max_chars: int,
) -> Iterator[Conversation]:
    for place, row in rows:
        if limit is not None and report.accepted >= limit:
            return
        report.given += 1
        try:
            if isinstance(row, BadRow):
                raise row
            conversation = parse_row(row, place, max_chars)
        except BadRow as bad:
            report.reasons[bad.reason] += 1
            report.first_seen.setdefault(bad.reason, place)
            if strict:
                raise BadData(f"{place}: {bad} (strict mode stops at the first bad row)") from None
            continue
        report.accepted += 1
        yield conversation
    if not report.accepted:
        raise BadData(
            f"no usable conversation left. {report}. Wanted rows like "
            '{"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}'
        )


def parse_row(row: Any, place: str, max_chars: int) -> Conversation:
    """The conversation in a decoded row, or `BadRow`. `place` names it when it has no id."""
    if not isinstance(row, dict):
        raise BadRow(WRONG_TYPES, f"a row must be an object, got {type(row).__name__}")
    turns = row.get("conversations")
    if turns is None:
        turns = row.get("messages")
    if turns is None or turns == []:
        raise BadRow(NO_TURNS, "neither `conversations` nor `messages` holds a turn")
    if not isinstance(turns, list):
        raise BadRow(WRONG_TYPES, f"the turns must be a list, got {type(turns).__name__}")
    parsed = tuple(_parse_turn(turn, number) for number, turn in enumerate(turns))
    num_chars = sum(len(text) for _, text in parsed)
    if num_chars > max_chars:
        raise BadRow(HUGE, f"{num_chars:,} characters, the limit is {max_chars:,}")
    _check_order([role for role, _ in parsed])
    name = row.get("id")
    return Conversation(str(name) if isinstance(name, str | int) else place, parsed)


def _parse_turn(turn: Any, number: int) -> Turn:
    if not isinstance(turn, dict):
        raise BadRow(WRONG_TYPES, f"turn {number} must be an object, got {type(turn).__name__}")
    if "from" in turn:
        role, text = turn["from"], turn.get("value")
    else:
        role, text = turn.get("role"), turn.get("content")
    if not isinstance(role, str) or not isinstance(text, str):
        raise BadRow(
            WRONG_TYPES,
            f"turn {number} needs a role and a text, got {type(role).__name__} "
            f"and {type(text).__name__}",
        )
    if role not in ROLES:
        raise BadRow(WRONG_ROLES, f"turn {number} is from {role[:40]!r}, wanted {', '.join(ROLES)}")
    if not text.strip():
        raise BadRow(EMPTY_TEXT, f"turn {number} ({role}) says nothing")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair
        raise BadRow(INVALID_UTF8, f"turn {number} holds half a surrogate pair") from error
    return ROLES[role], text


def _check_order(roles: list[str]) -> None:
    spoken = roles[1:] if roles[0] == "system" else roles
    wanted = ["user", "assistant"] * (len(spoken) // 2)
    if not spoken or spoken != wanted:
        short = " ".join(role[0] for role in roles[:12])
        raise BadRow(
            WRONG_ROLES,
            f"wanted an optional system turn, then user and assistant in turn, ending with "
            f"assistant; got {short}{' …' if len(roles) > 12 else ''}",
        )


def require_source(source: str | Path) -> None:
    """Raise `NotFound` for a file or folder that is not there; reads nothing, fetches nothing."""
    _rows(source, max_chars=1)


def _rows(source: str | Path, max_chars: int) -> Iterator[tuple[str, Any]]:
    """(place, decoded row or BadRow) of every row of any kind of source."""
    path = Path(source).expanduser()
    if path.is_dir():
        if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
            return _dataset_rows(str(path), on_disk=True)
        return _folder_rows(path, max_chars)
    if path.is_file():
        return _file_rows(path, max_chars)
    name = str(source)
    looks_local = name.startswith(("/", ".", "~")) or name.endswith(
        (*LINE_SUFFIXES, ".parquet", ".json")
    )
    if looks_local or not DATASET_NAME.fullmatch(name):
        raise NotFound(f"{name}: no such file or folder")
    return _dataset_rows(name, on_disk=False)


def _folder_rows(folder: Path, max_chars: int) -> Iterator[tuple[str, Any]]:
    files = sorted(
        path for path in folder.rglob("*") if path.name.endswith((*LINE_SUFFIXES, ".parquet"))
    )
    if not files:
        raise BadData(f"{folder}: holds no .jsonl, .jsonl.gz or .parquet file")
    for path in files:
        yield from _file_rows(path, max_chars)


def _file_rows(path: Path, max_chars: int) -> Iterator[tuple[str, Any]]:
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    if path.name.endswith(LINE_SUFFIXES):
        return _line_rows(path, max_chars)
    raise BadData(
        f"{path}: wanted one of {', '.join((*LINE_SUFFIXES, '.parquet'))}. A .json file that is "
        "one long list becomes JSONL with `jq -c '.[]' in.json > out.jsonl`"
    )


def _line_rows(path: Path, max_chars: int) -> Iterator[tuple[str, Any]]:
    max_bytes = BYTES_PER_CHAR * max_chars + LINE_MARGIN_BYTES
    number = 0
    try:
        with path.open("rb") as stored:
            for number, line in enumerate(_lines(stored, path.suffix == ".gz", max_bytes), start=1):
                if line is None:
                    yield f"{path}:{number}", BadRow(HUGE, f"the line is over {max_bytes:,} bytes")
                elif line.strip():  # an empty line is no row
                    yield f"{path}:{number}", _decode(line, first=number == 1)
    except (OSError, EOFError, zlib.error) as error:
        raise BadData(f"{path}: cannot be read beyond line {number}: {error}") from error


def _lines(stored: BinaryIO, packed: bool, max_bytes: int) -> Iterator[bytes | None]:
    """Lines of a file; None for one over `max_bytes`, which is passed over in pieces.

    Raises OSError when a packed file unpacks to more than `MOST_EXPANSION` times its size, or there
    is nothing but empty lines.
    """
    file = gzip.GzipFile(fileobj=stored) if packed else stored
    num_bytes, num_empty = 0, 0
    is_whole = True  # the line so far
    while piece := file.readline(max_bytes + 1):
        num_bytes += len(piece)
        if packed and num_bytes > MOST_EXPANSION * stored.tell():
            raise OSError(f"it unpacks to over {MOST_EXPANSION} times its size")
        num_empty = num_empty + 1 if piece == b"\n" else 0
        if num_empty > MOST_EMPTY_LINES:
            raise OSError(f"{MOST_EMPTY_LINES:,} empty lines in a row")
        ends = len(piece) <= max_bytes or piece.endswith(b"\n")
        if ends:
            yield piece if is_whole else None
        is_whole = ends
    if not is_whole:
        yield None


def _decode(line: bytes, first: bool) -> Any:
    try:
        text = line.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        return BadRow(INVALID_UTF8, f"byte {error.start} of the line")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return BadRow(NOT_JSON, str(error)[:120])


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                for index in range(batch.num_rows):
                    number += 1
                    yield f"{path}:{number}", _arrow_row(batch, index)
    except (OSError, pyarrow.ArrowException) as error:
        raise BadData(f"{path}: cannot be read beyond row {number}: {error}") from error


def _arrow_row(batch: Any, index: int) -> Any:
    try:
        return batch.slice(index, 1).to_pylist()[0]
    except UnicodeDecodeError as error:  # Arrow does not check the strings it is handed
        return BadRow(INVALID_UTF8, str(error)[:120])


def _dataset_rows(name: str, on_disk: bool) -> Iterator[tuple[str, Any]]:
    import datasets

    path, _, split = (name, "", "") if on_disk else name.partition(":")
    dataset: Any = None
    try:
        if on_disk:
            dataset = datasets.load_from_disk(path)
        else:
            dataset = datasets.load_dataset(path, split=split or "train", streaming=True)
        if isinstance(dataset, datasets.DatasetDict):
            if "train" not in dataset:
                raise BadData(f"{name}: has no split `train`, only {', '.join(dataset)}")
            dataset = dataset["train"]
        for number, row in enumerate(dataset, start=1):
            yield f"{name}:{number}", row
    except BadData:
        raise
    except Exception as error:  # a damaged folder makes it raise whatever Python can
        if dataset is None and not on_disk:
            raise NotFound(
                f"{name}: no such file or folder, and `datasets` cannot fetch it: "
                f"{type(error).__name__}: {error}"
            ) from error
        raise BadData(
            f"{name}: `datasets` cannot load it: {type(error).__name__}: {error}"
        ) from error
