"""Architectures that cannot be are refused with the number to change."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from dataclasses import fields
from pathlib import Path

import pytest
from toys import tiny_config

from stree.checkpoints.checked_json import CheckedJson
from stree.checkpoints.configs import checkpoint_config_of
from stree.common.errors import CheckpointRefused, UsageError
from stree.models.config import HybridConfig

EXPERTS = {
    "num_experts": 8, "experts_per_token": 2, "expert_intermediate_size": 4, "router_groups": 2,
    "layer_types": ("experts",) * 3,
}


def test_a_config_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['triton'] = None; "
        "import stree.checkpoints.config_parts; from stree.models.config import HybridConfig; "
        f"HybridConfig(64, d_model=16, num_layers=3, **{EXPERTS})"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"d_conv": 1}, "d_conv is 1, .* at least 2"),
        ({"d_conv": 0}, "d_conv is 0"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"attn_layers": (3,)}, "distinct layer indices"),
        ({"num_kv_heads": 3}, "no multiple of num_kv_heads"),
        ({"head_dim": 7}, "needs it even"),
        ({"d_state": 0}, "set d_state above 0"),
        ({"rotary_dim": 3}, "rotary_dim is 3, it must be even"),
        ({"rotary_dim": 10}, "at most head_dim = 8"),
        ({"mlp_kind": "relu"}, "mlp_kind is 'relu', it must be one of swiglu"),
        ({"attention_scale": float("inf")}, "attention_scale is inf"),
        ({"layer_types": ("mamba mlp",)}, "1 layer_types for num_layers = 3"),
        ({"layer_types": ("mamba gru",) * 3}, r"layer_types has 'mamba gru'.*mamba, short_conv"),
        ({"layer_types": ("mamba mlp mlp",) * 3}, "has 1 to 2 blocks"),
        ({"layer_types": ("mamba+mamba",) * 3}, "each part once"),
        ({"layer_types": ("shared0>mamba",) * 3}, "num_shared_blocks = 0"),
        ({"layer_types": ("mamba",) * 3, "attn_layers": (1,)}, "attn_layers .* leave them out"),
        ({"layer_types": ("experts",) * 3}, "set num_experts, experts_per_token"),
        ({"layer_types": ("shared_mlp",) * 3}, "set shared_intermediate_size"),
        ({"layer_types": ("gated_delta",) * 3}, "set num_delta_heads, num_delta_key_heads"),
        ({**EXPERTS, "experts_per_token": 9}, "experts_per_token is 9, the chosen groups have 4"),
        ({**EXPERTS, "router_groups": 3}, "num_experts = 8 is no multiple of router_groups = 3"),
        ({**EXPERTS, "router_top_groups": 3}, "router_top_groups is 3"),
        ({**EXPERTS, "router_groups": 8, "router_top_groups": 8}, "make groups larger"),
    ],
)
def test_configs_that_cannot_be_are_refused_by_the_field(changes, complaint):
    with pytest.raises(UsageError, match=complaint):
        tiny_config(**{"attn_layers": (), **changes} if "layer_types" in changes else changes)


def test_a_claimed_size_costs_no_memory_before_its_weights_are_there():
    """A check of fields makes no list of a size that an untrusted file claims."""
    claimed = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 2**24}
    tracemalloc.start()
    try:
        tiny_config(**claimed, rotary_dim=2)
        with pytest.raises(UsageError, match="rotary_dim is 3, it must be even"):
            tiny_config(**claimed, rotary_dim=3)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_layers_are_kept_with_what_they_share():
    config = tiny_config(
        attn_layers=(), num_layers=4, num_shared_blocks=3, adapter_rank=2,
        layer_types=("mamba", "shared0>mamba", "shared2>mamba", "shared1>mamba"),
    )
    assert config.attn_layers == (1, 2, 3)
    assert config.mixers(1) == ("attention", "mamba")
    kept = config.keep_layers([2, 0, 1])
    assert kept.layer_types == ("shared1>mamba", "mamba", "shared0>mamba")
    assert kept.num_shared_blocks == 2 and kept.attn_layers == (0, 2)
    assert config.keep_layers([0]).num_shared_blocks == 0
    plain = tiny_config(attn_layers=(1,))
    assert [plain.layer_type(layer) for layer in range(3)] == [
        "mamba mlp", "attention mlp", "mamba mlp"
    ]


def test_attention_alone_needs_no_convolution():
    assert tiny_config(attn_layers=(0, 1, 2), d_conv=0).d_conv == 0


def test_unknown_keys_are_named():
    with pytest.raises(UsageError, match=r"\['width'\]; known: \["):
        HybridConfig.from_dict({"vocab_size": 8, "width": 3})


@pytest.mark.parametrize("model_type", ["llama", "falcon_h1", "lfm2", "granitemoehybrid"])
def test_more_layers_than_can_be_are_refused_before_they_are_described(model_type):
    """A description of 10¹² layers would not fit any memory."""
    given = dict(
        model_type=model_type, vocab_size=8, hidden_size=8, num_attention_heads=2,
        num_hidden_layers=10**12, intermediate_size=8,
    )
    with pytest.raises(CheckpointRefused, match="num_hidden_layers"):
        checkpoint_config_of(CheckedJson(given, Path("config.json")))


KEYS = """
    vocab_size d_model num_layers attn_layers intermediate_size rms_norm_eps tie_embeddings
    head_vocab_size head_rank num_heads num_kv_heads head_dim rope_theta rope_scaling
    max_position_embeddings layer_types rotary_dim attention_scale attention_bias qk_norm
    qk_norm_whole attention_gate mlp_kind mlp_bias shared_intermediate_size shared_gate
    num_experts experts_per_token expert_intermediate_size expert_latent_size router
    router_groups router_top_groups router_normalised router_scale router_floor
    num_shared_blocks adapter_rank attention_adapters num_delta_heads num_delta_key_heads
    delta_key_dim delta_value_dim negative_eigenvalues num_ssm_heads ssm_head_dim d_state
    num_x_groups num_b_groups num_c_groups repeat_before_conv d_conv conv_bias
    gated_norm_groups gated_norm_eps gated_norm mamba_in_bias mamba_out_bias short_conv_bias
    chunk_size dt_limit feature_layers target_width target_num_layers own_features
    eos_token_ids bos_token_id pad_token_id
"""  # of exported config.json files and of drafters in YAML


def test_keys_of_files_stay():
    assert {each.name for each in fields(HybridConfig)} >= set(KEYS.split())


def test_each_field_is_of_one_part():
    parts = HybridConfig.__mro__[1:-1]
    own = [name for part in parts for name in vars(part)["__annotations__"]]
    assert len(own) == len(set(own)) and len(parts) >= 7
    assert not {"num_heads", "d_state", "num_experts"} & set(vars(HybridConfig)["__annotations__"])
