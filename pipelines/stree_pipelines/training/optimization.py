"""Build the optimiser, and compute the learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer

from stree.common.errors import require_fitting, require_owned

OptimizerKind = Literal["adamw", "muon"]


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW or Muon, with weight decay on matrices only and a learning rate by step.

    Args:
        kind: adamw, or muon: the momentum of the layers' projection matrices is orthogonalised
            (Jordan et al. 2024), and all else updated by AdamW. A matrix's update has the size that
            AdamW's usually has, so an lr is of the same order (Liu et al. 2025, arXiv:2502.16982).
        lr: peak learning rate.
        schedule: cosine, or wsd (warm-up, stable, decay): lr until the last decay_share of the
            steps. Each export then ends a decay phase of its own, branched off the training.
        min_lr_ratio: learning rate at the schedule's end, as a share of `lr`.
        warmup_steps: linear from lr / warmup_steps to lr.
        decay_steps: optimiser step at which the cosine ends; null is trainer.max_steps.
        decay_share: with wsd, the share of an export's steps that are its decay (default: 0.2).
        weight_decay: of the projection matrices; not of embeddings, norms, biases, conv and A, D.
        betas: AdamW's.
        eps: AdamW's.
        momentum: Muon's (default: 0.95).
    """

    kind: OptimizerKind = "adamw"
    lr: float = 1e-3
    schedule: Literal["cosine", "wsd"] = "cosine"
    min_lr_ratio: float = 0.1
    warmup_steps: int = 20
    decay_steps: int | None = None
    decay_share: float | None = None
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float | None = None

    def __post_init__(self) -> None:
        require_owned(self, {
            "decay_steps": ("schedule", "cosine"),
            "decay_share": ("schedule", "wsd"),
            "momentum": ("kind", "muon"),
        }, "model.optimizer.")
        share, momentum = self.decay_share, self.momentum
        require_fitting(self, {
            "lr": (self.lr > 0, "above 0"),
            "min_lr_ratio": (0 <= self.min_lr_ratio <= 1, "from 0 to 1"),
            "warmup_steps": (self.warmup_steps >= 0, "at least 0"),
            "decay_share": (share is None or 0 < share <= 1, "above 0 and at most 1"),
            "momentum": (momentum is None or 0 <= momentum < 1, "at least 0 and below 1"),
        }, "model.optimizer.")

    @property
    def branches(self) -> bool:
        """True when each export ends a decay phase of its own (schedule wsd)."""
        return self.schedule == "wsd"

    def decay_begin(self, num_steps: int) -> int:
        """Return the step, out of `num_steps`, at which a wsd training begins to decay."""
        share = 0.2 if self.decay_share is None else self.decay_share
        return num_steps - max(1, round(share * num_steps))


def learning_rate(step: int, num_steps: int, config: OptimizerConfig) -> float:
    """Compute the learning rate of the update that follows `step` updates, out of `num_steps`.

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


# Rules by parameter


def is_decayed(name: str, parameter: Tensor) -> bool:
    """Return True for a matrix, or a stack of matrices, that is no embedding, nor Mamba-1's A."""
    stacked = name.endswith((".experts.up", ".experts.down"))  # a matrix per expert
    others = "embed_tokens" in name or name.endswith("A_log")
    return (parameter.ndim == 2 or stacked) and not others


def is_orthogonalised(name: str, parameter: Tensor) -> bool:
    """Return True when Muon updates the parameter: a matrix that is no embedding and no head.

    A stack of experts is not (PyTorch's Muon takes matrices only). Weights that lie in one matrix,
    such as in_proj's parts, count as one.
    """
    is_head = "lm_head" in name or "head_down" in name
    return is_decayed(name, parameter) and parameter.ndim == 2 and not is_head


def num_moments(name: str, parameter: Tensor, kind: OptimizerKind) -> int:
    """Count the numbers that the optimiser keeps per number of the parameter: 1 or 2."""
    return 1 if kind == "muon" and is_orthogonalised(name, parameter) else 2


def make_optimizer(
    named_parameters: Iterable[tuple[str, Tensor]], config: OptimizerConfig, fused: bool
) -> Optimizer:
    """Make the optimiser of all parameters that need a gradient.

    fused: AdamW's one kernel for many weights.
    """
    matrices: list[Tensor] = []
    decayed: list[Tensor] = []
    kept: list[Tensor] = []
    for name, parameter in named_parameters:
        if not parameter.requires_grad:
            continue
        if config.kind == "muon" and is_orthogonalised(name, parameter):
            matrices.append(parameter)
        else:
            (decayed if is_decayed(name, parameter) else kept).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    adamw = AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr, betas=config.betas, eps=config.eps, fused=fused,
    )
    if config.kind == "adamw":
        return adamw
    muon = Muon(
        matrices, lr=config.lr, weight_decay=config.weight_decay,
        momentum=0.95 if config.momentum is None else config.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    return JoinedOptimizer(muon, adamw)


class JoinedOptimizer(Optimizer):
    """Several optimisers of different parameters as one, with their groups and their state."""

    def __init__(self, *parts: Optimizer) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._parts = parts
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self._parts:
            part.state = self.state
            part.param_groups = [next(groups) for _ in part.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()  # loading made new groups and a new state
