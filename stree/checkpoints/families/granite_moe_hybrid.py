"""GraniteMoeHybrid (Granite 4 H): Mamba-2 and attention, a shared MLP and experts side by side.

It has multipliers on embeddings, branches and logits.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from stree.checkpoints import config_parts
from stree.checkpoints.checked_json import CheckedJson
from stree.checkpoints.names import Names, in_layers
from stree.checkpoints.sources import Layout, Rename, Source, half, named, scaled
from stree.models.config import HybridConfig

KINDS = {
    "linear_attention": "mamba", "mamba": "mamba",
    "full_attention": "attention", "attention": "attention",
}
NAMES = Names(in_layers({
    "shared_mlp.input_linear": ("mlp.gate_proj", "mlp.up_proj"),
    "shared_mlp.output_linear": "mlp.down_proj",
    "block_sparse_moe.router.layer": "experts.router",
    "block_sparse_moe.input_linear.weight": "experts.up",
    "block_sparse_moe.output_linear.weight": "experts.down",
    # as newer versions of transformers name them once they are loaded
    "block_sparse_moe.router": "experts.router",
    "block_sparse_moe.experts.gate_up_proj": "experts.up",
    "block_sparse_moe.experts.down_proj": "experts.down",
}))


def spec(values: CheckedJson) -> HybridConfig:
    values.require(
        hidden_act="silu", output_router_logits=False, normalization_function="rmsnorm"
    )
    common = config_parts.decoder(values, positions=2048)
    mixers = config_parts.layers(values, KINDS, "layer_types", "layers_block_type")
    num_experts = values.integer("num_local_experts", 8)
    after = "experts+mlp" if num_experts else "mlp"
    positions = values.get("position_embedding_type", "nope")
    if positions not in ("nope", "rope"):
        values.refuse(
            f"has position_embedding_type = {positions!r:.99}, wanted 'rope', 'nope' or null"
        )
    experts: dict[str, Any] = {}
    if num_experts:
        experts = {
            "num_experts": num_experts,
            "experts_per_token": values.integer("num_experts_per_tok", 2),
            "expert_intermediate_size": values.integer("intermediate_size", 11008),
        }
    eps = values.number("rms_norm_eps", 1e-6)
    return HybridConfig(
        layer_types=tuple(
            f"{mixer} {after}" for mixer in mixers or ["mamba"] * common["num_layers"]
        ),
        intermediate_size=values.integer("shared_intermediate_size", 1024),
        rms_norm_eps=eps / _branch(values) ** 2,
        gated_norm_eps=eps,
        rotary_dim=None if positions == "rope" else 0,
        attention_bias=values.boolean("attention_bias", False),
        attention_scale=config_parts.factor(values, "attention_multiplier"),
        **experts,
        **common,
        **config_parts.rope(values),
        **config_parts.mamba(values),
    )


def _branch(values: CheckedJson) -> float:
    """Read the multiplier of each branch that is added to the residual stream.

    Our stream is theirs divided by it: branches are added as they are, embeddings are divided by
    it, and the epsilon of norms, whose results are otherwise the same, by its square. So no large
    weight changes.
    """
    branch = config_parts.factor(values, "residual_multiplier")
    if not 1e-9 < branch < 1e9:
        values.refuse(f"has residual_multiplier = {branch}, wanted a moderate one above 0")
    return branch


def rename(values: CheckedJson, config: HybridConfig, stored: Collection[str]) -> Rename:
    embedding = config_parts.factor(values, "embedding_multiplier") / _branch(values)
    # The last norm's weight takes the divisor of the logits, so that a tied head stays tied
    logits = 1 / config_parts.factor(values, "logits_scaling")
    logits /= embedding if config.tie_embeddings else 1
    makes = {"model.embed_tokens.weight": scaled(embedding), "model.norm.weight": scaled(logits)}
    fused = (2 * config.intermediate_size, config.d_model)

    def source(name: str) -> Source:
        if ".mlp.gate_proj." in name or ".mlp.up_proj." in name:
            return Source(tuple(NAMES.published(name)), half(".up_proj." in name), fused)
        return named(NAMES, name, config, stored, makes.get(name))

    return source


LAYOUT = Layout(
    "GraniteMoeHybrid", ("granitemoehybrid",), spec, rename,
    frozenset({"intermediate_size", "num_experts_per_tok"}),  # of experts, where there are some
)
