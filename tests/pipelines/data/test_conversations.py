"""Reading conversations: every kind of bad row has its reason, and none is lost or fails a file."""

import json

import pytest
from chat_rows import GOOD, GPT, HUMAN, PAIR, TURNS, row, write

from stree.chat_encoding import PLAIN_TEXT
from stree.common.errors import BadData
from stree_pipelines.data.conversations import Conversation, read_conversations
from stree_pipelines.data.raw_rows import REASONS

BAD_ROWS = {
    "cut-off": (b'{"conversations": [{"from": "human", "val', "not JSON"),
    "prose": (b"hello there", "not JSON"),
    "nesting": (b"[" * 50_000, "not JSON"),
    **{f"no-json-{number}": (text, "not JSON") for number, text in enumerate(
        (b'{"a": 1}}', b"{'a': 1}", b'{"a": 1,}', b"\0", b'{"a": "\t"}', b"//", b"nul")
    )},
    "digits": (b'{"n": ' + b"9" * 10_000 + b"}", "not JSON"),
    "latin-1": ('{"conversations": [{"from": "human", "value": "café"}]}'.encode("latin-1"),
                "invalid UTF-8"),
    "odd-byte": (b"\xc3\x28", "invalid UTF-8"), "surrogate": (b"\xed\xa0\x80", "invalid UTF-8"),
    "half-surrogate": (row({"from": "human", "value": "\ud83d"}, GPT), "invalid UTF-8"),
    "no-key": (b'{"id": "x"}', "no turns"),
    "null-turns": (b'{"conversations": null}', "no turns"),
    "turns-object": (b'{"conversations": {}}', "no turns"),
    "turns-key": (b'{"turns": ["a", "b"]}', "no turns"),
    "number-text": (b'{"text": 3}', "no turns"), "no-text": (b'{"text": " "}', "empty text"),
    "huge-text": (b'{"text": "' + b"x" * 200_001 + b'"}', "huge"),
    "half-text": (rb'{"text": "\ud83d"}', "invalid UTF-8"),
    "empty-list": (row(), "no turns"),
    "unknown-role": (row({"from": "narrator", "value": "x"}, GPT), "wrong roles"),
    "tool-role": (row({"from": "tool", "value": "x"}, GPT), "tools"),
    "row-tools": (row(HUMAN, GPT, tools=[{"type": "function"}]), "tools"),
    "image": (row({"role": "user", "content": [{"type": "image_url"}]}, GPT),
              "images or other media"),
    "half-weight": (row(HUMAN, {**GPT, "weight": 0.5}), "wrong types"),
    **{f"kin-{key}": (row(HUMAN, {**GPT, key: 0}), "unknown names about the loss")
       for key in ("loss_weight", "train_detail", "mask", "ignore-loss", "Masked",
                   "lossMask", "trainOnTurn", "isTrainable", "LOSS_MASK")},
    **{f"row-{key}": (row(HUMAN, GPT, **{key: value}), reason) for key, value, reason in (
        ("lossMask", 0, "unknown names about the loss"), ("loss", 2.5, "wrong types"),
    )},
    "redacted": (row(HUMAN, {"role": "assistant", "content": [
        {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "hello"}]}),
        "encrypted thoughts"),
    "encrypted": (row(HUMAN, {**GPT, "reasoning_details": [
        {"type": "reasoning.encrypted", "data": "x"}]}), "encrypted thoughts"),
    **{f"row-{key}": (row(HUMAN, GPT, **{key: [{"name": "f"}]}), "tools")
       for key in ("functions", "available_tools")},
    **{f"turn-{key}": (row(HUMAN, {**GPT, key: [{"name": "f"}]}), "tools")
       for key in ("function_calls", "functions", "tools")},
    "odd-loss": (row(HUMAN, {**GPT, "loss": "no"}), "wrong types"),
    "thought-number": (row(HUMAN, {**GPT, "reasoning": 3}), "wrong types"),
    "text-tools": (row(HUMAN, GPT, tools='[{"type": "function"}]'), "tools"),
    "text-call": (row(HUMAN, {**GPT, "tool_calls": '[{"name": "f"}]'}), "tools"),
    "starts-with-gpt": (row(GPT, HUMAN), "wrong roles"),
    "two-humans": (row(HUMAN, HUMAN, GPT), "one role twice in a row"),
    "late-system": (row(HUMAN, GPT, {"from": "system", "value": "x"}), "wrong roles"),
    "no-answer": (row(HUMAN), "wrong roles"),
    "only-system": (row({"from": "system", "value": "x"}), "wrong roles"),
    "empty-text": (row(HUMAN, {"from": "gpt", "value": ""}), "empty text"),
    "blank-text": (row({"from": "human", "value": " \n\t"}, GPT), "empty text"),
    "list-row": (b"[1, 2]", "wrong types"),
    **{f"{text}-row": (text.encode(), "wrong types") for text in ("3", "null", '"a"', "1e999")},
    "turns-string": (b'{"conversations": "hi"}', "wrong types"),
    "turn-string": (row("hi", GPT), "wrong types"),
    "value-number": (row({"from": "human", "value": 3}, GPT), "wrong types"),
    "role-number": (row({"from": 1, "value": "a"}, GPT), "wrong types"),
    "value-list": (row({"from": "human", "value": [1]}, GPT), "wrong types"),
    "value-missing": (row({"from": "human"}, GPT), "wrong types"),
    "role-null": (row({"from": None, "value": "x"}, GPT), "wrong types"),
    "long-text": (row({"from": "human", "value": "x" * 200_001}, GPT), "huge"),
    "long-line": (row(HUMAN, GPT, junk="x" * 1_300_000), "huge"),
}


def test_a_plain_text_is_a_turn_of_its_own(tmp_path):
    """Turns go first where a row has both; the key `text` is then passed over."""
    both = row(HUMAN, GPT, text="x")
    path = write(tmp_path / "a.jsonl", [b'{"text": "Once.", "id": 7, "url": "u"}', both])
    found, report = read_conversations(path)
    plain, chat = found
    assert (plain.id, plain.turns) == ("7", ((PLAIN_TEXT, "Once."),)) and len(chat.turns) == 2
    assert report.passed_over == {"url": 1, "text": 1}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_row_is_counted_by_reason_and_skipped(tmp_path, name):
    line, reason = BAD_ROWS[name]
    path = write(tmp_path / "a.jsonl", [GOOD, b"", line, GOOD])
    found, report = read_conversations(path)
    assert len(list(found)) == 2
    assert (report.given, report.accepted, report.rejected) == (3, 2, 1)
    assert dict(report.reasons) == {reason: 1}
    assert report.first_seen == {reason: f"{path}:3"}
    assert reason in str(report) and f"{path}:3" in str(report)


def test_every_reason_has_an_example_here():
    assert {reason for _, reason in BAD_ROWS.values()} == set(REASONS)


def test_conversations_have_their_ids_or_places(tmp_path):
    odd = "\0 \U0001f98a"
    lines = [row({"from": "system", "value": "S"}, HUMAN, GPT, id=5), row(HUMAN, GPT),
             row({"from": "human", "value": odd}, GPT, id="odd"),
             json.dumps({"id": "m", "messages": [
                 {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"},
             ]}).encode()]
    path = write(tmp_path / "a.jsonl", lines)
    found, _ = read_conversations(path)
    assert list(found) == [
        Conversation("5", (("system", "S"), *PAIR)), Conversation(f"{path}:2", PAIR),
        Conversation("odd", (("user", odd), PAIR[1])), Conversation("m", PAIR),
    ]


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


KEPT_ROWS = {
    "spaces": b"  " + row(HUMAN, GPT) + b" ", "odd-id": row(HUMAN, GPT, id={}),
    "no-number": row(HUMAN, GPT, x=float("nan")),
    "key-twice": row(HUMAN, GPT).replace(b"{", b'{"conversations": 1,', 1),
    "null-beside-good": row(HUMAN, GPT).replace(
        b'"conversations"', b'"conversations": null, "messages"'
    ),
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
    **{f"tools-{number}": row(HUMAN, GPT, tools=empty) for number, empty in enumerate(
        ("null", " [ ] ", "{}", "None", "", {}, [None], {"functions": []}, [""], '{"a": [null]}',
         float("nan"), '""', '"[]"', "false", " False ", False)
    )},
    "no-functions": row(HUMAN, {**GPT, "functions": None}, functions="[]"),
    "call-of-arrow": row(HUMAN, {**GPT, "function_call": {"name": None, "arguments": ""}}),
    "call-text": row(HUMAN, {**GPT, "tool_calls": "[]"}),
    "gpt-first": row(GPT, HUMAN, GPT),
    "human-last": row(HUMAN, GPT, HUMAN),
}


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
    }


@pytest.mark.parametrize(
    ("key", "no", "yes"),
    [
        *((key, no, True) for no in (0, False)
          for key in ("weight", "train", "training", "trainable", "loss", "learn")),
        ("mask", True, False), ("masked", True, False),
    ],
)
def test_turns_not_to_learn_under_each_name(tmp_path, key, no, yes):
    told = row(HUMAN, {**GPT, key: no}, HUMAN, {**GPT, key: yes})
    lines = [told, row(HUMAN, {**GPT, key: None})]
    found, report = read_conversations(write(tmp_path / "a.jsonl", lines))
    assert [each.masked for each in found] == [{1}, frozenset()]
    assert not report.passed_over
    lines = [row(*TURNS, *TURNS, **{key: no}), row(*TURNS, **{key: yes}),
             json.dumps({"text": "Once.", key: no}).encode()]
    found, report = read_conversations(write(tmp_path / "b.jsonl", lines))
    assert [each.masked for each in found] == [{1, 3}, frozenset(), {0}]
    assert not report.passed_over


@pytest.mark.parametrize(
    "turn",
    [
        *({**GPT, name: "Hm."} for name in ("reasoning_content", "reasoning", "thinking", "cot",
                                          "think", "rationale", "analysis")),
        *({**GPT, "reasoning_details": details, **more} for details, more in (
            ([{"type": "reasoning.text", "text": "Hm.", "signature": None}], {}),
            ([{"type": "reasoning.summary", "summary": "H"},
              {"type": "reasoning.text", "text": "m."}], {}),
            ([{"type": "reasoning.encrypted", "data": "x"}], {"reasoning": "Hm."}),
        )),
        {**GPT, "reasoning": None, "reasoning_content": "Hm.", "thinking": True},
        {**GPT, "reasoning": [{"type": "text", "text": "Hm."}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": [
            {"type": "reasoning", "text": "H"}, {"type": "reasoning", "text": "m."}, "hello"]},
    ],
)
def test_a_thought_beside_the_answer_is_kept(tmp_path, turn):
    line = row(GPT, {**HUMAN, "reasoning": "no"}, turn)
    found, report = read_conversations(write(tmp_path / "a.jsonl", [line]))
    assert [(each.turns, each.thoughts) for each in found] == [(PAIR, ((1, "Hm."),))]
    assert not report.passed_over


@pytest.mark.parametrize(
    ("thought", "text", "is_copied"),
    [
        ("Hm.", "<think>Hm.</think> hello", True),
        (" Hm.\n", "So: [THINK]\nHm. [/THINK]hello", True),
        ("Hm.", "Hm.\n\nhello", True),
        ("Hm.", " Hm.</think>hello", True),
        ("Hm.", "Hm.", True),
        ("4", "the answer is 42", False),
        ("4", "42", False),
        ("Hm.", "<think>Hm. No.</think> Hm. hello", False),
    ],
)
def test_a_thought_that_is_in_the_answer_already_counts_once(tmp_path, thought, text, is_copied):
    line = row(HUMAN, {**GPT, "value": text, "reasoning_content": thought})
    found, _ = read_conversations(write(tmp_path / "a.jsonl", [line]))
    thoughts = () if is_copied else ((1, thought),)
    assert [(each.turns[1][1], each.thoughts) for each in found] == [(text, thoughts)]


def test_report_names_roles_changes_and_keys_passed_over(tmp_path):
    narrator = row({"from": "Narrator", "value": "x"}, GPT)
    lines = [
        narrator, narrator, row(HUMAN, GPT, HUMAN, source="web"), row(HUMAN, {**GPT, "name": "B"}),
        b'{"id": "d", "conversations": %s, "id": "e"}' % json.dumps(TURNS).encode(),
    ]
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
