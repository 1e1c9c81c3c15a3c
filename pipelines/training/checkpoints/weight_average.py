"""Keep an exponential moving average of the weights, which is exported in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stree.models.model import HybridModel


class WeightAverage:
    """Σ d^(t−i) w_i / Σ d^(t−i) over the weights w_i after steps 1 … t, with d the decay.

    Normalised as Adam's moments are: the weights before the first step have no part in it, even in
    a short training. The averages have the weights' dtype and device.
    """

    def __init__(self, model: HybridModel, decay: float) -> None:
        self.decay, self.num_steps = decay, 0
        self._trained = dict(model.named_parameters())
        self._averages = {name: each.detach().clone() for name, each in self._trained.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights into the average; call it after each step."""
        self.num_steps += 1
        share = (1 - self.decay) / (1 - self.decay**self.num_steps)
        torch._foreach_lerp_(list(self._averages.values()), list(self._trained.values()), share)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the model's weights and their averages, until the next swap."""
        if self.num_steps == 0:
            return
        for name, weight in self._trained.items():
            last = weight.clone()
            weight.copy_(self._averages[name])
            self._averages[name].copy_(last)

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps, "weights": dict(self._averages)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_steps = state["num_steps"]
        weights: Mapping[str, Tensor] = state["weights"]
        for name, average in self._averages.items():
            average.copy_(weights[name])
