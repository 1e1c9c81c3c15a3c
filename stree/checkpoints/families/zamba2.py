"""Zamba2: Mamba-2 layers, some of them after a shared transformer block.

The few shared blocks read [hidden, embeddings]; each use of one has its own adapters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from typing import Any

from stree.checkpoints import config_parts
from stree.checkpoints.checked_json import CheckedJson
from stree.checkpoints.sources import Layout, Rename, Source, half, translated
from stree.models.config import HybridConfig

KINDS = {"linear_attention": "mamba", "mamba": "mamba", "hybrid": "hybrid"}
ACTIVATIONS = {"gelu": "geglu", "silu": "swiglu"}
LONG_CONTEXT = 16384  # what use_long_context makes of max_position_embeddings
ADAPTERS = {
    "q_adapter": "self_attn.linear_q_adapter_list",
    "k_adapter": "self_attn.linear_k_adapter_list",
    "v_adapter": "self_attn.linear_v_adapter_list",
    "mlp_adapter": "feed_forward.gate_up_proj_adapter_list",
}


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
    fused = (2 * config.intermediate_size, config.d_model)

    def of_shared(block: int, rest: str, **made: Any) -> Source:
        """Return the source in a shared block, stored with its first user's layer, or with all."""
        first, *others = (
            f"model.layers.{layer}.shared_transformer.{rest}"
            for layer in uses[block :: config.num_shared_blocks]
        )
        return Source((first,), copies=tuple(others), **made)

    def source(name: str) -> Source:
        if name == "model.norm.weight":
            return Source(("model.final_layernorm.weight",))
        if match := re.fullmatch(r"model\.shared\.(\d+)\.(.*)", name):
            rest = translated(
                match[2],
                {"post_attention_layernorm.": "pre_ff_layernorm.", "mlp.": "feed_forward."},
            )
            gate_up = re.sub(r"\.(gate|up)_proj\.", ".gate_up_proj.", rest)
            if gate_up == rest:
                return of_shared(int(match[1]), rest)
            shape = fused if rest.endswith("weight") else fused[:1]
            is_up = ".up_proj." in rest
            return of_shared(int(match[1]), gate_up, make=half(is_up), shape=shape)
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        if match is None or int(match[1]) not in uses:
            return Source((name,))
        layer, rest = int(match[1]), match[2]
        if rest == "shared_use.out.weight":
            return Source((f"model.layers.{layer}.linear.weight",))
        if rest.startswith("shared_use."):
            _, adapter, step, _ = rest.split(".")
            use = uses.index(layer)
            place = f"{ADAPTERS[adapter]}.{use}.{0 if step == 'down' else 1}.weight"
            return of_shared(use % config.num_shared_blocks, place)
        return Source((f"model.layers.{layer}.mamba_decoder.{rest}",))

    return source


LAYOUT = Layout(
    "Zamba2", ("zamba2",), spec, rename,
    frozenset({"use_conv_bias", "kv_channels", "num_query_groups"}),
)
