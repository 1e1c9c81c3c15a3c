"""What verifiers share that judge drafts by the distributions they were drawn from, and by coins.

Shapes: B rows, N nodes of the largest tree, K children of the widest node, V vocabulary, M tokens
that a step yields at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stree.drafters import Drawn, Proposal
from stree.forest import Forest
from stree.rows import Rows
from stree_kernels import ops

# Places of use of a step's random numbers, the same whatever else its tree holds
ACCEPT = 2**20  # + LEVEL · depth + the place among its siblings of the node that is judged
LEVEL = 2**11
AFTER = 2**31  # the token after the accepted path

Choose = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Accepted:
    """path (B, M) nodes from the root, of which count (B,) are accepted (0 in idle rows); tokens
    (B, M), of which as many are new: the drafts on the path, and the target's own."""

    path: Tensor
    count: Tensor
    tokens: Tensor


class Judging:
    """A verifier that is a function `judge`; this commits what it accepts.

    choose, for tests, draws indices (B, n) from probs (B, n, V) for places of use (B, n); by
    default the rows' own random numbers do.
    """

    accepts = frozenset(Drawn)
    reads_logits = True
    chains_only = False
    any_growth = False

    def __init__(self, choose: Choose | None = None) -> None:
        self.choose = choose

    def judge(
        self, logits: Tensor, proposal: Proposal, forest: Forest, rows: Rows, choose: Choose
    ) -> Accepted:
        """Args: logits (B, N, V) of the target as `Rows.kept` leaves them; proposal, with the
        drafter's likewise, or of point masses without."""
        raise NotImplementedError

    def accept(
        self,
        logits: Tensor,
        proposal: Proposal,
        forest: Forest,
        rows: Rows,
        cache: Any,
        report: Tensor,
    ) -> None:
        logits, choose = rows.kept(logits), self.choose or RowChooser(rows)
        accepted = self.judge(logits, proposal, forest, rows, choose)
        finite = logits.amax(-1).isfinite().all(-1).long()
        if proposal.finite is not None:
            finite = torch.where((finite == 1) & ~proposal.finite.all(-1), -1, finite)
        count = accepted.count[:, None]
        cache.path[:, : accepted.path.shape[1]] = accepted.path
        cache.path_length.copy_(accepted.count)
        block = rows.block[:, : 1 + accepted.tokens.shape[1]]
        block.copy_(torch.where(count > 0, torch.cat([count, accepted.tokens], 1), block))
        last = accepted.tokens.gather(1, (count - 1).clamp(min=0))
        rows.root.copy_(torch.where(count > 0, last, rows.root))
        rows.position.add_(accepted.count)
        report.copy_(torch.cat([finite[:, None], count, accepted.tokens, accepted.path], 1))


class RowChooser:
    """Draws by inverting cumulative distributions with the rows' own random numbers."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __call__(self, probs: Tensor, places: Tensor) -> Tensor:
        cumulative = probs.cumsum(-1)
        uniform = ops.uniforms(self.rows.seed, self.rows.position, places)[..., None]
        # u < 1 times the total, and the first entry above it: never a token of probability 0
        threshold = uniform * cumulative[..., -1:]
        drawn = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
        return drawn.clamp(max=probs.shape[-1] - 1)


def coin(share: Tensor, places: Tensor, choose: Choose) -> Tensor:
    """Bool (B, n), true with the probabilities share (B, n)."""
    return choose(torch.stack([1.0 - share, share], -1), places) > 0


@dataclass
class Siblings:
    """What some nodes' children were drawn from, one after the other.

    offered (…, V), the drafter's distribution after each node, or None where all its children are
    points; taken (…, V), its tokens that are out already.
    """

    offered: Tensor | None
    taken: Tensor

    @classmethod
    def after(
        cls, at: Tensor, nodes: Tensor, proposal: Proposal, forest: Forest, rows: Rows, like: Tensor
    ) -> Siblings:
        """Of nodes (B, …) of rows at (B, …); like (…, V), the target's distribution there."""
        offered = None
        if proposal.logits is not None:
            offered = rows.distribution(proposal.logits[at, forest.drawn_by[at, nodes]])
        return cls(offered, torch.zeros_like(like, dtype=torch.bool))

    def drawn_from(self, token: Tensor, is_point: Tensor) -> Tensor:
        """The next child's distribution (…, V); all of it is on its token (…, 1) where that is a
        point (…, 1), or the drafter had nothing left."""
        point = torch.zeros_like(self.taken, dtype=torch.float64).scatter_(-1, token, 1.0)
        if self.offered is None:
            return point
        left = self.offered.masked_fill(self.taken, 0.0)
        total = left.sum(-1, keepdim=True)
        return torch.where(is_point | (total == 0), point, left / total)

    def take(self, token: Tensor, out: Tensor) -> None:
        """Siblings drawn later are not these tokens (…, 1), where out (…, 1)."""
        self.taken = self.taken.scatter(-1, token, out | self.taken.gather(-1, token))
