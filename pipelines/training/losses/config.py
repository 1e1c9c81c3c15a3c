"""Describe the divergence of a distillation in a config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stree.common.errors import UsageError, require_fitting
from stree_pipelines.training.losses.divergences import (
    LK,
    Divergence,
    ForwardKL,
    JensenShannon,
    ReverseKL,
    TotalVariation,
)

# Defaults of the options that only some kinds have.
DEFAULTS = {"beta": 0.5, "eta": 3.0}
OPTIONS_OF = {"jsd": ("beta",), "lk": ("eta",)}


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
        for name in DEFAULTS:
            owners = [kind for kind, names in OPTIONS_OF.items() if name in names]
            if getattr(self, name) is not None and self.kind not in owners:
                raise UsageError(
                    f"model.loss.{name} is an option of {' and '.join(owners)}, model.loss.kind is "
                    f"{self.kind}: leave one of them out"
                )
        require_fitting(self, {
            "beta": (0 < self.option("beta") < 1, "between 0 and 1"),
            "eta": (self.option("eta") >= 0, "at least 0"),
        }, "model.loss.")

    def option(self, name: str) -> float:
        value = getattr(self, name)
        return DEFAULTS[name] if value is None else value

    @property
    def divergence(self) -> Divergence:
        kinds: dict[str, Divergence] = {
            "forward_kl": ForwardKL(),
            "reverse_kl": ReverseKL(),
            "jsd": JensenShannon(self.option("beta")),
            "tv": TotalVariation(),
            "lk": LK(self.option("eta")),
        }
        return kinds[self.kind]
