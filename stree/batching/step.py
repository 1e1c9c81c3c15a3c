"""One decoding step of many sequences: draft, verify, accept, commit, over tensors only.

Shapes: B rows, N nodes of the largest tree, V vocabulary, M tokens that a step yields at most.
Each row has its own tree, length, settings and random numbers. Nothing here waits for the device,
and a row that is idle stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from stree.batching.checks import require_fillable
from stree.batching.state import BatchState
from stree.common.errors import UsageError, naming_what_does_not_fit
from stree.drafters import Drafter, FeatureDrafter, Proposal
from stree.drafters.model import ModelDrafter
from stree.models.hidden_states import HiddenStateTap
from stree.models.joint import require_backtracking
from stree.models.model import HybridModel
from stree.trees.token_tree import BeamTree, TokenTree
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
        is_joint: Whether the target feeds accepted paths again (`stree.models.joint`).
    """

    target: Any
    cache: Any
    drafter: Drafter | None
    verifier: Verifier
    is_joint: bool = False

    @classmethod
    def new(
        cls,
        target: Any,
        drafter: Any,
        verifier: Verifier,
        trees: Sequence[TokenTree],
        *,
        num_rows: int,
        max_length: int,
        max_nodes: int,
        backtracking: str,
    ) -> Step:
        """Return the step of a new batch, with caches for its rows.

        Args:
            target: A `HybridModel`, or another model with `new_cache` and `tree_batch_forward`.
            drafter: A drafter, or the specification of one (`DrafterSpec`), which is made here;
                None for autoregressive decoding.
            verifier: Accepts or rejects the drafts.
            trees: All trees that steps may have.
            num_rows: Rows of the caches.
            max_length: Tokens of the longest sequence.
            max_nodes: Nodes of the largest tree.
            backtracking: "replay" or "joint" (`HybridCache`).

        Raises:
            UsageError: For a drafter or verifier that cannot take one of the trees, and for joint
                backtracking of a target that is no `HybridModel`.
            OutOfMemory: When the caches do not fit.
        """
        new_cache = target.new_cache
        is_joint = require_backtracking(backtracking) == "joint" and drafter is not None
        if is_joint:
            if not isinstance(target, HybridModel):
                raise UsageError(
                    f'backtracking "joint" is for a HybridModel, the target is a '
                    f'{type(target).__name__}: take "replay"'
                )
            new_cache = partial(new_cache, backtracking=backtracking)
        fewer = "num_rows or max_length" if num_rows > 1 else "max_length"
        with naming_what_does_not_fit(
            f"lower {fewer}, take smaller trees, or use bfloat16 or a larger GPU",
            f"{num_rows} × buffers for {max_length} tokens and {max_nodes} nodes",
        ):
            if hasattr(drafter, "for_decoder"):
                read = [each.num_inner for each in trees if isinstance(each, BeamTree)]
                most = max([max_nodes, *read])
                drafter = drafter.for_decoder(target, num_rows, max_length, most)
            cache = new_cache(max_length, max_nodes, num_rows)
        cache.variant.copy_(torch.arange(num_rows))
        require_fillable(drafter, verifier, trees)
        return cls(target, cache, drafter, verifier, is_joint)

    def models(self) -> list[tuple[str, HybridModel, Any]]:
        """Return name, model and cache of target and drafter, as far as they have weights."""
        models = []
        if isinstance(self.target, HybridModel):
            models.append(("target", self.target, self.cache))
        if isinstance(self.drafter, ModelDrafter):
            models.append(("drafter", self.drafter.model, self.drafter.cache))
        return models

    def require_same_models(self) -> None:
        """Raise `UsageError` for a model whose dtype or device is no longer its cache's."""
        for name, model, cache in self.models():
            if (model.dtype, model.device) != (cache.dtype, cache.device):
                raise UsageError(
                    f"the {name} is {model.dtype} on {model.device} by now, this decoder was made "
                    f"for {cache.dtype} on {cache.device}: make a new decoder"
                )

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
        # A drafter that misses a block reads it later, without features
        drafter = self.feature_drafter if self.drafts(tree_batch) else None
        features = None if drafter is None else HiddenStateTap(drafter.feature_layers)
        asked = () if features is None else (features,)
        told = {"longest_path": longest} if self.is_joint else {}
        logits = self.target.tree_batch_forward(
            proposal.tokens, tree_batch, cache, bound, *asked, **told
        )
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
