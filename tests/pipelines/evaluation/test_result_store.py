from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest
from small_rows import result, sample

from stree.common.errors import BadData, CannotWrite
from stree_pipelines.evaluation.records import BaselineTiming, ResultRow, SampleRow
from stree_pipelines.evaluation.result_store import (
    RESULTS_NAME,
    ResultStore,
    append_row,
    read_archive,
    read_rows,
    write_archive,
    write_rows,
)
from stree_pipelines.reports.tables.lossless import lossless_sentence

DOCS = Path(__file__).parents[3] / "docs/results"
TWO = {"num_prompts": 2, "acceptance_histogram": {0: 2, 1: 2}}  # of two such samples


@pytest.fixture
def store(tmp_path):
    return ResultStore(tmp_path)


def test_a_row_survives_the_file(tmp_path):
    row = result()
    append_row(tmp_path / "r.jsonl", row)
    assert read_rows(tmp_path / "r.jsonl", ResultRow) == [row]


def test_a_file_of_no_possible_name_has_no_rows(tmp_path):
    assert read_rows(tmp_path / ("9" * 300 + ".jsonl.gz"), SampleRow) == []


def test_a_row_is_one_line_and_one_write(tmp_path, monkeypatch):
    calls = []
    write, fsync = os.write, os.fsync
    monkeypatch.setattr(os, "write", lambda fd, data: (calls.append("write"), write(fd, data))[1])
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd))[1])
    append_row(tmp_path / "s.jsonl", sample())
    assert calls == ["write", "fsync"]
    assert (tmp_path / "s.jsonl").read_bytes().count(b"\n") == 1


ROW_A, ROW_B = (f"{sample(name).model_dump_json()}\n".encode() for name in "ab")


@pytest.mark.parametrize(
    ("content", "read"),
    [
        *((ROW_A + ROW_B[:torn_at], "a") for torn_at in (1, 40, -2)), (b'{"half', ""),
        (ROW_A + ROW_B.removesuffix(b"\n"), "ab"),
    ],
)
def test_a_torn_last_line_is_never_glued_to_the_next_and_a_whole_one_is_kept(
    tmp_path, content, read
):
    path = tmp_path / "s.jsonl"
    path.write_bytes(content)
    assert [row.prompt_id for row in read_rows(path, SampleRow)] == [*read]
    append_row(path, sample("c"))
    assert [row.prompt_id for row in read_rows(path, SampleRow)] == [*read, "c"]


def test_a_bad_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "s.jsonl"
    append_row(path, sample())
    path.write_bytes(path.read_bytes() + b'{"method": 3}\n' + path.read_bytes())
    with pytest.raises(BadData, match=r"s.jsonl:2 is no SampleRow"):
        read_rows(path, SampleRow)


def test_a_folder_that_refuses_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite, match=r"cannot write .*s\.jsonl: "):
        append_row(tmp_path / "file" / "s.jsonl", sample())


def test_journals_of_several_workers_merge_each_prompt_once(store):
    store.journal("samples/b.jsonl", 0, sample("a"))
    store.journal("samples/b.jsonl", 1, sample("b"))
    store.journal("samples/b.jsonl", 1, sample("a", decode_s=9.0))
    store.journal("samples/other.jsonl", 0, sample("z"))
    found = store.journalled("samples/b.jsonl")
    assert [row.prompt_id for row in found.values()] == ["a", "b"]
    assert found[sample("a").key].decode_s == 0.2  # the first worker's stays


def test_publishing_replaces_a_row_of_the_same_key_and_clears_its_journals_only(store):
    other = result(step=20, checkpoint_sha256="other", samples="samples/other.jsonl")
    store.publish(other, [sample()])
    store.journal("samples/b.jsonl", 0, sample())
    store.journal("samples/c.jsonl", 0, sample())
    store.publish(result(max_new_tokens=4), [sample("a"), sample("b")])
    store.publish(result(max_new_tokens=5), [sample("c")])
    assert [row.max_new_tokens for row in store.results()] == [3, 5]
    assert [row.prompt_id for row in store.samples(store.results()[1])] == ["c"]
    assert not store.journalled("samples/b.jsonl") and store.journalled("samples/c.jsonl")


def test_a_row_that_stands_twice_in_a_file_counts_once(store):
    rows = [result(benchmark=name, samples=f"samples/{name}.jsonl") for name in ("a", "b")]
    newer = rows[0].model_copy(update={"num_ended": 1})
    write_rows(store.directory / RESULTS_NAME, [*rows, newer, rows[1]])
    assert store.results() == [newer, rows[1]]
    checked = sum(row.lossless.num_prompts for row in rows)
    assert lossless_sentence(store.directory).startswith(f"{checked} of {checked} answers")


def test_forgetting_drops_rows_and_journals_and_tidying_journals_that_publishing_left(store):
    store.publish(result(), [sample()])
    store.journal("samples/b.jsonl", 0, sample())
    store.tidy()
    assert store.results() == [result()] and not store.journalled("samples/b.jsonl")
    store.journal("samples/b.jsonl", 0, sample())
    store.forget({result().key: "samples/b.jsonl"})
    assert store.results() == [] and not store.journalled("samples/b.jsonl")


def test_samples_are_packed_and_the_same_rows_make_the_same_bytes(store, tmp_path):
    packed = result(samples="samples/b.jsonl.gz", **TWO)
    store.publish(packed, [sample("a"), sample("b")])
    first = (tmp_path / "samples/b.jsonl.gz").read_bytes()
    assert first[:2] == b"\x1f\x8b"
    assert [row.prompt_id for row in store.samples(packed)] == ["a", "b"]
    store.journal("samples/b.jsonl.gz", 0, sample("a"))
    assert list(store.journalled("samples/b.jsonl.gz").values()) == [sample("a")]
    store.publish(packed, [sample("a"), sample("b")])
    assert (tmp_path / "samples/b.jsonl.gz").read_bytes() == first
    assert not store.journalled("samples/b.jsonl.gz")


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([sample("a", method="x")], "its answer to a was given for another row"),
        ([sample("a"), sample("b", checkpoint_sha256="x")], "its answer to b was given for ano"),
        ([sample("a", tree="wide")], "its answer to a was given for another row"),
        ([sample("a", seed=1)], "its answer to a was given for another row"),
        ([sample("a"), sample("a")], "it answers a prompt twice"),
        ([sample("a"), sample("b")], "it has 2 answers, the row 1"),
        ([], "it has 0 answers, the row 1"),
        ([sample("a", num_calls=3)], "its acceptance_length is 1.0, the row's 1.5"),
        ([sample("a", accepted_per_call=(1, 1))], "its acceptance_histogram is {1: 2}"),
        ([sample("a", num_nodes=2)], "its nodes_per_call is 1.0, the row's 13.0"),
        ([sample("a", decode_s=0.1)], "its tokens_per_second is 30.0, the row's 15.0"),
        ([sample("a", prefill_s=0.8)], "its tokens_per_second_e2e is 3.0, the row's 10.0"),
        ([sample("a", baseline=BaselineTiming(num_new_tokens=3, prefill_s=0.1, decode_s=0.4))],
         "its speedup is 2.0, the row's None"),
    ],
)
def test_samples_of_which_a_row_was_not_made_are_refused(store, tmp_path, samples, said):
    store.publish(result(), [sample("a")])
    assert store.samples(*store.results()) == [sample("a")]
    write_rows(tmp_path / "samples/b.jsonl", samples)
    with pytest.raises(BadData) as refused:
        store.samples(*store.results())
    assert f"b.jsonl is not what its row in results.jsonl was made of: {said}" in str(refused.value)


@pytest.mark.parametrize("value", [0.9, 2.1])
def test_a_figure_outside_of_its_own_interval_is_refused(tmp_path, value):
    edited = result().model_copy(update={"acceptance_length": value})
    write_rows(tmp_path / "results.jsonl", [result(), edited])
    said = rf"results.jsonl:2 is no ResultRow: Value error, acceptance_length {value} lies outside"
    with pytest.raises(BadData, match=said):
        ResultStore(tmp_path).results()


@pytest.mark.long
def test_committed_rows_are_what_their_samples_give():
    folders = [path.parent for path in sorted(DOCS.rglob("results.jsonl"))]
    assert len(folders) > 20
    for store in map(ResultStore, folders):
        for row in store.results():
            store.samples(row)


def test_an_archive_has_the_samples_of_many_rows(store, tmp_path):
    """Read a row's samples from the archive, in order, unless the row's own file lies there."""
    names = ("samples/a.jsonl.gz", "samples/b.jsonl.gz")
    first, second = [sample("y"), sample("x", step=None)], [sample("z", num_nodes=2**53)]
    archive = tmp_path / "samples.parquet"
    write_archive(archive, dict(zip(names, (first, second), strict=True)))
    rows = [result(samples=names[0], **TWO), result(samples=names[1], nodes_per_call=2.0**52)]
    assert [store.samples(row) for row in rows] == [first, second]
    assert store.samples(result(samples="samples/c.jsonl.gz")) == []
    store.publish(result(samples=names[0]), [sample("own")])
    assert store.samples(*store.results()) == [sample("own")]
    archive.write_bytes(archive.read_bytes()[:-9])
    with pytest.raises(BadData, match=r"samples\.parquet cannot be read: .*restore it"):
        read_archive(archive)


def test_halves_of_files_that_a_kill_left_are_tidied(store, tmp_path):
    store.publish(result(), [sample()])
    assert {path.name for path in tmp_path.iterdir()} == {"results.jsonl", "samples"}
    for folder in (tmp_path, tmp_path / "samples"):
        half = folder / ".tmp-1-0badc0de-anothernode"
        half.write_bytes(b"half")
        os.utime(half, (0, 0))
    store.tidy()
    assert not list(tmp_path.rglob(".tmp-*")) and store.samples(result()) == [sample()]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (gzip.compress(b"{}\n" * 99, mtime=0)[:-9], "cannot be unpacked: Compressed file ended"),
        (b"no gzip", "cannot be unpacked: Not a gzipped file"),
        (gzip.compress(b"{}\n", mtime=0), r"gz:1 is no SampleRow"),
    ],
)
def test_damaged_packed_samples_are_one_clear_line(tmp_path, content, reason):
    (tmp_path / "b.jsonl.gz").write_bytes(content)
    with pytest.raises(BadData, match=reason) as got:
        read_rows(tmp_path / "b.jsonl.gz", SampleRow)
    assert "b.jsonl.gz" in str(got.value) and "\n" not in str(got.value)
