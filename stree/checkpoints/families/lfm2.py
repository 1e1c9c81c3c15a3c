"""LFM2: gated short convolutions and some attention layers with normed q and k."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from stree.checkpoints import config_parts
from stree.checkpoints.checked_json import CheckedJson
from stree.checkpoints.names import Names, in_layers
from stree.checkpoints.sources import Layout, Rename, named
from stree.models.config import HybridConfig

KINDS = {"conv": "short_conv", "full_attention": "attention", "attention": "attention"}
LAYER_NAMES = {
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "conv.conv": "short_conv.conv",
    "conv.in_proj": "short_conv.in_proj",
    "conv.out_proj": "short_conv.out_proj",
    "self_attn.q_layernorm": "self_attn.q_norm",
    "self_attn.k_layernorm": "self_attn.k_norm",
    "self_attn.out_proj": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}
NAMES = Names({"model.embedding_norm": "model.norm", **in_layers(LAYER_NAMES)})


def spec(values: CheckedJson) -> HybridConfig:
    values.require(block_use_swiglu=True)
    shared = common(values)
    every = range(shared["num_layers"])
    attention = values.indices("full_attn_idxs", list(every))
    mixers = config_parts.layers(values, KINDS, "layer_types")
    if mixers is None:
        mixers = ["attention" if layer in attention else "short_conv" for layer in every]
    return HybridConfig(
        layer_types=tuple(f"{mixer} mlp" for mixer in mixers),
        intermediate_size=_width(values),
        **shared,
    )


def common(values: CheckedJson) -> dict[str, Any]:
    """Read the keys that LFM2-MoE's config shares: all except the layers and their MLPs."""
    fields = config_parts.decoder(values, positions=128000, kv_heads=8, tied=True)
    # The older name counts
    fields["tie_embeddings"] = values.boolean("tie_embedding", fields["tie_embeddings"])
    return {
        "rms_norm_eps": values.number("norm_eps", 1e-5),
        "qk_norm": True,
        "d_conv": values.integer("conv_L_cache", 3),
        "short_conv_bias": values.boolean("conv_bias", False),
        **fields,
        **config_parts.rope(values, usual_theta=1e6),
    }


def _width(values: CheckedJson) -> int:
    """Return the MLP's width: two thirds of the config's, times a multiplier, rounded up."""
    width = values.integer("block_ff_dim", values.integer("intermediate_size", 12288))
    multiplier = values.number("block_ffn_dim_multiplier", 1.0)
    multiple = values.integer("block_multiple_of", 256)
    if not values.boolean("block_auto_adjust_ff_dim", True):
        return width
    if not 0 < multiplier < width or not multiple:
        values.refuse(
            f"has block_ffn_dim_multiplier {multiplier} and block_multiple_of {multiple}, wanted "
            "numbers above 0"
        )
    width = int(multiplier * int(2 * width / 3))
    return -(-width // multiple) * multiple


def rename(values: CheckedJson, config: HybridConfig, stored: Collection[str]) -> Rename:
    return lambda name: named(NAMES, name, config, stored)


LAYOUT = Layout("LFM2", ("lfm2",), spec, rename)
