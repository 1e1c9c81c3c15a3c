"""Hidden states of the target as inputs of a drafter: a tap on the target, and a projection.

The feature of a token is the target's residual stream at that token after some layers, from which
the next token is predicted. A drafter reads token i with the feature of token i − 1, which is known
as soon as token i is certain: no call waits for another.

Shapes: B sequences, T tokens (or tree nodes), F channels of all features of a token, D the
drafter's width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stree.common.errors import UsageError
from stree.models.config import HybridConfig
from stree.models.layers.norm import RMSNorm
from stree_kernels import ops


class HiddenStateTap:
    """Collect the residual stream after some layers during a target's calls."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._streams: dict[int, list[Tensor]] = defaultdict(list)

    def take(self, layer: int, x: Tensor) -> None:
        """Keep the stream x (B, T, ·) after a layer, if the layer is asked for.

        The chunks of a prompt come one after the other.
        """
        if layer in self.layers:
            self._streams[layer].append(x)

    @property
    def streams(self) -> list[Tensor]:
        """Streams (B, T, ·) of all chunks, one a layer."""
        streams = [self._streams[layer] for layer in self.layers]
        return [torch.cat(each, 1) if each[1:] else each[0] for each in streams]

    @property
    def values(self) -> Tensor:
        """Features (B, T, F) of all tokens: the streams of all layers, concatenated."""
        return torch.cat(self.streams, -1)


GAIN = 0.02  # initial size of the projected features: that of random embeddings


class HiddenStateProjection(nn.Module):
    """Projection of the previous token's feature, which a drafter adds to a token's embedding.

    Each layer's part is normed, all are projected, and the result is normed again, or it would
    outgrow the embedding as soon as the projection learns. A token without a known feature gets a
    learnt vector. A drafted token gets a projection of the drafter's own hidden state, if
    `HybridConfig.own_features` is set.
    """

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        width, eps = config.feature_width, config.rms_norm_eps
        self.norm = RMSNorm(width, eps, len(config.feature_layers))
        self.proj = nn.Linear(width, config.d_model, bias=False)
        self.gain = RMSNorm(config.d_model, eps)
        self.unknown = nn.Parameter(torch.zeros(config.d_model))
        self.reads_own = config.own_features
        if self.reads_own:
            self.own = nn.Linear(config.d_model, config.d_model, bias=False)
            self.own_gain = RMSNorm(config.d_model, eps)
        self.begin(GAIN)

    def begin(self, gain: float) -> None:
        """Set the initial size of the vectors that are added to embeddings."""
        for norm in (self.gain, self.own_gain) if self.reads_own else (self.gain,):
            nn.init.constant_(norm.weight, gain)

    def of_tokens(self, features: Tensor) -> Tensor:
        """Project features (…, F) to the inputs (…, D) of the tokens after them."""
        return self.gain(self.proj(self.norm(features.to(self.unknown.dtype))))

    def of_nodes(self, features: Tensor, nodes: Tensor) -> Tensor:
        """Project the features of some nodes of trees in a decoding step.

        features (B, N, F) are those of all nodes, nodes (B, M) the indices; an index without a
        node stands for the last. Returns (B, M, D).
        """
        norm, features = self.norm, features.to(self.unknown.dtype)
        normed = ops.norm_at(features, nodes, norm.weight, norm.eps, norm.groups)
        return self._gained(ops.linear(normed, self.proj.weight), self.gain)

    def of_drafts(self, hidden: Tensor) -> Tensor:
        """Project the drafter's own hidden states (…, D) to the inputs of the drafts after them."""
        if not self.reads_own:
            return self.unknown.expand(hidden.shape)
        if torch.is_grad_enabled():  # ops have no gradient
            return self.own_gain(self.own(hidden))
        return self._gained(ops.linear(hidden, self.own.weight), self.own_gain)

    def _gained(self, x: Tensor, norm: RMSNorm) -> Tensor:
        return ops.add_rms_norm(x, None, norm.weight, norm.eps)[1]

    def forward(
        self, features: Tensor, segment_ids: Tensor | None = None, known: Tensor | None = None
    ) -> Tensor:
        """Return the inputs (B, T, D) of tokens, given the features (B, T, F) of the same tokens.

        The first token of each sequence, and tokens after one outside known (B, T) bool, get the
        learnt vector. segment_ids (B, T) separate samples packed into one row.
        """
        inputs = self.of_tokens(features).roll(1, dims=1)
        known = torch.ones_like(features[..., 0], dtype=torch.bool) if known is None else known
        known = known.clone()
        known[:, 0] = False
        if segment_ids is not None:
            known[:, 1:] &= segment_ids[:, 1:] == segment_ids[:, :-1]
        return torch.where(known[..., None], inputs, self.unknown.to(inputs.dtype))


def require_features_of(drafter: HybridConfig, target: HybridConfig) -> None:
    """Raise `UsageError` when a drafter reads features of another kind of target."""
    wanted = drafter.target_width, drafter.target_num_layers
    if drafter.feature_layers and wanted != (target.d_model, target.num_layers):
        raise UsageError(
            f"the drafter reads features of a target of {wanted[1]} layers of width {wanted[0]}, "
            f"this one has {target.num_layers} of width {target.d_model}: draft for the target "
            "that it was distilled from"
        )
