"""Train a drafter that reads its target's hidden states (`stree.models.hidden_states`).

At certain tokens a drafter has the target's features; further down a draft it has only its own.
Training covers both: in one pass, with the features of random runs of tokens left out, or in
several passes, in which every token is also read as a drafted one (`stree.models.multi_step`).

Shapes: B rows of a batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stree.common.errors import UsageError, require_fitting
from stree.models.config import HybridConfig
from stree.models.multi_step import require_ahead

AHEAD = 3  # passes for a drafter to go on from that reads its own states: trees of four levels


@dataclass(frozen=True)
class FeatureConfig:
    """Hidden states that a drafter reads of its target, and how it is trained to read them.

    Args:
        layers: the target's layers whose outputs are read, in order; null takes an early, a middle
            and the last one, or those that the drafter of model.start_from reads.
        own: further down a draft the drafter reads its own last hidden state.
        eagle: the drafter is an EAGLE-3 head: its first attention reads [embedding, hidden state].
            Without model.drafter it has one layer of the target's dimensions.
        ahead: number of further passes; the k-th reads each token as the k-th of a draft. For
            drafters of Mamba-2 layers, attention and MLPs. 0: one pass with features left out.
        ahead_decay: weight of a token as the k-th of a draft, relative to its weight as the one
            before; one pass per token is drawn, with chances in proportion to these weights.
        unknown_share: average share of the tokens that are read without features; null is half of
            them in one pass and none in several.
        longest_run: most tokens without features in a row, as deep as drafts go.
    """

    layers: list[int] | None = None
    own: bool = False
    eagle: bool = False
    ahead: int = 0
    ahead_decay: float = 0.8
    unknown_share: float | None = None
    longest_run: int = 5

    def require_sensible(self) -> None:
        """Raise UsageError for values out of range.

        The constructor does not check: the parser tries values there, and would wrap the error.
        """
        require_fitting(self, {
            "unknown_share": (0 <= self.share < 1, "from 0 to below 1"),
            "longest_run": (self.longest_run >= 1, "at least 1"),
            "ahead": (self.ahead >= 0, "at least 0"),
            "ahead_decay": (0 < self.ahead_decay <= 1, "above 0 and at most 1"),
        }, "model.features.")
        if self.own and not self.ahead:
            raise UsageError(
                "model.features.own is learnt in passes ahead: set model.features.ahead to the "
                "depth of the trees that will be drafted, less one"
            )
        if self.eagle and not self.own:
            raise UsageError(
                "model.features.eagle is for a drafter that reads its own hidden states further "
                "down a draft: set model.features.own to true, and model.features.ahead"
            )

    @property
    def share(self) -> float:
        """Share of the tokens that are read without features, from 0 to below 1."""
        if self.unknown_share is None:
            return 0.0 if self.ahead else 0.5
        return self.unknown_share

    @property
    def ahead_weight(self) -> float:
        """Total weight of a token in the further passes, relative to its weight in the first."""
        return sum(self.ahead_decay**depth for depth in range(1, self.ahead + 1))

    def layers_of(self, target: HybridConfig) -> tuple[int, ...]:
        if self.layers is not None:
            return tuple(self.layers)
        return default_layers(target.num_layers)

    def added_to(self, drafter: HybridConfig, target: HybridConfig) -> HybridConfig:
        """Return the drafter's architecture with these features of the target.

        Raises UsageError for layers that the target does not have.
        """
        reading = drafter.reading(self.layers_of(target), target, self.own)
        return reading.replace(eagle_inputs=True) if self.eagle else reading

    def known(self, shape: Sequence[int], chance: torch.Generator) -> Tensor:
        """Draw the tokens read with features, (B, T) bool; unknown runs have 1 to `longest_run`."""
        drawn: dict[str, Any] = dict(device=chance.device, generator=chance)
        begins = torch.rand(*shape, **drawn) < self._chance_of_a_run()
        lengths = torch.randint(1, self.longest_run + 1, tuple(shape), **drawn)
        lengths = torch.where(begins, lengths, 0)
        unknown = torch.zeros_like(begins)
        for back in range(self.longest_run):
            unknown |= torch.roll(lengths, back, dims=1) > back
        return ~unknown

    def _chance_of_a_run(self) -> float:
        """Find, by bisection, the chance that a run without features begins at a token.

        A token is known when no run covers it; a run of at most L tokens that begins j tokens
        before covers it with a chance of p · (L − j) / L.
        """
        low, high, length = 0.0, 1.0, self.longest_run
        for _ in range(50):
            chance, known = (low + high) / 2, 1.0
            for back in range(length):
                known *= 1 - chance * (length - back) / length
            low, high = (low, chance) if known < 1 - self.share else (chance, high)
        return low

    def depths(self, segment_ids: Tensor, chance: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw a depth from 1 to `ahead` per token (B, T), with chances in proportion to weight.

        The second tensor (B, T) bool is True where that many tokens of the same sequence come
        before.
        """
        chances = self.ahead_decay ** torch.arange(self.ahead, device=segment_ids.device).float()
        drawn = chances.multinomial(segment_ids.numel(), replacement=True, generator=chance)
        depths = 1 + drawn.view_as(segment_ids)
        begin = torch.arange(segment_ids.shape[1], device=depths.device) - depths
        there = segment_ids.gather(1, begin.clamp(min=0)) == segment_ids
        return depths, there & (begin >= 0)


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Return an early, a middle and the last layer, by index."""
    return tuple(sorted({num_layers // 6, num_layers // 2, num_layers - 1}))


def features_of(
    drafter: HybridConfig,
    given: FeatureConfig | None,
    activation_checkpointing: bool,
) -> FeatureConfig | None:
    """Return how the drafter learns its features; None when it reads none.

    Raises UsageError for options that do not go with features.
    """
    if not drafter.feature_layers:
        return None
    own = drafter.own_features
    features = given or FeatureConfig(
        list(drafter.feature_layers), own, drafter.eagle_inputs, AHEAD if own else 0
    )
    features.require_sensible()
    if features.ahead:
        require_ahead(drafter)
    if drafter.own_features != features.own:
        raise UsageError(
            f"model.features.own is {features.own}, the drafter of model.start_from "
            f"{'reads' if drafter.own_features else 'does not read'} its own hidden states: "
            "train it as it was (model.features.own and model.features.ahead)"
        )
    if features.ahead and activation_checkpointing:
        raise UsageError(
            "model.features.ahead keeps what its passes share: leave "
            "model.activation_checkpointing out"
        )
    return features
