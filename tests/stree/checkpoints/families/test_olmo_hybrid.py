"""Ways of OLMo-Hybrid's configs to say no positions, and the names that its weights have had."""

import json
import re
from pathlib import Path

import pytest
import torch
from families import VOCAB, random_reference
from safetensors.torch import load_file, save_file
from transformers import OlmoHybridConfig

from stree.checkpoints.checked_json import CheckedJson
from stree.checkpoints.configs import checkpoint_config_of
from stree.checkpoints.load_save import load_model
from stree.common.errors import CheckpointRefused

TOKENS = torch.arange(9)[None] % VOCAB
ROTATES, OF_EQUAL_HEADS = 0, 2  # seeds


def said_otherwise(folder, rope):
    """Write a config that says `rope`, and nothing else, of positions."""
    path = folder / "config.json"
    usual = json.loads(path.read_text())
    kept = {name: value for name, value in usual.items() if not name.startswith("rope_")}
    path.write_text(json.dumps({**kept, **rope}))


@pytest.mark.parametrize(
    ("rope", "rotates"),
    [
        ({}, True),
        ({"rope_theta": 77.0}, True),
        ({"rope_theta": None}, False),  # as OLMo-core exports it
        ({"rope_theta": None, "rope_parameters": None}, False),  # as transformers converts it
        ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, False),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}, True),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 77.0}}, True),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default"}}, False),
    ],
)
@torch.no_grad()
def test_positions_are_those_of_transformers(tmp_path, rope, rotates):
    theirs = random_reference("olmo_hybrid", ROTATES)
    theirs.save_pretrained(tmp_path)
    said_otherwise(tmp_path, rope)
    model = load_model(tmp_path)
    assert (model.config.rotary_dim != 0) == rotates
    again = type(theirs)(OlmoHybridConfig.from_pretrained(tmp_path))
    again.load_state_dict(theirs.state_dict())
    wanted = again.eval()(TOKENS, use_cache=False).logits
    assert float((model(TOKENS) - wanted).abs().max() / wanted.abs().max()) <= 1e-4


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"rope_parameters": None}, "rope_parameters = null, which some versions"),
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": None},
                "rope_scaling": {"rope_type": "default", "rope_theta": 77.0},
            },
            "of which one has no rope_theta",
        ),
        ({"layer_types": ["linear_attention"] * 3}, "has no layer of full_attention"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'; only 'silu'"),
        # allocates nothing
        ({"linear_num_value_heads": 2**31 - 1}, "use weights and config of the same checkpoint"),
    ],
)
def test_what_cannot_be_told_is_refused(tmp_path, changes, complaint):
    random_reference("olmo_hybrid", ROTATES).save_pretrained(tmp_path)
    said_otherwise(tmp_path, changes)
    with pytest.raises(CheckpointRefused, match=complaint):
        load_model(tmp_path)


@pytest.mark.parametrize("num_layers", [2, 9])
def test_keys_that_are_left_out_have_the_values_of_transformers(num_layers):
    few = dict(
        model_type="olmo_hybrid", vocab_size=100352, hidden_size=3840,
        num_hidden_layers=num_layers, eos_token_id=100257, pad_token_id=100277,
    )
    whole = json.loads(OlmoHybridConfig(**few).to_json_string(use_diff=False))
    assert len(whole) > 3 * len(few)
    got, wanted = (
        checkpoint_config_of(CheckedJson(each, Path("config.json"))).model for each in (few, whole)
    )
    assert got == wanted


def as_published(stored):
    """Return the tensors of a `state_dict` by the names, and in the rows, of published folders."""
    of_delta = {name.removesuffix("linear_attn.A_log") for name in stored if "A_log" in name}
    tensors = {}
    for name, tensor in stored.items():
        if name.endswith("conv1d.weight"):
            rows = [len(stored[name.replace("conv1d", f"{each}_proj")]) for each in "qkv"]
            for each, part in zip("qkv", tensor.split(rows), strict=True):
                tensors[name.replace("conv1d", f"{each}_conv1d")] = part.contiguous()
            continue
        if name.startswith(tuple(of_delta)):
            name = name.replace("input_layernorm", "attention_layer_norm")
            name = name.replace("post_attention_layernorm", "feedforward_layer_norm")
        tensors[name] = tensor
    return tensors


@pytest.mark.parametrize("seed", [ROTATES, OF_EQUAL_HEADS])
@torch.no_grad()
def test_names_of_published_folders_and_of_loaded_models(tmp_path, seed):
    """The conv of q, k and v may be one or three, and norms may have either name."""
    theirs = random_reference("olmo_hybrid", seed)
    theirs.save_pretrained(tmp_path)
    wanted, path = load_model(tmp_path)(TOKENS), tmp_path / "model.safetensors"
    saved = set(load_file(path))
    stored = dict(theirs.state_dict())
    if theirs.config.tie_word_embeddings:
        del stored["lm_head.weight"]
    published = as_published(stored)
    for each in (stored, published):
        assert set(each) != saved
        save_file(each, path)
        assert torch.equal(load_model(tmp_path)(TOKENS), wanted)
    convs = [name for name in published if re.search(r"\.[qkv]_conv1d\.", name)]
    assert len(convs) == 3 * sum("A_log" in name for name in stored)
    save_file({**published, convs[0]: published[convs[0]][1:].contiguous()}, path)
    with pytest.raises(CheckpointRefused, match=r"_conv1d\.weight in .* has shape"):
        load_model(tmp_path)
