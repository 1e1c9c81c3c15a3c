"""Mixture of MLPs, of which each token chooses a few, in plain PyTorch: twins of `experts.py`.

Shapes: R rows (tokens of all sequences), E experts, K of them chosen by a row, I an expert's width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stree_kernels.contracts import Router, Scaled
from stree_kernels.naive.pointwise import activated
from stree_kernels.naive.products import dequantised

ALL_ROWS = 64  # whose outputs of all experts exist at once


def choose_experts(
    logits: Tensor, correction: Tensor | None, router: Router
) -> tuple[Tensor, Tensor]:
    """Return weights in logits' dtype and indices of the chosen experts, (R, K) each.

    Args:
        logits: (R, E) in fp32 or wider.
        correction: (E,) of a router by sigmoid, else None.
        router: The rule.
    """
    if router.softmax:
        best, chosen = logits.topk(router.top, dim=-1)
        others = best if router.normalised else logits
        return (best - others.logsumexp(-1, keepdim=True)).exp() * router.scale, chosen
    scores = logits.sigmoid()
    assert correction is not None
    corrected = scores + correction
    if router.top_groups < router.groups:
        grouped = corrected.unflatten(-1, (router.groups, -1))
        best_two = grouped.topk(2, dim=-1).values.sum(-1)
        best_groups = best_two.topk(router.top_groups, dim=-1).indices
        allowed = torch.zeros_like(best_two, dtype=torch.bool).scatter(1, best_groups, True)
        corrected = grouped.masked_fill(~allowed[..., None], -torch.inf).flatten(-2)
    chosen = corrected.topk(router.top, dim=-1).indices
    weights = scores.gather(1, chosen)
    if router.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + router.floor)
    return weights * router.scale, chosen


def experts(
    rows: Tensor, weights: Tensor, chosen: Tensor, up: Tensor | Scaled, down: Tensor | Scaled,
    kind: str,
) -> Tensor:
    """Compute down(activation(up·x)) of each row's experts, weighed and added up.

    No step waits for the device. Weights in 8 bits are written out in rows' dtype first.

    Args:
        rows: (R, D).
        weights: (R, K).
        chosen: (R, K), indices of experts.
        up: (E, I, D), or (E, 2·I, D) with a gate above it.
        down: (E, D, I).
        kind: As in `activated`.

    Returns parts of a sum, (S, R, D) in rows' dtype or wider; here S = 1.
    """
    weights = weights.to(rows.dtype)
    if chosen.numel() <= up.shape[0]:
        up, down = _numbers(up[chosen], rows.dtype), _numbers(down[chosen], rows.dtype)
        return _by_the_chosen(rows, weights, up, down, kind)[None]
    up, down = _numbers(up, rows.dtype), _numbers(down, rows.dtype)
    pieces = (each.split(ALL_ROWS) for each in (rows, weights, chosen))
    results = [_by_all(r, w, c, up, down, kind) for r, w, c in zip(*pieces, strict=True)]
    return torch.cat(results)[None]


def _numbers(weight: Tensor | Scaled, dtype: torch.dtype) -> Tensor:
    return weight if isinstance(weight, Tensor) else dequantised(weight, dtype)


def _by_the_chosen(rows: Tensor, weights: Tensor, up: Tensor, down: Tensor, kind: str) -> Tensor:
    """Compute few rows: read only the chosen experts' weights, (R, K, …) each, for each row."""
    inner = torch.einsum("rd,rkid->rki", rows, up)
    inner = activated(inner, kind) * weights[..., None]
    return torch.einsum("rki,rkdi->rd", inner, down)


def _by_all(
    rows: Tensor, weights: Tensor, chosen: Tensor, up: Tensor, down: Tensor, kind: str
) -> Tensor:
    """Compute every expert's products for every row: each weight is read once."""
    shape = len(rows), len(up)
    scale = weights.new_zeros(shape).scatter(1, chosen, weights).t()[..., None]
    unchosen = torch.ones(shape, dtype=torch.bool, device=rows.device).scatter(1, chosen, False)
    inner = activated(torch.matmul(rows, up.transpose(1, 2)), kind)
    # Filled, not multiplied: rows that have not chosen the expert may hold anything
    inner = (inner * scale).masked_fill(unchosen.t()[..., None], 0)
    return torch.bmm(inner, down.transpose(1, 2)).sum(0)
