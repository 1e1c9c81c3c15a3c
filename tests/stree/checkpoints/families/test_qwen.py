"""Parts of Qwen3-Next's and Qwen3.5's checkpoints that transformers does not write for their text
models alone: published configs, vision, further heads, experts in one tensor."""

import functools
import json

import pytest
import torch
from checkpoint_folders import edit_json
from families import VOCAB, random_reference
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from stree.checkpoints.configs import load_config
from stree.checkpoints.load_save import load_model
from stree.common.errors import CheckpointRefused

TOKENS = torch.arange(11)[None] % VOCAB
DENSE, EXPERTS = 0, 1  # seeds of Qwen3.5
VISION = {
    "depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2,
    "num_position_embeddings": 16,
}


def relative(got, wanted):
    return float((got - wanted).abs().max() / wanted.abs().max())


@functools.cache
@torch.no_grad()
def that_also_sees(seed):
    """Return transformers' model of images and text around a random text model."""
    text = random_reference("qwen3_5", seed)
    kind, config = (
        (Qwen3_5ForConditionalGeneration, Qwen3_5Config)
        if seed == DENSE
        else (Qwen3_5MoeForConditionalGeneration, Qwen3_5MoeConfig)
    )
    model = kind(config(
        text_config=text.config.to_dict(),
        vision_config={**VISION, "out_hidden_size": text.config.hidden_size},
        tie_word_embeddings=text.config.tie_word_embeddings,
    ))
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    return model.eval()


@pytest.mark.parametrize("seed", [DENSE, EXPERTS], ids=["dense", "experts"])
@torch.no_grad()
def test_the_text_model_of_a_checkpoint_that_also_sees(tmp_path, seed):
    theirs = that_also_sees(seed)
    theirs.save_pretrained(tmp_path)
    wanted = theirs(input_ids=TOKENS, use_cache=False).logits
    assert wanted.std() > 0.05
    assert relative(load_model(tmp_path)(TOKENS), wanted) <= 1e-4


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"attn_output_gate": False}, "attn_output_gate = False; only True"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type = 'sigmoid'; only 'swish'"),
        ({"sliding_window": 4}, "sliding_window = 4; only None"),
        ({"model_type": "qwen3_5_moe_text"}, "model_type = 'qwen3_5_moe_text'; only"),
        ({"tie_word_embeddings": False}, "another tie_word_embeddings than its text_config"),
        ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval 0"),
    ],
)
def test_a_text_config_is_read_as_strictly(tmp_path, changes, complaint):
    theirs = that_also_sees(DENSE)
    assert theirs.config.tie_word_embeddings
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    text = json.loads(path.read_text())["text_config"]
    edit_json(path, text_config={**text, **changes})
    with pytest.raises(CheckpointRefused, match=complaint):
        load_config(tmp_path)


def test_tied_embeddings_are_said_beside_the_text_config_too(tmp_path):
    """transformers' class with vision reads the outer key, and ties the head."""
    that_also_sees(DENSE).save_pretrained(tmp_path)
    path, wanted = tmp_path / "config.json", load_model(tmp_path).state_dict()
    text = json.loads(path.read_text())["text_config"]
    del text["tie_word_embeddings"]
    edit_json(path, text_config=text, tie_word_embeddings=True)
    theirs = Qwen3_5ForConditionalGeneration.from_pretrained(tmp_path)
    assert theirs.lm_head.weight is theirs.model.language_model.embed_tokens.weight
    assert load_config(tmp_path).tie_embeddings
    got = load_model(tmp_path).state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in got.items())
    edit_json(path, tie_word_embeddings=False)
    assert not load_config(tmp_path).tie_embeddings


def test_published_configs_are_read(tmp_path):
    """Keys that transformers' classes lack, or call otherwise today, are read."""
    random_reference("qwen3_next", 0).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    usual = json.loads(path.read_text())
    path.write_text(json.dumps({
        **{name: value for name, value in usual.items() if name != "rope_parameters"},
        "num_hidden_layers": 4, "full_attention_interval": 2, "layer_types": None,
        "rope_theta": 10000000, "rope_scaling": None, "partial_rotary_factor": 0.25,
    }))
    config = load_config(tmp_path)
    assert [kind.split()[0] for kind in config.layer_types] == ["gated_delta", "attention"] * 2
    assert (config.rope_theta, config.rotary_dim) == (1e7, config.head_dim // 4)
    that_also_sees(EXPERTS).save_pretrained(tmp_path)
    usual, text = load_config(tmp_path), json.loads(path.read_text())["text_config"]
    published = {
        "attn_output_gate": True, "output_gate_type": "swish", "full_attention_interval": 4,
        "mamba_ssm_dtype": "float32", "mlp_only_layers": [], "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
    }
    edit_json(path, text_config={**text, **published})
    assert load_config(tmp_path) == usual


@torch.no_grad()
def test_experts_in_one_tensor_and_heads_for_further_tokens(tmp_path):
    theirs = that_also_sees(EXPERTS)
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    apart, ours = load_file(path), load_model(tmp_path)(TOKENS)
    together = {name: each for name, each in apart.items() if ".mlp.experts." not in name}
    assert len(together) < len(apart)
    for name, each in theirs.state_dict().items():
        if ".mlp.experts." in name:
            together[name] = each
    together["mtp.layers.0.input_layernorm.weight"] = torch.zeros(3)
    save_file(together, path)
    assert torch.equal(load_model(tmp_path)(TOKENS), ours)


@torch.no_grad()
def test_norms_stay_in_fp32(tmp_path):
    """1 + w stays in fp32, in which transformers adds, because bf16 would lose digits."""
    theirs = random_reference("qwen3_5", DENSE)
    for name, weight in theirs.named_parameters():
        if name.endswith("norm.weight"):
            weight.sub_(1)  # around 0, as published ones are
    theirs.to(torch.bfloat16).save_pretrained(tmp_path)
    ours = load_model(tmp_path, dtype=torch.bfloat16)
    stored = theirs.model.layers[1].post_attention_layernorm.weight
    got = ours.model.layers[1].post_attention_layernorm.weight
    assert torch.equal(got, 1 + stored.float())
    assert got.to(torch.bfloat16).float().ne(got).any()
    assert ours.model.layers[0].gated_delta.norm.weight.dtype == torch.bfloat16
    assert ours.model.norm(torch.ones(1, ours.config.d_model).bfloat16()).dtype == torch.bfloat16
