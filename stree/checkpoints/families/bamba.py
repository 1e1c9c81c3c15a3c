"""Bamba: Mamba-2 with some attention layers, rotary on half of a head, an MLP after each."""

from __future__ import annotations

from collections.abc import Collection

from stree.checkpoints import config_parts
from stree.checkpoints.checked_json import CheckedJson
from stree.checkpoints.names import Names, in_layers
from stree.checkpoints.sources import Layout, Rename, Source, named, rotary_order
from stree.models.config import HybridConfig

ROTARY_SHARE = 0.5  # whatever partial_rotary_factor says beside the table
NAMES = Names({
    "model.final_layernorm": "model.norm",
    **in_layers({
        "pre_ff_layernorm": "post_attention_layernorm",
        "feed_forward.gate_proj": "mlp.gate_proj",
        "feed_forward.up_proj": "mlp.up_proj",
        "feed_forward.down_proj": "mlp.down_proj",
    }),
})


def spec(values: CheckedJson) -> HybridConfig:
    values.require(hidden_act="silu")
    common = config_parts.decoder(values, positions=262144, kv_heads=8)
    rope = config_parts.rope(values, head_dim=common["head_dim"], usual_share=ROTARY_SHARE)
    values.require(attn_rotary_emb=rope["rotary_dim"])  # an older name for it
    eps = values.number("rms_norm_eps", 1e-5)
    return HybridConfig(
        attn_layers=tuple(sorted(set(values.indices("attn_layer_indices", [])))),
        intermediate_size=values.integer("intermediate_size", 14336),
        rms_norm_eps=eps,
        gated_norm_eps=eps,
        attention_bias=values.boolean("attention_bias", False),
        mlp_bias=values.boolean("mlp_bias", False),
        **common,
        **rope,
        **config_parts.mamba(values),
    )


def rename(values: CheckedJson, config: HybridConfig, stored: Collection[str]) -> Rename:
    order = rotary_order(config)

    def source(name: str) -> Source:
        rotated = ".q_proj." in name or ".k_proj." in name
        return named(NAMES, name, config, stored, order if rotated else None)

    return source


LAYOUT = Layout("Bamba", ("bamba",), spec, rename, frozenset({"z_loss_coefficient"}))
