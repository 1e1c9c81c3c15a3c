"""What is asked of a batch, what a step reports, and the host's side of a row."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from stree.batching.state import BatchState
from stree.common.errors import StreeError, UsageError
from stree.common.host_copy import HostCopy
from stree.generation import DecodingStats, GenerationConfig, StopRule
from stree.prompts import one_prompt
from stree.settings import asked_for, settings_of
from stree.trees.token_tree import TokenTree
from stree.trees.tree_batch import TreeBatch


@dataclass(frozen=True)
class Request:
    """A prompt of one sequence, and how to go on after it.

    Attributes:
        prompt_ids: Token ids (T,).
        generation: Ours, or `transformers`' GenerationConfig.
        tree: The tree to decode with; None is the decoder's.
        keep_prompt: A decoder with `num_prefixes` holds the prompt, too, as soon as it is read:
            what goes on from it may not begin with all that is generated.
    """

    prompt_ids: Sequence[int] | Tensor
    generation: GenerationConfig = GenerationConfig()
    tree: TokenTree | str | None = None
    keep_prompt: bool = False


@dataclass(eq=False)
class SharedPrompt:
    """A prompt that several rows begin with, and one of them reads."""

    left: int  # rows that are still to begin with it
    reader: RunningSequence | None = None
    read: Any = (
        None  # `stree.batching.prefill.ReadPrompt`, as soon as it is read, until no row is left
    )


@dataclass(frozen=True)
class SampleRequest(Request):
    """One of several answers to a prompt."""

    shared: SharedPrompt | None = None


def samples_of(request: Request) -> list[Request]:
    """Return a request for each answer that one asks for (`num_return_sequences`); the first that
    has a row reads the prompt for all."""
    if getattr(getattr(request, "generation", None), "num_return_sequences", None) in (None, 1):
        return [request]
    generation = settings_of(request.generation).after(one_prompt(request.prompt_ids))
    shared = SharedPrompt(generation.num_return_sequences - 1)
    return [
        SampleRequest(request.prompt_ids, each, request.tree, request.keep_prompt, shared)
        for each in generation.samples()
    ]


def requests_of(
    given: Any,
    generation_config: Any,
    attention_mask: Any,
    options: Mapping[str, Any],
    tokenizer: Any,
) -> list[Request]:
    """Return the requests that are given, or those of prompts and of how to go on after all of them
    (`asked_for`), one for each answer."""
    several = isinstance(given, list | tuple)
    if several and (not given or any(isinstance(each, Request) for each in given)):
        if options or generation_config is not None or attention_mask is not None:
            raise UsageError("requests have settings of their own: give them no others")
        return [sample for each in given for sample in samples_of(each)]
    asked, _ = asked_for(given, generation_config, attention_mask, options, tokenizer)
    requests = [Request(prompt.tolist(), generation) for prompt, generation in asked]
    return [sample for each in requests for sample in samples_of(each)]


@dataclass(slots=True)
class StepOutput:
    """What a step gave a row: its new tokens, how many of them, the first, are drafts that were
    accepted, and why it ends ("" while it goes on; "error", with the error beside)."""

    row: int
    tokens: list[int]
    finish_reason: str = ""
    error: StreeError | None = None
    num_accepted: int = 0


@dataclass(slots=True)
class RunningSequence:
    """The host's side of a row."""

    prompt: list[int]
    generation: GenerationConfig
    tree: TokenTree | None  # None: each step's is chosen
    keep_prompt: bool
    stop: StopRule
    stats: DecodingStats
    shared: SharedPrompt | None = None
    num_read: int = 0  # tokens of the prompt that are in the caches
    num_drafted_from: int = 0  # tokens that the drafter has read
    behind: bool = False  # whether the drafter has missed the prompt or a block
    # The drafter's, begun and done: of the prompt beside the target, and of what it had missed
    readings: list[tuple[Any, Any]] = field(default_factory=list)
    catch_ups: list[tuple[Any, Any]] = field(default_factory=list)
    longest: int = 1  # the most tokens that the row's block has
    ahead: int = 0  # the most that steps on their way commit, a block each
    finish_reason: str = ""
    is_stale: bool = False  # weights were changed since it was admitted
    since: float = field(default_factory=time.perf_counter)
    first: HostCopy | None = None  # the token after the prompt, and whether its logits are finite

    @property
    def reading(self) -> bool:
        return self.num_read < len(self.prompt)

    @property
    def drafter_read_s(self) -> tuple[float | None, float | None]:
        """What the drafter took for the row's readings and its catch-ups, when all of it is done;
        None where there were none."""
        reading, missed = (
            sum(begun.elapsed_time(done) for begun, done in each) / 1e3 if each else None
            for each in (self.readings, self.catch_ups)
        )
        return reading, missed

    @property
    def position(self) -> int:
        """Where the root stands in the sequence: all before it is committed."""
        return len(self.prompt) + len(self.stop.tokens) + (self.first is not None) - 1


@dataclass
class StepInputs:
    """Rows and tree batch of a step, and the trees and settings that they were made of: mostly they
    are the next step's, too."""

    trees: list[TokenTree]
    generations: list[GenerationConfig]
    rows: BatchState
    tree_batch: TreeBatch


@dataclass
class InFlightStep:
    """A step that was started: of which sequences, with which trees, whether the drafter ran."""

    rows: dict[int, tuple[RunningSequence, TokenTree]]
    drafted: bool
