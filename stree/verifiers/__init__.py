"""Verifiers: which drafts the target accepts, a file each, and what all of them offer a step.

Every one of them keeps the target's distribution exactly. `named` knows them by name.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from stree.drafters import Drafter, Drawn, Proposal
from stree.errors import UsageError
from stree.forest import Forest
from stree.rows import Rows


class Verifier(Protocol):
    """Judges drafted trees by the target's logits."""

    accepts: frozenset[Drawn]  # how the drafts that it may judge were drawn
    reads_logits: bool  # the drafter's, too: a proposal must have them

    def accept(
        self,
        logits: Tensor,
        proposal: Proposal,
        forest: Forest,
        rows: Rows,
        cache: Any,
        report: Tensor,
    ) -> None:
        """Write down what the target accepts, given its logits (B, N, V); see `Step.verify`."""


def named(verifier: str | Verifier) -> Verifier:
    """The verifier of a name: coupled or multi_step. Raises `UsageError` for another name."""
    from stree.verifiers.coupled import Coupled
    from stree.verifiers.multi_step import MultiStep

    if not isinstance(verifier, str):
        return verifier
    known = {"coupled": Coupled, "multi_step": MultiStep}
    if verifier not in known:
        raise UsageError(f"verifier is {verifier!r}, wanted one of {', '.join(known)}")
    return known[verifier]()


def require_fit(verifier: Verifier, drafter: Drafter | None) -> None:
    """Raises `UsageError` when a verifier may not judge what a drafter draws."""
    if drafter is not None and drafter.drawn not in verifier.accepts:
        raise UsageError(
            f"{type(drafter).__name__} draws {drafter.drawn.value}, which the verifier "
            f"{type(verifier).__name__} cannot judge: take the verifier coupled"
        )
