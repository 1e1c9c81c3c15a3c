"""Reading files, folders and datasets of chat rows: each format gives the same rows."""

import gzip
import json
import os
import random
import re
import tracemalloc

import pytest
from chat_rows import GOOD, GPT, HUMAN, PAIR, TURNS, row, write

from stree.common.errors import BadData, NotFound
from stree_pipelines.data.conversations import read_conversations


def test_windows_line_ends_and_a_byte_order_mark_do_no_harm(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD + b"\r\n" + GOOD + b"\r\n")
    found, report = read_conversations(path)
    assert len(list(found)) == 2 and report.rejected == 0


def test_a_line_too_long_is_never_held(tmp_path):
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(GOOD + b"\n" + b'{"conversations": "')
        for _ in range(64):
            file.write(b"x" * (1 << 20))
        file.write(b'"}\n' + GOOD + b"\n")
    tracemalloc.start()
    found, report = read_conversations(path)
    assert len(list(found)) == 2 and report.reasons["huge"] == 1
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("name", ["missing.jsonl", "./missing", "/no/such/folder", "two words"])
def test_missing_source_is_named(name):
    with pytest.raises(NotFound, match="no such file"):
        list(read_conversations(name)[0])


def parquet_file(path):
    import pyarrow
    from pyarrow import parquet

    turns = [[HUMAN, GPT], [], None, [HUMAN, {"from": "gpt", "value": None}], [HUMAN, GPT]]
    parquet.write_table(pyarrow.table({"id": list("abcde"), "conversations": turns}), path)


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    parquet_file(path)
    found, report = read_conversations(path)
    assert [c.id for c in found] == ["a", "e"]
    assert report.given == 5
    assert dict(report.reasons) == {"no turns": 2, "wrong types": 1}
    assert report.first_seen["wrong types"] == f"{path}:4"


def test_parquet_with_text_that_is_no_utf8(tmp_path):
    import pyarrow
    from pyarrow import parquet

    raw = pyarrow.array([b"hi", b"caf\xe9"]).view(pyarrow.string())
    turns = pyarrow.StructArray.from_arrays([pyarrow.array(["human"] * 2), raw], ["from", "value"])
    answer = pyarrow.StructArray.from_arrays(
        [pyarrow.array(["gpt"] * 2), pyarrow.array(["yes"] * 2)], ["from", "value"]
    )
    both = pyarrow.concat_arrays([turns, answer]).take(pyarrow.array([0, 2, 1, 3]))
    lists = pyarrow.ListArray.from_arrays(pyarrow.array([0, 2, 4]), both)
    parquet.write_table(pyarrow.table({"conversations": lists}), tmp_path / "a.parquet")
    found, report = read_conversations(tmp_path / "a.parquet")
    assert len(list(found)) == 1 and dict(report.reasons) == {"invalid UTF-8": 1}


def test_folder_of_files_is_read_in_order(tmp_path):
    write(tmp_path / "b.jsonl", [row(HUMAN, GPT, id="2")])
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(row(HUMAN, GPT, id="1")))
    parquet_file(tmp_path / "c.parquet")
    (tmp_path / "notes.txt").write_text("not data")
    found, report = read_conversations(tmp_path)
    assert [c.id for c in found] == ["1", "2", "a", "e"] and report.given == 7


@pytest.mark.parametrize("splits", [False, True], ids=["dataset", "dataset-dict"])
def test_folder_saved_by_datasets(tmp_path, splits):
    import datasets

    dataset = datasets.Dataset.from_list(
        [{"id": "a", "conversations": [HUMAN, GPT]}, {"id": "b", "conversations": []}]
    )
    saved = datasets.DatasetDict(train=dataset) if splits else dataset
    saved.save_to_disk(str(tmp_path / "saved"))
    found, report = read_conversations(tmp_path / "saved")
    assert [c.id for c in found] == ["a"] and dict(report.reasons) == {"no turns": 1}


def test_dataset_by_name_takes_its_split(monkeypatch):
    import datasets

    asked = []

    def load_dataset(name, config, split, streaming):
        asked.append((name, config, split, streaming))
        return [{"id": "n", "conversations": [HUMAN, GPT]}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert [c.id for c in read_conversations("owner/chats:test_sft")[0]] == ["n"]
    assert [c.id for c in read_conversations("owner/chats")[0]] == ["n"]
    assert [c.id for c in read_conversations("owner/chats/en.2-x:test")[0]] == ["n"]
    assert asked == [
        ("owner/chats", None, "test_sft", True), ("owner/chats", None, "train", True),
        ("owner/chats", "en.2-x", "test", True),
    ]
    with pytest.raises(NotFound, match=r"no such file or folder$"):
        read_conversations("runs/chats/data")  # a mistyped path


def test_a_dataset_with_configurations_says_how_to_name_one(tmp_path, monkeypatch):
    import datasets

    for name in ("all", "short"):
        (tmp_path / f"{name}.jsonl").write_bytes(row(HUMAN, GPT) + b"\n")
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: all\n  data_files: all.jsonl\n"
        "- config_name: short\n  data_files: short.jsonl\n---\n"
    )
    load = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda _, *a, **k: load(str(tmp_path), *a, **k))
    assert len(list(read_conversations("owner/talk/short:train")[0])) == 1
    forms = "it has configurations, name one of owner/talk/all:train, owner/talk/short:train"
    for wrong in ("owner/talk", "owner/talk:train", "owner/talk/long:train"):
        with pytest.raises(NotFound, match=forms):
            list(read_conversations(wrong)[0])


def test_dataset_that_is_not_there_is_told_from_one_that_breaks_off(monkeypatch):
    import datasets

    def absent(name, config, split, streaming):
        raise FileNotFoundError("no such dataset on the hub")

    def breaks_off(name, config, split, streaming):
        yield {"conversations": []}
        raise ConnectionError("reset by peer")

    monkeypatch.setattr(datasets, "load_dataset", absent)
    with pytest.raises(NotFound, match=r"owner/chats: no such file .*no such dataset"):
        list(read_conversations("owner/chats")[0])
    monkeypatch.setattr(datasets, "load_dataset", breaks_off)
    with pytest.raises(BadData, match=r"owner/chats: .*reset by peer"):
        list(read_conversations("owner/chats")[0])


HELD = b"".join(b'{"id": "%d", "conversations": %s}\n' % (n, json.dumps(TURNS).encode())
                for n in range(3))


# Rows whose texts gzip cannot shorten much
VARIED = b"\n".join(
    row({"from": "human", "value": str(random.Random(n).random())}, GPT) for n in range(2000)
)
AS_LIST = json.dumps([{"id": str(n), "conversations": TURNS} for n in range(3)])


def zstd_file(data):
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    "name,data",
    [
        ("a.json", AS_LIST.encode()),
        ("one-line.jsonl", AS_LIST.encode()),
        ("indented.jsonl", json.dumps(json.loads(AS_LIST), indent=1).encode()),
        ("a.JSONL", HELD),
        ("gzip-named.jsonl", gzip.compress(HELD)),
        ("a.json.gz", gzip.compress(AS_LIST.encode())),
        ("a.jsonl.zst", zstd_file(HELD)),
        ("boms.jsonl", b"\xef\xbb\xbf" + HELD.replace(b"\n", b"\n\xef\xbb\xbf")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_files_are_known_by_their_content(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    found, report = read_conversations(tmp_path / name)
    assert [(each.id, each.turns) for each in found] == [(str(n), PAIR) for n in range(3)]
    assert report.rejected == 0


def test_long_lists_are_read_row_by_row(tmp_path):
    path = tmp_path / "a.json"
    rows = [{"id": n, "conversations": [{"from": "human", "value": "é" * 9_000}, GPT]}
            for n in range(2_000)]
    path.write_text(json.dumps(rows, ensure_ascii=False, indent=1))
    del rows
    tracemalloc.start()
    found, _ = read_conversations(path)
    assert [int(each.id) for each in found] == list(range(2_000))
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.csv", GOOD, "wanted one of "),
        ("a.jsonl.gz", gzip.compress(VARIED)[:-2000], r"cannot be read beyond line \d+"),
        ("a.parquet", b"PAR1 and then nothing", "cannot be read"),
        ("a.json", AS_LIST[:-30].encode(), r"a JSON list, whose row 3 .*jq -c"),
        ("a.jsonl", HELD.decode().encode("utf-16"), "UTF-16, wanted UTF-8: iconv"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_files_that_cannot_be_read_are_named(tmp_path, name, data, said):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(BadData, match=f"{re.escape(name)}: {said}"):
        list(read_conversations(tmp_path / name)[0])


def test_a_folder_without_data_is_refused(tmp_path):
    with pytest.raises(BadData, match=r"holds no \.jsonl"):
        list(read_conversations(tmp_path)[0])


def test_lines_of_bare_turns(tmp_path):
    path = write(tmp_path / "a.jsonl", [json.dumps(TURNS).encode()] * 2)
    assert [each.turns for each in read_conversations(path)[0]] == [PAIR] * 2


def test_links_to_devices_and_pipes_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    (tmp_path / "b.jsonl").symlink_to("/dev/zero")
    with pytest.raises(BadData, match=r"b\.jsonl: not a regular file"):
        list(read_conversations(tmp_path)[0])
    os.mkfifo(tmp_path / "c.jsonl")
    with pytest.raises(BadData, match=r"c\.jsonl: neither a regular file"):
        list(read_conversations(tmp_path / "c.jsonl")[0])
    import datasets

    datasets.Dataset.from_list([json.loads(GOOD)]).save_to_disk(tmp_path / "saved")
    (table,) = (tmp_path / "saved").glob("*.arrow")
    table.unlink()
    table.symlink_to("/dev/zero")
    with pytest.raises(BadData, match=r"\.arrow: not a regular file"):
        list(read_conversations(tmp_path / "saved")[0])
