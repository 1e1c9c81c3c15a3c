"""Write checkpoint folders by hand, MambaInLlama's layout among them, and change them."""

import json
import math

import torch
from safetensors.torch import load_file, save_file

from stree.models.config import HybridConfig

VOCAB, D_MODEL, D_XB, HEADS, D_STATE, WIDTH = 50, 32, 16, 4, 8, 40
ATTN_LAYERS = [1]
LLAMA3_ROPE = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3",
}


def write_json(path, **values):
    path.write_text(json.dumps(values))


def mamba_in_llama(folder, repeat_before_conv=False, tied=False, old_rope=True):
    """Write a checkpoint as the documentation of the layout describes it; return its weights."""
    if old_rope:
        rope_keys = {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE}
    else:
        rope_keys = {"rope_parameters": {**LLAMA3_ROPE, "rope_theta": 500000.0}}
    write_json(
        folder / "config.json",
        _name_or_path="meta-llama/Llama-3.1-8B-Instruct", architectures=["LlamaForCausalLM"],
        model_type="llama", vocab_size=VOCAB, hidden_size=D_MODEL, intermediate_size=WIDTH,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, hidden_act="silu",
        attention_bias=False, mlp_bias=False, max_position_embeddings=131072, rms_norm_eps=1e-5,
        tie_word_embeddings=tied, bos_token_id=3, eos_token_id=[7, 8], torch_dtype="bfloat16",
        **rope_keys,
    )
    ssm_cfg = {"expand": 1, "ngroups": HEADS, "d_state": D_STATE}
    if repeat_before_conv:
        ssm_cfg["repeat_kv_before_conv"] = True
    write_json(
        folder / "mamba_config.json",
        d_model=D_MODEL, ssm_cfg=ssm_cfg, rms_norm_eps=1e-5, vocab_size=None, d_inner=D_MODEL,
        d_xb=D_XB, intermediate_size=WIDTH, hidden_act="silu", n_layer=3, attn_layers=ATTN_LAYERS,
    )
    conv_dim = 3 * D_MODEL if repeat_before_conv else D_MODEL + 2 * D_XB
    shapes = {"model.embed_tokens.weight": (VOCAB, D_MODEL), "model.norm.weight": (D_MODEL,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, D_MODEL)
    for layer in range(3):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.input_layernorm.weight": (D_MODEL,),
            f"{name}.post_attention_layernorm.weight": (D_MODEL,),
            f"{name}.mlp.gate_proj.weight": (WIDTH, D_MODEL),
            f"{name}.mlp.up_proj.weight": (WIDTH, D_MODEL),
            f"{name}.mlp.down_proj.weight": (D_MODEL, WIDTH),
        }
        if layer in ATTN_LAYERS:
            shapes |= {
                f"{name}.self_attn.q_proj.weight": (D_MODEL, D_MODEL),
                f"{name}.self_attn.k_proj.weight": (D_MODEL // 2, D_MODEL),
                f"{name}.self_attn.v_proj.weight": (D_MODEL // 2, D_MODEL),
                f"{name}.self_attn.o_proj.weight": (D_MODEL, D_MODEL),
            }
        else:
            shapes |= {
                f"{name}.mamba.in_proj.weight": (2 * D_MODEL + 2 * D_XB + HEADS, D_MODEL),
                f"{name}.mamba.conv1d.weight": (conv_dim, 1, 4),
                f"{name}.mamba.conv1d.bias": (conv_dim,),
                f"{name}.mamba.dt_bias": (HEADS,),
                f"{name}.mamba.A_log": (HEADS,),
                f"{name}.mamba.D": (HEADS,),
                f"{name}.mamba.norm.weight": (D_MODEL,),
                f"{name}.mamba.out_proj.weight": (D_MODEL, D_MODEL),
            }
    torch.manual_seed(0)
    weights = {name: 0.3 * torch.randn(shape) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    return weights


def edit_json(path, **changes):
    write_json(path, **{**json.loads(path.read_text()), **changes})


def edit_weights(folder, edit):
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors")


def assert_same_model(ours, other):
    assert ours.config == other.config
    theirs = other.state_dict()
    assert ours.state_dict().keys() == theirs.keys()
    for name, value in ours.state_dict().items():
        assert torch.equal(value, theirs[name]) and value.dtype == theirs[name].dtype, name


MAMBA = {"num_ssm_heads": 4, "ssm_head_dim": 8, "d_state": 8}
SHARED = {"num_x_groups": 2, "num_b_groups": 2, "num_c_groups": 4, "gated_norm_groups": 4}
MLP = {"intermediate_size": 20}
ATTENTION = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 6}
ROUND_TRIPS = {
    "hybrid": HybridConfig(
        50, 24, 2, (1,), eos_token_ids=(3,), pad_token_id=0,
        **MLP, **MAMBA, **SHARED, **ATTENTION,
    ),
    "pure-mamba-drafter": HybridConfig(
        50, 24, 2, (), **MLP, tie_embeddings=True, eos_token_ids=(3, 4), **MAMBA, **SHARED
    ),
    "repeat-before-conv": HybridConfig(
        50, 24, 2, (), **MLP, repeat_before_conv=True, chunk_size=16, **MAMBA, **SHARED
    ),
    "no-mlp-mamba2": HybridConfig(
        50, 24, 2, (), num_ssm_heads=6, ssm_head_dim=3, d_state=10, num_x_groups=6,
        num_b_groups=3, num_c_groups=3, gated_norm_groups=3, gated_norm_eps=1e-3, d_conv=3,
        conv_bias=False, dt_limit=(0.1, math.inf), rms_norm_eps=1e-4,
    ),
    "dt-limit": HybridConfig(50, 24, 1, (), **MLP, dt_limit=(0.1, 0.5), **MAMBA, **SHARED),
    "attention-only": HybridConfig(
        50, 24, 2, (0, 1), **MLP, bos_token_id=1, rope_theta=5e5, max_position_embeddings=77,
        **ATTENTION,
    ),
}
