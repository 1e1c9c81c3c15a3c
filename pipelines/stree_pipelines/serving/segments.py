"""Divide an answer's text, as it comes, into thoughts, content and calls of tools."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from stree.chat_templates import THOUGHT_END, THOUGHT_START

# Where the families' templates begin and end a call
CALLS = (
    ("<tool_call>", "</tool_call>"),  # Qwen's XML; Hermes' and Granite 4's JSON
    ("<TOOLCALL>", "</TOOLCALL>"),  # Nemotron's JSON
    ("<|tool_call_start|>", "<|tool_call_end|>"),  # LFM2's Python
    ("<|tool_call|>", ""),  # Granite 3's JSON, up to the answer's end
)


class Piece(NamedTuple):
    """A part of an answer: kind "content", "reasoning", or "call" for the inside of a call."""

    kind: str
    text: str


@dataclass
class Marks:
    """The marks of a chat template.

    Attributes:
        thoughts: Pairs that enclose thoughts.
        calls: Pairs that enclose calls; an empty end is the answer's.
    """

    thoughts: list[tuple[str, str]] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def of(cls, template: str, with_tools: bool) -> Marks:
        """Return the marks that a template names."""
        starts = dict.fromkeys(THOUGHT_START.findall(template))
        ends = dict.fromkeys(THOUGHT_END.findall(template))
        thoughts = [(start, _end_of(start)) for start in starts]
        thoughts += [(_start_of(end), end) for end in ends if _start_of(end) not in starts]
        calls = [pair for pair in CALLS if pair[0] in template] if with_tools else []
        return cls(thoughts, calls)

    def end_of_opened(self, prompt_end: str) -> str | None:
        """Return the mark that ends the thought which a prompt's end opens; None for none."""
        text = prompt_end.rstrip()
        return next((end for start, end in self.thoughts if text.endswith(start)), None)

    @property
    def texts(self) -> list[str]:
        """All marks."""
        return [mark for pair in (*self.thoughts, *self.calls) for mark in pair if mark]


def _end_of(start: str) -> str:
    at = 1 if start[0] in "<[" else start.find("t")
    return f"{start[:at]}/{start[at:]}"


def _start_of(end: str) -> str:
    return end.replace("/", "", 1)


class Segments:
    """Divides one answer.

    Args:
        marks: Of the template.
        prompt_end: The last text of the prompt: a template may open a thought there.
    """

    def __init__(self, marks: Marks, prompt_end: str = "") -> None:
        self.marks = marks
        self._held = ""
        self._end: str | None = None  # of the thought or call that is open
        self._kind = "content"
        if (end := marks.end_of_opened(prompt_end)) is not None:
            self._kind, self._end = "reasoning", end

    def add(self, text: str) -> Iterator[Piece]:
        """Yield the pieces that a text completes; a call comes as a whole."""
        self._held += text
        while True:
            found = [
                (at, mark, kind, end) for mark, kind, end in self._next_marks()
                if (at := self._held.find(mark)) >= 0
            ]
            if not found:
                break
            at, mark, kind, end = min(found)
            before, self._held = self._held[:at], self._held[at + len(mark) :]
            yield from self._pieces(before)
            self._kind, self._end = kind, end
        if self._kind != "call":
            start = self._start_of_mark()
            ready, self._held = self._held[:start], self._held[start:]
            yield from self._pieces(ready)

    def end(self) -> Iterator[Piece]:
        """Yield what was held back, at the answer's end."""
        held, self._held = self._held, ""
        yield from self._pieces(held)

    def _pieces(self, text: str) -> Iterator[Piece]:
        if text:
            yield Piece(self._kind, text)

    def _next_marks(self) -> list[tuple[str, str, str]]:
        """Return marks that may come now, each with the kind after it and the end of that."""
        if self._kind != "content":
            return [(self._end, "content", "")] if self._end else []
        thoughts = [(start, "reasoning", end) for start, end in self.marks.thoughts]
        return thoughts + [(start, "call", end) for start, end in self.marks.calls]

    def _start_of_mark(self) -> int:
        """Return where the held text may begin a mark."""
        marks = [mark for mark, _, _ in self._next_marks()]
        longest = max(map(len, marks), default=1) - 1
        for at in range(max(0, len(self._held) - longest), len(self._held)):
            if any(mark.startswith(self._held[at:]) for mark in marks):
                return at
        return len(self._held)
