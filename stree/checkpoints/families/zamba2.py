"""Zamba2: Mamba-2 layers, some of them after a shared transformer block.

The few shared blocks read [hidden, embeddings]; each use of one has its own adapters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import replace

from stree.checkpoints import config_parts
from stree.checkpoints.checked_json import CheckedJson
from stree.checkpoints.names import Names, in_layers
from stree.checkpoints.sources import Layout, Rename, Source, half
from stree.models.config import HybridConfig

KINDS = {"linear_attention": "mamba", "mamba": "mamba", "hybrid": "hybrid"}
ACTIVATIONS = {"gelu": "geglu", "silu": "swiglu"}
LONG_CONTEXT = 16384  # what use_long_context makes of max_position_embeddings
NAMES = Names({
    "model.final_layernorm": "model.norm",
    # stored with each layer that uses the block
    "model.layers.*.shared_transformer.input_layernorm": "model.shared.*.input_layernorm",
    "model.layers.*.shared_transformer.self_attn.q_proj": "model.shared.*.self_attn.q_proj",
    "model.layers.*.shared_transformer.self_attn.k_proj": "model.shared.*.self_attn.k_proj",
    "model.layers.*.shared_transformer.self_attn.v_proj": "model.shared.*.self_attn.v_proj",
    "model.layers.*.shared_transformer.self_attn.o_proj": "model.shared.*.self_attn.o_proj",
    "model.layers.*.shared_transformer.pre_ff_layernorm": "model.shared.*.post_attention_layernorm",
    "model.layers.*.shared_transformer.feed_forward.gate_up_proj": (
        "model.shared.*.mlp.gate_proj", "model.shared.*.mlp.up_proj",
    ),
    "model.layers.*.shared_transformer.feed_forward.down_proj": "model.shared.*.mlp.down_proj",
})
HYBRID_LAYER = Names(in_layers({
    "linear": "shared_use.out",
    "mamba_decoder.input_layernorm": "input_layernorm",
    "mamba_decoder.mamba.in_proj": "mamba.in_proj",
    "mamba_decoder.mamba.conv1d": "mamba.conv1d",
    "mamba_decoder.mamba.dt_bias": "mamba.dt_bias",
    "mamba_decoder.mamba.A_log": "mamba.A_log",
    "mamba_decoder.mamba.D": "mamba.D",
    "mamba_decoder.mamba.norm": "mamba.norm",
    "mamba_decoder.mamba.out_proj": "mamba.out_proj",
    # of a use of the block, whose number is the last *
    "shared_transformer.self_attn.linear_q_adapter_list.*.0": "shared_use.q_adapter.down",
    "shared_transformer.self_attn.linear_q_adapter_list.*.1": "shared_use.q_adapter.up",
    "shared_transformer.self_attn.linear_k_adapter_list.*.0": "shared_use.k_adapter.down",
    "shared_transformer.self_attn.linear_k_adapter_list.*.1": "shared_use.k_adapter.up",
    "shared_transformer.self_attn.linear_v_adapter_list.*.0": "shared_use.v_adapter.down",
    "shared_transformer.self_attn.linear_v_adapter_list.*.1": "shared_use.v_adapter.up",
    "shared_transformer.feed_forward.gate_up_proj_adapter_list.*.0": "shared_use.mlp_adapter.down",
    "shared_transformer.feed_forward.gate_up_proj_adapter_list.*.1": "shared_use.mlp_adapter.up",
}))


def spec(values: CheckedJson) -> HybridConfig:
    # Without it, transformers does not tie the shared blocks either
    values.require(tie_word_embeddings=True)
    layers = config_parts.layers(values, KINDS, "layers_block_type")
    if layers is None:
        values.refuse("has no layers_block_type")
    values.set("num_hidden_layers", len(layers))
    common = config_parts.decoder(values, positions=4096, tied=True)
    d_model, num_heads = common["d_model"], common["num_heads"]
    uses = [layer for layer, kind in enumerate(layers) if kind == "hybrid"]
    blocks = min(values.integer("num_mem_blocks", 1), len(uses))
    if uses and not blocks:
        values.refuse(f"has num_mem_blocks 0 for {len(uses)} hybrid layers")
    for number, layer in enumerate(uses):
        layers[layer] = f"shared{number % blocks}>mamba"
    width = values.integer("intermediate_size", 0) or 4 * d_model
    head_dim = config_parts.quotient(values, 2 * d_model, "num_attention_heads", num_heads)
    ssm_heads = values.integer("n_mamba_heads", 8)
    d_inner = values.integer("mamba_expand", 2) * d_model
    ssm_head_dim = config_parts.quotient(values, d_inner, "n_mamba_heads", ssm_heads)
    if "n_mamba_heads" not in values and values.get("mamba_headdim", 0) not in (0, ssm_head_dim):
        values.refuse(
            "has no n_mamba_heads, as in early revisions of Zamba2, which named its dimensions "
            "otherwise", "use a newer revision of the checkpoint",
        )
    values.require(
        attention_hidden_size=2 * d_model, attention_head_dim=head_dim, head_dim=head_dim,
        mamba_headdim=ssm_head_dim, hybrid_layer_ids=uses, use_shared_mlp_adapter=True,
        ffn_hidden_size=width,
    )
    activation = values.get("hidden_act", "gelu")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        values.refuse(f"has hidden_act {activation!r:.99}, wanted one of {', '.join(ACTIVATIONS)}")
    bias, groups = values.boolean("add_bias_linear", False), values.integer("mamba_ngroups", 1)
    if values.boolean("use_long_context", False):
        common["max_position_embeddings"] = LONG_CONTEXT
    return HybridConfig(
        **{**common, "head_dim": head_dim},
        layer_types=tuple(layers),
        intermediate_size=width,
        rms_norm_eps=values.number("rms_norm_eps", 1e-5),
        rotary_dim=None if values.boolean("use_mem_rope", False) else 0,
        attention_scale=(head_dim / 2) ** -0.5,
        mlp_kind=ACTIVATIONS[activation],
        mlp_bias=bias,
        num_shared_blocks=blocks,
        adapter_rank=values.integer("adapter_rank", 128),
        attention_adapters=values.boolean("use_shared_attention_adapter", False),
        d_conv=values.integer("mamba_d_conv", 4),
        mamba_in_bias=bias,
        mamba_out_bias=bias,
        chunk_size=values.integer("chunk_size", 256),
        dt_limit=(values.number("time_step_min", 0.001), math.inf),
        **config_parts.mixer(
            ssm_heads, ssm_head_dim, values.integer("mamba_d_state", 64), groups
        ),
        **config_parts.rope(values),
    )


def rename(values: CheckedJson, config: HybridConfig, stored: Collection[str]) -> Rename:
    uses = [layer for layer in range(config.num_layers) if config.is_attention(layer)]
    blocks, fused = config.num_shared_blocks, (2 * config.intermediate_size, config.d_model)

    def source(name: str) -> Source:
        numbered = re.match(r"model\.(layers|shared)\.(\d+)\.", name)
        kind, number = (numbered[1], int(numbered[2])) if numbered else ("", -1)
        use = uses.index(number) if kind == "layers" and number in uses else None
        (place,) = (NAMES if use is None else HYBRID_LAYER).published(name)
        _, is_shared, rest = place.partition(".shared_transformer.")
        if not is_shared:
            return Source((place,))
        # Stored with the block's first user, or with all of them
        block = number if use is None else use % blocks
        first, *others = (
            f"model.layers.{layer}.shared_transformer.{rest.replace('*', str(use))}"
            for layer in uses[block::blocks]
        )
        found = Source((first,), copies=tuple(others))
        if ".gate_up_proj." not in rest:
            return found
        shape = fused if name.endswith("weight") else fused[:1]
        return replace(found, make=half(".up_proj." in name), shape=shape)

    return source


LAYOUT = Layout(
    "Zamba2", ("zamba2",), spec, rename,
    frozenset({"use_conv_bias", "kv_channels", "num_query_groups"}),
)
