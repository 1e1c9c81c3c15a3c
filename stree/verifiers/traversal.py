"""Traversal verification (Weng et al. 2025): trees are judged from their leaves up.

A draft that every top-down rule would reject may still be accepted together with the drafts below
it. Of all rules except `coupled` it accepts most; on a chain it is block verification (Sun et al.
2024).

Because a draft is judged with all drafts below it, this rule, unlike multi-step sampling, needs
siblings of different nodes, and of different steps, that are drawn independently
(`Drafter.draft`).
"""

from __future__ import annotations

from stree.verifiers.rejection import RejectionSampling


class Traversal(RejectionSampling):
    """Verifier that tries nodes in post-order, and accepts the path to the first that passes."""

    rule = "traversal"
