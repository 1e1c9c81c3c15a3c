"""Describe the divergence of a distillation in a config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stree.common.errors import require_fitting, require_owned
from stree_pipelines.training.losses.divergences import (
    LK,
    Divergence,
    ForwardKL,
    JensenShannon,
    ReverseKL,
    TotalVariation,
)

# Options that only some kinds have
OWNERS = {"beta": ("kind", "jsd"), "eta": ("kind", "lk")}


@dataclass(frozen=True)
class LossConfig:
    """Divergence from the target.

    Args:
        kind: forward_kl, reverse_kl, jsd (generalised Jensen-Shannon), tv (total variation: one
            minus the chance of acceptance; start it from a trained drafter), or lk (from forward KL
            to tv as a token's acceptance grows).
        beta: of jsd, the target's share in the mixture, between 0 and 1 (default: 0.5).
        eta: of lk, forward KL's share is exp(-eta * acceptance) (default: 3).
    """

    kind: Literal["forward_kl", "reverse_kl", "jsd", "tv", "lk"] = "forward_kl"
    beta: float | None = None
    eta: float | None = None

    def __post_init__(self) -> None:
        require_owned(self, OWNERS, "model.loss.")
        require_fitting(self, {
            "beta": (self.beta is None or 0 < self.beta < 1, "between 0 and 1"),
            "eta": (self.eta is None or self.eta >= 0, "at least 0"),
        }, "model.loss.")

    @property
    def divergence(self) -> Divergence:
        kinds: dict[str, Divergence] = {
            "forward_kl": ForwardKL(),
            "reverse_kl": ReverseKL(),
            "jsd": JensenShannon(0.5 if self.beta is None else self.beta),
            "tv": TotalVariation(),
            "lk": LK(3.0 if self.eta is None else self.eta),
        }
        return kinds[self.kind]
