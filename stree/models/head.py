"""The head of a language model: logits, a part of the vocabulary, low rank, 8 bits."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stree.models.backbone import Backbone
from stree.models.config import HybridConfig
from stree.models.layers.packed_linear import weight_of
from stree.models.layers.part import Part, require_products_in_8_bits
from stree_kernels import naive, ops
from stree_kernels.contracts import Sampling, Scaled, Slots, Stream

Method = TypeVar("Method", bound=Callable[..., Any])


def on_own_gpu(method: Method) -> Method:
    """Make a model's method run with the model's GPU as the current one."""

    @functools.wraps(method)
    def run(self: HeadedModel, *arguments: Any, **options: Any) -> Any:
        with ops.current(self.device):
            return method(self, *arguments, **options)

    return cast(Method, run)


def _product() -> Callable[[Tensor, Tensor], Tensor]:
    return F.linear if torch.is_grad_enabled() else ops.linear  # which has no gradient


class HeadedModel(nn.Module):
    """A backbone and a head over its hidden states.

    Shapes: V vocabulary, D model width; K tokens of the head and R inputs of its weight, which are
    V and D unless the config says otherwise.

    Attributes:
        head_ids: (K,) int64 ascending, the tokens of a head over a part of the vocabulary; None
            for a head over all tokens.
        head_in_8_bits: The copy of the head that decoding reads; None without one, also if the head
            itself is held in 8 bits.
    """

    head_ids: Tensor | None
    lacks_embedding = False  # and shares its target's

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        if config.head_rank:
            self.head_down = nn.Linear(config.d_model, config.head_rank, bias=False)
        if not config.tie_embeddings:
            width = config.head_rank or config.d_model
            self.lm_head = nn.Linear(width, config.head_size, bias=False)
        ids = torch.arange(config.head_vocab_size) if config.head_vocab_size else None
        self.register_buffer("head_ids", ids)
        self.head_in_8_bits: Scaled | None = None

    @property
    def head_weight(self) -> Tensor:
        """Weight (K, R) of the head, which is the embedding when the two are tied.

        Of a head that is held in 8 bits it is a copy in the model's dtype.
        """
        if self.config.tie_embeddings:
            return self.model.embed_tokens.weight
        weight = weight_of(self.lm_head)
        return weight if isinstance(weight, Tensor) else naive.dequantised(weight, self.dtype)

    @property
    def head(self) -> Tensor | Scaled:
        """Weight (K, R) by which logits are computed."""
        if self.head_in_8_bits is not None:
            return self.head_in_8_bits
        tied = self.config.tie_embeddings
        return self.model.embed_tokens.weight if tied else weight_of(self.lm_head)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the embedding, and so of most weights."""
        return self.model.embed_tokens.weight.dtype

    @on_own_gpu
    def logits(self, hidden: Tensor, *, wide: bool = True) -> Tensor:
        """Return logits (…, V) of hidden states (…, D); −∞ for tokens outside the head.

        With `wide` they are fp32 or wider, else in the product's dtype, which is enough to choose.
        """
        logits = self.over_vocabulary(self.head_logits(hidden))
        return logits.to(naive.accumulation_dtype(logits.dtype)) if wide else logits

    def head_logits(self, hidden: Tensor) -> Tensor:
        """Return the head's logits (…, K) of hidden states (…, D), in the product's dtype."""
        inputs, head = self.head_inputs(hidden), self.head
        if isinstance(head, Scaled):
            return (naive if torch.is_grad_enabled() else ops).linear(inputs, head)
        return _product()(inputs, head.to(hidden.dtype))

    def head_inputs(self, hidden: Tensor) -> Tensor:
        """Return the inputs (…, R) of `head_weight` for hidden states (…, D)."""
        if not self.config.head_rank:
            return hidden
        return _product()(hidden, self.head_down.weight.to(hidden.dtype))

    def draw_children(
        self, stream: Tensor | Stream, depths: Tensor, sampling: Sampling | None, places: Tensor,
        tokens: Tensor, finite: Tensor, nodes: Tensor | None, values: Tensor | None,
        slots: Slots | None = None,
    ) -> Tensor:
        """Draw children by the model's head, as `ops.draw_children`.

        stream is hidden states (B, n, D), or a stream before the final norm.
        """
        if self.config.head_rank:
            stream = ops.linear(stream, self.head_down.weight)
        where = (depths, sampling, places, tokens, finite, nodes, values, self.head_ids, slots)
        return ops.draw_children(stream, self.head, *where)

    @torch.no_grad()
    def take_head(self, whole: Tensor | None, ids: Tensor | None) -> None:
        """Set the tokens and the weights of a head over a part of the vocabulary, or of low rank.

        Args:
            whole: Weight (V, D) of a head over all tokens: the rows of the head's tokens are taken,
                at low rank their best approximation (on the principal directions). None leaves the
                weights as they are.
            ids: Tokens (K,), ascending; None leaves the tokens as they are.
        """
        if ids is not None:
            assert self.head_ids is not None
            self.head_ids.copy_(ids)
        if whole is None:
            return
        rows = whole if self.head_ids is None else whole[self.head_ids.to(whole.device)]
        if rank := self.config.head_rank:
            wide = rows.double()
            directions = torch.linalg.eigh(wide.T @ wide).eigenvectors[:, -rank:]  # (D, R)
            self.head_down.weight.copy_(directions.T)
            rows = wide @ directions
        self.lm_head.weight.copy_(rows)

    @torch.no_grad()
    def put_head_in_8_bits(self) -> None:
        """Compute logits from now on by a copy of the head in fp8 e4m3, with one scale a token.

        The copy has half the bytes of one in bf16, and is made again by each `pack`. For a low-rank
        head it is the second product. Embeddings stay as they are, also those tied to the head, and
        a head that is held in 8 bits itself.

        Raises `UsageError` for a GPU without float8.
        """
        require_products_in_8_bits(self.device, "draft with the head as it is stored")
        if self.head_in_8_bits is None and isinstance(self.head, Scaled):
            return
        made, held = naive.in_8_bits(self.head_weight), self.head_in_8_bits
        if held is None or held.values.device != self.device:
            self.head_in_8_bits = made
        else:  # graphs hold its address
            held.values.copy_(made.values)
            held.scale.copy_(made.scale)

    def share_ends(self, target: HeadedModel) -> None:
        """Take what the drafter's checkpoint leaves to its target.

        Of an MTP head (`plan_mtp`) it is embedding, head and final norm, of an EAGLE head
        (`plan_eagle`) the embedding or nothing.
        """
        if self.lacks_embedding or self.config.fused_inputs:
            self.model.embed_tokens = target.model.embed_tokens
        if not self.config.fused_inputs:
            return
        if not self.config.tie_embeddings:
            self.lm_head = target.lm_head
        if target.head_in_8_bits is not None:
            self.head_in_8_bits = target.head_in_8_bits
        self.model.features.target_norm = target.model.norm
        shared = any(part.keeps_rows for part in target.modules() if isinstance(part, Part))
        for part in self.modules():
            if isinstance(part, Part):
                part.keeps_rows = shared  # both lay the head out alike

    def over_vocabulary(self, logits: Tensor) -> Tensor:
        """Spread the head's logits (…, K) over the vocabulary (…, V), −∞ for other tokens."""
        if self.head_ids is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.config.vocab_size), -math.inf)
        return whole.index_copy_(-1, self.head_ids, logits)
