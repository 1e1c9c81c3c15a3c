"""Naive verification: follow the target's own samples down the tree while they are drafts."""

from __future__ import annotations

from stree.verifiers.rejection import RejectionSampling


class Naive(RejectionSampling):
    """Verifier that samples the target, and goes on if a child is that token.

    It is the simplest exact rule, and nearly always accepts least: only where a late sibling alone
    has children may `multi_step` accept less. It judges drafts of any origin.
    """

    rule = "naive"
    reads_logits = False
    any_dynamic_tree = True
