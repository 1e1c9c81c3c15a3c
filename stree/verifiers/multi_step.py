"""Multi-step speculative sampling (SpecInfer, Algorithm 2; without replacement: Jeon et al. 2024).

On a chain it is token-level speculative sampling, which accepts as often as any rule can; on trees
with siblings `coupled` accepts more.
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


class MultiStep:
    """Accepts siblings in turn, each against what the rejected ones have left of the target's
    distribution.

    choose, for tests, draws indices (B, n) from probs (B, n, V) for places of use (B, n); by
    default the rows' own random numbers do.
    """

    accepts = frozenset(Drawn)
    reads_logits = True

    def __init__(self, choose: Choose | None = None) -> None:
        self.choose = choose

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
        accepted = accept_multi_step(logits, proposal, forest, rows, choose)
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


def without(probs: Tensor, taken: Tensor, otherwise: Tensor) -> Tensor:
    """The distribution of the next sibling: probs (…, V) given that the `taken` (…, V) are out;
    `otherwise` where nothing is left."""
    left = probs.masked_fill(taken, 0.0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total, otherwise)


def accept_multi_step(
    logits: Tensor, proposal: Proposal, forest: Forest, rows: Rows, choose: Choose
) -> Accepted:
    """Walk down each tree; every level is computed, whether it counts or not.

    A child x is accepted with probability min(1, p(x) / q(x)), where q is what it was drawn from;
    after a rejection p becomes max(p − q, 0) renormalised, and the next sibling is tried. A point
    mass is accepted with probability p(x), and a rejection leaves p without x; so is a child for
    which the drafter had no token of any probability left. Greedy rows are the limit in which p is
    all on the best token.

    Args: logits (B, N, V) of the target as `Rows.kept` leaves them; proposal, with the drafter's
    likewise, or of point masses without.
    """
    batch = len(proposal.tokens)
    at = torch.arange(batch, device=logits.device)
    node = torch.zeros(batch, dtype=torch.long, device=logits.device)
    walking = rows.active
    target = rows.distribution(logits[:, 0])
    path, new, count = [node], [], walking.long()
    for depth, level in enumerate(forest.levels):
        children = forest.children[at, node]  # (B, K)
        offered = None
        if proposal.logits is not None:
            offered = rows.distribution(proposal.logits[at, forest.drawn_by[at, node]])
        taken = torch.zeros_like(target, dtype=torch.bool)
        accepted, following = torch.zeros_like(walking), node
        token_after = torch.zeros_like(node)
        for place in range(min(level.places.shape[2], children.shape[1])):
            child = children[:, place]
            matters = walking & ~accepted & (child >= 0)
            child = child.clamp(min=0)
            token = proposal.tokens[at, child][:, None]
            point = torch.zeros_like(target).scatter_(1, token, 1.0)
            drawn_from = point if offered is None else without(offered, taken, point)
            ratio = target.gather(1, token) / drawn_from.gather(1, token)
            keep = torch.where(matters[:, None], ratio.clamp(max=1.0), 1.0)
            judged = torch.full_like(node, ACCEPT + LEVEL * depth + place)[:, None]
            kept = choose(torch.stack([1.0 - keep, keep], -1), judged)[:, 0] > 0
            rejected = (matters & ~kept)[:, None]
            left = (target - drawn_from).clamp(min=0.0)
            if offered is None:  # the same sum, and exact where p(x) is nearly 1
                left = target.masked_fill(point > 0, 0.0)
            total = left.sum(-1, keepdim=True)
            left = torch.where(total > 0, left / total, target)
            target = torch.where(rejected, left, target)
            taken = taken.scatter(1, token, rejected | taken.gather(1, token))
            following = torch.where(matters & kept, child, following)
            token_after = torch.where(matters & kept, token[:, 0], token_after)
            accepted = accepted | (matters & kept)
        node, walking = following, accepted
        target = torch.where(accepted[:, None], rows.distribution(logits[at, node]), target)
        path.append(node)
        new.append(token_after)
        count = count + accepted
    after = choose(target[:, None], torch.full_like(node, AFTER)[:, None])
    tokens = torch.cat([*(token[:, None] for token in new), torch.zeros_like(after)], 1)
    tokens = tokens.scatter(1, (count - 1).clamp(min=0)[:, None], after)
    return Accepted(torch.stack(path, 1), count, tokens)
