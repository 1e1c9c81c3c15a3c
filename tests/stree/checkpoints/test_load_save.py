"""Checkpoint folders: MambaInLlama's layout by hand, and round trips."""

import json
from pathlib import Path

import oracle
import pytest
import torch
from checkpoint_folders import (
    D_MODEL,
    D_STATE,
    HEADS,
    LLAMA3_ROPE,
    ROUND_TRIPS,
    VOCAB,
    WIDTH,
    assert_same_model,
    edit_json,
    edit_weights,
    mamba_in_llama,
    write_json,
)
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from stree.checkpoints.configs import config_files, load_config
from stree.checkpoints.load_save import load_model, save_model
from stree.checkpoints.tokenizer import fingerprint, load_tokenizer
from stree.common.errors import CannotWrite, CheckpointRefused, UsageError
from stree.common.files import MANIFEST_NAME, verify_manifest
from stree.models.config import HybridConfig
from stree.models.model import HybridModel


def make_tokenizer(size=VOCAB):
    words = {f"w{index}": index for index in range(size)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0", eos_token="w1")


# MambaInLlama


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("repeat", [False, True], ids=["repeat-after", "repeat-before"])
@torch.no_grad()
def test_mamba_in_llama_logits(tmp_path, repeat, tied):
    weights = mamba_in_llama(tmp_path, repeat_before_conv=repeat, tied=tied)
    model = load_model(tmp_path, dtype=torch.float64)
    exact = {name: value.double().numpy() for name, value in weights.items()}
    tokens = torch.randint(VOCAB, (12,))
    wanted = torch.from_numpy(oracle.logits_of_sequence(model.config, exact, tokens))
    assert (model(tokens[None])[0] - wanted).abs().max() <= 1e-9 * wanted.abs().max()


def test_mamba_in_llama_config(tmp_path):
    mamba_in_llama(tmp_path)
    config = load_config(tmp_path)
    assert config == HybridConfig(
        vocab_size=VOCAB, d_model=D_MODEL, num_layers=3, attn_layers=(1,),
        intermediate_size=WIDTH, num_heads=4, num_kv_heads=2, head_dim=8, rope_theta=500000.0,
        rope_scaling={
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
        max_position_embeddings=131072, num_ssm_heads=HEADS, ssm_head_dim=D_STATE,
        d_state=D_STATE, num_x_groups=2, num_b_groups=2, num_c_groups=4, gated_norm_groups=4,
        eos_token_ids=(7, 8), bos_token_id=3,
    )


def test_rope_keys_of_transformers_4_and_5_mean_the_same(tmp_path):
    for name, old in (("old", True), ("new", False), ("both", True)):
        (tmp_path / name).mkdir()
        mamba_in_llama(tmp_path / name, old_rope=old)
    edit_json(
        tmp_path / "both" / "config.json", rope_parameters={**LLAMA3_ROPE, "rope_theta": 500000.0}
    )
    old, new, both = (load_config(tmp_path / name) for name in ("old", "new", "both"))
    assert old == new == both


def test_the_published_8b_config_gives_the_documented_shapes(tmp_path):
    mamba_in_llama(tmp_path)
    edit_json(
        tmp_path / "config.json",
        hidden_size=4096, vocab_size=128256, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=14336, num_hidden_layers=32,
    )
    edit_json(
        tmp_path / "mamba_config.json",
        d_model=4096, d_inner=4096, d_xb=1024, intermediate_size=14336, n_layer=32,
        ssm_cfg={"expand": 1, "ngroups": 32, "d_state": 128}, attn_layers=list(range(0, 32, 2)),
    )
    config = load_config(tmp_path)
    assert config.in_proj_dim == 2 * 4096 + 2 * 1024 + 32
    assert config.conv_dim == 4096 + 2 * 1024
    with torch.device("meta"):
        assert HybridModel(config).num_parameters() == 8_301_352_448


def test_generation_config_names_more_ends(tmp_path):
    mamba_in_llama(tmp_path)
    write_json(tmp_path / "generation_config.json", eos_token_id=[7, 8, 9])
    assert load_config(tmp_path).eos_token_ids == (7, 8, 9)
    write_json(tmp_path / "generation_config.json", eos_token_id=[7, VOCAB + 1])
    with pytest.raises(
        CheckpointRefused, match=rf"generation_config\.json has .* {VOCAB + 1}, the"
    ):
        load_config(tmp_path)


def test_nothing_is_drawn_for_weights_that_are_read(tmp_path, monkeypatch):
    """A first draw without a device takes a second, in which PyTorch imports what it needs."""
    mamba_in_llama(tmp_path)

    def refuse(*_, **__):
        raise AssertionError("normal_ was called")

    monkeypatch.setattr(nn.init, "normal_", refuse)
    load_model(tmp_path)


def test_ssm_parameters_stay_in_fp32(tmp_path):
    mamba_in_llama(tmp_path)
    model = load_model(tmp_path, dtype=torch.bfloat16)
    wide = {name for name, value in model.state_dict().items() if value.dtype == torch.float32}
    assert {name.rsplit(".", 1)[-1] for name in wide} == {"A_log", "D", "dt_bias"}
    assert len(wide) == 6 and model.dtype == torch.bfloat16
    assert model(torch.tensor([[1, 2, 3]])).isfinite().all()


# Round trips


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_saved_and_loaded_is_the_same(tmp_path, name):
    torch.manual_seed(0)
    model = HybridModel(ROUND_TRIPS[name])
    save_model(model, tmp_path / "step")
    assert_same_model(load_model(tmp_path / "step"), model)
    save_model(load_model(tmp_path / "step"), tmp_path / "again")
    for file in ("config.json", "model.safetensors"):
        first, second = ((tmp_path / each / file).read_bytes() for each in ("step", "again"))
        assert first == second


def test_shards_have_an_index_and_hold_every_tensor_once(tmp_path):
    model = HybridModel(ROUND_TRIPS["hybrid"])
    save_model(model, tmp_path / "step", shard_bytes=8_000)
    shards = sorted(path.name for path in (tmp_path / "step").glob("*.safetensors"))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    index = json.loads((tmp_path / "step" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == model.state_dict().keys()
    assert index["metadata"]["total_size"] == 4 * model.num_parameters()
    assert_same_model(load_model(tmp_path / "step"), model)


def test_saving_in_bf16_keeps_ssm_parameters(tmp_path):
    model = HybridModel(ROUND_TRIPS["hybrid"])
    save_model(model, tmp_path / "step", dtype=torch.bfloat16)
    stored = load_file(tmp_path / "step" / "model.safetensors")
    assert stored["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert torch.equal(stored["model.layers.0.mamba.A_log"], model.model.layers[0].mamba.A_log)
    assert json.loads((tmp_path / "step" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_everything_a_folder_should_hold(tmp_path):
    model, tokenizer = HybridModel(ROUND_TRIPS["hybrid"]), make_tokenizer()
    save_model(
        model, tmp_path / "step", tokenizer,
        extra_files={"provenance.json": "{}"}, manifest_extra={"step": 3},
    )
    manifest = verify_manifest(tmp_path / "step")
    assert {
        "config.json", "mamba_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", "provenance.json",
    } <= manifest["files"].keys()
    assert manifest["step"] == 3
    assert manifest["tokenizer_fingerprint"] == fingerprint(load_tokenizer(tmp_path / "step"))


@pytest.mark.parametrize("name", [name for name in ROUND_TRIPS if name != "attention-only"])
def test_transformers_refuses_what_it_would_load_with_random_weights(tmp_path, name):
    save_model(HybridModel(ROUND_TRIPS[name]), tmp_path / "step", make_tokenizer())
    with pytest.raises(ValueError, match="model type `stree_hybrid`"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "step")
    assert AutoTokenizer.from_pretrained(tmp_path / "step").eos_token_id == 1


def test_the_shipped_checkpoint_is_what_its_manifest_says_and_an_export_of_today():
    folder = Path(__file__).parents[3] / "checkpoints" / "python-docs-hybrid"
    verify_manifest(folder)
    for name, text in config_files(load_config(folder), "bfloat16").items():
        assert (folder / name).read_text() == text


def test_older_exports_which_say_llama_are_the_same_model(tmp_path):
    model = HybridModel(ROUND_TRIPS["hybrid"])
    save_model(model, tmp_path / "step")
    (tmp_path / "step" / MANIFEST_NAME).unlink()
    edit_json(tmp_path / "step" / "config.json", model_type="llama")
    assert_same_model(load_model(tmp_path / "step"), model)


def test_an_export_without_its_mixers_config_is_refused(tmp_path):
    save_model(HybridModel(ROUND_TRIPS["pure-mamba-drafter"]), tmp_path / "step")
    (tmp_path / "step" / MANIFEST_NAME).unlink()
    (tmp_path / "step" / "mamba_config.json").unlink()
    with pytest.raises(CheckpointRefused, match=r"no mamba_config\.json beside"):
        load_model(tmp_path / "step")


def test_saving_never_replaces_unasked(tmp_path):
    model = HybridModel(ROUND_TRIPS["hybrid"])
    save_model(model, tmp_path / "step")
    with pytest.raises(CannotWrite, match="exists already"):
        save_model(model, tmp_path / "step")
    save_model(model, tmp_path / "step", overwrite=True)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path):
    with pytest.raises(UsageError, match="51 ids, the model 50"):
        save_model(HybridModel(ROUND_TRIPS["hybrid"]), tmp_path / "step", make_tokenizer(VOCAB + 1))
    assert not (tmp_path / "step").exists()


def test_loaded_weights_do_not_follow_the_file(tmp_path):
    """A mapped file that is truncated later would kill the process."""
    mamba_in_llama(tmp_path)
    model = load_model(tmp_path)
    before = model.head_weight.clone()
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.truncate(10)
    assert torch.equal(model.head_weight, before)


# Other files


def shards(weights):
    names = list(weights)
    return {
        f"pytorch_model-{part}.bin": {name: weights[name] for name in names[part::2]}
        for part in (0, 1)
    }


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before PyTorch 1.6"])
@pytest.mark.parametrize("split", [lambda w: {"pytorch_model.bin": w}, shards], ids=["one", "two"])
def test_bin_files_are_read(tmp_path, split, zipped):
    weights = mamba_in_llama(tmp_path)
    wanted = load_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    weight_map = {}
    for file, tensors in split(weights).items():
        torch.save(tensors, tmp_path / file, _use_new_zipfile_serialization=zipped)
        weight_map |= dict.fromkeys(tensors, file)
    write_json(tmp_path / "pytorch_model.bin.index.json", weight_map=weight_map)
    assert_same_model(load_model(tmp_path), wanted)


def test_a_repeated_equal_head_and_old_buffers_are_fine(tmp_path):
    mamba_in_llama(tmp_path, tied=True)
    wanted = load_model(tmp_path)

    def add(weights):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        weights["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    edit_weights(tmp_path, add)
    assert_same_model(load_model(tmp_path), wanted)
