"""A checkpoint folder's config.json (and mamba_config.json) to HybridConfig, and back.

Layouts read: MambaInLlama (Llama's config.json beside mamba_config.json), transformers' Llama and
Mamba2, state-spaces/mamba2, the families of hybrids (families/), and our own for what
MambaInLlama's cannot say. Every key is read, known to be without effect (config_keys.py), or
refused with its name; nothing that changes the function is ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from stree.errors import CheckpointRefused, NotFound, UsageError
from stree.files import require_own_files
from stree.models import config_keys, config_parts
from stree.models.checked_json import CheckedJson
from stree.models.config import HybridConfig
from stree.models.config_parts import rope, special_tokens
from stree.models.families import FAMILIES
from stree.models.sources import Layout, Rename, Source, translated

MAMBA_IN_LLAMA = "MambaInLlama"
LLAMA = "transformers Llama"
MAMBA2 = "transformers Mamba2"
STATE_SPACES = "state-spaces/mamba2"
OWN = "stree's own"

# What our own exports with Mamba layers say they are. Published MambaInLlama checkpoints say
# "llama", and AutoModelForCausalLM then loads them with attention weights drawn at random.
MODEL_TYPE = "stree_hybrid"
MIXER_CONFIG_NAME = "mamba_config.json"
OWN_TABLE = "hybrid_config"  # in config.json, HybridConfig's fields that are not as usual


@dataclass(frozen=True)
class CheckpointConfig:
    """The layout of a folder, the model in it, how many rows its vocabulary is padded to, and with
    the names that are stored, where each parameter comes from."""

    layout: Layout
    model: HybridConfig
    padded_vocab_size: int
    rename: Callable[[Collection[str]], Rename]


def read_checkpoint_config(directory: Path) -> CheckpointConfig:
    """Read the config files of `directory`.

    Raises NotFound without the folder, and CheckpointRefused when they are absent, unreadable,
    foreign, incomplete, or ask for something that the model does not do.
    """
    if not directory.is_dir():
        raise NotFound(f"no folder {directory}: give the path of a checkpoint")
    require_own_files(directory)
    values = CheckedJson.load(directory / "config.json")
    return _with_generation_eos(directory, _read(values, _layout_of(values)))


def checkpoint_config_of(values: CheckedJson) -> CheckpointConfig:
    """What a config.json of transformers' own layouts says, without a folder.

    Raises CheckpointRefused as `read_checkpoint_config`.
    """
    return _read(values, _layout_by_type(values))


def _read(values: CheckedJson, layout: Layout) -> CheckpointConfig:
    values.refuse_if_set("quantization_config", "load a checkpoint that is not quantised")
    for name in ("auto_map", "trust_remote_code"):
        values.refuse_if_set(name, "code that comes with a checkpoint is not run")
    values.require("is_encoder_decoder", False, default=False)
    try:
        model = layout.spec(values)
    except UsageError as error:
        raise CheckpointRefused(f"{values.path}: {error}; use an undamaged checkpoint") from error
    padded = model.vocab_size
    if layout.name == STATE_SPACES:
        multiple = max(values.integer("pad_vocab_size_multiple", 8), 1)
        padded = -(-padded // multiple) * multiple
    try:
        rename = partial(layout.rename, values, model)
        rename(())  # reads the multipliers that it folds
    except UsageError as error:
        raise CheckpointRefused(f"{values.path}: {error}; use an undamaged checkpoint") from error
    values.refuse_unread(layout.without_effect)
    _require_reachable(model.eos_token_ids, padded, values.path)
    return CheckpointConfig(layout, model, padded, rename)


def _layout_of(values: CheckedJson) -> Layout:
    kind = values.get("model_type")
    has_mixer_config = values.path.with_name(MIXER_CONFIG_NAME).exists()
    if kind == MODEL_TYPE and OWN_TABLE in values:
        return _OWN
    if kind == MODEL_TYPE and not has_mixer_config:
        raise CheckpointRefused(
            f"no {MIXER_CONFIG_NAME} beside {values.path}, whose Mamba layers it describes: copy "
            "the checkpoint again"
        )
    if has_mixer_config:
        return _MAMBA_IN_LLAMA
    if kind is None and "ssm_cfg" in values and "d_model" in values:
        return _STATE_SPACES
    return _layout_by_type(values)


def _layout_by_type(values: CheckedJson) -> Layout:
    kind = values.get("model_type")
    for layout in (_LLAMA, _MAMBA2, *FAMILIES):
        if layout.matches(values):
            return layout
    raise CheckpointRefused(
        f"{values.path} describes a {'nameless' if kind is None else kind!r:.99} model, wanted one "
        f"of: {', '.join(LAYOUTS)}"
    )


def config_files(config: HybridConfig, dtype: str) -> dict[str, str]:
    """The JSON files, by name, from which `read_checkpoint_config` gets `config` back.

    Llama's config.json alone for a pure attention model, else one with a model type that only we
    know, and mamba_config.json beside it. What MambaInLlama's layout cannot say (its head_dim is
    d_state, its groups follow from d_xb) is written as further keys of `ssm_cfg` where needed.
    Other layers than those two have are written as they are, in a table of config.json.
    """
    if any(getattr(config, name) != getattr(_USUAL, name) for name in _BEYOND_MAMBA_IN_LLAMA):
        return {"config.json": _to_json(_own_json(config, dtype))}
    has_mamba = len(config.attn_layers) < config.num_layers
    llama: dict[str, Any] = {
        "model_type": MODEL_TYPE if has_mamba else "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        # Llama's config must name some heads even if no layer has them.
        "num_attention_heads": config.num_heads or config.num_ssm_heads,
        "num_key_value_heads": config.num_kv_heads or config.num_ssm_heads,
        "head_dim": config.head_dim or config.ssm_head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": _one_or_list(config.eos_token_ids),
        "pad_token_id": config.pad_token_id,
        "torch_dtype": dtype,
    }
    if not has_mamba:
        return {"config.json": _to_json({"architectures": ["LlamaForCausalLM"], **llama})}
    mamba = {
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
    return {"config.json": _to_json(llama), MIXER_CONFIG_NAME: _to_json(mamba)}


# One reader per layout


def _llama(values: CheckedJson) -> HybridConfig:
    fields = _llama_fields(values)
    return HybridConfig(**fields, attn_layers=tuple(range(fields["num_layers"])))


def _llama_fields(values: CheckedJson) -> dict[str, Any]:
    values.require("hidden_act", "silu", default="silu")
    for name in ("attention_bias", "mlp_bias", "rope_interleaved"):
        values.require(name, False, default=False)
    values.require("is_causal", True, default=True)
    values.require("sliding_window", None, default=None)
    num_heads, num_layers = values.integer("num_attention_heads"), config_parts.num_layers(values)
    d_model = values.integer("hidden_size")
    _require_full_attention(values, num_layers)
    rope_theta, rope_scaling, _ = rope(values)
    return {
        "vocab_size": values.integer("vocab_size"),
        "d_model": d_model,
        "num_layers": num_layers,
        "intermediate_size": values.integer("intermediate_size"),
        "rms_norm_eps": values.number("rms_norm_eps", 1e-6),
        "tie_embeddings": values.boolean("tie_word_embeddings", False),
        "num_heads": num_heads,
        "num_kv_heads": values.integer("num_key_value_heads", num_heads),
        "head_dim": values.integer("head_dim", d_model // max(num_heads, 1)),
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "max_position_embeddings": values.integer("max_position_embeddings", 2048),
        **special_tokens(values),
    }


def _mamba_in_llama(values: CheckedJson) -> HybridConfig:
    """mamba_config.json says what the decoder is; config.json the rest, and null entries."""
    mamba = CheckedJson.load(values.path.with_name(MIXER_CONFIG_NAME))
    if values.get("model_type") != MODEL_TYPE:
        values.require("model_type", "llama", default="llama")
    mamba.require("hidden_act", "silu", default="silu")
    for ours, theirs in (
        ("d_model", "hidden_size"),
        ("n_layer", "num_hidden_layers"),
        ("intermediate_size", "intermediate_size"),
        ("vocab_size", "vocab_size"),
    ):
        if mamba.get(ours) is not None:
            size = mamba.integer(ours)
            if values.get(theirs) not in (None, size):
                raise CheckpointRefused(
                    f"{mamba.path} says {ours} {size}, {values.path} {theirs} "
                    f"{values.get(theirs)!r:.99}: correct the wrong file"
                )
            values.set(theirs, size)
    fields = _llama_fields(values)
    eps = mamba.number("rms_norm_eps", fields["rms_norm_eps"])
    if eps != values.number("rms_norm_eps", eps):
        raise CheckpointRefused(
            f"{mamba.path} says rms_norm_eps {eps}, {values.path} {fields['rms_norm_eps']}: "
            "all norms of a model share one; correct the wrong file"
        )
    ssm = mamba.section("ssm_cfg")
    ssm.require("layer", "Mamba2", default="Mamba2")
    num_ssm_heads, d_state = ssm.integer("ngroups"), ssm.integer("d_state")
    ssm_head_dim = ssm.integer("headdim", d_state)
    d_inner, d_xb = mamba.integer("d_inner"), mamba.integer("d_xb")
    if d_inner != num_ssm_heads * ssm_head_dim:
        raise CheckpointRefused(
            f"{mamba.path} has d_inner {d_inner}, wanted ngroups · d_state = "
            f"{num_ssm_heads} · {ssm_head_dim}: use an undamaged checkpoint"
        )
    if not ssm_head_dim or d_xb % ssm_head_dim:
        raise CheckpointRefused(
            f"{mamba.path} has d_xb {d_xb}, wanted a multiple of the head dim {ssm_head_dim}: "
            "use an undamaged checkpoint"
        )
    attn_layers = mamba.get("attn_layers")
    if not isinstance(attn_layers, list) or not all(isinstance(i, int) for i in attn_layers):
        raise CheckpointRefused(
            f"{mamba.path} has attn_layers {attn_layers!r}, wanted a list of layer indices"
        )
    if not attn_layers:
        fields |= {"num_heads": 0, "num_kv_heads": 0, "head_dim": 0}
    fields |= {"rms_norm_eps": eps}
    mamba.refuse_unread(config_keys.MAMBA_CONFIG)
    config = HybridConfig(
        **fields,
        attn_layers=tuple(attn_layers),
        num_ssm_heads=num_ssm_heads,
        ssm_head_dim=ssm_head_dim,
        d_state=d_state,
        num_x_groups=d_xb // ssm_head_dim,
        num_b_groups=ssm.integer("num_b_groups", d_xb // ssm_head_dim),
        num_c_groups=ssm.integer("num_c_groups", num_ssm_heads),
        gated_norm_groups=ssm.integer("gated_norm_groups", num_ssm_heads),
        gated_norm_eps=ssm.number("gated_norm_eps", 1e-5),
        repeat_before_conv=ssm.boolean("repeat_kv_before_conv", False),
        **_mixer(ssm),
    )
    # d_inner says what expand would.
    ssm.refuse_unread(config_keys.MIXER | {"expand"})
    return config


def _mamba2(values: CheckedJson) -> HybridConfig:
    values.require("hidden_act", "silu", default="silu")
    # transformers 5 applies rescale_prenorm_residual to weights that it has just loaded.
    for name in ("use_bias", "rescale_prenorm_residual"):
        values.require(name, False, default=False)
    num_heads, groups = values.integer("num_heads"), values.integer("n_groups")
    d_model, head_dim = values.integer("hidden_size"), values.integer("head_dim")
    if values.integer("expand", 2) * d_model != num_heads * head_dim:
        raise CheckpointRefused(
            f"{values.path} has num_heads · head_dim = {num_heads} · {head_dim}, wanted expand · "
            f"hidden_size = {values.integer('expand', 2)} · {d_model}: use an undamaged checkpoint"
        )
    eps = values.number("layer_norm_epsilon", 1e-5)
    return HybridConfig(
        vocab_size=values.integer("vocab_size"),
        d_model=d_model,
        num_layers=values.integer("num_hidden_layers"),
        rms_norm_eps=eps,
        tie_embeddings=values.boolean("tie_word_embeddings", False),
        num_ssm_heads=num_heads,
        ssm_head_dim=head_dim,
        d_state=values.integer("state_size"),
        num_x_groups=num_heads,
        num_b_groups=groups,
        num_c_groups=groups,
        d_conv=values.integer("conv_kernel", 4),
        conv_bias=values.boolean("use_conv_bias", True),
        gated_norm_groups=groups,
        gated_norm_eps=eps,
        chunk_size=values.integer("chunk_size", 256),
        dt_limit=values.limits("time_step_limit"),
        **special_tokens(values),
    )


def _state_spaces(values: CheckedJson) -> HybridConfig:
    values.require("rms_norm", True, default=True)
    values.refuse_if_set("attn_layer_idx", "its attention layers are not supported")
    values.refuse_if_set("d_intermediate", "its MLPs are not supported")
    ssm = values.section("ssm_cfg")
    ssm.require("layer", "Mamba2", default="Mamba1")
    d_model, d_state = values.integer("d_model"), ssm.integer("d_state", 128)
    d_inner = ssm.integer("expand", 2) * d_model
    if ssm.get("d_ssm") is not None:
        ssm.require("d_ssm", d_inner, default=d_inner)
    head_dim, groups = ssm.integer("headdim", 64), ssm.integer("ngroups", 1)
    if not head_dim or d_inner % head_dim:
        raise CheckpointRefused(
            f"{values.path}: expand · d_model = {d_inner} is no multiple of headdim {head_dim}: "
            "use an undamaged checkpoint"
        )
    config = HybridConfig(
        vocab_size=values.integer("vocab_size"),
        d_model=d_model,
        num_layers=values.integer("n_layer"),
        rms_norm_eps=1e-5,
        tie_embeddings=values.boolean("tie_embeddings", True),
        num_ssm_heads=d_inner // head_dim,
        ssm_head_dim=head_dim,
        d_state=d_state,
        num_x_groups=d_inner // head_dim,
        num_b_groups=groups,
        num_c_groups=groups,
        gated_norm_groups=groups,
        gated_norm_eps=1e-5,
        **_mixer(ssm),
        **special_tokens(values),
    )
    ssm.refuse_unread(config_keys.MIXER)
    return config


def _own(values: CheckedJson) -> HybridConfig:
    table = values.section(OWN_TABLE)
    readers: dict[str, Callable[[str], Any]] = {
        "int": table.integer, "int | None": table.integer,
        "float": table.number, "float | None": table.number,
        "bool": lambda name: table.boolean(name, False),
        "str": table.text,
        "tuple[int, ...]": table.token_ids, "tuple[str, ...]": table.texts,
        "tuple[float, float]": table.limits,
    }  # fmt: skip
    given: dict[str, Any] = {}
    for field in fields(HybridConfig):
        if field.name == "rope_scaling":
            _, given["rope_scaling"], _ = rope(table)
        elif table.get(field.name) is not None:
            given[field.name] = readers[str(field.type)](field.name)
    table.refuse_unread()
    missing = [name for name in ("vocab_size", "d_model", "num_layers") if name not in given]
    if missing:
        raise CheckpointRefused(
            f"{values.path} says no {', '.join(missing)} in {OWN_TABLE}: copy it again"
        )
    return HybridConfig(**given)


def _own_json(config: HybridConfig, dtype: str) -> dict[str, Any]:
    table = {}
    for field in fields(HybridConfig):
        value = getattr(config, field.name)
        if value != field.default:
            table[field.name] = list(value) if isinstance(value, tuple) else value
    for name, value in table.items():
        if name == "dt_limit":
            table[name] = [_number(each) for each in value]
    return {"model_type": MODEL_TYPE, "torch_dtype": dtype, OWN_TABLE: table}


def _as_it_is(values: CheckedJson, config: HybridConfig, stored: Collection[str]) -> Rename:
    return lambda name: Source((name,))


def _backbone(embedding: str) -> Callable[[CheckedJson, HybridConfig, Collection[str]], Rename]:
    """mamba-ssm's names, where a layer is a norm and a mixer."""
    words = {
        "model.embed_tokens.": f"backbone.{embedding}.",
        "model.norm.": "backbone.norm_f.",
        "model.layers.": "backbone.layers.",
        ".input_layernorm.": ".norm.",
        ".mamba.": ".mixer.",
    }
    return lambda values, config, stored: lambda name: Source((translated(name, words),))


_MAMBA_IN_LLAMA = Layout(MAMBA_IN_LLAMA, ("llama",), _mamba_in_llama, _as_it_is, config_keys.LLAMA)
_LLAMA = Layout(LLAMA, ("llama",), _llama, _as_it_is, config_keys.LLAMA)
_MAMBA2 = Layout(MAMBA2, ("mamba2",), _mamba2, _backbone("embeddings"), config_keys.MAMBA2)
_STATE_SPACES = Layout(
    STATE_SPACES, (), _state_spaces, _backbone("embedding"), config_keys.STATE_SPACES
)
_OWN = Layout(OWN, (MODEL_TYPE,), _own, _as_it_is, config_keys.TRANSFORMERS)
LAYOUTS = tuple(
    layout.name for layout in (_MAMBA_IN_LLAMA, _LLAMA, _MAMBA2, _STATE_SPACES, *FAMILIES)
)

# What neither of MambaInLlama's two files has a word for
_BEYOND_MAMBA_IN_LLAMA = (
    "layer_types", "rotary_dim", "attention_scale", "attention_bias", "qk_norm", "attention_gate",
    "mlp_kind", "mlp_bias", "gated_norm", "mamba_in_bias", "mamba_out_bias", "feature_layers",
    "head_vocab_size", "head_rank",
)  # fmt: skip
_USUAL = HybridConfig(vocab_size=1, d_model=1, num_layers=1, attn_layers=(0,), num_heads=1,
                      num_kv_heads=1, head_dim=2)  # fmt: skip


# Parts


def _require_full_attention(values: CheckedJson, num_layers: int) -> None:
    kinds = values.get("layer_types")
    if kinds is None:
        return
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise CheckpointRefused(
            f"{values.path} has layer_types = {kinds!r:.99}, wanted a list of {num_layers}: copy "
            "it again"
        )
    if other := [kind for kind in kinds if kind != "full_attention"]:
        raise CheckpointRefused(
            f"{values.path} asks for layer_types of {other[0]!r:.99}; only 'full_attention' is "
            "supported"
        )


def _mixer(ssm: CheckedJson) -> dict[str, Any]:
    """The keyword arguments that all mixers of mamba-ssm's kind share."""
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


def _ssm_cfg(config: HybridConfig) -> dict[str, Any]:
    """The mixer's keyword arguments: `ngroups` and `d_state`, and what differs from the usual."""
    lowest, highest = config.dt_limit
    upper = _number(highest)
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


def _with_generation_eos(directory: Path, checkpoint: CheckpointConfig) -> CheckpointConfig:
    """Llama 3's chat models list their end-of-turn ids in generation_config.json only."""
    path = directory / "generation_config.json"
    if not path.exists():
        return checkpoint
    eos = CheckedJson.load(path).token_ids("eos_token_id")
    _require_reachable(eos, checkpoint.padded_vocab_size, path)
    return (
        replace(checkpoint, model=checkpoint.model.replace(eos_token_ids=eos))
        if eos
        else checkpoint
    )


def _require_reachable(eos: Sequence[int], padded_vocab_size: int, path: Path) -> None:
    """No token beyond the logits is ever chosen, so an answer would not end."""
    if beyond := [index for index in eos if index >= padded_vocab_size]:
        raise CheckpointRefused(
            f"{path} has eos_token_id {beyond[0]}, the vocabulary has {padded_vocab_size} tokens: "
            "correct it to the tokenizer's"
        )


def _number(value: float) -> Any:
    """JSON has no infinity; transformers' spelling is read by every JSON parser."""
    return {"__float__": "Infinity"} if math.isinf(value) else value


def _one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    return list(ids) if len(ids) > 1 else (ids[0] if ids else None)


def _to_json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, allow_nan=False) + "\n"
