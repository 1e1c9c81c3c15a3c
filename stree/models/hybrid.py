"""A decoder of attention and Mamba-2 layers: training, prefill, step, token tree, commit.

Shapes: B batch, T tokens, N tree nodes, V vocabulary, D model width, H heads, P head dim,
S state, C conv channels, W conv width. Parameters carry MambaInLlama's names.

Every recurrent layer keeps one contract: project → conv → scan → gate, norm, out; the three
ways to run it (`forward`, `extend`, `tree`) differ in the two ops in the middle.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stree.errors import UsageError
from stree.forest import Forest
from stree.models.cache import AttentionCache, HybridCache, MambaCache
from stree.models.config import HybridConfig
from stree.models.rotary import rotary_angles
from stree.tree import TokenTree
from stree_kernels import naive, ops
from stree_kernels.chunk_scan import chunk_scan
from stree_kernels.shapes import MixerWeights, Steering, Topology

Method = TypeVar("Method", bound=Callable[..., Any])


def on_own_gpu(method: Method) -> Method:
    """A model's method, with the model's GPU as the current one."""

    @functools.wraps(method)
    def run(self: HybridModel, *arguments: Any, **options: Any) -> Any:
        with ops.current(self.device):
            return method(self, *arguments, **options)

    return cast(Method, run)


@functools.lru_cache(maxsize=256)
def topology_of(tree: TokenTree, width: int, device: torch.device) -> Topology:
    """One tree on a device, for a conv of that width."""
    return Topology(
        tree.ancestors.to(device)[None],
        torch.tensor(tree.depths, dtype=torch.int32, device=device)[None],
        tree.windows(width).int().to(device)[None],
    )


@dataclass
class Context:
    """What all layers of one pass over whole sequences share."""

    rotary: Tensor | None = None  # (2, B, T, 1, D / 2)
    segment_ids: Tensor | None = None  # (B, T)
    mask: Tensor | None = None  # (B, 1, T, L) bool; None is causal
    start: int = 0  # committed tokens, in `extend`


@dataclass(frozen=True)
class TreeCall:
    """What all layers of one tree call share."""

    topology: Topology
    steering: Steering
    first: int  # the tree's nodes that earlier calls have seen
    bound: int  # cache slots to look at


class RMSNorm(nn.Module):
    """Root-mean-square norm over groups of channels, in fp32 or wider."""

    def __init__(self, width: int, eps: float, groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps
        self.groups = groups

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return naive.rms_norm(x, self.weight, self.eps, self.groups, gate)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, as in Llama."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, kv_width = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.d_model, width, bias=False)
        self.k_proj = nn.Linear(config.d_model, kv_width, bias=False)
        self.v_proj = nn.Linear(config.d_model, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.d_model, bias=False)

    def _project(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, T, H, P), k and v (B, Hkv, T, P), rotated."""
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim))
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        assert context.rotary is not None
        q, k = (naive.rotate(part, *context.rotary) for part in (q, k))
        return q, k.transpose(1, 2), v.transpose(1, 2)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, k, v = self._project(x, context)
        return self._attend(q, k, v, context)

    def extend(self, x: Tensor, cache: AttentionCache, context: Context) -> Tensor:
        q, k, v = self._project(x, context)
        bound = context.start + x.shape[1]
        cache.keys[:, :, context.start : bound] = k
        cache.values[:, :, context.start : bound] = v
        return self._attend(q, cache.keys[:, :, :bound], cache.values[:, :, :bound], context)

    def tree(self, x: Tensor, cache: AttentionCache, call: TreeCall) -> Tensor:
        y = ops.attend_tree(
            project_together(x, (self.q_proj, self.k_proj, self.v_proj)),
            cache.keys, cache.values, cache.rotary,
            call.topology, call.steering, call.first, call.bound,
        )  # fmt: skip
        return ops.linear_parts(y, self.o_proj.weight)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k, v,
            attn_mask=context.mask, is_causal=context.mask is None, enable_gqa=True,
        )  # fmt: skip
        return self.o_proj(y.transpose(1, 2).flatten(-2))


class Mamba2(nn.Module):
    """Mamba-2's mixer with its own number of groups for x, B and C."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.chunk_size = config.chunk_size
        self.shape = config.mixer_shape
        heads = config.num_ssm_heads
        self.in_proj = nn.Linear(config.d_model, config.in_proj_dim, bias=False)
        self.conv1d = nn.Conv1d(
            config.conv_dim, config.conv_dim, config.d_conv,
            groups=config.conv_dim, bias=config.conv_bias,
        )  # fmt: skip
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = RMSNorm(config.d_inner, config.gated_norm_eps, config.gated_norm_groups)
        self.out_proj = nn.Linear(config.d_inner, config.d_model, bias=False)

    @property
    def A(self) -> Tensor:
        """(H,), negative, in fp32 or wider."""
        return -self.A_log.to(naive.accumulation_dtype(self.A_log.dtype)).exp()

    @property
    def weights(self) -> MixerWeights:
        """What conv and scan read."""
        return MixerWeights(
            self.conv1d.weight[:, 0], self.conv1d.bias, self.dt_bias, self.A_log, self.D
        )

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """z (…, H·P), raw conv inputs (…, C) and dt (…, H) after softplus."""
        shape = self.shape
        z, inputs, dt = self.in_proj(x).split(
            [shape.d_inner, shape.num_channels, shape.num_heads], dim=-1
        )
        return z, inputs, naive.positive_dt(dt, self.weights, shape)

    def _convolve(
        self, inputs: Tensor, segment_ids: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x (…, Gx, P), B (…, Gb, S) and C (…, Gc, S) of raw conv inputs (…, C)."""
        weights = self.weights
        inputs = naive.conv_channels(inputs, self.shape)
        y = naive.segment_conv(inputs, weights.conv, weights.conv_bias, segment_ids)
        return naive.split_channels(F.silu(y), self.shape)

    def _finish(self, y: Tensor, z: Tensor) -> Tensor:
        return self.out_proj(self.norm(y.flatten(-2), gate=z))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        z, inputs, dt = self._project(x)
        values, B, C = self._convolve(inputs, context.segment_ids)
        y, _ = chunk_scan(
            values, dt, self.A, B, C, self.D,
            chunk_size=self.chunk_size, segment_ids=context.segment_ids,
        )  # fmt: skip
        return self._finish(y, z)

    def extend(self, x: Tensor, cache: MambaCache, context: Context) -> Tensor:
        z, inputs, dt = self._project(x)
        seen = torch.cat([cache.tail, inputs], dim=1)
        values, B, C = (part[:, self.shape.tail :] for part in self._convolve(seen, None))
        y, state = chunk_scan(
            values, dt, self.A, B, C, self.D,
            chunk_size=self.chunk_size, initial_state=cache.state,
        )  # fmt: skip
        cache.state.copy_(state)
        cache.tail = seen[:, -self.shape.tail :]
        return self._finish(y, z)

    def tree(self, x: Tensor, cache: MambaCache, call: TreeCall) -> Tensor:
        if cache.derived is not None:
            lay_channels_together(self.conv1d.weight)
        projected = ops.linear(x, self.in_proj.weight)
        y = ops.mamba_tree(
            projected, cache.rows, cache.derived, cache.state, self.weights, self.shape,
            call.topology, call.steering, call.first,
        )  # fmt: skip
        z = projected[..., : self.shape.d_inner]
        norm = self.norm
        y = ops.gated_rms_norm(y, z, norm.weight, norm.eps, norm.groups)
        return ops.linear_parts(y, self.out_proj.weight)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.d_model, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.d_model, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    def tree(self, x: Tensor) -> Tensor:
        if not ops.fused(x.device, x.dtype):
            return self(x)[None]
        y = ops.linear_swiglu(x, joined_weight((self.gate_proj, self.up_proj)))
        return ops.linear_parts(y, self.down_proj.weight)


def project_together(x: Tensor, projections: Sequence[nn.Linear]) -> Tensor:
    """Several projections of x (…, D) side by side; with the fused kernels, one product."""
    if not ops.fused(x.device, x.dtype):
        return torch.cat([projection(x) for projection in projections], dim=-1)
    return ops.linear(x, joined_weight(projections))


def joined_weight(projections: Sequence[nn.Linear]) -> Tensor:
    """Their weights one above the other, contiguous.

    Made when first needed, and the projections' own become views of it: no memory is doubled, and
    whatever writes them in place writes it. It is made anew when a weight has been moved since.
    """
    owner = projections[0]
    joined = owner.__dict__.get("joined_weight")
    if joined is None or not _lie_in(joined, projections):
        weights = [projection.weight for projection in projections]
        joined = torch.cat([weight.detach() for weight in weights])
        pieces = joined.split([weight.shape[0] for weight in weights])
        for weight, piece in zip(weights, pieces, strict=True):
            weight.data = piece
        owner.__dict__["joined_weight"] = joined
    return joined


def lay_channels_together(weight: Tensor) -> None:
    """Store a conv weight (C, 1, W) tap by tap, in place: the tree conv reads many channels of one
    tap at a time. Its shape and values stay."""
    if weight.stride(0) != 1:
        weight.data = weight.data.permute(1, 2, 0).contiguous().permute(2, 0, 1)


def _lie_in(joined: Tensor, projections: Sequence[nn.Linear]) -> bool:
    """Whether the projections' weights are what `joined` consists of, in order."""
    address = joined.data_ptr()
    for projection in projections:
        if projection.weight.data_ptr() != address or projection.weight.dtype != joined.dtype:
            return False
        address += projection.weight.nbytes
    return True


class Layer(nn.Module):
    """Pre-norm mixer, then pre-norm MLP (absent in pure Mamba-2 layouts)."""

    def __init__(self, config: HybridConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.d_model, config.rms_norm_eps)
        if config.is_attention(index):
            self.self_attn = Attention(config)
        else:
            self.mamba = Mamba2(config)
        if config.intermediate_size:
            self.post_attention_layernorm = RMSNorm(config.d_model, config.rms_norm_eps)
            self.mlp = MLP(config)

    @property
    def mixer(self) -> Any:
        """The layer's `Attention` or `Mamba2`."""
        return self.mamba if hasattr(self, "mamba") else self.self_attn

    def feed_forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.post_attention_layernorm(x)) if hasattr(self, "mlp") else x

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.feed_forward(x + self.mixer(self.input_layernorm(x), context))


class Decoder(nn.Module):
    """Embedding, layers and final norm (the `model.` of the parameter names)."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.d_model, config.rms_norm_eps)

    def pairs(self, per_layer: Sequence[Any]) -> Iterator[tuple[Layer, Any]]:
        """Each layer with what belongs to it."""
        return zip(cast(list[Layer], self.layers), per_layer, strict=True)


class HybridModel(nn.Module):
    """A causal language model of attention and Mamba-2 layers (`HybridConfig`)."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.config = config
        self.tokenizer_fingerprint: str | None = None  # known for a checkpoint with a manifest
        self.model = Decoder(config)
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        """GPT-2's scheme for the projections, Mamba-2's for dt, A and D."""
        into_residual = 0.02 / math.sqrt(2 * self.config.num_layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                closes_block = name.endswith(("o_proj", "out_proj", "down_proj"))
                nn.init.normal_(module.weight, std=into_residual if closes_block else 0.02)
            elif isinstance(module, Mamba2):
                dt = torch.empty_like(module.dt_bias).uniform_(math.log(1e-3), math.log(0.1)).exp()
                module.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus⁻¹
                module.A_log.copy_(torch.empty_like(module.A_log).uniform_(1, 16).log())

    @property
    def head_weight(self) -> Tensor:
        """(V, D), the embedding itself when tied."""
        tied = self.config.tie_embeddings
        return self.model.embed_tokens.weight if tied else self.lm_head.weight

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.embed_tokens.weight.dtype

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    @torch.no_grad()
    @on_own_gpu
    def first_non_finite(self, tokens: Sequence[int]) -> str | None:
        """Says where a NaN or an infinity first appears: in a weight, or after a layer.

        tokens, a sequence to run through the model. None when everything is finite.
        """
        for name, parameter in self.named_parameters():
            if not bool(parameter.isfinite().all()):
                return f"its weights are not finite in {name}"
        row = torch.tensor([list(tokens)], device=self.device)
        context = Context(self._rotary(torch.arange(row.shape[1], device=self.device)[None]))
        x = self.model.embed_tokens(row)
        for index, layer in enumerate(self.model.layers):
            x = layer(x, context)
            if not bool(x.isfinite().all()):
                return f"its finite weights overflow in layer {index}"
        return None

    # Training

    def forward(self, tokens: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) of whole sequences, tokens (B, T); see `hidden_states`."""
        return self.logits(self.hidden_states(tokens, segment_ids))

    @on_own_gpu
    def hidden_states(self, tokens: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        """Hidden states (B, T, D) after the final norm.

        segment_ids (B, T), non-decreasing along T: samples packed into one row see nothing of
        each other (attention, conv and state start anew) and positions restart.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        mask = None
        if segment_ids is not None:
            starts = torch.ones_like(segment_ids, dtype=torch.bool)
            starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
            positions = positions - torch.where(starts, positions, 0).cummax(1).values
            if self.config.attn_layers:
                same = segment_ids[:, :, None] == segment_ids[:, None, :]
                mask = same.tril()[:, None]
        context = Context(self._rotary(positions), segment_ids=segment_ids, mask=mask)
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, context)
        return self.model.norm(x)

    @on_own_gpu
    def logits(self, hidden: Tensor, *, wide: bool = True) -> Tensor:
        """(…, V) in fp32 or wider; else as multiplied, which is enough to choose by."""
        product = F.linear if torch.is_grad_enabled() else ops.linear  # which has no gradient
        logits = product(hidden, self.head_weight.to(hidden.dtype))
        return logits.to(naive.accumulation_dtype(logits.dtype)) if wide else logits

    # Decoding

    def new_cache(self, max_length: int, max_nodes: int, batch: int = 1) -> HybridCache:
        """Static buffers for `batch` sequences of max_length tokens and trees of max_nodes."""
        return HybridCache(
            self.config, max_length, max_nodes,
            batch=batch, device=self.device, dtype=self.dtype,
        )  # fmt: skip

    @torch.no_grad()
    @on_own_gpu
    def prefill(self, tokens: Tensor, cache: HybridCache, chunk: int = 2048) -> Tensor:
        """Commit whole sequences, tokens (B, T), to the cache, in chunks of `chunk` tokens.

        Returns the logits (B, V) after the last token.
        """
        if tokens.shape[1] == 0:
            raise UsageError("the prompt is empty; give at least one token")
        cache.reserve(tokens.shape[1])
        self.settle(cache)
        for piece in tokens.split(chunk, dim=1):
            hidden = self._extend(piece, cache)
        return self.logits(self.model.norm(hidden[:, -1]))

    def _extend(self, tokens: Tensor, cache: HybridCache) -> Tensor:
        start, num_tokens = cache.num_committed, tokens.shape[1]
        bound = start + num_tokens
        positions = torch.arange(start, bound, device=tokens.device).expand_as(tokens)
        mask = None
        if start and self.config.attn_layers:
            mask = torch.ones(num_tokens, bound, dtype=torch.bool, device=tokens.device)
            mask = mask.tril(start)[None, None]
        context = Context(self._rotary(positions), mask=mask, start=start)
        x = self.model.embed_tokens(tokens)
        for layer, layer_cache in self.model.pairs(cache.layers):
            x = x + layer.mixer.extend(layer.input_layernorm(x), layer_cache, context)
            x = layer.feed_forward(x)
        cache.length += num_tokens
        cache.num_committed += num_tokens
        return x

    @torch.no_grad()
    def tree_forward(
        self,
        tokens: Tensor,
        tree: TokenTree,
        cache: HybridCache,
        bound: int | None = None,
        *,
        wide: bool = True,
    ) -> Tensor:
        """Logits of every node of a tree, in one call, after replaying the last accepted path.

        Args: tokens (B, N), the root first; bound, cache slots to read, at least the committed
        ones and N (default: just these); wide, as in `logits`. Returns (B, N, V).
        A single node is an ordinary step.
        """
        if tokens.shape[1] != tree.num_nodes:
            raise UsageError(f"{tokens.shape[1]} tokens for the {tree.num_nodes} nodes of {tree}")
        topology = topology_of(tree, self.config.d_conv, tokens.device)
        return self.logits(self.tree_hidden(tokens, topology, cache, bound=bound), wide=wide)

    @torch.no_grad()
    @on_own_gpu
    def forest_forward(
        self, tokens: Tensor, forest: Forest, cache: HybridCache, bound: int
    ) -> Tensor:
        """`tree_forward` of a tree a sequence: logits (B, N, V) of tokens (B, N), as multiplied."""
        topology = forest.topology(self.config.d_conv)
        return self.logits(self.tree_hidden(tokens, topology, cache, bound=bound), wide=False)

    @torch.no_grad()
    @on_own_gpu
    def tree_hidden(
        self,
        tokens: Tensor,
        topology: Topology,
        cache: HybridCache,
        first: int = 0,
        bound: int | None = None,
        nodes: Tensor | None = None,
    ) -> Tensor:
        """Hidden states (B, Q, D) after the final norm of nodes first … first + Q − 1 of trees.

        With first = 0 new trees begin, after the last ones' accepted paths; else the trees of
        the calls before grow. tokens (B, Q), or (B, N) of which the new nodes have those at
        nodes (B, Q), −1 for none; each sequence has the tree of `topology` that `cache.variant`
        names; bound as in `tree_forward`.
        """
        norm = cast(Layer, self.model.layers[0]).input_layernorm
        embedding = self.model.embed_tokens.weight
        x, normed = ops.embed_norm(embedding, tokens, nodes, norm.weight, norm.eps)
        y = None
        used = cache.num_committed + first + x.shape[1]
        call = TreeCall(topology, cache.steering, first, bound or used)
        for layer, layer_cache in self.model.pairs(cache.layers):
            if y is not None:
                norm = layer.input_layernorm
                x, normed = ops.add_rms_norm(x, y, norm.weight, norm.eps)
            y = layer.mixer.tree(normed, layer_cache, call)
            if hasattr(layer, "mlp"):
                norm = layer.post_attention_layernorm
                x, normed = ops.add_rms_norm(x, y, norm.weight, norm.eps)
                y = layer.mlp.tree(normed)
        norm = self.model.norm
        _, hidden = ops.add_rms_norm(x, y, norm.weight, norm.eps)
        if first == 0:
            ops.advance(cache.steering, hidden)
        return hidden

    @torch.no_grad()
    @on_own_gpu
    def settle(self, cache: HybridCache) -> None:
        """Replay the accepted path that is pending, if any, into states, tails and keys."""
        for layer, layer_cache in self.model.pairs(cache.layers):
            if isinstance(layer_cache, MambaCache):
                layer_cache.settle(layer.mixer.weights, cache.steering)
            else:
                layer_cache.settle(cache.steering)
        cache.length += cache.path_length
        cache.path_length.zero_()

    def _rotary(self, positions: Tensor) -> Tensor | None:
        """(2, B, T, 1, D / 2) for positions (B, T); None without attention."""
        if not self.config.attn_layers:
            return None
        dtype = naive.accumulation_dtype(self.dtype)
        return rotary_angles(self.config, positions, dtype)[..., None, :]
