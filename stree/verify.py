"""Which drafts of a tree the target accepts, and the token that follows them.

A path is a list of nodes from the root; its drafts are all but the first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from stree.sampling import Chooser, RandomChooser, without
from stree.tree import TokenTree, law_rows
from stree_kernels import ops


def verify_greedy(
    best: Sequence[int], tokens: Sequence[int], tree: TokenTree
) -> tuple[list[int], int]:
    """Follow the target's own first choices through the tree.

    Args: best (N,) the target's argmax at each node, tokens (N,) the tree's.
    Returns the accepted path and the target's choice at its end.
    """
    path = [0]
    while True:
        wanted = best[path[-1]]
        child = next((node for node in tree.children[path[-1]] if tokens[node] == wanted), None)
        if child is None:
            return path, wanted
        path.append(child)


def verify_multi_step(
    target_laws: Tensor,
    draft_laws: Tensor | None,
    tokens: Tensor,
    tree: TokenTree,
    choose: Chooser,
) -> tuple[Tensor, Tensor, Tensor]:
    """Multi-step speculative sampling, for siblings drawn without replacement.

    At a node each child in turn is accepted with probability min(1, p(x) / q(x)); a rejection
    leaves p ← norm(max(p − q, 0)) and q ← q without x. When none is left, the next token comes
    from p (SpecInfer, Algorithm 2; without replacement as in Jeon et al. 2024). The tokens that
    come out have the target's law exactly, whatever q is. A child that was not drawn at all is as
    if from the law that has nothing else: it is accepted with probability p(x), and a rejection
    takes x out of p.

    The walk visits every place that a child could be in, and settles by masks whether it counts:
    nothing waits for the device, and a choice that does not matter is certain.

    Args: target_laws (N, V), draft_laws (I, V) of the nodes with children (`parents_of`), or None
    when no child was drawn, tokens (N,).
    Returns nodes (max_depth + 1,) of which the first `length` (1,) are the accepted path, and the
    token (1,) after it.
    """
    children, exists, rows = tables(tree, target_laws.device)
    node = torch.zeros(1, dtype=torch.long, device=target_laws.device)
    walking = torch.ones_like(node, dtype=torch.bool)
    residual, path, length = target_laws[:1], [node], torch.ones_like(node)
    for level in tree.levels[:-1]:
        law = None if draft_laws is None else draft_laws.index_select(0, rows[node])
        taken = torch.zeros_like(residual, dtype=torch.bool)
        accepted, child_accepted = torch.zeros_like(walking), node
        for place in range(max(len(tree.children[each]) for each in level)):
            child = children[node, place]
            matters = walking & ~accepted & exists[node, place]
            token = tokens[child][:, None]
            if law is None:
                proposal = torch.zeros_like(residual).scatter(1, token, 1.0)
            else:
                proposal = without(law, taken)
            keep = (residual.gather(1, token) / proposal.gather(1, token)).clamp(max=1.0)
            keep = torch.where(matters[:, None], keep, 1.0)
            kept = choose(torch.cat([1.0 - keep, keep], dim=1)).bool()
            rejected = (matters & ~kept)[:, None]
            left = _normalised((residual - proposal).clamp(min=0.0), otherwise=residual)
            residual = torch.where(rejected, left, residual)
            taken = taken.scatter(1, token, rejected | taken.gather(1, token))
            child_accepted = torch.where(matters & kept, child, child_accepted)
            accepted = accepted | (matters & kept)
        node, walking = child_accepted, accepted
        residual = torch.where(accepted[:, None], target_laws.index_select(0, node), residual)
        path.append(node)
        length = length + accepted
    return torch.cat(path), length, choose(residual)


def verify_sampled(
    target_laws: Tensor,
    draft_laws: Tensor | None,
    tokens: Tensor,
    tree: TokenTree,
    choose: Chooser,
) -> tuple[Tensor, Tensor, Tensor]:
    """`verify_multi_step`, by the fused kernels where they serve."""
    fused = isinstance(choose, RandomChooser) and ops.samples_fused(target_laws)
    if not fused or draft_laws is None or tree.num_nodes == 1:
        return verify_multi_step(target_laws, draft_laws, tokens, tree, choose)
    assert isinstance(choose, RandomChooser)
    widths = level_widths(tree)
    uniforms = choose.uniforms(sum(widths) + 1)
    where = tables(tree, target_laws.device)
    return ops.accept_sampled(target_laws, draft_laws, tokens, *where, widths, uniforms)


def level_widths(tree: TokenTree) -> list[int]:
    """How many places for children each level has."""
    return [max(len(tree.children[node]) for node in level) for level in tree.levels[:-1]]


def _normalised(law: Tensor, otherwise: Tensor) -> Tensor:
    """`law` (1, V) summing to 1. Its total is 0 only when p = q, and then nothing is rejected."""
    total = law.sum(-1, keepdim=True)
    return torch.where(total > 0, law / total, otherwise)


@functools.lru_cache(maxsize=256)
def tables(tree: TokenTree, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Children (N, widest) with 0 where `exists` (N, widest) is false, and rows (N,) of draft
    laws."""
    widest = max(1, *map(len, tree.children))
    padded = [[*nodes, *[0] * (widest - len(nodes))] for nodes in tree.children]
    exists = [[place < len(nodes) for place in range(widest)] for nodes in tree.children]
    rows = [max(row, 0) for row in law_rows(tree)]
    return (
        torch.tensor(padded, device=device),
        torch.tensor(exists, device=device),
        torch.tensor(rows, device=device),
    )
