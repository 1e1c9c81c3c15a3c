"""How much each token counts for a loss: by what a better drafter could do there, and by whether
drafts ever come to it.

Shapes: B rows of a batch, T tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stree_pipelines.training.loss_config import LossConfig
from stree_pipelines.training.losses import MeasuredRows


def token_weights(
    config: LossConfig, mask: Tensor, drafter: MeasuredRows, reference: MeasuredRows | None
) -> Tensor:
    """(B, T) fp32, 0 outside `mask` (B, T) bool. A token's reach depends on its own sequence alone,
    so it is the same however a step's rows are shared out; which tokens are chosen is not.

    reference: of the drafter that `config.reference` names, with the same target and divergence.
    """
    weights = mask.float()
    if config.reach_depth is not None:
        weights = weights * reach(drafter.chance, mask, config.reach_depth)
    if reference is not None:
        gap = drafter.divergence - reference.divergence
        # Those that count stand for all, so that the step keeps its size.
        weights = weights * largest(gap, mask, config.kept_share) / config.kept_share
    return weights


def reach(chance: Tensor, mask: Tensor, depth: int) -> Tensor:
    """(B, T) fp32 in [0, 1]: how often a draft comes to a token, everything before it accepted,
    when drafts of `depth` tokens begin at every place with the same probability,

        r_t = 1/D Σ_{d=1..D} Π_{i=1..d−1} a_{t−i}

    with a the chance (B, T) that a token's draft is accepted, none outside `mask` (B, T) bool: a
    draft begins where an answer does, and goes on over no gap. What stands behind a likely
    rejection counts 1/D, for the drafts that begin there; masking the tokens behind the first
    rejection of each draft gives the same in expectation, with D times the rows.
    """
    accepted = torch.where(mask, chance, 0.0)
    reached = torch.ones_like(accepted)
    total = reached.clone()
    for _ in range(depth - 1):
        before = reached * accepted
        reached = torch.zeros_like(before)
        reached[:, 1:] = before[:, :-1]
        total += reached
    return total / depth


def largest(values: Tensor, mask: Tensor, share: float) -> Tensor:
    """(B, T) fp32, 1 for the ⌈share · M⌉ largest of the M values (B, T) in `mask`, else 0: the
    filter of AdaSPEC (Hu et al. 2025), whose values are by how much a drafter's divergence exceeds
    that of a reference of its size. What the reference could not learn either is left out."""
    count = math.ceil(share * int(mask.sum()))
    chosen = torch.zeros(mask.numel(), device=mask.device)
    ranked = torch.where(mask, values, -math.inf).reshape(-1)
    chosen[ranked.topk(count).indices] = 1.0
    return chosen.reshape(mask.shape) * mask
