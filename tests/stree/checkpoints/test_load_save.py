"""Checkpoint folders: MambaInLlama's layout by hand, round trips, and every refusal."""

import json
import math
from pathlib import Path

import oracle
import pytest
import torch
from damage import flip_last_byte
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from stree.checkpoints.configs import config_files
from stree.checkpoints.load_save import load_config, load_model, save_model
from stree.checkpoints.tokenizer import fingerprint, load_tokenizer
from stree.common.errors import CannotWrite, CheckpointRefused, NotFound, UsageError
from stree.common.files import MANIFEST_NAME, verify_manifest
from stree.models.config import HybridConfig
from stree.models.model import HybridModel

VOCAB, D_MODEL, D_XB, HEADS, D_STATE, WIDTH = 50, 32, 16, 4, 8, 40
ATTN_LAYERS = [1]
LLAMA3_ROPE = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3",
}  # fmt: skip


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
    )  # fmt: skip
    ssm_cfg = {"expand": 1, "ngroups": HEADS, "d_state": D_STATE}
    if repeat_before_conv:
        ssm_cfg["repeat_kv_before_conv"] = True
    write_json(
        folder / "mamba_config.json",
        d_model=D_MODEL, ssm_cfg=ssm_cfg, rms_norm_eps=1e-5, vocab_size=None, d_inner=D_MODEL,
        d_xb=D_XB, intermediate_size=WIDTH, hidden_act="silu", n_layer=3, attn_layers=ATTN_LAYERS,
    )  # fmt: skip
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


def make_tokenizer(size=VOCAB):
    words = {f"w{index}": index for index in range(size)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0", eos_token="w1")


def assert_same_model(ours, other):
    assert ours.config == other.config
    theirs = other.state_dict()
    assert ours.state_dict().keys() == theirs.keys()
    for name, value in ours.state_dict().items():
        assert torch.equal(value, theirs[name]) and value.dtype == theirs[name].dtype, name


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
    )  # fmt: skip


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
    )  # fmt: skip
    edit_json(
        tmp_path / "mamba_config.json",
        d_model=4096, d_inner=4096, d_xb=1024, intermediate_size=14336, n_layer=32,
        ssm_cfg={"expand": 1, "ngroups": 32, "d_state": 128}, attn_layers=list(range(0, 32, 2)),
    )  # fmt: skip
    config = load_config(tmp_path)
    assert config.in_proj_dim == 2 * 4096 + 2 * 1024 + 32
    assert config.conv_dim == 4096 + 2 * 1024
    with torch.device("meta"):
        assert HybridModel(config).num_parameters() == 8_301_352_448


def test_the_keys_of_the_published_mamba2_config_are_known(tmp_path):
    """Those of Mamba-Codestral-7B, as transformers 4.44 wrote them."""
    write_json(
        tmp_path / "config.json",
        _name_or_path="/raid/", architectures=["Mamba2ForCausalLM"], bos_token_id=0, chunk_size=256,
        conv_kernel=4, eos_token_id=0, expand=2, head_dim=64, hidden_act="silu", hidden_size=4096,
        initializer_range=0.1, intermediate_size=8192, layer_norm_epsilon=1e-05,
        model_type="mamba2", n_groups=8, norm_before_gate=True, num_heads=128,
        num_hidden_layers=64, pad_token_id=0, rescale_prenorm_residual=False,
        residual_in_fp32=True, rms_norm=True, state_size=128, tie_word_embeddings=False,
        time_step_floor=0.0001, time_step_init_scheme="random", time_step_limit=[0.0, math.inf],
        time_step_max=0.1, time_step_min=0.001, time_step_rank=256, time_step_scale=1.0,
        torch_dtype="bfloat16", transformers_version="4.44.0.dev0", use_bias=False, use_cache=True,
        use_conv_bias=True, vocab_size=32768,
    )  # fmt: skip
    config = load_config(tmp_path)
    assert config.num_ssm_heads == 128 and config.dt_limit == (0.0, math.inf)


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


MAMBA = {"num_ssm_heads": 4, "ssm_head_dim": 8, "d_state": 8}
SHARED = {"num_x_groups": 2, "num_b_groups": 2, "num_c_groups": 4, "gated_norm_groups": 4}
ATTENTION = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 6}
ROUND_TRIPS = {
    "hybrid": HybridConfig(
        50, 24, 2, (1,), 20, eos_token_ids=(3,), pad_token_id=0, **MAMBA, **SHARED, **ATTENTION
    ),
    "pure-mamba-drafter": HybridConfig(
        50, 24, 2, (), 20, tie_embeddings=True, eos_token_ids=(3, 4), **MAMBA, **SHARED
    ),
    "repeat-before-conv": HybridConfig(
        50, 24, 2, (), 20, repeat_before_conv=True, chunk_size=16, **MAMBA, **SHARED
    ),
    "no-mlp-mamba2": HybridConfig(
        50, 24, 2, (), num_ssm_heads=6, ssm_head_dim=3, d_state=10, num_x_groups=6,
        num_b_groups=3, num_c_groups=3, gated_norm_groups=3, gated_norm_eps=1e-3, d_conv=3,
        conv_bias=False, dt_limit=(0.1, math.inf), rms_norm_eps=1e-4,
    ),
    "dt-limit": HybridConfig(50, 24, 1, (), 20, dt_limit=(0.1, 0.5), **MAMBA, **SHARED),
    "attention-only": HybridConfig(
        50, 24, 2, (0, 1), 20, bos_token_id=1, rope_theta=5e5, max_position_embeddings=77,
        **ATTENTION,
    ),
}  # fmt: skip


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
    )  # fmt: skip
    manifest = verify_manifest(tmp_path / "step")
    assert {
        "config.json", "mamba_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", "provenance.json",
    } <= manifest["files"].keys()  # fmt: skip
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


def test_bin_files_are_read_as_tensors_only(tmp_path):
    weights = mamba_in_llama(tmp_path)
    wanted = load_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    assert_same_model(load_model(tmp_path), wanted)
    torch.save(weights, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert_same_model(load_model(tmp_path), wanted)


def test_sharded_bin_files(tmp_path):
    weights = mamba_in_llama(tmp_path)
    wanted = load_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    names = list(weights)
    weight_map = {}
    for part in (0, 1):
        file = f"pytorch_model-{part}.bin"
        torch.save({name: weights[name] for name in names[part::2]}, tmp_path / file)
        weight_map |= dict.fromkeys(names[part::2], file)
    write_json(tmp_path / "pytorch_model.bin.index.json", weight_map=weight_map)
    assert_same_model(load_model(tmp_path), wanted)


class Hostile:
    def __reduce__(self):
        return print, ("code from a checkpoint ran",)


def test_a_pickle_with_code_is_refused_unrun(tmp_path, capfd):
    mamba_in_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Hostile()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointRefused, match=r"pytorch_model\.bin cannot be read"):
        load_model(tmp_path)
    assert "ran" not in capfd.readouterr().out


def test_a_repeated_equal_head_and_old_buffers_are_fine(tmp_path):
    mamba_in_llama(tmp_path, tied=True)
    wanted = load_model(tmp_path)

    def add(weights):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        weights["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    edit_weights(tmp_path, add)
    assert_same_model(load_model(tmp_path), wanted)


# Refusals: a damaged folder, by what was done to it and what the message must name


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


@pytest.mark.parametrize("damage", WEIGHT_DAMAGES)
def test_weights_that_do_not_fit_are_refused(tmp_path, damage):
    mamba_in_llama(tmp_path)
    edit, reason = WEIGHT_DAMAGES[damage]
    edit_weights(tmp_path, edit)
    with pytest.raises(CheckpointRefused, match=reason):
        load_model(tmp_path)


def test_a_tied_head_that_differs_is_refused(tmp_path):
    mamba_in_llama(tmp_path, tied=False)
    edit_json(tmp_path / "config.json", tie_word_embeddings=True)
    with pytest.raises(CheckpointRefused, match=r"tied, but lm_head\.weight differs"):
        load_model(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 200, 2000, 30_000])
def test_truncated_weights_are_refused(tmp_path, keep):
    mamba_in_llama(tmp_path)
    truncate(tmp_path / "model.safetensors", keep)
    with pytest.raises(CheckpointRefused, match=r"model\.safetensors cannot be read"):
        load_model(tmp_path)


def test_no_weights(tmp_path):
    mamba_in_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointRefused, match="holds no weights"):
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


def test_a_flipped_bit_is_refused_by_the_manifest(tmp_path):
    save_model(HybridModel(ROUND_TRIPS["hybrid"]), tmp_path / "step")
    flip_last_byte(tmp_path / "step" / "model.safetensors")
    with pytest.raises(CheckpointRefused, match=r"model\.safetensors has sha256"):
        load_model(tmp_path / "step")


CONFIG_DAMAGES = {
    "kind-list": ({"model_type": ["llama"]}, r"a \['llama'\] model, wanted one of: MambaInLlama"),
    "kind-table": ({"model_type": {"a": 1}}, r"a \{'a': 1\} model, wanted one of: MambaInLlama"),
    "foreign": ({"model_type": "jamba"}, "'jamba' model, wanted one of: MambaInLlama"),
    "nameless": ({"model_type": None}, "'nameless' model, wanted"),
    "attention-bias": ({"attention_bias": True}, "attention_bias = True; only False"),
    "mlp-bias": ({"mlp_bias": True}, "mlp_bias = True"),
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
        "layer_types of 'sliding_attention'; only 'full_attention'",
    ),
    "layers-of-another-depth": ({"layer_types": ["full_attention"]}, "wanted a list of 3"),
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


@pytest.mark.parametrize("damage", CONFIG_DAMAGES)
def test_configs_that_ask_for_something_else_are_refused(tmp_path, damage):
    mamba_in_llama(tmp_path)
    (tmp_path / "mamba_config.json").unlink()
    changes, reason = CONFIG_DAMAGES[damage]
    edit_json(tmp_path / "config.json", **changes)
    for load in (load_config, load_model):
        with pytest.raises(CheckpointRefused, match=reason):
            load(tmp_path)


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
    "dt-limit": ({"dt_limit": 3}, "dt_limit = 3, wanted two numbers"),
}


@pytest.mark.parametrize("damage", MAMBA_DAMAGES)
def test_mamba_configs_that_ask_for_something_else_are_refused(tmp_path, damage):
    mamba_in_llama(tmp_path)
    changes, reason = MAMBA_DAMAGES[damage]
    edit_json(tmp_path / "mamba_config.json", **changes)
    with pytest.raises(CheckpointRefused, match=reason):
        load_config(tmp_path)


@pytest.mark.parametrize("damage", MIXER_DAMAGES)
def test_mixers_that_are_different_are_refused(tmp_path, damage):
    mamba_in_llama(tmp_path)
    changes, reason = MIXER_DAMAGES[damage]
    ssm_cfg = {"expand": 1, "ngroups": HEADS, "d_state": D_STATE, **changes}
    edit_json(tmp_path / "mamba_config.json", ssm_cfg=ssm_cfg)
    with pytest.raises(CheckpointRefused, match=reason):
        load_config(tmp_path)


def test_mambas_in_other_models_than_llama_are_refused(tmp_path):
    mamba_in_llama(tmp_path)
    edit_json(tmp_path / "config.json", model_type="mistral")
    with pytest.raises(CheckpointRefused, match="model_type = 'mistral'; only 'llama'"):
        load_config(tmp_path)


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
    ("changes", "reason"),
    [
        ({"ssm_cfg": {}}, "layer = 'Mamba1'; only 'Mamba2'"),
        ({"ssm_cfg": {"layer": "Mamba2", "headdim": 48}}, "no multiple of headdim 48"),
        ({"ssm_cfg": {"layer": "Mamba2", "d_ssm": 32}}, "d_ssm = 32; only 64"),
        ({"rms_norm": False}, "rms_norm = False"),
        ({"attn_layer_idx": [3]}, "its attention layers are not supported"),
        ({"d_intermediate": 64}, "its MLPs are not supported"),
    ],
)
def test_state_spaces_configs_that_are_different_are_refused(tmp_path, changes, reason):
    values = {
        "d_model": 32, "n_layer": 2, "vocab_size": 50,
        "ssm_cfg": {"layer": "Mamba2", "headdim": 8}, **changes,
    }  # fmt: skip
    write_json(tmp_path / "config.json", **values)
    with pytest.raises(CheckpointRefused, match=reason):
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
