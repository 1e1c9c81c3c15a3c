"""A model without its head: embedding, layers and final norm; and random initial weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from stree.models.config import HybridConfig
from stree.models.hidden_states import (
    DraftInputs,
    EagleInputs,
    HiddenStateProjection,
    MtpInputs,
    NormedEmbeddings,
)
from stree.models.layers.gated_delta import GatedDeltaNet
from stree.models.layers.layer import Layer, SharedTransformer
from stree.models.layers.mamba import Mamba2
from stree.models.layers.mamba1 import Mamba1
from stree.models.layers.mlp import Experts
from stree.models.layers.norm import RMSNorm


def _embedding(vocab_size: int, d_model: int) -> nn.Embedding:
    if torch.empty(0).is_meta:  # PyTorch would import 900 modules to initialise meta tensors.
        return nn.Embedding(vocab_size, d_model, _weight=torch.empty(vocab_size, d_model))
    return nn.Embedding(vocab_size, d_model)


class Backbone(nn.Module):
    """Embedding, layers and final norm (the `model.` of the parameter names)."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.embed_tokens = _embedding(config.vocab_size, config.d_model)
        first_caches = [0]
        for layer in range(config.num_layers):
            first_caches.append(first_caches[-1] + len(config.mixers(layer)))
        self.layers = nn.ModuleList(
            Layer(config, i, first_caches[i]) for i in range(config.num_layers)
        )
        self.norm = RMSNorm(
            config.d_model, config.rms_norm_eps, bias=config.final_norm_bias
        )
        if config.feature_layers:
            kind: type[DraftInputs] = HiddenStateProjection
            if config.fused_inputs or config.eagle_inputs:
                kind = MtpInputs if config.fused_inputs else EagleInputs
            self.features: DraftInputs = kind(config)  # type: ignore[call-arg]
        if config.num_shared_blocks:
            self.shared = nn.ModuleList(
                SharedTransformer(config) for _ in range(config.num_shared_blocks)
            )

    @property
    def shared_blocks(self) -> Sequence[nn.Module]:
        return list(self.shared) if hasattr(self, "shared") else []

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the stream (B, T, D) of tokens (B, T) before inputs are added to it."""
        x = self.embed_tokens(tokens)
        return self.features.of_embeddings(x) if hasattr(self, "features") else x

    def begin(self, tokens: Tensor, inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the stream (B, T, D) of tokens (B, T), and what layers read beside it.

        inputs (B, T, D) are a drafter's (`DraftInputs`); None has none.
        """
        x = self.embed(tokens)
        if hasattr(self, "features"):
            return self.features.joined(x, inputs)
        x = x if inputs is None else x + inputs
        return x, x

    @property
    def normed_embeddings(self) -> NormedEmbeddings | None:
        """Inputs of an MTP or EAGLE head; None for other models."""
        inputs = getattr(self, "features", None)
        return inputs if isinstance(inputs, NormedEmbeddings) else None

    def mixers(self) -> list[tuple[int, nn.Module]]:
        """Return every mixer with the index of its cache."""
        return [each for layer in cast(list[Layer], self.layers) for each in layer.mixers()]


@torch.no_grad()
def initialise(model: nn.Module, num_layers: int) -> None:
    """Draw weights by GPT-2's scheme for projections and Mamba's for dt, A and D."""
    into_residual = 0.02 / math.sqrt(2 * num_layers)
    for name, module in model.named_modules():
        if name.endswith("dt_proj"):  # Mamba-1's
            bound = module.in_features**-0.5  # type: ignore[operator]
            nn.init.uniform_(module.weight, -bound, bound)  # type: ignore[arg-type]
            _draw_dt(module.bias)  # type: ignore[arg-type]
        elif isinstance(module, nn.Linear | nn.Embedding):
            closes_block = name.endswith(("o_proj", "out_proj", "down_proj", "shared_use.out"))
            nn.init.normal_(module.weight, std=into_residual if closes_block else 0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        elif isinstance(module, Experts):
            nn.init.normal_(module.up, std=0.02)
            nn.init.normal_(module.down, std=into_residual)
        elif isinstance(module, Mamba2 | GatedDeltaNet):
            _draw_dt(module.dt_bias)
            module.A_log.copy_(torch.empty_like(module.A_log).uniform_(1, 16).log())
        elif isinstance(module, Mamba1):
            states = torch.arange(1, 1 + module.shape.d_state, device=module.A_log.device)
            module.A_log.copy_(states.log().expand_as(module.A_log))


def _draw_dt(bias: nn.Parameter) -> None:
    """Draw biases whose softplus is log-uniform in [0.001, 0.1]."""
    dt = torch.empty_like(bias).uniform_(math.log(1e-3), math.log(0.1)).exp()
    bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus⁻¹
