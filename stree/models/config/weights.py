"""Names and shapes of a model's weights, worked out from its config without PyTorch.

`HybridModel(config).state_dict()` has the same, in the same order: a module's own weights come
before those of its parts. Shapes: D model width, E channels, S state.
"""

from __future__ import annotations

from stree.models.config.hybrid import HybridConfig
from stree.models.config.mixers import UNGATED

Shapes = dict[str, tuple[int, ...]]

EMBEDDING, HEAD, HEAD_IDS = "model.embed_tokens.weight", "lm_head.weight", "head_ids"
UNKNOWN = "model.features.unknown"
NORM_NAMES = ("input_layernorm", "post_attention_layernorm")  # of a layer's blocks
PART_NAMES = {"attention": "self_attn"}  # Llama's; others are called what they are


def weight_shapes(config: HybridConfig) -> Shapes:
    """Return the shape of each weight and buffer of a model, by name.

    Example:
        >>> from stree.models.config import HybridConfig
        >>> config = HybridConfig(64, 16, 1, (0,), num_heads=2, num_kv_heads=1, head_dim=8)
        >>> weight_shapes(config)["model.layers.0.self_attn.k_proj.weight"]
        (8, 16)
    """
    d_model, width = config.d_model, config.head_rank or config.d_model
    shapes: Shapes = {HEAD_IDS: (config.head_vocab_size,)} if config.head_vocab_size else {}
    shapes |= _within("model", _backbone(config))
    if config.head_rank:
        shapes |= _within("head_down", _linear(config.head_rank, d_model))
    if not config.tie_embeddings:
        shapes |= _within("lm_head", _linear(config.head_size, width))
    return shapes


def _within(name: str, shapes: Shapes) -> Shapes:
    return {f"{name}.{own}": shape for own, shape in shapes.items()}


def _modules(**modules: Shapes) -> Shapes:
    return {
        name: shape for module, shapes in modules.items()
        for name, shape in _within(module, shapes).items()
    }


def _linear(outputs: int, inputs: int, bias: bool = False) -> Shapes:
    return {"weight": (outputs, inputs), **_vector(outputs, bias)}


def _norm(width: int, bias: bool = False) -> Shapes:
    return {"weight": (width,), **_vector(width, bias)}


def _conv(channels: int, width: int, bias: bool) -> Shapes:
    return {"weight": (channels, 1, width), **_vector(channels, bias)}


def _vector(width: int, there: bool) -> Shapes:
    return {"bias": (width,)} if there else {}


def _backbone(config: HybridConfig) -> Shapes:
    shapes = _modules(embed_tokens=_linear(config.vocab_size, config.d_model))
    for index in range(config.num_layers):
        shapes |= _within(f"layers.{index}", _layer(config, index))
    shapes |= _modules(norm=_norm(config.d_model, config.final_norm_bias))
    if config.feature_layers:
        shapes |= _within("features", _draft_inputs(config))
    for index in range(config.num_shared_blocks):
        shapes |= _within(f"shared.{index}", _shared_block(config))
    return shapes


def _layer(config: HybridConfig, index: int) -> Shapes:
    d_model, shapes = config.d_model, Shapes()
    d_input = 2 * d_model if config.eagle_inputs and index == 0 else d_model
    for block, norm_name in zip(config.blocks(index), NORM_NAMES, strict=False):
        shapes |= _within(norm_name, _norm(d_model))
        if block.shared is not None:
            shapes |= _within("shared_use", _shared_use(config))
        for kind in block.parts:
            own = _attention(config, d_input) if kind == "attention" else _PARTS[kind](config)
            shapes |= _within(PART_NAMES.get(kind, kind), own)
    return shapes


def _attention(config: HybridConfig, d_input: int) -> Shapes:
    width, kv_width = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    bias = config.attention_bias or config.qkv_bias
    shapes = _modules(
        q_proj=_linear(width, d_input, bias), k_proj=_linear(kv_width, d_input, bias),
        v_proj=_linear(kv_width, d_input, bias),
        o_proj=_linear(config.d_model, width, config.attention_bias),
    )
    if config.attention_gate:
        shapes |= _modules(gate_proj=_linear(width, d_input, bias))
    if config.qk_norm:
        normed = (width, kv_width) if config.qk_norm_whole else (config.head_dim,) * 2
        shapes |= _modules(q_norm=_norm(normed[0]), k_norm=_norm(normed[1]))
    return shapes


def _mlp(config: HybridConfig, width: int, gated: bool = False) -> Shapes:
    d_model, bias = config.d_model, config.mlp_bias
    shapes = _modules(
        gate_proj=_linear(width, d_model, bias), up_proj=_linear(width, d_model, bias),
        down_proj=_linear(d_model, width, bias), gate=_linear(1, d_model),
    )
    left_out = [*["gate_proj."] * (config.mlp_kind in UNGATED), *["gate."] * (not gated)]
    return {name: each for name, each in shapes.items() if not name.startswith(tuple(left_out))}


def _experts(config: HybridConfig) -> Shapes:
    d_model, experts, inner = config.d_model, config.num_experts, config.expert_intermediate_size
    outer = config.expert_latent_size or d_model
    shapes: Shapes = {
        "up": (experts, inner * (1 if config.mlp_kind in UNGATED else 2), outer),
        "down": (experts, outer, inner),
    }
    if config.router == "sigmoid":
        shapes["correction_bias"] = (experts,)
    shapes |= _modules(router=_linear(experts, d_model))
    if config.expert_latent_size:
        shapes |= _modules(
            latent_in=_linear(outer, d_model, config.mlp_bias),
            latent_out=_linear(d_model, outer, config.mlp_bias),
        )
    return shapes


def _mamba(config: HybridConfig) -> Shapes:
    d_model, heads = config.d_model, (config.num_ssm_heads,)
    shapes = {"dt_bias": heads, "A_log": heads, "D": heads} | _modules(
        in_proj=_linear(config.in_proj_dim, d_model, config.mamba_in_bias),
        conv1d=_conv(config.conv_dim, config.d_conv, config.conv_bias),
        norm=_norm(config.d_inner),
        out_proj=_linear(d_model, config.d_inner, config.mamba_out_bias),
    )
    if config.gated_norm == "gate":
        del shapes["norm.weight"]
    return shapes


def _mamba1(config: HybridConfig) -> Shapes:
    shape, d_model, channels = config.mamba1_shape, config.d_model, config.mamba1_channels
    own: Shapes = {"A_log": (channels, shape.d_state), "D": (channels,)}
    if config.selection_scaled:
        own["c_scale"] = (shape.d_state,)
    return own | _modules(
        in_proj=_linear(2 * channels, d_model, config.mamba_in_bias),
        conv1d=_conv(channels, shape.width, config.conv_bias),
        x_proj=_linear(sum(shape.selected_dims), channels),
        dt_proj=_linear(channels, shape.dt_rank, True),
        out_proj=_linear(d_model, channels, config.mamba_out_bias),
    )


def _gated_delta(config: HybridConfig) -> Shapes:
    shape, d_model = config.gated_delta_shape, config.d_model
    return {"dt_bias": (shape.num_heads,), "A_log": (shape.num_heads,)} | _modules(
        in_proj_z=_linear(shape.d_inner, d_model),
        in_proj_qkv=_linear(shape.num_channels, d_model),
        in_proj_a=_linear(shape.num_heads, d_model),
        in_proj_b=_linear(shape.num_heads, d_model),
        conv1d=_conv(shape.num_channels, shape.width, config.conv_bias),
        norm=_norm(shape.value_dim),
        out_proj=_linear(d_model, shape.d_inner),
    )


def _short_conv(config: HybridConfig) -> Shapes:
    width, bias = config.d_model, config.short_conv_bias
    return _modules(
        in_proj=_linear(3 * width, width, bias), conv=_conv(width, config.d_conv, bias),
        out_proj=_linear(width, width, bias),
    )


_PARTS = {
    "mamba": _mamba, "mamba1": _mamba1, "gated_delta": _gated_delta, "short_conv": _short_conv,
    "experts": _experts,
    "mlp": lambda config: _mlp(config, config.intermediate_size),
    "shared_mlp": lambda config: _mlp(
        config, config.shared_intermediate_size, config.shared_gate
    ),
}


def _shared_block(config: HybridConfig) -> Shapes:
    width = 2 * config.d_model
    return _modules(
        input_layernorm=_norm(width), self_attn=_attention(config, width),
        post_attention_layernorm=_norm(config.d_model),
        mlp=_mlp(config, config.intermediate_size),
    )


def _shared_use(config: HybridConfig) -> Shapes:
    d_model = config.d_model

    def adapter(outputs: int, inputs: int) -> Shapes:
        return _modules(
            down=_linear(config.adapter_rank, inputs), up=_linear(outputs, config.adapter_rank)
        )

    shapes: Shapes = {}
    if config.attention_adapters:
        for name, heads in (
            ("q", config.num_heads), ("k", config.num_kv_heads), ("v", config.num_kv_heads),
        ):
            own = adapter(heads * config.head_dim, 2 * d_model)
            shapes |= _within(f"{name}_adapter", own)
    inner = config.intermediate_size * (1 if config.mlp_kind in UNGATED else 2)
    return shapes | _modules(mlp_adapter=adapter(inner, d_model), out=_linear(d_model, d_model))


def _draft_inputs(config: HybridConfig) -> Shapes:
    d_model, width, norms = config.d_model, config.feature_width, config.eagle_norms
    unknown: Shapes = {"unknown": (d_model,)}
    if config.fused_inputs:
        return unknown | _modules(
            proj=_linear(d_model, d_model), embedding_norm=_norm(d_model),
            target_norm=_norm(d_model), norm=_norm(d_model),
            embedding_proj=_linear(d_model, d_model),
        )
    if config.eagle_inputs:
        shapes = unknown | _modules(
            proj=_linear(d_model, width), embedding_norm=_norm(d_model)
        )
        has_norm = "features" in norms or "each" in norms
        return shapes | _modules(norm=_norm(width)) if has_norm else shapes
    shapes = unknown | _modules(
        norm=_norm(width), proj=_linear(d_model, width), gain=_norm(d_model)
    )
    if config.own_features:
        shapes |= _modules(own=_linear(d_model, d_model), own_gain=_norm(d_model))
    return shapes
