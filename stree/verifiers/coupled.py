"""Coupled verification: the target chooses its token after each node, and an equal draft counts.

At temperature 0 that token is the best one. Else it is the best of logits / temperature + Gumbel
noise, which is a sample from the target's distribution (Gumbel 1954). The noise depends on the
request's seed, the position in the sequence and the token alone (`naive.token_noise`), and the
drafter draws its children with the same: so both often choose alike (Daliri et al. 2024, "Coupling
without Communication and Drafter-Invariant Speculative Decoding"; for several drafts Rowan et al.
2025, "List-Level Distribution Coupling").

The output equals that of plain decoding with the same seed, token for token, with any drafter and
tree: every token is chosen by the target's own rule after the tokens before it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stree.batching.state import BatchState
from stree.drafters import Proposal
from stree.trees.tree_batch import TreeBatch
from stree.verifiers.verifier import Verifier
from stree_kernels import ops


class Coupled(Verifier):
    """Verifier that is greedy at temperature 0, and else samples by common random numbers."""

    any_dynamic_tree = True
    by_slots = True

    def accept(
        self, logits: Tensor, proposal: Proposal, tree_batch: TreeBatch, rows: BatchState,
        cache: Any, report: Tensor,
    ) -> None:
        best, highest = self.choose(logits, proposal, tree_batch, rows)
        ops.accept_choices(
            best, highest, proposal.tokens, tree_batch.parents, proposal.finite, rows.active,
            cache.path, cache.path_length, rows.block, rows.position, rows.root, report,
        )

    def choose(
        self, logits: Tensor, proposal: Proposal, tree_batch: TreeBatch, rows: BatchState
    ) -> tuple[Tensor, Tensor]:
        """Return the target's token (B, N) after each node, and the token's score (B, N)."""
        return ops.choose_best(logits, tree_batch.depths, rows.sampling)
