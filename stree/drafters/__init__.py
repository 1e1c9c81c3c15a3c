"""Drafters, a file each, and the protocol by which a step lets them fill token trees."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from torch import Tensor

from stree.batching.state import BatchState
from stree.trees.tree_batch import TreeBatch


class SiblingSampling(Enum):
    """Ways to draw a node's children; a verifier says which of them it may judge."""

    DETERMINISTIC = "points (tokens that are not sampled)"
    WITHOUT_REPLACEMENT = "siblings drawn from the drafter's distribution without replacement"
    INDEPENDENT = "siblings drawn from the drafter's distribution with replacement"
    MIXED = "some of the siblings from the drafter's distribution, the others as points"


@dataclass
class Proposal:
    """Drafted trees of B rows.

    Attributes:
        tokens: (B, N), the roots first.
        finite: (B, …) bool, False where logits were NaN or +∞; None without logits.
        logits: (B, I, V), from which each node with children drew them, in the order of
            `TreeBatch.drawn_by` and as `BatchState.kept` returns them; None unless they were asked
            for.
        points: (B, N) bool, nodes with deterministic drafts, not drawn from logits; None if all or
            none are. A deterministic draft may depend on siblings before it, never on the tokens
            after any.
        independent: Whether drawn siblings were drawn with replacement.
    """

    tokens: Tensor
    finite: Tensor | None = None
    logits: Tensor | None = None
    points: Tensor | None = None
    independent: bool = False


class Drafter(Protocol):
    """Protocol of drafters: fill the trees of a batch of rows.

    Without graphs `draft` runs in `torch.inference_mode`, and `clear` and `read` cannot write to
    tensors that it makes: make lasting tensors in the constructor.

    Attributes:
        drawn: How siblings are drawn.
        capturable: Whether drafts use static tensors only, and never wait for the device.
        grows: Whether it fills dynamic trees (`TreeBatch.grow`); may be left out for False.
    """

    drawn: SiblingSampling
    capturable: bool
    grows: bool

    def clear(self, row: Any) -> None:
        """Forget a row's sequence; row is an int, or a tensor (1,) int64 if `capturable`."""

    def read(self, row: int, tokens: Tensor) -> None:
        """Read the next tokens (T,) of a row's prompt."""

    def draft(
        self, rows: BatchState, tree_batch: TreeBatch, longest: int, bound: int, keep_logits: bool
    ) -> Proposal:
        """Read the tokens of rows.block, then fill the trees of B rows.

        Args:
            rows: State of the rows; idle rows may get any drafts.
            tree_batch: The trees to fill.
            longest: Most tokens in the block of an active row, at least 1.
            bound: Cache slots that the target's call attends to.
            keep_logits: Whether the verifier needs the drafter's logits. If so, siblings of
                different nodes, and of different steps, must be drawn independently
                (`Level.noise_at`).
        """
        ...


class FeatureDrafter(Drafter, Protocol):
    """Protocol of drafters that also read hidden states of the target (`models.hidden_states`).

    Attributes:
        feature_layers: The target's layers whose outputs it reads; () for none.
    """

    feature_layers: tuple[int, ...]

    def read(self, row: int, tokens: Tensor, features: Tensor | None = None) -> None:
        """Read the next tokens (T,) of a row's prompt.

        features (T', F) are the target's at the last T' of all tokens read, which may be more or
        fewer than T; None leaves them unknown.
        """

    def take_features(self, features: Tensor, rows: BatchState, path: Tensor) -> None:
        """Keep the target's features (B, N, F) of the nodes on the accepted path (B, M).

        The lengths of the paths are those of the rows' blocks.
        """


class DrafterSpec(Protocol):
    """Specification of a drafter, by which a decoder makes the drafter for its rows.

    `ModelDrafterSpec`, `NGram` and `CrossTokenizerSpec` are specifications.
    """

    def for_decoder(self, target: Any, num_rows: int, max_length: int, max_nodes: int) -> Drafter:
        """Return the drafter of a decoder.

        Args:
            target: The decoder's target.
            num_rows: Sequences at once.
            max_length: Tokens of the longest sequence.
            max_nodes: Nodes of the largest tree, or those that a dynamic tree draws from.
        """
        ...
