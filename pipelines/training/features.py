"""How a drafter learns to read its target's features (`stree.models.features`).

At certain tokens a drafter has the target's features, further down a draft it has none. So that one
pass trains both, the features of random runs of tokens are left out.

Shapes: B rows of a batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stree.errors import UsageError
from stree.models.config import HybridConfig


@dataclass(frozen=True)
class FeatureConfig:
    """What a drafter reads of its target.

    Args:
        layers: of the target, whose outputs are read, in order; null takes an early, a middle and
            the last one.
        unknown_share: of the tokens, so many on average are read without features.
        longest_run: and at most so many of them one after the other, as deep as drafts go.
    """

    layers: list[int] | None = None
    unknown_share: float = 0.5
    longest_run: int = 5

    def __post_init__(self) -> None:
        if not 0 <= self.unknown_share < 1:
            raise UsageError(
                f"model.features.unknown_share is {self.unknown_share}, wanted from 0 to below 1"
            )
        if self.longest_run < 1:
            raise UsageError(f"model.features.longest_run is {self.longest_run}, wanted at least 1")

    def layers_of(self, target: HybridConfig) -> tuple[int, ...]:
        if self.layers is not None:
            return tuple(self.layers)
        return default_layers(target.num_layers)

    def added_to(self, drafter: HybridConfig, target: HybridConfig) -> HybridConfig:
        """The drafter that reads these features of that target. Raises UsageError for layers that
        it does not have."""
        return drafter.reading(self.layers_of(target), target)

    def known(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """(B, T) bool, by chance: runs of 1 to `longest_run` tokens are unknown, as are those where
        runs meet."""
        chance = self._chance_of_a_run()
        begins = torch.rand(*shape, device=device) < chance
        lengths = torch.randint(1, self.longest_run + 1, tuple(shape), device=device)
        lengths = torch.where(begins, lengths, 0)
        unknown = torch.zeros_like(begins)
        for back in range(self.longest_run):
            unknown |= torch.roll(lengths, back, dims=1) > back
        return ~unknown

    def _chance_of_a_run(self) -> float:
        """Of one that begins at a token: known is who has no run over it, of none of the tokens
        before, so the product of 1 − p · (L − j) / L over j = 0 … L − 1 is the known share."""
        low, high, length = 0.0, 1.0, self.longest_run
        for _ in range(50):
            chance, known = (low + high) / 2, 1.0
            for back in range(length):
                known *= 1 - chance * (length - back) / length
            low, high = (low, chance) if known < 1 - self.unknown_share else (chance, high)
        return low


def default_layers(num_layers: int) -> tuple[int, ...]:
    """An early, a middle and the last layer."""
    return tuple(sorted({num_layers // 6, num_layers // 2, num_layers - 1}))


def require_trainable(features: FeatureConfig | None, teacher_cache: str | None) -> None:
    """Raise UsageError for what a cache of the target's outputs has not kept."""
    if features is not None and teacher_cache is not None:
        raise UsageError(
            "model.teacher_cache has the target's law and no features of it: leave it out, or "
            "model.features"
        )
