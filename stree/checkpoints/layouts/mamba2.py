"""Mamba-2's layouts, of transformers and of state-spaces: a layer is a norm and a mixer."""

from __future__ import annotations

from collections.abc import Callable, Collection

from stree.checkpoints import config_keys, config_parts
from stree.checkpoints.checked_json import CheckedJson
from stree.checkpoints.layouts import mamba1
from stree.checkpoints.names import MAMBA_AS_MIXER, Names, in_layers
from stree.checkpoints.sources import Layout, Rename, named
from stree.models.config import HybridConfig


def transformers_spec(values: CheckedJson) -> HybridConfig:
    # transformers 5 applies rescale_prenorm_residual to weights that it has just loaded.
    values.require(hidden_act="silu", use_bias=False, rescale_prenorm_residual=False)
    num_heads, groups = values.integer("num_heads"), values.integer("n_groups")
    d_model, head_dim = values.integer("hidden_size"), values.integer("head_dim")
    d_inner = values.integer("expand", 2) * d_model
    if d_inner != num_heads * head_dim:
        values.refuse(
            f"has num_heads · head_dim = {num_heads} · {head_dim}, wanted expand · hidden_size = "
            f"{d_inner}"
        )
    eps = values.number("layer_norm_epsilon", 1e-5)
    lowest, highest = values.numbers("time_step_limit", config_parts.NO_LIMIT)
    return HybridConfig(
        vocab_size=values.integer("vocab_size"),
        d_model=d_model,
        num_layers=values.integer("num_hidden_layers"),
        rms_norm_eps=eps,
        tie_embeddings=values.boolean("tie_word_embeddings", False),
        d_conv=values.integer("conv_kernel", 4),
        conv_bias=values.boolean("use_conv_bias", True),
        gated_norm_eps=eps,
        chunk_size=values.integer("chunk_size", 256),
        dt_limit=(lowest, highest),
        **config_parts.mixer(num_heads, head_dim, values.integer("state_size"), groups),
        **config_parts.special_tokens(values),
    )


def state_spaces_spec(values: CheckedJson) -> HybridConfig:
    values.require(rms_norm=True)
    values.refuse_if_set({
        "attn_layer_idx": "its attention layers are not supported",
        "d_intermediate": "its MLPs are not supported",
    })
    ssm = values.section("ssm_cfg")
    ssm.set("layer", ssm.get("layer", "Mamba1"))
    if ssm.get("layer") == "Mamba1":
        return mamba1.state_spaces_spec(values, ssm)
    ssm.require(layer="Mamba2")
    d_model, d_state = values.integer("d_model"), ssm.integer("d_state", 128)
    d_inner = ssm.integer("expand", 2) * d_model
    if ssm.get("d_ssm") is not None:
        ssm.require(d_ssm=d_inner)
    head_dim = ssm.integer("headdim", 64)
    num_heads = config_parts.quotient(values, d_inner, "headdim", head_dim)
    config = HybridConfig(
        vocab_size=values.integer("vocab_size"),
        d_model=d_model,
        num_layers=values.integer("n_layer"),
        tie_embeddings=values.boolean("tie_embeddings", True),
        **config_parts.mixer(num_heads, head_dim, d_state, ssm.integer("ngroups", 1)),
        **config_parts.mamba_ssm(ssm),
        **config_parts.special_tokens(values),
    )
    ssm.refuse_unread(config_parts.MIXER_WITHOUT_EFFECT)
    return config


def _backbone(embedding: str) -> Callable[[CheckedJson, HybridConfig, Collection[str]], Rename]:
    """Return the map to mamba-ssm's names, given that of the embedding."""
    table = {
        embedding: "model.embed_tokens",
        "model.norm_f": "model.norm",
        **in_layers(MAMBA_AS_MIXER),
    }
    names = Names(table, "backbone.")

    def rename(values: CheckedJson, config: HybridConfig, stored: Collection[str]) -> Rename:
        of_layers = mamba1.NAMES[embedding] if config.has("mamba1") else names
        return lambda name: named(of_layers, name, config, stored)

    return rename


# The fields of mamba-ssm's MambaConfig
STATE_SPACES_KEYS = config_keys.words("""
    d_model d_intermediate n_layer vocab_size ssm_cfg attn_layer_idx attn_cfg rms_norm
    residual_in_fp32 fused_add_norm pad_vocab_size_multiple tie_embeddings
""")

TRANSFORMERS = Layout(
    "transformers Mamba2", ("mamba2",), transformers_spec, _backbone("model.embeddings"),
    frozenset({"time_step_min"}),
)
STATE_SPACES = Layout(
    "state-spaces/mamba and mamba2", (), state_spaces_spec, _backbone("model.embedding"),
    # attn_cfg describes layers that attn_layer_idx would have to name
    frozenset({"attn_cfg", "fused_add_norm", "initializer_cfg"}),
)
