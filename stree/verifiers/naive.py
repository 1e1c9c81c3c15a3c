"""The target's own samples, followed down the tree as long as they are among the drafts."""

from __future__ import annotations

import torch
from torch import Tensor

from stree.drafters import Proposal
from stree.forest import Forest
from stree.rows import Rows
from stree.verifiers.judging import AFTER, Accepted, Choose, Judging


class Naive(Judging):
    """Samples the target and goes on where a draft is that token: the simplest exact rule, and the
    bound from below. What was drafted how does not matter to it."""

    reads_logits = False
    any_growth = True

    def judge(
        self, logits: Tensor, proposal: Proposal, forest: Forest, rows: Rows, choose: Choose
    ) -> Accepted:
        return accept_naive(logits, proposal, forest, rows, choose)


def accept_naive(
    logits: Tensor, proposal: Proposal, forest: Forest, rows: Rows, choose: Choose
) -> Accepted:
    """Walk down each tree; every level is computed, whether it counts or not. Of siblings with one
    token the first is followed.

    Args: as in `Judging.judge`.
    """
    at = torch.arange(len(proposal.tokens), device=logits.device)
    node = torch.zeros_like(at)
    walking, count = rows.active, rows.active.long()
    path, new = [node], []
    for depth in range(forest.max_depth + 1):
        target = rows.distribution(logits[at, node])
        token = choose(target[:, None], torch.full_like(node, AFTER + depth)[:, None])
        new.append(token)
        if depth == forest.max_depth:
            break
        children = forest.children[at, node]  # (B, K)
        drafted = proposal.tokens.gather(1, children.clamp(min=0))
        matching = (children >= 0) & (drafted == token)
        walking = walking & matching.any(1)
        child = children.gather(1, matching.long().argmax(1, keepdim=True))[:, 0]
        node = torch.where(walking, child, node)
        path.append(node)
        count = count + walking
    return Accepted(torch.stack(path, 1), count, torch.cat(new, 1))
