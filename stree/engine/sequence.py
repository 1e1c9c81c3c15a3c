"""The host's record of a sequence in a row, and what a step gave it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from stree.engine.stop_rule import StopRule
from stree.generation import DecodingStats, GenerationConfig
from stree.logits.log_probs import TokenLogprobs
from stree.trees.token_tree import StepTree


@dataclass(eq=False)
class SharedPrompt:
    """A prompt that several rows begin with; one of them reads it, the others copy its caches.

    Attributes:
        left: Rows that are still to begin with it.
        read_by: The sequence that reads it.
        prefix: Number of the saved prefix, from the read of its last token until no row is left.
        drafter: Tokens of it that the drafter holds in that prefix.
    """

    left: int
    read_by: RunningSequence | None = None
    prefix: int | None = None
    drafter: int = 0
    _end: Callable[[], object] | None = None

    def drop_at_end(self, drop: Callable[[int], None]) -> None:
        """Drop the prefix when no row is left, or when nobody holds this object any more."""
        assert self.prefix is not None
        end = weakref.finalize(self, drop, self.prefix)
        end.atexit = False
        self._end = end

    def end(self) -> None:
        """Drop the prefix: no row is left."""
        if self._end is not None:
            self._end()
        self.prefix = self._end = None


@dataclass(slots=True)
class StepOutput:
    """Output of a step for one row.

    Attributes:
        row: The row.
        tokens: New tokens of the row.
        finish_reason: Why the sequence ends; "" while it goes on.
        error: The error of a sequence that ends with "error", else None; any exception of a
            request's own processors, of the device or of PyTorch among them.
        num_accepted: Accepted drafts, which are the first of the new tokens.
        logprobs: Log-probabilities of the new tokens; empty unless the request wants them.
        culprit: The model whose logits were not finite, "target" or "drafter"; "" for none.
    """

    row: int
    tokens: list[int]
    finish_reason: str = ""
    error: Exception | None = None
    num_accepted: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    culprit: str = ""


@dataclass(eq=False, slots=True)
class RunningSequence:
    """The host's record of the sequence in a row.

    Attributes:
        prompt: Its tokens.
        generation: Its settings.
        tree: Its tree; None if one is chosen for each step.
        num_to_keep: Tokens of the prompt that are kept as a prefix once they are read.
        stop: Decides which tokens are kept; has those of the answer.
        stats: Counts and times.
        shared: The prompt that it shares with other rows; None for none.
        since: Time when it was admitted, later that of its first token.
        num_read: Tokens of the prompt that are in the target's cache.
        num_drafted_from: Tokens that the drafter has read.
        is_behind: Whether the drafter has missed the prompt or a block.
        is_timed: Whether the drafter's reads of its prompt are timed, for the tree policy.
        has_begun: Whether its first token was chosen by a plan that is not reported yet.
        longest_block: The most tokens that the row's last block has.
        in_flight: The most tokens that steps without a report commit, a block each.
        finish_reason: Why it has ended; "" while it goes on.
        is_stale: Whether weights were changed since it was admitted.
        drafter_s: Seconds that the drafter has read its prompt and what it missed; None for none.
        logprobs: Log-probabilities of the answer's tokens, if the request wants them.
    """

    prompt: list[int]
    generation: GenerationConfig
    tree: StepTree | None
    num_to_keep: int
    stop: StopRule
    stats: DecodingStats
    shared: SharedPrompt | None = None
    since: float = 0.0
    num_read: int = 0
    num_drafted_from: int = 0
    is_behind: bool = False
    is_timed: bool = False
    has_begun: bool = False
    longest_block: int = 1
    in_flight: int = 0
    finish_reason: str = ""
    is_stale: bool = False
    drafter_s: tuple[float | None, float | None] = (None, None)
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
        return self.num_read >= len(self.prompt) and not self.finish_reason

    @property
    def is_plain(self) -> bool:
        """True if its request wants no drafts."""
        return self.tree is not None and self.tree.num_nodes == 1

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
        return len(self.prompt) + len(self.stop.tokens) + self.has_begun - 1
