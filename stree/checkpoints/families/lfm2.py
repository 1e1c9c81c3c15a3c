"""LFM2: gated short convolutions and some attention layers with normed q and k."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from stree.checkpoints import config_parts
from stree.checkpoints.checked_json import CheckedJson
from stree.checkpoints.sources import Layout, Rename, Source, translated
from stree.common.errors import CheckpointRefused
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
    values.require("block_use_swiglu", True, default=True)
    mixers = _mixers(values, config_parts.num_layers(values))
    return HybridConfig(
        layer_types=tuple(f"{mixer} mlp" for mixer in mixers),
        intermediate_size=_width(values),
        **common(values),
    )


def common(values: CheckedJson) -> dict[str, Any]:
    """Read the keys that LFM2-MoE's config shares: all except the layers and their MLPs."""
    d_model = values.integer("hidden_size")
    theta, scaling, _ = config_parts.rope(values, usual_theta=1e6)
    tied = values.boolean("tie_word_embeddings", True)
    return {
        "vocab_size": values.integer("vocab_size"),
        "d_model": d_model,
        "num_layers": config_parts.num_layers(values),
        "rms_norm_eps": values.number("norm_eps", 1e-5),
        "tie_embeddings": values.boolean("tie_embedding", tied),  # the older name counts
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": values.integer("max_position_embeddings", 128000),
        "qk_norm": True,
        "d_conv": values.integer("conv_L_cache", 3),
        "short_conv_bias": values.boolean("conv_bias", False),
        **config_parts.heads(values, d_model, usual_kv_heads=8),
        **config_parts.special_tokens(values),
    }


def _mixers(values: CheckedJson, num_layers: int) -> list[str]:
    attention = values.indices("full_attn_idxs", list(range(num_layers)))
    if values.get("layer_types") is None:
        return ["attention" if i in attention else "short_conv" for i in range(num_layers)]
    mixers = config_parts.layer_list(values, "layer_types", KINDS)
    config_parts.require_count(values, "layer_types", mixers)
    return mixers


def _width(values: CheckedJson) -> int:
    """Return the MLP's width: two thirds of the config's, times a multiplier, rounded up."""
    width = values.integer("block_ff_dim", values.integer("intermediate_size", 12288))
    multiplier = values.number("block_ffn_dim_multiplier", 1.0)
    multiple = values.integer("block_multiple_of", 256)
    if not values.boolean("block_auto_adjust_ff_dim", True):
        return width
    if not 0 < multiplier < width or not multiple:
        raise CheckpointRefused(
            f"{values.path} has block_ffn_dim_multiplier {multiplier} and block_multiple_of "
            f"{multiple}, wanted numbers above 0: copy it again"
        )
    width = int(multiplier * int(2 * width / 3))
    return -(-width // multiple) * multiple


def rename(values: CheckedJson, config: HybridConfig, stored: Collection[str]) -> Rename:
    return lambda name: Source((translated(name, WORDS),))


LAYOUT = Layout("LFM2", ("lfm2",), spec, rename)
