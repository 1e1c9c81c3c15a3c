"""Drafters: what fills token trees, a file each, and what all of them offer a step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from torch import Tensor

from stree.batching.state import BatchState
from stree.trees.tree_batch import TreeBatch


class SiblingSampling(Enum):
    """How a node's children were drawn, on which it depends what may verify them."""

    DETERMINISTIC = "each token as if from a distribution that has no other"
    WITHOUT_REPLACEMENT = "siblings one after the other from what is left of the drafter's"
    INDEPENDENT = "siblings each from all of the drafter's, some of them perhaps alike"
    MIXED = "some of the siblings from the drafter's distribution, the others as points"


@dataclass
class Proposal:
    """Drafted trees.

    tokens (B, N), the roots first. finite (B, …) bool: no logits were NaN or +∞; None where there
    were none. logits (B, I, V): what each node with children, in the order of `TreeBatch.drawn_by`,
    drew its children from, as `BatchState.kept` leaves them; None where they were not asked for, or
    there are none. points (B, N) bool: nodes that were not drawn from logits; None where all or
    none were. A point may depend on siblings before it, never on the tokens after any. independent:
    siblings that are no points were drawn with replacement.
    """

    tokens: Tensor
    finite: Tensor | None = None
    logits: Tensor | None = None
    points: Tensor | None = None
    independent: bool = False


class Drafter(Protocol):
    """Anything that fills trees for a batch of rows.

    Without graphs `draft` runs in `torch.inference_mode`: tensors that it makes can't be written in
    place by `clear` and `read`, so make what lasts when the drafter is made.
    """

    drawn: SiblingSampling
    capturable: bool  # drafts touch tensors of fixed places only, and never wait for the device
    grows: bool  # may fill trees whose shapes it has to choose (`TreeBatch.grow`); without it: no

    def clear(self, row: Any) -> None:
        """Forget a row's sequence. row, an int, or where it is capturable a tensor (1,) int64."""

    def read(self, row: int, tokens: Tensor) -> None:
        """Read more of a row's prompt, tokens (T,)."""

    def draft(
        self, rows: BatchState, tree_batch: TreeBatch, longest: int, bound: int, keep_logits: bool
    ) -> Proposal:
        """Fill the trees of B rows, after reading rows.block, whose active rows have 1 to `longest`
        tokens; bound, cache slots that a target's call looks at.

        Where logits are to be kept, the drafts are judged by what they were drawn from: siblings of
        different nodes, and of different steps, must be drawn independently (`Level.noise_at`).
        """
        ...


class FeatureDrafter(Drafter, Protocol):
    """A drafter that reads hidden states of its target beside the tokens (`models.features`)."""

    feature_layers: tuple[int, ...]  # the target's layers whose outputs it reads, if any

    def read(self, row: int, tokens: Tensor, features: Tensor | None = None) -> None:
        """features (T', F) are those of the last T' tokens, up to the last of these; without them
        they are unknown."""

    def take_features(self, features: Tensor, rows: BatchState, path: Tensor) -> None:
        """Told of the features (B, N, F) of all nodes, when those on path (B, M) were accepted, as
        far as the rows' blocks say."""
