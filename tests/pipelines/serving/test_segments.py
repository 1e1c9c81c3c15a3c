"""Thoughts and calls of tools are found in every family's form, however the text is cut."""

from __future__ import annotations

import json

import pytest

from stree_pipelines.serving.calls import calls_of
from stree_pipelines.serving.segments import Marks, Segments

TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {
    "type": "object", "properties": {"text": {"type": "string"}, "count": {"type": "integer"}},
}}}]
WANTED = [("find", {"text": "12", "count": 3})]
FORMS = {
    "qwen": ("<tool_call>", "\n<function=find>\n<parameter=text>\n12\n</parameter>\n"
             "<parameter=count>\n3\n</parameter>\n</function>\n", "</tool_call>"),
    "hermes": ("<tool_call>", '\n{"name": "find", "arguments": {"text": "12", "count": 3}}\n',
               "</tool_call>"),
    "nemotron": ("<TOOLCALL>", '[{"name": "find", "arguments": {"text": "12", "count": 3}}]',
                 "</TOOLCALL>"),
    "granite 3": ("<|tool_call|>", '[{"name": "find", "arguments": {"text": "12", "count": 3}}]',
                  ""),
    "lfm2": ("<|tool_call_start|>", '[find(text="12", count=3)]', "<|tool_call_end|>"),
}


@pytest.mark.parametrize("family", FORMS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_call_is_read_in_every_form(family, size):
    start, inside, end = FORMS[family]
    text = f"Let me look.{start}{inside}{end}"
    segments = Segments(Marks.of(f"{{{{ '{start}' }}}}{end}", with_tools=True))
    pieces = [
        piece for at in range(0, len(text), size) for piece in segments.add(text[at : at + size])
    ]
    pieces += segments.end()
    content = "".join(text for kind, text in pieces if kind == "content")
    calls = [call for kind, text in pieces if kind == "call" for call in calls_of(text, TOOLS)]
    assert content == "Let me look."
    assert [(name, json.loads(arguments)) for name, arguments in calls] == WANTED


@pytest.mark.parametrize(
    ("prompt_end", "text", "wanted"),
    [
        ("<think>\n", "so\n</think>\n\nyes", [("reasoning", "so\n"), ("content", "\n\nyes")]),
        ("", "<think>so</think>yes", [("reasoning", "so"), ("content", "yes")]),
        ("", "a < b, <thin", [("content", "a < b, <thin")]),
        ("<think>", "so </thin", [("reasoning", "so </thin")]),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_thoughts_are_apart(prompt_end, text, wanted, size):
    marks = Marks.of("{{ '<think>' }} {{ '</think>' }}", with_tools=False)
    segments, found = Segments(marks, prompt_end), {}
    for at in range(0, len(text), size):
        for kind, piece in segments.add(text[at : at + size]):
            found[kind] = found.get(kind, "") + piece
    for kind, piece in segments.end():
        found[kind] = found.get(kind, "") + piece
    assert list(found.items()) == wanted


@pytest.mark.parametrize(
    "text", ["", "{", "nothing", "[1]", "{}", "f(1)", "f(**x)", "f(a=b)", "[" * 10**5, "(" * 200]
)
def test_what_is_no_call_gives_none(text):
    assert calls_of(text, TOOLS) == []
