"""Traversal verification (Weng et al. 2025): trees judged from their leaves up.

A draft that no top-down rule would pass may still be accepted together with what follows it. Of all
rules here but `coupled` it accepts most; on a chain it is block verification (Sun et al. 2024).

Because a draft is judged with all that was drafted below it, this rule needs what multi-step
sampling does not: siblings of different nodes, and of different steps, drawn independently (see
`Drafter.draft`).
"""

from __future__ import annotations

from stree.verifiers.rejection import RejectionSampling


class Traversal(RejectionSampling):
    """Tries the nodes in post-order, and accepts the whole path to the first that passes."""

    rule = "traversal"
