"""Config of a model: its layers, the blocks in them, and the dimensions of each kind."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from stree.common.errors import UsageError
from stree_kernels.contracts import GatedDeltaShape, MixerShape

MAX_LAYERS = 1000  # A mistyped larger number would build layers for hours before an error.
MAX_EXPERTS = 1024  # their names are written down before any weight is looked at
MAX_CHUNK_SIZE = 4096  # the scan's memory grows with its square
MLP_KINDS = ("swiglu", "geglu", "relu2")  # relu2 has no gate: down(relu(up)²)
ROPE_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor")
ROPE_LENGTH = "original_max_position_embeddings"

MIXERS = ("attention", "mamba", "short_conv", "gated_delta")  # with a memory of earlier tokens
PARTS = (*MIXERS, "mlp", "experts", "shared_mlp")
MOST_BLOCKS = 2  # of a layer
_BLOCK = re.compile(r"(?:shared(\d{1,3})>)?([a-z_]+(?:\+[a-z_]+)*)(>norm)?")

_BOUNDS = {  # of fields
    "vocab_size": (1, math.inf), "d_model": (1, math.inf), "num_layers": (1, MAX_LAYERS),
    "chunk_size": (1, MAX_CHUNK_SIZE), "num_experts": (0, MAX_EXPERTS),
    "rms_norm_eps": (0, math.inf), "gated_norm_eps": (0, math.inf), "rope_theta": (0, math.inf),
    "router_floor": (0, math.inf),
}
_CHOICES = {
    "mlp_kind": MLP_KINDS, "router": ("softmax", "sigmoid"),
    "gated_norm": ("gate, norm", "norm, gate", "gate"),
}
# Fields that a part needs above 0, and pairs of which the first must divide the second
_NEEDS: dict[str, tuple[tuple[str, ...], tuple[tuple[str, str], ...]]] = {
    "attention": (("num_heads", "num_kv_heads", "head_dim"), (("num_kv_heads", "num_heads"),)),
    "mlp": (("intermediate_size",), ()),
    "shared_mlp": (("shared_intermediate_size",), ()),
    "experts": (
        ("num_experts", "experts_per_token", "expert_intermediate_size"),
        (("router_groups", "num_experts"),),
    ),
    "shared block": (("adapter_rank",), ()),
    "mamba": (
        ("num_ssm_heads", "ssm_head_dim", "d_state", "num_x_groups", "num_b_groups",
         "num_c_groups"),
        (("num_x_groups", "num_ssm_heads"), ("num_b_groups", "num_ssm_heads"),
         ("num_c_groups", "num_ssm_heads"), ("gated_norm_groups", "d_inner")),
    ),
    "gated_delta": (
        ("num_delta_heads", "num_delta_key_heads", "delta_key_dim", "delta_value_dim"),
        (("num_delta_key_heads", "num_delta_heads"),),
    ),
}


@dataclass(frozen=True)
class Block:
    """Parts side by side after one norm; the sum of their outputs is added to the residual stream.

    With `shared`, the shared transformer block of that number runs first: its output is added to
    the norm's input, not to the stream. With `normed_after`, the parts read the stream itself, and
    the norm is of their summed outputs.
    """

    parts: tuple[str, ...]
    shared: int | None = None
    normed_after: bool = False


@dataclass(frozen=True)
class HybridConfig:
    """Config of a decoder whose layers have one or two blocks each, in any order.

    `layer_types` describes each layer: blocks that follow one another, separated by spaces, parts
    of one block that run side by side joined by "+". "mamba mlp" is a mixer, then an MLP;
    "mamba+attention mlp" has both mixers on one normed input; "experts+shared_mlp" has no mixer;
    "shared0>mamba" adds the output of shared transformer block 0, which reads the stream and the
    embeddings, to its mixer's input; "attention>norm" norms the block's output instead of its
    input. Without `layer_types`, layer i is attention when i is in `attn_layers`, else Mamba-2, and
    an MLP follows when `intermediate_size` is set. With `layer_types`, `attn_layers` follows from
    them.

    In a Mamba-2 mixer head h reads x from group h // (num_ssm_heads // num_x_groups), and B and C
    likewise: MambaInLlama shares x and B among heads as grouped-query attention shares v and k,
    Mamba-2 proper shares B and C.

    Raises `UsageError` when the numbers do not fit together.

    Example:
        >>> import stree
        >>> mamba = dict(num_ssm_heads=4, ssm_head_dim=8, d_state=16)
        >>> groups = dict(num_x_groups=4, num_b_groups=1, num_c_groups=1)
        >>> config = stree.HybridConfig(64, d_model=16, num_layers=2, **mamba, **groups)
        >>> [config.layer_type(layer) for layer in range(2)]
        ['mamba', 'mamba']
    """

    vocab_size: int
    d_model: int
    num_layers: int
    attn_layers: tuple[int, ...] = ()
    intermediate_size: int = 0  # an MLP's width; 0: no MLP, as in pure Mamba-2 models
    rms_norm_eps: float = 1e-5
    tie_embeddings: bool = False
    head_vocab_size: int = 0  # tokens of a head over a part of the vocabulary (`head_ids`); 0: all
    head_rank: int = 0  # rank of a head that is two products, down and up; 0: one product

    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None  # Llama 3's, with config.json's keys
    max_position_embeddings: int = 4096

    layer_types: tuple[str, ...] = ()
    rotary_dim: int | None = None  # channels of a head that are rotated; None all, 0 no positions
    attention_scale: float | None = None  # of the scores; None: head_dim^−½
    attention_bias: bool = False  # of all four projections
    qk_norm: bool = False  # RMS norms of each head's q and k, before the rotation
    qk_norm_whole: bool = False  # one norm of all heads' q instead, and one of all heads' k
    attention_gate: bool = False  # heads' outputs are multiplied by a sigmoid of the layer's input

    mlp_kind: str = "swiglu"  # one of MLP_KINDS
    mlp_bias: bool = False  # of the shared MLP and the experts' latent projections, too
    shared_intermediate_size: int = 0  # width of "shared_mlp"
    shared_gate: bool = False  # its output is multiplied by a sigmoid of its input, one a token
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    expert_latent_size: int = 0  # width of the experts' input and output; 0: d_model
    router: str = "softmax"  # or "sigmoid"
    router_groups: int = 1  # of experts, of which the router_top_groups best are chosen from
    router_top_groups: int = 1
    router_normalised: bool = True  # the chosen experts' weights sum to router_scale
    router_scale: float = 1.0
    router_floor: float = 1e-20  # added to the sum of a sigmoid router's chosen scores

    num_shared_blocks: int = 0  # transformer blocks that layers share ("shared0>…")
    adapter_rank: int = 0  # of each use's own low-rank terms
    attention_adapters: bool = False  # on q, k and v, beside those of the MLP

    num_delta_heads: int = 0  # of a gated delta rule: each has a state (key_dim, value_dim)
    num_delta_key_heads: int = 0
    delta_key_dim: int = 0
    delta_value_dim: int = 0
    negative_eigenvalues: bool = False  # of its state's transitions: β is 2·σ(b), not σ(b)

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
    gated_norm: str = "gate, norm"  # how a mixer is gated and normed
    mamba_in_bias: bool = False
    mamba_out_bias: bool = False
    short_conv_bias: bool = False  # of its projections, too
    chunk_size: int = 64
    dt_limit: tuple[float, float] = (0.0, math.inf)

    feature_layers: tuple[int, ...] = ()  # a drafter's: the target's layers whose outputs it reads
    target_width: int = 0  # d_model and num_layers of that target
    target_num_layers: int = 0
    own_features: bool = False  # further down a draft it reads its own last hidden state

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None

    @property
    def feature_width(self) -> int:
        """Channels of all features of a token."""
        return len(self.feature_layers) * self.target_width

    @property
    def num_positions(self) -> int | None:
        """Length of the longest sequence that the model was made for; None without positions."""
        has_positions = self.attn_layers and self.rotary_dim != 0
        return self.max_position_embeddings if has_positions else None

    def __post_init__(self) -> None:
        for name in ("attn_layers", "layer_types", "dt_limit", "eos_token_ids", "feature_layers"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        head_bounds = {"head_vocab_size": (0, self.vocab_size), "head_rank": (0, self.d_model)}
        for name, (least, most) in {**_BOUNDS, **head_bounds}.items():
            if not least <= getattr(self, name) <= most or getattr(self, name) == math.inf:
                limit = "finite" if most == math.inf else f"at most {most}"
                raise UsageError(
                    f"{name} is {getattr(self, name)}, it must be {limit} and at least {least}"
                )
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise UsageError(
                    f"{name} is {getattr(self, name)!r}, it must be one of {', '.join(known)}"
                )
        self._take_layer_types()
        shared = ("attention", "mlp", "shared block") if self.num_shared_blocks else ()
        for part, (needed, divisors) in _NEEDS.items():
            if not self.has(part) and part not in shared:
                continue
            if missing := [name for name in needed if getattr(self, name) < 1]:
                raise UsageError(f"the model has {part}, so set {', '.join(missing)} above 0")
            for small, large in divisors:
                size, whole = getattr(self, small), getattr(self, large)
                if size < 1 or whole % size:
                    raise UsageError(f"{large} = {whole} is no multiple of {small} = {size}")
        for complaint in self._complaints():
            raise UsageError(complaint)

    def _complaints(self) -> Iterator[str]:
        """Yield what is wrong with fields that each are possible, and together are not."""
        if not 0 <= self.dt_limit[0] <= self.dt_limit[-1]:
            yield f"dt_limit is {self.dt_limit}, it must be a lower and an upper bound"
        if self.tie_embeddings and (self.head_vocab_size or self.head_rank):
            yield (
                "the embedding cannot be a head of fewer tokens or lower rank: with "
                "head_vocab_size or head_rank, set tie_embeddings to false"
            )
        if not _distinct(self.attn_layers, self.num_layers):
            yield (
                f"attn_layers {self.attn_layers} must be distinct layer indices below "
                f"num_layers = {self.num_layers}"
            )
        if any(map(self.has, ("mamba", "short_conv", "gated_delta"))) and self.d_conv < 2:
            yield f"d_conv is {self.d_conv}, a convolution sees at least 2 tokens"
        features, count = self.feature_layers, self.target_num_layers
        if features or self.own_features:
            if not features or list(features) != sorted(features) or not _distinct(features, count):
                yield (
                    f"feature_layers {features} must be distinct layers, in order, of a target "
                    f"with target_num_layers = {count}"
                )
            if self.target_width < 1:
                yield "a drafter that reads features needs target_width above 0"
        if self.attn_layers:
            yield from self._attention_complaints()
        if self.has("experts"):
            yield from self._router_complaints()

    def _attention_complaints(self) -> Iterator[str]:
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
        if rope.get("rope_type", rope.get("type")) == "llama3":
            names = (*ROPE_NUMBERS, ROPE_LENGTH)
            numbers: list[Any] = [rope.get(name) for name in names]
            factor, low, high, length = numbers
            if not all(isinstance(number, int | float) for number in numbers) or not (
                1 <= factor < math.inf and 0 < low < high < math.inf and 1 <= length < math.inf
            ):
                yield (
                    f"rope_scaling has {dict(zip(names, numbers, strict=True))}: wanted factor of "
                    f"at least 1, 0 < low_freq_factor < high_freq_factor, {ROPE_LENGTH} of at "
                    "least 1"
                )

    def _router_complaints(self) -> Iterator[str]:
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

    def _take_layer_types(self) -> None:
        """Check `layer_types`, and set `attn_layers` by them."""
        if not self.layer_types:
            return
        if len(self.layer_types) != self.num_layers:
            raise UsageError(
                f"{len(self.layer_types)} layer_types for num_layers = {self.num_layers}"
            )
        with_attention = []
        for index, layer_type in enumerate(self.layer_types):
            blocks = _blocks(layer_type)
            parts = [part for block in blocks for part in block.parts]
            shared = [block.shared for block in blocks if block.shared is not None]
            if len(set(parts)) != len(parts):
                raise UsageError(f"layer_types has {layer_type!r}: a layer has each part once")
            if any(number >= self.num_shared_blocks for number in shared):
                raise UsageError(
                    f"layer_types has {layer_type!r}, there are num_shared_blocks = "
                    f"{self.num_shared_blocks}"
                )
            if "attention" in parts or shared:
                with_attention.append(index)
        if self.attn_layers not in ((), tuple(with_attention)):
            raise UsageError(
                f"attn_layers {self.attn_layers} differ from those of layer_types, "
                f"{tuple(with_attention)}: leave them out"
            )
        object.__setattr__(self, "attn_layers", tuple(with_attention))

    @property
    def head_size(self) -> int:
        """Tokens that the head is over."""
        return self.head_vocab_size or self.vocab_size

    @property
    def d_inner(self) -> int:
        """Channels of a Mamba-2 mixer's x: heads times head dim."""
        return self.num_ssm_heads * self.ssm_head_dim

    @property
    def mixer_shape(self) -> MixerShape:
        """Dimensions of a Mamba-2 mixer, as the kernels take them."""
        return MixerShape(
            self.num_ssm_heads, self.ssm_head_dim, self.d_state,
            self.num_x_groups, self.num_b_groups, self.num_c_groups,
            self.d_conv, self.repeat_before_conv, self.dt_limit, self.gated_norm == "gate",
        )

    @property
    def gated_delta_shape(self) -> GatedDeltaShape:
        """Dimensions of a gated delta rule's mixer, as the kernels take them."""
        return GatedDeltaShape(
            self.num_delta_heads, self.num_delta_key_heads, self.delta_key_dim,
            self.delta_value_dim, self.d_conv, self.negative_eigenvalues,
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

    def is_attention(self, layer: int) -> bool:
        """Return whether a layer has attention."""
        return layer in self.attn_layers

    def layer_type(self, layer: int) -> str:
        """Return a layer's description in the words of `layer_types`."""
        if self.layer_types:
            return self.layer_types[layer]
        mixer = "attention" if self.is_attention(layer) else "mamba"
        return f"{mixer} mlp" if self.intermediate_size else mixer

    def blocks(self, layer: int) -> tuple[Block, ...]:
        """Return the blocks of a layer, in order."""
        return _blocks(self.layer_type(layer))

    def mixers(self, layer: int) -> tuple[str, ...]:
        """Return the kinds of a layer's mixers, in order.

        A shared transformer block counts as attention.
        """
        found = []
        for block in self.blocks(layer):
            if block.shared is not None:
                found.append("attention")
            found += [part for part in block.parts if part in MIXERS]
        return tuple(found)

    def has(self, part: str) -> bool:
        """Return whether any layer has such a part."""
        if self.layer_types:
            return any(part in block.parts for each in self.layer_types for block in _blocks(each))
        if part == "mlp":
            return self.intermediate_size > 0
        return {
            "attention": bool(self.attn_layers),
            "mamba": len(self.attn_layers) < self.num_layers,
        }.get(part, False)

    def keep_layers(self, chosen: Sequence[int]) -> HybridConfig:
        """Return the config of a decoder of the chosen layers, in the order given."""
        if not self.layer_types:
            attention = tuple(new for new, old in enumerate(chosen) if self.is_attention(old))
            return self.replace(num_layers=len(chosen), attn_layers=attention)
        types = [self.layer_types[layer] for layer in chosen]
        shared = self.shared_blocks_of(chosen)
        for new, old in enumerate(shared):  # in order, so that no name is changed twice
            types = [each.replace(f"shared{old}>", f"shared{new}>") for each in types]
        return self.replace(
            num_layers=len(chosen), layer_types=tuple(types), attn_layers=(),
            num_shared_blocks=len(shared),
        )

    def shared_blocks_of(self, layers: Sequence[int]) -> list[int]:
        """Return the numbers of the shared transformer blocks that some layers use, in order."""
        blocks = [block for layer in layers for block in self.blocks(layer)]
        return sorted({block.shared for block in blocks if block.shared is not None})

    def reading(
        self, layers: tuple[int, ...], target: HybridConfig, own: bool = False
    ) -> HybridConfig:
        """Return the config of such a drafter that reads hidden states of a target's layers.

        own says whether it reads its own hidden states further down a draft.
        """
        return self.replace(
            feature_layers=layers, target_width=target.d_model,
            target_num_layers=target.num_layers, own_features=own,
        )

    def replace(self, **changes: Any) -> HybridConfig:
        """Return a copy with other values of some fields."""
        return replace(self, **changes)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> HybridConfig:
        """Build from plain values; an unknown key raises `UsageError`."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise UsageError(f"unknown model keys {unknown}; known: {sorted(known)}")
        return cls(**values)


def _distinct(layers: Sequence[int], count: int) -> bool:
    """Return whether layers are different numbers below `count`."""
    return len(set(layers)) == len(layers) and all(0 <= layer < count for layer in layers)


@functools.lru_cache(maxsize=256)
def _blocks(layer_type: str) -> tuple[Block, ...]:
    """Return the blocks that one of `layer_types` describes."""
    blocks = []
    words = layer_type.split() if isinstance(layer_type, str) else []
    for word in words:
        match = _BLOCK.fullmatch(word)
        parts = tuple(match[2].split("+")) if match else ()
        if match is None or not set(parts) <= set(PARTS):
            raise UsageError(
                f"layer_types has {layer_type!r:.99}: a block is one or several of "
                f"{', '.join(PARTS)}, joined by '+'"
            )
        shared = None if match[1] is None else int(match[1])
        blocks.append(Block(parts, shared, match[3] is not None))
    if not 1 <= len(blocks) <= MOST_BLOCKS:
        raise UsageError(
            f"layer_types has {layer_type!r:.99}: a layer has 1 to {MOST_BLOCKS} blocks"
        )
    return tuple(blocks)
