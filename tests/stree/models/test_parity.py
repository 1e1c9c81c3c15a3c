"""Checkpoints that transformers wrote, run by it and by us: the same logits and greedy tokens.

1e-4 in fp32 is what two orders of summation may differ by at these sizes, with room (seen: 2e-5).
The weights are scaled up from transformers' initial ones, so that logits are of order one and
every part of a layer shows in them.
"""

import json

import oracle
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM

from stree.checkpoints.load_save import load_config, load_model, save_model
from stree.decoder import Decoder
from stree.generation import GenerationConfig

TOLERANCE = 1e-4
VOCAB = 97
NUM_GREEDY = 64

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}


def llama(**changes):
    values = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 4, "rms_norm_eps": 1e-5,
    }
    return LlamaForCausalLM(LlamaConfig(**{**values, **changes}))


def mamba2(**changes):
    values = {
        "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_heads": 8,
        "head_dim": 8, "state_size": 16, "n_groups": 1, "chunk_size": 16,
    }
    return Mamba2ForCausalLM(Mamba2Config(**{**values, **changes}))


MODELS = {
    "llama": lambda: llama(),
    "llama-gqa-tied": lambda: llama(num_key_value_heads=2, tie_word_embeddings=True),
    "llama-3-rope": lambda: llama(num_key_value_heads=1, rope_parameters=LLAMA3_ROPE),
    "llama-wide-heads": lambda: llama(head_dim=16, rms_norm_eps=1e-3),
    "mamba2": lambda: mamba2(),
    "mamba2-groups": lambda: mamba2(n_groups=4),
    "mamba2-tied-dt-limit": lambda: mamba2(
        tie_word_embeddings=True, time_step_limit=(0.3, 0.8), use_conv_bias=False, conv_kernel=3
    ),
}


@torch.no_grad()
def randomise(model, seed):
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5)
        elif name.endswith("A_log"):
            parameter.uniform_(-2.0, 1.0)
        elif parameter.dim() == 1:
            parameter.normal_()
        else:
            # A tied head on large embeddings would only ever repeat the last token.
            embeds = "embed" in name
            parameter.normal_(std=0.2 if embeds else 1.5 * parameter[0].numel() ** -0.5)
    return model.eval()


def reference(name):
    model = randomise(MODELS[name](), seed=0)
    if name == "mamba2-groups" and not hasattr(model.backbone.layers[0].mixer.norm, "group_size"):
        pytest.skip("this transformers normalises over all groups at once, unlike mamba-ssm")
    return model


@pytest.mark.parametrize("shard_size", ["1GB", "20KB"], ids=["single", "sharded"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits(name, shard_size, tmp_path):
    theirs = reference(name)
    theirs.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "20KB")
    ours = load_model(tmp_path)
    for length in (1, 3, 15, 16, 17, 70):
        tokens = torch.randint(VOCAB, (2, length))
        wanted = theirs(tokens).logits
        assert wanted.abs().max() > 1
        assert (ours(tokens) - wanted).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_greedy_tokens(name, tmp_path):
    theirs = reference(name)
    theirs.save_pretrained(tmp_path)
    prompt = torch.randint(VOCAB, (1, 9))
    theirs.generation_config.eos_token_id = None
    # Without its cache: transformers' one-token step of Mamba-2 forgets time_step_limit.
    wanted = theirs.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NUM_GREEDY,
        do_sample=False, use_cache=False,
    )[0, 9:].tolist()
    assert len(wanted) == NUM_GREEDY and len(set(wanted)) > 8

    ours = load_model(tmp_path)
    tokens = prompt
    for _ in range(NUM_GREEDY):
        tokens = torch.cat([tokens, ours(tokens)[:, -1:].argmax(-1)], dim=1)
    assert tokens[0, 9:].tolist() == wanted

    decoded = Decoder(ours, max_length=128).generate(
        prompt[0].tolist(), GenerationConfig(max_new_tokens=NUM_GREEDY, ignore_eos=True)
    )
    assert decoded.tokens == wanted


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_the_oracle_agrees_with_transformers(name, tmp_path):
    """What the other tests are measured by; transformers keeps rotary angles in fp32."""
    theirs = reference(name).double()
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path, dtype=torch.float64)
    weights = {name: value.numpy() for name, value in ours.state_dict().items()}
    tokens = torch.randint(VOCAB, (20,))
    wanted = theirs(tokens[None]).logits[0]
    got = torch.from_numpy(oracle.logits_of_sequence(ours.config, weights, tokens))
    assert (got - wanted).abs().max() <= 1e-5


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("llama")])
@torch.no_grad()
def test_transformers_loads_the_attention_models_that_we_save(name, tmp_path):
    reference(name).save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs")
    save_model(ours, tmp_path / "ours")
    again, report = LlamaForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokens = torch.randint(VOCAB, (2, 40))
    assert (ours(tokens) - again.eval()(tokens).logits).abs().max() <= TOLERANCE


@pytest.mark.parametrize("saved_as", ["safetensors", "bin"])
@torch.no_grad()
def test_state_spaces_layout(saved_as, tmp_path):
    """mamba-ssm's names, its tied head stored twice, its vocabulary rounded up to 16."""
    padded = 112
    theirs = randomise(mamba2(vocab_size=padded, tie_word_embeddings=True, expand=2), seed=3)
    state = {
        name.replace("backbone.embeddings.", "backbone.embedding."): value.clone()
        for name, value in theirs.state_dict().items()
    }
    state["lm_head.weight"] = state["backbone.embedding.weight"].clone()
    config = {
        "d_model": 32, "d_intermediate": 0, "n_layer": 3, "vocab_size": VOCAB,
        "ssm_cfg": {"layer": "Mamba2", "headdim": 8, "d_state": 16, "chunk_size": 16},
        "attn_layer_idx": [], "attn_cfg": {}, "rms_norm": True, "residual_in_fp32": True,
        "fused_add_norm": True, "pad_vocab_size_multiple": 16, "tie_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    if saved_as == "bin":
        torch.save(state, tmp_path / "pytorch_model.bin")
    else:
        save_file(state, tmp_path / "model.safetensors")

    assert load_config(tmp_path).vocab_size == VOCAB
    ours = load_model(tmp_path)
    tokens = torch.randint(VOCAB, (2, 40))
    wanted = theirs(tokens).logits[..., :VOCAB]
    assert (ours(tokens) - wanted).abs().max() <= TOLERANCE
