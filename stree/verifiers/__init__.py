"""Verifiers: which drafts the target accepts, a file each, and what all of them offer a step.

Every one of them keeps the target's distribution exactly. `named` knows them by name.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from stree.batching.state import BatchState
from stree.common.errors import UsageError
from stree.drafters import Drafter, Proposal, SiblingSampling
from stree.trees.token_tree import BeamTree, TokenTree
from stree.trees.tree_batch import TreeBatch

NAMES = ("coupled", "naive", "multi_step", "block", "traversal")


class Verifier(Protocol):
    """Judges drafted trees by the target's logits."""

    accepts: frozenset[SiblingSampling]  # how the drafts that it may judge were drawn
    reads_logits: bool  # the drafter's, too: a proposal must have them
    chains_only: bool  # trees must be chains
    any_dynamic_tree: (
        bool  # whether a draft is in the tree may depend on its own token; without it: no
    )
    by_slots: bool  # … on tokens that were drawn before it; without it: no

    def accept(
        self,
        logits: Tensor,
        proposal: Proposal,
        tree_batch: TreeBatch,
        rows: BatchState,
        cache: Any,
        report: Tensor,
    ) -> None:
        """Write down what the target accepts, given its logits (B, N, V); see `Step.verify`."""


def named(verifier: str | Verifier) -> Verifier:
    """The verifier of a name of `NAMES`. Raises `UsageError` for another name."""
    from stree.verifiers.block import Block
    from stree.verifiers.coupled import Coupled
    from stree.verifiers.multi_step import MultiStep
    from stree.verifiers.naive import Naive
    from stree.verifiers.traversal import Traversal

    if not isinstance(verifier, str) and callable(getattr(verifier, "accept", None)):
        return verifier
    if verifier not in NAMES:
        greedy = "; at T = 0 each of them is greedy, and coupled is the default"
        raise UsageError(
            f"verifier is {verifier!r}, wanted one of {', '.join(NAMES)}"
            + (greedy if verifier == "greedy" else "")
        )
    return dict(zip(NAMES, (Coupled, Naive, MultiStep, Block, Traversal), strict=True))[verifier]()


def require_fit(verifier: Verifier, drafter: Drafter | None) -> None:
    """Raises `UsageError` when a verifier may not judge what a drafter draws."""
    if drafter is not None and drafter.drawn not in verifier.accepts:
        raise UsageError(
            f"{type(drafter).__name__} draws {drafter.drawn.value}, which the verifier "
            f"{type(verifier).__name__} cannot judge: take the verifier coupled"
        )


def fits(verifier: Verifier, tree: TokenTree) -> bool:
    """Whether it judges such trees."""
    return not verifier.chains_only or tree.max_depth + 1 == tree.num_nodes


def require_tree(verifier: Verifier, tree: TokenTree) -> None:
    """Raises `UsageError` when a verifier of chains is to judge a tree that branches, or one whose
    shape depends on its tokens goes to a verifier that would be biased by it."""
    if isinstance(tree, BeamTree) and not getattr(verifier, "any_dynamic_tree", False):
        if not tree.by_slots:
            raise UsageError(
                f"the verifier {type(verifier).__name__} cannot judge {tree.name}: it tosses coins "
                "by how drafts were drawn, and such a tree keeps a draft or not by the token that "
                "was drawn; take the verifier coupled or naive, dyspec-W-D-N, or a tree of one "
                "shape"
            )
        if not getattr(verifier, "by_slots", False):
            raise UsageError(
                f"the verifier {type(verifier).__name__} judges trees of one shape, {tree.name} "
                "grows: take a verifier of ours, or a tree of one shape"
            )
    if not fits(verifier, tree):
        raise UsageError(
            f"the verifier {type(verifier).__name__} judges chains only, and {tree} branches: take "
            "a chain (chain-4), or the verifier traversal"
        )
