"""Turn the engine's reports into texts, calls of tools and log-probabilities of an answer."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stree.generation import DecodingStats, GenerationOutput
from stree.logits.log_probs import TokenLogprobs
from stree.text_stream import TextStream
from stree_pipelines.serving.asked import Asked
from stree_pipelines.serving.calls import calls_of
from stree_pipelines.serving.messages import Gain
from stree_pipelines.serving.segments import Piece, Segments
from stree_pipelines.serving.statistics import Moments

_REASONS = {"eos": "stop", "stop_string": "stop", "length": "length", "released": "abort"}


@dataclass
class Delta:
    """A gain of an answer since the last.

    Attributes:
        content: Text.
        reasoning: Text of a thought.
        calls: Calls of tools, as the API has them.
        tokens: Token ids.
        logprobs: Of these tokens, if asked for.
        drafts: The texts that tokens completed, each with whether it was a draft.
        finish_reason: Why the answer ends; None while it goes on.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    drafts: list[tuple[str, bool]] = field(default_factory=list)
    finish_reason: str | None = None

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls or self.finish_reason)

    def __iadd__(self, other: Delta) -> Delta:
        self.content += other.content
        self.reasoning += other.reasoning
        for name in ("calls", "tokens", "logprobs", "drafts"):
            getattr(self, name).extend(getattr(other, name))
        self.finish_reason = other.finish_reason or self.finish_reason
        return self


class Answer:
    """One answer as it comes.

    Args:
        index: Its place among the choices.
        asked: What it answers.
        tokenizer: Of the target.

    Attributes:
        moments: When its tokens came.
        output: Its tokens so far; their counts at its end.
        num_named_characters: Characters of the tokens whose log-probabilities were given.
    """

    def __init__(self, index: int, asked: Asked, tokenizer: Any) -> None:
        self.index, self.asked, self.moments = index, asked, Moments()
        self.output = GenerationOutput([], "", DecodingStats())
        self.num_named_characters = 0
        stops = asked.request.generation.stop_strings
        self._text = TextStream(tokenizer, stops, visible=asked.marks.texts)
        self._segments = Segments(asked.marks, asked.prompt_end)
        self._num_calls = 0

    def take(self, gains: Sequence[Gain]) -> Delta:
        """Return what the gains of some steps add."""
        delta, last = Delta(), gains[-1]
        for gain in gains:
            delta.tokens += gain.tokens
            delta.logprobs += gain.logprobs
        self.output.tokens += delta.tokens
        if self.asked.wants_drafts:
            for gain in gains:
                for place, token in enumerate(gain.tokens):
                    text = self._text.add(token)
                    delta.drafts.append((text, place < gain.num_accepted))
                    self._add(delta, self._segments.add(text))
        else:
            self._add(delta, self._segments.add(self._text.extend(delta.tokens)))
        if last.finish_reason:
            text = self._text.end()
            delta.drafts.append((text, False))
            self._add(delta, self._segments.add(text))
            self._add(delta, self._segments.end())
            self.output.finish_reason = last.finish_reason
            self.output.stats = last.stats or self.output.stats
            delta.finish_reason = _REASONS.get(last.finish_reason, last.finish_reason)
            if self._num_calls and delta.finish_reason == "stop":
                delta.finish_reason = "tool_calls"
        return delta

    def _add(self, delta: Delta, pieces: Any) -> None:
        for piece in pieces:
            if piece.kind == "call":
                self._add_call(delta, piece)
            elif piece.kind == "reasoning":
                delta.reasoning += piece.text
            else:
                delta.content += piece.text

    def _add_call(self, delta: Delta, piece: Piece) -> None:
        found = calls_of(piece.text, self.asked.tools)
        if not found:  # no call that anybody could make: it is shown
            delta.content += piece.text
        for call in found:
            delta.calls.append({
                "index": self._num_calls, "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function", "function": {"name": call.name, "arguments": call.arguments},
            })
            self._num_calls += 1


def chat_logprobs(tokenizer: Any, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Return log-probabilities as a chat completion has them."""

    def named(token: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.decode([token])
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}

    return {"content": [
        {**named(each.token, each.logprob), "top_logprobs": [named(*best) for best in each.top]}
        for each in tokens
    ]}


def completion_logprobs(
    tokenizer: Any, first: Sequence[int], tokens: Sequence[TokenLogprobs], offset: int
) -> dict[str, Any]:
    """Return log-probabilities as a text completion has them.

    Args:
        tokenizer: Names tokens.
        first: Tokens before, without log-probabilities: the first one of a prompt.
        tokens: The others.
        offset: Characters before.
    """
    ids = [*first, *(each.token for each in tokens)]
    names = [tokenizer.decode([each]) for each in ids]
    offsets = []
    for name in names:
        offsets.append(offset)
        offset += len(name)
    nothing: list[Any] = [None] * len(first)
    return {
        "tokens": names,
        "token_logprobs": nothing + [max(each.logprob, -9999.0) for each in tokens],
        "top_logprobs": nothing + [_best_of(tokenizer, each) for each in tokens],
        "text_offset": offsets,
    }


def _best_of(tokenizer: Any, each: TokenLogprobs) -> dict[str, float]:
    """Return the best tokens by name, as many different ones as were asked for."""
    best: dict[str, float] = {}
    for token, logprob in each.top:
        best.setdefault(tokenizer.decode([token]), logprob)
    return best
