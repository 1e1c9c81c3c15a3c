"""Rules of verifiers that judge drafts by their probabilities, in plain PyTorch.

They are the twins of `sampling/verification.py`. Each rule keeps the target's distribution exactly;
stree/verifiers/ says where each comes from.

Shapes: B rows, N nodes of the largest tree, K children of the widest node, V vocabulary, M tokens
that a step yields at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stree_kernels.contracts import Sampling
from stree_kernels.naive.sampling.uniforms import uniforms
from stree_kernels.sampling.drafts import ACCEPT, AFTER, LEVEL, Drafts

Choose = Callable[[Tensor, Tensor], Tensor]


def accept_drafts(
    rule: str, logits: Tensor, drafts: Drafts, sampling: Sampling, active: Tensor, path: Tensor,
    path_length: Tensor, block: Tensor, root: Tensor, report: Tensor, choose: Choose | None = None,
) -> None:
    """Judge drafted trees by a rule, and write the accepted path.

    Args:
        rule: "naive", "multi_step" or "traversal".
        logits: (B, N, V) after every node, −∞ for tokens that a row leaves out.
        drafts: The drafts, and the drafter's logits.
        sampling: Settings of the rows; its position moves on.
        active: (B,) bool; it and the next five as in `naive.accept_choices`.
        choose: For tests: draws indices (B, n) from probs (B, n, V) for places of use (B, n). None
            uses the rows' own random numbers.
    """
    judge = dict(naive=accept_naive, multi_step=accept_multi_step, traversal=accept_traversal)[rule]
    chooser = choose or Chooser(sampling)
    accepted = judge(logits, drafts, active, sampling.temperature, chooser)
    finite = logits.amax(-1).isfinite().all(-1).long()
    if drafts.finite is not None:
        finite = torch.where((finite == 1) & ~drafts.finite.all(-1), -1, finite)
    count = accepted.count[:, None]
    path[:, : accepted.path.shape[1]] = accepted.path
    path_length.copy_(accepted.count)
    block = block[:, : 1 + accepted.tokens.shape[1]]
    block.copy_(torch.where(count > 0, torch.cat([count, accepted.tokens], 1), block))
    last = accepted.tokens.gather(1, (count - 1).clamp(min=0))
    root.copy_(torch.where(count > 0, last, root))
    sampling.position.add_(accepted.count)
    report.copy_(torch.cat([finite[:, None], count, accepted.tokens, accepted.path], 1))


@dataclass
class Accepted:
    """Accepted paths.

    Attributes:
        path: (B, M) nodes from the root.
        count: (B,) accepted nodes of the path, and new tokens; 0 in idle rows.
        tokens: (B, M), the drafts on the path, and the target's own token.
    """

    path: Tensor
    count: Tensor
    tokens: Tensor


class Chooser:
    """Draw by inverting cumulative distributions with the rows' own random numbers."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling

    def __call__(self, probs: Tensor, places: Tensor) -> Tensor:
        cumulative = probs.cumsum(-1)
        uniform = uniforms(self.sampling.seed, self.sampling.position, places)[..., None]
        # u < 1 times the total, and the first entry above it: never a token of probability 0
        threshold = uniform * cumulative[..., -1:]
        drawn = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
        return drawn.clamp(max=probs.shape[-1] - 1)


def coin(share: Tensor, places: Tensor, choose: Choose) -> Tensor:
    """Toss coins (B, n) that are true with probabilities share (B, n)."""
    return choose(torch.stack([1.0 - share, share], -1), places) > 0


def distribution(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return fp64 probabilities of logits (B, …, V) at each row's temperature (B,).

    Temperature 0 puts all on the best token.
    """
    temperature = temperature.view([-1] + [1] * (logits.dim() - 1))
    greedy = temperature == 0
    scores = logits.double() / torch.where(greedy, 1.0, temperature)
    probs = scores.softmax(-1)
    best = torch.zeros_like(probs).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where(greedy & probs.isfinite().all(-1, keepdim=True), best, probs)


def accept_naive(
    logits: Tensor, drafts: Drafts, active: Tensor, temperature: Tensor, choose: Choose
) -> Accepted:
    """Walk down each tree along the target's samples; the first of siblings with one token counts.

    Every level is computed, whether it counts or not.

    Args:
        logits: As in `accept_drafts`.
        drafts: As in `accept_drafts`.
        active: (B,) bool.
        temperature: (B,).
    """
    at = torch.arange(len(drafts.tokens), device=logits.device)
    node = torch.zeros_like(at)
    walking, count = active, active.long()
    path, new = [node], []
    for depth in range(len(drafts.levels) + 1):
        target = distribution(logits[at, node], temperature)
        token = choose(target[:, None], torch.full_like(node, AFTER + depth)[:, None])
        new.append(token)
        if depth == len(drafts.levels):
            break
        children = drafts.children[at, node]  # (B, K)
        drafted = drafts.tokens.gather(1, children.clamp(min=0))
        matching = (children >= 0) & (drafted == token)
        walking = walking & matching.any(1)
        child = children.gather(1, matching.long().argmax(1, keepdim=True))[:, 0]
        node = torch.where(walking, child, node)
        path.append(node)
        count = count + walking
    return Accepted(torch.stack(path, 1), count, torch.cat(new, 1))


def accept_multi_step(
    logits: Tensor, drafts: Drafts, active: Tensor, temperature: Tensor, choose: Choose
) -> Accepted:
    """Walk down each tree by multi-step speculative sampling.

    A child x is accepted with probability min(1, p(x) / q(x)), where q is the distribution that it
    was drawn from (without replacement: less the siblings before it). After a rejection p becomes
    max(p − q, 0) renormalised, and the next sibling is tried. A deterministic draft is accepted
    with probability p(x), and a rejection leaves p without x; so is a child for which the drafter
    had no token of any probability left. Greedy rows are the limit in which p is all on the best
    token. Every level is computed, whether it counts or not.

    Args are those of `accept_naive`.
    """
    batch = len(drafts.tokens)
    at = torch.arange(batch, device=logits.device)
    node = torch.zeros(batch, dtype=torch.long, device=logits.device)
    walking = active
    target = distribution(logits[:, 0], temperature)
    path, new, count = [node], [], walking.long()
    for depth, (_, places) in enumerate(drafts.levels):
        children = drafts.children[at, node]  # (B, K)
        siblings = Siblings.after(at, node, drafts, temperature, target)
        accepted, following = torch.zeros_like(walking), node
        token_after = torch.zeros_like(node)
        for place in range(places.shape[2]):
            child = children[:, place]
            matters = walking & ~accepted & (child >= 0)
            child = child.clamp(min=0)
            token = drafts.tokens[at, child][:, None]
            is_point = drafts.is_point(at, child)[:, None]
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
        target = torch.where(accepted[:, None], distribution(logits[at, node], temperature), target)
        path.append(node)
        new.append(token_after)
        count = count + accepted
    after = choose(target[:, None], torch.full_like(node, AFTER)[:, None])
    tokens = torch.cat([*(token[:, None] for token in new), torch.zeros_like(after)], 1)
    tokens = tokens.scatter(1, (count - 1).clamp(min=0)[:, None], after)
    return Accepted(torch.stack(path, 1), count, tokens)


def accept_traversal(
    logits: Tensor, drafts: Drafts, active: Tensor, temperature: Tensor, choose: Choose
) -> Accepted:
    """Judge all nodes of each tree at once, from the leaves up (traversal verification).

    The target's mass for a node does not depend on any coin, only on the drafts before it
    (`share_out`). A node passes with the share that its children have left of its own, and the
    token after it is drawn from the rest of the target's distribution there. The root has the share
    1, and passes when no other node does.

    Args are those of `accept_naive`.
    """
    batch, size = drafts.tokens.shape
    at = torch.arange(batch, device=logits.device)[:, None]
    # The last place takes what padding gives
    given = torch.zeros(batch, size + 1, dtype=torch.float64, device=logits.device)
    given[:, 0] = 1.0
    left = given.clone()
    for nodes, places in drafts.levels:
        nodes, nowhere = nodes.clamp(min=0), nodes < 0
        shares, rest, _ = share_out(
            given.gather(1, nodes), nodes, places, logits, drafts, temperature
        )
        children = torch.where(places < 0, size, places).flatten(1)
        given.scatter_(1, children, shares.flatten(1))
        left.scatter_(1, torch.where(nowhere, size, nodes), rest)
        left.scatter_(1, children, shares.flatten(1))
    numbers = torch.arange(size, device=logits.device).expand(batch, -1)
    passed = coin(left[:, :size], ACCEPT + numbers, choose) & (numbers > 0)
    there = drafts.children >= 0  # (B, N, K)
    below = drafts.children.clamp(min=0).flatten(1)
    some = passed  # of a node and all below it
    for _ in range(len(drafts.levels)):
        some = some | (some.gather(1, below).view_as(there) & there).any(-1)
    node = torch.zeros(batch, dtype=torch.long, device=logits.device)
    walking, count = active, active.long()
    path, new = [node], []
    for _ in range(len(drafts.levels)):  # the first in post-order is in the first subtree with any
        children = drafts.children[at[:, 0], node]
        found = (children >= 0) & some.gather(1, children.clamp(min=0))
        walking = walking & found.any(1)
        child = children.gather(1, found.long().argmax(1, keepdim=True))[:, 0]
        node = torch.where(walking, child, node)
        path.append(node)
        new.append(drafts.tokens.gather(1, node[:, None]))
        count = count + walking
    last = node[:, None]
    _, _, target = share_out(
        given.gather(1, last), last, drafts.children[at, last], logits, drafts, temperature
    )
    after = choose(target, torch.full_like(last, AFTER))
    tokens = torch.cat([*new, torch.zeros_like(after)], 1)
    tokens = tokens.scatter(1, (count - 1).clamp(min=0)[:, None], after)
    return Accepted(torch.stack(path, 1), count, tokens)


def share_out(
    share: Tensor, nodes: Tensor, places: Tensor, logits: Tensor, drafts: Drafts,
    temperature: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Divide the share (B, n) of nodes (B, n) among their children.

    With a the node's share, p the target's distribution and q the distribution that a child x was
    drawn from, the child gets min(1, a·p(x) / q(x)). The rest max(a·p − q, 0), of mass s, stays:
    for the next child p is that renormalised, and a is s / (s + 1 − a), the share among the cases
    in which all children before were rejected.

    Args:
        places: (B, n, K), the children, −1 for none.

    Returns the children's shares (B, n, K), the rest of the share (B, n), and the rest of the
    target's distribution (B, n, V).
    """
    at = torch.arange(len(nodes), device=nodes.device)[:, None]
    target = distribution(logits[at, nodes], temperature)
    siblings = Siblings.after(at, nodes, drafts, temperature, target)
    share = share[..., None]
    shares = []
    for place in range(places.shape[2]):
        child = places[..., place].clamp(min=0)
        there = places[..., place : place + 1] >= 0
        token = drafts.tokens[at, child][..., None]
        is_point = drafts.is_point(at, child)[..., None]
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


@dataclass
class Siblings:
    """Distributions from which some nodes' children were drawn, one after the other.

    Attributes:
        offered: (…, V), the drafter's distribution after each node; None if all children are
            deterministic.
        taken: (…, V), tokens that earlier siblings have taken; independent siblings take none.
    """

    offered: Tensor | None
    taken: Tensor
    independent: bool

    @classmethod
    def after(
        cls, at: Tensor, nodes: Tensor, drafts: Drafts, temperature: Tensor, like: Tensor
    ) -> Siblings:
        """Return the siblings of nodes (B, …) of rows at (B, …).

        like (…, V) is the target's distribution there.
        """
        offered = None
        if drafts.logits is not None and drafts.drawn_by is not None:
            offered = distribution(drafts.logits[at, drafts.drawn_by[at, nodes]], temperature)
        return cls(offered, torch.zeros_like(like, dtype=torch.bool), drafts.independent)

    def drawn_from(self, token: Tensor, is_point: Tensor) -> Tensor:
        """Return the next child's distribution (…, V).

        All of it is on its token (…, 1) if the child is deterministic, point (…, 1), or the drafter
        had no probability left.
        """
        point = torch.zeros_like(self.taken, dtype=torch.float64).scatter_(-1, token, 1.0)
        if self.offered is None:
            return point
        left = self.offered.masked_fill(self.taken, 0.0)
        total = left.sum(-1, keepdim=True)
        return torch.where(is_point | (total == 0), point, left / total)

    def take(self, token: Tensor, out: Tensor) -> None:
        """Take tokens (…, 1) out of the distribution of later siblings, where out (…, 1)."""
        if self.independent:
            return
        self.taken = self.taken.scatter(-1, token, out | self.taken.gather(-1, token))
