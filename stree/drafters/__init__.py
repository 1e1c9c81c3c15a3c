"""Drafters, a file each, and the protocol by which a step lets them fill token trees."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from stree.batching.state import BatchState
    from stree.engine.row_store import RowStore
    from stree.trees.tree_batch import TreeBatch

NGRAM_CONTEXT = 6  # tokens by which n-grams compare places, unless a name says another number


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
            `TreeBatch.drawn_by` and as `BatchState.processed` returns them; None unless
            they were asked for.
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


class Drafter:
    """Base of drafters: fill the trees of a batch of rows.

    Without graphs `draft` runs in `torch.inference_mode`, and `clear` and `read` cannot write to
    tensors that it makes: make lasting tensors in the constructor.

    Attributes:
        drawn: How siblings are drawn.
        capturable: Whether drafts use static tensors only, and never wait for the device.
        grows: Whether it fills dynamic trees (`TreeBatch.grow`).
        feature_layers: The target's layers whose hidden states it reads; () for none. If there are
            any, it is a `FeatureDrafter`.
        reads_alongside: Whether it reads each chunk of a prompt right after the target, by
            `read_padded` (`stree.drafters.model.ModelDrafter`), instead of `read`.
    """

    drawn: SiblingSampling = SiblingSampling.DETERMINISTIC
    capturable: bool = False
    grows: bool = False
    feature_layers: tuple[int, ...] = ()
    reads_alongside: bool = False

    @property
    def row_store(self) -> RowStore | None:
        """Saves and loads what it holds of a row; None makes it read kept prefixes again."""
        return None

    def clear(self, row: Any) -> None:
        """Forget a row's sequence; row is an int, or a tensor (1,) int64 if `capturable`."""
        raise NotImplementedError

    def read(self, row: int, tokens: Tensor) -> None:
        """Read the next tokens (T,) of a row's prompt."""
        raise NotImplementedError

    def draft(
        self, rows: BatchState, tree_batch: TreeBatch, longest_block: int, bound: int,
        keep_logits: bool,
    ) -> Proposal:
        """Read the tokens of rows.block, then fill the trees of B rows.

        Args:
            rows: State of the rows; idle rows may get any drafts.
            tree_batch: The trees to fill.
            longest_block: Most tokens in the block of an active row, at least 1.
            bound: Cache slots that the target's call attends to.
            keep_logits: Whether the verifier needs the drafter's logits. If so, siblings of
                different nodes, and of different steps, must be drawn independently
                (`Level.noise_at`).
        """
        raise NotImplementedError


class FeatureDrafter(Drafter):
    """Base of drafters that may also read hidden states of the target (`models.hidden_states`)."""

    def read(self, row: int, tokens: Tensor, features: Tensor | None = None) -> None:
        """Read the next tokens (T,) of a row's prompt.

        features (T', F) are the target's at the last T' of all tokens read, which may be more or
        fewer than T; None leaves them unknown.
        """
        raise NotImplementedError

    def take_features(self, features: Tensor, rows: BatchState, path: Tensor) -> None:
        """Keep the target's features (B, N, F) of the nodes on the accepted path (B, M).

        The lengths of the paths are those of the rows' blocks.
        """
        raise NotImplementedError


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
