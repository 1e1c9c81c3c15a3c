"""Random initial weights of a model."""

from __future__ import annotations

import math

import torch
from torch import nn

from stree.models.layers.gated_delta import GatedDeltaNet
from stree.models.layers.mamba import Mamba2
from stree.models.layers.mlp import Experts


@torch.no_grad()
def initialise(model: nn.Module, num_layers: int) -> None:
    """Draw weights by GPT-2's scheme for projections and Mamba-2's for dt, A and D."""
    into_residual = 0.02 / math.sqrt(2 * num_layers)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            closes_block = name.endswith(("o_proj", "out_proj", "down_proj", "shared_use.out"))
            nn.init.normal_(module.weight, std=into_residual if closes_block else 0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        elif isinstance(module, Experts):
            nn.init.normal_(module.up, std=0.02)
            nn.init.normal_(module.down, std=into_residual)
        elif isinstance(module, Mamba2 | GatedDeltaNet):
            dt = torch.empty_like(module.dt_bias).uniform_(math.log(1e-3), math.log(0.1)).exp()
            module.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus⁻¹
            module.A_log.copy_(torch.empty_like(module.A_log).uniform_(1, 16).log())
