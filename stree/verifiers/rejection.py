"""Rejection sampling: base of the verifiers that judge drafts by their probabilities."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from stree.batching.state import BatchState
from stree.drafters import Proposal, SiblingSampling
from stree.trees.tree_batch import TreeBatch
from stree.verifiers.coupled import Coupled
from stree_kernels import ops
from stree_kernels.contracts import Drafts
from stree_kernels.naive import Choose


class RejectionSampling:
    """Base of the verifiers whose rule is one of `naive.accept_drafts`.

    choose replaces the rows' random numbers, for tests; None uses the rows' seeds.
    """

    rule: ClassVar[str]
    accepts = frozenset(SiblingSampling)
    reads_logits = True
    chains_only = False
    any_dynamic_tree = False
    by_slots = True

    def __init__(self, choose: Choose | None = None) -> None:
        self.choose = choose

    def accept(
        self,
        logits: Tensor,
        proposal: Proposal,
        tree_batch: TreeBatch,
        rows: BatchState,
        cache: Any,
        report: Tensor,
    ) -> None:
        sampling = rows.sampling
        if sampling is None:  # all rules follow the best tokens
            return Coupled().accept(logits, proposal, tree_batch, rows, cache, report)
        drafts = Drafts(
            proposal.tokens, tree_batch.parents, tree_batch.children.contiguous(),
            tree_batch.judged, proposal.logits,
            None if proposal.logits is None else tree_batch.drawn_by, proposal.points,
            proposal.finite,
            proposal.independent,
        )
        logits = rows.kept(logits, tree_batch.drafts_of(proposal.tokens, rows.penalised))
        ops.accept_drafts(
            self.rule, logits, drafts, sampling, rows.active,
            cache.path, cache.path_length, rows.block, rows.root, report, self.choose,
        )
