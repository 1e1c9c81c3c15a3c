"""Every key of a family's config is read, known to be without effect, or refused by name.

Each key that transformers' config class has, or that its models ask a config for, is changed alone
beside the same weights: our logits are then transformers' own, or we refuse it. A short run changes
every third of a hybrid family's own keys, a long one all of them, those that all configs have
included.
"""

import contextlib
import dataclasses
import json
import random
import shutil

import pytest
import torch
from families import FAMILIES, LAYOUTS, LLAMA3_ROPE, TRANSFORMERS, VOCAB, random_reference
from mutations import ODD_VALUES
from transformers import PreTrainedConfig

from stree.checkpoints.load_save import load_model
from stree.common.errors import CheckpointRefused

# With experts, attention and few layers
SEEDS = {"granite": 3, "nemotron": 3, "zamba": 1, "qwen3_5": 1}
TOKENS = torch.arange(9)[None] % VOCAB
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN_ROPE = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "beta_fast": 2.0,
    "original_max_position_embeddings": 64,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 300.0}
OTHER_KEYS = {
    "rope_parameters": [
        LLAMA3_ROPE, YARN_ROPE, LINEAR_ROPE, PLAIN_ROPE, {**PLAIN_ROPE, "factor": 2.0},
    ],
    "rope_scaling": [LLAMA3_ROPE, LINEAR_ROPE, PLAIN_ROPE, {"type": "linear", "factor": 2.0}],
    "rope_theta": [77.0],
    "partial_rotary_factor": [0.25],
    "head_dim": [2, 4],
    "sliding_window": [3],
    "original_max_position_embeddings": [16],
    "is_causal": [False, None, 0],
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
    "hybrid_override_pattern": ["MMMM"],
    "mtp_hybrid_override_pattern": ["*"],
    "mamba_n_groups": [1],
    "mamba_conv_bias": [False],
    "tie_embedding": [True, False],
    "block_ff_dim": [16],
    "block_use_swiglu": [False],
    "normalization_function": ["layernorm"],
    "attn_layer_indices": [[0], None],
    "mamba_use_mlp": [False],
    "an_unknown_key": [True, False, None, 0, {}],
    "id2label": [{"0": "a", "1": "b", "2": "c"}],
    "label2id": [{"a": 0, "b": 1, "c": 2}],
    "architectures": [["Other"]],
    "problem_type": ["regression"],
    "transformers_version": ["4.0.0"],
    "dtype": ["bfloat16"],
}


def other_values(name, value):
    if name in OTHER_KEYS and not (name == "layer_types" and value):
        return OTHER_KEYS[name]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value] if name != "vocab_size" else [value + 1]
    if isinstance(value, float):
        return [value * 1.7 + 0.1]
    if isinstance(value, str):
        return ["gelu" if value == "silu" else "relu", "rope"]
    if isinstance(value, list | tuple):
        if value and isinstance(value[0], str):
            return [value[::-1], ["full_attention"] * len(value)]
        return [[0.4, 0.6], [0.5] * len(value)]
    return [1, True, "rope"]


def logits_of_theirs(folder, usual, whole):
    """Return None when transformers refuses the config, or lacks weights that it asks for.

    With `whole` transformers loads the folder itself, which takes some times longer.
    """
    kind = type(usual)
    try:
        if whole:
            model, report = kind.from_pretrained(
                folder, dtype=torch.float32, return_dict=True, output_loading_info=True
            )
            if report["missing_keys"] or report["unexpected_keys"] or report["mismatched_keys"]:
                return None
        else:
            model = kind(kind.config_class.from_pretrained(folder))
            model.load_state_dict(usual.state_dict())
        return model.eval()(TOKENS, use_cache=False).logits
    except Exception:  # it has no common base for what it finds wrong
        return None


def keys_of(config, whole):
    """Return some keys that the family's class adds to those of all configs, or all of both."""
    written = {**{field.name: None for field in dataclasses.fields(config)}, **config.to_dict()}
    common = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    if not whole:
        written = dict([each for each in written.items() if each[0] not in common][::3])
    others = list(OTHER_KEYS)[:: 1 if whole else 3]
    return {**written, **{name: written.get(name) for name in others}}


@pytest.mark.costly
@pytest.mark.parametrize(
    ("family", "whole"),
    [
        *((each, False) for each in FAMILIES),
        *(pytest.param(each, True, marks=pytest.mark.long) for each in FAMILIES),
        *((each, True) for each in (*TRANSFORMERS, "mamba2")),
    ],
)
@torch.no_grad()
def test_a_changed_key_changes_what_it_changes_in_transformers_or_is_refused(
    tmp_path, family, whole
):
    theirs = random_reference(family, SEEDS.get(family, 0))
    theirs.save_pretrained(tmp_path / "it")
    path = tmp_path / "it" / "config.json"
    usual = json.loads(path.read_text())
    before, read = load_model(tmp_path / "it")(TOKENS), 0
    for name, value in keys_of(theirs.config, whole).items():
        for other in other_values(name, value):
            path.write_text(json.dumps({**usual, name: other}))
            try:
                ours = load_model(tmp_path / "it")
            except CheckpointRefused as refusal:
                assert str(tmp_path) in str(refusal)
                continue
            got, wanted = ours(TOKENS), logits_of_theirs(tmp_path / "it", theirs, whole)
            assert wanted is not None, f"{name} = {other}: only we load it"
            worst = float((got - wanted).abs().max() / wanted.abs().max())
            assert worst <= 1e-4, f"{name} = {other}: {worst}"
            read += not torch.equal(got, before)
    assert read >= (2 if whole else 1), "most keys with an effect are shapes, but not all"


@pytest.mark.parametrize("family", LAYOUTS)
def test_what_transformers_writes_of_its_own_is_not_refused(tmp_path, family):
    """All keys with their usual values load; or every refusal above would mean nothing."""
    theirs = random_reference(family, SEEDS.get(family, 0))
    theirs.save_pretrained(tmp_path / "it")
    folder = shutil.copytree(tmp_path / "it", tmp_path / "other")
    (folder / "config.json").write_text(theirs.config.to_json_string(use_diff=False))
    assert load_model(folder).config == load_model(tmp_path / "it").config


# As folders on the hub have them: keys of older versions, or of code that came with a model before
# transformers had its family. And other values, which would be another model
PUBLISHED = {
    "bamba": ({"attn_rotary_emb": 2}, {"attn_rotary_emb": 4}),
    "nemotron": (
        {
            "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"},
            "attention_head_dim": 4, "rms_norm_eps": 1e-5, "norm_eps": 1e-5,
            "time_step_rank": 256, "rope_theta": 10000, "partial_rotary_factor": 1.0,
        },
        {"attention_head_dim": 10, "rms_norm_eps": 1e-3, "norm_eps": 1e-3},
    ),
    "zamba": (
        {"use_shared_mlp_adapter": True, "time_step_limit": None},
        {"use_shared_mlp_adapter": False},
    ),
    "qwen3_next": ({"use_sliding_window": False}, {"use_sliding_window": True}),
}


@pytest.mark.parametrize("family", PUBLISHED)
@torch.no_grad()
def test_keys_of_published_folders_are_read(tmp_path, family):
    theirs = random_reference(family, 1)
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    usual, (published, others) = json.loads(path.read_text()), PUBLISHED[family]
    path.write_text(json.dumps({**usual, **published}))
    got, wanted = load_model(tmp_path)(TOKENS), logits_of_theirs(tmp_path, theirs, whole=True)
    assert float((got - wanted).abs().max() / wanted.abs().max()) <= 1e-4
    for name, other in others.items():
        path.write_text(json.dumps({**usual, **published, name: other}))
        with pytest.raises(CheckpointRefused, match=f"{name} = {other}; only"):
            load_model(tmp_path)


def test_lists_of_layers_that_differ_are_refused(tmp_path):
    random_reference("granite", 3).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    usual = json.loads(path.read_text())
    first, *others = usual["layer_types"]
    path.write_text(json.dumps({**usual, "layers_block_type": [first, *others]}))
    load_model(tmp_path)
    path.write_text(json.dumps({**usual, "layers_block_type": [*others, first]}))
    with pytest.raises(CheckpointRefused, match="layer_types and layers_block_type that differ"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("family", "key"), [("granite", "layer_types"), ("nemotron", "layers_block_type")]
)
def test_a_text_is_no_list_of_layers(tmp_path, family, key):
    random_reference(family, 3).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    usual = json.loads(path.read_text())
    path.write_text(json.dumps({**usual, key: "M*M"}))
    with pytest.raises(CheckpointRefused, match=f"{key} = 'M.*wanted a list of names: copy it"):
        load_model(tmp_path)


LARGE = 2**31 - 1


@pytest.mark.quick(5)
@pytest.mark.parametrize(
    "count", [60, pytest.param(1500, marks=pytest.mark.long)], ids=["some", "many"]
)
@pytest.mark.parametrize("family", LAYOUTS)
def test_damaged_configs_are_refused_with_a_reason(tmp_path, family, count):
    """Keys with values of any kind are read or refused at once; no other error escapes."""
    random_reference(family, SEEDS.get(family, 0)).save_pretrained(tmp_path)
    path, draw = tmp_path / "config.json", random.Random(family)
    usual = json.loads(path.read_text())
    refused = 0
    for _ in range(count):
        changes = {
            name: draw.choice([LARGE, 0, -1, 1.5, *ODD_VALUES])
            for name in draw.sample(sorted(usual), draw.choice([1, 1, 2]))
        }
        with contextlib.suppress(TypeError, ValueError):  # what no JSON can say
            path.write_text(json.dumps({**usual, **changes}))
        try:
            load_model(tmp_path)
        except CheckpointRefused as refusal:
            assert str(refusal).strip()
            refused += 1
    assert count / 3 < refused < count
