"""Qwen3.5's text model, dense or with experts: Qwen3-Next's layers with separate projections.

Of a checkpoint with vision, the text model alone is read.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import partial

from stree.checkpoints import config_keys
from stree.checkpoints.checked_json import CheckedJson
from stree.checkpoints.families import qwen3_next
from stree.checkpoints.names import Names, in_layers
from stree.checkpoints.sources import Layout, MtpHead, Rename
from stree.models.config import HybridConfig

TEXT_ALONE = ("qwen3_5_text", "qwen3_5_moe_text")
WITH_VISION = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
PREFIX_WITH_VISION = "model.language_model."
TABLE = in_layers({
    **qwen3_next.LAYER_NAMES,
    "linear_attn.in_proj_qkv": "gated_delta.in_proj_qkv",
    "linear_attn.in_proj_z": "gated_delta.in_proj_z",
    "linear_attn.in_proj_b": "gated_delta.in_proj_b",
    "linear_attn.in_proj_a": "gated_delta.in_proj_a",
})
DROPPED = re.compile(r"mtp\..*|model\.visual\..*")


def spec(values: CheckedJson) -> HybridConfig:
    kind = values["model_type"]
    if kind in TEXT_ALONE:
        return _text(values, kind)
    text = values.section("text_config")
    text.require(model_type=WITH_VISION[kind])
    if "tie_word_embeddings" not in text:  # transformers' class of text and vision reads the outer
        text.set("tie_word_embeddings", values.boolean("tie_word_embeddings", False))
    config = _text(text, WITH_VISION[kind])
    if values.boolean("tie_word_embeddings", config.tie_embeddings) != config.tie_embeddings:
        values.refuse("has another tie_word_embeddings than its text_config", "correct it")
    text.refuse_unread(
        config_keys.TRAINING_AND_GENERATION, partial(config_keys.of_family, WITH_VISION[kind])
    )
    # Fine-tunes name the end of a turn beside the table
    ends = dict.fromkeys((*config.eos_token_ids, *values.token_ids("eos_token_id")))
    return config.replace(eos_token_ids=tuple(ends))


def _text(values: CheckedJson, kind: str) -> HybridConfig:
    values.require(attn_output_gate=True, output_gate_type="swish")
    mixers = qwen3_next.mixers(values)
    if kind == "qwen3_5_text":
        return HybridConfig(
            layer_types=tuple(f"{mixer} mlp" for mixer in mixers),
            intermediate_size=values.integer("intermediate_size", 12288),
            **qwen3_next.common(values, usual_kv_heads=4),
        )
    num_experts = values.integer("num_experts", 256)
    return HybridConfig(
        layer_types=tuple(f"{mixer} experts+shared_mlp" for mixer in mixers),
        **qwen3_next.experts(values, num_experts, usual_choice=8),
        **qwen3_next.common(values, usual_kv_heads=2),
    )


def rename(values: CheckedJson, config: HybridConfig, stored: Collection[str]) -> Rename:
    sees = any(name.startswith(PREFIX_WITH_VISION) for name in stored)
    names = Names(TABLE, PREFIX_WITH_VISION if sees else "model.")
    return qwen3_next.rename_common(names, config, stored)


def mtp(values: CheckedJson, config: HybridConfig) -> MtpHead:
    text = values if values["model_type"] in TEXT_ALONE else values.section("text_config")
    return qwen3_next.mtp_of(TABLE, text, config)


LAYOUT = Layout(
    "Qwen3.5", (*TEXT_ALONE, *WITH_VISION), spec, rename,
    frozenset({  # of a checkpoint that also sees
        "vision_config", "image_token_id", "video_token_id",
        "vision_start_token_id", "vision_end_token_id",
    }),
    DROPPED,
    mtp,
)
