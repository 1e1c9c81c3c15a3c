"""Refuse a damaged checkpoint folder, by what was done to it and what the message must name."""

import pytest
import torch
from checkpoint_folders import (
    D_MODEL,
    D_STATE,
    HEADS,
    LLAMA3_ROPE,
    ROUND_TRIPS,
    VOCAB,
    edit_json,
    edit_weights,
    mamba_in_llama,
    write_json,
)

from stree.checkpoints.configs import load_config
from stree.checkpoints.load_save import load_model, save_model
from stree.common.errors import CheckpointRefused, NotFound
from stree.common.files import MANIFEST_NAME
from stree.models.model import HybridModel


def truncate(path, keep):
    path.write_bytes(path.read_bytes()[:keep])


def rename(weights, old, new):
    weights[new] = weights.pop(old)


WEIGHT_DAMAGES = {
    "missing": (
        lambda w: w.pop("model.layers.2.mamba.D"),
        r"model\.layers\.2\.mamba\.D missing, nothing not expected",
    ),
    "unexpected": (
        lambda w: w.update({"model.layers.3.mlp.up_proj.weight": torch.zeros(2)}),
        r"nothing missing, model\.layers\.3\.mlp\.up_proj\.weight not expected",
    ),
    "foreign": (
        lambda w: [rename(w, name, name.replace("model.", "transformer.")) for name in list(w)],
        r"and \d+ more missing, .* and \d+ more not expected",
    ),
    "shape": (
        lambda w: w.update({"model.layers.0.mamba.in_proj.weight": torch.zeros(100, D_MODEL - 1)}),
        r"in_proj\.weight in .* has shape \(100, 31\), its config wants \(100, 32\)",
    ),
    "vocabulary": (
        lambda w: w.update({"lm_head.weight": torch.zeros(VOCAB + 2, D_MODEL)}),
        r"has shape \(52, 32\), its config wants \(50, 32\)",
    ),
    "quantised": (
        lambda w: w.update({"model.norm.weight": torch.zeros(D_MODEL, dtype=torch.int8)}),
        "stored as I8, wanted one of F64, F32, F16, BF16",
    ),
    "float8": (
        lambda w: w.update({"model.norm.weight": torch.zeros(D_MODEL).to(torch.float8_e4m3fn)}),
        "stored as F8_E4M3",
    ),
}


def test_a_tied_head_that_differs_is_refused(tmp_path):
    mamba_in_llama(tmp_path, tied=False)
    edit_json(tmp_path / "config.json", tie_word_embeddings=True)
    with pytest.raises(CheckpointRefused, match=r"tied, but lm_head\.weight differs"):
        load_model(tmp_path)


FOLDER_DAMAGES = {
    **{
        name: (lambda d, edit=edit: edit_weights(d, edit), reason)
        for name, (edit, reason) in WEIGHT_DAMAGES.items()
    },
    **{
        f"truncated-{keep}": (
            lambda d, keep=keep: truncate(d / "model.safetensors", keep),
            r"model\.safetensors cannot be read",
        )
        for keep in (0, 5, 200, 2000, 30_000)
    },
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "holds no weights"),
    **{
        name: (
            lambda d, name=name: edit_json(d / "config.json", **{name: True}),
            f"{name} = True; only False",
        )
        for name in ("attention_bias", "mlp_bias")  # beside Mamba layers
    },
    "Mamba in Mistral": (
        lambda d: edit_json(d / "config.json", model_type="mistral"),
        r"= 'mistral'; only 'llama'.*: use a",
    ),
}


@pytest.mark.parametrize("damage", FOLDER_DAMAGES)
def test_damaged_folders_are_refused(tmp_path, damage):
    damage, reason = FOLDER_DAMAGES[damage]
    mamba_in_llama(tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointRefused, match=reason):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda d: next(d.glob("*-00002-*")).unlink(), r"model-00002-of-\d+\.safetensors is miss"),
        (lambda d: truncate(d / "model.safetensors.index.json", 50), "index.json cannot be read"),
        (lambda d: write_json(d / "model.safetensors.index.json"), "index.json cannot be read"),
        (lambda d: truncate(next(d.glob("*-00002-*")), 900), "00002-of-.* cannot be read"),
    ],
)
def test_damaged_shards_are_refused(tmp_path, damage, reason):
    save_model(HybridModel(ROUND_TRIPS["hybrid"]), tmp_path / "step", shard_bytes=8_000)
    (tmp_path / "step" / MANIFEST_NAME).unlink()
    damage(tmp_path / "step")
    with pytest.raises(CheckpointRefused, match=reason):
        load_model(tmp_path / "step")


CONFIG_DAMAGES = {
    "kind-list": ({"model_type": ["llama"]}, r"a \['llama'\] model, wanted one of: MambaInLlama"),
    "kind-table": ({"model_type": {"a": 1}}, r"a \{'a': 1\} model, wanted one of: MambaInLlama"),
    "foreign": ({"model_type": "bert"}, "'bert' model, wanted one of: MambaInLlama"),
    "nameless": ({"model_type": None}, "'nameless' model, wanted"),
    "attention-bias": ({"attention_bias": 1}, "attention_bias = 1, wanted true or false"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act = 'gelu'; only 'silu'"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "rope": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear'"),
    "rope-incomplete": ({"rope_scaling": {"rope_type": "llama3"}}, "has factor = None, wanted"),
    "rope-extra": (
        {"rope_scaling": {**LLAMA3_ROPE, "attention_factor": 0.5}},
        "attention_factor = 0.5, which is not supp",
    ),
    "rope-partial": (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "partial_rotary_factor = 0.5; only 1.0",
    ),
    "rope-bands": (
        {"rope_scaling": {**LLAMA3_ROPE, "low_freq_factor": 5.0}},
        "0 < low_freq_factor < high",
    ),
    "rope-band-of-none": (
        {"rope_scaling": {**LLAMA3_ROPE, "low_freq_factor": 4.0}},
        "0 < low_freq_factor < high",
    ),
    "rope-list": ({"rope_parameters": [1]}, r"rope_parameters = \[1\], wanted a table"),
    "rope-twice": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        "rope_parameters and rope_scaling that differ",
    ),
    "rope-length": (
        {"original_max_position_embeddings": 4096},
        "original_max_position_embeddings = 4096; only 8192",
    ),
    "sliding-layers": (
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        "layer_types of 'sliding_attention'; supported are 'full_attention'",
    ),
    "layers-of-another-depth": ({"layer_types": ["full_attention"]}, "has 1 layer_types for num"),
    "sliding-window": ({"sliding_window": 16}, "sliding_window = 16"),
    "both-ways": ({"is_causal": False}, "is_causal = False; only True"),
    "both-ways-by-null": ({"is_causal": None}, "is_causal = None; only True"),
    "tied-by-text": ({"tie_word_embeddings": "false"}, "wanted true or false"),
    "unknown": ({"attention_chunk_size": 0}, "attention_chunk_size = 0, which is not supp"),
    "text": ({"hidden_size": "32"}, "hidden_size = '32', wanted a whole number"),
    "absent": ({"num_attention_heads": None}, "num_attention_heads = None, wanted"),
    "eos": ({"eos_token_id": ["</s>"]}, "eos_token_id = .*, wanted token ids"),
    "eos-beyond": (
        {"eos_token_id": [7, VOCAB]},
        rf"config\.json has eos_token_id {VOCAB}, the vocabulary has {VOCAB} tokens",
    ),
    "heads": ({"num_key_value_heads": 3}, "num_heads = 4 is no multiple of num_kv_heads = 3"),
}


MAMBA_DAMAGES = {
    "activation": ({"hidden_act": "relu"}, "hidden_act = 'relu'"),
    "unknown": ({"bidirectional": True}, "bidirectional = True, which is not supp"),
    "eps": ({"rms_norm_eps": 1e-6}, "rms_norm_eps 1e-06, .* 1e-05"),
    "width": ({"d_model": 2 * D_MODEL}, rf"d_model {2 * D_MODEL}, .* hidden_size {D_MODEL}"),
    "vocabulary": ({"vocab_size": 7}, r"vocab_size 7, .* vocab_size \d+"),
    "inner": ({"d_inner": 40}, "d_inner 40, wanted"),
    "xb": ({"d_xb": 12}, "d_xb 12, wanted a multiple"),
    "layers": ({"attn_layers": [7]}, "attn_layers .* below num_layers = 3"),
    "no-layers": ({"attn_layers": None}, "attn_layers = None, wanted a list"),
    "no-mixer": ({"ssm_cfg": None}, "no table 'ssm_cfg'"),
    "groups": ({"d_xb": 24}, "num_ssm_heads = 4 is no multiple of num_x_groups = 3"),
}
MIXER_DAMAGES = {
    "chunk": ({"chunk_size": 10**8}, "chunk_size is 100000000, it must be at most 4096"),
    "mamba-1": ({"layer": "Mamba1"}, "layer = 'Mamba1'; only 'Mamba2'"),
    "bias": ({"bias": True}, "bias = True; only False"),
    "norm": ({"norm_before_gate": True}, "norm_before_gate = True"),
    "no-norm": ({"rmsnorm": False}, "rmsnorm = False"),
    "unknown": ({"learnable_init_states": True}, "learnable_init_states = True, which is not"),
    "dt-limit": ({"dt_limit": 3}, "dt_limit = 3, wanted 2 numbers"),
}


# Of state-spaces' config.json
STATE_SPACES = {
    "d_model": 32, "n_layer": 2, "vocab_size": 50, "ssm_cfg": {"layer": "Mamba2", "headdim": 8},
}
STATE_SPACES_DAMAGES = {
    "heads": ({"ssm_cfg": {"layer": "Mamba2", "headdim": 48}}, "headdim 48, wanted a divisor"),
    "width": ({"ssm_cfg": {"layer": "Mamba2", "d_ssm": 32}}, "d_ssm = 32; only 64"),
    "norm": ({"rms_norm": False}, "rms_norm = False"),
    "attention": ({"attn_layer_idx": [3]}, "its attention layers are not supported"),
    "mlp": ({"d_intermediate": 64}, "its MLPs are not supported"),
}
DAMAGES = [
    pytest.param(file, *damage, id=f"{file}-{name}")
    for file, damages in (
        ("config.json", CONFIG_DAMAGES), ("mamba_config.json", MAMBA_DAMAGES),
        ("ssm_cfg", MIXER_DAMAGES), ("state-spaces", STATE_SPACES_DAMAGES),
    )
    for name, damage in damages.items()
]


@pytest.mark.parametrize(("file", "changes", "reason"), DAMAGES)
def test_configs_that_ask_for_something_else_are_refused(tmp_path, file, changes, reason):
    mamba_in_llama(tmp_path)
    if file == "ssm_cfg":
        changes = {"ssm_cfg": {"expand": 1, "ngroups": HEADS, "d_state": D_STATE, **changes}}
        file = "mamba_config.json"
    if file != "mamba_config.json":
        (tmp_path / "mamba_config.json").unlink()
    if file == "state-spaces":
        write_json(tmp_path / "config.json", **{**STATE_SPACES, **changes})
    else:
        edit_json(tmp_path / file, **changes)
    for load in (load_config, load_model):
        with pytest.raises(CheckpointRefused, match=reason):
            load(tmp_path)


def test_keys_without_effect_pass_and_unknown_ones_of_the_mixer_do_not(tmp_path):
    mamba_in_llama(tmp_path)
    wanted = load_config(tmp_path)
    edit_json(tmp_path / "mamba_config.json", resid_dropout=0.1, vocab_size=None)
    edit_json(tmp_path / "config.json", use_cache=False, attention_dropout=0.1, pretraining_tp=2)
    assert load_config(tmp_path) == wanted
    file = "mamba_config.json"
    for value in (True, False, 0, None, {}):
        edit_json(tmp_path / file, bidirectional=value)
        with pytest.raises(CheckpointRefused, match=f"{file} sets bidirectional = {value}, which"):
            load_config(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "no config.json in"),
        ('{"model_type": "lla', "config.json cannot be read"),
        ("[]", "holds no JSON object"),
        (b"\xff\xfe\x00", "config.json cannot be read"),
    ],
)
def test_unreadable_configs_are_refused(tmp_path, content, reason):
    if content is not None:
        data = content if isinstance(content, bytes) else content.encode()
        (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(CheckpointRefused, match=reason):
        load_model(tmp_path)


def test_a_path_that_is_no_folder_is_refused(tmp_path):
    with pytest.raises(NotFound, match="no folder"):
        load_model(tmp_path / "nowhere")
