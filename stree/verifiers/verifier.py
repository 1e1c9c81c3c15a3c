"""Base of verifiers, by which a step lets them accept or reject drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stree.drafters import Proposal, SiblingSampling

if TYPE_CHECKING:
    from torch import Tensor

    from stree.batching.state import BatchState
    from stree.trees.tree_batch import TreeBatch


class Verifier:
    """Base of verifiers: accept a path of each drafted tree by the target's logits.

    Attributes:
        accepts: Ways of drawing siblings that it may judge.
        reads_logits: Whether it needs the drafter's logits (`Proposal.logits`).
        chains_only: Whether trees must be chains.
        any_dynamic_tree: Whether it judges all dynamic trees, in which the presence of a draft may
            depend on its own token.
        by_slots: Whether it judges dynamic trees in which the presence of a draft depends on
            tokens drawn before it only, or no draft is drawn.
    """

    accepts: frozenset[SiblingSampling] = frozenset(SiblingSampling)
    reads_logits: bool = False
    chains_only: bool = False
    any_dynamic_tree: bool = False
    by_slots: bool = False

    def accept(
        self, logits: Tensor, proposal: Proposal, tree_batch: TreeBatch, rows: BatchState,
        cache: Any, report: Tensor,
    ) -> None:
        """Accept a path of each tree, and write it to cache, rows and report.

        Args:
            logits: (B, N, V) of the target at all nodes, as `BatchState.processed` returns them.
            proposal: The drafts.
            tree_batch: Their trees.
            rows: State of the rows: `block`, `position` and `root` are written.
            cache: The target's: `path` and `path_length` are written.
            report: (B, 2 + 2·M), written; the first columns of `Step.verify`'s.
        """
        raise NotImplementedError
