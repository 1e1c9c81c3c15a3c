"""The rule by which an answer ends: at EOS, at a stop string, or at its most tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stree.common.errors import UsageError
from stree.generation import GenerationConfig
from stree.text_stream import TextStream


class StopRule:
    """Rule that decides, token by token, how much of a block is kept and why generation ends."""

    def __init__(
        self, generation: GenerationConfig, model_eos_ids: Sequence[int], tokenizer: Any
    ) -> None:
        if generation.stop_strings and tokenizer is None:
            raise UsageError("stop_strings need the tokenizer; pass tokenizer= to the decoder")
        self.eos_ids = generation.eos_ids(model_eos_ids)
        strings = generation.stop_strings
        self.text = TextStream(tokenizer, strings) if strings else None
        self.left = generation.max_new_tokens
        self.tokens: list[int] = []

    def keep(self, block: list[int]) -> tuple[list[int], str]:
        """Return the tokens of a block that are kept, from its beginning, and the reason to stop.

        The reason is "" while generation goes on.
        """
        if self.text is None and len(block) < self.left and self.eos_ids.isdisjoint(block):
            self.tokens += block
            self.left -= len(block)
            return block, ""
        for index, token in enumerate(block):
            self.tokens.append(token)
            self.left -= 1
            if token in self.eos_ids:
                return block[: index + 1], "eos"
            if self.text is not None:
                self.text.add(token)
                if self.text.stop_string is not None:
                    return block[: index + 1], "stop_string"
            if self.left == 0:
                return block[: index + 1], "length"
        return block, ""
