"""Drafters, a file each, and the base by which a step lets them fill token trees."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from stree.batching.state import BatchState
    from stree.engine.row_store import RowStore
    from stree.models.chunk_pass import PrefillScratch
    from stree.models.model import HybridModel
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
        feature_layers: The target's layers whose hidden states (`models.hidden_states`) `read` and
            `take_features` get; () for none.
        reads_alongside: Whether it may read each chunk of a prompt right after the target, by
            `read_padded` instead of `read`, with `model` and into `cache`.
        model: A model that it runs; None for none.
        cache: The model's cache of all rows; None for none.
    """

    drawn: SiblingSampling = SiblingSampling.DETERMINISTIC
    capturable: bool = False
    grows: bool = False
    feature_layers: tuple[int, ...] = ()
    reads_alongside: bool = False
    model: Any = None
    cache: Any = None

    @property
    def row_store(self) -> RowStore | None:
        """Saves and loads what it holds of a row; None makes it read kept prefixes again."""
        return None

    def clear(self, row: Any) -> None:
        """Forget a row's sequence; row is an int, or a tensor (1,) int64 if `capturable`."""
        raise NotImplementedError

    def read(self, row: int, tokens: Tensor, features: Tensor | None = None) -> None:
        """Read the next tokens (T,) of a row's prompt.

        features (T', F) are the target's at the last T' of all tokens read, which may be more or
        fewer than T. They are given to drafters with `feature_layers` alone; None leaves them
        unknown.
        """
        raise NotImplementedError

    def read_by(
        self, prefiller: Any, row: int, tokens: Tensor, features: Tensor | None = None,
        start: int | None = None,
    ) -> None:
        """Read as `read` does, where a `stree.batching.prefillers.Prefiller` may run `model`.

        start as in `Prefiller.read_row`.
        """
        self.read(row, tokens, *([] if features is None else [features]))

    def prepare_reads(self, prefiller: Any, row: int, start: int, count: int | None) -> None:
        """Capture what `read_by` needs for `count` tokens after `start`; None is any number.

        The row is one without a pending path (`Prefiller.prepare`).
        """

    def read_padded(
        self, tokens: Tensor, count: Tensor, skipped: Tensor, row: Tensor, scratch: PrefillScratch,
        bound: int, streams: Sequence[Tensor],
    ) -> None:
        """Read a padded chunk without waiting for the device, as `HybridModel.prefill_padded`.

        Args:
            tokens: (1, T), padding included.
            count: (1,) tokens that count.
            skipped: (1,) tokens at the beginning that it has read already.
            row: (1,) the row.
            scratch: Buffers for chunks of T tokens.
            bound: Cache slots to attend to.
            streams: The target's features of all tokens, (1, T, ·) a layer.
        """
        raise NotImplementedError

    def take_features(self, features: Tensor, rows: BatchState, path: Tensor) -> None:
        """Keep the target's features (B, N, F) of the nodes on the accepted path (B, M).

        A row's path is as long as its block.
        """
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


class DrafterSpec:
    """Base of specifications of drafters, by which a decoder makes the drafter for its rows.

    `ModelDrafterSpec`, `NGram` and `CrossTokenizerSpec` are specifications.
    """

    @property
    def partner(self) -> HybridModel | None:
        """The model that drafts in the target's own tokens; None for none."""
        return None

    def for_decoder(self, target: Any, num_rows: int, max_length: int, max_nodes: int) -> Drafter:
        """Return the drafter of a decoder.

        Args:
            target: The decoder's target.
            num_rows: Sequences at once.
            max_length: Tokens of the longest sequence.
            max_nodes: Nodes of the largest tree, or those that a dynamic tree draws from.
        """
        raise NotImplementedError
