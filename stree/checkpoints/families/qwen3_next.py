"""Qwen3-Next: the gated delta rule and some attention layers with a gate, experts and a shared one.

Norms are stored as w for a scale of 1 + w.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any

from stree.checkpoints import config_parts
from stree.checkpoints.checked_json import CheckedJson
from stree.checkpoints.names import Names, Table, in_layers
from stree.checkpoints.sources import (
    FUSED,
    Layout,
    Make,
    MtpHead,
    Rename,
    Source,
    after_each_other,
    half_of_fused,
    joined,
    named,
    plus_one,
    rotary_order,
)
from stree.models.config import HybridConfig
from stree_kernels.shapes import GatedDeltaShape

if TYPE_CHECKING:
    from torch import Tensor

KINDS = {"linear_attention": "gated_delta", "full_attention": "attention"}
ROTARY_SHARE = 0.25
SECTIONS = ("mrope_section", "mrope_interleaved")  # of positions, all equal for text
LAYER_NAMES: Table = {  # that Qwen3.5 has, too
    "linear_attn.conv1d": "gated_delta.conv1d",
    "linear_attn.dt_bias": "gated_delta.dt_bias",
    "linear_attn.A_log": "gated_delta.A_log",
    "linear_attn.norm": "gated_delta.norm",
    "linear_attn.out_proj": "gated_delta.out_proj",
    "self_attn.q_proj": ("self_attn.q_proj", "self_attn.gate_proj"),
    "mlp.gate": "experts.router",
    "mlp.experts.gate_up_proj": "experts.up",
    "mlp.experts.*.gate_proj.weight": "experts.up",
    "mlp.experts.*.up_proj.weight": "experts.up",
    "mlp.experts.down_proj": "experts.down",
    "mlp.experts.*.down_proj.weight": "experts.down",
    "mlp.shared_expert_gate": "shared_mlp.gate",
    "mlp.shared_expert.gate_proj": "shared_mlp.gate_proj",
    "mlp.shared_expert.up_proj": "shared_mlp.up_proj",
    "mlp.shared_expert.down_proj": "shared_mlp.down_proj",
}
NAMES = Names(in_layers({
    **LAYER_NAMES,
    "linear_attn.in_proj_qkvz": ("gated_delta.in_proj_qkv", "gated_delta.in_proj_z"),
    "linear_attn.in_proj_ba": ("gated_delta.in_proj_b", "gated_delta.in_proj_a"),
}))
MTP_NAMES: Table = {
    "model.pre_fc_norm_embedding": "model.features.embedding_norm",
    "model.pre_fc_norm_hidden": "model.features.norm",
    "model.fc": ("model.features.embedding_proj", "model.features.proj"),
}
PLUS_ONE = ("layernorm.weight", "model.norm.weight", ".q_norm.weight", ".k_norm.weight")
MULTI_TOKEN_PREDICTION = re.compile(r"mtp\..*")


def spec(values: CheckedJson) -> HybridConfig:
    shared = common(values, usual_kv_heads=2)
    num_experts = values.integer("num_experts", 512)
    every = values.integer("decoder_sparse_step", 1)
    dense = values.indices("mlp_only_layers", [])
    if num_experts and not every:
        values.refuse("has decoder_sparse_step 0, wanted at least 1")
    sparse = [
        bool(num_experts) and layer not in dense and not (layer + 1) % every
        for layer in range(shared["num_layers"])
    ]
    return HybridConfig(
        layer_types=tuple(
            f"{mixer} {'experts+shared_mlp' if has_experts else 'mlp'}"
            for mixer, has_experts in zip(mixers(values), sparse, strict=True)
        ),
        intermediate_size=values.integer("intermediate_size", 5632),
        router_normalised=values.boolean("norm_topk_prob", True),
        **(experts(values, num_experts, usual_choice=10) if any(sparse) else {}),
        **shared,
    )


def mixers(values: CheckedJson) -> list[str]:
    """Return each layer's mixer; without a list every full_attention_interval-th is attention."""
    interval = values.integer("full_attention_interval", 4)
    found = config_parts.layers(values, KINDS, "layer_types")
    if found is not None:
        return found
    if not interval:
        values.refuse("has full_attention_interval 0, wanted at least 1")
    layers = range(1, config_parts.num_layers(values) + 1)
    return ["gated_delta" if layer % interval else "attention" for layer in layers]


def experts(values: CheckedJson, num_experts: int, usual_choice: int) -> dict[str, Any]:
    return {
        "num_experts": num_experts,
        "experts_per_token": values.integer("num_experts_per_tok", usual_choice),
        "expert_intermediate_size": values.integer("moe_intermediate_size", 512),
        "shared_intermediate_size": values.integer("shared_expert_intermediate_size", 512),
        "shared_gate": True,
    }


def common(values: CheckedJson, usual_kv_heads: int) -> dict[str, Any]:
    """Read the keys that Qwen3.5's config shares: all except the layers and their MLPs."""
    values.require(hidden_act="silu", use_sliding_window=False)
    fields = config_parts.decoder(
        values, positions=32768, num_heads=16, kv_heads=usual_kv_heads, head_dim=256
    )
    eps = values.number("rms_norm_eps", 1e-6)
    return {
        "rms_norm_eps": eps,
        "attention_bias": values.boolean("attention_bias", False),
        "qk_norm": True,
        "attention_gate": True,
        "num_delta_heads": values.integer("linear_num_value_heads", 32),
        "num_delta_key_heads": values.integer("linear_num_key_heads", 16),
        "delta_key_dim": values.integer("linear_key_head_dim", 128),
        "delta_value_dim": values.integer("linear_value_head_dim", 128),
        "d_conv": values.integer("linear_conv_kernel_dim", 4),
        "conv_bias": False,
        "gated_norm_eps": eps,
        **fields,
        **config_parts.rope(
            values, head_dim=fields["head_dim"], usual_share=ROTARY_SHARE, ignored=SECTIONS
        ),
    }


def rename(values: CheckedJson, config: HybridConfig, stored: Collection[str]) -> Rename:
    shape = config.gated_delta_shape
    cuts = of_key_heads(shape) if config.has("gated_delta") else {}
    others = rename_common(NAMES, config, stored)
    rows = {
        "in_proj_qkvz": 2 * shape.d_inner + 2 * shape.conv_dims[0],
        "in_proj_ba": 2 * shape.num_heads,
    }

    def source(name: str) -> Source:
        projection = name.removesuffix(".weight").rpartition(".")[2]
        if projection not in cuts:
            return others(name)
        (place,) = NAMES.published(name)
        theirs = place.removesuffix(".weight").rpartition(".")[2]
        return Source((place,), cuts[projection], (rows[theirs], config.d_model))

    return source


def of_key_heads(shape: GatedDeltaShape) -> dict[str, Make]:
    """Return the function that takes each of our projections out of the stored one.

    The stored rows of q, k, v and z, and of b and a, lie side by side for each key head.
    """
    heads_a_key = shape.num_heads // shape.num_key_heads
    values = heads_a_key * shape.value_dim

    def parts(*sizes: int) -> Callable[[Tensor], list[Tensor]]:
        def split(tensor: Tensor) -> list[Tensor]:
            by_key = tensor.unflatten(0, (shape.num_key_heads, -1))
            return [part.flatten(0, 1) for part in by_key.split(list(sizes), dim=1)]

        return split

    qkvz = parts(shape.key_dim, shape.key_dim, values, values)
    ba = parts(heads_a_key, heads_a_key)
    return {
        "in_proj_qkv": lambda tensor: joined(*qkvz(tensor)[:3]),
        "in_proj_z": lambda tensor: qkvz(tensor)[3],
        "in_proj_b": lambda tensor: ba(tensor)[0],
        "in_proj_a": lambda tensor: ba(tensor)[1],
    }


def mtp_of(table: Table, values: CheckedJson, config: HybridConfig) -> MtpHead:
    """Return the MTP head's config as a drafter, and the map from its parameters.

    It has one layer with attention and the MLP or experts of the target's last layer
    (vLLM's Qwen3NextMultiTokenPredictor, vllm/model_executor/models/qwen3_next_mtp.py).
    """
    values.require(
        mtp_use_dedicated_embeddings=False, mtp_num_hidden_layers=1, num_nextn_predict_layers=1
    )
    *_, mlp = config.layer_type(config.num_layers - 1).split()
    head = config.mtp_head([f"attention {mlp}"])
    names = Names({**table, **MTP_NAMES}, "mtp.")

    def rename(stored: Collection[str]) -> Rename:
        others = rename_common(names, head, stored)

        def source(name: str) -> Source:
            if name in FUSED:
                return half_of_fused(names, name, config.d_model)
            if name.startswith("model.features."):
                return Source(tuple(names.published(name)), plus_one, wide=True)
            return others(name)

        return source

    return head, rename


def rename_common(names: Names, config: HybridConfig, stored: Collection[str]) -> Rename:
    """Return the map of the parameters that Qwen3.5 stores alike."""
    order, d_model = rotary_order(config), config.d_model

    def of_each_head(second: bool) -> Make:
        """Take q, or its gate, out of q_proj, where both lie side by side for each head."""
        return lambda tensor: tensor.unflatten(0, (config.num_heads, 2, -1))[
            :, int(second)
        ].flatten(0, 1)

    def source(name: str) -> Source:
        place = tuple(names.published(name))
        if name.endswith(PLUS_ONE):
            of_heads = name.endswith((".q_norm.weight", ".k_norm.weight"))
            make = after_each_other(plus_one, order) if of_heads else plus_one
            return Source(place, make, wide=True)
        if ".k_proj." in name:
            return Source(place, order)
        if ".self_attn.q_proj." in name or ".self_attn.gate_proj." in name:
            rows = 2 * config.num_heads * config.head_dim
            shape = (rows, d_model) if name.endswith("weight") else (rows,)
            if ".gate_proj." in name:
                return Source(place, of_each_head(True), shape)
            return Source(place, after_each_other(of_each_head(False), order), shape)
        return named(names, name, config, stored)

    return source


LAYOUT = Layout(
    "Qwen3-Next", ("qwen3_next",), spec, rename,
    frozenset({  # of experts, where there are some
        "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
    }),
    MULTI_TOKEN_PREDICTION,
    partial(mtp_of, in_layers(LAYER_NAMES)),
)
