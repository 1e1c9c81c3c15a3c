"""OLMo-Hybrid: the gated delta rule with negative eigenvalues, and some attention layers.

Norms of attention layers come after their blocks. All heads of q share one norm, and all of k.
Positions are rotary, or there are none.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from stree.checkpoints import config_keys, config_parts
from stree.checkpoints.checked_json import CheckedJson
from stree.checkpoints.names import Names, in_layers
from stree.checkpoints.sources import Layout, Rename, Source, joined, named
from stree.models.config import HybridConfig

KINDS = {"linear_attention": "gated_delta mlp", "full_attention": "attention>norm mlp>norm"}
ATTENTION_EVERY = 4  # layers, where no list says it
GATED_NORM_EPS = 1e-5  # whatever rms_norm_eps says
GATED_DELTA = {
    "linear_attn.q_proj": "gated_delta.in_proj_qkv",
    "linear_attn.k_proj": "gated_delta.in_proj_qkv",
    "linear_attn.v_proj": "gated_delta.in_proj_qkv",
    "linear_attn.g_proj": "gated_delta.in_proj_z",
    "linear_attn.a_proj": "gated_delta.in_proj_a",
    "linear_attn.b_proj": "gated_delta.in_proj_b",
    "linear_attn.o_proj": "gated_delta.out_proj",
    "linear_attn.o_norm": "gated_delta.norm",
    "linear_attn.dt_bias": "gated_delta.dt_bias",
    "linear_attn.A_log": "gated_delta.A_log",
    "linear_attn.conv1d": "gated_delta.conv1d",
    "linear_attn.q_conv1d": "gated_delta.conv1d",  # where transformers has saved the model
    "linear_attn.k_conv1d": "gated_delta.conv1d",
    "linear_attn.v_conv1d": "gated_delta.conv1d",
}
# Norms are before a block, or after it. Each has the name that newer versions of transformers give
# it once it is loaded, and that under which it is stored
NAMES = {
    "gated_delta mlp": Names(in_layers({
        **GATED_DELTA,
        "input_layernorm": "input_layernorm",
        "attention_layer_norm": "input_layernorm",
        "post_attention_layernorm": "post_attention_layernorm",
        "feedforward_layer_norm": "post_attention_layernorm",
    })),
    "attention>norm mlp>norm": Names(in_layers({
        "post_attention_layernorm": "input_layernorm",
        "feedforward_layer_norm": "input_layernorm",
        "post_feedforward_layernorm": "post_attention_layernorm",
    })),
}


def spec(values: CheckedJson) -> HybridConfig:
    values.require(hidden_act="silu")
    common = config_parts.decoder(values, positions=65536, num_heads=30)
    num_heads = common["num_heads"]
    key_heads = values.integer("linear_num_key_heads", num_heads)
    usual_key_dim = int(0.75 * common["d_model"] / max(key_heads, 1))
    key_dim = values.integer("linear_key_head_dim", usual_key_dim)
    return HybridConfig(
        layer_types=tuple(_layers(values, common["num_layers"])),
        intermediate_size=values.integer("intermediate_size", 11008),
        rms_norm_eps=values.number("rms_norm_eps", 1e-6),
        attention_bias=values.boolean("attention_bias", False),
        qk_norm=True,
        qk_norm_whole=True,
        num_delta_heads=values.integer("linear_num_value_heads", num_heads),
        num_delta_key_heads=key_heads,
        delta_key_dim=key_dim,
        delta_value_dim=values.integer("linear_value_head_dim", 2 * key_dim),
        negative_eigenvalues=values.boolean("linear_allow_neg_eigval", True),
        d_conv=values.integer("linear_conv_kernel_dim", 4),
        conv_bias=False,
        gated_norm_eps=GATED_NORM_EPS,
        **common,
        **_positions(values),
    )


def _layers(values: CheckedJson, num_layers: int) -> list[str]:
    linear, full = KINDS.values()
    layers = config_parts.layers(values, KINDS, "layer_types")
    if layers is None:
        layers = [linear if (layer + 1) % ATTENTION_EVERY else full for layer in range(num_layers)]
        if full not in layers:
            layers[-1:] = [full]
    if missing := [name for name, kind in KINDS.items() if kind not in layers]:
        values.refuse(f"has no layer of {missing[0]}, wanted one of each kind")
    return layers


def _positions(values: CheckedJson) -> dict[str, Any]:
    """Read rotary positions, or none: then the base is null, in a table or outside of it."""
    tables = [
        values[name] for name in ("rope_parameters", "rope_scaling")
        if isinstance(values.get(name), Mapping) and values[name]
    ]
    outside = None if values.is_null("rope_theta") else values.get("rope_theta", 10000.0)
    bases = [table.get("rope_theta", outside) for table in tables] or [outside]
    if all(base is None for base in bases):
        return {"rotary_dim": 0}
    if None in bases:
        values.refuse(
            "has rope_parameters and rope_scaling of which one has no rope_theta",
            "delete the one that the checkpoint was not trained with",
        )
    if values.is_null("rope_parameters") and not tables and "rope_theta" not in values:
        values.refuse(
            "has rope_parameters = null, which some versions of transformers take for no positions "
            "and others for a rope_theta of 10000",
            "add rope_theta, null for no positions",
        )
    return config_parts.rope(values)


def rename(values: CheckedJson, config: HybridConfig, stored: Collection[str]) -> Rename:
    shape, d_model = config.gated_delta_shape, config.d_model

    def of_q_k_v(names: list[str], dims: tuple[int, ...], *splits: Sequence[int]) -> Source:
        return Source(
            tuple(names), joined, splits=tuple(tuple((n, *dims) for n in each) for each in splits)
        )

    def source(name: str) -> Source:
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer is None:
            return Source((name,))
        names = NAMES[config.layer_type(int(layer[1]))]
        if name.endswith(".gated_delta.in_proj_qkv.weight"):
            return of_q_k_v(names.published(name), (d_model,), shape.conv_dims)
        if name.endswith(".gated_delta.conv1d.weight"):
            whole, *cut = names.published(name)
            # Where transformers has saved the model, its one conv is cut into three equal parts
            third = -(-shape.num_channels // 3)
            thirds = (third, third, shape.num_channels - 2 * third)
            if whole not in stored:
                return of_q_k_v(cut, (1, shape.width), shape.conv_dims, thirds)
            return Source((whole,))
        return named(names, name, config, stored)

    return source


LAYOUT = Layout(
    "OLMo-Hybrid", ("olmo_hybrid",), spec, rename,
    config_keys.words("""
        linear_a_log_min linear_a_log_max linear_dt_min linear_dt_max linear_dt_init_floor
    """),  # of initialisation
    re.compile(r"mtp.*"),
)
