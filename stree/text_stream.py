"""Text of tokens as they come: the incremental detokeniser."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # a token of byte fallback, in SentencePiece's vocabularies
_UNFINISHED = "\ufffd"
MAX_CACHED_TOKENS = 2  # tokens whose text is kept: most of what is decoded is a token after another


@lru_cache(maxsize=2**16)
def _text_of(tokenizer: Any, tokens: tuple[int, ...]) -> str:
    return tokenizer.decode(list(tokens), skip_special_tokens=True)


@lru_cache(maxsize=8)
def _specials_of(tokenizer: Any) -> frozenset[int]:
    """Return the ids of the tokens that are left out of a text."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(tokenizer.all_special_ids) | {each for each, token in added if token.special}


class TextStream:
    """Turns the tokens of one answer into text, token by token.

    The pieces, joined, are the text that the tokenizer makes of all tokens at once, without special
    tokens (as `GenerationOutput.text`), cut before the first stop string. A piece is held back
    while its last character is unfinished, and while it may be the beginning of a stop string. So
    is a run of byte-fallback tokens: one byte that fits nowhere spoils the whole run. A step
    decodes the last few tokens only.

    Args:
        tokenizer: A tokenizer of `transformers`.
        stop_strings: Texts that end the answer. Special tokens are spelled out where they are
            looked for, so `"<|im_end|>"` is found, although it is not shown.
        visible: Special tokens that are shown, such as the marks of a tool's call.

    Attributes:
        stop_string: The stop string that was found, the first to be complete; None before. After
            it, there is no more text.

    Example:
        >>> import stree
        >>> from transformers import AutoTokenizer
        >>> tokenizer = AutoTokenizer.from_pretrained("checkpoints/python-docs-hybrid")
        >>> stream = stree.TextStream(tokenizer, ["dumps"])
        >>> pieces = [stream.add(token) for token in tokenizer("load, dump, dumps").input_ids]
        >>> "".join(pieces) + stream.end()
        'load, dump, '
        >>> stream.stop_string
        'dumps'
    """

    def __init__(
        self, tokenizer: Any, stop_strings: Sequence[str] = (), visible: Collection[str] = ()
    ) -> None:
        self.tokenizer, self.visible = tokenizer, visible
        self.stop_strings = tuple(stop_strings)
        self.stop_string: str | None = None
        # The tokens before the pending ones: a tokenizer may drop a space where a text begins
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []  # tokens whose text may still change
        self._pending_text = ""
        self._held = ""  # final text that may be the beginning of a stop string
        self._shown: list[str] = []  # of each held character: itself, or "" in a special token

    def add(self, token: int) -> str:
        """Return the text that a token completes: "" while it is held back."""
        if self.stop_string is not None:
            return ""
        before = self._pending_text
        self._pending.append(token)
        text = self._decode(self._context + self._pending)[len(self._context_text) :]
        special = self._special_text(token) if text == before else ""
        if special:
            self._pending.pop()
            shown = [*special] if special in self.visible else [""] * len(special)
            cut = self._cut(before + special, [*before, *shown])
            if cut is not None:
                return cut
            ready = self._settle() if special in self.visible and before else ""
            return ready + self._hold(special, shown)
        self._pending_text = text
        if text and not text.endswith(_UNFINISHED) and not self._is_byte(token):
            return self._settle()
        return self._cut(text.rstrip(_UNFINISHED), [*text]) or ""

    def extend(self, tokens: Sequence[int]) -> str:
        """Return the text that several tokens complete, as `add` does of one after the other.

        Without a stop string, those between two special tokens are decoded at once.
        """
        pieces, start, specials = [], 0, _specials_of(self.tokenizer)
        for place, token in enumerate(tokens):
            if token in specials:
                pieces += [self._extend(tokens[start:place]), self.add(token)]
                start = place + 1
        return "".join([*pieces, self._extend(tokens[start:])])

    def _extend(self, tokens: Sequence[int]) -> str:
        if len(tokens) > 1 and not (self.stop_strings or self._is_byte(tokens[-1])):
            seen = [*self._context, *self._pending, *tokens]
            text = self._decode(seen)[len(self._context_text) :]
            if text and not text.endswith(_UNFINISHED):
                self._pending, self._pending_text = [], ""
                for start in range(len(seen) - 1, -1, -1):  # the least that has a text
                    self._context, self._context_text = seen[start:], self._decode(seen[start:])
                    if self._context_text:
                        break
                return text
        return "".join(map(self.add, tokens))

    def end(self) -> str:
        """Return the text that was held back when the answer ends; an unfinished character is
        U+FFFD."""
        if self.stop_string is not None:
            return ""
        text = self._settle()
        if self.stop_string is None:
            text += "".join(self._shown)
            self._held, self._shown = "", []
        return text

    def _settle(self) -> str:
        """Make the pending text final; return what can be shown."""
        text = self._pending_text
        if text:
            self._context, self._pending, self._pending_text = self._pending, [], ""
            self._context_text = self._decode(self._context)
        cut = self._cut(text, [*text])
        return self._hold(text, [*text]) if cut is None else cut

    def _cut(self, text: str, shown: list[str]) -> str | None:
        """Find a stop string in the held text and `text`; return what is shown before it."""
        seen = self._held + text
        found = [
            (at + len(each), at, each)
            for each in self.stop_strings
            if (at := seen.find(each)) >= 0
        ]
        if not found:
            return None
        _, at, self.stop_string = min(found)
        return "".join((self._shown + shown)[:at])

    def _hold(self, text: str, shown: list[str]) -> str:
        """Hold a final text; return what no longer begins a stop string."""
        self._held += text
        self._shown += shown
        start = next(
            (
                at
                for at in range(len(self._held))
                if any(each.startswith(self._held[at:]) for each in self.stop_strings)
            ),
            len(self._held),
        )
        ready = "".join(self._shown[:start])
        self._held, self._shown = self._held[start:], self._shown[start:]
        return ready

    def _decode(self, tokens: list[int]) -> str:
        if len(tokens) <= MAX_CACHED_TOKENS:
            return _text_of(self.tokenizer, tuple(tokens))
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def _special_text(self, token: int) -> str:
        """Return what a special token spells, "" for another token."""
        return "" if self._decode([token]) else self.tokenizer.decode([token])

    def _is_byte(self, token: int) -> bool:
        return _BYTE.fullmatch(self.tokenizer.convert_ids_to_tokens(token) or "") is not None
