"""Which drafts of a tree the target accepts, and the token that follows them.

A path is a list of nodes from the root; its drafts are all but the first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stree.sampling import Chooser, without
from stree.tree import TokenTree


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
    draft_laws: Tensor,
    law_rows: Sequence[int],
    tokens: Sequence[int],
    tree: TokenTree,
    choose: Chooser,
) -> tuple[list[int], int]:
    """Multi-step speculative sampling, for siblings drawn without replacement.

    At a node each child in turn is accepted with probability min(1, p(x) / q(x)); a rejection
    leaves p ← norm(max(p − q, 0)) and q ← q without x. When none is left, the next token comes
    from p (SpecInfer, Algorithm 2; without replacement as in Jeon et al. 2024). The tokens that
    come out have the target's law exactly, whatever q is.

    Args: target_laws (N, V), draft_laws (I, V) of the nodes with children, law_rows (N,) the row
    of each such node in draft_laws, tokens (N,).
    Returns the accepted path and the token after it.
    """
    path = [0]
    residual = target_laws[0]
    while True:
        node, accepted = path[-1], None
        children = tree.children[node]
        if children:
            law = draft_laws[law_rows[node]]
            taken = torch.zeros_like(law, dtype=torch.bool)
        for child in children:
            proposal = without(law, taken)
            token = tokens[child]
            keep = (residual[token] / proposal[token]).clamp(max=1.0)
            if int(choose(torch.stack([1.0 - keep, keep]))):
                accepted = child
                break
            residual = _normalised((residual - proposal).clamp(min=0.0), otherwise=residual)
            taken[token] = True
        if accepted is None:
            return path, int(choose(residual))
        path.append(accepted)
        residual = target_laws[accepted]


def _normalised(law: Tensor, otherwise: Tensor) -> Tensor:
    """`law` summing to 1. Its total is 0 only when p = q, and then nothing is ever rejected."""
    total = law.sum()
    return torch.where(total > 0, law / total, otherwise)
