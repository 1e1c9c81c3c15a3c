"""NemotronH (Nemotron-H, Nemotron 3): layers of one block each, without positions.

A block is Mamba-2, attention, an MLP, or experts with a shared MLP; MLPs have no gate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from typing import Any

from stree.checkpoints import config_keys, config_parts
from stree.checkpoints.checked_json import CheckedJson
from stree.checkpoints.sources import Layout, Rename, Source, stacked, translated
from stree.common.errors import CheckpointRefused
from stree.models.config import HybridConfig

KINDS = {
    "linear_attention": "mamba", "mamba": "mamba",
    "full_attention": "attention", "attention": "attention",
    "mlp": "mlp", "moe": "experts+shared_mlp",
}
PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "experts+shared_mlp"}
WORDS = {
    ".input_layernorm.": ".norm.",
    "model.embed_tokens.": "backbone.embeddings.",
    "model.norm.": "backbone.norm_f.",
    "model.": "backbone.",
    ".experts.router.": ".mixer.gate.",
    ".experts.correction_bias": ".mixer.gate.e_score_correction_bias",
    ".experts.latent_in.": ".mixer.fc1_latent_proj.",
    ".experts.latent_out.": ".mixer.fc2_latent_proj.",
    ".shared_mlp.": ".mixer.shared_experts.",
    ".mamba.": ".mixer.",
    ".self_attn.": ".mixer.",
    ".mlp.": ".mixer.",
}
# The dimensions of its Mamba layers say what expand would, the width of the shared MLP the number
# of shared experts; num_nextn_predict_layers and the like describe weights that no step uses.
# Published checkpoints name code of their own (auto_map), from before transformers had the family,
# which is never run. The keys from n_routed_experts on are those of experts.
WITHOUT_EFFECT = config_keys.words("""
    auto_map expand mamba_proj_bias mamba_ssm_cache_dtype rescale_prenorm_residual
    time_step_limit n_shared_experts moe_shared_expert_overlap num_nextn_predict_layers
    mtp_layers_block_type mtp_hybrid_override_pattern n_routed_experts num_experts_per_tok
    moe_intermediate_size moe_latent_size moe_shared_expert_intermediate_size n_group
    topk_group norm_topk_prob routed_scaling_factor
""")
MULTI_TOKEN_PREDICTION = re.compile(r"(.*\.)?mtp\..*")


def spec(values: CheckedJson) -> HybridConfig:
    values.require("mamba_hidden_act", "silu", default="silu")
    values.require("mlp_hidden_act", "relu2", default="relu2")
    values.require("sliding_window", None, default=None)
    for name in ("attention_bias", "tie_word_embeddings"):
        values.require(name, False, default=False)
    layers = _layers(values)
    d_model = values.integer("hidden_size")
    groups, use_bias = values.integer("n_groups", 8), values.boolean("use_bias", False)
    eps = values.number("layer_norm_epsilon", 1e-5)
    head_dim = values.integer("head_dim", 128)
    # Names of older versions beside what counts
    for name, only in (("rms_norm_eps", eps), ("norm_eps", eps), ("attention_head_dim", head_dim)):
        values.require(name, only, default=only)
    ssm_heads = values.integer("mamba_num_heads", 128)
    has_mlp, has_experts = "mlp" in layers, KINDS["moe"] in layers
    num_heads = values.integer("num_attention_heads", 32)
    usual_kv_heads = num_heads if values.is_null("num_key_value_heads") else 8
    width = values.integer("intermediate_size", 21504)
    return HybridConfig(
        vocab_size=values.integer("vocab_size"),
        d_model=d_model,
        num_layers=len(layers),
        layer_types=tuple(layers),
        intermediate_size=width if has_mlp else 0,
        rms_norm_eps=eps,
        num_heads=num_heads,
        num_kv_heads=values.integer("num_key_value_heads", usual_kv_heads),
        head_dim=head_dim,
        rotary_dim=0,
        max_position_embeddings=values.integer("max_position_embeddings", 4096),
        mlp_kind="relu2",
        mlp_bias=values.boolean("mlp_bias", False),
        num_ssm_heads=ssm_heads,
        ssm_head_dim=values.integer("mamba_head_dim", 64),
        d_state=values.integer("ssm_state_size", 128),
        num_x_groups=ssm_heads,
        num_b_groups=groups,
        num_c_groups=groups,
        d_conv=values.integer("conv_kernel", 4),
        conv_bias=values.boolean("use_conv_bias", True),
        mamba_in_bias=use_bias,
        mamba_out_bias=use_bias,
        gated_norm_groups=groups,
        gated_norm_eps=eps,
        chunk_size=values.integer("chunk_size", 128),
        # Its models do not follow time_step_limit
        dt_limit=(values.number("time_step_min", 0.001), math.inf),
        **(_experts(values) if has_experts else {}),
        **config_parts.special_tokens(values),
    )


def _layers(values: CheckedJson) -> list[str]:
    """Read the layers from either of the two keys, which must agree."""
    said = []
    for name in ("layers_block_type", "layer_types"):
        if values.get(name) is not None:
            said.append(config_parts.layer_list(values, name, KINDS))
    pattern = values.get("hybrid_override_pattern")
    if pattern is not None:
        if not isinstance(pattern, str) or not set(pattern) <= set(PATTERN):
            raise CheckpointRefused(
                f"{values.path} has hybrid_override_pattern = {pattern!r:.99}, wanted a text of "
                f"{', '.join(PATTERN)}"
            )
        said.append([PATTERN[letter] for letter in pattern])
    if not said or any(each != said[0] for each in said):
        raise CheckpointRefused(
            f"{values.path} says its layers in {len(said)} ways that differ, wanted one of "
            "layers_block_type and hybrid_override_pattern: use an undamaged checkpoint"
        )
    config_parts.require_count(values, "layers", said[0])
    return said[0]


def _experts(values: CheckedJson) -> dict[str, Any]:
    return {
        "num_experts": values.integer("n_routed_experts", 8),
        "experts_per_token": values.integer("num_experts_per_tok", 2),
        "expert_intermediate_size": values.integer("moe_intermediate_size", 7688),
        "expert_latent_size": values.integer("moe_latent_size", 0),
        "shared_intermediate_size": values.integer("moe_shared_expert_intermediate_size", 7688),
        "router": "sigmoid",
        "router_groups": values.integer("n_group", 1),
        "router_top_groups": values.integer("topk_group", 1),
        "router_normalised": values.boolean("norm_topk_prob", True),
        "router_scale": config_parts.factor(values, "routed_scaling_factor"),
    }


def rename(values: CheckedJson, config: HybridConfig, stored: Collection[str]) -> Rename:
    # Published with one prefix; newer versions may write the other
    prefix = "backbone." if any(name.startswith("backbone.") for name in stored) else "model."
    latent = config.expert_latent_size or config.d_model
    inner = config.expert_intermediate_size

    def source(name: str) -> Source:
        place = translated(name, WORDS).replace("backbone.", prefix, 1)
        for ours, shape in (("up", (inner, latent)), ("down", (latent, inner))):
            if name.endswith(f".experts.{ours}"):
                layer = place.removesuffix(f".experts.{ours}")
                together = f"{layer}.mixer.experts.{ours}_proj"
                if together in stored:  # as newer versions have it once it is loaded
                    return Source((together,))
                experts = range(config.num_experts)
                names = (f"{layer}.mixer.experts.{i}.{ours}_proj.weight" for i in experts)
                return Source(tuple(names), stacked, shape)
        return Source((place,))

    return source


LAYOUT = Layout("NemotronH", ("nemotron_h",), spec, rename, WITHOUT_EFFECT, MULTI_TOKEN_PREDICTION)
