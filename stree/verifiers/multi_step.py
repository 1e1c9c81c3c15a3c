"""Multi-step speculative sampling (SpecInfer, Algorithm 2; without replacement: Jeon et al. 2024).

On a chain it is token-level speculative sampling, which accepts as often as any rule can that
judges a draft before it looks at the next; on trees with siblings `coupled` accepts more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stree.drafters import Proposal
from stree.forest import Forest
from stree.rows import Rows
from stree.verifiers.judging import ACCEPT, AFTER, LEVEL, Accepted, Choose, Judging, Siblings, coin


class MultiStep(Judging):
    """Accepts siblings in turn, each against what the rejected ones have left of the target's
    distribution."""

    def judge(
        self, logits: Tensor, proposal: Proposal, forest: Forest, rows: Rows, choose: Choose
    ) -> Accepted:
        return accept_multi_step(logits, proposal, forest, rows, choose)


def accept_multi_step(
    logits: Tensor, proposal: Proposal, forest: Forest, rows: Rows, choose: Choose
) -> Accepted:
    """Walk down each tree; every level is computed, whether it counts or not.

    A child x is accepted with probability min(1, p(x) / q(x)), where q is what it was drawn from;
    after a rejection p becomes max(p − q, 0) renormalised, and the next sibling is tried. A point
    mass is accepted with probability p(x), and a rejection leaves p without x; so is a child for
    which the drafter had no token of any probability left. Greedy rows are the limit in which p is
    all on the best token.

    Args: as in `Judging.judge`.
    """
    batch = len(proposal.tokens)
    at = torch.arange(batch, device=logits.device)
    node = torch.zeros(batch, dtype=torch.long, device=logits.device)
    walking = rows.active
    target = rows.distribution(logits[:, 0])
    path, new, count = [node], [], walking.long()
    for depth, level in enumerate(forest.levels):
        children = forest.children[at, node]  # (B, K)
        siblings = Siblings.after(at, node, proposal, forest, rows, target)
        accepted, following = torch.zeros_like(walking), node
        token_after = torch.zeros_like(node)
        for place in range(min(level.places.shape[2], children.shape[1])):
            child = children[:, place]
            matters = walking & ~accepted & (child >= 0)
            child = child.clamp(min=0)
            token = proposal.tokens[at, child][:, None]
            is_point = proposal.is_point(at, child)[:, None]
            drawn_from = siblings.drawn_from(token, is_point)
            ratio = target.gather(1, token) / drawn_from.gather(1, token)
            keep = torch.where(matters[:, None], ratio.clamp(max=1.0), 1.0)
            judged = torch.full_like(node, ACCEPT + LEVEL * depth + place)[:, None]
            kept = coin(keep, judged, choose)[:, 0]
            rejected = (matters & ~kept)[:, None]
            left = (target - drawn_from).clamp(min=0.0)
            total = left.sum(-1, keepdim=True)
            left = torch.where(total > 0, left / total, target)
            target = torch.where(rejected, left, target)
            siblings.take(token, rejected & ~is_point)
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
