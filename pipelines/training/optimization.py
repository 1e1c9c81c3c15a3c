"""The optimiser's settings, and the learning rate as a function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from stree.errors import UsageError


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with decay on matrices only, and a learning rate that is a function of the step.

    Args:
        lr: peak learning rate.
        schedule: cosine, or wsd (warm-up, stable, decay): lr until the last decay_share of the
            steps. Each export then ends a decay of its own, which the training branches off to.
        min_lr_ratio: where the schedule ends, as a share of `lr`.
        warmup_steps: linear from lr / warmup_steps to lr.
        decay_steps: optimiser step at which the cosine ends; null is trainer.max_steps.
        decay_share: of wsd, which share of an export's steps are its decay (default: 0.2).
        weight_decay: of the projection matrices; not of embeddings, norms, biases, conv and A, D.
        betas: AdamW's.
        eps: AdamW's.
    """

    lr: float = 1e-3
    schedule: Literal["cosine", "wsd"] = "cosine"
    min_lr_ratio: float = 0.1
    warmup_steps: int = 20
    decay_steps: int | None = None
    decay_share: float | None = None
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if self.lr <= 0 or not 0 <= self.min_lr_ratio <= 1 or self.warmup_steps < 0:
            raise UsageError(
                f"optimizer: wanted lr > 0, 0 <= min_lr_ratio <= 1 and warmup_steps >= 0, got "
                f"{self.lr}, {self.min_lr_ratio} and {self.warmup_steps}"
            )
        owners = {"decay_steps": "cosine", "decay_share": "wsd"}
        for name, owner in owners.items():
            if getattr(self, name) is not None and self.schedule != owner:
                raise UsageError(
                    f"model.optimizer.{name} is an option of {owner}, model.optimizer.schedule is "
                    f"{self.schedule}: leave one of them out"
                )
        if self.decay_share is not None and not 0 < self.decay_share <= 1:
            raise UsageError(
                f"model.optimizer.decay_share is {self.decay_share}, wanted above 0 and at most 1"
            )

    @property
    def branches(self) -> bool:
        """Whether an export has a decay phase of its own."""
        return self.schedule == "wsd"

    def decay_begin(self, num_steps: int) -> int:
        """After how many of `num_steps` steps a training by wsd begins to decay."""
        share = 0.2 if self.decay_share is None else self.decay_share
        return num_steps - max(1, round(share * num_steps))


def learning_rate(step: int, num_steps: int, config: OptimizerConfig) -> float:
    """Learning rate of the update that follows `step` updates, out of `num_steps`.

    The decay of wsd falls with the square root of its progress, which Haegele et al. (2024) found
    to end lower than a line.
    """
    warmup = min(1.0, (step + 1) / max(1, config.warmup_steps))
    if config.schedule == "wsd":
        begin = config.decay_begin(num_steps)
        progress = min(max(step - begin, 0) / (num_steps - begin), 1.0)
        left = 1 - math.sqrt(progress)
        return config.lr * warmup * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)
    if step < config.warmup_steps:
        return config.lr * warmup
    progress = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)
