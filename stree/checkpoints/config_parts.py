"""Read parts that configs of several layouts share: sizes, layers, rotary positions, Mamba-2."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
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
NO_LIMIT = (0.0, math.inf)  # of dt


def decoder(
    values: CheckedJson, *, positions: int, num_heads: int | None = 32, kv_heads: int | None = None,
    head_dim: int | None = None, tied: bool = False,
) -> dict[str, Any]:
    """Read what most families call alike: sizes, heads, special tokens.

    Args:
        values: The config.
        positions: Longest sequence without the key.
        num_heads: Attention heads without the key; None requires it.
        kv_heads: Heads of keys without the key; None is as many as query heads, as with null.
        head_dim: Width of a head without the key; None is what d_model leaves for each.
        tied: Whether the head is the embedding without the key.
    """
    values.require(sliding_window=None)
    d_model = values.integer("hidden_size")
    num_heads = values.integer("num_attention_heads", num_heads)
    if kv_heads is None or values.is_null("num_key_value_heads"):
        kv_heads = num_heads
    if head_dim is None:
        head_dim = d_model // max(num_heads, 1)
    return {
        "vocab_size": values.integer("vocab_size"),
        "d_model": d_model,
        "num_layers": num_layers(values),
        "tie_embeddings": values.boolean("tie_word_embeddings", tied),
        "num_heads": num_heads,
        "num_kv_heads": values.integer("num_key_value_heads", kv_heads),
        "head_dim": values.integer("head_dim", head_dim),
        "max_position_embeddings": values.integer("max_position_embeddings", positions),
        **special_tokens(values),
    }


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
        values.refuse(f"has num_hidden_layers {count}, wanted at most {MAX_LAYERS}")
    return count


def layers(
    values: CheckedJson, known: Mapping[str, str], *names: str, pattern: str = ""
) -> list[str] | None:
    """Read the kinds of layers from keys such as `layer_types`, and translate each by `known`.

    The key of the name `pattern` is a text, with a letter for each layer. Several keys must agree
    with one another, and all with num_hidden_layers. Returns None without any of the keys.
    """
    said = []
    for name in names:
        kinds = values.get(name)
        if kinds is None:
            continue
        if name == pattern:
            kinds = list(values.text(name))
        if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
            values.refuse(f"has {name} = {kinds!r:.99}, wanted a list of names", "copy it again")
        if other := [kind for kind in kinds if kind not in known]:
            raise CheckpointRefused(
                f"{values.path} asks for {name} of {other[0]!r:.99}; supported are "
                f"{', '.join(map(repr, known))}"
            )
        count = values.integer("num_hidden_layers", len(kinds))
        if count != len(kinds):
            values.refuse(f"has {len(kinds)} {name} for num_hidden_layers = {count}")
        said.append([known[kind] for kind in kinds])
    if any(each != said[0] for each in said):
        values.refuse(f"has {' and '.join(names)} that differ")
    return said[0] if said else None


def rope(
    values: CheckedJson, usual_theta: float = 10000.0, head_dim: int | None = None,
    usual_share: float = 1.0, ignored: Collection[str] = (),
) -> dict[str, Any]:
    """Read base and scaling of rotary positions, and how many channels of a head they rotate.

    They are read from transformers 4's two keys or transformers 5's `rope_parameters`. If both are
    given they must agree, because the one that counts depends on the version of transformers.

    Args:
        values: The config.
        usual_theta: Base without a key.
        head_dim: Channels of a head of which a share is rotated; None refuses any share but 1.
        usual_share: Rotated share without a key.
        ignored: Keys of the table without effect.
    """
    theta = values.number("rope_theta", usual_theta)
    values.require(partial_rotary_factor=usual_share)
    tables = [name for name in ("rope_parameters", "rope_scaling") if values.get(name)]
    said = [_rope_table(values, name, theta, usual_share, ignored) for name in tables]
    if any(each != said[0] for each in said):
        values.refuse(
            "has rope_parameters and rope_scaling that differ",
            "delete the one that the checkpoint was not trained with",
        )
    fields, share = said[0] if said else ({"rope_theta": theta, "rope_scaling": None}, usual_share)
    return fields if head_dim is None else {**fields, "rotary_dim": int(head_dim * share)}


def _rope_table(
    values: CheckedJson, name: str, theta: float, share: float, ignored: Collection[str]
) -> tuple[dict[str, Any], float]:
    if not isinstance(values[name], Mapping):
        values.refuse(f"has {name} = {values[name]!r:.99}, wanted a table")
    rope = CheckedJson(values[name], values.path)
    theta = rope.number("rope_theta", theta)
    if theta <= 0:
        values.refuse(f"has rope_theta {theta}, wanted above 0")
    if share == 1:
        rope.require(partial_rotary_factor=1.0)
    share = rope.number("partial_rotary_factor", share)
    if not 0 <= share <= 1:
        values.refuse(f"has partial_rotary_factor {share}, wanted a share of a head")
    kind, scaling = rope.get("rope_type", rope.get("type", "default")), None
    if kind == "llama3":
        scaling = {"rope_type": kind, **{name: rope.number(name) for name in ROPE_NUMBERS[kind]}}
    elif kind == "yarn":
        scaling = {
            "rope_type": kind, "factor": rope.number("factor"),
            "beta_fast": rope.number("beta_fast", 32.0), "beta_slow": rope.number("beta_slow", 1.0),
            "truncate": rope.boolean("truncate", True), "attention_factor": _attention_factor(rope),
        }
    if scaling is not None:
        scaling[ROPE_LENGTH] = length = rope.integer(ROPE_LENGTH)
        # The key outside the table wins over the one in it, in some versions of transformers.
        values.require(**{ROPE_LENGTH: length})
    elif kind != "default":
        raise CheckpointRefused(
            f"{values.path} asks for rope type {kind!r:.99}; supported are 'default', 'llama3' and "
            "'yarn'"
        )
    rope.refuse_unread(ignored)
    return {"rope_theta": theta, "rope_scaling": scaling}, share


def _attention_factor(rope: CheckedJson) -> float:
    """Return YaRN's factor of cosines and sines: as given, or by transformers' rule."""
    stretch = math.log(max(rope.number("factor"), 1.0))
    above, below = (rope.number(name, 0.0) for name in ("mscale", "mscale_all_dim"))
    usual = 0.1 * stretch + 1
    if above and below:
        usual = (0.1 * above * stretch + 1) / (0.1 * below * stretch + 1)
    return rope.number("attention_factor", usual)


def quotient(values: CheckedJson, total: int, name: str, count: int) -> int:
    """Divide a size by the number that a key gives, which must divide it."""
    if not count or total % count:
        values.refuse(f"has {name} {count}, wanted a divisor of {total}")
    return total // count


def mixer(num_heads: int, head_dim: int, d_state: int, groups: int) -> dict[str, Any]:
    """Return the dimensions of a Mamba-2 mixer whose B, C and norm have groups, and x has none."""
    return {
        "num_ssm_heads": num_heads,
        "ssm_head_dim": head_dim,
        "d_state": d_state,
        "num_x_groups": num_heads,
        "num_b_groups": groups,
        "num_c_groups": groups,
        "gated_norm_groups": groups,
    }


def mamba(values: CheckedJson, d_inner: int | None = None) -> dict[str, Any]:
    """Read a Mamba-2 mixer as Bamba's config, and those modelled on it, describe it.

    d_inner None is mamba_expand times the model's width.
    """
    expanded = values.integer("mamba_expand", 2) * values.integer("hidden_size")
    d_inner = expanded if d_inner is None else d_inner
    num_heads = values.integer("mamba_n_heads", 128)
    head_dim = d_inner // max(num_heads, 1)
    if values.get("mamba_d_head", "auto") != "auto":
        head_dim = values.integer("mamba_d_head")
    if num_heads * head_dim != d_inner:
        values.refuse(
            f"has mamba_n_heads · mamba_d_head = {num_heads} · {head_dim}, wanted {d_inner} "
            "(mamba_d_ssm, or mamba_expand · hidden_size)"
        )
    bias = values.boolean("mamba_proj_bias", False)
    return {
        **mixer(
            num_heads, head_dim, values.integer("mamba_d_state", 256),
            values.integer("mamba_n_groups", 1),
        ),
        "d_conv": values.integer("mamba_d_conv", 4),
        "conv_bias": values.boolean("mamba_conv_bias", True),
        "mamba_in_bias": bias,
        "mamba_out_bias": bias,
        "chunk_size": values.integer("mamba_chunk_size", 256),
        "dt_limit": values.numbers("time_step_limit", NO_LIMIT),
    }


def mamba_ssm(ssm: CheckedJson) -> dict[str, Any]:
    """Read the keyword arguments of mamba-ssm's Mamba2 from `ssm_cfg`."""
    ssm.require(
        bias=False, rmsnorm=True, norm_before_gate=False, D_has_hdim=False, activation="silu"
    )
    return {
        "d_conv": ssm.integer("d_conv", 4),
        "conv_bias": ssm.boolean("conv_bias", True),
        "chunk_size": ssm.integer("chunk_size", HybridConfig.chunk_size),
        "dt_limit": ssm.numbers("dt_limit", NO_LIMIT),
    }


def factor(values: CheckedJson, name: str) -> float:
    """Read a multiplier, 1 without the key. Refuse 0 and infinity."""
    return _multipliers(values, name, [values.number(name, 1.0)])[0]


def factors(values: CheckedJson, name: str, count: int) -> list[float]:
    """Read `count` multipliers; all are 1 without the key."""
    return _multipliers(values, name, values.numbers(name, [1.0] * count))


def _multipliers(values: CheckedJson, name: str, numbers: Sequence[float]) -> list[float]:
    if not all(number and math.isfinite(number) for number in numbers):
        values.refuse(f"has {name} = {list(numbers)}, wanted multipliers")
    return list(numbers)
