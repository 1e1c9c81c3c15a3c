"""Configs of the parts of a layer, a dataclass for each kind; `HybridConfig` inherits from all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stree_kernels.shapes import GatedDeltaShape, Mamba1Shape, MixerShape

MAX_EXPERTS = 1024  # their names are written down before any weight is looked at
MLP_KINDS = ("swiglu", "geglu", "relu2", "gelu")
UNGATED = ("relu2", "gelu")  # down(relu(up)²) and down(gelu(up))
ROPE_LENGTH = "original_max_position_embeddings"
ROPE_NUMBERS = {  # of each scaling; where there are two bounds, the lower one first
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "beta_slow", "beta_fast"),
}


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Attention of all attention layers.

    Attributes:
        num_heads: Heads of queries.
        num_kv_heads: Heads of keys and values; a divisor of num_heads.
        head_dim: Channels of a head; even.
        rope_theta: Base of rotary positions.
        rope_scaling: Llama 3's scaling or YaRN's, with config.json's keys; None for none.
        rotary_dim: Channels of a head that are rotated; None for all, 0 for no positions.
        attention_scale: Factor of the scores; None for head_dim^−½.
        attention_bias: Whether all four projections have a bias.
        qkv_bias: Whether those of q, k and v have one; that of the output has none.
        qk_norm: Whether each head's q and k have an RMS norm, before the rotation.
        qk_norm_whole: With qk_norm, one norm is of all heads' q, and one of all heads' k.
        sliding_window: Tokens that a token sees, itself included; 0 for all before it.
        attention_gate: Whether heads' outputs are multiplied by a sigmoid of the layer's input.
    """

    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rotary_dim: int | None = None
    attention_scale: float | None = None
    attention_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False
    sliding_window: int = 0
    attention_gate: bool = False

    def _attention_complaints(self) -> Iterator[str]:
        """Yield what is wrong in a model that has attention."""
        if self.head_dim % 2:
            yield f"head_dim is {self.head_dim}, rotary embedding needs it even"
        evens = range(0, self.head_dim + 1, 2)
        if self.rotary_dim is not None and self.rotary_dim not in evens:
            yield (
                f"rotary_dim is {self.rotary_dim}, it must be even and at most "
                f"head_dim = {self.head_dim}"
            )
        if not math.isfinite(self.attention_scale or 0):
            yield f"attention_scale is {self.attention_scale}, it must be finite"
        rope = self.rope_scaling or {}
        kind = rope.get("rope_type", rope.get("type"))
        if kind in ROPE_NUMBERS:
            names = (*ROPE_NUMBERS[kind], ROPE_LENGTH)
            numbers: list[Any] = [rope.get(name) for name in names]
            factor, low, high, length = numbers
            if not all(isinstance(number, int | float) for number in numbers) or not (
                1 <= factor < math.inf and 0 < low < high < math.inf and 1 <= length < math.inf
            ):
                yield (
                    f"rope_scaling has {dict(zip(names, numbers, strict=True))}: wanted factor of "
                    f"at least 1, 0 < {names[1]} < {names[2]}, {ROPE_LENGTH} of at least 1"
                )


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """MLPs of all layers, and those that run for each token beside experts.

    Attributes:
        intermediate_size: Width; 0 for no MLP, as in pure Mamba-2 models.
        mlp_kind: One of MLP_KINDS, of experts, too.
        mlp_bias: Whether projections have a bias, the experts' latent projections included.
        shared_intermediate_size: Width of "shared_mlp".
        shared_gate: Whether its output is multiplied by a sigmoid of its input, one a token.
    """

    intermediate_size: int = 0
    mlp_kind: str = "swiglu"
    mlp_bias: bool = False
    shared_intermediate_size: int = 0
    shared_gate: bool = False


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Experts of all layers that have some, and their router.

    Attributes:
        num_experts: Experts of a layer.
        experts_per_token: Experts that the router chooses for a token.
        expert_intermediate_size: Width of an expert.
        expert_latent_size: Width of the experts' input and output; 0 for d_model.
        router: "softmax" or "sigmoid".
        router_groups: Groups of experts, of which the router_top_groups best are chosen from.
        router_top_groups: At most router_groups.
        router_normalised: Whether the chosen experts' weights sum to router_scale.
        router_scale: Factor of the chosen experts' weights.
        router_floor: Added to the sum of a sigmoid router's chosen scores.
    """

    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    expert_latent_size: int = 0
    router: str = "softmax"
    router_groups: int = 1
    router_top_groups: int = 1
    router_normalised: bool = True
    router_scale: float = 1.0
    router_floor: float = 1e-20

    def _router_complaints(self) -> Iterator[str]:
        """Yield what is wrong in a model that has experts."""
        if not 1 <= self.router_top_groups <= self.router_groups:
            yield (
                f"router_top_groups is {self.router_top_groups}, it must be at most "
                f"router_groups = {self.router_groups}"
            )
        in_group = self.num_experts // self.router_groups
        if self.experts_per_token > in_group * self.router_top_groups:
            yield (
                f"experts_per_token is {self.experts_per_token}, the chosen groups have "
                f"{in_group * self.router_top_groups} experts"
            )
        if self.router_groups > 1 and in_group < 2:
            yield "a group of experts is judged by its two best: make groups larger"


@dataclass(frozen=True, kw_only=True)
class SharedBlocksConfig:
    """Transformer blocks that layers share ("shared0>…").

    Attributes:
        num_shared_blocks: Blocks.
        adapter_rank: Rank of each use's own low-rank terms.
        attention_adapters: Whether q, k and v have such terms, too, and not the MLP alone.
    """

    num_shared_blocks: int = 0
    adapter_rank: int = 0
    attention_adapters: bool = False


@dataclass(frozen=True, kw_only=True)
class ConvConfig:
    """Causal convolutions of all mixers that have one.

    Attributes:
        d_conv: Tokens that a convolution sees, its own included.
    """

    d_conv: int = 4


@dataclass(frozen=True, kw_only=True)
class ScanConfig(ConvConfig):
    """Mixers with a state for each head.

    Attributes:
        conv_bias: Whether the convolution has a bias.
        gated_norm_eps: Epsilon of the gated norm of the outputs.
        chunk_size: Tokens of a chunk of the scan over whole sequences.
    """

    conv_bias: bool = True
    gated_norm_eps: float = 1e-5
    chunk_size: int = 64


@dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig(ScanConfig):
    """Gated delta rule of all its layers: each value head has a state (key_dim, value_dim).

    Attributes:
        num_delta_heads: Heads of values.
        num_delta_key_heads: Heads of keys and queries; a divisor of num_delta_heads.
        delta_key_dim: Channels of a key.
        delta_value_dim: Channels of a value.
        negative_eigenvalues: Whether β is 2·σ(b) instead of σ(b), so that the state's transitions
            may have negative eigenvalues.
    """

    num_delta_heads: int = 0
    num_delta_key_heads: int = 0
    delta_key_dim: int = 0
    delta_value_dim: int = 0
    negative_eigenvalues: bool = False

    @property
    def gated_delta_shape(self) -> GatedDeltaShape:
        """Dimensions of a mixer, as the kernels take them."""
        return GatedDeltaShape(
            self.num_delta_heads, self.num_delta_key_heads, self.delta_key_dim,
            self.delta_value_dim, self.d_conv, self.negative_eigenvalues,
        )


@dataclass(frozen=True, kw_only=True)
class StateSpaceConfig(ScanConfig):
    """Mamba-1 and Mamba-2 mixers of all layers.

    Attributes:
        d_state: Numbers of a channel's state.
        mamba_in_bias: Whether the input projection has a bias.
        mamba_out_bias: Whether the output projection has a bias.
    """

    d_state: int = 0
    mamba_in_bias: bool = False
    mamba_out_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class Mamba1Config(StateSpaceConfig):
    """Mamba-1 mixers of all layers, whose dt, B and C are products of x after the convolution.

    Attributes:
        mamba1_channels: Channels of x.
        dt_rank: Rank of the product that gives dt.
        selection_norm_eps: Epsilon of RMS norms of low-rank dt, B and C, as in FalconMamba; None
            for no norms.
        selection_scaled: Whether these norms have scales, as in Jamba.
    """

    mamba1_channels: int = 0
    dt_rank: int = 0
    selection_norm_eps: float | None = None
    selection_scaled: bool = False

    @property
    def mamba1_shape(self) -> Mamba1Shape:
        """Dimensions of a mixer, as the kernels take them."""
        return Mamba1Shape(
            self.mamba1_channels, self.d_state, self.dt_rank, self.d_conv, self.selection_norm_eps
        )


@dataclass(frozen=True, kw_only=True)
class MambaConfig(StateSpaceConfig):
    """Mamba-2 mixers of all layers.

    Head h reads x from group h // (num_ssm_heads // num_x_groups), and B and C likewise:
    MambaInLlama shares x and B among heads as grouped-query attention shares v and k, Mamba-2
    proper shares B and C.

    Attributes:
        num_ssm_heads: Heads.
        ssm_head_dim: Channels of a head.
        num_x_groups: Groups of x; a divisor of num_ssm_heads, like those of B and C.
        num_b_groups: Groups of B.
        num_c_groups: Groups of C.
        repeat_before_conv: MambaInLlama's repeat_kv_before_conv.
        gated_norm_groups: Groups of channels that are normed apart.
        gated_norm: How the output is gated and normed: "gate, norm", "norm, gate" or "gate".
        dt_limit: Bounds of dt.
    """

    num_ssm_heads: int = 0
    ssm_head_dim: int = 0
    num_x_groups: int = 0
    num_b_groups: int = 0
    num_c_groups: int = 0
    repeat_before_conv: bool = False
    gated_norm_groups: int = 1
    gated_norm: str = "gate, norm"
    dt_limit: tuple[float, float] = (0.0, math.inf)

    @property
    def d_inner(self) -> int:
        """Channels of x: heads times head dim."""
        return self.num_ssm_heads * self.ssm_head_dim

    @property
    def mixer_shape(self) -> MixerShape:
        """Dimensions of a mixer, as the kernels take them."""
        return MixerShape(
            self.num_ssm_heads, self.ssm_head_dim, self.d_state,
            self.num_x_groups, self.num_b_groups, self.num_c_groups,
            self.d_conv, self.repeat_before_conv, self.dt_limit, self.gated_norm == "gate",
        )

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution over [x, B, C]."""
        x_groups, b_groups, c_groups = self.mixer_shape.scan_groups
        return x_groups * self.ssm_head_dim + (b_groups + c_groups) * self.d_state

    @property
    def in_proj_dim(self) -> int:
        """Rows of the input projection: z, x, B, C, dt."""
        return self.d_inner + self.mixer_shape.num_kept


@dataclass(frozen=True, kw_only=True)
class ShortConvConfig(ConvConfig):
    """Gated short convolutions of all their layers.

    Attributes:
        short_conv_bias: Whether the convolution and its projections have a bias.
    """

    short_conv_bias: bool = False
