"""Read parts that configs of several layouts share: rotary positions, heads, Mamba-2, tokens."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from stree.checkpoints import config_keys
from stree.checkpoints.checked_json import CheckedJson
from stree.common.errors import CheckpointRefused
from stree.models.config import MAX_LAYERS, ROPE_LENGTH, ROPE_NUMBERS, HybridConfig

# Keyword arguments of mamba-ssm's mixers: initialisation, and which kernel runs
MIXER_WITHOUT_EFFECT = config_keys.words("""
    A_init_range D_init conv_init dt_min dt_max dt_init_floor dt_init dt_rank dt_scale
    use_fast_path use_mem_eff_path layer_idx device dtype
""")


def rope(
    values: CheckedJson,
    usual_share: float = 1.0,
    usual_theta: float = 10000.0,
    ignored: Collection[str] = (),
) -> tuple[float, dict[str, Any] | None, float]:
    """Return base, scaling and rotated share of a head.

    They are read from transformers 4's two keys or transformers 5's `rope_parameters`. If both are
    given they must agree, because the one that counts depends on the version of transformers.

    Args:
        values: The config.
        usual_share: Rotated share of a head without a key; 1 refuses any other share.
        usual_theta: Base without a key.
        ignored: Keys of the table without effect.
    """
    theta = values.number("rope_theta", usual_theta)
    values.require("partial_rotary_factor", usual_share, default=usual_share)
    tables = [name for name in ("rope_parameters", "rope_scaling") if values.get(name)]
    said = [_rope_table(values, name, theta, usual_share, ignored) for name in tables]
    if any(each != said[0] for each in said):
        raise CheckpointRefused(
            f"{values.path} has rope_parameters and rope_scaling that differ: delete the one that "
            "the checkpoint was not trained with"
        )
    return said[0] if said else (theta, None, usual_share)


def _rope_table(
    values: CheckedJson, name: str, theta: float, usual_share: float, ignored: Collection[str]
) -> tuple[float, dict[str, Any] | None, float]:
    table = values[name]
    if not isinstance(table, Mapping):
        raise CheckpointRefused(f"{values.path} has {name} = {table!r:.99}, wanted a table")
    rope = CheckedJson(table, values.path)
    theta = rope.number("rope_theta", theta)
    if theta <= 0:
        raise CheckpointRefused(f"{values.path} has rope_theta {theta}, wanted above 0")
    kind = rope.get("rope_type", rope.get("type", "default"))
    share = usual_share
    if usual_share < 1:
        share = rope.number("partial_rotary_factor", usual_share)
        if not 0 <= share <= 1:
            raise CheckpointRefused(
                f"{values.path} has partial_rotary_factor {share}, wanted a share of a head"
            )
    else:
        rope.require("partial_rotary_factor", 1.0, default=1.0)
    scaling = None
    if kind == "llama3":
        numbers = {name: rope.number(name) for name in ROPE_NUMBERS}
        length = rope.integer(ROPE_LENGTH)
        # The key outside the table wins over the one in it, in some versions of transformers.
        values.require(ROPE_LENGTH, length, default=length)
        scaling = {"rope_type": "llama3", **numbers, ROPE_LENGTH: length}
    elif kind != "default":
        raise CheckpointRefused(
            f"{values.path} asks for rope type {kind!r:.99}; supported are 'default' and 'llama3'"
        )
    rope.refuse_unread(ignored)
    return theta, scaling, share


def special_tokens(values: CheckedJson) -> dict[str, Any]:
    """Read the ids of special tokens."""
    return {
        "eos_token_ids": values.token_ids("eos_token_id"),
        "bos_token_id": next(iter(values.token_ids("bos_token_id")), None),
        "pad_token_id": next(iter(values.token_ids("pad_token_id")), None),
    }


def num_layers(values: CheckedJson) -> int:
    """Read the number of layers, checked before any list of that length is made."""
    count = values.integer("num_hidden_layers")
    if count > MAX_LAYERS:
        raise CheckpointRefused(
            f"{values.path} has num_hidden_layers {count}, wanted at most {MAX_LAYERS}"
        )
    return count


def heads(values: CheckedJson, d_model: int, usual_kv_heads: int | None = None) -> dict[str, Any]:
    """Read the heads of attention layers.

    Without a number of key heads there are usual_kv_heads; with null, or if that is None, as many
    as query heads.
    """
    values.require("sliding_window", None, default=None)
    num_heads = values.integer("num_attention_heads", 32)
    if usual_kv_heads is None or values.is_null("num_key_value_heads"):
        usual_kv_heads = num_heads
    return {
        "num_heads": num_heads,
        "num_kv_heads": values.integer("num_key_value_heads", usual_kv_heads),
        "head_dim": values.integer("head_dim", d_model // max(num_heads, 1)),
    }


def mamba(values: CheckedJson, d_model: int, d_inner: int | None = None) -> dict[str, Any]:
    """Read a Mamba-2 mixer as Bamba's config, and those modelled on it, describe it."""
    expand = values.integer("mamba_expand", 2)
    d_inner = expand * d_model if d_inner is None else d_inner
    num_heads = values.integer("mamba_n_heads", 128)
    head_dim = d_inner // max(num_heads, 1)
    if values.get("mamba_d_head", "auto") != "auto":
        head_dim = values.integer("mamba_d_head")
    if num_heads * head_dim != d_inner:
        if "mamba_d_ssm" not in values and values.get("model_type") == "falcon_h1":
            raise CheckpointRefused(
                f"{values.path} has no mamba_d_ssm, and mamba_n_heads · mamba_d_head = {num_heads} "
                f"· {head_dim} are not the usual {d_inner}: use a whole config.json"
            )
        raise CheckpointRefused(
            f"{values.path} has mamba_n_heads · mamba_d_head = {num_heads} · {head_dim}, wanted "
            f"{d_inner}: use an undamaged checkpoint"
        )
    groups = values.integer("mamba_n_groups", 1)
    return {
        "num_ssm_heads": num_heads,
        "ssm_head_dim": head_dim,
        "d_state": values.integer("mamba_d_state", 256),
        "num_x_groups": num_heads,
        "num_b_groups": groups,
        "num_c_groups": groups,
        "gated_norm_groups": groups,
        "d_conv": values.integer("mamba_d_conv", 4),
        "conv_bias": values.boolean("mamba_conv_bias", True),
        "chunk_size": values.integer("mamba_chunk_size", 256),
        "dt_limit": values.limits("time_step_limit"),
    }


def mamba_ssm(ssm: CheckedJson) -> dict[str, Any]:
    """Read the keyword arguments of mamba-ssm's Mamba2 from `ssm_cfg`."""
    for name, only in (
        ("bias", False),
        ("rmsnorm", True),
        ("norm_before_gate", False),
        ("D_has_hdim", False),
        ("activation", "silu"),
    ):
        ssm.require(name, only, default=only)
    return {
        "d_conv": ssm.integer("d_conv", 4),
        "conv_bias": ssm.boolean("conv_bias", True),
        "chunk_size": ssm.integer("chunk_size", HybridConfig.chunk_size),
        "dt_limit": ssm.limits("dt_limit"),
    }


def factor(values: CheckedJson, name: str, default: float = 1.0) -> float:
    """Read a multiplier. Refuse 0 and infinity."""
    number = values.number(name, default)
    if not math.isfinite(number) or number == 0:
        raise CheckpointRefused(f"{values.path} has {name} = {number}, wanted a multiplier")
    return number


def factors(values: CheckedJson, name: str, count: int) -> list[float]:
    """Read `count` multipliers; all are 1 without the key."""
    given = values.get(name, [1.0] * count)
    if not isinstance(given, list) or len(given) != count:
        raise CheckpointRefused(
            f"{values.path} has {name} = {given!r:.99}, wanted {count} multipliers"
        )
    return [factor(CheckedJson({name: each}, values.path), name) for each in given]


def layer_list(values: CheckedJson, name: str, known: Mapping[str, str]) -> list[str]:
    """Read a list of layer kinds, such as `layer_types`, and translate each by `known`."""
    kinds = values.get(name)
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise CheckpointRefused(f"{values.path} has {name} = {kinds!r:.99}, wanted a list of names")
    if other := [kind for kind in kinds if kind not in known]:
        raise CheckpointRefused(
            f"{values.path} asks for {name} of {other[0]!r:.99}; supported are "
            f"{', '.join(map(repr, known))}"
        )
    return [known[kind] for kind in kinds]


def require_count(values: CheckedJson, name: str, layers: list[str]) -> None:
    """Refuse a number of layers that is not the length of the list."""
    if values.integer("num_hidden_layers", len(layers)) != len(layers):
        raise CheckpointRefused(
            f"{values.path} has {len(layers)} {name} for num_hidden_layers = "
            f"{values['num_hidden_layers']}: use an undamaged checkpoint"
        )
