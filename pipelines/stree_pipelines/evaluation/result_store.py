"""Keep an evaluation in a folder: `results.jsonl`, `samples/*.jsonl.gz`, and workers' journals.

A folder that is kept for good can hold all of its samples in one `samples.parquet`
(`pipelines/report.py --records` writes it).

While an evaluation runs, each worker appends every finished prompt to its own journal in one
write with fsync; nothing else is needed to go on after a kill. When all prompts of a
(checkpoint, method, benchmark, temperature) are there, the main process publishes them, in
benchmark order, as one samples file and adds their row to `results.jsonl`; both writes are atomic.
"""

from __future__ import annotations

import errno
import glob
import gzip
import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from stree.common.errors import BadData
from stree.common.files import reporting_refusals, sweep_leftovers, write_atomically
from stree.speculation_profile import first_fault
from stree_pipelines.evaluation.records import Reading, ResultKey, ResultRow, SampleKey, SampleRow

RESULTS_NAME = "results.jsonl"
READINGS_NAME = "readings.jsonl"
SAMPLES_NAME = "samples"
ARCHIVE_NAME = "samples.parquet"
JOURNALS_NAME = "journals"
# Rows pack to a fifth or a tenth of their size; a file that packs better than this holds no rows.
MAX_EXPANSION, SMALL_BYTES = 100, 1 << 26

Row = TypeVar("Row", bound=BaseModel)


def packed_samples(label: str) -> str:
    """Return the file of a label's samples, from the folder of `results.jsonl`."""
    return f"{SAMPLES_NAME}/{label}.jsonl.gz"


def append_row(path: Path, row: BaseModel) -> None:
    """Add a row as `append_line` does."""
    append_line(path, row.model_dump_json())


def append_line(path: Path, text: str) -> None:
    """Add one line in a single write and wait until the disk has it.

    A last line without a newline gets one when it is whole, and is cut off when a killed writer
    left it torn: the new row must not be glued to it. Raises CannotWrite when the disk or folder
    refuses.
    """
    line = text.encode() + b"\n"
    with reporting_refusals(path, needed_bytes=len(line), codes=None):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            _end_last_line(descriptor)
            if os.write(descriptor, line) < len(line):  # a full disk cuts a write first
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_rows(path: Path, row_type: type[Row]) -> list[Row]:
    """Return all whole rows of a file, packed (`.gz`) or not; none if it does not exist.

    A last line needs no newline. One that is no whole JSON is what a kill leaves and is ignored; a
    bad line elsewhere raises BadData with its number, and so does a packed file that is damaged.
    """
    if not os.path.exists(path):  # nor where a name is too long for a file
        return []
    *lines, last = (_unpacked(path) if path.suffix == ".gz" else path.read_bytes()).split(b"\n")
    if is_json(last):
        lines.append(last)
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(row_type.model_validate_json(line))
        except ValidationError as error:
            raise BadData(
                f"{path}:{number} is no {row_type.__name__}: {first_fault(error)}; move the file "
                "away and evaluate again"
            ) from error
    return rows


def write_rows(path: Path, rows: Iterable[BaseModel]) -> None:
    """Replace a file by these rows, whole or not at all.

    A name that ends in `.gz` is packed; the same rows give the same bytes.
    """
    content = "".join(row.model_dump_json() + "\n" for row in rows).encode()
    write_atomically(path, gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def write_archive(path: Path, samples: Mapping[str, Sequence[SampleRow]]) -> None:
    """Write the samples of many rows, {file name of the row: samples}, as one Parquet file.

    Its columns are `file` and `sample`, a sample's JSON. Replaces the file, whole or not at all.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    lines = [(name, each.model_dump_json()) for name, rows in samples.items() for each in rows]
    table = pa.table({"file": [name for name, _ in lines], "sample": [line for _, line in lines]})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", compression_level=19)
    write_atomically(path, sink.getvalue().to_pybytes())


def read_archive(path: Path) -> dict[str, list[SampleRow]]:
    """Return all samples of an archive, in their order: {file name of the row: samples}.

    Raises BadData when the file is damaged or a sample is not valid.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    found: dict[str, list[SampleRow]] = {}
    try:
        table = pq.read_table(path, columns=["file", "sample"])
        for each in table.to_pylist():
            found.setdefault(each["file"], []).append(SampleRow.model_validate_json(each["sample"]))
    except (pa.ArrowException, OSError, ValidationError) as error:
        raise BadData(
            f"{path} cannot be read: {str(error).splitlines()[0]}; restore it, or evaluate again"
        ) from error
    return found


class ResultStore:
    """The evaluation folder: results, samples and journals."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)

    def results(self) -> list[ResultRow]:
        """Return the rows of `results.jsonl`; of several with one key, the last."""
        rows = read_rows(self.directory / RESULTS_NAME, ResultRow)
        return list({row.key: row for row in rows}.values())

    def samples(self, row: ResultRow) -> list[SampleRow]:
        """Return the prompts behind a row; none when their file is gone.

        Raises BadData when they do not give the row's figures.
        """
        own = self.directory / row.samples
        if os.path.exists(own):
            samples = read_rows(own, SampleRow)
        elif row.samples in self._archived:
            samples = list(self._archived[row.samples])
        else:
            return []
        if difference := row.differs_from(samples):
            raise BadData(
                f"{own} is not what its row in {RESULTS_NAME} was made of: {difference}; restore "
                "both, or evaluate again with --overwrite"
            )
        return samples

    @cached_property
    def _archived(self) -> dict[str, list[SampleRow]]:
        """The folder's archive, read once: every row's samples would read the file again."""
        archive = self.directory / ARCHIVE_NAME
        return read_archive(archive) if archive.exists() else {}

    def readings(self) -> list[Reading]:
        return read_rows(self.directory / READINGS_NAME, Reading)

    def save_readings(self, readings: Sequence[Reading]) -> None:
        """Add readings to the saved ones; one of the same key is replaced."""
        saved = {each.key: each for each in (*self.readings(), *readings)}
        write_rows(self.directory / READINGS_NAME, saved.values())

    def journalled(self, samples_name: str) -> dict[SampleKey, SampleRow]:
        """Return the finished prompts of a row that is not published yet, each as its first worker
        answered it."""
        found: dict[SampleKey, SampleRow] = {}
        for path in self._journals(samples_name):
            for row in read_rows(path, SampleRow):
                found.setdefault(row.key, row)
        return found

    def journal(self, samples_name: str, worker: int, row: SampleRow) -> None:
        """Save one finished prompt; each worker writes to a file of its own."""
        name = f"{_journal_stem(samples_name)}.worker-{worker:05d}.jsonl"
        append_row(self.directory / JOURNALS_NAME / name, row)

    def publish(self, row: ResultRow, samples: Sequence[SampleRow]) -> None:
        """Save a finished row.

        Its samples come first, so that a row never points at nothing, and the journals go last, so
        that a kill in between loses nothing.
        """
        write_rows(self.directory / row.samples, samples)
        others = [other for other in self.results() if other.key != row.key]
        write_rows(self.directory / RESULTS_NAME, [*others, row])
        self._clear_journals(row.samples)

    def forget(self, names: Mapping[ResultKey, str]) -> None:
        """Drop rows that are to be measured anew, {key: samples file}, and their journals."""
        results = self.results()
        kept = [row for row in results if row.key not in names]
        if len(kept) < len(results):
            write_rows(self.directory / RESULTS_NAME, kept)
        for name in names.values():
            self._clear_journals(name)

    def tidy(self) -> None:
        """Drop what kills left behind: files half written, and journals of published rows."""
        sweep_leftovers(self.directory)
        sweep_leftovers(self.directory / SAMPLES_NAME)
        for row in self.results():
            self._clear_journals(row.samples)

    def _journals(self, samples_name: str) -> list[Path]:
        stem = glob.escape(_journal_stem(samples_name))
        return sorted((self.directory / JOURNALS_NAME).glob(f"{stem}.worker-*.jsonl"))

    def _clear_journals(self, samples_name: str) -> None:
        for path in self._journals(samples_name):
            path.unlink()


def _journal_stem(samples_name: str) -> str:
    return "samples_" + Path(samples_name).name.removesuffix(".gz").removesuffix(".jsonl")


def _unpacked(path: Path) -> bytes:
    """Return a packed file's content; refuses more bytes than rows can have."""
    most = max(MAX_EXPANSION * path.stat().st_size, SMALL_BYTES)
    try:
        with gzip.open(path) as file:
            content = file.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise BadData(f"{path} cannot be unpacked: {error}; restore it, or evaluate again") from (
            error
        )
    if len(content) > most:
        raise BadData(f"{path} unpacks to over {MAX_EXPANSION} times its size: it holds no rows")
    return content


def _end_last_line(descriptor: int) -> None:
    """End a file's last line: add a newline to whole JSON, cut a torn line off."""
    size = os.lseek(descriptor, 0, os.SEEK_END)
    if size == 0 or os.pread(descriptor, 1, size - 1) == b"\n":
        return
    content = os.pread(descriptor, size, 0)
    start = content.rfind(b"\n") + 1
    if is_json(content[start:]):
        os.write(descriptor, b"\n")
    else:
        os.ftruncate(descriptor, start)


def is_json(line: bytes) -> bool:
    """Return True for a whole JSON value; no torn part of a row is one."""
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
