"""A model without its head: embedding, layers and final norm; and random initial weights.

Shapes: B batch, T tokens, D model width, F width of the features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from stree.models.cache import HybridCache
from stree.models.config import HybridConfig
from stree.models.hidden_states import (
    DraftInputs,
    EagleInputs,
    HiddenStateProjection,
    HiddenStateTap,
    MtpInputs,
    NormedEmbeddings,
    first_apart,
)
from stree.models.layers.attention import takes_packed
from stree.models.layers.gated_delta import GatedDeltaNet
from stree.models.layers.layer import Layer, SharedTransformer
from stree.models.layers.mamba import Mamba2
from stree.models.layers.mamba1 import Mamba1
from stree.models.layers.mlp import Experts
from stree.models.layers.norm import RMSNorm
from stree.models.layers.part import PrefillPass, TrainingPass, TreePass, product_dtype
from stree.models.layers.rotary import positions_of, rotary_angles
from stree.models.multi_step import MultiStepPass
from stree_kernels import naive
from stree_kernels.contracts import Stream
from stree_kernels.index_plan import whole_heads
from stree_kernels.segments import sample_bounds


def _embedding(vocab_size: int, d_model: int) -> nn.Embedding:
    if torch.empty(0).is_meta:  # PyTorch would import 900 modules to initialise meta tensors.
        return nn.Embedding(vocab_size, d_model, _weight=torch.empty(vocab_size, d_model))
    return nn.Embedding(vocab_size, d_model)


class Backbone(nn.Module):
    """Embedding, layers and final norm (the `model.` of the parameter names)."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = _embedding(config.vocab_size, config.d_model)
        first_caches = [0]
        for layer in range(config.num_layers):
            first_caches.append(first_caches[-1] + len(config.mixers(layer)))
        self.layers = nn.ModuleList(
            Layer(config, i, first_caches[i]) for i in range(config.num_layers)
        )
        self.norm = RMSNorm(
            config.d_model, config.rms_norm_eps, bias=config.final_norm_bias
        )
        if config.feature_layers:
            kind: type[DraftInputs] = HiddenStateProjection
            if config.fused_inputs or config.eagle_inputs:
                kind = MtpInputs if config.fused_inputs else EagleInputs
            self.features: DraftInputs = kind(config)  # type: ignore[call-arg]
        if config.num_shared_blocks:
            self.shared = nn.ModuleList(
                SharedTransformer(config) for _ in range(config.num_shared_blocks)
            )

    @property
    def shared_blocks(self) -> Sequence[nn.Module]:
        return list(self.shared) if hasattr(self, "shared") else []

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the stream (B, T, D) of tokens (B, T) before inputs are added to it."""
        x = self.embed_tokens(tokens)
        return self.features.of_embeddings(x) if hasattr(self, "features") else x

    def begin(self, tokens: Tensor, inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the stream (B, T, D) of tokens (B, T), and what layers read beside it.

        inputs (B, T, D) are a drafter's (`DraftInputs`); None has none.
        """
        x = self.embed(tokens)
        if hasattr(self, "features"):
            return self.features.joined(x, inputs)
        x = x if inputs is None else x + inputs
        return x, x

    @property
    def normed_embeddings(self) -> NormedEmbeddings | None:
        """Inputs of an MTP or EAGLE head; None for other models."""
        inputs = getattr(self, "features", None)
        return inputs if isinstance(inputs, NormedEmbeddings) else None

    def mixers(self) -> list[tuple[int, nn.Module]]:
        """Return every mixer with the index of its cache."""
        return [each for layer in cast(list[Layer], self.layers) for each in layer.mixers()]

    def rotary(self, positions: Tensor) -> Tensor | None:
        """Return angles (2, B, T, 1, D) of positions (B, T) for `whole_heads`; None if unused."""
        if not self.config.attn_layers:
            return None
        dtype = naive.accumulation_dtype(self.embed_tokens.weight.dtype)
        return whole_heads(rotary_angles(self.config, positions, dtype)[..., None, :])

    def hidden_states(
        self, tokens: Tensor, segment_ids: Tensor | None = None, *,
        features: HiddenStateTap | None = None, read: Tensor | None = None,
        known: Tensor | None = None, bounds: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states (B, T, D) after the final norm.

        Args:
            tokens: (B, T) int64.
            segment_ids: (B, T), non-decreasing along T, the numbers of samples packed into one
                row: attention, conv, state and positions start anew with each. None is one sample
                a row.
            features: Takes hidden states for a drafter.
            read: (B, T, F), the target's features of the same tokens, for a drafter: each token
                reads those of the token before it.
            known: (B, T) bool, which of `read` are known; None is all.
            bounds: `sample_bounds` of `segment_ids`; None finds them, which waits for a GPU.
        """
        inputs = None if read is None else self.features(read, segment_ids, known)
        if inputs is not None and self.features.skips_first:
            segment_ids, bounds = first_apart(tokens, segment_ids), None
        positions, mask = positions_of(tokens, segment_ids), None
        if segment_ids is not None:
            if bounds is None and segment_ids.is_cuda:  # nothing reads them on a CPU
                bounds = sample_bounds(segment_ids)
            if bounds is not None:
                # A compiled layer is not compiled again for another number of samples.
                torch._dynamo.maybe_mark_dynamic(bounds, 0)
            has_window = 0 < self.config.sliding_window < tokens.shape[1]
            if self.config.attn_layers and (has_window or not self._attends_packed()):
                same = segment_ids[:, :, None] == segment_ids[:, None, :]
                mask = _causal(same, 0, self.config.sliding_window)[:, None]
        elif 0 < self.config.sliding_window < tokens.shape[1]:
            every = torch.ones(1, *[tokens.shape[1]] * 2, dtype=torch.bool, device=tokens.device)
            mask = _causal(every, 0, self.config.sliding_window)[:, None]
        x, beside = self.begin(tokens, inputs)
        context = TrainingPass(
            self.rotary(positions), segment_ids, mask,
            shared=self.shared_blocks, embedded=beside, bounds=bounds,
        )
        for index, layer in enumerate(self.layers):
            x = layer(x, context)
            if features is not None:
                features.take(index, x)
        return self.norm(x)

    def _attends_packed(self) -> bool:
        dtype = product_dtype(self.embed_tokens.weight)
        return takes_packed(self.config.head_dim, dtype, self.embed_tokens.weight.device)

    def hidden_ahead(
        self, tokens: Tensor, segment_ids: Tensor | None, read: Tensor, known: Tensor | None,
        ahead: int,
    ) -> list[Tensor]:
        """Return hidden states (B, T, D) of 1 + `ahead` passes of multi-step training.

        Pass 0 is `hidden_states`; pass k reads each token as the k-th of a draft
        (`stree.models.multi_step`).

        Args:
            tokens: (B, T) int64.
            segment_ids: As in `hidden_states`.
            read: (B, T, F), the target's features of the same tokens.
            known: As in `hidden_states`.
            ahead: Number of passes after the first; 0 is none.
        """
        reader = self.features
        hidden: list[Tensor] = []
        embedded, inputs = self.embed(tokens), reader(read, segment_ids, known)
        if reader.skips_first:
            segment_ids = first_apart(tokens, segment_ids)
        rotary = self.rotary(positions_of(tokens, segment_ids))
        scanned: dict[int, list[Any]] = {}
        for depth in range(1 + ahead):
            x, beside = reader.joined(embedded, inputs)
            context = MultiStepPass(rotary, segment_ids, embedded=beside, scanned=scanned)
            for layer in cast(list[Layer], self.layers):
                x = layer.forward(x, context)
            hidden.append(self.norm(x))
            if depth < ahead:
                own = x if reader.reads_stream else hidden[-1]
                inputs = reader.of_drafts(own.roll(1, dims=1))
        return hidden

    def extend(
        self, tokens: Tensor, cache: HybridCache, features: HiddenStateTap | None = None,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """Commit tokens (B, T) to the cache; return the stream (B, T, D) after the last layer.

        features and inputs are as in `HybridModel.prefill`.
        """
        start, num_tokens = cache.num_committed, tokens.shape[1]
        bound = start + num_tokens
        mask = None
        if self.config.attn_layers and (start or 0 < self.config.sliding_window < bound):
            mask = torch.ones(num_tokens, bound, dtype=torch.bool, device=tokens.device)
            mask = _causal(mask, start, self.config.sliding_window)[None, None]
        positions = torch.arange(start, bound, device=tokens.device).expand_as(tokens)
        (x, beside), y = self.begin(tokens, inputs), None
        context = PrefillPass(
            self.rotary(positions), mask=mask, shared=self.shared_blocks, embedded=beside,
            caches=cache.layers, start=start, features=features,
        )
        for layer in cast(list[Layer], self.layers):
            x, y = layer.run(x, y, context)
        x = context.add(x, y)
        context.enter(self.config.num_layers, x)
        cache.length += num_tokens
        cache.num_committed += num_tokens
        return x

    def tree_stream(self, call: TreePass) -> Stream:
        """Run a pass, but its end; return the stream of its nodes before the final norm."""
        inputs = self.normed_embeddings
        x, y = None if inputs is None else call.begin(inputs), None
        for layer in cast(list[Layer], self.layers):
            x, y = layer.run(x, y, call)
        stream = call.add_norm(x, y, self.norm)[0]
        self.norm.add_bias(stream)
        return stream


def _causal(mask: Tensor, start: int, window: int) -> Tensor:
    """Return a mask (…, T, L) less the keys after each token, and those before its window.

    start is the position of the first token, window the positions that a token sees; 0 is all.
    """
    mask = mask.tril(start)
    return mask.triu(start + 1 - window) if window else mask


@torch.no_grad()
def initialise(model: nn.Module, num_layers: int) -> None:
    """Draw weights by GPT-2's scheme for projections and Mamba's for dt, A and D."""
    into_residual = 0.02 / math.sqrt(2 * num_layers)
    for name, module in model.named_modules():
        if name.endswith("dt_proj"):  # Mamba-1's
            bound = module.in_features**-0.5  # type: ignore[operator]
            nn.init.uniform_(module.weight, -bound, bound)  # type: ignore[arg-type]
            _draw_dt(module.bias)  # type: ignore[arg-type]
        elif isinstance(module, nn.Linear | nn.Embedding):
            closes_block = name.endswith(("o_proj", "out_proj", "down_proj", "shared_use.out"))
            nn.init.normal_(module.weight, std=into_residual if closes_block else 0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        elif isinstance(module, Experts):
            nn.init.normal_(module.up, std=0.02)
            nn.init.normal_(module.down, std=into_residual)
        elif isinstance(module, Mamba2 | GatedDeltaNet):
            _draw_dt(module.dt_bias)
            module.A_log.copy_(torch.empty_like(module.A_log).uniform_(1, 16).log())
        elif isinstance(module, Mamba1):
            states = torch.arange(1, 1 + module.shape.d_state, device=module.A_log.device)
            module.A_log.copy_(states.log().expand_as(module.A_log))


def _draw_dt(bias: nn.Parameter) -> None:
    """Draw biases whose softplus is log-uniform in [0.001, 0.1]."""
    dt = torch.empty_like(bias).uniform_(math.log(1e-3), math.log(0.1)).exp()
    bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus⁻¹
