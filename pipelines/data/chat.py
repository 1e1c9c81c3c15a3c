"""Conversations to token ids with the assistant's tokens marked, by the tokenizer's chat template.

The rendered text is cut where the assistant starts and stops, and the pieces are encoded one by
one. So the mask is exact (no token straddles a border), and a prompt's ids at inference are by
construction the first ids of the same conversation in training. A control token's spelling inside
somebody's text (`<|end|>` typed by a user) is encoded as plain text.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from stree.errors import BadData, CheckpointRefused, NotFound, UsageError, exit_with_reason
from stree.plain_data import read_text
from stree.tokenizer import encodes_in_linear_time
from stree_pipelines.data.conversations import Turn, read_conversations
from stree_pipelines.data.encoding import ChildEncoder, Encoder
from stree_pipelines.data.limited_child import ChildEnded
from stree_pipelines.data.template_rendering import (
    DATA,
    GENERATION_MARK,
    ChildRenderer,
    Refused,
    Renderer,
    Rendering,
    render,
)
from stree_pipelines.terminal.command_line import PlainParser

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
SHIPPED = frozenset(TEMPLATES.values())

# Llama 3's template prints today's date unless told one; training data must not change at midnight.
FIXED_DATE = "26 Jul 2024"
NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # never in well-formed interchange


class Piece(NamedTuple):
    """A stretch of rendered text that is encoded by itself."""

    text: str
    assistant: bool
    plain: bool  # spells a control token, but is somebody's text


@dataclass(frozen=True)
class EncodedChat:
    """tokens: int32 (T,); assistant: bool (T,), True where the assistant speaks, its end-of-turn
    token included."""

    tokens: NDArray[np.int32]
    assistant: NDArray[np.bool_]


def resolve_template(tokenizer: Any, template: str | None = None) -> str:
    """The Jinja text of a template: None is the tokenizer's own, anything else is for
    `named_template`. Raises `UsageError`."""
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
    """The Jinja text of a name in `TEMPLATES`, of a path to a .jinja file, or the text itself.
    Raises `NotFound`, and `UsageError` for a file that cannot be read."""
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
    """Encodes conversations with one tokenizer and one template.

    With `{% generation %}` in the template its marks say what the assistant speaks. Without, each
    assistant turn is what the template adds to the rendering of the turns before it (generation
    prompt included); renderings that are not prefixes of one another are refused.
    """

    def __init__(self, tokenizer: Any, template: str | None = None):
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise UsageError(
                f"{type(tokenizer).__name__} is not backed by `tokenizers`; convert it first"
            )
        self.template = resolve_template(tokenizer, template)
        self.has_marks = bool(GENERATION_MARK.search(self.template))
        self._renderer: Renderer = render if self.template in SHIPPED else ChildRenderer()
        self.specials_map: dict[str, Any] = dict(tokenizer.special_tokens_map)
        self.eos: str = tokenizer.eos_token or ""
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
        self.specials = tuple(token.content for token in added if token.special and token.content)
        longest_first = sorted(self.specials, key=len, reverse=True)
        self.special_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        backend = tokenizer.backend_tokenizer
        kind = Encoder if encodes_in_linear_time(backend) else ChildEncoder
        self._encoder = kind(backend.to_str())
        # SentencePiece-like tokenizers put a space before every text (and behind control tokens); a
        # piece that continues a text is encoded behind an anchor, whose ids are then dropped.
        anchor = "\n"
        glued, alone = self._ids([anchor + "a"])[0], self._ids(["a"])[0]
        self._anchor = "" if glued[-len(alone) :] == alone else anchor
        self._anchor_ids = self._ids([self._anchor])[0] if self._anchor else []

    def encode(self, conversations: Sequence[Sequence[Turn]]) -> list[EncodedChat]:
        """Ids and mask of each conversation. Faster for many at once: the pieces of all are encoded
        in parallel. Raises `BadData` when the template refuses a conversation."""
        pieces: list[Piece] = []
        owners: list[int] = []
        for turns in conversations:
            found = self.pieces(turns)
            pieces.extend(found)
            owners.append(len(found))
        ids = self._encode_pieces(pieces, owners)
        chats, start = [], 0
        for count in owners:
            stop = start + count
            tokens = np.concatenate([np.asarray(i, np.int32) for i in ids[start:stop]])
            assistant = np.repeat(
                [piece.assistant for piece in pieces[start:stop]], [len(i) for i in ids[start:stop]]
            )
            chats.append(EncodedChat(tokens, assistant))
            start = stop
        return chats

    def encode_prompt(self, turns: Sequence[Turn]) -> list[int]:
        """Ids of `turns` and the opening of an assistant turn: what the model is to go on from."""
        pieces = self.pieces(turns, prompt=True)
        return [token for ids in self._encode_pieces(pieces, [len(pieces)]) for token in ids]

    def pieces(self, turns: Sequence[Turn], prompt: bool = False) -> list[Piece]:
        """The rendered conversation, cut where the assistant starts and stops and around control
        tokens spelled in a text. `prompt` adds the opening of an assistant turn."""
        turns, sentinel = self._shield(turns)
        text, spans = self._render_with_spans(turns, prompt)
        pieces: list[Piece] = []
        at = 0
        for start, stop in spans:
            pieces += _cut(text[at:start], False, sentinel)
            pieces += _cut(text[start:stop], True, sentinel)
            at = stop
        pieces += _cut(text[at:], False, sentinel)
        return pieces

    def _shield(self, turns: Sequence[Turn]) -> tuple[Sequence[Turn], str]:
        """Fence each control token spelled in a text by a sentinel character on both sides."""
        if not any(self.special_pattern.search(text) for _, text in turns):
            return turns, ""
        everything = "".join(text for _, text in turns)
        sentinel = next((mark for mark in NONCHARACTERS if mark not in everything), None)
        if sentinel is None:
            raise BadData("a text with control tokens and all of Unicode's noncharacters")
        fence = rf"{sentinel}\g<0>{sentinel}"
        return [(role, self.special_pattern.sub(fence, text)) for role, text in turns], sentinel

    def _render(self, turns: Sequence[Turn], prompt: bool) -> Rendering:
        messages = [{"role": role, "content": text} for role, text in turns]
        variables = {"date_string": FIXED_DATE, **self.specials_map}
        try:
            return self._renderer(self.template, messages, prompt, variables)
        except Refused as refused:
            if refused.culprit == DATA:
                roles = " ".join(role for role, _ in turns)
                raise BadData(
                    f"the chat template refuses the turns {roles!r}: {refused}"
                ) from refused
            raise CheckpointRefused(
                f"the chat template cannot be used: {refused}; name one of {', '.join(TEMPLATES)} "
                "instead, or give a .jinja file"
            ) from refused

    def _render_with_spans(
        self, turns: Sequence[Turn], prompt: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        if self.has_marks:
            text, marked = self._render(turns, prompt)
            # A block that closes before the end-of-turn token would never teach the model to stop.
            return text, [
                (start, stop + len(self.eos) * text.startswith(self.eos, stop))
                for start, stop in marked
            ]
        text = self._render(turns, prompt).text
        spans = []
        for number, (role, _) in enumerate(turns):
            if role != "assistant":
                continue
            before = self._render(turns[:number], prompt=True).text
            through = self._render(turns[: number + 1], prompt=False).text
            if not (through.startswith(before) and text.startswith(through)):
                raise UsageError(
                    f"the chat template renders turn {number} differently when more turns follow, "
                    "so its tokens cannot be told apart; use a template with {% generation %} "
                    f"marks or one of {', '.join(TEMPLATES)}"
                )
            spans.append((len(before), self._end_of_turn(through)))
        return text, spans

    def _end_of_turn(self, through: str) -> int:
        """Where the assistant's turn stops in a rendering that ends with it. Whitespace behind the
        end-of-turn token is the template's: generation is over by then."""
        trimmed = through.rstrip()
        return len(trimmed) if trimmed.endswith(self.specials) else len(through)

    def _ends_in_control(self, piece: Piece) -> bool:
        return not piece.plain and piece.text.endswith(self.specials)

    def _ids(self, texts: list[str], plain: bool = False) -> list[list[int]]:
        try:
            return self._encoder(texts, plain)
        except ChildEnded as ended:
            raise CheckpointRefused(
                f"the tokenizer cannot be used: on {sum(map(len, texts)):,} characters {ended}; "
                "copy the tokenizer files of the model that it was trained with"
            ) from ended

    def _encode_pieces(self, pieces: list[Piece], owners: list[int]) -> list[list[int]]:
        firsts = set(np.cumsum([0, *owners[:-1]]).tolist()) if self._anchor else set()
        ids: list[list[int]] = [[] for _ in pieces]
        for plain in (False, True):
            chosen = [number for number, piece in enumerate(pieces) if piece.plain == plain]
            anchored = [
                bool(self._anchor)
                and number not in firsts
                and not self._ends_in_control(pieces[number - 1])
                for number in chosen
            ]
            texts = [
                (self._anchor if behind else "") + pieces[number].text
                for number, behind in zip(chosen, anchored, strict=True)
            ]
            found = self._ids(texts, plain) if texts else []
            for number, behind, piece_ids in zip(chosen, anchored, found, strict=True):
                if behind and piece_ids[: len(self._anchor_ids)] != self._anchor_ids:
                    raise BadData(
                        f"the tokenizer merges {pieces[number].text[:40]!r} with what stands before"
                    )
                ids[number] = piece_ids[len(self._anchor_ids) :] if behind else piece_ids
        return ids


def _cut(text: str, assistant: bool, sentinel: str) -> Iterator[Piece]:
    parts = text.split(sentinel) if sentinel else [text]
    for number, part in enumerate(parts):
        if part:
            yield Piece(part, assistant, plain=number % 2 == 1)


_encoders: WeakKeyDictionary[Any, dict[tuple, ChatEncoder]] = WeakKeyDictionary()


def chat_encoder(tokenizer: Any, template: str | None = None) -> ChatEncoder:
    """The encoder of a tokenizer and template, made once: copying a vocabulary takes time."""
    key = (template, str(tokenizer.chat_template), len(tokenizer))
    known = _encoders.setdefault(tokenizer, {})
    if key not in known:
        known[key] = ChatEncoder(tokenizer, template)
    return known[key]


def encode_prompt(tokenizer: Any, turns: Sequence[Turn], template: str | None = None) -> list[int]:
    """Ids of a prompt: `turns` of (role, text) and the opening of the assistant's answer. They are
    exactly the first ids of the same conversation in training."""
    return chat_encoder(tokenizer, template).encode_prompt(turns)


def show_mask(
    tokens: Iterable[int], mask: Iterable[bool], tokenizer: Any, color: bool | None = None
) -> str:
    """A sample as text with what counts for the loss set apart: green on a terminal (default when
    stdout is one), otherwise between ⟦ and ⟧. A legend with the counts comes first.

    tokens: ids (T,); mask: bool (T,), True where predicting the token counts.
    """
    if color is None:
        color = sys.stdout.isatty()
    opening, closing = ("\x1b[1;32m", "\x1b[0m") if color else ("⟦", "⟧")
    parts, at = [], 0
    flags = [bool(flag) for flag in mask]
    ids = [int(token) for token in tokens]
    if len(ids) != len(flags):
        raise UsageError(f"{len(ids)} tokens, but a mask of {len(flags)}")
    while at < len(ids):
        stop = at
        while stop < len(ids) and flags[stop] == flags[at]:
            stop += 1
        text = tokenizer.decode(ids[at:stop], skip_special_tokens=False)
        parts.append(f"{opening}{text}{closing}" if flags[at] else text)
        at = stop
    legend = f"{opening}counts for the loss{closing}: {sum(flags)} of {len(flags)} tokens\n"
    return legend + "".join(parts)


def main(arguments: list[str] | None = None) -> None:
    from stree.tokenizer import load_tokenizer

    parser = PlainParser("chat.py", description="Print conversations with their loss mask.")
    parser.add_argument("data", help="JSONL(.gz), Parquet or a datasets name")
    parser.add_argument("--tokenizer", required=True, help="folder of the tokenizer")
    parser.add_argument("--template", help="name, .jinja file or text; default: the tokenizer's")
    parser.add_argument("--count", type=int, default=1, help="how many conversations")
    options = parser.parse_args(arguments)
    tokenizer = load_tokenizer(options.tokenizer)
    encoder = ChatEncoder(tokenizer, options.template)
    conversations, _ = read_conversations(options.data, limit=options.count)
    for conversation in conversations:
        (chat,) = encoder.encode([conversation.turns])
        print(f"{conversation.id}: {show_mask(chat.tokens, chat.assistant, tokenizer)}\n")


if __name__ == "__main__":
    exit_with_reason(main)
