"""Read raw rows from JSONL, JSON lists, Parquet or `datasets`, one by one.

docs/your-own.md has the table of formats. Rows are decoded one by one here and not by a library,
because `load_dataset("json")` fails the whole file for one bad line and lets wrong types pass. One
row is held at a time; a line that is too long is never held.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from stree.common.errors import BadData, NotFound

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
ENCRYPTED = "encrypted thoughts"
UNKNOWN_LOSS = "unknown names about the loss"
REASONS = (
    NOT_JSON, INVALID_UTF8, NO_TURNS, WRONG_ROLES, REPEATED_ROLE, TOOLS, MEDIA, EMPTY_TEXT,
    WRONG_TYPES, HUGE, ENCRYPTED, UNKNOWN_LOSS,
)
# JSON of conversations packs to a third or a fifth; of one row repeated, gzip makes a 200th.
MAX_EXPANSION = 500
MAX_EMPTY_LINES = 100_000
BOM = b"\xef\xbb\xbf"
GZIP, ZSTD, UTF16 = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", (b"\xff\xfe", b"\xfe\xff")
PACKINGS = ("", ".gz", ".zst")
LINE_SUFFIXES = tuple(name + packing for name in (".jsonl", ".ndjson") for packing in PACKINGS)
LIST_SUFFIXES = tuple(".json" + packing for packing in PACKINGS)
CHUNK_BYTES = 1 << 20
SPACE = re.compile(r"\s*")
MAX_CHARS = 200_000  # of a conversation's text; a row with more is huge
# A character can take six bytes as \uXXXX; the rest of a row (ids, keys) gets a margin.
MAX_ROW_BYTES = 6 * MAX_CHARS + (1 << 16)
# A configuration needs its split, or a mistyped path would be one
DATASET_NAME = re.compile(
    r"(?P<path>[\w.-]+(/[\w.-]+)?)((/(?P<config>[\w.-]+))?:(?P<split>[\w.-]+))?"
)


class BadRow(Exception):
    """Refusal of a row; `reason` is one of `REASONS`, `role` its unknown role, if any."""

    def __init__(self, reason: str, detail: str, role: str | None = None):
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.role = role


class RepeatedKeys(dict):
    """JSON object that spells one of its keys twice; the last value counts."""


def require_source(source: str | Path) -> None:
    """Raise `NotFound` for a missing file or folder; reads nothing and fetches nothing."""
    raw_rows(source)


def raw_rows(source: str | Path) -> Iterator[tuple[str, Any]]:
    """Yield (place, decoded row or BadRow) for every row of any kind of source."""
    path = Path(source).expanduser()
    if path.is_dir():
        if any(map(os.path.lexists, (path / "dataset_info.json", path / "dataset_dict.json"))):
            _require_regular(each for each in path.rglob("*") if not each.is_dir())
            return _dataset_rows(str(path), on_disk=True)
        return _folder_rows(path)
    if path.is_file():
        return _file_rows(path)
    if path.exists():
        raise BadData(f"{path}: neither a regular file nor a folder; copy it into a file")
    name = str(source)
    looks_local = name.startswith(("/", ".", "~")) or name.lower().endswith(
        (*LINE_SUFFIXES, *LIST_SUFFIXES, ".parquet")
    )
    if looks_local or not DATASET_NAME.fullmatch(name):
        raise NotFound(f"{name}: no such file or folder")
    return _dataset_rows(name, on_disk=False)


def _folder_rows(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of all JSONL and Parquet files; of JSON lists when there are no others."""
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
    _require_regular(files)
    for path in files:
        yield from _file_rows(path)


def _require_regular(files: Iterable[Path]) -> None:
    """Refuse links to devices, which are read without end, and pipes, which are waited for."""
    for path in files:
        if not path.is_file():
            raise BadData(f"{path}: not a regular file; remove it from the folder")


def _file_rows(path: Path) -> Iterator[tuple[str, Any]]:
    name = path.name.lower()
    if name.endswith(".parquet"):
        return _parquet_rows(path)
    if name.endswith((*LINE_SUFFIXES, *LIST_SUFFIXES)):
        return _json_rows(path)
    raise BadData(f"{path}: wanted one of {', '.join((*LINE_SUFFIXES, '.json', '.parquet'))}")


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a file with a row a line, or of one JSON list, plain or packed."""
    number = 0
    try:
        with path.open("rb") as stored:
            file, packed = _unpacked(stored)
            if file.peek(2)[:2] in UTF16:
                raise BadData(
                    f"{path}: UTF-16, wanted UTF-8: iconv -f UTF-16 -t UTF-8 {path} > out.jsonl"
                )
            lines = _lines(file, stored if packed else None)
            if file.peek(CHUNK_BYTES).removeprefix(BOM).lstrip()[:1] == b"[":
                first = next(lines, None)
                if first is None or not _is_turns(_decode(first)):
                    file.close()
                    yield from _list_rows(path)
                    return
                number = 1
                yield f"{path}:1", _decode(first)
            for line in lines:
                number += 1
                if line is None:
                    bad = BadRow(HUGE, f"the line is over {MAX_ROW_BYTES:,} bytes")
                    yield f"{path}:{number}", bad
                elif line.removeprefix(BOM).strip():  # an empty line is no row
                    yield f"{path}:{number}", _decode(line)
    except (OSError, EOFError, zlib.error) as error:
        raise BadData(f"{path}: cannot be read beyond line {number}: {error}") from error


def _unpacked(stored: BinaryIO) -> tuple[io.BufferedReader, bool]:
    """Return a reader of the file's content, and True when the file is packed, by its first bytes.

    A gzip file buffers by itself, and yields what it can before it reports that the rest is
    missing.
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


def _list_rows(path: Path) -> Iterator[tuple[str, Any]]:
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
                if ended or len(buffer) - at > MAX_ROW_BYTES:
                    raise BadData(
                        f"{path}: a JSON list, whose row {number + 1} is not JSON or over "
                        f"{MAX_ROW_BYTES:,} characters; jq -c '.[]' {path} > out.jsonl makes JSONL "
                        "of a list that is whole"
                    ) from error
                try:
                    piece = text.read(CHUNK_BYTES)
                except UnicodeDecodeError as bad:
                    raise BadData(f"{path}: row {number + 1} is not UTF-8") from bad
                num_read += len(piece)
                if packed and num_read > MAX_EXPANSION * stored.tell():
                    raise OSError(f"it unpacks to over {MAX_EXPANSION} times its size") from error
                ended = not piece
                buffer, at = buffer[at:] + piece, 0
                continue
            number += 1
            yield f"{path}:{number}", row
            at, wanted = stop, ","


def _lines(file: io.BufferedReader, stored: BinaryIO | None) -> Iterator[bytes | None]:
    """Yield the lines of a file; None for one over `MAX_ROW_BYTES`, which is skipped in pieces.

    stored: the packed file that `file` unpacks, None when it is not packed.

    Raises OSError when a packed file unpacks to more than `MAX_EXPANSION` times its size, or there
    is nothing but empty lines.
    """
    num_bytes, num_empty = 0, 0
    is_whole = True  # the line so far
    while piece := file.readline(MAX_ROW_BYTES + 1):
        num_bytes += len(piece)
        if stored is not None and num_bytes > MAX_EXPANSION * stored.tell():
            raise OSError(f"it unpacks to over {MAX_EXPANSION} times its size")
        num_empty = num_empty + 1 if piece == b"\n" else 0
        if num_empty > MAX_EMPTY_LINES:
            raise OSError(f"{MAX_EMPTY_LINES:,} empty lines in a row")
        ends = len(piece) <= MAX_ROW_BYTES or piece.endswith(b"\n")
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
    return parse_row_json(text)


def parse_row_json(text: str) -> Any:
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

    dataset: Any = None
    try:
        if on_disk:
            dataset = datasets.load_from_disk(name)
        else:
            path, config, split = _parts_of(name)
            dataset = datasets.load_dataset(path, config, split=split, streaming=True)
        if isinstance(dataset, datasets.DatasetDict):
            if "train" not in dataset:
                raise BadData(f"{name}: has no split `train`, only {', '.join(dataset)}")
            dataset = dataset["train"]
        for number, row in enumerate(dataset, start=1):
            yield f"{name}:{number}", row
    except BadData:
        raise
    except Exception as error:  # a damaged folder makes it raise any kind of error
        if dataset is None and not on_disk:
            raise NotFound(
                f"{name}: no such file or folder, and `datasets` cannot fetch it: "
                f"{_configurations(name, error) or f'{type(error).__name__}: {error}'}"
            ) from error
        raise BadData(
            f"{name}: `datasets` cannot load it: {type(error).__name__}: {error}"
        ) from error


def _parts_of(name: str) -> tuple[str, str | None, str]:
    """Return path, configuration and split of a data set's name on the hub."""
    found = DATASET_NAME.fullmatch(name)
    assert found is not None
    return found["path"], found["config"], found["split"] or "train"


def _configurations(name: str, error: Exception) -> str:
    """Return the names of the configurations that an error of `datasets` lists; "" for none."""
    listed = re.search(r"(?:available configs|Available): (\[.*?\])", str(error), re.S)
    path, _, split = _parts_of(name)
    names = re.findall("'([^']+)'", listed[1]) if listed else []
    forms = ", ".join(f"{path}/{each}:{split}" for each in names)
    return forms and f"it has configurations, name one of {forms}"
