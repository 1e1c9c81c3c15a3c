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
from stree.checkpoints.names import MAMBA_AS_MIXER, Names, in_layers
from stree.checkpoints.sources import FUSED, Layout, MtpHead, Rename, half_of_fused, named
from stree.models.config import HybridConfig

KINDS = {
    "linear_attention": "mamba", "mamba": "mamba",
    "full_attention": "attention", "attention": "attention",
    "mlp": "mlp", "moe": "experts+shared_mlp",
    # letters of hybrid_override_pattern
    "M": "mamba", "*": "attention", "-": "mlp", "E": "experts+shared_mlp",
}
PATTERN = "hybrid_override_pattern"
LAYER_KEYS = ("layers_block_type", "layer_types", PATTERN)
TABLE = {
    "model.embeddings": "model.embed_tokens",
    "model.norm_f": "model.norm",
    **in_layers({
        **MAMBA_AS_MIXER,
        "mixer.q_proj": "self_attn.q_proj",
        "mixer.k_proj": "self_attn.k_proj",
        "mixer.v_proj": "self_attn.v_proj",
        "mixer.o_proj": "self_attn.o_proj",
        "mixer.up_proj": "mlp.up_proj",
        "mixer.down_proj": "mlp.down_proj",
        "mixer.gate": "experts.router",
        "mixer.gate.e_score_correction_bias": "experts.correction_bias",
        "mixer.fc1_latent_proj": "experts.latent_in",
        "mixer.fc2_latent_proj": "experts.latent_out",
        "mixer.experts.up_proj": "experts.up",
        "mixer.experts.*.up_proj.weight": "experts.up",
        "mixer.experts.down_proj": "experts.down",
        "mixer.experts.*.down_proj.weight": "experts.down",
        "mixer.shared_experts.up_proj": "shared_mlp.up_proj",
        "mixer.shared_experts.down_proj": "shared_mlp.down_proj",
    }),
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
    values.require(
        mamba_hidden_act="silu", mlp_hidden_act="relu2", attention_bias=False,
        tie_word_embeddings=False,
    )
    layers = config_parts.layers(values, KINDS, *LAYER_KEYS, pattern=PATTERN)
    if not layers:
        values.refuse(f"has no layers, wanted one of {', '.join(LAYER_KEYS)}")
    values.set("num_hidden_layers", len(layers))
    common = config_parts.decoder(values, positions=4096, kv_heads=8, head_dim=128)
    groups, use_bias = values.integer("n_groups", 8), values.boolean("use_bias", False)
    eps = values.number("layer_norm_epsilon", 1e-5)
    # Names of older versions beside what counts
    values.require(rms_norm_eps=eps, norm_eps=eps, attention_head_dim=common["head_dim"])
    width = values.integer("intermediate_size", 21504)
    return HybridConfig(
        layer_types=tuple(layers),
        intermediate_size=width if "mlp" in layers else 0,
        rms_norm_eps=eps,
        rotary_dim=0,
        mlp_kind="relu2",
        mlp_bias=values.boolean("mlp_bias", False),
        d_conv=values.integer("conv_kernel", 4),
        conv_bias=values.boolean("use_conv_bias", True),
        mamba_in_bias=use_bias,
        mamba_out_bias=use_bias,
        gated_norm_eps=eps,
        chunk_size=values.integer("chunk_size", 128),
        # Its models do not follow time_step_limit
        dt_limit=(values.number("time_step_min", 0.001), math.inf),
        **common,
        **config_parts.mixer(
            values.integer("mamba_num_heads", 128), values.integer("mamba_head_dim", 64),
            values.integer("ssm_state_size", 128), groups,
        ),
        **(_experts(values) if KINDS["moe"] in layers else {}),
    )


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
    published = any(name.startswith("backbone.") for name in stored)
    names = Names(TABLE, "backbone." if published else "model.")
    return lambda name: named(names, name, config, stored)


def mtp(values: CheckedJson, config: HybridConfig) -> MtpHead:
    """Return the MTP head's config as a drafter, and the map from its parameters.

    It has layers of a pattern of its own; the first one's tensors include the projection of
    [embedding, hidden state], the last one's the final norm. Hidden states are those after a final
    norm, as Qwen's (vllm/model_executor/models/nemotron_h.py and nemotron_h_mtp.py).
    """
    values.require(num_nextn_predict_layers=1)
    said = values.get("mtp_layers_block_type") or values.get("mtp_hybrid_override_pattern") or "*E"
    if not set(said) <= set(KINDS):
        values.refuse(f"has an MTP head of {said!r:.99}, wanted some of {', '.join(KINDS)}")
    layers = [KINDS[kind] for kind in said]
    head = config.replace(**_experts(values)).mtp_head(layers)
    table = {name: ours for name, ours in TABLE.items() if ours != "model.norm"}
    names = Names({
        **table,
        "model.layers.0.enorm": "model.features.embedding_norm",
        "model.layers.0.hnorm": "model.features.norm",
        "model.layers.0.eh_proj.weight": FUSED,
        f"model.layers.{len(layers) - 1}.final_layernorm": "model.norm",
    }, "mtp.")

    def renamed(stored: Collection[str]) -> Rename:
        return lambda name: (
            half_of_fused(names, name, config.d_model) if name in FUSED
            else named(names, name, head, stored)
        )

    return head, renamed


LAYOUT = Layout(
    "NemotronH", ("nemotron_h",), spec, rename, WITHOUT_EFFECT, MULTI_TOKEN_PREDICTION, mtp
)
