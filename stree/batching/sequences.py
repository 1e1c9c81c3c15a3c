"""Requests to a batch, the outputs of its steps, and the host's record of each row."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from stree.common.clock import Stopwatch
from stree.common.errors import StreeError, UsageError
from stree.common.host_copy import HostCopy
from stree.generation import DecodingStats, GenerationConfig, StopRule
from stree.logits.log_probs import TokenLogprobs
from stree.prompts import one_prompt
from stree.settings import asked_for, settings_of
from stree.trees.token_tree import TokenTree


@dataclass(frozen=True)
class Request:
    """A prompt of one sequence, and how to go on after it.

    Attributes:
        prompt_ids: Token ids (T,), T ≥ 1; a list or an integer tensor.
        generation: Our `GenerationConfig`, or `transformers`'.
        tree: The tree to decode with, or its name; None is the decoder's.
        keep_prompt: Whether a decoder with `num_prefixes` keeps the prompt as a prefix as soon as
            it is read, for requests that begin with the prompt but not with its answer.
        messages_end: Number of the prompt's tokens that are kept then, such as those of a chat's
            messages without the opening of the assistant's turn; None for all.

    Example:
        >>> import stree
        >>> request = stree.Request([5, 3, 8], stree.GenerationConfig(max_new_tokens=16))
        >>> request.generation.max_new_tokens
        16
    """

    prompt_ids: Sequence[int] | Tensor
    generation: GenerationConfig = GenerationConfig()
    tree: TokenTree | str | None = None
    keep_prompt: bool = False
    messages_end: int | None = None


@dataclass(eq=False)
class SharedPrompt:
    """A prompt that several rows begin with; one of them reads it, the others copy its caches."""

    left: int  # rows that are still to begin with it
    read_by: RunningSequence | None = None
    # Logits (1, V) and `SavedRow` as soon as the prompt is read, until no row is left
    read: Any = None


@dataclass(frozen=True)
class SampleRequest(Request):
    """One of several answers to a prompt."""

    shared: SharedPrompt | None = None


def samples_of(request: Request) -> list[Request]:
    """Return one request for each answer that a request asks for (`num_return_sequences`).

    The first of them that gets a row reads the prompt for all.
    """
    if getattr(getattr(request, "generation", None), "num_return_sequences", None) in (None, 1):
        return [request]
    generation = settings_of(request.generation).after(one_prompt(request.prompt_ids))
    shared = SharedPrompt(generation.num_return_sequences - 1)
    return [
        SampleRequest(
            request.prompt_ids, each, request.tree, request.keep_prompt, request.messages_end,
            shared,
        )
        for each in generation.samples()
    ]


def requests_of(
    given: Any, generation_config: Any, attention_mask: Any, options: Mapping[str, Any],
    tokenizer: Any,
) -> list[Request]:
    """Return one request for each answer.

    Args:
        given: A list of requests, or prompts as `stree.settings.asked_for` takes them.
        generation_config: Settings for all prompts; None for requests, which have their own.
        attention_mask: Mask of padded prompts; None for requests.
        options: Further settings by keyword; empty for requests.
        tokenizer: Encodes prompts that are texts; None refuses texts.
    """
    if isinstance(given, list | tuple) and not given:
        return []
    if isinstance(given, list | tuple) and any(isinstance(each, Request) for each in given):
        if options or generation_config is not None or attention_mask is not None:
            raise UsageError("requests have settings of their own: give them no others")
        return [sample for each in given for sample in samples_of(each)]
    asked, _ = asked_for(given, generation_config, attention_mask, options, tokenizer)
    requests = [Request(prompt.tolist(), generation) for prompt, generation, _ in asked]
    return [sample for each in requests for sample in samples_of(each)]


@dataclass(slots=True)
class StepOutput:
    """Output of a step for one row.

    Attributes:
        row: The row.
        tokens: New tokens of the row.
        finish_reason: Why the sequence ends; "" while it goes on.
        error: The error of a sequence that ends with "error", else None.
        num_accepted: Accepted drafts, which are the first of the new tokens.
        logprobs: Log-probabilities of the new tokens; empty unless the request wants them.
    """

    row: int
    tokens: list[int]
    finish_reason: str = ""
    error: StreeError | None = None
    num_accepted: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class RunningSequence:
    """The host's record of the sequence in a row."""

    prompt: list[int]
    generation: GenerationConfig
    tree: TokenTree | None  # None: chosen anew for each step
    num_to_keep: int  # tokens of the prompt to keep as a prefix as soon as they are read
    stop: StopRule
    stats: DecodingStats
    shared: SharedPrompt | None = None
    num_read: int = 0  # tokens of the prompt that are in the caches
    num_drafted_from: int = 0  # tokens that the drafter has read
    behind: bool = False  # whether the drafter has missed the prompt or a block
    # The drafter's times: of the prompt, and of catching up on missed tokens
    prefill_time: Stopwatch = field(default_factory=Stopwatch)
    catch_up_time: Stopwatch = field(default_factory=Stopwatch)
    longest: int = 1  # the most tokens that the row's block has
    ahead: int = 0  # the most tokens that steps in flight commit, a block each
    finish_reason: str = ""
    is_stale: bool = False  # weights were changed since it was admitted
    since: float = field(default_factory=time.perf_counter)
    first: HostCopy | None = None  # of the token after the prompt (`Prefill.begin`)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """The prompt and the answer so far."""
        return self.prompt + self.stop.tokens

    @property
    def is_prefilling(self) -> bool:
        """True while prompt tokens are still to be read."""
        return self.num_read < len(self.prompt)

    @property
    def is_decoding(self) -> bool:
        """True from the end of the prompt to that of the answer."""
        return not self.is_prefilling and not self.finish_reason

    @property
    def drafter_read_s(self) -> tuple[float | None, float | None]:
        """Seconds of the drafter's prefills and catch-ups of the row; None if there were none.

        Call it only when the device is done with them.
        """
        prefill, catch_up = self.prefill_time, self.catch_up_time
        prefill.drain()
        catch_up.drain()
        return (
            prefill.seconds if prefill.num_blocks else None,
            catch_up.seconds if catch_up.num_blocks else None,
        )

    def learn_logprobs(self, kept: list[int], scores: list[list[float]]) -> list[TokenLogprobs]:
        """Note and return the log-probabilities of kept tokens if the request wants them."""
        num_top = self.generation.logprobs
        if num_top is None:
            return []
        found = [
            TokenLogprobs.of_values(token, values, num_top)
            for token, values in zip(kept, scores, strict=False)
        ]
        self.logprobs += found
        return found

    @property
    def position(self) -> int:
        """Position of the root in the sequence; all tokens before it are committed."""
        return len(self.prompt) + len(self.stop.tokens) + (self.first is not None) - 1
