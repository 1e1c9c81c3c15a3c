"""Verifiers by name, and the trees and drafters that they fit.

Every one of them keeps the target's distribution exactly. `named` returns them by name.
"""

from __future__ import annotations

from stree.common.errors import UsageError
from stree.drafters import Drafter, SiblingSampling
from stree.trees.token_tree import BeamTree as BeamTree
from stree.trees.token_tree import StepTree
from stree.verifiers.coupled import Coupled
from stree.verifiers.rejection import Block, MultiStep, Naive, Traversal
from stree.verifiers.verifier import Verifier as Verifier

VERIFIERS: dict[str, type[Verifier]] = {
    "coupled": Coupled, "naive": Naive, "multi_step": MultiStep, "block": Block,
    "traversal": Traversal,
}


def named(verifier: str | Verifier) -> Verifier:
    """Return a verifier; make one of a name in `VERIFIERS`.

    Raises `UsageError` for another name.
    """
    if isinstance(verifier, Verifier):
        return verifier
    if not isinstance(verifier, str) or verifier not in VERIFIERS:
        greedy = "; at T = 0 each of them is greedy, and coupled is the default"
        raise UsageError(
            f"verifier is {verifier!r}, wanted one of {', '.join(VERIFIERS)}, or a Verifier"
            + (greedy if verifier == "greedy" else "")
        )
    return VERIFIERS[verifier]()


def require_fit(verifier: Verifier, drafter: Drafter | None) -> None:
    """Raise `UsageError` when a verifier may not judge a drafter's way of drawing siblings."""
    if drafter is not None and drafter.drawn not in verifier.accepts:
        raise UsageError(
            f"{type(drafter).__name__} draws {drafter.drawn.value}, which the verifier "
            f"{type(verifier).__name__} cannot judge: take the verifier coupled"
        )


def fits(verifier: Verifier, tree: StepTree) -> bool:
    """Return whether a verifier judges such trees: one of chains judges only chains."""
    return not verifier.chains_only or tree.max_depth + 1 == tree.num_nodes


def require_tree(
    verifier: Verifier, tree: StepTree, drawn: SiblingSampling | None = None
) -> None:
    """Raise `UsageError` when a verifier cannot judge a tree.

    A verifier of chains cannot judge trees that branch, and some verifiers would be biased by
    dynamic trees whose drafts are drawn: `drawn` says how, None for any way.
    """
    if tree.grows and not verifier.any_dynamic_tree:
        if not tree.by_slots and drawn is not SiblingSampling.DETERMINISTIC:
            raise UsageError(
                f"the verifier {type(verifier).__name__} cannot judge {tree.name}: it tosses coins "
                "by how drafts were drawn, and such a tree keeps a draft or not by the token that "
                "was drawn; take the verifier coupled or naive, a drafter top:FOLDER (its best "
                "tokens, not drawn), dyspec-W-D-N, or a tree of one shape"
            )
        if not verifier.by_slots:
            raise UsageError(
                f"the verifier {type(verifier).__name__} judges trees of one shape, {tree.name} "
                "is dynamic: take a verifier of ours, or a tree of one shape"
            )
    if not fits(verifier, tree):
        raise UsageError(
            f"the verifier {type(verifier).__name__} judges chains only, and {tree} branches: take "
            "a chain (chain-4), or the verifier traversal"
        )
