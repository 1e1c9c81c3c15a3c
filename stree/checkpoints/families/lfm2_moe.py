"""LFM2-MoE: LFM2's mixers, with an MLP in the first layers and experts in the others."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from stree.checkpoints import config_parts
from stree.checkpoints.checked_json import CheckedJson
from stree.checkpoints.families import lfm2
from stree.checkpoints.sources import Layout, Rename, Source, of_experts, translated
from stree.models.config import HybridConfig

WORDS = {
    ".experts.router.": ".feed_forward.gate.",
    ".experts.correction_bias": ".feed_forward.expert_bias",
    **lfm2.WORDS,
}
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
    d_model, inner = config.d_model, config.expert_intermediate_size
    corrected = values.boolean("use_expert_bias", True)
    projections = {
        ".experts.up": ("gate_up_proj", ("w1", "w3"), (inner, d_model)),
        ".experts.down": ("down_proj", ("w2",), (d_model, inner)),
    }

    def source(name: str) -> Source:
        place = translated(name, WORDS)
        if name.endswith(".experts.correction_bias") and not corrected:
            gate = place.replace(".expert_bias", ".gate.weight")
            none = torch.zeros(config.num_experts)
            return Source((gate,), lambda _: none, (config.num_experts, d_model))
        for ours, theirs in projections.items():
            if name.endswith(ours):
                experts = f"{name.removesuffix(ours)}.feed_forward.experts"
                return of_experts(experts, *theirs, config.num_experts, stored)
        return Source((place,))

    return source


LAYOUT = Layout(
    "LFM2-MoE", ("lfm2_moe",), spec, rename,
    # of experts or of MLPs, where there are some
    frozenset({
        "num_experts", "num_experts_per_tok", "moe_intermediate_size", "intermediate_size",
    }),
)
