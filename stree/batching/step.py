"""One decoding step of many sequences: draft, verify, accept, commit, over tensors only.

Shapes: B rows, N nodes of the largest tree, V vocabulary, M tokens that a step yields at most.
Each row has its own tree, length, settings and random numbers. Nothing here waits for the device,
and a row that is idle stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from stree.batching.state import BatchState
from stree.drafters import Drafter, FeatureDrafter, Proposal
from stree.models.hidden_states import HiddenStateTap
from stree.trees.tree_batch import TreeBatch
from stree.verifiers import Verifier


@dataclass
class Step:
    """A decoding step of the first rows of a batch; it changes caches and rows in place.

    Attributes:
        target: A model with `tree_batch_forward`, as `HybridModel` has.
        cache: The target's.
        drafter: Fills the trees; None for autoregressive decoding.
        verifier: Accepts or rejects the drafts.
    """

    target: Any
    cache: Any
    drafter: Drafter | None
    verifier: Verifier

    def drafts(self, tree_batch: TreeBatch) -> bool:
        """Return whether the trees have nodes for the drafter to fill."""
        return self.drafter is not None and tree_batch.num_nodes > 1

    @torch.no_grad()
    def draft(self, rows: BatchState, tree_batch: TreeBatch, longest: int, bound: int) -> Proposal:
        """Fill the rows' trees with the drafter's tokens.

        longest is the most tokens of any row's block; bound is as in `HybridModel.tree_forward`.
        """
        if not self.drafts(tree_batch):
            return Proposal(rows.root)
        assert self.drafter is not None
        return self.drafter.draft(rows, tree_batch, longest, bound, self.verifier.reads_logits)

    @torch.no_grad()
    def verify(
        self,
        rows: BatchState,
        tree_batch: TreeBatch,
        proposal: Proposal,
        bound: int,
        report: Tensor,
        mark: Callable[[str], None] = lambda phase: None,
        longest: int | None = None,
    ) -> None:
        """Verify the drafts with one call of the target, and commit the accepted ones.

        Writes the rows' blocks and positions, the cache's paths, and the report.

        Args:
            rows: The rows of the step.
            tree_batch: Their trees.
            proposal: The drafts.
            bound: Cache slots to attend to, as in `HybridModel.tree_forward`.
            report: (B, 2 + 2·M) int64, written: 1 when all logits of the row were finite, 0 when
                the target's were not, −1 when the drafter's were not; the number of new tokens;
                M tokens; M accepted nodes.
            mark: Called with the name of each phase that ends.
            longest: The most nodes of any path that was accepted last; None if only the device
                knows.
        """
        cache = self.cache.narrow(0, len(rows.active))
        cache.longest_path = longest
        # A drafter that misses a block reads it later, without features
        drafter = self.feature_drafter if self.drafts(tree_batch) else None
        features = None if drafter is None else HiddenStateTap(drafter.feature_layers)
        asked = () if features is None else (features,)
        logits = self.target.tree_batch_forward(proposal.tokens, tree_batch, cache, bound, *asked)
        mark("verify")
        self.verifier.accept(logits, proposal, tree_batch, rows, cache, report)
        rows.remember()
        if drafter is not None and features is not None:
            drafter.take_features(features.values, rows, cache.path[:, : tree_batch.max_depth + 1])
        mark("accept")

    @property
    def feature_drafter(self) -> FeatureDrafter | None:
        """The drafter if it reads hidden states of the target, else None."""
        reads = getattr(self.drafter, "feature_layers", ())
        return cast(FeatureDrafter, self.drafter) if reads else None
