"""LFM2-MoE: LFM2's mixers, with an MLP in the first layers and experts in the others."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from stree.checkpoints import config_parts
from stree.checkpoints.checked_json import CheckedJson
from stree.checkpoints.families import lfm2
from stree.checkpoints.names import Names, in_layers
from stree.checkpoints.sources import Layout, Rename, Source, named
from stree.models.config import HybridConfig

NAMES = Names({
    "model.embedding_norm": "model.norm",
    **in_layers({
        **lfm2.LAYER_NAMES,
        "feed_forward.gate": "experts.router",
        "feed_forward.expert_bias": "experts.correction_bias",
        "feed_forward.experts.gate_up_proj": "experts.up",
        "feed_forward.experts.*.w1.weight": "experts.up",
        "feed_forward.experts.*.w3.weight": "experts.up",
        "feed_forward.experts.down_proj": "experts.down",
        "feed_forward.experts.*.w2.weight": "experts.down",
    }),
})
ROUTER_FLOOR = 1e-6  # added to the sum of the chosen experts' scores


def spec(values: CheckedJson) -> HybridConfig:
    values.require(output_router_logits=False)
    common = lfm2.common(values)
    mixers = config_parts.layers(values, lfm2.KINDS, "layer_types")
    if mixers is None:
        values.refuse("has no layer_types")
    num_dense = values.integer("num_dense_layers", 2)
    experts: dict[str, Any] = {}
    if num_dense < len(mixers):
        experts = {
            "num_experts": values.integer("num_experts", 32),
            "experts_per_token": values.integer("num_experts_per_tok", 4),
            "expert_intermediate_size": values.integer("moe_intermediate_size", 1792),
        }
    values.boolean("use_expert_bias", True)
    return HybridConfig(
        layer_types=tuple(
            f"{mixer} {'mlp' if layer < num_dense else 'experts'}"
            for layer, mixer in enumerate(mixers)
        ),
        intermediate_size=values.integer("intermediate_size", 7168) if num_dense else 0,
        router="sigmoid",
        router_normalised=values.boolean("norm_topk_prob", True),
        router_scale=config_parts.factor(values, "routed_scaling_factor"),
        router_floor=ROUTER_FLOOR,
        **experts,
        **common,
    )


def rename(values: CheckedJson, config: HybridConfig, stored: Collection[str]) -> Rename:
    corrected = values.boolean("use_expert_bias", True)

    def source(name: str) -> Source:
        if name.endswith(".experts.correction_bias") and not corrected:
            gate = NAMES.published(name.replace(".correction_bias", ".router.weight"))
            num_experts, shape = config.num_experts, (config.num_experts, config.d_model)
            return Source(tuple(gate), lambda weight: weight.new_zeros(num_experts), shape)
        return named(NAMES, name, config, stored)

    return source


LAYOUT = Layout(
    "LFM2-MoE", ("lfm2_moe",), spec, rename,
    # of experts or of MLPs, where there are some
    frozenset({
        "num_experts", "num_experts_per_tok", "moe_intermediate_size", "intermediate_size",
    }),
)
