"""One decoding step of many sequences: draft, verify, accept, commit, over tensors only.

Shapes: B rows, N nodes of the largest tree, V vocabulary, M tokens that a step yields at most.
Each row has its own tree, length, settings and random numbers. Nothing here waits for the device,
and a row that is idle stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stree.batching.checks import require_fillable
from stree.batching.state import BatchState
from stree.common.errors import UsageError, naming_what_does_not_fit
from stree.common.lru import LRUCache
from stree.drafters import Drafter, DrafterSpec, Proposal
from stree.generation import GenerationConfig
from stree.logits.log_probs import log_probs_of
from stree.models.cache import HybridCache
from stree.models.hidden_states import HiddenStateTap
from stree.models.joint import require_backtracking
from stree.models.model import HybridModel
from stree.trees.build import make_tree_batch
from stree.trees.token_tree import PLAIN, StepTree
from stree.trees.tree_batch import TreeBatch
from stree.verifiers import Verifier

MAX_PREPARED = 16  # steps' rows and tree batches that are kept, one for each tree


@dataclass
class Step:
    """A decoding step of the first rows of a batch; it changes caches and rows in place.

    Attributes:
        target: A model with `tree_batch_forward`, as `HybridModel` has.
        cache: The target's.
        drafter: Fills the trees; None for plain decoding.
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
        cls, target: Any, drafter: Any, verifier: Verifier, trees: Sequence[StepTree], *,
        num_rows: int, max_length: int, max_nodes: int, backtracking: str,
    ) -> Step:
        """Return the step of a new batch, with caches for its rows.

        Args:
            target: A `HybridModel`, or another model with `new_cache` and `tree_batch_forward`.
            drafter: A drafter, or the specification of one (`DrafterSpec`), which is made here.
            trees: All trees that steps may have.
            verifier, num_rows, max_length, max_nodes, backtracking: As in `BatchDecoder`.

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
            if isinstance(drafter, DrafterSpec):  # or a drafter that is made already
                most = max([max_nodes, *(each.num_inner for each in trees)])
                drafter = drafter.for_decoder(target, num_rows, max_length, most)
            cache = new_cache(max_length, max_nodes, num_rows)
        cache.variant.copy_(torch.arange(num_rows))
        require_fillable(drafter, verifier, trees)
        return cls(target, cache, drafter, verifier, is_joint)

    def models(self) -> list[tuple[str, HybridModel, Any]]:
        """Return name, model and cache of target and drafter, as far as they have weights."""
        models = [("target", self.target, self.cache)]
        if self.drafter is not None:
            models.append(("drafter", self.drafter.model, self.drafter.cache))
        return [each for each in models if isinstance(each[1], HybridModel)]  # of ours, not a table

    def require_same_models(self) -> None:
        """Raise `UsageError` for a model whose dtype or device is no longer its cache's."""
        for name, model, cache in self.models():
            if not isinstance(cache, HybridCache):
                continue  # a drafter of one's own may keep tokens elsewhere, or nowhere
            if (model.dtype, model.device) != (cache.dtype, cache.device):
                raise UsageError(
                    f"the {name} is {model.dtype} on {model.device} by now, this decoder was made "
                    f"for {cache.dtype} on {cache.device}: make a new decoder"
                )

    def drafts(self, tree_batch: TreeBatch) -> bool:
        """Return whether the trees have nodes for the drafter to fill."""
        return self.drafter is not None and tree_batch.num_nodes > 1

    @torch.no_grad()
    def draft(
        self, rows: BatchState, tree_batch: TreeBatch, longest_block: int, bound: int
    ) -> Proposal:
        """Fill the rows' trees with the drafter's tokens; arguments as in `Drafter.draft`."""
        if not self.drafts(tree_batch):
            return Proposal(rows.root)
        assert self.drafter is not None
        keep_logits = self.verifier.reads_logits
        return self.drafter.draft(rows, tree_batch, longest_block, bound, keep_logits)

    @torch.no_grad()
    def verify(
        self, rows: BatchState, tree_batch: TreeBatch, proposal: Proposal, bound: int,
        report: Tensor, mark: Callable[[str], None] = lambda phase: None,
        longest_path: int | None = None,
    ) -> Tensor:
        """Verify the drafts with one call of the target, and commit the accepted ones.

        Writes the rows' blocks and positions, the cache's paths, and the report. Returns the
        report for the host: as it is, or if a row wants log-probabilities in fp64, with those of
        M tokens after it (`log_probs_of`).

        Args:
            rows: The rows of the step.
            tree_batch: Their trees.
            proposal: The drafts.
            bound: Cache slots to attend to, as in `HybridModel.tree_forward`.
            report: (B, 3 + 2·M) int64, written: 1 when all logits of the row were finite, 0 when
                the target's were not, −1 when the drafter's were not; the number of new tokens;
                M tokens; M accepted nodes, by rank in a tree that was grown in the step; the
                depth of such a tree, 0 for one whose depth is known before.
            mark: Called with the name of each phase that ends.
            longest_path: Number of nodes on the longest path that any row accepted in its previous
                step; None if the host has not read it yet.
        """
        cache = self.cache.narrow(0, len(rows.active))
        # A drafter that misses a block reads it later, without features
        drafter = self.drafter if self.drafts(tree_batch) else None
        layers = () if drafter is None else drafter.feature_layers
        features = HiddenStateTap(layers) if layers else None
        asked = () if features is None else (features,)
        options = {"longest_path": longest_path} if self.is_joint else {}
        logits = self.target.tree_batch_forward(
            proposal.tokens, tree_batch, cache, bound, *asked, **options
        )
        mark("verify")
        paths = tree_batch.paths_of(proposal.tokens, rows.asked.reads_paths)
        processed = rows.processed(logits, paths)
        self.verifier.accept(processed, proposal, tree_batch, rows, cache, report[:, :-1])
        tree_batch.report_depths(report[:, -1])
        rows.remember()
        scores, accepted = None, report[:, 2 + (report.shape[1] - 3) // 2 : -1]
        if (num_top := rows.asked.num_top) is not None:
            tokens, nodes = report[:, 2:-1].clamp(min=0).reshape(len(report), 2, -1).unbind(1)
            temperature = rows.temperature if rows.asked.sampled else None
            on_path = _at(logits, nodes)
            kept = on_path if processed is logits else _at(processed, nodes)
            scores = log_probs_of(on_path, kept, tokens, temperature, num_top)
        tree_batch.report_ranks(accepted)
        told_host = report if scores is None else torch.cat([report.double(), scores.flatten(1)], 1)
        if drafter is not None and features is not None:
            drafter.take_features(features.values, rows, cache.path[:, : tree_batch.max_depth + 1])
        mark("accept")
        return told_host


def _at(logits: Tensor, nodes: Tensor) -> Tensor:
    """Return the logits (B, M, V) at nodes (B, M) of logits (B, N, V)."""
    if logits.shape[1] == 1:  # of roots, of which no copy is needed
        return logits.expand(-1, nodes.shape[1], -1)
    at = nodes.clamp(max=logits.shape[1] - 1)[..., None]
    return logits.gather(1, at.expand(-1, -1, logits.shape[2]))


@dataclass
class StepInputs:
    """Inputs of a step; most steps use the rows and the tree batch of the step before.

    Attributes:
        rows: The rows that take part.
        tree_batch: A tree for each row.
        longest_block: The most tokens of any row's last block. No accepted path has more nodes.
        position: The largest position of any row's root, rows that have not begun excepted.
        trees: The trees that the tree batch was made of.
        generations: The settings that the rows were made for.
    """

    rows: BatchState
    tree_batch: TreeBatch
    longest_block: int
    position: int
    trees: list[StepTree] = field(default_factory=list)
    generations: list[GenerationConfig] = field(default_factory=list)


class StepInputsCache:
    """Inputs of the last steps of a batch, by the tree that idle rows had in them."""

    def __init__(self, rows: BatchState) -> None:
        self.rows = rows
        self._kept: LRUCache[StepTree, StepInputs] = LRUCache(MAX_PREPARED)

    def of(
        self, num_rows: int, trees: dict[int, StepTree], generations: list[GenerationConfig]
    ) -> StepInputs:
        """Return inputs of a step, of which `longest_block` and `position` are still to be set.

        Args:
            num_rows: Rows of the step, idle ones included.
            trees: The trees of the rows that decode.
            generations: Their settings.
        """
        # Idle rows have the others' tree: one tree batch serves while requests come and go
        idle = next(iter(trees.values()))
        if any(tree != idle for tree in trees.values() if tree is not idle):
            idle = PLAIN
        of_rows = [trees.get(row, idle) for row in range(num_rows)]
        inputs = self._kept.get(idle)
        if inputs is None or inputs.trees != of_rows or not self._holds(inputs, generations):
            tree_batch = make_tree_batch(of_rows, self.rows.active.device)
            rows = self.rows.narrow(0, num_rows, generations)
            inputs = self._kept[idle] = StepInputs(rows, tree_batch, 1, 0, of_rows, generations)
        inputs.generations = generations  # the same objects, so that the next step compares fast
        return inputs

    def _holds(self, inputs: StepInputs, generations: list[GenerationConfig]) -> bool:
        """Return whether the rows of inputs serve such settings; rules may have other tensors."""
        asked = inputs.rows.asked
        if inputs.generations == generations:
            return inputs.rows.rules.size == self.rows.rules.size
        return not asked.has_rules and asked == self.rows.asked_by(generations)
