"""How much arithmetic a distillation is, and what a GPU can do of it.

Operations are counted over weights: 2 a weight and token for the target's pass, 6 for the drafter's
two; of the heads for tokens that count in the loss alone. Attention, scans, experts and what a
backward pass computes again are left out, so that a share of the peak is what training needs, not
what it does.
"""

from __future__ import annotations

import torch

from stree.models.config import HybridConfig
from stree.models.model import HybridModel

# Of bf16 products without sparsity a second, by NVIDIA's data sheets, of the SXM modules
PEAKS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}


def distillation_operations(
    target: HybridConfig | None,
    drafter: HybridConfig,
    num_tokens: int,
    num_counted: int,
    passes: int = 1,
) -> dict[str, int]:
    """Multiplications and additions by part, of a drafter that reads each token in so many passes
    and learns from a target that runs, or None from a cache."""
    in_layers, head = _weights(drafter)
    parts = {"drafter": 6 * (passes * num_tokens * in_layers + num_counted * head)}
    if target is not None:
        in_layers, head = _weights(target)
        parts["target"] = 2 * num_tokens * in_layers + 2 * num_counted * head
    return parts


def _weights(config: HybridConfig) -> tuple[int, int]:
    """Of matrices that each token is multiplied with, and of the head."""
    with torch.device("meta"):
        model = HybridModel(config)
    in_layers = sum(
        weight.numel()
        for name, weight in model.named_parameters()
        if weight.ndim == 2 and "embed_tokens" not in name and weight is not model.head_weight
    )
    return in_layers, model.head_weight.numel()
