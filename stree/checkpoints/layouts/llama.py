"""Llama's layout in transformers, and those with its names: Mistral, Qwen2, Qwen3."""

from __future__ import annotations

from typing import Any

from stree.checkpoints import config_parts
from stree.checkpoints.checked_json import CheckedJson
from stree.checkpoints.sources import Layout, as_it_is
from stree.models.config import HybridConfig


def spec(values: CheckedJson) -> HybridConfig:
    return _of_attention(
        fields_of(values, biases=True),
        attention_bias=values.boolean("attention_bias", False),
        mlp_bias=values.boolean("mlp_bias", False),
    )


def fields_of(values: CheckedJson, biases: bool = False) -> dict[str, Any]:
    """Read the fields of a `HybridConfig` from Llama's config.json; biases are refused or left."""
    if not biases:
        values.require(attention_bias=False, mlp_bias=False)
    values.require(hidden_act="silu", rope_interleaved=False, is_causal=True)
    return _common(values, positions=2048, num_heads=None)


def mistral_spec(values: CheckedJson) -> HybridConfig:
    values.require(hidden_act="silu")
    window = values.integer("sliding_window", 4096)
    if values.is_null("sliding_window"):
        window = 0
    values.set("sliding_window", None)
    return _of_attention(_common(values, positions=131072, kv_heads=8), sliding_window=window)


def qwen2_spec(values: CheckedJson) -> HybridConfig:
    return _of_attention(_qwen(values, kv_heads=32), qkv_bias=True)


def qwen3_spec(values: CheckedJson) -> HybridConfig:
    return _of_attention(
        _qwen(values, kv_heads=32, head_dim=128),
        attention_bias=values.boolean("attention_bias", False),
        qk_norm=True,
    )


def _qwen(values: CheckedJson, **usual: int) -> dict[str, Any]:
    # Published configs name a window and switch it off
    values.require(hidden_act="silu", use_sliding_window=False)
    values.set("sliding_window", None)
    return _common(values, positions=32768, **usual)


def _common(values: CheckedJson, **usual: Any) -> dict[str, Any]:
    """Read the fields that all layouts here have; `usual` is for `config_parts.decoder`."""
    config_parts.layers(values, {"full_attention": "attention"}, "layer_types")
    return {
        "intermediate_size": values.integer("intermediate_size"),
        "rms_norm_eps": values.number("rms_norm_eps", 1e-6),
        **config_parts.decoder(values, **usual),
        **config_parts.rope(values),
    }


def _of_attention(fields: dict[str, Any], **more: Any) -> HybridConfig:
    return HybridConfig(**fields, **more, attn_layers=tuple(range(fields["num_layers"])))


def config_json(config: HybridConfig, dtype: str) -> dict[str, Any]:
    """Return config.json of a model of attention layers."""
    return {"architectures": ["LlamaForCausalLM"], **json_fields(config, dtype, "llama")}


def json_fields(config: HybridConfig, dtype: str, model_type: str) -> dict[str, Any]:
    """Return the keys of Llama's config.json for a model of any type."""
    return {
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        # Llama's config must name some heads even if no layer has them.
        "num_attention_heads": config.num_heads or config.num_ssm_heads,
        "num_key_value_heads": config.num_kv_heads or config.num_ssm_heads,
        "head_dim": config.head_dim or config.ssm_head_dim,
        "hidden_act": "silu",
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
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


def _one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    return list(ids) if len(ids) > 1 else (ids[0] if ids else None)


LAYOUT = Layout("transformers Llama", ("llama",), spec, as_it_is, frozenset({"pretraining_tp"}))
MISTRAL = Layout("Mistral", ("mistral",), mistral_spec, as_it_is)
QWEN2 = Layout("Qwen2", ("qwen2",), qwen2_spec, as_it_is, frozenset({"max_window_layers"}))
QWEN3 = Layout("Qwen3", ("qwen3",), qwen3_spec, as_it_is, frozenset({"max_window_layers"}))
