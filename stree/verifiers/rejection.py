"""Rejection sampling: verifiers that judge drafts by their probabilities, a class for each rule."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from stree.batching.state import BatchState
from stree.drafters import Proposal
from stree.trees.tree_batch import TreeBatch
from stree.verifiers.coupled import Coupled
from stree.verifiers.verifier import Verifier
from stree_kernels import ops
from stree_kernels.naive import Choose
from stree_kernels.sampling.drafts import Drafts


class RejectionSampling(Verifier):
    """Base of the verifiers whose rule is one of `naive.accept_drafts`.

    choose replaces the rows' random numbers, for tests; None uses the rows' seeds.
    """

    rule: ClassVar[str]
    reads_logits = True
    by_slots = True

    def __init__(self, choose: Choose | None = None) -> None:
        self.choose = choose

    def accept(
        self, logits: Tensor, proposal: Proposal, tree_batch: TreeBatch, rows: BatchState,
        cache: Any, report: Tensor,
    ) -> None:
        sampling = rows.sampling
        if sampling is None:  # all rules follow the best tokens
            return Coupled().accept(logits, proposal, tree_batch, rows, cache, report)
        drafts = Drafts(
            proposal.tokens, tree_batch.parents, tree_batch.children.contiguous(),
            tree_batch.judged, proposal.logits,
            None if proposal.logits is None else tree_batch.drawn_by, proposal.points,
            proposal.finite, proposal.independent,
        )
        ops.accept_drafts(
            self.rule, logits, drafts, sampling, rows.active,
            cache.path, cache.path_length, rows.block, rows.root, report, self.choose,
        )


class Naive(RejectionSampling):
    """Verifier that samples the target, and goes on if a child is that token.

    It is the simplest exact rule, and nearly always accepts least: only where a late sibling alone
    has children may `multi_step` accept less. It judges drafts of any origin.
    """

    rule = "naive"
    reads_logits = False
    any_dynamic_tree = True


class MultiStep(RejectionSampling):
    """Verifier that judges siblings in turn, by the distribution that rejected ones have left.

    For independent siblings it is SpecInfer's Algorithm 2, for siblings without replacement that of
    Jeon et al. 2024. On a chain it is token-level speculative sampling, which accepts as often as
    any rule that judges a draft before it looks at the next; on trees `coupled` accepts more.
    """

    rule = "multi_step"


class Traversal(RejectionSampling):
    """Verifier that tries nodes in post-order, and accepts the path to the first that passes.

    Traversal verification (Weng et al. 2025) judges trees from their leaves up: a draft that every
    top-down rule would reject may still be accepted together with the drafts below it. Of all rules
    except `coupled` it accepts most. Because a draft is judged with all drafts below it, siblings
    of different nodes, and of different steps, must be drawn independently (`Drafter.draft`).
    """

    rule = "traversal"


class Block(Traversal):
    """Traversal verification of chains, which is block verification (Sun et al. 2024).

    It accepts more than token-level sampling, whose first rejection ends the block.
    """

    chains_only = True
