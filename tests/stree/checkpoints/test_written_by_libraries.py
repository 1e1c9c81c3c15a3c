"""Checkpoints in 8 bits as compressed-tensors and ModelOpt write them: the same numbers here.

The libraries are not in the environment; .ci/run installs them beside it.
"""

import json
import shutil
import warnings

import pytest
import torch
from families import VOCAB, random_reference
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from stree.checkpoints.load_save import load_model
from stree.models.layers.packed_linear import ScaledLinear

TOKENS = (torch.arange(18) * 7 % VOCAB).view(2, 9)
CONFIG = "quantization_config"


def loaded(folder):
    """Load a model, most of whose products stay in 8 bits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what a layout mixes
        model = load_model(folder)
    assert sum(isinstance(each, ScaledLinear) for each in model.modules()) >= 8
    return model


def require_close(got, wanted):
    assert (got - wanted).abs().max() < 1e-4 * wanted.abs().max()


def scales_of(weight, shape):
    """Return e4m3's scale of each of the blocks, of which there are `shape`."""
    outputs, inputs = (
        torch.arange(size) // -(-size // count)
        for size, count in zip(weight.shape, shape, strict=True)
    )
    block = (outputs[:, None] * shape[1] + inputs).flatten()
    largest = torch.zeros(shape.numel()).scatter_reduce_(0, block, weight.abs().flatten(), "amax")
    return largest.view(shape) / 448


@pytest.mark.parametrize("strategy", ["channel", "tensor", "block"])
@pytest.mark.parametrize("family", ["llama", "falcon", "nemotron", "qwen3_5", "zamba", "jamba"])
@torch.no_grad()
def test_compressed_tensors(family, strategy, tmp_path):
    """The library's own decompression is the oracle."""
    library = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors import ModelCompressor

    model = random_reference(family, 2).float()
    blocks = {"block_structure": [4, 4]} if strategy == "block" else {}
    weights = library.QuantizationArgs(num_bits=8, type="float", strategy=strategy, **blocks)
    scheme = library.QuantizationScheme(targets=["Linear"], weights=weights)
    config = library.QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"])
    library.apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            scale = module.weight_scale.data
            shape = scale.shape if scale.ndim == 2 else torch.Size((1, 1))
            scale.copy_(scales_of(module.weight.data, shape).view(scale.shape))
            module.quantization_status = library.QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(str(tmp_path))
    compressor.decompress_model(model)
    require_close(loaded(tmp_path)(TOKENS), model(TOKENS).logits)


@pytest.mark.parametrize("family", ["llama", "falcon", "nemotron", "qwen3_next", "zamba"])
@pytest.mark.parametrize("aside", [False, True], ids=["in config.json", "aside"])
@torch.no_grad()
def test_modelopt(family, aside, tmp_path):
    """transformers' model of the stored values times their scales is the oracle."""
    quantization = pytest.importorskip("modelopt.torch.quantization")
    from modelopt.torch.export import export_hf_checkpoint

    model = random_reference(family, 2).bfloat16()
    model.config.architectures = [type(model).__name__]
    quantization.quantize(model, quantization.FP8_DEFAULT_CFG, lambda each: each(TOKENS))
    stored, plain = tmp_path / "stored", tmp_path / "plain"
    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=stored)
    tensors = load_file(stored / "model.safetensors")
    config = json.loads((stored / "config.json").read_text())
    shutil.copytree(stored, plain)
    if aside:
        (stored / "config.json").write_text(json.dumps({**config, CONFIG: None}))
    else:
        (stored / "hf_quant_config.json").unlink()
    numbers = {
        name: each.float() * tensors.get(f"{name}_scale", torch.ones(()))
        for name, each in tensors.items() if not name.endswith("_scale")
    }
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    (plain / "config.json").write_text(json.dumps({**config, CONFIG: None}))
    oracle = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    require_close(loaded(stored)(TOKENS), oracle.eval()(TOKENS).logits)
