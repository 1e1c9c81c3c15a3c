"""One decoding step of many sequences: draft, verify, accept, commit, over tensors only.

Shapes: B rows, N nodes of the largest tree, V vocabulary, M tokens that a step yields at most.
Each row has its own tree, length, settings and random numbers. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from stree.forest import Forest
from stree.models.hybrid import HybridModel
from stree.rows import ACCEPT, AFTER, DRAFT, LEVEL, Rows
from stree.sampling import without
from stree.tree import TokenTree


class Choose(Protocol):
    """Where random choices come from; `RowChooser` is one."""

    def __call__(self, probs: Tensor, places: Tensor) -> Tensor:
        """Indices (B, n) drawn from probs (B, n, V), for places of use (B, n)."""
        ...


@dataclass
class Proposal:
    """Drafted trees, and how their tokens were drawn.

    tokens (B, N), the roots first. logits (B, I, V): what each node with children, in the order of
    `Forest.drawn_by`, drew its children from: without replacement (the best ones in greedy rows).
    None: each token is a point mass, which a drafter without randomness proposes. finite (B,).
    """

    tokens: Tensor
    logits: Tensor | None
    finite: Tensor


@dataclass
class Accepted:
    """What a step decided.

    path (B, M) nodes from the root, of which count (B,) are accepted (0 in idle rows); tokens
    (B, M), of which as many are new: the drafts on the path, and the target's own.
    """

    path: Tensor
    count: Tensor
    tokens: Tensor


class Drafter(Protocol):
    """Anything that fills trees for a batch of rows."""

    def clear(self, row: int) -> None:
        """Forget a row's sequence."""

    def read(self, row: int, tokens: Tensor) -> None:
        """Read more of a row's prompt, tokens (T,)."""

    def draft(
        self, block: Tensor, forest: Forest, rows: Rows, choose: Choose, bound: int
    ) -> Proposal:
        """Fill the trees of the first B rows; block (B, 1 + M) has how many tokens are new to the
        drafter, and the tokens, the root last; bound, cache slots that a target's call looks at."""
        ...


class ModelDrafter:
    """A small language model that drafts, level by level, one call a level.

    It first reads the tokens that became certain since its last draft, as a chain, then the inner
    nodes of the trees as trees of their own that grow level by level. Nothing of a draft but the
    certain tokens reaches its states.
    """

    def __init__(self, model: HybridModel, num_rows: int, max_length: int, max_nodes: int) -> None:
        self.model = model
        self.cache = model.new_cache(max_length, max_nodes, num_rows)
        self.cache.path[:] = torch.arange(max_nodes)  # certain tokens are a chain
        self.cache.variant.copy_(torch.arange(num_rows))

    def clear(self, row: int) -> None:
        self.cache.narrow(row, 1).reset()

    def read(self, row: int, tokens: Tensor) -> None:
        self.model.prefill(tokens[None], self.cache.at(row))

    def draft(
        self, block: Tensor, forest: Forest, rows: Rows, choose: Choose, bound: int
    ) -> Proposal:
        batch, longest = block.shape[0], block.shape[1] - 1
        cache = self.cache.narrow(0, batch)
        bound = min(bound + longest, cache.num_slots)
        width, device = self.model.config.d_conv, block.device
        chains = Forest.of([TokenTree.chain(longest - 1)] * batch, device).topology(width)
        hidden = self.model.tree_hidden(block[:, 1:], chains, cache, bound=bound)
        count = block[:, 0]
        cache.path_length.copy_(count)
        last = (count - 1).clamp(min=0)[:, None]
        tokens = torch.zeros(batch, forest.num_nodes, dtype=torch.long, device=device)
        tokens[:, :1] = block[:, 1:].gather(1, last)
        hidden = hidden.gather(1, last[..., None].expand(-1, -1, hidden.shape[2]))
        inner, first = None, 0
        drawn_from: list[Tensor] = []
        for level in forest.levels:
            if drawn_from:
                inner = inner or forest.inner_topology(width)
                nodes = level.nodes.clamp(min=0)
                given = tokens.gather(1, nodes)
                hidden = self.model.tree_hidden(given, inner, cache, first, bound)
                first += nodes.shape[1]
            logits = self.model.logits(hidden)
            draw_children(logits, level.places, rows, choose, tokens)
            drawn_from.append(logits)
        if not drawn_from:
            return Proposal(tokens, None, torch.ones_like(rows.active))
        logits = torch.cat(drawn_from, dim=1)
        return Proposal(tokens, logits, logits.amax(-1).isfinite().all(-1))


def draw_children(
    logits: Tensor, places: Tensor, rows: Rows, choose: Choose, tokens: Tensor
) -> None:
    """Children of some nodes, from logits (B, n, V), written to their places (B, n, k) of tokens
    (B, N): the best k in greedy rows, in others a sample without replacement."""
    width = places.shape[2]
    drawn = logits.topk(width, dim=-1).indices
    if rows.sampled:
        probs = rows.distribution(logits)
        taken = torch.zeros_like(probs, dtype=torch.bool)
        sampled = []
        for rank in range(width):
            chosen = choose(without(probs, taken), DRAFT + places[..., rank].clamp(min=0))
            sampled.append(chosen)
            taken = taken.scatter(-1, chosen[..., None], True)
        greedy = (rows.temperature == 0)[:, None, None]
        drawn = torch.where(greedy, drawn, torch.stack(sampled, dim=-1))
    slots = F.pad(tokens, (0, 1))  # the last, at −1, takes what no node does
    places = torch.where(places < 0, tokens.shape[1], places)
    slots.scatter_(1, places.flatten(1), drawn.flatten(1))
    tokens.copy_(slots[:, :-1])


def accept_best(logits: Tensor, tokens: Tensor, forest: Forest, rows: Rows) -> Accepted:
    """Follow the target's first choices down each tree, from logits (B, N, V)."""
    best = logits.argmax(-1)
    node = torch.zeros(len(best), 1, dtype=torch.long, device=best.device)
    walking = rows.active[:, None]
    path, new, count = [node], [best.gather(1, node)], walking.long()
    for _ in forest.levels:
        matching = (forest.parents == node) & (tokens == new[-1])
        walking = walking & matching.any(1, keepdim=True)
        node = torch.where(walking, matching.long().argmax(1, keepdim=True), node)
        path.append(node)
        new.append(best.gather(1, node))
        count = count + walking
    return Accepted(torch.cat(path, 1), count[:, 0], torch.cat(new, 1))


def accept_multi_step(
    logits: Tensor, proposal: Proposal, forest: Forest, rows: Rows, choose: Choose
) -> Accepted:
    """Multi-step speculative sampling without replacement (SpecInfer; Jeon et al. 2024).

    A child x is accepted with probability min(1, p(x) / q(x)), where q is what it was drawn from;
    after a rejection p becomes max(p − q, 0) renormalised, and the next sibling is tried. A point
    mass is accepted with probability p(x), and a rejection leaves p without x. Greedy rows are
    the limit in which p is all on the best token. Each level is computed whether it counts or not.

    Args: logits (B, N, V) of the target.
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
            drawn_from = point if offered is None else without(offered, taken)
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


@dataclass
class Step:
    """A decoding step of the first rows of a batch, in place on the caches.

    `run` returns a report (B, 2 + 2·M): 1 when all of a row's logits were finite, 0 when the
    target's were not, −1 when the drafter's; how many tokens are new, the tokens, and the path.
    """

    target: Any
    cache: Any
    drafter: Drafter | None

    @torch.no_grad()
    def run(
        self,
        block: Tensor,
        forest: Forest,
        rows: Rows,
        choose: Choose,
        bound: int,
        mark: Callable[[str], None] = lambda phase: None,
    ) -> Tensor:
        """block (B, 1 + M): how many tokens the drafter has not read yet, and the tokens, the root
        last; bound, cache slots in use at most; mark is told when each phase ends."""
        proposal = self._draft(block, forest, rows, choose, bound)
        mark("draft")
        cache = self.cache.narrow(0, len(block))
        logits = self.target.forest_forward(proposal.tokens, forest, cache, bound)
        mark("verify")
        if rows.sampled:
            accepted = accept_multi_step(logits, proposal, forest, rows, choose)
        else:
            accepted = accept_best(logits, proposal.tokens, forest, rows)
        mark("accept")
        cache.accept(accepted.path, accepted.count)
        mark("commit")
        finite = torch.where(proposal.finite, 1, -1)
        finite = torch.where(logits.amax(-1).isfinite().all(-1), finite, 0)
        return torch.cat(
            [finite[:, None], accepted.count[:, None], accepted.tokens, accepted.path], dim=1
        )

    def _draft(
        self, block: Tensor, forest: Forest, rows: Rows, choose: Choose, bound: int
    ) -> Proposal:
        if self.drafter is not None and forest.num_nodes > 1:
            return self.drafter.draft(block, forest, rows, choose, bound)
        root = block[:, 1:].gather(1, (block[:, :1] - 1).clamp(min=0))
        return Proposal(root, None, torch.ones_like(rows.active))
