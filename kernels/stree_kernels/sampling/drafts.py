"""Record of drafted trees that are to be judged, and the places of use of random numbers.

Shapes: B batch, N tree nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Places of use of a step's random numbers, the same whatever else its tree holds
ACCEPT = 2**20  # + LEVEL · depth + the place among its siblings of the node that is judged
LEVEL = 2**11
AFTER = 2**31  # the token after the accepted path


@dataclass(frozen=True)
class Drafts:
    """Drafted trees, and what their nodes were drawn from; I nodes have children.

    Attributes:
        tokens: (B, N).
        parents: (B, N).
        children: (B, N, K), −1 for none.
        levels: Nodes (B, n) with children at each depth, and the indices (B, n, k) of their
            children; −1 for none.
        logits: (B, I, V), from which the children of a node were drawn; None for no logits.
        drawn_by: (B, N), index of a node's logits; None without logits.
        points: (B, N) bool, nodes with deterministic drafts, not drawn from logits; None if all
            (without logits) or none are.
        finite: (B, …) bool, which of the drafter's logits were finite; None for no logits.
        independent: Whether siblings were drawn with replacement.
    """

    tokens: Tensor
    parents: Tensor
    children: Tensor
    levels: tuple[tuple[Tensor, Tensor], ...]
    logits: Tensor | None
    drawn_by: Tensor | None
    points: Tensor | None
    finite: Tensor | None
    independent: bool = False

    def is_point(self, at: Tensor, nodes: Tensor) -> Tensor:
        """Return a mask of the nodes (…) of rows at (…) that were not drawn from logits."""
        if self.points is not None:
            return self.points[at, nodes]
        fill = torch.ones_like if self.logits is None else torch.zeros_like
        return fill(nodes, dtype=torch.bool)
