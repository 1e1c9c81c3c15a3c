"""LFM2: gated short convolutions and some attention layers with normed q and k."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from stree.checkpoints import config_parts
from stree.checkpoints.checked_json import CheckedJson
from stree.checkpoints.sources import Layout, Rename, Source, translated
from stree.models.config import HybridConfig

KINDS = {"conv": "short_conv", "full_attention": "attention", "attention": "attention"}
WORDS = {
    "model.norm.": "model.embedding_norm.",
    ".input_layernorm.": ".operator_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
    ".short_conv.": ".conv.",
    ".mlp.gate_proj.": ".feed_forward.w1.",
    ".mlp.up_proj.": ".feed_forward.w3.",
    ".mlp.down_proj.": ".feed_forward.w2.",
    ".q_norm.": ".q_layernorm.",
    ".k_norm.": ".k_layernorm.",
    ".o_proj.": ".out_proj.",
}


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
    return lambda name: Source((translated(name, WORDS),))


LAYOUT = Layout("LFM2", ("lfm2",), spec, rename)
