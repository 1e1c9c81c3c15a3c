"""What a drafter reads of its target: the residual stream after some of the target's layers.

The feature of a token is the target's state at that token, from which the next one is predicted. A
drafter reads token i beside the feature of token i − 1, which is known as soon as token i is
certain: no call waits for another.

Shapes: B sequences, T tokens (or tree nodes), F channels of all features of a token, D the
drafter's width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stree.errors import UsageError
from stree.models.config import HybridConfig
from stree.models.parts import RMSNorm
from stree_kernels import ops


class Features:
    """Takes the residual stream after some layers out of a target's calls."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._streams: dict[int, list[Tensor]] = defaultdict(list)

    def take(self, layer: int, x: Tensor) -> None:
        """Told of the stream x (B, T, ·) after each layer, and after it of the next tokens'."""
        if layer in self.layers:
            self._streams[layer].append(x)

    @property
    def values(self) -> Tensor:
        """(B, T, F) of all tokens."""
        streams = [self._streams[layer] for layer in self.layers]
        return torch.cat([torch.cat(each, 1) if each[1:] else each[0] for each in streams], -1)


class FeatureInput(nn.Module):
    """What a drafter adds to a token's embedding: the feature of the token before it, each layer's
    normed, and all projected; for a token whose feature is not known a learnt vector, to which a
    drafted one adds a projection of the drafter's own hidden state, if it has one."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        width, count = config.feature_width, len(config.feature_layers)
        self.norm = RMSNorm(width, config.rms_norm_eps, count)
        self.proj = nn.Linear(width, config.d_model, bias=False)
        self.unknown = nn.Parameter(torch.zeros(config.d_model))
        self.own = (
            nn.Linear(config.d_model, config.d_model, bias=False) if config.own_features else None
        )

    def of_tokens(self, features: Tensor) -> Tensor:
        """(…, D) of features (…, F), for the tokens after them."""
        return self.proj(self.norm(features.to(self.unknown.dtype)))

    def of_nodes(self, features: Tensor) -> Tensor:
        """The same of few rows, in a step of decoding."""
        return ops.linear(self.norm(features.to(self.unknown.dtype)), self.proj.weight)

    def of_drafts(self, hidden: Tensor) -> Tensor:
        """What is added to drafted tokens, (…, D), given the drafter's own last hidden state after
        the token before each, (…, D)."""
        if self.own is None:
            return self.unknown.expand(hidden.shape)
        return F.linear(hidden, self.own.weight, self.unknown)

    def forward(
        self, features: Tensor, segment_ids: Tensor | None = None, known: Tensor | None = None
    ) -> Tensor:
        """What is added to each token, (B, T, D), given the features (B, T, F) of the same tokens.
        Unknown are a sequence's first token's, and those outside known (B, T) bool."""
        inputs = self.of_tokens(features).roll(1, dims=1)
        known = torch.ones_like(features[..., 0], dtype=torch.bool) if known is None else known
        known = known.clone()
        known[:, 0] = False
        if segment_ids is not None:
            known[:, 1:] &= segment_ids[:, 1:] == segment_ids[:, :-1]
        return torch.where(known[..., None], inputs, self.unknown.to(inputs.dtype))


def require_features_of(drafter: HybridConfig, target: HybridConfig) -> None:
    """Raises `UsageError` when a drafter reads features that are not this target's."""
    wanted = drafter.target_width, drafter.target_num_layers
    if drafter.feature_layers and wanted != (target.d_model, target.num_layers):
        raise UsageError(
            f"the drafter reads features of a target of {wanted[1]} layers of width {wanted[0]}, "
            f"this one has {target.num_layers} of width {target.d_model}: draft for the target "
            "that it was distilled from"
        )
