"""Every key of a config is read, known to be without effect, or refused by name.

Each key that transformers' config class of a layout has, or that its models ask a config for, is
changed alone beside the same weights: our logits are then transformers' own, or we refuse it.
"""

import dataclasses
import json
import shutil

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM

from stree.checkpoints.load_save import load_model
from stree.common.errors import CheckpointRefused

VOCAB = 61
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 300.0}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    )),
    "llama-3-rope": lambda: LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, rope_parameters=LLAMA3_ROPE, max_position_embeddings=128,
    )),
    "mamba2": lambda: Mamba2ForCausalLM(Mamba2Config(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_heads=4, head_dim=8,
        state_size=8, n_groups=1, chunk_size=8,
    )),
}
# Asked for by transformers' attention masks, caches and loading, or written by its older versions,
# but no field of a config class.
OTHER_KEYS = {
    "rope_scaling": [LLAMA3_ROPE, LINEAR_ROPE, PLAIN_ROPE, {"type": "linear", "factor": 2.0}],
    "rope_theta": [77.0],
    "original_max_position_embeddings": [16],
    "partial_rotary_factor": [0.5],
    "is_causal": [False, None, 0],
    "sliding_window": [3],
    "attention_chunk_size": [3],
    "layer_types": [
        ["sliding_attention"] * 2, ["full_attention"] * 2, ["linear_attention"] * 2, [],
    ],
    "per_layer_config": [{"0": {"rms_norm_eps": 0.5}}, {}],
    "transformers_weights": ["elsewhere.safetensors"],
    "attn_implementation": ["eager"],
    "intermediate_size": [7],
    "rms_norm": [False],
    "norm_before_gate": [True],
    "dtype": ["bfloat16"],
    "an_unknown_key": [True, False, None, 0, {}],
}
USUAL_VALUES = {
    "rope_parameters": [LLAMA3_ROPE, LINEAR_ROPE, PLAIN_ROPE, {**PLAIN_ROPE, "factor": 2.0}],
    "id2label": [{"0": "a", "1": "b", "2": "c"}],
    "label2id": [{"a": 0, "b": 1, "c": 2}],
    "architectures": [["Other"]],
    "problem_type": ["regression"],
    "transformers_version": ["4.0.0"],
}


def other_values(name, value):
    """What to put in a key's place: of the same type, or of a kind that it may have."""
    if name in OTHER_KEYS or name in USUAL_VALUES:
        return [*OTHER_KEYS.get(name, []), *USUAL_VALUES.get(name, [])]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value]
    if isinstance(value, float):
        return [value * 10 + 0.1]
    if isinstance(value, str):
        return ["gelu" if value == "silu" else "other"]
    if isinstance(value, list | tuple):
        return [[0.4, 0.6]]
    return [1, True, "other"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Each model's folder, with weights in whose logits all of a layer shows."""
    folders = {}
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model = make()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.4)
        folders[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(folders[name])
    return folders


def cases():
    found = []
    for model, make in MODELS.items():
        config = make().config
        fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        written = {**fields, **config.to_dict()}
        for name in dict.fromkeys([*written, *OTHER_KEYS]):
            for number, value in enumerate(other_values(name, written.get(name))):
                found.append(pytest.param(model, name, value, id=f"{model}-{name}-{number}"))
    return found


def logits_of_theirs(folder, kind, tokens):
    """None when transformers itself refuses the config, or has no weights for what it asks for."""
    try:
        model, report = kind.from_pretrained(
            folder, dtype=torch.float32, return_dict=True, output_loading_info=True
        )
        if report["missing_keys"] or report["unexpected_keys"]:
            return None
        return model.eval()(tokens, use_cache=False).logits
    except Exception:  # it has no common base for what it finds wrong
        return None


@pytest.mark.parametrize(("model", "name", "value"), cases())
@torch.no_grad()
def test_a_changed_key_changes_what_it_changes_in_transformers_or_is_refused(
    saved, tmp_path, model, name, value
):
    folder = shutil.copytree(saved[model], tmp_path / "it")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    try:
        ours = load_model(folder)
    except CheckpointRefused as refusal:
        assert str(folder) in str(refusal)
        return
    tokens = torch.arange(40)[None] % VOCAB
    theirs = logits_of_theirs(folder, type(MODELS[model]()), tokens)
    assert theirs is not None, "only we load it"
    torch.testing.assert_close(ours(tokens), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model", MODELS)
def test_what_transformers_writes_of_its_own_is_not_refused(saved, tmp_path, model):
    """All its keys with their usual values; or every refusal above would mean nothing."""
    folder = shutil.copytree(saved[model], tmp_path / "it")
    config = MODELS[model]().config
    (folder / "config.json").write_text(config.to_json_string(use_diff=False))
    assert load_model(folder).config == load_model(saved[model]).config
