"""Traversal verification (Weng et al. 2025): trees judged from their leaves up.

A draft that no top-down rule would pass may still be accepted together with what follows it. Of all
rules here but `coupled` it accepts most; on a chain it is block verification (Sun et al. 2024).

Because a draft is judged with all that was drafted below it, this rule needs what multi-step
sampling does not: siblings of different nodes, and of different steps, drawn independently (see
`Drafter.draft`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from stree.drafters import Proposal
from stree.forest import Forest
from stree.rows import Rows
from stree.verifiers.judging import ACCEPT, AFTER, Accepted, Choose, Judging, Siblings, coin


class Traversal(Judging):
    """Tries the nodes in post-order, and accepts the whole path to the first that passes."""

    def judge(
        self, logits: Tensor, proposal: Proposal, forest: Forest, rows: Rows, choose: Choose
    ) -> Accepted:
        return accept_traversal(logits, proposal, forest, rows, choose)


def accept_traversal(
    logits: Tensor, proposal: Proposal, forest: Forest, rows: Rows, choose: Choose
) -> Accepted:
    """Judge all nodes of each tree at once: how much of the target's mass there is for a node does
    not depend on any coin, only on the drafts that come before it (`share_out`).

    A node passes with the share that its children have left of its own, and the token after it is
    drawn from what they have left of the target's distribution there. The root has the share 1, and
    passes when nothing else did.

    Args: as in `Judging.judge`.
    """
    batch, size = proposal.tokens.shape
    at = torch.arange(batch, device=logits.device)[:, None]
    # The last slot takes what padding gives
    given = torch.zeros(batch, size + 1, dtype=torch.float64, device=logits.device)
    given[:, 0] = 1.0
    left = given.clone()
    for level in forest.levels:
        nodes, places = level.nodes.clamp(min=0), level.places
        shares, rest, _ = share_out(
            given.gather(1, nodes), nodes, places, logits, proposal, forest, rows
        )
        children = torch.where(places < 0, size, places).flatten(1)
        given.scatter_(1, children, shares.flatten(1))
        left.scatter_(1, torch.where(level.nodes < 0, size, nodes), rest)
        left.scatter_(1, children, shares.flatten(1))
    numbers = torch.arange(size, device=logits.device).expand(batch, -1)
    passed = coin(left[:, :size], ACCEPT + numbers, choose) & (numbers > 0)
    there = forest.children >= 0  # (B, N, K)
    below = forest.children.clamp(min=0).flatten(1)
    some = passed  # of a node and all below it
    for _ in range(forest.max_depth):
        some = some | (some.gather(1, below).view_as(there) & there).any(-1)
    node = torch.zeros(batch, dtype=torch.long, device=logits.device)
    walking, count = rows.active, rows.active.long()
    path, new = [node], []
    for _ in range(forest.max_depth):  # the first in post-order is in the first subtree with any
        children = forest.children[at[:, 0], node]
        found = (children >= 0) & some.gather(1, children.clamp(min=0))
        walking = walking & found.any(1)
        child = children.gather(1, found.long().argmax(1, keepdim=True))[:, 0]
        node = torch.where(walking, child, node)
        path.append(node)
        new.append(proposal.tokens.gather(1, node[:, None]))
        count = count + walking
    last = node[:, None]
    _, _, target = share_out(
        given.gather(1, last), last, forest.children[at, last], logits, proposal, forest, rows
    )
    after = choose(target, torch.full_like(last, AFTER))
    tokens = torch.cat([*new, torch.zeros_like(after)], 1)
    tokens = tokens.scatter(1, (count - 1).clamp(min=0)[:, None], after)
    return Accepted(torch.stack(path, 1), count, tokens)


def share_out(
    share: Tensor,
    nodes: Tensor,
    places: Tensor,
    logits: Tensor,
    proposal: Proposal,
    forest: Forest,
    rows: Rows,
) -> tuple[Tensor, Tensor, Tensor]:
    """Give the children of nodes (B, n), whose share is (B, n), theirs.

    With a the node's share, p the target's distribution and q what a child x was drawn from, the
    child gets min(1, a·p(x) / q(x)). What it could not take, max(a·p − q, 0) of mass s, stays: for
    the next child p is that renormalised, and a is s / (s + 1 − a), the share among those cases in
    which all before were rejected.

    Args: places (B, n, K), the children, −1 for none. Returns their shares (B, n, K), and what they
    leave: of the share (B, n), and of the target's distribution (B, n, V).
    """
    at = torch.arange(len(nodes), device=nodes.device)[:, None]
    target = rows.distribution(logits[at, nodes])
    siblings = Siblings.after(at, nodes, proposal, forest, rows, target)
    share = share[..., None]
    shares = []
    for place in range(places.shape[2]):
        child = places[..., place].clamp(min=0)
        there = places[..., place : place + 1] >= 0
        token = proposal.tokens[at, child][..., None]
        is_point = proposal.is_point(at, child)[..., None]
        drawn_from = siblings.drawn_from(token, is_point)
        ratio = share * target.gather(-1, token) / drawn_from.gather(-1, token)
        shares.append(torch.where(there, ratio.clamp(max=1.0), 0.0))
        left = (share * target - drawn_from).clamp(min=0.0)
        total = left.sum(-1, keepdim=True)
        some = there & (total > 0)
        target = torch.where(some, left / total, target)
        rest = torch.where(some, total / (total + (1.0 - share)), 0.0)  # never above 1
        share = torch.where(there, rest, share)
        siblings.take(token, there & ~is_point)
    return torch.cat(shares, -1), share[..., 0], target
