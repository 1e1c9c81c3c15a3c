"""Jamba: Mamba-1 with some attention layers without positions, an MLP or experts after each."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from stree.checkpoints import config_keys, config_parts
from stree.checkpoints.checked_json import CheckedJson
from stree.checkpoints.names import Names, in_layers
from stree.checkpoints.sources import Layout, Rename, Source, named
from stree.models.config import HybridConfig

if TYPE_CHECKING:
    from torch import Tensor

NAMES = Names({
    "model.final_layernorm": "model.norm",
    **in_layers({
        "pre_ff_layernorm": "post_attention_layernorm",
        "mamba.in_proj": "mamba1.in_proj",
        "mamba.conv1d": "mamba1.conv1d",
        "mamba.x_proj": "mamba1.x_proj",
        "mamba.dt_proj.weight": "mamba1.dt_proj.weight",
        "mamba.dt_layernorm.weight": "mamba1.dt_proj.weight",
        "mamba.dt_proj.bias": "mamba1.dt_proj.bias",
        "mamba.b_layernorm.weight": "mamba1.c_scale",
        "mamba.c_layernorm.weight": "mamba1.c_scale",
        "mamba.A_log": "mamba1.A_log",
        "mamba.D": "mamba1.D",
        "mamba.out_proj": "mamba1.out_proj",
        "feed_forward.gate_proj": "mlp.gate_proj",
        "feed_forward.up_proj": "mlp.up_proj",
        "feed_forward.down_proj": "mlp.down_proj",
        "feed_forward.router": "experts.router",
        "feed_forward.experts.gate_up_proj": "experts.up",
        "feed_forward.experts.*.gate_proj.weight": "experts.up",
        "feed_forward.experts.*.up_proj.weight": "experts.up",
        "feed_forward.experts.down_proj": "experts.down",
        "feed_forward.experts.*.down_proj.weight": "experts.down",
    }),
})


def spec(values: CheckedJson) -> HybridConfig:
    values.require(hidden_act="silu", output_router_logits=False)
    common = config_parts.decoder(values, positions=262144, kv_heads=8)
    d_model, width = common["d_model"], values.integer("intermediate_size", 14336)
    attention = _places(values, "attn_layer", 8, 4)
    num_experts = values.integer("num_experts", 16)
    with_experts = _places(values, "expert_layer", 2, 1)
    eps, bias = values.number("rms_norm_eps", 1e-6), values.boolean("mamba_proj_bias", False)
    rank = values.get("mamba_dt_rank", "auto")
    kinds = [
        f"{'attention' if attention(layer) else 'mamba1'} "
        f"{'experts' if num_experts > 1 and with_experts(layer) else 'mlp'}"
        for layer in range(common["num_layers"])
    ]
    experts: dict[str, Any] = {}
    if any("experts" in kind for kind in kinds):
        experts = {
            "num_experts": num_experts,
            "experts_per_token": values.integer("num_experts_per_tok", 2),
            "expert_intermediate_size": width,
            "router_normalised": False,
        }
    return HybridConfig(
        layer_types=tuple(kinds),
        rotary_dim=0,
        intermediate_size=width,
        rms_norm_eps=eps,
        mamba1_channels=values.integer("mamba_expand", 2) * d_model,
        d_state=values.integer("mamba_d_state", 16),
        d_conv=values.integer("mamba_d_conv", 4),
        dt_rank=-(-d_model // 16) if rank == "auto" else values.integer("mamba_dt_rank"),
        conv_bias=values.boolean("mamba_conv_bias", True),
        mamba_in_bias=bias,
        mamba_out_bias=bias,
        selection_norm_eps=eps,
        selection_scaled=True,
        **experts,
        **common,
    )


def _places(values: CheckedJson, name: str, period: int, offset: int) -> Any:
    """Return a function of a layer's index: whether it is one of every `period`, from `offset`."""
    period = values.integer(f"{name}_period", period)
    offset = values.integer(f"{name}_offset", offset)
    if not 0 <= offset < period:
        values.refuse(f"has {name}_offset {offset}, wanted 0 to {name}_period - 1 = {period - 1}")
    return lambda layer: layer % period == offset


def rename(values: CheckedJson, config: HybridConfig, stored: Collection[str]) -> Rename:
    def scaled(weight: Tensor, scale: Tensor) -> Tensor:
        return weight * scale

    def source(name: str) -> Source:
        if name.endswith(".c_scale"):
            return Source(tuple(NAMES.published(name)), scaled, (config.d_state,))
        if name.endswith(".dt_proj.weight"):
            shapes = (config.mamba1_channels, config.dt_rank), (config.dt_rank,)
            return Source(tuple(NAMES.published(name)), scaled, splits=(shapes,))
        return named(NAMES, name, config, stored)

    return source


LAYOUT = Layout(
    "Jamba", ("jamba",), spec, rename,
    config_keys.words("use_mambapy use_associative_scan num_experts_per_tok"),
)
