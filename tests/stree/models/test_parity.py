"""Llama's and Mamba-2's checkpoints beyond what the tests of all layouts hold (test_families.py).

1e-4 in fp32 is what two orders of summation may differ by at these sizes, with room (seen: 2e-5).
"""

import json

import oracle
import pytest
import torch
from families import VOCAB, random_reference
from lanes import costly
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from stree.checkpoints.configs import load_config
from stree.checkpoints.load_save import load_model, save_model

TOLERANCE = 1e-4


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("layout", ["llama", "mamba2"])
@torch.no_grad()
def test_the_oracle_agrees_with_transformers(layout, seed, tmp_path):
    """Other tests are measured by the oracle; transformers keeps rotary angles in fp32."""
    theirs = random_reference(layout, seed).double()
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path, dtype=torch.float64)
    weights = {name: value.numpy() for name, value in ours.state_dict().items()}
    tokens = torch.randint(VOCAB, (20,))
    wanted = theirs(tokens[None], use_cache=False).logits[0]
    got = torch.from_numpy(oracle.logits_of_sequence(ours.config, weights, tokens))
    assert (got - wanted).abs().max() <= 1e-5


@pytest.mark.parametrize("seed", range(4))
@torch.no_grad()
def test_transformers_loads_the_attention_models_that_we_save(seed, tmp_path):
    random_reference("llama", seed).save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs")
    save_model(ours, tmp_path / "ours")
    again, report = LlamaForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokens = torch.randint(VOCAB, (2, 40))
    assert (ours(tokens) - again.eval()(tokens).logits).abs().max() <= TOLERANCE


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("layout", ["llama", "gpt_neox"])  # the latter rotates a share of a head
@pytest.mark.parametrize(
    "more",
    [{}, {"beta_fast": 3.0, "beta_slow": 0.5}, {"truncate": False, "beta_fast": 3.0},
     {"attention_factor": 1.5}, {"mscale": 0.7, "mscale_all_dim": 1.3}],
    ids=str,
)
@torch.no_grad()
def test_yarn_is_transformers(layout, more, tmp_path):
    theirs = random_reference(layout, 1)
    given = {**theirs.config.rope_parameters, **YARN, **more, "rope_theta": 50.0}
    config = type(theirs.config)(**{
        **theirs.config.to_dict(), "rope_parameters": given, "max_position_embeddings": 64,
    })
    model = type(theirs)(config).eval()
    model.load_state_dict(theirs.state_dict())
    model.save_pretrained(tmp_path / "it")
    ours, tokens = load_model(tmp_path / "it"), torch.randint(VOCAB, (1, 60))
    wanted = model(tokens).logits
    assert (ours(tokens) - wanted).abs().max() <= TOLERANCE
    assert (theirs(tokens).logits - wanted).abs().max() > 10 * TOLERANCE
    if layout == "llama":
        save_model(ours, tmp_path / "again")
        again = LlamaForCausalLM.from_pretrained(tmp_path / "again").eval()
        assert (again(tokens).logits - wanted).abs().max() <= TOLERANCE


@pytest.mark.parametrize("saved_as", ["safetensors", costly("bin")])
@pytest.mark.parametrize(("layout", "seed"), [("mamba", 3), ("mamba2", 6)])
@torch.no_grad()
def test_state_spaces_layout(layout, seed, saved_as, tmp_path):
    """A folder with mamba-ssm's names, its tied head twice and a padded vocabulary loads."""
    size, padded = 97, 112
    theirs = random_reference(layout, seed, vocab=padded)
    state = {
        name.replace("backbone.embeddings.", "backbone.embedding."): value.clone()
        for name, value in theirs.state_dict().items()
    }
    state["lm_head.weight"] = state["backbone.embedding.weight"].clone()
    read = theirs.config
    ssm = {
        "d_state": read.state_size, "d_conv": read.conv_kernel, "conv_bias": read.use_conv_bias,
        "expand": read.expand,
    }
    if layout == "mamba2":
        ssm |= {"layer": "Mamba2", "headdim": 8, "ngroups": read.n_groups, "chunk_size": 16}
    else:
        ssm |= {"dt_rank": read.time_step_rank}
    config = {
        "d_model": read.hidden_size, "d_intermediate": 0, "n_layer": 3, "vocab_size": size,
        "ssm_cfg": ssm,
        "attn_layer_idx": [], "attn_cfg": {}, "rms_norm": True, "residual_in_fp32": True,
        "fused_add_norm": True, "pad_vocab_size_multiple": 16, "tie_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    if saved_as == "bin":
        torch.save(state, tmp_path / "pytorch_model.bin")
    else:
        save_file(state, tmp_path / "model.safetensors")

    assert load_config(tmp_path).vocab_size == size
    ours = load_model(tmp_path)
    tokens = torch.randint(size, (2, 40))
    wanted = theirs(tokens).logits[..., :size]
    assert (ours(tokens) - wanted).abs().max() <= TOLERANCE
