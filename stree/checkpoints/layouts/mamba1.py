"""Mamba-1's layouts, of transformers (also FalconMamba's) and of state-spaces."""

from __future__ import annotations

from typing import Any

from stree.checkpoints import config_keys, config_parts
from stree.checkpoints.checked_json import CheckedJson
from stree.checkpoints.names import Names, Table, in_layers
from stree.checkpoints.sources import Layout, named
from stree.models.config import HybridConfig

MIXER: Table = {  # names within a layer
    "norm": "input_layernorm",
    "mixer.in_proj": "mamba1.in_proj",
    "mixer.conv1d": "mamba1.conv1d",
    "mixer.x_proj": "mamba1.x_proj",
    "mixer.dt_proj": "mamba1.dt_proj",
    "mixer.A_log": "mamba1.A_log",
    "mixer.D": "mamba1.D",
    "mixer.out_proj": "mamba1.out_proj",
}


def transformers_spec(values: CheckedJson) -> HybridConfig:
    values.require(hidden_act="silu", rescale_prenorm_residual=False)
    d_model, bias = values.integer("hidden_size"), values.boolean("use_bias", False)
    is_falcon = values.get("model_type") == "falcon_mamba"
    num_layers = config_parts.num_layers(values)
    return HybridConfig(
        vocab_size=values.integer("vocab_size"),
        d_model=d_model,
        rms_norm_eps=values.number("layer_norm_epsilon", 1e-5),
        tie_embeddings=values.boolean("tie_word_embeddings", True),
        d_conv=values.integer("conv_kernel", 4),
        conv_bias=values.boolean("use_conv_bias", True),
        mamba_in_bias=bias,
        mamba_out_bias=bias,
        selection_norm_eps=values.number("mixer_rms_eps", 1e-6) if is_falcon else None,
        **_layers(
            num_layers, d_model,
            # published FalconMambas have an expand that does not give their intermediate_size
            values.integer("intermediate_size", values.integer("expand", 2) * d_model),
            values.integer("state_size", 16), _rank(values, "time_step_rank", d_model),
        ),
        **config_parts.special_tokens(values),
    )


def state_spaces_spec(values: CheckedJson, ssm: CheckedJson) -> HybridConfig:
    """Read the config of a state-spaces model whose `ssm_cfg` describes Mamba-1 layers."""
    ssm.require(bias=False)
    d_model = values.integer("d_model")
    config = HybridConfig(
        vocab_size=values.integer("vocab_size"),
        d_model=d_model,
        tie_embeddings=values.boolean("tie_embeddings", True),
        d_conv=ssm.integer("d_conv", 4),
        conv_bias=ssm.boolean("conv_bias", True),
        **_layers(
            values.integer("n_layer"), d_model, ssm.integer("expand", 2) * d_model,
            ssm.integer("d_state", 16), _rank(ssm, "dt_rank", d_model),
        ),
        **config_parts.special_tokens(values),
    )
    ssm.refuse_unread(config_parts.MIXER_WITHOUT_EFFECT - {"dt_rank"})
    return config


def _layers(num_layers: int, d_model: int, channels: int, states: int, rank: int) -> dict[str, Any]:
    kinds = ("mamba1",) * min(num_layers, config_parts.MAX_LAYERS + 1)
    return {
        "num_layers": num_layers, "layer_types": kinds, "mamba1_channels": channels,
        "d_state": states, "dt_rank": rank,
    }


def _rank(values: CheckedJson, name: str, d_model: int) -> int:
    """Read dt's rank, which is a sixteenth of the model's width unless the config says a number."""
    return -(-d_model // 16) if values.get(name, "auto") == "auto" else values.integer(name)


NAMES = {
    embedding: Names(
        {
            embedding: "model.embed_tokens", "model.norm_f": "model.norm", **in_layers(MIXER),
        },
        "backbone.",
    )
    for embedding in ("model.embeddings", "model.embedding")
}

TRANSFORMERS = Layout(
    "transformers Mamba", ("mamba", "falcon_mamba"), transformers_spec,
    lambda values, config, stored: (
        lambda name: named(NAMES["model.embeddings"], name, config, stored)
    ),
    config_keys.words("""
        time_step_scale time_step_min time_step_init_scheme use_mambapy use_falcon_mambapy
        use_associative_scan
    """),
)
