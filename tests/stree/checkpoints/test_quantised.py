"""Published checkpoints in 8 bits, written as their libraries lay them out, and other formats.

The oracle is the same checkpoint with the numbers written out: values times scales.
"""

import json
import re
import warnings
from functools import partial

import eagle_heads
import pytest
import torch
from checkpoint_folders import edit_json
from families import VOCAB, random_reference
from in_8_bits import CONFIG, FLOAT8, FORMATS, FP8, compressed, write
from lanes import costly
from mtp_heads import save_with_head
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from watched import watch

import stree
from stree.checkpoints.configs import load_config
from stree.checkpoints.heads.eagle import plan_eagle
from stree.checkpoints.heads.mtp import plan_mtp
from stree.checkpoints.layouts.quantisation import scale_grid
from stree.checkpoints.layouts.quantised import scaled_tensor
from stree.checkpoints.load_save import load_model
from stree.checkpoints.plan import build as building
from stree.checkpoints.plan.build import build
from stree.common.errors import CheckpointRefused
from stree.models.in_8_bits import scale_name, weights_for_8_bits
from stree.models.layers.packed_linear import ScaledLinear
from stree.models.slicing import share_ends, without_8_bits
from stree_kernels.contracts import Scaled


@pytest.mark.quick(8)
@pytest.mark.parametrize(
    ("family", "form"),
    [
        *(("llama", form) for form in FORMATS), *(costly("qwen3_5", form) for form in FORMATS),
        ("falcon", "fp8-small-blocks"), ("falcon", "channel"), ("nemotron", "modelopt"),
        ("qwen3_next", "fp8"), ("zamba", "channel"), ("granite", "block"), ("jamba", "channel"),
        ("mamba2", "channel"), ("lfm2_moe", "fp8-small-blocks"),
    ],
)
@torch.no_grad()
def test_it_is_the_checkpoint_of_its_numbers(family, form, tmp_path):
    seed = 4 if family == "nemotron" else 2  # which has experts
    in_bits = write(random_reference(family, seed).float().save_pretrained, tmp_path, form)
    plain, tokens = load_model(tmp_path / "plain"), torch.randint(VOCAB, (2, 9))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".* in 8 bits")
        model = load_model(tmp_path / "stored")
    torch.testing.assert_close(model(tokens), plain(tokens), rtol=1e-4, atol=1e-4)
    wanted, taken = plain.state_dict(), weights_for_8_bits(model)
    held = {name: each for name, each in taken.items() if each.dtype == FLOAT8}
    assert held and in_bits
    assert any("experts" in name for name in held) == any(
        re.search(r"\.experts\.|sparse_moe", name) for name in in_bits
    )
    for name, values in held.items():  # the stored values, and no others
        scale = model.get_parameter(scale_name(name))
        repeats = values.shape[-1] // scale.shape[-1]
        back = values.float() * scale.repeat_interleave(repeats, dim=-1)
        torch.testing.assert_close(back, wanted[name], rtol=1e-6, atol=0)
    others, in_16 = taken.keys() - held.keys(), re.compile(r".*(lm_head|in_proj_[ab]|short_conv).*")
    assert all(map(in_16.fullmatch, others)), others


@pytest.mark.parametrize(
    "family", ["llama", costly("qwen3_next"), costly("jamba"), costly("nemotron")]
)
@torch.no_grad()
def test_transformers_reads_the_same_numbers(family, tmp_path):
    """It writes them out; blocks that a size is no multiple of it takes to be smaller."""
    seed = 4 if family == "nemotron" else 2
    assert write(random_reference(family, seed).float().save_pretrained, tmp_path, "fp8-twos")
    folder, tokens = tmp_path / "stored", torch.randint(VOCAB, (2, 9))
    reader = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    got, wanted = load_model(folder)(tokens), reader.eval()(tokens).logits
    assert (got - wanted).abs().max() < 1e-4 * wanted.abs().max()


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("of", "form", "in_16_bits"),
    [
        (("qwen3_5", 0), "fp8-small-blocks", "$"), (("qwen3_5", 0), "fp8", "mtp."),
        (("qwen3_next", 1), "fp8-small-blocks", "mtp.fc"), (("qwen3_5", 1), "channel", "$"),
        (("nemotron", 0), "modelopt", "$"), (("nemotron", 0), "modelopt", "mtp."),
    ],
    ids=str,
)
def test_its_own_mtp_head_drafts(of, form, in_16_bits, tmp_path):
    """The head's tensors may be in 8 bits or, as `modules_to_not_convert` says, not."""
    in_bits = write(lambda folder: save_with_head(folder, *of), tmp_path, form, in_16_bits)
    assert any(name.startswith("mtp.") for name in in_bits) == (in_16_bits != "mtp.")
    drafts, texts = [], []
    for name in ("stored", "plain"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what projects the hidden state
            target, drafter = load_model(tmp_path / name), build(plan_mtp(tmp_path / name))
        share_ends(drafter, target)
        layer = [each for each in drafter.model.layers.modules() if isinstance(each, ScaledLinear)]
        assert bool(layer) == (name == "stored" and in_16_bits != "mtp.")
        watched = watch(drafter, 1, 64, 4)
        decoder = stree.Decoder(target, watched, stree.TokenTree.chain(3), max_length=64)
        out = decoder.generate([7, 3, 0, 1, 5, 5, 2], max_new_tokens=12, ignore_eos=True)
        plain = stree.Decoder(target, max_length=64)
        assert out.tokens == plain.generate(
            [7, 3, 0, 1, 5, 5, 2], max_new_tokens=12, ignore_eos=True
        ).tokens
        drafts.append(torch.stack([logits for *_, logits in watched.drafts]))
        texts.append(out)
    assert texts[0].tokens == texts[1].tokens
    assert texts[0].stats.accepted_per_call == texts[1].stats.accepted_per_call
    torch.testing.assert_close(*drafts, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["fp8-small-blocks", "channel", "modelopt"])
def test_an_eagle_head_in_8_bits_is_that_of_its_numbers(form, tmp_path):
    theirs = eagle_heads.random_target("llama")
    theirs.save_pretrained(tmp_path / "target")
    options = dict(target=theirs, layers=[1, 2], own_embedding=True)
    in_bits = write(partial(eagle_heads.save_head, **options), tmp_path, form)
    assert len(in_bits) > 7
    target = load_config(tmp_path / "target")
    stored, plain = (build(plan_eagle(tmp_path / name, target)) for name in ("stored", "plain"))
    assert any(isinstance(each, ScaledLinear) for each in stored.modules())
    wanted = plain.state_dict()
    for name, weight in without_8_bits(stored).state_dict().items():
        torch.testing.assert_close(weight, wanted[name])
    edit_json(tmp_path / "plain/config.json", quantization_config={"quant_method": "gptq"})
    with pytest.raises(CheckpointRefused, match="quantised to GPTQ, which is not read"):
        plan_eagle(tmp_path / "plain", target)


OTHER_FORMATS = {
    "nvfp4": (CONFIG, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4 (modelopt)"),
    "nvfp4-aside": (
        "hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}, "NVFP4 (modelopt)",
    ),
    "mixed": (
        "hf_quant_config.json",
        {"quantization": {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4"}},
        }},
        "FP8, NVFP4 (modelopt)",
    ),
    "unnamed-aside": ("hf_quant_config.json", {}, "None (modelopt)"),
    "nvfp4-compressed": (
        CONFIG, {**compressed("channel", num_bits=4), "format": "nvfp4-pack-quantized"},
        "nvfp4-pack-quantized (compressed-tensors)",
    ),
    "int8-compressed": (
        CONFIG, {**compressed("channel", type="int"), "format": "int-quantized"},
        "int-quantized (compressed-tensors)",
    ),
    "mxfp4": (CONFIG, {"quant_method": "mxfp4"}, "MXFP4"),
    "e5m2": (CONFIG, {**FP8, "fmt": "e5m2"}, "fp8"),
    "gptq": (CONFIG, {"quant_method": "gptq", "bits": 4, "group_size": 128}, "GPTQ"),
    "gptq-aside": ("quantize_config.json", {"bits": 4, "group_size": 128}, "GPTQ"),
    "awq": (CONFIG, {"quant_method": "awq", "bits": 4}, "AWQ"),
    "awq-aside": ("quant_config.json", {"zero_point": True, "w_bit": 4}, "AWQ"),
    "bitsandbytes": (
        CONFIG, {"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes",
    ),
    "mlx": ("quantization", {"group_size": 64, "bits": 4}, "MLX"),
    "text model's": ("text_config", {CONFIG: {"quant_method": "mxfp4"}}, "MXFP4"),
    "nested": (
        CONFIG, {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}},
        "NVFP4 (modelopt)",
    ),
    "lists": (
        CONFIG, compressed("channel", num_bits=[8]), "float-quantized (compressed-tensors)",
    ),
    "ragged": (
        CONFIG, {"quant_method": "modelopt", "quantized_layers": {"a": "FP8"}}, "None (modelopt)",
    ),
    "unnamed": (CONFIG, {"bits": 4}, "an unnamed format"),
    "no table": (CONFIG, [1], "an unnamed format"),
}


@pytest.mark.parametrize("form", OTHER_FORMATS)
def test_other_formats_are_named_before_any_weight_is_read(form, tmp_path):
    place, table, name = OTHER_FORMATS[form]
    random_reference("llama", 1).config.save_pretrained(tmp_path)  # no weights at all
    config = tmp_path / "config.json"
    if place.endswith(".json"):
        (tmp_path / place).write_text(json.dumps(table))
    else:
        as_mlx = {CONFIG: table} if form == "mlx" else {}  # which writes both keys
        values = {**json.loads(config.read_text()), place: table, **as_mlx}
        config.write_text(json.dumps(values))
    with pytest.raises(CheckpointRefused) as refused:
        load_model(tmp_path)
    line, key = str(refused.value), place.replace("text_config", CONFIG)
    where = place if place.endswith(".json") else f"config.json, by its {key},"
    assert f"{where} says that the weights are quantised to {name}, which is not read" in line
    assert "load the model's checkpoint in FP8, or the one in BF16" in line and "\n" not in line


def _without_a_scale(tensors):
    del tensors["model.layers.0.self_attn.q_proj.weight_scale_inv"]


def _with_another_scale(tensors):
    tensors["model.layers.0.self_attn.q_proj.weight_scale_inv"] = torch.ones(7, 3)


def _with_a_scale_in_bytes(tensors):
    name = "model.layers.0.self_attn.q_proj.weight_scale_inv"
    tensors[name] = torch.full_like(tensors[name], 127, dtype=torch.uint8)


def _with_another_scale_of_a_tied_head(tensors):
    embedding = tensors["model.embed_tokens.weight"].to(FLOAT8)
    for name, shape in (("model.embed_tokens", ()), ("lm_head", (5,))):
        tensors[f"{name}.weight"] = embedding.clone()
        tensors[f"{name}.weight_scale_inv"] = torch.ones(shape)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (_without_a_scale, "has no scale of model.layers.0.self_attn.q_proj.weight, which is in 8"),
        (_with_another_scale, r"weight_scale_inv in .* has shape \(7, 3\), which is neither a s"),
        (_with_a_scale_in_bytes, "weight_scale_inv in .* is stored as U8, wanted one of F64, F32"),
        (_with_another_scale_of_a_tied_head, r"lm_head\..* has shape \(5,\), which is neither a s"),
    ],
)
def test_scales_that_do_not_fit_are_refused(change, line, tmp_path):
    write(random_reference("llama", 2).save_pretrained, tmp_path, "fp8")
    path = tmp_path / "stored" / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointRefused, match=line):
        load_model(tmp_path / "stored")


@pytest.mark.parametrize("size", [[128], [0, 128], "128", [128.0, 128]], ids=str)
def test_blocks_are_two_whole_numbers(size, tmp_path):
    random_reference("llama", 1).config.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    table = {**FP8, "weight_block_size": size}
    config.write_text(json.dumps({**json.loads(config.read_text()), CONFIG: table}))
    with pytest.raises(CheckpointRefused, match=r"config.json, .* has blocks of .*: copy"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "table",
    [
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
        {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"bits": 8}},
    ],
    ids=["modelopt", "compressed-tensors"],
)
@torch.no_grad()
def test_a_cache_in_8_bits_leaves_the_weights_as_they_are(table, tmp_path):
    random_reference("llama", 2).float().save_pretrained(tmp_path)
    tokens = torch.randint(VOCAB, (2, 9))
    wanted, path = load_model(tmp_path)(tokens), tmp_path / "model.safetensors"
    names = ("self_attn.k_proj.k_scale", "mlp.experts.down_proj_input_scale")  # passed over
    scales = {f"model.layers.0.{name}": torch.tensor(1.0) for name in names}
    save_file(load_file(path) | scales, path, metadata={"format": "pt"})
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), CONFIG: table}))
    assert torch.equal(load_model(tmp_path)(tokens), wanted)


@torch.no_grad()
def test_scales_may_be_powers_of_two_in_a_byte(tmp_path):
    """DeepSeek's `scale_fmt: ue8m0`; groups without weights quantise a cache alone."""
    write(random_reference("llama", 2).float().save_pretrained, tmp_path, "channel")
    folder, tokens = tmp_path / "stored", torch.randint(VOCAB, (2, 9))
    path, config = folder / "model.safetensors", folder / "config.json"
    values = json.loads(config.read_text())
    values[CONFIG]["config_groups"]["cache"] = {"weights": None, "targets": ["k_proj"]}
    config.write_text(json.dumps(values))
    outputs = []
    for dtype in (torch.float32, torch.float8_e8m0fnu):
        tensors = {
            name: each.float().log2().round().exp2().to(dtype) if name.endswith("_scale") else each
            for name, each in load_file(path).items()
        }
        save_file(tensors, path, metadata={"format": "pt"})
        outputs.append(load_model(folder)(tokens))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("shape", [(3,), (3, 1, 1)], ids=str)
def test_a_scale_of_each_of_joined_experts(shape):
    values, scale = torch.ones(3, 300, 4).to(FLOAT8), torch.tensor([1.0, 2.0, 4.0]).view(shape)
    assert scale_grid(tuple(values.shape), shape, (128, 128)) == (3, 1, 1)
    wanted = scale.view(3, 1, 1).expand(3, 300, 4)
    assert torch.equal(scaled_tensor(values, scale, (128, 128)).numbers(), wanted)


@torch.no_grad()
def test_what_a_layout_mixes_is_written_out(tmp_path):
    """GPT-NeoX's norms have means and biases, which are parts of the weights here."""
    write(random_reference("gpt_neox", 2).float().save_pretrained, tmp_path, "tensor")
    with pytest.warns(UserWarning, match=r"weights in 8 bits, .* cannot be multiplied so here"):
        model = load_model(tmp_path / "stored")
    tokens = torch.randint(VOCAB, (2, 9))
    wanted = load_model(tmp_path / "plain")(tokens)
    torch.testing.assert_close(model(tokens), wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_on_a_gpu_without_them_they_are_written_out(tmp_path, monkeypatch):
    write(random_reference("qwen3_5", 2).float().save_pretrained, tmp_path, "fp8")
    monkeypatch.setattr(building, "has_products_in_8_bits", lambda device: False)
    with pytest.warns(UserWarning, match="weights in 8 bits, .* will take the memory of float32"):
        model = load_model(tmp_path / "stored")
    assert not model.is_in_8_bits
    tokens = torch.randint(VOCAB, (2, 9))
    assert torch.equal(model(tokens), load_model(tmp_path / "plain")(tokens))


@torch.no_grad()
def test_what_is_stored_in_bf16_is_rounded_if_that_is_asked_for(tmp_path):
    """The head is; weights that are stored in 8 bits keep the scales that they have."""
    write(random_reference("llama", 2).float().save_pretrained, tmp_path, "fp8-small-blocks")
    asked, stored = load_model(tmp_path / "stored", in_8_bits=True), load_model(tmp_path / "stored")
    assert isinstance(asked.head, Scaled) and not isinstance(stored.head, Scaled)
    for name, each in stored.named_modules():
        if isinstance(each, ScaledLinear):
            assert torch.equal(asked.get_submodule(name).scale, each.scale)
