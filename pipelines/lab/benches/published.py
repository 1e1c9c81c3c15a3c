"""List configs of published models of transformers' families, as their config.json has them.

Only what decides the size of a call is there. Multipliers and special tokens, which no time depends
on, are left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stree.checkpoints.checked_json import CheckedJson
from stree.checkpoints.configs import CheckpointConfig, checkpoint_config_of


def _mixers(count: int, attention: list[int], other: str, name: str) -> list[str]:
    return [name if layer in attention else other for layer in range(count)]


_GRANITE_4_H = dict(
    model_type="granitemoehybrid", vocab_size=100352, num_hidden_layers=40,
    layer_types=_mixers(40, [5, 15, 25, 35], "mamba", "attention"),
    num_key_value_heads=8, mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1,
    tie_word_embeddings=True, position_embedding_type="nope", rms_norm_eps=1e-5,
    max_position_embeddings=131072,
)

PUBLISHED: dict[str, dict[str, Any]] = {
    # ibm-granite/granite-4.0-h-tiny and -small, also the table of their model cards
    "granite-4.0-h-tiny": {
        **_GRANITE_4_H,
        **dict(hidden_size=1536, num_attention_heads=12, num_key_value_heads=4, mamba_n_heads=48,
               shared_intermediate_size=1024, intermediate_size=512, num_local_experts=64,
               num_experts_per_tok=6),
    },
    "granite-4.0-h-small": {
        **_GRANITE_4_H,
        **dict(hidden_size=4096, num_attention_heads=32, mamba_n_heads=128,
               shared_intermediate_size=1536, intermediate_size=768, num_local_experts=72,
               num_experts_per_tok=10),
    },
    # nvidia/Nemotron-H-8B-Base-8K
    "nemotron-h-8b": dict(
        model_type="nemotron_h", vocab_size=131072, hidden_size=4096, num_hidden_layers=52,
        hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        intermediate_size=21504, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        mamba_num_heads=128, mamba_head_dim=64, ssm_state_size=128, n_groups=8, conv_kernel=4,
        max_position_embeddings=8192,
    ),
    # tiiuae/Falcon-H1-7B-Base
    "falcon-h1-7b": dict(
        model_type="falcon_h1", vocab_size=130048, hidden_size=3072, num_hidden_layers=44,
        intermediate_size=12288, num_attention_heads=12, num_key_value_heads=2, head_dim=128,
        mamba_d_ssm=3072, mamba_n_heads=24, mamba_d_head=128, mamba_d_state=256, mamba_n_groups=1,
        mamba_chunk_size=128, mamba_rms_norm=False, rope_theta=1e11,
        max_position_embeddings=262144,
    ),
    # ibm-ai-platform/Bamba-9B
    "bamba-9b": dict(
        model_type="bamba", vocab_size=128256, hidden_size=4096, num_hidden_layers=32,
        attn_layer_indices=[9, 18, 27], intermediate_size=14336, num_attention_heads=32,
        num_key_value_heads=8, mamba_n_heads=128, mamba_d_head=64, mamba_d_state=128,
        mamba_n_groups=1,
    ),
    # Zyphra/Zamba2-7B
    "zamba2-7b": dict(
        model_type="zamba2", vocab_size=32000, hidden_size=3584, num_hidden_layers=81,
        layers_block_type=_mixers(81, [6, 11, *range(17, 78, 6)], "mamba", "hybrid"),
        num_mem_blocks=2, num_attention_heads=32, num_key_value_heads=32, intermediate_size=14336,
        adapter_rank=128, use_mem_rope=True, n_mamba_heads=112, mamba_ngroups=2, mamba_d_state=64,
    ),
    # Qwen/Qwen3.5-9B, its text model
    "qwen3.5-9b": dict(
        model_type="qwen3_5_text", vocab_size=248320, hidden_size=4096, num_hidden_layers=32,
        full_attention_interval=4, intermediate_size=12288, num_attention_heads=16,
        num_key_value_heads=4, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32,
        linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
        rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25),
        max_position_embeddings=262144,
    ),
    # LiquidAI/LFM2-1.2B; the MLP's width is two thirds of block_ff_dim
    "lfm2-1.2b": dict(
        model_type="lfm2", vocab_size=65536, hidden_size=2048, num_hidden_layers=16,
        full_attn_idxs=[2, 5, 8, 10, 12, 14], block_ff_dim=12288, block_multiple_of=256,
        num_attention_heads=32, num_key_value_heads=8, conv_L_cache=3, tie_embedding=True,
    ),
    # LiquidAI/LFM2-8B-A1B
    "lfm2-8b-a1b": dict(
        model_type="lfm2_moe", vocab_size=65536, hidden_size=2048, num_hidden_layers=24,
        layer_types=_mixers(24, [2, 6, 10, 14, 18, 21], "conv", "full_attention"),
        num_attention_heads=32, num_key_value_heads=8, conv_L_cache=3, intermediate_size=7168,
        num_dense_layers=2, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=1792,
    ),
    # allenai/Olmo-Hybrid-7B, by the defaults of its class in transformers
    "olmo-hybrid-7b": dict(
        model_type="olmo_hybrid", vocab_size=100352, hidden_size=3840, num_hidden_layers=32,
        intermediate_size=11008, num_attention_heads=30, num_key_value_heads=30, rope_theta=None,
        linear_num_key_heads=30, linear_num_value_heads=30, linear_key_head_dim=96,
        linear_value_head_dim=192, linear_conv_kernel_dim=4, max_position_embeddings=65536,
    ),
}


def published(name: str) -> CheckpointConfig:
    """Read one of `PUBLISHED` like a checkpoint's config."""
    return checkpoint_config_of(CheckedJson(PUBLISHED[name], Path(name)))
