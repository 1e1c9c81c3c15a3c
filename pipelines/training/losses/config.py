"""Describe the loss of a distillation in a config: its divergence and its tokens."""

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
    """Divergence from the target, and the share of tokens that count.

    Args:
        kind: forward_kl, reverse_kl, jsd (generalised Jensen-Shannon), tv (total variation: one
            minus the chance of acceptance; start it from a trained drafter), or lk (from forward KL
            to tv as a token's acceptance grows).
        beta: of jsd, the target's share in the mixture, between 0 and 1 (default: 0.5).
        eta: of lk, forward KL's share is exp(-eta * acceptance) (default: 3).
        reference: folder of a drafter distilled before from the same target. Tokens are then chosen
            by how much worse the drafter is on them than this one (AdaSPEC).
        keep: with reference, which share of the tokens counts (default: 0.4).
    """

    kind: Literal["forward_kl", "reverse_kl", "jsd", "tv", "lk"] = "forward_kl"
    beta: float | None = None
    eta: float | None = None
    reference: str | None = None
    keep: float | None = None

    def __post_init__(self) -> None:
        for name in DEFAULTS:
            owners = [kind for kind, names in OPTIONS_OF.items() if name in names]
            if getattr(self, name) is not None and self.kind not in owners:
                raise UsageError(
                    f"model.loss.{name} is an option of {' and '.join(owners)}, model.loss.kind is "
                    f"{self.kind}: leave one of them out"
                )
        if self.keep is not None and self.reference is None:
            raise UsageError(
                f"model.loss.keep is {self.keep}, and model.loss.reference is missing: name the "
                "drafter that tokens are chosen by"
            )
        require_fitting(self, {
            "beta": (0 < self.option("beta") < 1, "between 0 and 1"),
            "eta": (self.option("eta") >= 0, "at least 0"),
            "keep": (0 < self.kept_share <= 1, "above 0 and at most 1"),
        }, "model.loss.")

    def option(self, name: str) -> float:
        value = getattr(self, name)
        return DEFAULTS[name] if value is None else value

    @property
    def kept_share(self) -> float:
        return 0.4 if self.keep is None else self.keep

    @property
    def weighs_tokens(self) -> bool:
        """True when a token's weight depends on the drafter's loss there."""
        return self.reference is not None

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
