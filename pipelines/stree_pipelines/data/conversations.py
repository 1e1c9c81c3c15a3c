"""Read conversations from JSONL, JSON lists, Parquet or `datasets`, and check each row.

docs/your-own.md has the table of formats; raw_rows.py reads the files. A bad row is counted by
reason and skipped. One row is held at a time, plus a hash of each id.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from stree.chat_encoding import PLAIN_TEXT
from stree.chat_templates import THOUGHT_END, THOUGHT_START
from stree.common.errors import BadData
from stree_pipelines.data.raw_rows import (
    EMPTY_TEXT,
    ENCRYPTED,
    HUGE,
    INVALID_UTF8,
    MAX_CHARS,
    MEDIA,
    NO_TURNS,
    REPEATED_ROLE,
    TOOLS,
    UNKNOWN_LOSS,
    WRONG_ROLES,
    WRONG_TYPES,
    BadRow,
    RepeatedKeys,
    parse_row_json,
    raw_rows,
)

# Names in a report: how many differ, how many are said, and how long one may be.
MAX_NAMES_COUNTED, NUM_SHOWN, MAX_NAME_CHARS = 1000, 8, 40
Turn = tuple[str, str]  # (role, text), role one of "system", "user", "assistant", PLAIN_TEXT

ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "chatgpt", "bing", "bard"), "assistant"),
}
TOOL_ROLES = frozenset(
    ("tool", "function", "ipython", "observation", "function_call", "function_response",
     "tool_call", "tool_response")
)
TURN_KEYS = ("conversations", "messages", "conversation")
# Names by which a row or a turn says that it is not learnt: with 0 or false, or with true
LEARNT_KEYS = ("weight", "train", "training", "trainable", "loss", "learn")
MASKED_KEYS = ("mask", "masked")
WORDS_OF_LOSS = frozenset(
    (*LEARNT_KEYS, *MASKED_KEYS, "weights", "learnable", "supervise", "supervised", "ignore")
)
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # of a key: "lossMask" has two
THOUGHT_NAMES = (
    "reasoning_content", "reasoning", "reasoning_text", "thinking", "thinking_content", "thought",
    "thoughts", "think", "chain_of_thought", "cot", "rationale", "analysis", "reasoning_details",
)
ROW_TOOLS = ("tools", "functions", "available_tools")
TURN_TOOLS = ("tool_calls", "tool_call", "function_call", "function_calls", *ROW_TOOLS)
KNOWN_KEYS = frozenset((*TURN_KEYS, "id", "system", *ROW_TOOLS, *LEARNT_KEYS, *MASKED_KEYS))
KNOWN_TURN_KEYS = frozenset(
    ("from", "role", "value", "content", *TURN_TOOLS, *LEARNT_KEYS, *MASKED_KEYS, *THOUGHT_NAMES)
)
TEXT_PARTS = ("text", "input_text", "output_text")
THOUGHT_PARTS = ("thinking", "reasoning")
# Parts of `reasoning_details`, with the key of their text
DETAILS = {"reasoning.text": "text", "reasoning.summary": "summary"}
ENCRYPTED_PARTS = ("redacted_thinking", "reasoning.encrypted")
TOOL_PARTS = ("tool_use", "tool_result", "tool_call")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Accepted row: an optional system turn, then user and assistant in turn, ending with the
    assistant; or a plain text, as the only turn, whose role is `PLAIN_TEXT`.

    turns: (role, text). masked: numbers of turns that carry no loss. thoughts: numbers of turns,
    each with the thought that the row has beside the turn's text. place: the row's file and line.
    """

    id: str
    turns: tuple[Turn, ...]
    masked: frozenset[int] = frozenset()
    thoughts: tuple[tuple[int, str], ...] = ()
    place: str = field(default="", compare=False)


@dataclass
class ReadReport:
    """Counts of the rows read so far: `accepted + rejected == given` at any moment.

    roles: rejected rows for each role that is not known.
    notes: kept rows for each change that was made to them ("leading assistant turn dropped").
    passed_over: rows for each key that has no effect ("source", "turn.name").
    num_without_thought: kept rows with an answer that lacks the thought that the template opens.
    """

    source: str
    given: int = 0
    accepted: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    first_seen: dict[str, str] = field(default_factory=dict)  # reason -> file:line of its first row
    roles: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    passed_over: Counter[str] = field(default_factory=Counter)
    num_without_thought: int = 0

    @property
    def rejected(self) -> int:
        return sum(self.reasons.values())

    def skip(self, reason: str, place: str) -> None:
        """Count a skipped row; `place` says where it is, and what is wrong if that helps."""
        self.reasons[reason] += 1
        self.first_seen.setdefault(reason, place)

    def require_some(self) -> None:
        """Raise `BadData` when no row was accepted."""
        if not self.accepted:
            turns = '[{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]'
            wanted = f'{{"conversations": {turns}}}'
            raise BadData(f"no usable conversation left. {self}. Wanted rows like {wanted}")

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
        ):
            if counts:
                said = [f"{count:,} {name}" for name, count in counts.most_common(NUM_SHOWN)]
                more = [f"{len(counts) - NUM_SHOWN} more"] if len(counts) > NUM_SHOWN else []
                text += f"; {title}: " + ", ".join(said + more)
        if self.num_without_thought:
            text += (
                f"\nwarning: {self.num_without_thought:,} conversations have answers without "
                "thoughts, and the chat template opens a thought: the answers alone are learnt. "
                "The target's own answers (generate_data.py) have its thoughts"
            )
        return text


def read_conversations(
    source: str | Path, limit: int | None = None
) -> tuple[Iterator[Conversation], ReadReport]:
    """Read the conversations of `source` one by one, with a report that fills up as they are
    taken.

    source: a `.jsonl`, `.json` (a list) or `.parquet` file, plain or in gzip or zstd, a folder
        of them, a folder written by `datasets.save_to_disk`, or a `datasets` name with an optional
        split (`owner/name:split`, split "train" when left out; `owner/name/config:split`).
    limit: stop after this many accepted conversations.

    Raises `NotFound` when there is no such source, and `BadData`: it cannot be read, an archive
    breaks off, and, when the rows run out, if none was accepted.
    """
    report = ReadReport(str(source))
    return _accepted(raw_rows(source), report, limit), report


def _accepted(
    rows: Iterator[tuple[str, Any]], report: ReadReport, limit: int | None
) -> Iterator[Conversation]:
    seen: Counter[int] = Counter()  # hash of an id -> rows that have it
    for place, row in rows:
        if limit is not None and report.accepted >= limit:
            return
        report.given += 1
        try:
            if isinstance(row, BadRow):
                raise row
            conversation, notes = parse_row(row, place)
        except BadRow as bad:
            if bad.role is not None:
                _count(report.roles, [repr(bad.role[:MAX_NAME_CHARS])])
            report.skip(bad.reason, place)
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
    report.require_some()


def _count(counter: Counter[str], names: list[str]) -> None:
    for name in names:
        if name in counter or len(counter) < MAX_NAMES_COUNTED:
            counter[name] += 1


def _unknown_keys(row: Any) -> list[str]:
    """Return the keys of a row, and of its turns as `turn.KEY`, that have no effect."""
    if not isinstance(row, dict):
        return []
    turns = _turns_in(row)
    names = set(row) - KNOWN_KEYS - ({"text"} if turns is None else set())
    for turn in turns if isinstance(turns, list) else []:
        names |= {f"turn.{key}" for key in set(turn) - KNOWN_TURN_KEYS if turn[key] is not None}
    return [ascii(name[:MAX_NAME_CHARS])[1:-1] for name in sorted(names)]


def parse_row(row: Any, place: str) -> tuple[Conversation, list[str]]:
    """Return the conversation in a decoded row, and the changes made to it. Raises `BadRow`.

    place: names the conversation when it has no id.
    """
    if isinstance(row, list) and row and all(isinstance(turn, dict) for turn in row):
        row = {"messages": row}
    if not isinstance(row, dict):
        raise BadRow(WRONG_TYPES, f"a row must be an object, got {type(row).__name__}")
    turns, name = _turns_in(row), row.get("id")
    name = str(name) if isinstance(name, str | int) else place
    is_row_learnt = _is_learnt(row, "the row")
    if turns is None and isinstance(text := row.get("text"), str):
        masked = frozenset[int]() if is_row_learnt else frozenset((0,))
        notes = ["texts without loss"] if masked else []
        return Conversation(name, ((PLAIN_TEXT, _plain_text(text)),), masked, place=place), notes
    if turns is None:
        raise BadRow(NO_TURNS, f"none of {', '.join(TURN_KEYS)} holds a turn")
    if not isinstance(turns, list):
        raise BadRow(WRONG_TYPES, f"the turns must be a list, got {type(turns).__name__}")
    for key in ROW_TOOLS:
        if not _is_empty(row.get(key)):
            raise BadRow(TOOLS, f"the row has `{key}`")
    parsed = [_parse_turn(turn, number) for number, turn in enumerate(turns)]
    thoughts = [_thought(turn, text, number) for number, (turn, (_, text)) in enumerate(
        zip(turns, parsed, strict=True)
    )]
    is_learnt = [
        _is_learnt(turn, f"turn {number}") and is_row_learnt for number, turn in enumerate(turns)
    ]
    system = row.get("system")
    if isinstance(system, str) and system.strip() and parsed[0] != ("system", system):
        _require_unicode(system, "the row's system prompt")
        parsed.insert(0, ("system", system))
        thoughts.insert(0, "")
        is_learnt.insert(0, True)
    elif system is not None and not isinstance(system, str):
        raise BadRow(WRONG_TYPES, f"`system` must be a text, got {type(system).__name__}")
    _require_size(sum(len(text) for _, text in parsed) + sum(map(len, thoughts)))
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
        at for at, old in enumerate(kept) if roles[old] == "assistant" and not is_learnt[old]
    )
    if masked:
        notes.append("assistant turns without loss")
    if isinstance(row, RepeatedKeys) or any(isinstance(turn, RepeatedKeys) for turn in turns):
        notes.append("duplicate keys, the last counts")
    return Conversation(
        name,
        tuple(parsed[old] for old in kept),
        masked,
        tuple(
            (at, thoughts[old]) for at, old in enumerate(kept)
            if roles[old] == "assistant" and thoughts[old]
        ),
        place,
    ), notes


def _plain_text(text: str) -> str:
    """Return the text of a row without turns. Raises `BadRow` for one that cannot be learnt."""
    if not text.strip():
        raise BadRow(EMPTY_TEXT, "the row's text says nothing")
    _require_size(len(text))
    _require_unicode(text, "the row's text")
    return text


def _require_size(num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        raise BadRow(HUGE, f"{num_chars:,} characters, the limit is {MAX_CHARS:,}")


def _turns_in(row: dict[str, Any]) -> Any:
    """Return the turns of a row: the first value of `TURN_KEYS` that is not empty; None without
    any.

    A struct of lists becomes a list of turns, a JSON text is decoded.
    """
    turns = next((row[key] for key in TURN_KEYS if row.get(key) not in (None, [], {}, "")), None)
    if isinstance(turns, str) and turns.lstrip()[:1] in ("[", "{"):
        turns = parse_row_json(turns)
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
        for key in TURN_TOOLS:
            if not _is_empty(turn.get(key)):
                raise BadRow(TOOLS, f"turn {number} has `{key}`")
    if isinstance(text, list):
        text = "".join(_text_of(part, number) for part in text if not _is_thought(part))
    if not isinstance(role, str) or not isinstance(text, str):
        raise BadRow(
            WRONG_TYPES,
            f"turn {number} needs a role and a text, got {type(role).__name__} "
            f"and {type(text).__name__}",
        )
    if role not in ROLES:
        detail = f"turn {number} is from {role[:MAX_NAME_CHARS]!r}, wanted {', '.join(ROLES)}"
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
    if kind in ENCRYPTED_PARTS:
        raise BadRow(ENCRYPTED, f"turn {number} has a part of type {kind!r}")
    if kind in DETAILS and isinstance(text := part.get(DETAILS[kind]), str | None):
        return text or ""
    if kind in TEXT_PARTS and isinstance(part.get("text"), str):
        return part["text"]
    if kind in TOOL_PARTS:
        raise BadRow(TOOLS, f"turn {number} has a part of type {kind!r}")
    if isinstance(kind, str) and kind not in TEXT_PARTS:
        raise BadRow(MEDIA, f"turn {number} has a part of type {kind[:MAX_NAME_CHARS]!r}")
    raise BadRow(WRONG_TYPES, f"turn {number} has a part that is no text")


def _is_thought(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in THOUGHT_PARTS


def _is_encrypted(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ENCRYPTED_PARTS


def _thought(turn: dict[str, Any], text: str, number: int) -> str:
    """Return the thought beside a turn's `text`, or in parts of its content; "" without any."""
    content = next((turn[key] for key in ("value", "content") if turn.get(key) is not None), None)
    parts = [part for part in content if _is_thought(part)] if isinstance(content, list) else []
    given = [turn.get(name) for name in THOUGHT_NAMES]
    for part in parts:
        given.append(next(filter(None, map(part.get, (*THOUGHT_PARTS, "text"))), None))
    thoughts: list[str] = []
    for value in given:
        if isinstance(value, list):
            readable = [part for part in value if not _is_encrypted(part)] if thoughts else value
            value = "".join(_text_of(part, number) for part in readable)
        if isinstance(value, bool) or _is_empty(value):  # a switch, or nothing
            continue
        if not isinstance(value, str):
            raise BadRow(WRONG_TYPES, f"turn {number} has a thought that is no text")
        _require_unicode(value, f"turn {number}")
        thoughts.append(value)
    if not thoughts:
        return ""
    thought = "".join(thoughts) if len(parts) == len(thoughts) else thoughts[0]
    return "" if _is_copied(thought.strip(), text) else thought


def _is_copied(thought: str, text: str) -> bool:
    """Return whether a text begins with a whole thought, or holds it between thought tags."""
    start = text.lstrip()
    if start.startswith(thought):
        rest = start[len(thought) :]
        if not rest or rest[0].isspace() or THOUGHT_END.match(rest):
            return True
    tagged = rf"(?:{THOUGHT_START.pattern})\s*{re.escape(thought)}\s*(?:{THOUGHT_END.pattern})"
    return re.search(tagged, text) is not None


def _is_learnt(given: dict[str, Any], where: str) -> bool:
    """Return False for a row or turn with `weight: 0`, `train: false` or the like, or `mask: true`.

    Raises `BadRow` for other values, and for a name about the loss whose meaning is not known.
    """
    is_learnt = True
    for key, value in given.items():
        if value is None:
            continue
        if key in LEARNT_KEYS and value in (0, 1):
            is_learnt &= bool(value)
        elif key in MASKED_KEYS and isinstance(value, bool):
            is_learnt &= not value
        elif key in LEARNT_KEYS:
            setting = f"{where} has {key} {str(value)[:20]}"
            raise BadRow(WRONG_TYPES, f"{setting}, wanted 0 or 1, or false or true")
        elif not WORDS_OF_LOSS.isdisjoint(map(str.lower, WORD.findall(key))):
            name = key[:MAX_NAME_CHARS]
            raise BadRow(UNKNOWN_LOSS, f"{where} has {name} {str(value)[:20]}")
    return is_learnt


def _is_empty(value: Any) -> bool:
    """Return whether a value says nothing: null, [], {}, "", also nested, or as JSON in a text."""
    if isinstance(value, dict | list | tuple):
        return all(map(_is_empty, value.values() if isinstance(value, dict) else value))
    if not isinstance(value, str):
        return not value or (isinstance(value, float) and math.isnan(value))  # null of pandas
    text = value.strip()
    if text.lower() in ("", "none", "null", "nan", "false"):
        return True
    decoded = parse_row_json(text) if text[0] in '[{"' else None
    return isinstance(decoded, dict | list | str) and _is_empty(decoded)


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
