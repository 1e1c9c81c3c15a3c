"""Encode conversations by the tokenizer's chat template, with the assistant's tokens marked.

Training, evaluation, `Decoder.chat` and `stree chat` all encode here. The rendered text is cut
where the assistant starts and stops, and the pieces are encoded one by one. So the mask is exact
(no token straddles a border), and a prompt's ids are by construction the first ids of that
conversation in training. A control token's spelling inside a message (`<|end|>` typed by a user) is
encoded as plain text.

Templates are rendered in process, in the sandbox of `transformers`: a template reaches neither
files nor Python, but it may run for as long, and ask for as much memory, as it wants.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jinja2
import jinja2.sandbox
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from stree.checkpoints.tokenizer import refusing_panics
from stree.common.errors import BadData, CheckpointRefused, NotFound, UsageError, one_line
from stree.common.plain_data import read_text

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

# Llama 3's template prints today's date unless told one; training data must not change at midnight.
FIXED_DATE = "26 Jul 2024"
NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # never in well-formed interchange
# Answers of a conversation whose borders are each rendered, where the template has no marks.
FEW_ANSWERS = 3

# The conversation is not to blame for these.
_ERRORS_OF_TEMPLATES = (
    jinja2.TemplateSyntaxError, jinja2.sandbox.SecurityError, RecursionError, OverflowError,
    MemoryError,
)

Message = tuple[str, str] | Mapping[str, Any]  # (role, text), or as `transformers` has it
Borders = tuple[int, int]  # in a text: where an answer's opening ends, and all of its turn


class Piece(NamedTuple):
    """A stretch of rendered text that is encoded by itself."""

    text: str
    assistant: bool
    plain: bool  # spells a control token, but is text of a message


class Rendering(NamedTuple):
    """A conversation as text, and where the assistant speaks (only for a template with marks)."""

    text: str
    spans: list[tuple[int, int]]


class Fence(NamedTuple):
    """Two characters that no message contains; they enclose what is to be found again."""

    opening: str
    closing: str


@dataclass(frozen=True)
class EncodedChat:
    """Ids int32 (T,), and mask bool (T,) of the assistant's tokens, end-of-turn included."""

    tokens: NDArray[np.int32]
    assistant: NDArray[np.bool_]


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


class ChatEncoder:
    """Encoder of conversations with one tokenizer and one template.

    With `{% generation %}` in the template its marks enclose the assistant's texts. Without, each
    assistant turn is the text that the template adds to the rendering of the turns before it
    (generation prompt included); renderings that are not prefixes of one another are refused. Of
    many answers between the same texts the first and the last are rendered, the others looked up.
    """

    def __init__(self, tokenizer: Any, template: str | None = None):
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise UsageError(
                f"{type(tokenizer).__name__} is not backed by `tokenizers`; convert it first"
            )
        self.template = resolve_template(tokenizer, template)
        self.has_marks = bool(GENERATION_MARK.search(self.template))
        self.specials_map: dict[str, Any] = dict(tokenizer.special_tokens_map)
        self.eos: str = tokenizer.eos_token or ""
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
        self.specials = tuple(token.content for token in added if token.special and token.content)
        longest_first = sorted(self.specials, key=len, reverse=True)
        self.special_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._json = tokenizer.backend_tokenizer.to_str()
        self._backends: dict[bool, Tokenizer] = {}
        # SentencePiece-like tokenizers put a space before every text (and behind control tokens); a
        # piece that continues a text is encoded behind an anchor, whose ids are then dropped.
        anchor = "\n"
        glued, alone = self._ids([anchor + "a"])[0], self._ids(["a"])[0]
        self._anchor = "" if glued[-len(alone) :] == alone else anchor
        self._anchor_ids = self._ids([self._anchor])[0] if self._anchor else []

    def encode(self, conversations: Sequence[Sequence[Message]]) -> list[EncodedChat]:
        """Return ids and mask of each conversation; many at once are encoded in parallel. Raises
        `BadData` when the template refuses a conversation."""
        cut = [self.pieces(messages) for messages in conversations]
        chats = []
        for pieces, ids in zip(cut, self._encode_pieces(cut), strict=True):
            tokens = np.concatenate([np.asarray(each, np.int32) for each in ids])
            assistant = np.repeat([piece.assistant for piece in pieces], [len(i) for i in ids])
            chats.append(EncodedChat(tokens, assistant))
        return chats

    def encode_prompt(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Return the ids of a prompt: those of `messages`, and of an assistant turn's opening.
        `variables` go to the template. Raises `BadData` when it refuses the messages."""
        (ids,) = self._encode_pieces([self.pieces(messages, prompt=True, **variables)])
        return [token for of_piece in ids for token in of_piece]

    def pieces(
        self, messages: Sequence[Message], prompt: bool = False, **variables: Any
    ) -> list[Piece]:
        """Return the rendered conversation, cut where the assistant starts and stops and around
        control tokens spelled in a message. `prompt` adds the opening of an assistant turn."""
        plain = [
            dict(each) if isinstance(each, Mapping) else {"role": each[0], "content": each[1]}
            for each in messages
        ]
        fence = self._fence([plain, variables])
        if fence is not None:
            plain, variables = self._fenced([plain, variables], fence)
        text, spans = self._render_with_spans(plain, prompt, variables)
        pieces: list[Piece] = []
        at = 0
        for start, stop in spans:
            pieces += self._cut(text[at:start], False, fence)
            pieces += self._cut(text[start:stop], True, fence)
            at = stop
        pieces += self._cut(text[at:], False, fence)
        return pieces

    def _fence(self, given: Any) -> Fence | None:
        """Choose a fence for the control tokens spelled in the messages; None without any."""
        texts = list(_texts(given))
        if not any(map(self.special_pattern.search, texts)):
            return None
        fence = _unused_marks("".join(texts))
        if fence is None:
            raise BadData("a text with control tokens and all of Unicode's noncharacters")
        return fence

    def _fenced(self, given: Any, fence: Fence) -> Any:
        """Copy messages (nested mappings and lists of texts) with their control tokens fenced."""
        if isinstance(given, str):
            return self.special_pattern.sub(rf"{fence.opening}\g<0>{fence.closing}", given)
        if isinstance(given, Mapping):
            return {key: self._fenced(value, fence) for key, value in given.items()}
        if isinstance(given, list | tuple):
            return [self._fenced(each, fence) for each in given]
        return given

    def _cut(self, text: str, assistant: bool, fence: Fence | None) -> Iterator[Piece]:
        """Yield the pieces of a rendered text; every second part is a fenced control token."""
        parts = [text]
        if fence is not None:
            special = self.special_pattern.pattern
            parts = re.split(f"{fence.opening}({special}){fence.closing}", text)
            # A template that splits a message at a control token leaves single sides behind.
            parts = [part.replace(fence.opening, "").replace(fence.closing, "") for part in parts]
        for number, part in enumerate(parts):
            if part:
                yield Piece(part, assistant, plain=number % 2 == 1)

    def _render(
        self, messages: Sequence[dict[str, Any]], prompt: bool, variables: Mapping[str, Any]
    ) -> Rendering:
        try:
            # annotated as str, returns ([text, …], [spans, …])
            rendered: Any = render_jinja_template(
                [list(messages)], chat_template=self.template,
                return_assistant_tokens_mask=self.has_marks, add_generation_prompt=prompt,
                **{"date_string": FIXED_DATE, **self.specials_map, **variables},
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
        return Rendering(text, [tuple(span) for span in spans[0]] if self.has_marks else [])

    def _render_with_spans(
        self, messages: Sequence[dict[str, Any]], prompt: bool, variables: Mapping[str, Any]
    ) -> Rendering:
        rendering = self._render(messages, prompt, variables)
        if self.has_marks:
            text, marked = rendering
            # A block that closes before the end-of-turn token would never teach the model to stop.
            return Rendering(
                text,
                [
                    (start, stop + len(self.eos) * text.startswith(self.eos, stop))
                    for start, stop in marked
                ],
            )
        text = rendering.text

        def render(turns: Sequence[dict[str, Any]], opened: bool = prompt) -> str:
            return self._render(turns, opened, variables).text

        spans = []
        for number, borders in self._borders(messages, text, render):
            if borders is None:
                if prompt:  # the assistant's tokens are not asked for
                    return rendering
                raise UsageError(
                    f"the chat template renders turn {number} differently when more turns follow, "
                    "so its tokens cannot be told apart; use a template with {% generation %} "
                    f"marks or one of {', '.join(TEMPLATES)}"
                )
            start, through = borders
            spans.append((start, start + self._end_of_turn(text[start:through])))
        return Rendering(text, spans)

    def _borders(
        self, messages: Sequence[dict[str, Any]], text: str, render: Callable[..., str]
    ) -> Iterator[tuple[int, Borders | None]]:
        """Yield each assistant turn's number and its borders in `text`, the rendering of all; None
        where the template renders the turn differently when more turns follow. The number of
        renderings does not grow with the turns, unless the template changes their texts."""
        answers = [n for n, each in enumerate(messages) if each.get("role") == "assistant"]

        @functools.cache
        def rendered(number: int) -> Borders | None:
            before, through = render(messages[:number], True), render(messages[: number + 1], False)
            is_prefix = through.startswith(before) and text.startswith(through)
            return (len(before), len(through)) if is_prefix else None

        found: dict[int, Borders] = {}
        if len(answers) > FEW_ANSWERS:
            places = _places(messages, text, render)
            for numbers in _alike(messages, answers, places, text):
                found |= _look_up(numbers, places, text, rendered)
        for number in answers:
            yield number, found.get(number) or rendered(number)

    def _end_of_turn(self, through: str) -> int:
        """Return where the assistant's turn stops in a rendering that ends with it.

        Whitespace after the end-of-turn token is the template's: generation is over by then.
        """
        trimmed = through.rstrip()
        return len(trimmed) if trimmed.endswith(self.specials) else len(through)

    def _ends_in_control(self, piece: Piece) -> bool:
        return not piece.plain and piece.text.endswith(self.specials)

    def _ids(self, texts: list[str], plain: bool = False) -> list[list[int]]:
        """Encode texts without special tokens, truncation and padding. `plain` takes the spelling
        of a control token as the text that it is."""
        backend = self._backends.get(plain)
        if backend is None:
            backend = Tokenizer.from_str(self._json)
            backend.no_truncation()
            backend.no_padding()
            backend.encode_special_tokens = plain
            self._backends[plain] = backend
        with refusing_panics():
            return [each.ids for each in backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _encode_pieces(self, chats: Sequence[list[Piece]]) -> list[list[list[int]]]:
        """Return the ids of each piece of each conversation; all are encoded in parallel."""
        ids: list[list[list[int]]] = [[[] for _ in pieces] for pieces in chats]
        for plain in (False, True):
            places = [
                (chat, number) for chat, pieces in enumerate(chats)
                for number, piece in enumerate(pieces) if piece.plain == plain
            ]
            anchored = [
                number > 0 and not self._ends_in_control(chats[chat][number - 1])
                for chat, number in places
            ]
            texts = [
                (self._anchor if behind else "") + chats[chat][number].text
                for behind, (chat, number) in zip(anchored, places, strict=True)
            ]
            found = self._ids(texts, plain) if texts else []
            for behind, (chat, number), tokens in zip(anchored, places, found, strict=True):
                before = self._anchor_ids if behind else []
                if tokens[: len(before)] != before:
                    text = chats[chat][number].text
                    raise BadData(f"the tokenizer merges {text[:40]!r} with what stands before")
                ids[chat][number] = tokens[len(before) :]
        return ids


def _places(
    messages: Sequence[dict[str, Any]], text: str, render: Callable[..., str]
) -> dict[int, tuple[int, int]]:
    """Find the messages' texts, without space around them, in `text`, the rendering of all, by one
    rendering with marks around each. Return {number: (start, stop)} of the messages whose text is
    there as it was given, once."""
    unused = _unused_marks("".join([text, *_texts(messages)]))
    if unused is None:
        return {}
    inner: dict[int, str] = {}
    marked = [dict(each) for each in messages]
    for number, message in enumerate(marked):
        content = message.get("content")
        if isinstance(content, str) and (inside := content.strip()):
            mark = f"{unused.opening}{number}{unused.closing}"
            message["content"] = content.replace(inside, f"{mark}{inside}{mark}", 1)
            inner[number] = inside
    try:
        parts = re.split(f"{unused.opening}([0-9]+){unused.closing}", render(marked))
    except BadData:  # the template looks into the texts
        return {}
    if "".join(parts[::2]) != text:
        return {}
    marks: dict[int, list[int]] = {}
    ends = itertools.accumulate(map(len, parts[::2]))
    for number, end in zip(map(int, parts[1::2]), ends, strict=False):
        marks.setdefault(number, []).append(end)
    return {
        number: (at[0], at[1])
        for number, at in marks.items()
        if len(at) == 2 and text[at[0] : at[1]] == inner[number]
    }


def _alike(
    messages: Sequence[Mapping[str, Any]], answers: Sequence[int],
    places: Mapping[int, tuple[int, int]], text: str,
) -> Iterable[list[int]]:
    """Group the answers by all that surrounds their texts: roles and keys of each message and the
    one before it, and the rendered text up to its neighbours' texts, any number for any other."""
    places = {len(messages): (len(text), len(text)), **places}
    groups: dict[Any, list[int]] = {}
    for number in answers:
        if places.keys() >= {number - 1, number, number + 1}:
            (_, behind), (start, stop), (ahead, _) = (places[number + i] for i in (-1, 0, 1))
            around = re.sub("[0-9]+", "0", f"{text[behind:start]}\0{text[stop:ahead]}")
            kinds = (
                (each.get("role"), frozenset(key for key, value in each.items() if value))
                for each in messages[number - 1 : number + 1]
            )
            groups.setdefault((around, *kinds), []).append(number)
    return groups.values()


def _look_up(
    numbers: Sequence[int], places: Mapping[int, tuple[int, int]], text: str,
    rendered: Callable[[int], Borders | None],
) -> dict[int, Borders]:
    """Return the borders of answers of one group that stand between the same texts as the first and
    the last of them; nothing where those two differ."""

    def around(number: int) -> tuple[str, str] | None:
        (_, behind), (start, stop) = places[number - 1], places[number]
        before, through = rendered(number) or (-1, -1)
        if not behind <= before <= start < stop <= through:
            return None
        return text[behind:before], text[stop:through]

    texts = around(numbers[0])
    if texts is None or texts != around(numbers[-1]):
        return {}
    found = {}
    for number in numbers:
        (_, behind), (_, stop) = places[number - 1], places[number]
        if text.startswith(texts[0], behind) and text.startswith(texts[1], stop):
            found[number] = behind + len(texts[0]), stop + len(texts[1])
    return found


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


_encoders: WeakKeyDictionary[Any, dict[tuple, ChatEncoder]] = WeakKeyDictionary()


def chat_encoder(tokenizer: Any, template: str | None = None) -> ChatEncoder:
    """Return the encoder of a tokenizer and template, cached: copying a vocabulary takes time."""
    key = (template, str(tokenizer.chat_template), len(tokenizer))
    known = _encoders.setdefault(tokenizer, {})
    if key not in known:
        known[key] = ChatEncoder(tokenizer, template)
    return known[key]


def encode_prompt(
    tokenizer: Any, messages: Sequence[Message], template: str | None = None, **variables: Any
) -> list[int]:
    """Return the ids of a prompt, which are the first ids of the same conversation in training.
    They are those of `messages` and of the answer's opening; `variables` go to the template."""
    return chat_encoder(tokenizer, template).encode_prompt(messages, **variables)
