"""MambaInLlama's layout: Llama's config.json, and a mamba_config.json."""

from __future__ import annotations

from typing import Any

from stree.checkpoints import config_parts
from stree.checkpoints.checked_json import CheckedJson, json_number
from stree.checkpoints.layouts import llama
from stree.checkpoints.layouts.own import MODEL_TYPE
from stree.checkpoints.sources import Layout, as_it_is
from stree.models.config import HybridConfig

MIXER_CONFIG_NAME = "mamba_config.json"

# Fields that MambaInLlama's two files cannot describe
_BEYOND_MAMBA_IN_LLAMA = (
    "layer_types", "rotary_dim", "attention_scale", "attention_bias", "qkv_bias", "qk_norm",
    "final_norm_bias", "sliding_window",
    "qk_norm_whole", "attention_gate",
    "mlp_kind", "mlp_bias", "gated_norm", "mamba_in_bias", "mamba_out_bias", "feature_layers",
    "head_vocab_size", "head_rank",
)
_USUAL = HybridConfig(vocab_size=1, d_model=1, num_layers=1, attn_layers=(0,), num_heads=1,
                      num_kv_heads=1, head_dim=2)


def spec(values: CheckedJson) -> HybridConfig:
    """Read mamba_config.json, and config.json for all that it does not say or says as null."""
    mamba = CheckedJson.load(values.path.with_name(MIXER_CONFIG_NAME))
    if values.get("model_type") != MODEL_TYPE:
        values.require(model_type="llama")
    mamba.require(hidden_act="silu")
    for ours, theirs in (
        ("d_model", "hidden_size"),
        ("n_layer", "num_hidden_layers"),
        ("intermediate_size", "intermediate_size"),
        ("vocab_size", "vocab_size"),
        ("rms_norm_eps", "rms_norm_eps"),  # all norms of a model share one
    ):
        if mamba.get(ours) is not None:
            size = mamba.number(ours)
            if values.get(theirs, size) != size:
                mamba.refuse(
                    f"says {ours} {mamba[ours]}, {values.path} {theirs} {values[theirs]!r:.99}",
                    "correct the wrong file",
                )
            values.set(theirs, mamba[ours])
    fields = llama.fields_of(values)
    ssm = mamba.section("ssm_cfg")
    ssm.require(layer="Mamba2")
    if "layer" not in ssm and "ngroups" not in ssm:  # as its Mamba-1 checkpoints are written
        mamba.refuse(
            "describes Mamba-1 layers (its ssm_cfg has no ngroups), only Mamba-2 is supported",
            "use a checkpoint with Mamba-2 layers",
        )
    num_ssm_heads, d_state = ssm.integer("ngroups"), ssm.integer("d_state")
    ssm_head_dim = ssm.integer("headdim", d_state)
    d_inner, d_xb = mamba.integer("d_inner"), mamba.integer("d_xb")
    if d_inner != num_ssm_heads * ssm_head_dim:
        mamba.refuse(
            f"has d_inner {d_inner}, wanted ngroups · d_state = {num_ssm_heads} · {ssm_head_dim}"
        )
    if not ssm_head_dim or d_xb % ssm_head_dim:
        mamba.refuse(f"has d_xb {d_xb}, wanted a multiple of the head dim {ssm_head_dim}")
    attn_layers = mamba.indices("attn_layers")
    if not attn_layers:
        fields |= {"num_heads": 0, "num_kv_heads": 0, "head_dim": 0}
    mamba.refuse_unread(("resid_dropout",))
    num_x_groups = d_xb // ssm_head_dim
    config = HybridConfig(
        **fields,
        attn_layers=tuple(attn_layers),
        num_ssm_heads=num_ssm_heads,
        ssm_head_dim=ssm_head_dim,
        d_state=d_state,
        num_x_groups=num_x_groups,
        num_b_groups=ssm.integer("num_b_groups", num_x_groups),
        num_c_groups=ssm.integer("num_c_groups", num_ssm_heads),
        gated_norm_groups=ssm.integer("gated_norm_groups", num_ssm_heads),
        gated_norm_eps=ssm.number("gated_norm_eps", 1e-5),
        repeat_before_conv=ssm.boolean("repeat_kv_before_conv", False),
        **config_parts.mamba_ssm(ssm),
    )
    # d_inner says what expand would.
    ssm.refuse_unread(config_parts.MIXER_WITHOUT_EFFECT | {"expand"})
    return config


def has_words_for(config: HybridConfig) -> bool:
    return all(getattr(config, name) == getattr(_USUAL, name) for name in _BEYOND_MAMBA_IN_LLAMA)


def mixer_json(config: HybridConfig) -> dict[str, Any]:
    """Return mamba_config.json.

    Its head_dim is d_state, and its groups follow from d_xb; models that differ have further keys
    in `ssm_cfg`.
    """
    return {
        "d_model": config.d_model,
        "ssm_cfg": _ssm_cfg(config),
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "d_inner": config.d_inner,
        "d_xb": config.num_x_groups * config.ssm_head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "n_layer": config.num_layers,
        "attn_layers": list(config.attn_layers),
    }


def _ssm_cfg(config: HybridConfig) -> dict[str, Any]:
    """Return the mixer's arguments: `ngroups`, `d_state` and all that differ from the defaults."""
    lowest, highest = config.dt_limit
    upper = json_number(highest)
    usual: dict[str, tuple[Any, Any]] = {
        "headdim": (config.ssm_head_dim, config.d_state),
        "num_b_groups": (config.num_b_groups, config.num_x_groups),
        "num_c_groups": (config.num_c_groups, config.num_ssm_heads),
        "gated_norm_groups": (config.gated_norm_groups, config.num_ssm_heads),
        "gated_norm_eps": (config.gated_norm_eps, 1e-5),
        "repeat_kv_before_conv": (config.repeat_before_conv, False),
        "conv_bias": (config.conv_bias, True),
        "d_conv": (config.d_conv, 4),
        "dt_limit": ([lowest, upper], [0.0, {"__float__": "Infinity"}]),
    }
    expand = config.d_inner / config.d_model
    different = {name: value for name, (value, default) in usual.items() if value != default}
    return {
        "expand": expand if expand % 1 else int(expand),
        "ngroups": config.num_ssm_heads,
        "d_state": config.d_state,
        "chunk_size": config.chunk_size,
        **different,
    }


LAYOUT = Layout("MambaInLlama", ("llama",), spec, as_it_is, llama.LAYOUT.without_effect)
