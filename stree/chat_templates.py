"""Render conversations by a chat template, and tell the messages' texts from the template's own.

A template's own control tokens are recognised, those that a message spells are not. A second
rendering, with marks around the messages' texts, shows where these stand.

Templates are rendered in process, in the sandbox of `transformers`: a template reaches neither
files nor Python, but it may run for as long, and ask for as much memory, as it wants.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import jinja2.sandbox
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from stree.checkpoints.tokenizer import refusing_panics
from stree.common.errors import BadData, CheckpointRefused, NotFound, UsageError, one_line
from stree.common.plain_data import read_text
from stree.common.template_dates import with_fixed_date

STREE_CHAT = """\
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {{- '<|assistant|>' -}}
        {%- generation -%}{{- message.content + '<|end|>' -}}{%- endgeneration -%}
    {%- elif message.role in ['system', 'user'] -%}
        {{- '<|' + message.role + '|>' + message.content + '<|end|>' -}}
    {%- else -%}
        {{- raise_exception('unknown role ' + message.role) -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
CHATML = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}{{- message.content + '<|im_end|>' -}}{%- endgeneration -%}
    {%- else -%}
        {{- message.content + '<|im_end|>' -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
TEMPLATES = {"stree-chat": STREE_CHAT, "chatml": CHATML}
GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")

NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # never in well-formed interchange
# Keys under which messages have the thought that precedes their text
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking", "thought")
THOUGHT_START = re.compile(r"<(?:\w+:)?(?:think|thinking|thought|reasoning)>|\[THINK\]|◁think▷")
THOUGHT_END = re.compile(r"</(?:\w+:)?(?:think|thinking|thought|reasoning)>|\[/THINK\]|◁/think▷")
# At a prompt's end
THOUGHT_CLOSED = re.compile(rf"(?:{THOUGHT_END.pattern})\s*$")
THOUGHT_OPENED = re.compile(rf"(?:{THOUGHT_START.pattern})\s*$")
IDENTIFIER = re.compile(r"[\w.-]*")  # texts that templates compare: "user", "function", "high"

# The conversation is not to blame for these.
_ERRORS_OF_TEMPLATES = (
    jinja2.TemplateSyntaxError, jinja2.sandbox.SecurityError, RecursionError, OverflowError,
    MemoryError,
)

Span = tuple[int, int]  # start and stop in a text


class Rendering(NamedTuple):
    """A conversation as text.

    spans: Where the assistant speaks, for a template with marks. quoted: The texts of messages, as
    far as they could spell a control token.
    """

    text: str
    spans: list[Span]
    quoted: list[Span]


class Fence(NamedTuple):
    """Two characters that no message contains; they enclose what is to be found again."""

    opening: str
    closing: str

    def around(self, text: str) -> str:
        """Enclose a text, without the space around it."""
        inner = text.strip()
        return text.replace(inner, f"{self.opening}{inner}{self.closing}", 1) if inner else text

    def found_in(self, text: str) -> tuple[str, list[Span], bool]:
        """Return a text without its fences, what they enclosed, and whether all were in pairs."""
        parts = re.split(f"{self.opening}([^{self.opening}{self.closing}]*){self.closing}", text)
        plain = [part.replace(self.opening, "").replace(self.closing, "") for part in parts]
        spans, at = [], 0
        for number, part in enumerate(plain):
            if number % 2:
                spans.append((at, at + len(part)))
            at += len(part)
        return "".join(plain), spans, plain == parts


def resolve_template(tokenizer: Any, template: str | None = None) -> str:
    """Return the Jinja text of a template; None is the tokenizer's own, `named_template` returns
    others. Raises `UsageError`."""
    if template is not None:
        return named_template(template)
    own = tokenizer.chat_template
    if isinstance(own, dict):
        own = own.get("default")
    if not own:
        raise UsageError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template; "
            f"name one of {', '.join(TEMPLATES)} or give a .jinja file"
        )
    return own


def named_template(template: str) -> str:
    """Return the Jinja text of a name in `TEMPLATES`, of a .jinja file, or the text itself.

    Raises `NotFound`, and `UsageError` for a file that cannot be read.
    """
    if template in TEMPLATES:
        return TEMPLATES[template]
    if "{%" in template or "{{" in template:
        return template
    if Path(template).is_file():
        try:
            return read_text(Path(template))
        except (OSError, ValueError) as error:
            raise UsageError(f"chat template {template} cannot be read: {error}") from error
    raise NotFound(
        f"no chat template {template!r}: neither a file nor one of {', '.join(TEMPLATES)}"
    )


class ChatRenderer:
    """Renderer of conversations by one template, for one tokenizer.

    Attributes:
        template: The Jinja text, which prints a fixed date unless `today` is true.
        has_marks: Whether `{% generation %}` marks enclose the assistant's texts.
        specials: The tokenizer's control tokens; special_ids, their ids.
    """

    def __init__(self, tokenizer: Any, template: str | None, today: bool):
        self.template = resolve_template(tokenizer, template)
        if not today:
            self.template = with_fixed_date(self.template)
        self.has_marks = bool(GENERATION_MARK.search(self.template))
        self._specials_map: dict[str, Any] = dict(tokenizer.special_tokens_map)
        self._backend = tokenizer_for_pieces(tokenizer.backend_tokenizer.to_str(), plain=False)
        added = self._backend.get_added_tokens_decoder()
        named = {n: token.content for n, token in added.items() if token.special and token.content}
        self.special_ids = frozenset(named)
        self.specials = tuple(named.values())
        normalizer = self._backend.normalizer
        self._normalizer = normalizer if any(added[n].normalized for n in named) else None
        # A text that spells a control token, or the part of one, has one of these characters.
        spelled = [*self.specials, *map(self._normalized, self.specials)]
        self._edges = frozenset(each[at] for each in spelled if each for at in (0, -1))

    @cached_property
    def reads_thoughts(self) -> bool:
        """True when the template prints an answer's thought, under one of `THOUGHT_KEYS`."""
        thought = "a thought"
        answer = {"role": "assistant", "content": "b", **dict.fromkeys(THOUGHT_KEYS, thought)}
        try:
            return thought in self.render([{"role": "user", "content": "c"}, answer], False, {})[0]
        except BadData:
            return False

    def render(
        self, messages: Sequence[dict[str, Any]], prompt: bool, variables: Mapping[str, Any]
    ) -> tuple[str, list[Span]]:
        """Return the text of messages, and where the assistant speaks, for a template with marks.

        `prompt` adds the opening of an assistant turn. Raises `BadData` when the template refuses
        the messages, `CheckpointRefused` when it cannot be used at all.
        """
        try:
            # annotated as str, returns ([text, …], [spans, …])
            rendered: Any = render_jinja_template(
                [list(messages)], chat_template=self.template,
                return_assistant_tokens_mask=self.has_marks, add_generation_prompt=prompt,
                **{**self._specials_map, **variables},
            )
        except _ERRORS_OF_TEMPLATES as error:
            raise CheckpointRefused(
                f"the chat template cannot be used: {type(error).__name__}: {one_line(str(error))};"
                f" name one of {', '.join(TEMPLATES)} instead, or give a .jinja file"
            ) from error
        except Exception as error:  # whatever an expression of the template's can raise
            roles = one_line(" ".join(str(each.get("role")) for each in messages))
            raise BadData(
                f"the chat template refuses the turns {roles!r}: {one_line(str(error))}"
            ) from error
        (text,), spans = rendered
        return text, [tuple(span) for span in spans[0]] if self.has_marks else []

    def rendering(
        self, messages: Sequence[dict[str, Any]], prompt: bool, variables: Mapping[str, Any]
    ) -> Rendering:
        """Render messages as `render` does, and find the texts that could spell a control token.

        Raises `BadData`, too, when a text spells one and cannot be told from the template's.
        """
        text, spans = self.render(messages, prompt, variables)
        texts = [each for each in _texts([messages, variables]) if not IDENTIFIER.fullmatch(each)]
        if not any(not self._edges.isdisjoint(self._normalized(each)) for each in texts):
            return Rendering(text, spans, [])
        fence = _unused_marks("".join(texts))
        if fence is None:
            raise BadData("a text with control tokens and all of Unicode's noncharacters")
        # A template that looks into the texts, or cuts them, may leave smaller fences alone.
        for fenced in (self._fenced, self._fenced_controls):
            try:
                marked = self.render(
                    fenced(list(messages), fence), prompt, fenced(dict(variables), fence)
                )
            except BadData:
                continue
            plain, quoted, in_pairs = fence.found_in(marked[0])
            if plain == text and (in_pairs or fenced == self._fenced_controls):
                return Rendering(text, spans, quoted)
        if any(map(self.controls, texts)):
            raise BadData(
                "the chat template edits a text that spells a control token, so that the token "
                "cannot be told from the template's own"
            )
        return Rendering(text, spans, [])

    def _fenced(self, given: Any, fence: Fence, is_thinker: bool = False) -> Any:
        """Copy messages (nested mappings and lists of texts) with each text fenced.

        The signs around a thought stay outside: templates look for them. Those that are control
        tokens do so in the assistant's messages alone.
        """
        if isinstance(given, Mapping):
            is_thinker = is_thinker or given.get("role") == "assistant"
            return {
                key: self._fenced_controls(value, fence)
                if key in ("role", "type") else self._fenced(value, fence, is_thinker)
                for key, value in given.items()
            }
        if isinstance(given, list | tuple):
            return [self._fenced(each, fence, is_thinker) for each in given]
        if not isinstance(given, str) or IDENTIFIER.fullmatch(given):
            return given
        signs = [*THOUGHT_START.findall(given), *THOUGHT_END.findall(given)]
        if not is_thinker and any(sign in self.specials for sign in signs):
            return fence.around(given)
        for start, stop in reversed(around_thoughts(given, 0, len(given))):
            given = f"{given[:start]}{fence.around(given[start:stop])}{given[stop:]}"
        return given

    def _fenced_controls(self, given: Any, fence: Fence) -> Any:
        """Copy messages with the control tokens that their texts spell fenced."""
        if isinstance(given, Mapping):
            return {key: self._fenced_controls(value, fence) for key, value in given.items()}
        if isinstance(given, list | tuple):
            return [self._fenced_controls(each, fence) for each in given]
        if not isinstance(given, str):
            return given
        for start, stop in reversed(self.controls(given)):
            given = f"{given[:start]}{fence.around(given[start:stop])}{given[stop:]}"
        return given

    def controls(self, text: str) -> list[Span]:
        """Return where a text has control tokens, as the tokenizer finds them."""
        with refusing_panics():
            found = self._backend.encode(text, add_special_tokens=False)
        pairs = zip(found.ids, found.offsets, strict=True)
        return [span for index, span in pairs if index in self.special_ids]

    def _normalized(self, text: str) -> str:
        """Return a text as the tokenizer looks for control tokens in it."""
        if self._normalizer is None:
            return text
        with refusing_panics():
            return self._normalizer.normalize_str(text)

    def place(
        self, messages: Sequence[dict[str, Any]], said: str, text: str,
        variables: Mapping[str, Any],
    ) -> int | None:
        """Find where the last message's text, as far as it is `said`, stands in a rendering."""
        fence = _unused_marks("".join([text, *_texts([messages, variables])]))
        if fence is None or not said:
            return None
        head, _, rest = messages[-1]["content"].rpartition(said)
        marked = {**messages[-1], "content": f"{head}{fence.around(said)}{rest}"}
        try:
            fenced, _ = self.render([*messages[:-1], marked], False, variables)
        except BadData:  # the template looks into the text
            return None
        plain, spans, _ = fence.found_in(fenced)
        return spans[-1][0] if plain == text and spans else None


def tokenizer_for_pieces(tokenizer_json: str, plain: bool) -> Tokenizer:
    """Return a tokenizer without truncation and padding; `plain` takes the spelling of a control
    token as the text that it is."""
    backend = Tokenizer.from_str(tokenizer_json)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = plain
    return backend


def around_thoughts(text: str, start: int, stop: int) -> list[Span]:
    """Return the stretches of text[start:stop] between the signs around thoughts."""
    signs = re.compile(f"{THOUGHT_START.pattern}|{THOUGHT_END.pattern}")
    spans = []
    for sign in signs.finditer(text, start, stop):
        spans.append((start, sign.start()))
        start = sign.end()
    return [*spans, (start, stop)]


def _unused_marks(text: str) -> Fence | None:
    """Choose two characters that are not in a text; None where all are."""
    unused = [mark for mark in NONCHARACTERS if mark not in text]
    return Fence(*unused[:2]) if len(unused) > 1 else None


def _texts(given: Any) -> Iterator[str]:
    """Yield the texts in nested mappings and lists."""
    if isinstance(given, str):
        yield given
    elif isinstance(given, Mapping):
        for value in given.values():
            yield from _texts(value)
    elif isinstance(given, list | tuple):
        for each in given:
            yield from _texts(each)
