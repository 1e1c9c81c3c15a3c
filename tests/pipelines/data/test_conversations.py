"""Reading conversations: every kind of bad row has its reason, and none is lost or fails a file."""

import gzip
import json
import os
import random
import tracemalloc

import pytest

from stree.common.errors import BadData, NotFound
from stree_pipelines.data.conversations import Conversation, read_conversations
from stree_pipelines.data.raw_rows import REASONS

HUMAN = {"from": "human", "value": "hi"}
GPT = {"from": "gpt", "value": "hello"}
GOOD = json.dumps({"id": "g", "conversations": [HUMAN, GPT]}).encode()


def row(*turns, **rest):
    return json.dumps({"conversations": list(turns), **rest}).encode()


BAD_ROWS = {
    "cut-off": (b'{"conversations": [{"from": "human", "val', "not JSON"),
    "prose": (b"hello there", "not JSON"),
    "nesting": (b"[" * 50_000, "not JSON"),
    "digits": (b'{"n": ' + b"9" * 10_000 + b"}", "not JSON"),
    "latin-1": ('{"conversations": [{"from": "human", "value": "café"}]}'.encode("latin-1"),
                "invalid UTF-8"),
    "half-surrogate": (row({"from": "human", "value": "\ud83d"}, GPT), "invalid UTF-8"),
    "no-key": (b'{"id": "x"}', "no turns"),
    "null-turns": (b'{"conversations": null}', "no turns"),
    "empty-list": (row(), "no turns"),
    "unknown-role": (row({"from": "narrator", "value": "x"}, GPT), "wrong roles"),
    "tool-role": (row({"from": "tool", "value": "x"}, GPT), "tools"),
    "row-tools": (row(HUMAN, GPT, tools=[{"type": "function"}]), "tools"),
    "image": (row({"role": "user", "content": [{"type": "image_url"}]}, GPT),
              "images or other media"),
    "half-weight": (row(HUMAN, {**GPT, "weight": 0.5}), "wrong types"),
    "starts-with-gpt": (row(GPT, HUMAN), "wrong roles"),
    "two-humans": (row(HUMAN, HUMAN, GPT), "one role twice in a row"),
    "late-system": (row(HUMAN, GPT, {"from": "system", "value": "x"}), "wrong roles"),
    "only-system": (row({"from": "system", "value": "x"}), "wrong roles"),
    "empty-text": (row(HUMAN, {"from": "gpt", "value": ""}), "empty text"),
    "blank-text": (row({"from": "human", "value": " \n\t"}, GPT), "empty text"),
    "list-row": (b"[1, 2]", "wrong types"),
    "number-row": (b"3", "wrong types"),
    "turns-string": (b'{"conversations": "hi"}', "wrong types"),
    "turn-string": (row("hi", GPT), "wrong types"),
    "value-number": (row({"from": "human", "value": 3}, GPT), "wrong types"),
    "value-missing": (row({"from": "human"}, GPT), "wrong types"),
    "role-null": (row({"from": None, "value": "x"}, GPT), "wrong types"),
    "long-text": (row({"from": "human", "value": "x" * 2001}, GPT), "huge"),
    "long-line": (row(HUMAN, GPT, junk="x" * 200_000), "huge"),
}  # fmt: skip


def write(path, lines):
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_row_is_counted_by_reason_and_skipped(tmp_path, name):
    line, reason = BAD_ROWS[name]
    path = write(tmp_path / "a.jsonl", [GOOD, line, GOOD])
    found, report = read_conversations(path, max_chars=2000)
    assert len(list(found)) == 2
    assert (report.given, report.accepted, report.rejected) == (3, 2, 1)
    assert dict(report.reasons) == {reason: 1}
    assert report.first_seen == {reason: f"{path}:2"}
    assert reason in str(report) and f"{path}:2" in str(report)


@pytest.mark.parametrize("name", BAD_ROWS)
def test_strict_stops_at_the_bad_row_with_file_and_line(tmp_path, name):
    line, reason = BAD_ROWS[name]
    path = write(tmp_path / "a.jsonl", [GOOD, b"", GOOD, line, GOOD])
    found, _ = read_conversations(path, strict=True, max_chars=2000)
    with pytest.raises(BadData, match=f"{path}:4: {reason}"):
        list(found)


def test_every_reason_has_an_example_here():
    assert {reason for _, reason in BAD_ROWS.values()} == set(REASONS)


@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "gzip"])
def test_accepted_and_rejected_add_up_over_damaged_lines(tmp_path, compressed):
    rng = random.Random(7)
    lines, num_untouched = [], 0
    bad = [line for name, (line, _) in BAD_ROWS.items() if name not in ("nesting", "long-line")]
    for number in range(4000):
        line = row(HUMAN, GPT, id=number)
        kind = rng.randrange(4)
        if kind == 0:
            num_untouched += 1
        elif kind == 1:
            line = rng.choice(bad)
        else:  # flip, cut or insert bytes, but no line ends
            line = bytearray(line)
            for _ in range(rng.randint(1, 4)):
                at = rng.randrange(len(line))
                line[at : at + rng.randrange(3)] = bytes(
                    b for b in rng.randbytes(rng.randrange(3)) if b not in b"\n\r"
                )
            line = bytes(line)
        lines.append(line)
    given = sum(bool(line.strip()) for line in lines)
    path = tmp_path / ("a.jsonl.gz" if compressed else "a.jsonl")
    data = b"\n".join(lines)  # no newline at the end
    path.write_bytes(gzip.compress(data) if compressed else data)
    found, report = read_conversations(path)
    conversations = list(found)
    assert report.given == given
    assert report.accepted + report.rejected == given
    assert len(conversations) == report.accepted >= num_untouched
    assert set(report.reasons) <= set(REASONS)
    for conversation in conversations:
        roles = [role for role, _ in conversation.turns]
        assert roles == ["user", "assistant"] * (len(roles) // 2)


def test_both_layouts_their_aliases_and_ids(tmp_path):
    lines = [
        row({"from": "system", "value": "S"}, HUMAN, GPT, id=5),
        row({"from": "user", "value": "hi"}, {"from": "assistant", "value": "hello"}),
        json.dumps({
            "id": "m",
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "hello"},
            ],
        }).encode(),
    ]  # fmt: skip
    path = write(tmp_path / "a.jsonl", lines)
    found, _ = read_conversations(path)
    pair = (("user", "hi"), ("assistant", "hello"))
    assert list(found) == [
        Conversation("5", (("system", "S"), *pair)),
        Conversation(f"{path}:2", pair),
        Conversation("m", pair),
    ]


def test_windows_line_ends_and_a_byte_order_mark_do_no_harm(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD + b"\r\n" + GOOD + b"\r\n")
    found, report = read_conversations(path)
    assert len(list(found)) == 2 and report.rejected == 0


def test_limit_counts_accepted_conversations(tmp_path):
    path = write(tmp_path / "a.jsonl", [b"x", GOOD, b"x", GOOD, GOOD, GOOD])
    found, report = read_conversations(path, limit=2)
    assert len(list(found)) == 2
    assert report.accepted + report.rejected == report.given == 4


def test_nothing_left_is_an_error_that_says_why(tmp_path):
    path = write(tmp_path / "a.jsonl", [b"x", b"{}"])
    found, _ = read_conversations(path)
    with pytest.raises(BadData, match=r"0 of 2 .*1 not JSON.*1 no turns"):
        list(found)
    found, _ = read_conversations(write(tmp_path / "empty.jsonl", []))
    with pytest.raises(BadData, match="no usable conversation"):
        list(found)


def test_archive_that_breaks_off_is_an_error(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    rng = random.Random(0)
    rows = [row({"from": "human", "value": str(rng.random())}, GPT) for _ in range(2000)]
    path.write_bytes(gzip.compress(b"\n".join(rows))[:-2000])
    found, _ = read_conversations(path)
    with pytest.raises(BadData, match=r"a\.jsonl\.gz: cannot be read beyond line \d+"):
        list(found)


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


def test_other_kinds_of_files_are_refused(tmp_path):
    (tmp_path / "a.csv").write_bytes(GOOD)
    with pytest.raises(BadData, match=r"a\.csv: wanted one of "):
        list(read_conversations(tmp_path / "a.csv")[0])
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadData, match=r"holds no \.jsonl"):
        list(read_conversations(tmp_path / "folder")[0])


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


def test_damaged_parquet_is_an_error(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(BadData, match=r"a\.parquet: cannot be read"):
        list(read_conversations(path)[0])


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

    def load_dataset(name, split, streaming):
        asked.append((name, split, streaming))
        return [{"id": "n", "conversations": [HUMAN, GPT]}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert [c.id for c in read_conversations("owner/chats:test_sft")[0]] == ["n"]
    assert [c.id for c in read_conversations("owner/chats")[0]] == ["n"]
    assert asked == [("owner/chats", "test_sft", True), ("owner/chats", "train", True)]


def test_dataset_that_is_not_there_is_told_from_one_that_breaks_off(monkeypatch):
    import datasets

    def absent(name, split, streaming):
        raise FileNotFoundError("no such dataset on the hub")

    def breaks_off(name, split, streaming):
        yield {"conversations": []}
        raise ConnectionError("reset by peer")

    monkeypatch.setattr(datasets, "load_dataset", absent)
    with pytest.raises(NotFound, match=r"owner/chats: no such file .*no such dataset"):
        list(read_conversations("owner/chats")[0])
    monkeypatch.setattr(datasets, "load_dataset", breaks_off)
    with pytest.raises(BadData, match=r"owner/chats: .*reset by peer"):
        list(read_conversations("owner/chats")[0])


PAIR = (("user", "hi"), ("assistant", "hello"))
TURNS = [HUMAN, GPT]
HELD = b"".join(b'{"id": "%d", "conversations": %s}\n' % (n, json.dumps(TURNS).encode())
                for n in range(3))  # fmt: skip
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
    rows = [{"id": n, "conversations": [{"from": "human", "value": "é" * 900}, GPT]}
            for n in range(20_000)]  # fmt: skip
    path.write_text(json.dumps(rows, ensure_ascii=False, indent=1))
    del rows
    tracemalloc.start()
    found, _ = read_conversations(path)
    assert [int(each.id) for each in found] == list(range(20_000))
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


def test_lists_that_break_off_and_utf16_are_refused(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(AS_LIST[:-30])
    with pytest.raises(BadData, match=r"a JSON list, whose row 3 .*jq -c"):
        list(read_conversations(path)[0])
    path.write_bytes(HELD.decode().encode("utf-16"))
    with pytest.raises(BadData, match=r"UTF-16, wanted UTF-8: iconv"):
        list(read_conversations(path)[0])


def test_lines_of_bare_turns(tmp_path):
    path = write(tmp_path / "a.jsonl", [json.dumps(TURNS).encode()] * 2)
    assert [each.turns for each in read_conversations(path)[0]] == [PAIR] * 2


KEPT_ROWS = {
    "upper": row({"from": "USER", "value": "hi"}, {"from": "ASSISTANT", "value": "hello"}),
    **{side: row(HUMAN, {"role": side, "content": "hello"})
       for side in ("model", "bot", "chatgpt", "bing", "bard")},
    "empty-beside-good": row(messages=TURNS),
    "from-content": row({"from": "human", "content": "hi"}, {"role": "gpt", "value": "hello"}),
    "singular": json.dumps({"conversation": TURNS}).encode(),
    "struct": b'{"messages": {"from": ["human", "gpt"], "value": ["hi", "hello"]}}',
    "json-text": json.dumps({"conversations": json.dumps(TURNS)}).encode(),
    "parts": row({"role": "user", "content": [{"type": "text", "text": "h"},
                                              {"type": "text", "text": "i"}]}, GPT),
    "gpt-first": row(GPT, HUMAN, GPT),
    "human-last": row(HUMAN, GPT, HUMAN),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT_ROWS)
def test_rows_of_every_spelling(tmp_path, name):
    found, _ = read_conversations(write(tmp_path / "a.jsonl", [KEPT_ROWS[name]]))
    assert [each.turns for each in found] == [PAIR]


def test_system_of_row_and_developer(tmp_path):
    lines = [row(HUMAN, GPT, system="S"), row({"role": "developer", "content": "S"}, HUMAN, GPT)]
    found, _ = read_conversations(write(tmp_path / "a.jsonl", lines))
    assert [each.turns for each in found] == [(("system", "S"), *PAIR)] * 2


def test_masked_turns_are_told_and_moved_with_what_is_trimmed(tmp_path):
    lines = [
        row(GPT, HUMAN, {**GPT, "weight": 0}, HUMAN, GPT),
        row(HUMAN, {**GPT, "train": False}, HUMAN, {**GPT, "train": True}, system="S"),
    ]
    found, report = read_conversations(write(tmp_path / "a.jsonl", lines))
    assert [each.masked for each in found] == [{1}, {2}]
    assert report.notes == {
        "assistant turns without loss": 2, "leading assistant turn dropped": 1
    }  # fmt: skip


def test_report_names_roles_changes_and_keys_passed_over(tmp_path):
    narrator = row({"from": "Narrator", "value": "x"}, GPT)
    lines = [
        narrator, narrator, row(HUMAN, GPT, HUMAN, source="web"), row(HUMAN, {**GPT, "name": "B"}),
        b'{"id": "d", "conversations": %s, "id": "e"}' % json.dumps(TURNS).encode(),
    ]  # fmt: skip
    found, report = read_conversations(write(tmp_path / "a.jsonl", lines))
    list(found)
    assert "roles met: 2 'narrator'" in str(report)
    assert "1 trailing user turn dropped" in str(report)
    assert "1 duplicate keys, the last counts" in str(report)
    assert "keys passed over: 1 source, 1 turn.name" in str(report)


def test_repeated_ids_are_numbered(tmp_path):
    path = write(tmp_path / "a.jsonl", [GOOD, GOOD, GOOD])
    for _ in range(2):
        found, report = read_conversations(path)
        assert [each.id for each in found] == ["g", "g#2", "g#3"]
    assert report.notes == {"repeated ids numbered": 2}


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
