"""A decoder of attention and Mamba-2 layers: training, prefill, step, token tree, commit.

Shapes: B batch, T tokens, N tree nodes, V vocabulary, D model width, H heads, P head dim,
S state, C conv channels, W conv width. Parameters carry MambaInLlama's names.

Every recurrent layer keeps one contract: project → conv → scan → gate, norm, out; the four
ways to run it (`forward`, `extend`, `tree`, `step`) differ in the two ops in the middle.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stree.errors import UsageError
from stree.models.cache import AttentionCache, HybridCache, MambaCache
from stree.models.config import HybridConfig
from stree.tree import TokenTree
from stree_kernels import naive
from stree_kernels.chunk_scan import chunk_scan

StepState = list[tuple[Tensor, Tensor]]  # a (conv tail, state) pair a layer, rows first


@dataclass(frozen=True)
class TreeTensors:
    """A token tree's topology on a device."""

    ancestors: Tensor  # (N, N) bool
    depths: Tensor  # (N,)
    windows: Tensor  # (N, W)

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def of(tree: TokenTree, width: int, device: torch.device) -> TreeTensors:
        depths = torch.tensor(tree.depths)
        return TreeTensors(
            tree.ancestors.to(device), depths.to(device), tree.windows(width).to(device)
        )


@dataclass
class Context:
    """What all layers of one call share."""

    cos: Tensor | None = None  # (B, T, 1, D)
    sin: Tensor | None = None
    segment_ids: Tensor | None = None  # (B, T)
    mask: Tensor | None = None  # (B, 1, T, L) bool; None is causal
    tree: TreeTensors | None = None
    length: Tensor | None = None  # (B,) committed tokens
    start: int = 0  # the same on the host, in `extend`
    bound: int = 0  # cache slots to read


class RMSNorm(nn.Module):
    """Root-mean-square norm over groups of channels, in fp32 or wider."""

    def __init__(self, width: int, eps: float, groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps
        self.groups = groups

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        wide = x.to(naive.accumulation_dtype(x.dtype))
        if gate is not None:
            wide = wide * F.silu(gate.to(wide.dtype))
        grouped = wide.unflatten(-1, (self.groups, -1))
        grouped = grouped * (grouped.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return self.weight.to(x.dtype) * grouped.flatten(-2).to(x.dtype)


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
        assert context.cos is not None and context.sin is not None
        q, k = (_rotate(part, context.cos, context.sin) for part in (q, k))
        return q, k.transpose(1, 2), v.transpose(1, 2)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, k, v = self._project(x, context)
        return self._attend(q, k, v, context)

    def extend(self, x: Tensor, cache: AttentionCache, context: Context) -> Tensor:
        q, k, v = self._project(x, context)
        slots = slice(context.start, context.bound)
        cache.keys[:, :, slots] = k
        cache.values[:, :, slots] = v
        return self._attend(
            q, cache.keys[:, :, : context.bound], cache.values[:, :, : context.bound], context
        )

    def tree(self, x: Tensor, cache: AttentionCache, context: Context) -> Tensor:
        q, k, v = self._project(x, context)
        assert context.tree is not None and context.length is not None
        rows = torch.arange(x.shape[0], device=x.device)[:, None]
        slots = context.length[:, None] + torch.arange(x.shape[1], device=x.device)
        cache.keys[rows, :, slots] = k.transpose(1, 2)
        cache.values[rows, :, slots] = v.transpose(1, 2)
        y = naive.tree_attention(
            q,
            cache.keys[:, :, : context.bound],
            cache.values[:, :, : context.bound],
            context.length,
            context.tree.ancestors,
        )
        return self.o_proj(y.flatten(-2))

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
        self.config = config
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

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """z (…, H·P), conv inputs (…, C) and dt (…, H) after softplus."""
        config = self.config
        z, *xbc, dt = self.in_proj(x).split(
            [config.d_inner, *config.xbc_dims, config.num_ssm_heads], dim=-1
        )
        if config.repeat_before_conv:
            groups = (config.num_x_groups, config.num_b_groups)
            for part, group in enumerate(groups):
                heads = xbc[part].unflatten(-1, (group, -1))
                repeats = config.num_ssm_heads // group
                xbc[part] = heads.repeat_interleave(repeats, dim=-2).flatten(-2)
        dtype = naive.accumulation_dtype(dt.dtype)
        dt = F.softplus(dt.to(dtype) + self.dt_bias.to(dtype)).clamp(*config.dt_limit)
        return z, torch.cat(xbc, dim=-1), dt

    def _split(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (…, Gx, P), B (…, Gb, S) and C (…, Gc, S) after the activation."""
        config = self.config
        x_groups, b_groups, c_groups = config.scan_groups
        x, B, C = F.silu(convolved).split(
            [x_groups * config.ssm_head_dim, b_groups * config.d_state, c_groups * config.d_state],
            dim=-1,
        )
        return (
            x.unflatten(-1, (x_groups, -1)),
            B.unflatten(-1, (b_groups, -1)),
            C.unflatten(-1, (c_groups, -1)),
        )

    def _finish(self, y: Tensor, z: Tensor) -> Tensor:
        return self.out_proj(self.norm(y.flatten(-2), gate=z))

    @property
    def _conv_weight(self) -> Tensor:
        return self.conv1d.weight[:, 0]

    def forward(self, x: Tensor, context: Context) -> Tensor:
        z, inputs, dt = self._project(x)
        segment_ids = context.segment_ids
        convolved = naive.segment_conv(inputs, self._conv_weight, self.conv1d.bias, segment_ids)
        values, B, C = self._split(convolved)
        y, _ = chunk_scan(
            values, dt, self.A, B, C, self.D,
            chunk_size=self.config.chunk_size, segment_ids=segment_ids,
        )  # fmt: skip
        return self._finish(y, z)

    def extend(self, x: Tensor, cache: MambaCache, context: Context) -> Tensor:
        z, inputs, dt = self._project(x)
        seen = torch.cat([cache.tail, inputs], dim=1)
        convolved = naive.segment_conv(seen, self._conv_weight, self.conv1d.bias, None)
        values, B, C = self._split(convolved[:, cache.tail.shape[1] :])
        y, state = chunk_scan(
            values, dt, self.A, B, C, self.D,
            chunk_size=self.config.chunk_size, initial_state=cache.state,
        )  # fmt: skip
        cache.state.copy_(state)
        cache.tail.copy_(seen[:, -cache.tail.shape[1] :])
        return self._finish(y, z)

    def tree(self, x: Tensor, cache: MambaCache, context: Context) -> Tensor:
        assert context.tree is not None
        z, inputs, dt = self._project(x)
        convolved = naive.tree_conv(
            inputs, cache.tail, self._conv_weight, self.conv1d.bias, context.tree.windows
        )
        values, B, C = self._split(convolved)
        cache.keep(inputs, values, B, dt)
        y = naive.tree_scan(values, dt, self.A, B, C, self.D, context.tree.ancestors, cache.state)
        return self._finish(y, z)

    def step(self, x: Tensor, tail: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One token a row, each with its own tail (B, W − 1, C) and state (B, H, P, S)."""
        z, inputs, dt = self._project(x)
        tail = torch.cat([tail, inputs[:, None]], dim=1)
        window = torch.arange(tail.shape[1], device=x.device)[None]
        convolved = naive.tree_conv(
            tail[:, -1:], tail[:, :-1], self._conv_weight, self.conv1d.bias, window
        )
        values, B, C = self._split(convolved)
        root = torch.zeros(x.shape[0], 1, dtype=torch.long, device=x.device)
        one = torch.ones(x.shape[0], dtype=torch.long, device=x.device)
        state = naive.replay(state, values, dt[:, None], self.A, B, root, one)
        heads = self.config.num_ssm_heads
        C_heads = C[:, 0].repeat_interleave(heads // C.shape[2], dim=1).to(state.dtype)
        x_heads = values[:, 0].repeat_interleave(heads // values.shape[2], dim=1).to(state.dtype)
        y = torch.einsum("bhps,bhs->bhp", state, C_heads)
        y = y + x_heads * self.D.to(state.dtype)[:, None]
        return self._finish(y.to(x.dtype), z), tail[:, 1:], state


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.d_model, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.d_model, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


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

    @property
    def is_recurrent(self) -> bool:
        """No attention layer: the whole past is a state of constant size."""
        return not self.config.attn_layers

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def first_non_finite(self) -> str | None:
        """The name of the first parameter with a NaN or an infinity, or None."""
        for name, parameter in self.named_parameters():
            if not bool(parameter.isfinite().all()):
                return name
        return None

    # Training

    def forward(self, tokens: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) of whole sequences, tokens (B, T); see `hidden_states`."""
        return self.logits(self.hidden_states(tokens, segment_ids))

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
        context = Context(*self._rotary(positions), segment_ids=segment_ids, mask=mask)
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, context)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """(…, V) in fp32 or wider."""
        logits = F.linear(hidden, self.head_weight.to(hidden.dtype))
        return logits.to(naive.accumulation_dtype(logits.dtype))

    # Decoding

    def new_cache(self, max_length: int, max_nodes: int, batch: int = 1) -> HybridCache:
        """Static buffers for `batch` sequences of max_length tokens and trees of max_nodes."""
        return HybridCache(
            self.config, max_length, max_nodes,
            batch=batch, device=self.device, dtype=self.dtype,
        )  # fmt: skip

    @torch.no_grad()
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
        context = Context(*self._rotary(positions), mask=mask, start=start, bound=bound)
        x = self.model.embed_tokens(tokens)
        for layer, layer_cache in self.model.pairs(cache.layers):
            x = x + layer.mixer.extend(layer.input_layernorm(x), layer_cache, context)
            x = layer.feed_forward(x)
        cache.length += num_tokens
        cache.num_committed += num_tokens
        return x

    @torch.no_grad()
    def tree_forward(
        self, tokens: Tensor, tree: TokenTree, cache: HybridCache, bound: int | None = None
    ) -> Tensor:
        """Logits of every node of a tree, in one call, after replaying the last accepted path.

        Args: tokens (B, N), the root first; bound, cache slots to read, at least the committed
        ones and N (default: just these). Returns (B, N, V). A single node is an ordinary step.
        """
        if tokens.shape[1] != tree.num_nodes:
            raise UsageError(f"{tokens.shape[1]} tokens for the {tree.num_nodes} nodes of {tree}")
        self.settle(cache)
        topology = TreeTensors.of(tree, self.config.d_conv, tokens.device)
        positions = cache.length[:, None] + topology.depths
        context = Context(
            *self._rotary(positions),
            tree=topology,
            length=cache.length,
            bound=bound or cache.num_committed + tree.num_nodes,
        )
        x = self.model.embed_tokens(tokens)
        for layer, layer_cache in self.model.pairs(cache.layers):
            x = x + layer.mixer.tree(layer.input_layernorm(x), layer_cache, context)
            x = layer.feed_forward(x)
        return self.logits(self.model.norm(x))

    @torch.no_grad()
    def settle(self, cache: HybridCache) -> None:
        """Replay the accepted path that is pending, if any, into states, tails and keys."""
        for layer, layer_cache in self.model.pairs(cache.layers):
            if isinstance(layer_cache, MambaCache):
                layer_cache.settle(layer.mixer.A, cache.path, cache.path_length)
            else:
                layer_cache.settle(cache.length, cache.path)
        cache.length += cache.path_length
        cache.path_length.zero_()

    def step_states(self, cache: HybridCache) -> StepState:
        """The settled states of a recurrent model, as `step` takes them."""
        states = []
        for layer in cache.layers:
            if not isinstance(layer, MambaCache):
                raise UsageError("only a model without attention layers can step on copied states")
            states.append((layer.tail, layer.state))
        return states

    @torch.no_grad()
    def step(self, tokens: Tensor, states: StepState) -> tuple[Tensor, StepState]:
        """One token a row, tokens (B,), each on its own states. Returns logits (B, V)."""
        x = self.model.embed_tokens(tokens)
        advanced = []
        for layer, (tail, state) in self.model.pairs(states):
            y, tail, state = layer.mixer.step(layer.input_layernorm(x), tail, state)
            x = layer.feed_forward(x + y)
            advanced.append((tail, state))
        return self.logits(self.model.norm(x)), advanced

    # Rotary positions

    def _rotary(self, positions: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """cos and sin (B, T, 1, head_dim) for positions (B, T); None without attention."""
        if not self.config.attn_layers:
            return None, None
        frequencies = _rotary_frequencies(self.config, positions.device)
        dtype = naive.accumulation_dtype(self.dtype)
        angles = positions[..., None].to(dtype) * frequencies.to(dtype)
        angles = torch.cat([angles, angles], dim=-1)[:, :, None]
        return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding on halves, x (B, T, H, P)."""
    low, high = x.chunk(2, dim=-1)
    rotated = torch.cat([-high, low], dim=-1)
    return (x * cos + rotated * sin).to(x.dtype)


def _rotary_frequencies(config: HybridConfig, device: torch.device) -> Tensor:
    scaling = tuple(sorted((config.rope_scaling or {}).items()))
    return _cached_frequencies(config.head_dim, config.rope_theta, scaling, device)


@functools.lru_cache(maxsize=64)
def _cached_frequencies(
    head_dim: int, theta: float, scaling: tuple[tuple[str, object], ...], device: torch.device
) -> Tensor:
    """Inverse frequencies (head_dim / 2,) in fp64, with Llama 3.1's long-context scaling."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequencies = theta**-exponents
    values = dict(scaling)
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "llama3":
        factor, low, high, original = (
            float(values[key])  # type: ignore[arg-type]
            for key in (
                "factor",
                "low_freq_factor",
                "high_freq_factor",
                "original_max_position_embeddings",
            )
        )
        wavelengths = 2 * math.pi / frequencies
        # 1 keeps a frequency, 0 divides it by the factor, between the two bands a blend
        keep = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies * (keep + (1 - keep) / factor)
    elif kind != "default":
        raise UsageError(f"rope type {kind!r} is not supported, wanted 'default' or 'llama3'")
    return frequencies.to(device)
