"""A model without its head: embedding, layers and final norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from stree.models.config import HybridConfig
from stree.models.hidden_states import HiddenStateProjection
from stree.models.layers.layer import Layer, SharedTransformer
from stree.models.layers.norm import RMSNorm


def _embedding(vocab_size: int, d_model: int) -> nn.Embedding:
    if torch.empty(0).is_meta:  # PyTorch would import 900 modules to draw numbers that are nowhere
        return nn.Embedding(vocab_size, d_model, _weight=torch.empty(vocab_size, d_model))
    return nn.Embedding(vocab_size, d_model)


class Backbone(nn.Module):
    """Embedding, layers and final norm (the `model.` of the parameter names)."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.embed_tokens = _embedding(config.vocab_size, config.d_model)
        slots = [0]
        for layer in range(config.num_layers):
            slots.append(slots[-1] + len(config.mixers(layer)))
        self.layers = nn.ModuleList(Layer(config, i, slots[i]) for i in range(config.num_layers))
        self.norm = RMSNorm(config.d_model, config.rms_norm_eps)
        if config.feature_layers:
            self.features = HiddenStateProjection(config)
        if config.num_shared_blocks:
            self.shared = nn.ModuleList(
                SharedTransformer(config) for _ in range(config.num_shared_blocks)
            )

    @property
    def shared_blocks(self) -> Sequence[nn.Module]:
        return list(self.shared) if hasattr(self, "shared") else []

    def mixers(self) -> list[tuple[int, nn.Module]]:
        """Return every mixer with the slot of its cache."""
        return [each for layer in cast(list[Layer], self.layers) for each in layer.mixers()]
