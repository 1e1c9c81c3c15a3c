"""Falcon-H1: Mamba-2 and attention side by side in every layer, and a multiplier on everything."""

from __future__ import annotations

from collections.abc import Collection

from stree.checkpoints import config_parts
from stree.checkpoints.checked_json import CheckedJson
from stree.checkpoints.families.bamba import NAMES  # Falcon-H1 has the same
from stree.checkpoints.sources import Layout, Make, Rename, Source, named, scaled, scaled_rows
from stree.models.config import HybridConfig


def spec(values: CheckedJson) -> HybridConfig:
    values.require(hidden_act="silu", mamba_use_mlp=True, attn_layer_indices=None)
    common = config_parts.decoder(values, positions=8192, kv_heads=8)
    d_inner = None if values.is_null("mamba_d_ssm") else values.integer("mamba_d_ssm", 1024)
    norm = "gate"
    # An old default of transformers' that its configs always write
    norm_first = values.boolean("mamba_norm_before_gate", True)
    if values.boolean("mamba_rms_norm", False):
        norm = "norm, gate" if norm_first else "gate, norm"
    eps = values.number("rms_norm_eps", 1e-5)
    mamba = config_parts.mamba(values, d_inner)
    mamba["mamba_out_bias"] = values.boolean("projectors_bias", False)
    return HybridConfig(
        layer_types=("mamba+attention mlp",) * common["num_layers"],
        intermediate_size=values.integer("intermediate_size", 14336),
        rms_norm_eps=eps,
        attention_bias=values.boolean("attention_bias", False),
        mlp_bias=values.boolean("mlp_bias", False),
        gated_norm=norm,
        gated_norm_eps=eps,
        **common,
        **config_parts.rope(values),
        **mamba,
    )


def rename(values: CheckedJson, config: HybridConfig, stored: Collection[str]) -> Rename:
    attention_in, keys, attention_out, ssm_in, ssm_out, embedding, head = (
        config_parts.factor(values, name)
        for name in (
            "attention_in_multiplier", "key_multiplier", "attention_out_multiplier",
            "ssm_in_multiplier", "ssm_out_multiplier",
            "embedding_multiplier", "lm_head_multiplier",
        )
    )
    gate, down = config_parts.factors(values, "mlp_multipliers", 2)
    shape = config.mixer_shape
    sizes = [config.d_inner, *shape.xbc_dims, config.num_ssm_heads]  # z, x, B, C, dt
    rows = config_parts.factors(values, "ssm_multipliers", 5)
    # The head's multiplier goes into the last norm, so that a tied head stays tied
    makes: dict[str, Make] = {
        "model.embed_tokens.weight": scaled(embedding),
        "model.norm.weight": scaled(head / (embedding if config.tie_embeddings else 1)),
        # An input's multiplier scales the weights that read it, not their biases
        ".q_proj.weight": scaled(attention_in),
        ".k_proj.weight": scaled(attention_in * keys),
        ".k_proj.bias": scaled(keys),
        ".v_proj.weight": scaled(attention_in),
        ".o_proj.weight": scaled(attention_out),
        ".o_proj.bias": scaled(attention_out),
        ".in_proj.weight": scaled_rows([ssm_in * each for each in rows], sizes),
        ".in_proj.bias": scaled_rows(rows, sizes),
        ".out_proj.weight": scaled(ssm_out),
        ".out_proj.bias": scaled(ssm_out),
        ".gate_proj.weight": scaled(gate),
        ".gate_proj.bias": scaled(gate),
        ".down_proj.weight": scaled(down),
        ".down_proj.bias": scaled(down),
    }

    def source(name: str) -> Source:
        make = next((make for end, make in makes.items() if name.endswith(end)), None)
        return named(NAMES, name, config, stored, make)

    return source


LAYOUT = Layout("FalconH1", ("falcon_h1",), spec, rename)
