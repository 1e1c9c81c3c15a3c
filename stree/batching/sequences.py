"""Requests to a batch of sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stree.common.errors import UsageError
from stree.engine.sequence import SharedPrompt
from stree.generation import GenerationConfig
from stree.prompts import one_prompt
from stree.settings import asked_for, settings_of
from stree.trees.token_tree import StepTree


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
    tree: StepTree | str | None = None
    keep_prompt: bool = False
    messages_end: int | None = None


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
