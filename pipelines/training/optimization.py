"""The optimiser's settings, and the learning rate as a function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stree.errors import UsageError


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with decay on matrices only, and a learning rate that is a function of the step.

    Args:
        lr: peak learning rate.
        min_lr_ratio: where the cosine ends, as a share of `lr`.
        warmup_steps: linear from lr / warmup_steps to lr.
        decay_steps: optimiser step at which the cosine ends; null is trainer.max_steps.
        weight_decay: of the projection matrices; not of embeddings, norms, biases, conv and A, D.
        betas: AdamW's.
        eps: AdamW's.
    """

    lr: float = 1e-3
    min_lr_ratio: float = 0.1
    warmup_steps: int = 20
    decay_steps: int | None = None
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if self.lr <= 0 or not 0 <= self.min_lr_ratio <= 1 or self.warmup_steps < 0:
            raise UsageError(
                f"optimizer: wanted lr > 0, 0 <= min_lr_ratio <= 1 and warmup_steps >= 0, got "
                f"{self.lr}, {self.min_lr_ratio} and {self.warmup_steps}"
            )


def learning_rate(step: int, num_steps: int, config: OptimizerConfig) -> float:
    """Learning rate of the update that follows `step` updates, out of `num_steps`."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)
