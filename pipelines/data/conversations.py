"""Read conversations from JSONL, JSON lists, Parquet or `datasets`, and check each row.

docs/your-own.md has the table of formats. A bad row is counted by reason and skipped; with `strict`
it ends the run with its file and line. Rows are decoded one by one here and not by a library,
because `load_dataset("json")` fails the whole file for one bad line and lets wrong types pass. One
row is held at a time, plus a hash of each id; a line that is too long is never held.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, cast

from stree.common.errors import BadData, NotFound

Turn = tuple[str, str]  # (role, text), role one of "system", "user", "assistant"

NOT_JSON = "not JSON"
INVALID_UTF8 = "invalid UTF-8"
NO_TURNS = "no turns"
WRONG_ROLES = "wrong roles"
REPEATED_ROLE = "one role twice in a row"
TOOLS = "tools"
MEDIA = "images or other media"
EMPTY_TEXT = "empty text"
WRONG_TYPES = "wrong types"
HUGE = "huge"
REASONS = (
    NOT_JSON, INVALID_UTF8, NO_TURNS, WRONG_ROLES, REPEATED_ROLE, TOOLS, MEDIA, EMPTY_TEXT,
    WRONG_TYPES, HUGE,
)  # fmt: skip

ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "chatgpt", "bing", "bard"), "assistant"),
}
TOOL_ROLES = frozenset(
    ("tool", "function", "ipython", "observation", "function_call", "function_response",
     "tool_call", "tool_response")
)  # fmt: skip
TURN_KEYS = ("conversations", "messages", "conversation")
KNOWN_KEYS = frozenset((*TURN_KEYS, "id", "system", "tools"))
KNOWN_TURN_KEYS = frozenset(
    ("from", "role", "value", "content", "weight", "train", "tool_calls", "function_call")
)
TEXT_PARTS = ("text", "input_text", "output_text")
TOOL_PARTS = ("tool_use", "tool_result", "tool_call")
# Names in a report: how many differ, how many are said, and how long one may be.
MOST_NAMES, SAID_NAMES, LONGEST_NAME = 1000, 8, 40
# JSON of conversations packs to a third or a fifth; of one row repeated, gzip makes a 200th.
MOST_EXPANSION = 500
MOST_EMPTY_LINES = 100_000
BOM = b"\xef\xbb\xbf"
GZIP, ZSTD, UTF16 = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", (b"\xff\xfe", b"\xfe\xff")
PACKINGS = ("", ".gz", ".zst")
LINE_SUFFIXES = tuple(name + packing for name in (".jsonl", ".ndjson") for packing in PACKINGS)
LIST_SUFFIXES = tuple(".json" + packing for packing in PACKINGS)
CHUNK_BYTES = 1 << 20
SPACE = re.compile(r"\s*")
# A character can take six bytes as \uXXXX; the rest of a row (ids, keys) gets a margin.
BYTES_PER_CHAR, LINE_MARGIN_BYTES = 6, 1 << 16
DATASET_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Conversation:
    """One accepted row: an optional system turn, then user and assistant in turn, ending with the
    assistant. `turns` holds (role, text); `masked` the numbers of turns that carry no loss."""

    id: str
    turns: tuple[Turn, ...]
    masked: frozenset[int] = frozenset()


@dataclass
class ReadReport:
    """Counts of the rows read so far: `accepted + rejected == given` at any moment.

    roles: rejected rows for each role that is not known.
    notes: kept rows for each change that was made to them ("leading assistant turn dropped").
    passed_over: rows for each key that has no effect ("source", "turn.name").
    """

    source: str
    given: int = 0
    accepted: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    first_seen: dict[str, str] = field(default_factory=dict)  # reason -> file:line of its first row
    roles: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    passed_over: Counter[str] = field(default_factory=Counter)

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
        for title, counts in (
            ("roles met", self.roles), ("changed", self.notes),
            ("keys passed over", self.passed_over),
        ):  # fmt: skip
            if counts:
                said = [f"{count:,} {name}" for name, count in counts.most_common(SAID_NAMES)]
                more = [f"{len(counts) - SAID_NAMES} more"] if len(counts) > SAID_NAMES else []
                text += f"; {title}: " + ", ".join(said + more)
        return text


class BadRow(Exception):
    """A row's refusal; `reason` is one of `REASONS`, `role` the unknown role that it has."""

    def __init__(self, reason: str, detail: str, role: str | None = None):
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.role = role


class RepeatedKeys(dict):
    """A JSON object that spells one of its keys twice; the last value counts."""


def read_conversations(
    source: str | Path, strict: bool = False, limit: int | None = None, max_chars: int = 200_000
) -> tuple[Iterator[Conversation], ReadReport]:
    """Conversations of `source` one by one, and the report that fills up as they are taken.

    source: a `.jsonl`, `.json` (a list) or `.parquet` file, plain or in gzip or zstd, a folder
        of them, a folder written by `datasets.save_to_disk`, or a `datasets` name with an optional
        split (`owner/name:split`, split "train" when left out).
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
    seen: Counter[int] = Counter()  # hash of an id -> rows that have it
    for place, row in rows:
        if limit is not None and report.accepted >= limit:
            return
        report.given += 1
        try:
            if isinstance(row, BadRow):
                raise row
            conversation, notes = parse_row(row, place, max_chars)
        except BadRow as bad:
            if bad.role is not None:
                _count(report.roles, [repr(bad.role[:LONGEST_NAME])])
            report.reasons[bad.reason] += 1
            report.first_seen.setdefault(bad.reason, place)
            if strict:
                raise BadData(f"{place}: {bad} (strict mode stops at the first bad row)") from None
            continue
        report.accepted += 1
        _count(report.passed_over, _unknown_keys(row))
        if conversation.id != place:
            key = hash(conversation.id)
            seen[key] += 1
            if seen[key] > 1:
                notes.append("repeated ids numbered")
                name = f"{conversation.id}#{seen[key]}"
                conversation = replace(conversation, id=name)
        report.notes.update(notes)
        yield conversation
    if not report.accepted:
        raise BadData(
            f"no usable conversation left. {report}. Wanted rows like "
            '{"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}'
        )


def _count(counter: Counter[str], names: list[str]) -> None:
    for name in names:
        if name in counter or len(counter) < MOST_NAMES:
            counter[name] += 1


def _unknown_keys(row: Any) -> list[str]:
    """Return the keys of a row, and of its turns as `turn.KEY`, that have no effect."""
    if not isinstance(row, dict):
        return []
    names = set(row) - KNOWN_KEYS
    turns = _turns_in(row)
    for turn in turns if isinstance(turns, list) else []:
        names |= {f"turn.{key}" for key in set(turn) - KNOWN_TURN_KEYS if turn[key] is not None}
    return [ascii(name[:LONGEST_NAME])[1:-1] for name in sorted(names)]


def parse_row(row: Any, place: str, max_chars: int) -> tuple[Conversation, list[str]]:
    """Return the conversation in a decoded row, and the changes made to it. Raises `BadRow`.

    place: names the conversation when it has no id.
    """
    if isinstance(row, list) and row and all(isinstance(turn, dict) for turn in row):
        row = {"messages": row}
    if not isinstance(row, dict):
        raise BadRow(WRONG_TYPES, f"a row must be an object, got {type(row).__name__}")
    turns = _turns_in(row)
    if turns is None:
        raise BadRow(NO_TURNS, f"none of {', '.join(TURN_KEYS)} holds a turn")
    if not isinstance(turns, list):
        raise BadRow(WRONG_TYPES, f"the turns must be a list, got {type(turns).__name__}")
    if row.get("tools") not in (None, [], "", "[]"):
        raise BadRow(TOOLS, "the row has `tools`")
    parsed = [_parse_turn(turn, number) for number, turn in enumerate(turns)]
    weights = [_weight(turn, number) for number, turn in enumerate(turns)]
    system = row.get("system")
    if isinstance(system, str) and system.strip() and parsed[0] != ("system", system):
        _require_unicode(system, "the row's system prompt")
        parsed.insert(0, ("system", system))
        weights.insert(0, 1)
    elif system is not None and not isinstance(system, str):
        raise BadRow(WRONG_TYPES, f"`system` must be a text, got {type(system).__name__}")
    num_chars = sum(len(text) for _, text in parsed)
    if num_chars > max_chars:
        raise BadRow(HUGE, f"{num_chars:,} characters, the limit is {max_chars:,}")
    roles = [role for role, _ in parsed]
    first = int(roles[0] == "system")
    stop = len(roles)
    notes = []
    while first < stop and roles[first] == "assistant":
        first += 1
    while stop > first and roles[stop - 1] == "user":
        stop -= 1
    kept = list(range(int(roles[0] == "system"))) + list(range(first, stop))
    _check_order(roles, roles[first:stop])
    if first > (roles[0] == "system"):
        notes.append("leading assistant turn dropped")
    if stop < len(roles):
        notes.append("trailing user turn dropped")
    masked = frozenset(
        at for at, old in enumerate(kept) if roles[old] == "assistant" and not weights[old]
    )
    if masked:
        notes.append("assistant turns without loss")
    if isinstance(row, RepeatedKeys) or any(isinstance(turn, RepeatedKeys) for turn in turns):
        notes.append("duplicate keys, the last counts")
    name = row.get("id")
    return Conversation(
        str(name) if isinstance(name, str | int) else place,
        tuple(parsed[old] for old in kept),
        masked,
    ), notes


def _turns_in(row: dict[str, Any]) -> Any:
    """Return the first value of `TURN_KEYS` that is not empty: a struct of lists as a list of
    turns, a JSON text decoded; None where there is none."""
    turns = next((row[key] for key in TURN_KEYS if row.get(key) not in (None, [], {}, "")), None)
    if isinstance(turns, str) and turns.lstrip()[:1] in ("[", "{"):
        turns = _parse_json(turns)
        if isinstance(turns, BadRow):
            raise turns
        turns = turns or None
    if isinstance(turns, dict) and turns and all(isinstance(v, list) for v in turns.values()):
        if len({len(values) for values in turns.values()}) > 1:
            raise BadRow(WRONG_TYPES, "the turns are a struct of lists of different lengths")
        turns = [dict(zip(turns, each, strict=True)) for each in zip(*turns.values(), strict=True)]
        return turns or None
    return turns


def _parse_turn(turn: Any, number: int) -> Turn:
    if not isinstance(turn, dict):
        raise BadRow(WRONG_TYPES, f"turn {number} must be an object, got {type(turn).__name__}")
    role, text = (
        next((turn[key] for key in keys if turn.get(key) is not None), None)
        for keys in (("from", "role"), ("value", "content"))
    )
    if isinstance(role, str):
        role = role.strip().lower()
        if role in TOOL_ROLES:
            raise BadRow(TOOLS, f"turn {number} is from {role!r}", role)
        if turn.get("tool_calls") or turn.get("function_call"):
            raise BadRow(TOOLS, f"turn {number} calls a tool")
    if isinstance(text, list):
        text = "".join(_text_of(part, number) for part in text)
    if not isinstance(role, str) or not isinstance(text, str):
        raise BadRow(
            WRONG_TYPES,
            f"turn {number} needs a role and a text, got {type(role).__name__} "
            f"and {type(text).__name__}",
        )
    if role not in ROLES:
        detail = f"turn {number} is from {role[:LONGEST_NAME]!r}, wanted {', '.join(ROLES)}"
        raise BadRow(WRONG_ROLES, detail, role)
    if not text.strip():
        raise BadRow(EMPTY_TEXT, f"turn {number} ({role}) says nothing")
    _require_unicode(text, f"turn {number}")
    return ROLES[role], text


def _text_of(part: Any, number: int) -> str:
    """Return the text of a content part; `BadRow` for an image, a tool's part or another kind."""
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else None
    if kind in TEXT_PARTS and isinstance(part.get("text"), str):
        return part["text"]
    if kind in TOOL_PARTS:
        raise BadRow(TOOLS, f"turn {number} has a part of type {kind!r}")
    if isinstance(kind, str) and kind not in TEXT_PARTS:
        raise BadRow(MEDIA, f"turn {number} has a part of type {kind[:LONGEST_NAME]!r}")
    raise BadRow(WRONG_TYPES, f"turn {number} has a part that is no text")


def _weight(turn: dict[str, Any], number: int) -> int:
    """Return 0 for a turn with `weight: 0` or `train: false`, else 1."""
    weight, train = turn.get("weight"), turn.get("train")
    if weight not in (None, 0, 1) or train not in (None, False, True):
        raise BadRow(
            WRONG_TYPES,
            f"turn {number} has weight {str(weight)[:20]} and train {str(train)[:20]}, wanted a "
            "weight of 0 or 1, and true or false",
        )
    return int(weight not in (0,) and train is not False and train != 0)


def _require_unicode(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair
        raise BadRow(INVALID_UTF8, f"{where} holds half a surrogate pair") from error


def _check_order(roles: list[str], spoken: list[str]) -> None:
    """Raise `BadRow` unless `spoken`, a part of `roles`, has user and assistant in turn."""
    if spoken and spoken == ["user", "assistant"] * (len(spoken) // 2):
        return
    short = " ".join(role[0] for role in roles[:12])
    got = f"got {short}{' …' if len(roles) > 12 else ''}"
    twice = any(a == b != "system" for a, b in pairwise(spoken))
    if twice and "system" not in spoken:
        raise BadRow(REPEATED_ROLE, f"wanted user and assistant in turn, {got}")
    raise BadRow(
        WRONG_ROLES,
        f"wanted an optional system turn, then user and assistant in turn, {got}",
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
    if path.exists():
        raise BadData(f"{path}: neither a regular file nor a folder; copy it into a file")
    name = str(source)
    looks_local = name.startswith(("/", ".", "~")) or name.lower().endswith(
        (*LINE_SUFFIXES, *LIST_SUFFIXES, ".parquet")
    )
    if looks_local or not DATASET_NAME.fullmatch(name):
        raise NotFound(f"{name}: no such file or folder")
    return _dataset_rows(name, on_disk=False)


def _folder_rows(folder: Path, max_chars: int) -> Iterator[tuple[str, Any]]:
    """Yield the rows of all JSONL and Parquet files; of JSON lists where there are no others."""
    for suffixes in ((*LINE_SUFFIXES, ".parquet"), LIST_SUFFIXES):
        files = sorted(
            path
            for path in folder.rglob("*")
            if path.name.lower().endswith(suffixes) and not path.is_dir()
        )
        if files:
            break
    else:
        raise BadData(f"{folder}: holds no .jsonl, .json or .parquet file")
    for path in files:
        if not path.is_file():
            raise BadData(f"{path}: not a regular file; remove it from the folder")
    for path in files:
        yield from _file_rows(path, max_chars)


def _file_rows(path: Path, max_chars: int) -> Iterator[tuple[str, Any]]:
    name = path.name.lower()
    if name.endswith(".parquet"):
        return _parquet_rows(path)
    if name.endswith((*LINE_SUFFIXES, *LIST_SUFFIXES)):
        return _json_rows(path, max_chars)
    raise BadData(f"{path}: wanted one of {', '.join((*LINE_SUFFIXES, '.json', '.parquet'))}")


def _json_rows(path: Path, max_chars: int) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a file with a row a line, or of one JSON list, plain or packed."""
    max_bytes = BYTES_PER_CHAR * max_chars + LINE_MARGIN_BYTES
    number = 0
    try:
        with path.open("rb") as stored:
            file, packed = _unpacked(stored)
            if file.peek(2)[:2] in UTF16:
                raise BadData(
                    f"{path}: UTF-16, wanted UTF-8: iconv -f UTF-16 -t UTF-8 {path} > out.jsonl"
                )
            lines = _lines(file, stored if packed else None, max_bytes)
            if file.peek(CHUNK_BYTES).removeprefix(BOM).lstrip()[:1] == b"[":
                first = next(lines, None)
                if first is None or not _is_turns(_decode(first)):
                    file.close()
                    yield from _list_rows(path, max_bytes)
                    return
                number = 1
                yield f"{path}:1", _decode(first)
            for line in lines:
                number += 1
                if line is None:
                    yield f"{path}:{number}", BadRow(HUGE, f"the line is over {max_bytes:,} bytes")
                elif line.removeprefix(BOM).strip():  # an empty line is no row
                    yield f"{path}:{number}", _decode(line)
    except (OSError, EOFError, zlib.error) as error:
        raise BadData(f"{path}: cannot be read beyond line {number}: {error}") from error


def _unpacked(stored: BinaryIO) -> tuple[io.BufferedReader, bool]:
    """Return the file's content and if it is packed, by its first bytes.

    A gzip file buffers by itself, and gives what it can before it says that the rest is missing.
    """
    start = stored.read(4)
    stored.seek(0)
    if start[:2] == GZIP:
        return cast(io.BufferedReader, gzip.GzipFile(fileobj=stored)), True
    if start == ZSTD:
        import pyarrow

        stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(stored, mode="r"), "zstd")
        return io.BufferedReader(stream), True
    return cast(io.BufferedReader, stored), False


def _is_turns(row: Any) -> bool:
    """Tell a list of turns from a list of rows."""
    if not isinstance(row, list) or not row or not isinstance(row[0], dict):
        return False
    return "from" in row[0] or "role" in row[0]


def _list_rows(path: Path, max_bytes: int) -> Iterator[tuple[str, Any]]:
    """Yield the elements of a file that is one JSON list, with a chunk of it in memory."""
    decoder = json.JSONDecoder(object_pairs_hook=_object)
    with path.open("rb") as stored:
        file, packed = _unpacked(stored)
        text = io.TextIOWrapper(file, "utf-8-sig")
        buffer, at, number, num_read, ended = "", 0, 0, 0, False
        wanted = "["  # the sign in front of the next row
        while True:
            at = SPACE.match(buffer, at).end()  # type: ignore[union-attr]
            sign = buffer[at : at + 1]
            start = SPACE.match(buffer, at + len(sign)).end()  # type: ignore[union-attr]
            if (sign == "]" and wanted == ",") or (sign == "[" and buffer[start:] == "]"):
                return
            if sign and sign != wanted:
                raise BadData(f"{path}: a JSON list that goes on with {sign!r} behind row {number}")
            try:
                row, stop = decoder.raw_decode(buffer, start)
            except (ValueError, RecursionError) as error:
                if ended or len(buffer) - at > max_bytes:
                    raise BadData(
                        f"{path}: a JSON list, whose row {number + 1} is not JSON or over "
                        f"{max_bytes:,} characters; jq -c '.[]' {path} > out.jsonl makes JSONL "
                        "of a list that is whole"
                    ) from error
                try:
                    piece = text.read(CHUNK_BYTES)
                except UnicodeDecodeError as bad:
                    raise BadData(f"{path}: row {number + 1} is not UTF-8") from bad
                num_read += len(piece)
                if packed and num_read > MOST_EXPANSION * stored.tell():
                    raise OSError(f"it unpacks to over {MOST_EXPANSION} times its size") from error
                ended = not piece
                buffer, at = buffer[at:] + piece, 0
                continue
            number += 1
            yield f"{path}:{number}", row
            at, wanted = stop, ","


def _lines(
    file: io.BufferedReader, stored: BinaryIO | None, max_bytes: int
) -> Iterator[bytes | None]:
    """Lines of a file; None for one over `max_bytes`, which is passed over in pieces.

    stored: the packed file that `file` unpacks, None where it is not packed.

    Raises OSError when a packed file unpacks to more than `MOST_EXPANSION` times its size, or there
    is nothing but empty lines.
    """
    num_bytes, num_empty = 0, 0
    is_whole = True  # the line so far
    while piece := file.readline(max_bytes + 1):
        num_bytes += len(piece)
        if stored is not None and num_bytes > MOST_EXPANSION * stored.tell():
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


def _decode(line: bytes) -> Any:
    try:
        text = line.removeprefix(BOM).decode()
    except UnicodeDecodeError as error:
        return BadRow(INVALID_UTF8, f"byte {error.start} of the line")
    return _parse_json(text)


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        return BadRow(NOT_JSON, str(error)[:120])


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    return found if len(found) == len(pairs) else RepeatedKeys(pairs)


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
