"""Count the arithmetic of a distillation, and name the peaks of GPUs.

Operations are counted over weights: 2 per weight and token for the target's pass, 6 for the
drafter's two; of the heads only for tokens that count in the loss. Attention, scans, experts and
recomputation in the backward pass are left out: a share of the peak is the training's need, not all
of its work.
"""

from __future__ import annotations

import torch

from stree.models.config import HybridConfig
from stree.models.model import HybridModel

# bf16 operations per second without sparsity, of the SXM modules, by NVIDIA's data sheets
PEAKS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}


def distillation_operations(
    target: HybridConfig | None,
    drafter: HybridConfig,
    num_tokens: int,
    num_counted: int,
    passes: int = 1,
) -> dict[str, int]:
    """Count multiplications and additions by part of a distillation step.

    passes: passes of the drafter over each token. target: None when its outputs come from a cache.
    """
    in_layers, head = _weights(drafter)
    parts = {"drafter": 6 * (passes * num_tokens * in_layers + num_counted * head)}
    if target is not None:
        in_layers, head = _weights(target)
        parts["target"] = 2 * num_tokens * in_layers + 2 * num_counted * head
    return parts


def _weights(config: HybridConfig) -> tuple[int, int]:
    """Count the weights of matrices that each token is multiplied with, and of the head."""
    with torch.device("meta"):
        model = HybridModel(config)
    in_layers = sum(
        weight.numel()
        for name, weight in model.named_parameters()
        if weight.ndim == 2 and "embed_tokens" not in name and weight is not model.head_weight
    )
    return in_layers, model.head_weight.numel()
