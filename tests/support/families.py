"""Make tiny random models of transformers' hybrid families, of Transformers, Mamba and Mamba-2.

Every part of a layer shows in their logits. Configs are drawn from a seed: groups, biases,
multipliers, norm orders, positions, experts, and numbers of heads that are no powers of two.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    FalconMambaConfig,
    FalconMambaForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Zamba2Config,
    Zamba2ForCausalLM,
)

VOCAB = 61
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}


def _multiplier(draw: random.Random) -> float:
    return draw.choice([0.3, 0.7, 1.5, 2.5])


def _coin(draw: random.Random) -> bool:
    return draw.random() < 0.5


def _common(draw: random.Random, vocab: int) -> dict[str, Any]:
    kv_heads = draw.choice([1, 2, 3])
    num_heads = kv_heads * draw.choice([1, 2, 3])
    return {
        "vocab_size": vocab, "num_attention_heads": num_heads, "num_key_value_heads": kv_heads,
        "hidden_size": num_heads * draw.choice([4, 8]), "intermediate_size": draw.choice([24, 40]),
        "max_position_embeddings": 256,
    }


def _rope(draw: random.Random) -> dict[str, Any]:
    plain = {"rope_type": "default", "rope_theta": draw.choice([100.0, 10000.0])}
    return {"rope_parameters": dict(draw.choice([plain, LLAMA3_ROPE]))}


def _mamba(draw: random.Random, d_model: int, d_inner: int | None = None) -> dict[str, Any]:
    d_inner = d_inner or 2 * d_model
    heads = draw.choice([n for n in (2, 3, 4, 6, 8) if d_inner % n == 0])
    groups = draw.choice([n for n in (1, 2, 3) if heads % n == 0])
    return {
        "mamba_n_heads": heads, "mamba_n_groups": groups, "mamba_d_state": draw.choice([8, 12]),
        "mamba_d_conv": draw.choice([2, 3, 4]), "mamba_chunk_size": draw.choice([4, 16]),
        "mamba_conv_bias": _coin(draw), "mamba_proj_bias": _coin(draw),
        "time_step_limit": draw.choice([(0.0, float("inf")), (0.3, 0.9)]),
    }


def _bamba(draw: random.Random, vocab: int) -> PreTrainedModel:
    common = _common(draw, vocab)
    return BambaForCausalLM(BambaConfig(
        **common, **_rope(draw), **_mamba(draw, common["hidden_size"]), num_hidden_layers=3,
        attn_layer_indices=draw.choice([[1], [0, 2]]), attention_bias=_coin(draw),
        mlp_bias=_coin(draw), tie_word_embeddings=_coin(draw), rms_norm_eps=1e-4,
    ))


def _granite(draw: random.Random, vocab: int) -> PreTrainedModel:
    common = _common(draw, vocab)
    mixers = ["linear_attention", "full_attention", "linear_attention"]
    draw.shuffle(mixers)
    return GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(
        **common, **_rope(draw), **_mamba(draw, common["hidden_size"]), num_hidden_layers=3,
        layer_types=mixers, position_embedding_type=draw.choice([None, "rope"]),
        shared_intermediate_size=draw.choice([20, 36]), num_local_experts=draw.choice([0, 4, 5]),
        num_experts_per_tok=draw.choice([1, 2]), attention_bias=_coin(draw),
        embedding_multiplier=_multiplier(draw), residual_multiplier=_multiplier(draw),
        attention_multiplier=_multiplier(draw), logits_scaling=_multiplier(draw),
        tie_word_embeddings=_coin(draw),
    ))


def _nemotron(draw: random.Random, vocab: int) -> PreTrainedModel:
    common = _common(draw, vocab)
    heads = draw.choice([2, 3, 4, 6])
    latent = draw.choice([None, 12])
    groups = draw.choice([1, 2])
    return NemotronHForCausalLM(NemotronHConfig(
        **common, hybrid_override_pattern=draw.choice(["ME*-M", "M*-M", "EM*E", "M-*ME"]),
        head_dim=draw.choice([4, 10]), mamba_num_heads=heads, mamba_head_dim=draw.choice([4, 6]),
        n_groups=draw.choice([n for n in (1, 2, 3) if heads % n == 0]), ssm_state_size=8,
        conv_kernel=draw.choice([2, 4]), use_conv_bias=_coin(draw), chunk_size=4,
        use_bias=_coin(draw), mlp_bias=_coin(draw), time_step_min=draw.choice([0.001, 0.4]),
        n_routed_experts=draw.choice([4, 6]), num_experts_per_tok=draw.choice([1, 2]),
        moe_intermediate_size=draw.choice([12, 20]), moe_shared_expert_intermediate_size=28,
        moe_latent_size=latent, n_group=groups, topk_group=draw.choice([1, groups]),
        routed_scaling_factor=_multiplier(draw), norm_topk_prob=_coin(draw),
    ))


def _falcon(draw: random.Random, vocab: int) -> PreTrainedModel:
    common = _common(draw, vocab)
    d_inner = draw.choice([24, 48])
    return FalconH1ForCausalLM(FalconH1Config(
        **common, **_rope(draw), **_mamba(draw, common["hidden_size"], d_inner),
        num_hidden_layers=2, mamba_d_ssm=d_inner, mamba_rms_norm=_coin(draw),
        mamba_norm_before_gate=_coin(draw), attention_bias=_coin(draw), mlp_bias=_coin(draw),
        projectors_bias=_coin(draw), tie_word_embeddings=_coin(draw),
        lm_head_multiplier=_multiplier(draw), embedding_multiplier=_multiplier(draw),
        mlp_multipliers=[_multiplier(draw) for _ in range(2)], key_multiplier=_multiplier(draw),
        attention_in_multiplier=_multiplier(draw), attention_out_multiplier=_multiplier(draw),
        ssm_multipliers=[_multiplier(draw) for _ in range(5)],
        ssm_in_multiplier=_multiplier(draw), ssm_out_multiplier=_multiplier(draw),
    ))


def _lfm2(draw: random.Random, vocab: int) -> PreTrainedModel:
    mixers = draw.choice([["conv", "full_attention", "conv"], ["full_attention", "conv"]])
    return Lfm2ForCausalLM(Lfm2Config(
        **_common(draw, vocab), **_rope(draw), num_hidden_layers=len(mixers), layer_types=mixers,
        conv_bias=_coin(draw), conv_L_cache=draw.choice([2, 3, 4]), norm_eps=1e-4,
        block_multiple_of=draw.choice([8, 16]), block_auto_adjust_ff_dim=_coin(draw),
        block_ffn_dim_multiplier=draw.choice([1.0, 1.3]), tie_word_embeddings=_coin(draw),
    ))


def _lfm2_moe(draw: random.Random, vocab: int) -> PreTrainedModel:
    mixers = draw.choice([["conv", "full_attention", "conv"], ["full_attention", "conv"]])
    return Lfm2MoeForCausalLM(Lfm2MoeConfig(
        **_common(draw, vocab), **_rope(draw), num_hidden_layers=len(mixers), layer_types=mixers,
        conv_bias=_coin(draw), conv_L_cache=draw.choice([2, 3, 4]), norm_eps=1e-4,
        num_dense_layers=draw.choice([0, 1, 1]), num_experts=draw.choice([4, 5]),
        num_experts_per_tok=draw.choice([1, 2, 3]), moe_intermediate_size=draw.choice([12, 20]),
        use_expert_bias=_coin(draw), norm_topk_prob=_coin(draw),
        routed_scaling_factor=_multiplier(draw), tie_word_embeddings=_coin(draw),
    ))


def _zamba(draw: random.Random, vocab: int) -> PreTrainedModel:
    common = _common(draw, vocab)
    common["num_key_value_heads"] = common["num_attention_heads"]
    heads = draw.choice([n for n in (2, 3, 4, 6) if 2 * common["hidden_size"] % n == 0])
    layers = draw.choice([
        ["linear_attention", "hybrid", "hybrid", "hybrid"], ["hybrid", "linear_attention"],
    ])
    return Zamba2ForCausalLM(Zamba2Config(
        **common, **_rope(draw), num_hidden_layers=len(layers), layers_block_type=layers,
        n_mamba_heads=heads, mamba_ngroups=draw.choice([n for n in (1, 2, 3) if heads % n == 0]),
        mamba_d_state=8, mamba_d_conv=draw.choice([2, 4]), chunk_size=8,
        num_mem_blocks=draw.choice([1, 2]), use_shared_attention_adapter=_coin(draw),
        adapter_rank=draw.choice([2, 5]), use_mem_rope=_coin(draw), add_bias_linear=_coin(draw),
        time_step_min=draw.choice([0.001, 0.4]),
    ))


def _gated_delta(draw: random.Random, vocab: int) -> dict[str, Any]:
    """Draw the part of a config that Qwen3-Next's and Qwen3.5's have in common."""
    common, rope = _common(draw, vocab), _rope(draw)["rope_parameters"]
    head_dim, rotary_share = draw.choice([(8, 0.25), (8, 0.5), (16, 0.25), (12, 0.5), (8, 1.0)])
    key_heads = draw.choice([1, 2, 3])
    mixers = draw.choice([
        ["linear_attention", "full_attention", "linear_attention"],
        ["linear_attention", "linear_attention", "full_attention"],
    ])
    return {
        **common, "head_dim": head_dim, "num_hidden_layers": len(mixers), "layer_types": mixers,
        "rope_parameters": {**rope, "partial_rotary_factor": rotary_share},
        "attention_bias": _coin(draw), "tie_word_embeddings": _coin(draw), "rms_norm_eps": 1e-4,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * draw.choice([1, 2, 3]),
        "linear_key_head_dim": draw.choice([4, 6, 8]),
        "linear_value_head_dim": draw.choice([4, 6, 8]),
        "linear_conv_kernel_dim": draw.choice([2, 3, 4]),
    }


def _qwen_experts(draw: random.Random) -> dict[str, Any]:
    return {
        "num_experts": draw.choice([4, 5]), "num_experts_per_tok": draw.choice([1, 2, 3]),
        "moe_intermediate_size": draw.choice([12, 20]),
        "shared_expert_intermediate_size": draw.choice([12, 28]),
    }


def _qwen3_next(draw: random.Random, vocab: int) -> PreTrainedModel:
    return Qwen3NextForCausalLM(Qwen3NextConfig(
        **_gated_delta(draw, vocab), **_qwen_experts(draw), norm_topk_prob=_coin(draw),
        decoder_sparse_step=draw.choice([1, 1, 2]), mlp_only_layers=draw.choice([[], [0]]),
    ))


def _qwen3_5(draw: random.Random, vocab: int) -> PreTrainedModel:
    common = _gated_delta(draw, vocab)
    common["rope_parameters"] |= {"mrope_section": [1, 1, 1], "mrope_interleaved": True}
    if _coin(draw):
        return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**common))
    del common["intermediate_size"]
    return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**common, **_qwen_experts(draw)))


def _olmo_hybrid(draw: random.Random, vocab: int) -> PreTrainedModel:
    common, rope = _gated_delta(draw, vocab), _rope(draw)["rope_parameters"]
    if draw.random() < 0.7:
        del common["head_dim"]
    no_positions = {"rope_type": "default", "rope_theta": None}  # as published
    common["rope_parameters"] = draw.choice([rope, no_positions])
    common["layer_types"] = draw.choice([
        ["linear_attention", "full_attention", "linear_attention"],
        ["full_attention", "linear_attention", "linear_attention"],
    ])
    common["num_hidden_layers"] = len(common["layer_types"])
    return OlmoHybridForCausalLM(OlmoHybridConfig(
        **common, linear_allow_neg_eigval=draw.random() < 0.7, bos_token_id=1, eos_token_id=2,
        pad_token_id=0,
    ))


def _llama(draw: random.Random, vocab: int) -> PreTrainedModel:
    common = _common(draw, vocab)
    return LlamaForCausalLM(LlamaConfig(
        **common, **_rope(draw), num_hidden_layers=2, tie_word_embeddings=_coin(draw),
        head_dim=draw.choice([common["hidden_size"] // common["num_attention_heads"], 16]),
        rms_norm_eps=draw.choice([1e-5, 1e-3]), attention_bias=_coin(draw), mlp_bias=_coin(draw),
    ))


def _mistral(draw: random.Random, vocab: int) -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(
        **_common(draw, vocab), **_rope(draw), num_hidden_layers=2,
        sliding_window=draw.choice([None, 5, 4096, 2]), head_dim=draw.choice([None, 16]),
        tie_word_embeddings=_coin(draw),
    ))


def _qwen2(draw: random.Random, vocab: int) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(
        **_common(draw, vocab), **_rope(draw), num_hidden_layers=2,
        tie_word_embeddings=_coin(draw), rms_norm_eps=1e-4,
    ))


def _qwen3(draw: random.Random, vocab: int) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(
        **_common(draw, vocab), **_rope(draw), num_hidden_layers=2, attention_bias=_coin(draw),
        head_dim=draw.choice([8, 16]), tie_word_embeddings=_coin(draw), rms_norm_eps=1e-4,
    ))


def _gpt_neox(draw: random.Random, vocab: int) -> PreTrainedModel:
    common = _common(draw, vocab)
    del common["num_key_value_heads"]
    head_dim, share = draw.choice([(8, 0.25), (8, 0.5), (16, 0.25), (8, 1.0)])
    rope = _rope(draw)["rope_parameters"]
    return GPTNeoXForCausalLM(GPTNeoXConfig(
        **{**common, "hidden_size": common["num_attention_heads"] * head_dim},
        rope_parameters={**rope, "partial_rotary_factor": share}, num_hidden_layers=3,
        use_parallel_residual=draw.random() < 0.7, attention_bias=draw.random() < 0.7,
        tie_word_embeddings=draw.random() < 0.3, layer_norm_eps=1e-4,
    ))


def _mamba2(draw: random.Random, vocab: int) -> PreTrainedModel:
    groups = draw.choice([1, 2, 4])
    return Mamba2ForCausalLM(Mamba2Config(
        vocab_size=vocab, hidden_size=32, num_hidden_layers=3, num_heads=8, head_dim=8,
        state_size=draw.choice([8, 16]), n_groups=groups, chunk_size=draw.choice([4, 16]),
        time_step_limit=draw.choice([(0.0, float("inf")), (0.3, 0.8)]), use_conv_bias=_coin(draw),
        conv_kernel=draw.choice([3, 4]), tie_word_embeddings=_coin(draw),
    ))


def _mamba1_fields(draw: random.Random, vocab: int) -> dict[str, Any]:
    """Draw the part of a config that Mamba's and FalconMamba's have in common."""
    return dict(
        vocab_size=vocab, hidden_size=24, num_hidden_layers=3, state_size=draw.choice([4, 8, 16]),
        expand=draw.choice([1, 2]), conv_kernel=draw.choice([2, 3, 4]), use_bias=_coin(draw),
        use_conv_bias=_coin(draw), time_step_rank=draw.choice(["auto", 3, 8]),
        tie_word_embeddings=_coin(draw), layer_norm_epsilon=draw.choice([1e-5, 1e-3]),
    )


def _mamba1(draw: random.Random, vocab: int) -> PreTrainedModel:
    return MambaForCausalLM(MambaConfig(**_mamba1_fields(draw, vocab)))


def _falcon_mamba(draw: random.Random, vocab: int) -> PreTrainedModel:
    eps = draw.choice([1e-6, 1e-2])
    return FalconMambaForCausalLM(
        FalconMambaConfig(**_mamba1_fields(draw, vocab), mixer_rms_eps=eps)
    )


def _jamba(draw: random.Random, vocab: int) -> PreTrainedModel:
    return JambaForCausalLM(JambaConfig(
        **_common(draw, vocab), num_hidden_layers=3, attn_layer_period=3,
        attn_layer_offset=draw.choice([0, 1]), expert_layer_period=2, expert_layer_offset=1,
        num_experts=draw.choice([1, 4, 5]), num_experts_per_tok=draw.choice([1, 2]),
        mamba_d_state=draw.choice([4, 8]), mamba_d_conv=draw.choice([2, 3, 4]),
        mamba_expand=draw.choice([1, 2]), mamba_dt_rank=draw.choice(["auto", 3]),
        mamba_conv_bias=_coin(draw), mamba_proj_bias=_coin(draw), rms_norm_eps=1e-4,
        tie_word_embeddings=_coin(draw), use_mamba_kernels=False,
    ))


FAMILIES: dict[str, Callable[[random.Random, int], PreTrainedModel]] = {
    "bamba": _bamba, "granite": _granite, "nemotron": _nemotron, "falcon": _falcon,
    "lfm2": _lfm2, "lfm2_moe": _lfm2_moe, "zamba": _zamba,
    "qwen3_next": _qwen3_next, "qwen3_5": _qwen3_5, "olmo_hybrid": _olmo_hybrid,
}
TRANSFORMERS: dict[str, Callable[[random.Random, int], PreTrainedModel]] = {
    "llama": _llama, "mistral": _mistral, "qwen2": _qwen2, "qwen3": _qwen3, "gpt_neox": _gpt_neox,
}
# Families of `make test` where all take long: one of each kind of layers
OF_EACH_KIND = ("bamba", "zamba", "qwen3_5", "olmo_hybrid", "lfm2_moe", "jamba", "gpt_neox")
LAYOUTS = {
    **FAMILIES, **TRANSFORMERS,
    "mamba": _mamba1, "falcon_mamba": _falcon_mamba, "jamba": _jamba,
    "mamba2": _mamba2,
}


# With more, Zamba2's attention is so sharp that the rounding of fp32 decides, in its own class too
GAINS = {"zamba": 0.7}


@torch.no_grad()
def random_reference(family: str, seed: int, vocab: int = VOCAB) -> PreTrainedModel:
    """Make a tiny random model of transformers' own class, in evaluation mode."""
    draw = random.Random(f"{family}-{seed}")
    model = LAYOUTS[family](draw, vocab)
    torch.manual_seed(seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            tensor.normal_(std=0.3)
        elif not isinstance(tensor, torch.nn.Parameter):
            continue
        elif name.endswith(("norm.weight", "norm_f.weight")):
            tensor.uniform_(0.5, 1.5)
        elif name.endswith("A_log"):
            tensor.uniform_(-2.0, 1.0)
        elif tensor.dim() == 1:
            tensor.normal_(std=0.5)
        else:
            # A tied head on large embeddings would only ever repeat the last token
            tensor.normal_(
                std=0.2 if "embed" in name else GAINS.get(family, 1.2) * tensor.shape[-1] ** -0.5
            )
    return model.eval()
