"""Bamba: Mamba-2 with some attention layers, rotary on half of a head, an MLP after each."""

from __future__ import annotations

from collections.abc import Collection

from stree.checkpoints import config_parts
from stree.checkpoints.checked_json import CheckedJson
from stree.checkpoints.sources import Layout, Rename, Source, rotary_order, translated
from stree.models.config import HybridConfig

ROTARY_SHARE = 0.5  # whatever partial_rotary_factor says beside the table
WORDS = {
    "model.norm.": "model.final_layernorm.",
    ".post_attention_layernorm.": ".pre_ff_layernorm.",
    ".mlp.": ".feed_forward.",
}


def spec(values: CheckedJson) -> HybridConfig:
    values.require("hidden_act", "silu", default="silu")
    d_model, num_layers = values.integer("hidden_size"), config_parts.num_layers(values)
    attention = values.indices("attn_layer_indices", [])
    theta, scaling, share = config_parts.rope(values, ROTARY_SHARE)
    heads = config_parts.heads(values, d_model, usual_kv_heads=8)
    rotary_dim = int(heads["head_dim"] * share)
    values.require("attn_rotary_emb", rotary_dim, default=rotary_dim)  # an older name for it
    proj_bias = values.boolean("mamba_proj_bias", False)
    eps = values.number("rms_norm_eps", 1e-5)
    return HybridConfig(
        vocab_size=values.integer("vocab_size"),
        d_model=d_model,
        num_layers=num_layers,
        attn_layers=tuple(sorted(set(attention))),
        intermediate_size=values.integer("intermediate_size", 14336),
        rms_norm_eps=eps,
        tie_embeddings=values.boolean("tie_word_embeddings", False),
        rope_theta=theta,
        rope_scaling=scaling,
        rotary_dim=rotary_dim,
        max_position_embeddings=values.integer("max_position_embeddings", 262144),
        attention_bias=values.boolean("attention_bias", False),
        mlp_bias=values.boolean("mlp_bias", False),
        mamba_in_bias=proj_bias,
        mamba_out_bias=proj_bias,
        gated_norm_eps=eps,
        **heads,
        **config_parts.mamba(values, d_model),
        **config_parts.special_tokens(values),
    )


def rename(values: CheckedJson, config: HybridConfig, stored: Collection[str]) -> Rename:
    order = rotary_order(config)

    def source(name: str) -> Source:
        place = (translated(name, WORDS),)
        return Source(place, order) if ".q_proj." in name or ".k_proj." in name else Source(place)

    return source


LAYOUT = Layout("Bamba", ("bamba",), spec, rename, frozenset({"z_loss_coefficient"}))
