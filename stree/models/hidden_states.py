"""Hidden states of the target as inputs of a drafter: a tap on the target, and kinds of inputs.

The feature of a token is the target's residual stream at that token after some layers, from which
the next token is predicted. A drafter reads token i with the feature of token i − 1, which is known
as soon as token i is certain: no call waits for another. Drafters of ours add a projection of it to
the token's embedding (`HiddenStateProjection`), heads for multi-token prediction project both
(`MtpInputs`), and EAGLE-3's heads read the two side by side in their first attention layer
(`EagleInputs`).

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
from stree_kernels.contracts import Stream


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


class DraftInputs(nn.Module):
    """Base of the inputs that a drafter makes of hidden states.

    The stream of a token begins with its embedding, as `of_embeddings` makes it, plus an input that
    depends on a hidden state: the target's of the token before it, or, for a drafted token, the
    drafter's own after its final norm.

    Attributes:
        proj: Projects the target's normed features.
        unknown: (D,), the input of a token without a known hidden state.
        reads_own: Whether inputs of drafted tokens differ from `unknown`.
        skips_first: Whether the drafter never reads a sequence's first token, before which there is
            no hidden state.
        reads_stream: Whether the drafter's own hidden states are those before its final norm.
    """

    proj: nn.Linear
    unknown: nn.Parameter
    reads_own: bool
    skips_first = False
    reads_stream = False

    def of_tokens(self, features: Tensor) -> Tensor:
        """Return the inputs (…, D) of the tokens after those with the features (…, F)."""
        raise NotImplementedError

    def of_nodes(self, features: Tensor, nodes: Tensor) -> Tensor:
        """Return the inputs (B, M, D) of the tokens after some nodes of trees in a decoding step.

        features (B, N, F) are those of all nodes, nodes (B, M) the indices; an index without a
        node stands for the last.
        """
        raise NotImplementedError

    def of_drafts(self, hidden: Tensor) -> Tensor:
        """Return the inputs (…, D) of the drafts after the drafter's own hidden states (…, D)."""
        raise NotImplementedError

    def of_embeddings(self, embedded: Tensor) -> Tensor:
        """Return the stream (…, D) of embeddings (…, D), to which inputs are added."""
        return embedded

    def joined(self, embedded: Tensor, inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the stream (B, T, D) before the first layer, and what layers read beside it.

        embedded (B, T, D) is that of `of_embeddings`; inputs None stands for those of tokens alone.
        """
        x = embedded if inputs is None else embedded + inputs
        return x, x

    def forward(
        self, features: Tensor, segment_ids: Tensor | None = None, known: Tensor | None = None
    ) -> Tensor:
        """Return the inputs (B, T, D) of tokens, given the features (B, T, F) of the same tokens.

        The first token of each sequence, and tokens after one outside known (B, T) bool, get
        `unknown`. segment_ids (B, T) separate samples packed into one row.
        """
        inputs = self.of_tokens(features).roll(1, dims=1)
        known = torch.ones_like(features[..., 0], dtype=torch.bool) if known is None else known
        known = known.clone()
        known[:, 0] = False
        if segment_ids is not None:
            known[:, 1:] &= segment_ids[:, 1:] == segment_ids[:, :-1]
        return torch.where(known[..., None], inputs, self.unknown.to(inputs.dtype))


class HiddenStateProjection(DraftInputs):
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
        return self.gain(self.proj(self.norm(features.to(self.unknown.dtype))))

    def of_nodes(self, features: Tensor, nodes: Tensor) -> Tensor:
        norm, features = self.norm, features.to(self.unknown.dtype)
        normed = ops.norm_at(features, nodes, norm.weight, norm.eps, norm.groups)
        return self._gained(ops.linear(normed, self.proj.weight), self.gain)

    def of_drafts(self, hidden: Tensor) -> Tensor:
        if not self.reads_own:
            return self.unknown.expand(hidden.shape)
        if torch.is_grad_enabled():  # ops have no gradient
            return self.own_gain(self.own(hidden))
        return self._gained(ops.linear(hidden, self.own.weight), self.own_gain)

    def _gained(self, x: Tensor, norm: RMSNorm) -> Tensor:
        return ops.add_rms_norm(x, None, norm.weight, norm.eps)[1]


class NormedEmbeddings(DraftInputs):
    """Base of the inputs of heads that norm embeddings, and never read a sequence's first token."""

    reads_own = True
    skips_first = True  # training shifts tokens by one against hidden states

    def __init__(self, config: HybridConfig, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, config.d_model, bias=False)
        self.unknown = nn.Parameter(torch.zeros(config.d_model))
        self.embedding_norm = RMSNorm(config.d_model, config.rms_norm_eps)

    def of_stream(self, embedded: Stream, inputs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return `joined` in a call over trees, given embeddings before their norm."""
        raise NotImplementedError


class MtpInputs(NormedEmbeddings):
    """Inputs of a head for multi-token prediction: fc([norm(embedding); norm(hidden state)]).

    A head continues from h, the target's hidden state after the final norm of the target, or its
    own after the final norm of the head. Qwen's heads were trained so: vLLM's `Qwen3NextModel` and
    `Qwen3NextMultiTokenPredictor` return the normed stream, and the latter norms it once more
    (vllm/model_executor/models/qwen3_next.py and qwen3_next_mtp.py). Engines that gave the stream
    before the norm had fewer drafts accepted (LightLLM #1402: 1.80 instead of 2.74 tokens a call;
    llama.cpp #24025). transformers' `MtpModel` takes `hidden_states[-1]`, the normed one, too.

    fc is cut into the projection of embeddings and that of hidden states.
    """

    def __init__(self, config: HybridConfig) -> None:
        width, eps = config.d_model, config.rms_norm_eps
        super().__init__(config, width)
        self.target_norm = RMSNorm(width, eps)
        self.norm = RMSNorm(width, eps)
        self.embedding_proj = nn.Linear(width, width, bias=False)

    def of_tokens(self, features: Tensor) -> Tensor:
        return self.proj(self.norm(self.target_norm(features.to(self.unknown.dtype))))

    def of_nodes(self, features: Tensor, nodes: Tensor) -> Tensor:
        norm = self.target_norm
        features = features.to(self.unknown.dtype)
        return self.of_drafts(ops.norm_at(features, nodes, norm.weight, norm.eps, 1))

    def of_drafts(self, hidden: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # ops have no gradient
            return self.proj(self.norm(hidden))
        return ops.linear(Stream(hidden, self.norm.weight, self.norm.eps), self.proj.weight)

    def of_embeddings(self, embedded: Tensor) -> Tensor:
        return self.embedding_proj(self.embedding_norm(embedded))

    def of_stream(self, embedded: Stream, inputs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        x = ops.linear(embedded, self.embedding_proj.weight)
        return x if inputs is None else x + inputs, None


class EagleInputs(NormedEmbeddings):
    """Inputs of an EAGLE-3 head: fc of the target's hidden states, or the head's own stream.

    They are the stream before the first layer, whose attention reads [norm(embedding),
    norm(stream)], twice the width (SafeAILab's eagle/model/cnets.py; vLLM's llama_eagle3.py). The
    norms of later checkpoints, in `HybridConfig.eagle_norms`, are those of vLLM's `speculators`.
    """

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(config, config.feature_width)
        norms = config.eagle_norms
        self.reads_stream = "own" not in norms
        if "features" in norms or "each" in norms:
            groups = len(config.feature_layers) if "each" in norms else 1
            self.norm = RMSNorm(config.feature_width, config.rms_norm_eps, groups)

    def of_tokens(self, features: Tensor) -> Tensor:
        features = features.to(self.unknown.dtype)
        return self.proj(self.norm(features) if hasattr(self, "norm") else features)

    def of_nodes(self, features: Tensor, nodes: Tensor) -> Tensor:
        features = features.to(self.unknown.dtype)
        if hasattr(self, "norm"):
            norm = self.norm
            rows = ops.norm_at(features, nodes, norm.weight, norm.eps, norm.groups)
        else:
            nodes = nodes.clamp(max=features.shape[1] - 1)[..., None]
            rows = features.gather(1, nodes.expand(-1, -1, features.shape[2]))
        return ops.linear(rows, self.proj.weight)

    def of_drafts(self, hidden: Tensor) -> Tensor:
        return hidden

    def of_embeddings(self, embedded: Tensor) -> Tensor:
        return self.embedding_norm(embedded)

    def joined(self, embedded: Tensor, inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        x = self.unknown.expand_as(embedded) if inputs is None else inputs.to(embedded.dtype)
        return x, embedded

    def of_stream(self, embedded: Stream, inputs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        x, beside = self.joined(ops.norm(embedded), inputs)
        return x.contiguous(), beside


def first_apart(tokens: Tensor, segment_ids: Tensor | None) -> Tensor:
    """Return segment_ids (B, T) by which the first token of each sample is a sample of its own."""
    ids = torch.zeros_like(tokens) if segment_ids is None else segment_ids
    goes_on = torch.zeros_like(ids)
    goes_on[:, 1:] = ids[:, 1:] == ids[:, :-1]
    return 2 * ids + goes_on


def require_features_of(drafter: HybridConfig, target: HybridConfig) -> None:
    """Raise `UsageError` when a drafter reads features of another kind of target."""
    wanted = drafter.target_width, drafter.target_num_layers
    if drafter.feature_layers and wanted != (target.d_model, target.num_layers):
        raise UsageError(
            f"the drafter reads features of a target of {wanted[1]} layers of width {wanted[0]}, "
            f"this one has {target.num_layers} of width {target.d_model}: draft for the target "
            "that it was distilled from"
        )
