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
from torch import Tensor, nn

from stree.common.errors import UsageError
from stree.models.config import HybridConfig
from stree.models.layers.norm import RMSNorm
from stree_kernels import ops


class HiddenStateTap:
    """Takes the residual stream after some layers out of a target's calls."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._streams: dict[int, list[Tensor]] = defaultdict(list)

    def take(self, layer: int, x: Tensor) -> None:
        """Told of the stream x (B, T, ·) after each layer, and after it of the next tokens'."""
        if layer in self.layers:
            self._streams[layer].append(x)

    @property
    def streams(self) -> list[Tensor]:
        """(B, T, ·) of each layer."""
        streams = [self._streams[layer] for layer in self.layers]
        return [torch.cat(each, 1) if each[1:] else each[0] for each in streams]

    @property
    def values(self) -> Tensor:
        """(B, T, F) of all tokens."""
        return torch.cat(self.streams, -1)


GAIN = 0.02  # of what is added to embeddings, to begin with: as large as those are drawn


class HiddenStateProjection(nn.Module):
    """What a drafter adds to a token's embedding: the feature of the token before it, each layer's
    normed, all projected, and normed again, or their size would drown the embedding as soon as the
    projection learns. For a token whose feature is not known it is a learnt vector; for a drafted
    one the same of the drafter's own hidden state, if it reads that."""

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
        """Set how much is added to embeddings to begin with."""
        for norm in (self.gain, self.own_gain) if self.reads_own else (self.gain,):
            nn.init.constant_(norm.weight, gain)

    def of_tokens(self, features: Tensor) -> Tensor:
        """(…, D) of features (…, F), for the tokens after them."""
        return self.gain(self.proj(self.norm(features.to(self.unknown.dtype))))

    def of_nodes(self, features: Tensor, nodes: Tensor) -> Tensor:
        """The same (B, M, D) of some nodes (B, M) of trees, given features (B, N, F) of all, in a
        step of decoding; a node that there is none of stands for the last."""
        norm, features = self.norm, features.to(self.unknown.dtype)
        normed = ops.norm_at(features, nodes, norm.weight, norm.eps, norm.groups)
        return self._gained(ops.linear(normed, self.proj.weight), self.gain)

    def of_drafts(self, hidden: Tensor) -> Tensor:
        """What is added to the drafted tokens after others, given the drafter's own last hidden
        states after these: (…, D) each."""
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
