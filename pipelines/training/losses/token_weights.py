"""Weigh tokens in a loss by how much a better drafter could gain there.

Shapes: B rows of a batch, T tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stree_pipelines.training.losses.config import LossConfig
from stree_pipelines.training.losses.distillation_loss import MeasuredRows


def token_weights(
    config: LossConfig, mask: Tensor, drafter: MeasuredRows, reference: MeasuredRows
) -> Tensor:
    """Return each token's weight, (B, T) fp32, 0 outside `mask` (B, T) bool.

    reference: of the drafter that `config.reference` names, with the same target and divergence.
    """
    gap = drafter.divergence - reference.divergence
    # The kept tokens stand for all, so that the step keeps its size.
    return largest(gap, mask, config.kept_share) / config.kept_share


def largest(values: Tensor, mask: Tensor, share: float) -> Tensor:
    """Mark the ⌈share · M⌉ largest of the M values in `mask` with 1, the rest with 0; (B, T) fp32.

    The filter of AdaSPEC (Hu et al. 2025): its values are how far a drafter's divergence exceeds
    that of a reference of its size. Tokens that the reference could not learn either are left out.
    """
    count = math.ceil(share * int(mask.sum()))
    chosen = torch.zeros(mask.numel(), device=mask.device)
    ranked = torch.where(mask, values, -math.inf).reshape(-1)
    chosen[ranked.topk(count).indices] = 1.0
    return chosen.reshape(mask.shape) * mask
