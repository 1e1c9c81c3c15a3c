"""Constrain answers to a JSON schema or a regular expression, at every node of a tree."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor

from stree.common.errors import UsageError
from stree_pipelines.serving.messages import Facts


class AskedGrammar(NamedTuple):
    """The form that an answer is to have.

    Attributes:
        grammar: Of `Grammars.of_schema` or `Grammars.of_regex`.
        prompt_length: Tokens before the answer.
        begins_after: The token that ends a thought, after which the grammar begins; None for the
            first token.
    """

    grammar: str
    prompt_length: int
    begins_after: int | None = None


class Grammars:
    """Grammars over a target's tokenizer, a fast one."""

    def __init__(self, facts: Facts) -> None:
        self.vocabulary, self.eos_ids = facts.vocabulary, sorted(facts.eos_token_ids)
        self._tokenizer: LLTokenizer = from_tokenizer(
            facts.tokenizer, n_vocab=self.vocabulary, eos_token=self.eos_ids
        )

    def of_schema(self, schema: dict[str, Any]) -> str:
        """Return the grammar of a JSON schema. Raises `UsageError`."""
        return self._checked(LLMatcher.grammar_from_json_schema(json.dumps(schema)))

    def of_regex(self, pattern: str) -> str:
        """Return the grammar of a regular expression. Raises `UsageError`."""
        return self._checked(LLMatcher.grammar_from_regex(pattern))

    def _checked(self, grammar: str) -> str:
        matcher = LLMatcher(self._tokenizer, grammar)
        if matcher.is_error():
            raise UsageError(f"the form of the answer cannot be followed: {matcher.get_error()}")
        return grammar

    def processor(self, asked: AskedGrammar) -> GrammarProcessor:
        """Return a logits processor (`GenerationConfig.logits_processor`) for one answer."""
        return GrammarProcessor(LLMatcher(self._tokenizer, asked.grammar), self, asked)


class GrammarProcessor:
    """Leaves out tokens that do not go on with a grammar, by the tokens before a node."""

    def __init__(self, matcher: LLMatcher, grammars: Grammars, asked: AskedGrammar) -> None:
        self.matcher, self.grammars = matcher, grammars
        _, self.prompt_length, self.begins_after = asked
        self._consumed: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores (1, V) with −inf for tokens that the grammar leaves out there."""
        answer = input_ids[0, self.prompt_length :].tolist()
        if self.begins_after is not None:
            if self.begins_after not in answer:
                return scores
            answer = answer[answer.index(self.begins_after) + 1 :]
        self._move_to(answer)
        allowed = torch.from_numpy(self._allowed())[: scores.shape[1]].to(scores.device)
        return scores.masked_fill(~allowed, -torch.inf)

    def _move_to(self, answer: Sequence[int]) -> None:
        """Let the matcher stand after these tokens: from path to path of a tree it goes back."""
        common = 0
        for mine, theirs in zip(self._consumed, answer, strict=False):
            if mine != theirs:
                break
            common += 1
        if back := len(self._consumed) - common:
            self.matcher.rollback(back)
        forward = list(answer[common:])
        if forward and not self.matcher.consume_tokens(forward):
            raise UsageError(f"the grammar does not go on so: {self.matcher.get_error()}")
        self._consumed = list(answer)

    def _allowed(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        if self.matcher.is_stopped():
            allowed = np.zeros(self.grammars.vocabulary, dtype=bool)
            allowed[self.grammars.eos_ids] = True
            return allowed
        mask = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(mask, bitorder="little").astype(bool)
