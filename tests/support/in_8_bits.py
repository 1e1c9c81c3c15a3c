"""Checkpoints in 8 bits, laid out as the libraries that publish them do."""

from __future__ import annotations

import json
import re
import shutil

import torch
from safetensors.torch import load_file, save_file

FLOAT8 = torch.float8_e4m3fn
KEPT_AS_THEY_ARE = re.compile(
    r".*(embed|lm_head|norm|conv|\.gate\.|gate\.weight|router|shared_expert_gate|adapter|in_proj_ba"
    r"|x_proj|dt_proj).*"
)
CONFIG = "quantization_config"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}


def compressed(strategy: str, **more: object) -> dict:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **more}
    group = {"weights": weights, "targets": ["Linear"], "input_activations": {"dynamic": True}}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": group}, "quantization_status": "compressed",
    }


MODELOPT = {
    "producer": {"name": "modelopt", "version": "0.40"},
    "quantization": {
        "quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"],
    },
}
# Where the format is said, its table, and the block, None for an output, 0 for the whole weight
FORMATS = {
    "fp8": (CONFIG, {**FP8, "weight_block_size": [128, 128]}, (128, 128)),
    "fp8-small-blocks": (CONFIG, {**FP8, "weight_block_size": [8, 4]}, (8, 4)),
    "fp8-twos": (CONFIG, {**FP8, "weight_block_size": [2, 2]}, (2, 2)),
    "channel": (CONFIG, compressed("channel"), None),
    "tensor": (CONFIG, compressed("tensor"), 0),
    "block": (CONFIG, compressed("block", block_structure=[4, 8]), (4, 8)),
    "modelopt": ("hf_quant_config.json", MODELOPT, 0),
    "modelopt-in-config": (CONFIG, {"quant_method": "modelopt", "quant_algo": "FP8"}, 0),
}


def in_8_bits(weight: torch.Tensor, block: tuple | int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and scales of a weight, by independent code: block by block."""
    if weight.ndim == 3:  # experts'
        pairs = zip(*(in_8_bits(each, block) for each in weight), strict=True)
        values, scales = map(torch.stack, pairs)
        return values, scales
    outputs, inputs = weight.shape
    if not isinstance(block, tuple):
        block = (1, inputs) if block is None else (outputs, inputs)
    tall, wide = -(-outputs // block[0]), -(-inputs // block[1])
    scale, values = torch.zeros(tall, wide), torch.zeros(outputs, inputs)
    for row in range(tall):
        for column in range(wide):
            area = (
                slice(row * block[0], (row + 1) * block[0]),
                slice(column * block[1], (column + 1) * block[1]),
            )
            scale[row, column] = (weight[area].abs().max() / 448).to(torch.bfloat16)
            values[area] = weight[area] / scale[row, column]
    return values.clamp(-448, 448).to(FLOAT8), scale


def write(save, folder, form: str, in_16_bits: str = "$") -> set[str]:
    """Save a checkpoint in a format, and its numbers next to it; return the names in 8 bits.

    `save` writes it in 16 bits to a folder, and so stay the names that begin with `in_16_bits`.
    """
    place, table, block = FORMATS[form]
    save(folder / "stored")
    shutil.copytree(folder / "stored", folder / "plain")
    plain, stored, in_bits = load_file(folder / "stored" / "model.safetensors"), {}, set()
    for name, weight in list(plain.items()):
        is_weight = weight.ndim in (2, 3) and name.endswith(".weight")
        if not is_weight or KEPT_AS_THEY_ARE.fullmatch(name) or name.startswith(in_16_bits):
            stored[name] = weight
            continue
        in_bits.add(name)
        stored[name], scale = in_8_bits(weight, block)
        spread = scale
        for dim, size in enumerate(weight.shape[-2:], start=-2):
            span = block[dim] if isinstance(block, tuple) else size // scale.shape[dim]
            spread = spread.repeat_interleave(span, dim)
        plain[name] = stored[name].float() * spread[..., : weight.shape[-2], : weight.shape[-1]]
        if form.startswith("fp8"):
            stored[f"{name}_scale_inv"] = scale.to(torch.bfloat16)
        else:
            stored[f"{name}_scale"] = scale.reshape(()) if "modelopt" in form else (
                scale.reshape(1) if form == "tensor" else scale
            )
        if "modelopt" in form:
            stored[f"{name.removesuffix('weight')}input_scale"] = torch.tensor(0.02)
            if name.endswith("k_proj.weight"):
                stored[f"{name.removesuffix('weight')}k_scale"] = torch.tensor(1.0)
    save_file(plain, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, folder / "stored" / "model.safetensors", metadata={"format": "pt"})
    config = folder / "stored" / "config.json"
    if place == CONFIG:
        config.write_text(json.dumps({**json.loads(config.read_text()), CONFIG: table}))
    else:
        (folder / "stored" / place).write_text(json.dumps(table))
    return in_bits
