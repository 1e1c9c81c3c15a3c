"""Config of a model: its layers, the blocks in them, and the dimensions of each kind."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from stree.common.errors import UsageError
from stree.models.config.layer_types import MIXERS, Block, blocks_of
from stree.models.config.mixers import (
    MAX_EXPERTS,
    MLP_KINDS,
    AttentionConfig,
    ExpertsConfig,
    GatedDeltaConfig,
    Mamba1Config,
    MambaConfig,
    MLPConfig,
    SharedBlocksConfig,
    ShortConvConfig,
)

MAX_LAYERS = 1000  # A mistyped larger number would build layers for hours before an error.
MAX_CHUNK_SIZE = 4096  # the scan's memory grows with its square

_BOUNDS = {  # of fields
    "vocab_size": (1, math.inf), "d_model": (1, math.inf), "num_layers": (1, MAX_LAYERS),
    "chunk_size": (1, MAX_CHUNK_SIZE), "num_experts": (0, MAX_EXPERTS),
    "rms_norm_eps": (0, math.inf), "gated_norm_eps": (0, math.inf), "rope_theta": (0, math.inf),
    "router_floor": (0, math.inf), "sliding_window": (0, math.inf),
}
_CHOICES = {
    "mlp_kind": MLP_KINDS, "router": ("softmax", "sigmoid"),
    "gated_norm": ("gate, norm", "norm, gate", "gate"),
}
# Norms that some EAGLE-3 heads have: of all features together, of each layer's; the first layer's
# stream begins with its norm; own hidden states are those after the final norm
EAGLE_NORMS = ("features", "each", "residual", "own")
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
    "mamba1": (("mamba1_channels", "d_state", "dt_rank"), ()),
    "gated_delta": (
        ("num_delta_heads", "num_delta_key_heads", "delta_key_dim", "delta_value_dim"),
        (("num_delta_key_heads", "num_delta_heads"),),
    ),
}


@dataclass(frozen=True)
class HybridConfig(
    AttentionConfig, MambaConfig, Mamba1Config, GatedDeltaConfig, ShortConvConfig,
    MLPConfig, ExpertsConfig, SharedBlocksConfig,
):
    """Config of a decoder whose layers have one or two blocks each, in any order.

    `layer_types` describes each layer: blocks that follow one another, separated by spaces, parts
    of one block that run side by side joined by "+". "mamba mlp" is a mixer, then an MLP;
    "mamba+attention mlp" has both mixers on one normed input; "experts+shared_mlp" has no mixer;
    "shared0>mamba" adds the output of shared transformer block 0, which reads the stream and the
    embeddings, to its mixer's input; "attention>norm" norms the block's output instead of its
    input. Without `layer_types`, layer i is attention when i is in `attn_layers`, else Mamba-2, and
    an MLP follows when `intermediate_size` is set. With `layer_types`, `attn_layers` follows from
    them.

    The fields of each kind of part stand in its own config (`stree.models.config.mixers`), and hold
    for all layers with such a part. They are given by name.

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
    layer_types: tuple[str, ...] = ()
    rms_norm_eps: float = 1e-5
    final_norm_bias: bool = False  # added to the last norm, before the head
    tie_embeddings: bool = False
    head_vocab_size: int = 0  # tokens of a head over a part of the vocabulary (`head_ids`); 0: all
    head_rank: int = 0  # rank of a head that is two products, down and up; 0: one product
    max_position_embeddings: int = 4096

    feature_layers: tuple[int, ...] = ()  # a drafter's: the target's layers whose outputs it reads
    target_width: int = 0  # d_model and num_layers of that target
    target_num_layers: int = 0
    own_features: bool = False  # further down a draft it reads its own last hidden state
    fused_inputs: bool = False  # it projects [embedding, hidden state], as MTP heads do
    eagle_inputs: bool = False  # its first attention reads [embedding, hidden state], as EAGLE-3's
    eagle_norms: tuple[str, ...] = ()  # further norms of such a head, some of EAGLE_NORMS

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
        for name in ("attn_layers", "layer_types", "dt_limit", "eos_token_ids", "feature_layers",
                     "eagle_norms"):
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
        if any(map(self.has, MIXERS[1:])) and self.d_conv < 2:
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
        last = self.target_num_layers - 1, self.d_model
        if self.fused_inputs and not (
            self.own_features and (*features, self.target_width) == last
        ):
            yield (
                "fused_inputs are of the last layer of a target of the same width, and further "
                "down a draft of the drafter's own: set feature_layers, target_width and "
                "own_features so"
            )
        if self.eagle_inputs and (
            self.fused_inputs or not self.own_features or self.mixers(0) != ("attention",)
            or self.layer_type(0).split()[0] != "attention"
        ):
            yield (
                f"eagle_inputs are for a first layer of attention, this one is "
                f"{self.layer_type(0)!r}, without fused_inputs and with own_features"
            )
        if other := [each for each in self.eagle_norms if each not in EAGLE_NORMS]:
            yield f"eagle_norms has {other[0]!r}, wanted some of {', '.join(EAGLE_NORMS)}"
        if self.attn_layers:
            yield from self._attention_complaints()
        if self.has("experts"):
            yield from self._router_complaints()

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
            blocks = blocks_of(layer_type)
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
        return blocks_of(self.layer_type(layer))

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
            blocks = [block for each in self.layer_types for block in blocks_of(each)]
            return any(part in block.parts for block in blocks)
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

    def mtp_head(self, layer_types: Sequence[str]) -> HybridConfig:
        """Return the config of this target's head for multi-token prediction, as a drafter."""
        head = self.replace(
            num_layers=len(layer_types), layer_types=layer_types, attn_layers=()
        ).reading((self.num_layers - 1,), self, own=True)
        return head.replace(fused_inputs=True)

    def eagle_head(self, layers: tuple[int, ...]) -> HybridConfig:
        """Return the config of an EAGLE-3 head of this target, of one layer with an MLP.

        It reads the hidden states after `layers`. A target without attention or MLP has no
        dimensions for it: give `HybridConfig` them.
        """
        head = self.replace(num_layers=1, layer_types=("attention mlp",), attn_layers=())
        return head.reading(layers, self, own=True).replace(eagle_inputs=True)

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
