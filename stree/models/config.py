"""What a decoder of attention and Mamba-2 layers is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from stree.errors import UsageError
from stree_kernels.shapes import MixerShape

MAX_LAYERS = 1000  # a slip of the finger above it would be built for hours before it is noticed
MAX_CHUNK_SIZE = 4096  # the scan's memory grows with its square, for whoever wrote the config
ROPE_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor")
ROPE_LENGTH = "original_max_position_embeddings"


@dataclass(frozen=True)
class HybridConfig:
    """A decoder whose layers are attention or Mamba-2, in any order.

    Layer i is attention when i is in `attn_layers`, else Mamba-2. In a Mamba-2 mixer head h reads
    x from group h // (num_ssm_heads // num_x_groups), and B and C likewise: MambaInLlama shares x
    and B among heads as grouped-query attention shares v and k, Mamba-2 proper shares B and C.

    Raises `UsageError` when the numbers do not fit together.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    attn_layers: tuple[int, ...] = ()
    intermediate_size: int = 0  # SwiGLU width; 0: no MLP, as in pure Mamba-2 models
    rms_norm_eps: float = 1e-5
    tie_embeddings: bool = False

    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None  # Llama 3's, with config.json's keys
    max_position_embeddings: int = 4096

    num_ssm_heads: int = 0
    ssm_head_dim: int = 0
    d_state: int = 0
    num_x_groups: int = 0
    num_b_groups: int = 0
    num_c_groups: int = 0
    repeat_before_conv: bool = False  # MambaInLlama's repeat_kv_before_conv
    d_conv: int = 4
    conv_bias: bool = True
    gated_norm_groups: int = 1
    gated_norm_eps: float = 1e-5
    chunk_size: int = 64
    dt_limit: tuple[float, float] = (0.0, math.inf)

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in ("attn_layers", "dt_limit", "eos_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("vocab_size", "d_model", "num_layers", "chunk_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.num_layers > MAX_LAYERS:
            raise UsageError(f"num_layers is {self.num_layers}, it must be at most {MAX_LAYERS}")
        if self.chunk_size > MAX_CHUNK_SIZE:
            raise UsageError(
                f"chunk_size is {self.chunk_size}, it must be at most {MAX_CHUNK_SIZE}"
            )
        for name in ("rms_norm_eps", "gated_norm_eps", "rope_theta"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name} is {getattr(self, name)}, it must be a finite number")
        if not 0 <= self.dt_limit[0] <= self.dt_limit[-1]:
            raise UsageError(f"dt_limit is {self.dt_limit}, it must be a lower and an upper bound")
        bad = [i for i in self.attn_layers if not 0 <= i < self.num_layers]
        if bad or len(set(self.attn_layers)) != len(self.attn_layers):
            raise UsageError(
                f"attn_layers {self.attn_layers} must be distinct layer indices below "
                f"num_layers = {self.num_layers}"
            )
        if self.attn_layers:
            self._require_positive("attention", "num_heads", "num_kv_heads", "head_dim")
            self._require_divides("num_kv_heads", "num_heads")
            if self.head_dim % 2:
                raise UsageError(f"head_dim is {self.head_dim}, rotary embedding needs it even")
            self._require_possible_rope()
        if len(self.attn_layers) < self.num_layers:
            groups = ("num_x_groups", "num_b_groups", "num_c_groups")
            self._require_positive("Mamba-2", "num_ssm_heads", "ssm_head_dim", "d_state", *groups)
            for name in groups:
                self._require_divides(name, "num_ssm_heads")
            self._require_divides("gated_norm_groups", "d_inner")
            if self.d_conv < 2:
                raise UsageError(
                    f"d_conv is {self.d_conv}, a Mamba-2 layer's convolution sees at least 2 tokens"
                )

    def _require_possible_rope(self) -> None:
        rope = self.rope_scaling or {}
        if rope.get("rope_type", rope.get("type", "default")) != "llama3":
            return
        names = (*ROPE_NUMBERS, ROPE_LENGTH)
        numbers: list[Any] = [rope.get(name) for name in names]
        factor, low, high, length = numbers
        if not all(isinstance(number, int | float) for number in numbers) or not (
            1 <= factor < math.inf and 0 < low < high < math.inf and 1 <= length < math.inf
        ):
            raise UsageError(
                f"rope_scaling has {dict(zip(names, numbers, strict=True))}: wanted factor of at "
                f"least 1, 0 < low_freq_factor < high_freq_factor, {ROPE_LENGTH} of at least 1"
            )

    def _require_positive(self, kind: str, *names: str) -> None:
        missing = [name for name in names if getattr(self, name) < 1]
        if missing:
            raise UsageError(f"the model has {kind} layers, so set {', '.join(missing)} above 0")

    def _require_divides(self, small: str, large: str) -> None:
        if getattr(self, small) < 1 or getattr(self, large) % getattr(self, small):
            raise UsageError(
                f"{large} = {getattr(self, large)} is no multiple of "
                f"{small} = {getattr(self, small)}"
            )

    @property
    def d_inner(self) -> int:
        return self.num_ssm_heads * self.ssm_head_dim

    @property
    def mixer_shape(self) -> MixerShape:
        """Dimensions of a Mamba-2 mixer, as the kernels take them."""
        return MixerShape(
            self.num_ssm_heads, self.ssm_head_dim, self.d_state,
            self.num_x_groups, self.num_b_groups, self.num_c_groups,
            self.d_conv, self.repeat_before_conv, self.dt_limit,
        )  # fmt: skip

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution over [x, B, C]."""
        x_groups, b_groups, c_groups = self.mixer_shape.scan_groups
        return x_groups * self.ssm_head_dim + (b_groups + c_groups) * self.d_state

    @property
    def in_proj_dim(self) -> int:
        """Rows of the input projection: z, x, B, C, dt."""
        return self.d_inner + self.mixer_shape.num_kept

    def is_attention(self, layer: int) -> bool:
        return layer in self.attn_layers

    def replace(self, **changes: Any) -> HybridConfig:
        return replace(self, **changes)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> HybridConfig:
        """Build from plain values; an unknown key raises `UsageError`."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise UsageError(f"unknown model keys {unknown}; known: {sorted(known)}")
        return cls(**values)
