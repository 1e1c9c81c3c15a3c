"""Read how a published checkpoint is quantised; refuse formats that are not read by name.

Formats read, by the names that their libraries give them: `fp8` (DeepSeek's and Qwen's, with a
`weight_scale_inv` for each block of 128 × 128 weights), `compressed-tensors` with fp8 weights (a
`weight_scale` for each output, tensor or block) and `modelopt` in FP8, also where only
hf_quant_config.json says so. All three mean: a weight is its stored value times its scale.
Scales of activations and of keys and values are passed over, because activations are not rounded
here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stree.checkpoints.checked_json import CheckedJson
from stree.checkpoints.plan.stored import StoredTensor
from stree.common.errors import CheckpointRefused

KEYS = ("quantization_config", "compression_config", "quantization")  # the last is MLX's
SIDE_FILES = {  # beside a config.json that does not say it, and who writes them
    "hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq",
}
FLOAT8_FORMAT = "F8_E4M3"  # as safetensors calls it
_SCALES = ("_scale_inv", "_scale")  # behind a weight's name
_OTHER_SCALES = re.compile(r".*\.(input|output|activation|[kqv]|kv|prob)_scale(_inv)?")
_NAMES = {
    "gptq": "GPTQ", "awq": "AWQ", "bitsandbytes": "bitsandbytes", "mxfp4": "MXFP4",
    "nvfp4": "NVFP4", "mlx": "MLX",
}


@dataclass(frozen=True)
class Quantisation:
    """Rows and columns of the blocks of weights that have a scale each, where scales are blocks."""

    block: tuple[int, int] = (128, 128)


def read_quantisation(directory: Path, config: CheckedJson) -> Quantisation | None:
    """Return how a folder's weights are quantised; None for weights that are not.

    Raises `CheckpointRefused` for a format that is not read, with what to load instead.
    """
    for key in KEYS:
        if given := config.get(key):
            told = {"quant_method": "mlx"} if key == "quantization" else given
            return _read(told, f"{config.path}, by its {key},")
    for name, method in SIDE_FILES.items():
        if (path := directory / name).exists():
            values = CheckedJson.load(path)
            own = values.get("quantization", values)
            return _read({"quant_method": method, **own} if isinstance(own, Mapping) else own, path)
    return None


def _read(given: Any, where: object) -> Quantisation:
    table = dict(given) if isinstance(given, Mapping) else {}
    method = str(table.get("quant_method", "an unnamed format"))
    if method == "fp8" and table.get("fmt", "e4m3") == "e4m3":
        return _in_blocks(table.get("weight_block_size"))
    name = _NAMES.get(method, method)
    if method == "compressed-tensors":
        groups = table.get("config_groups")
        weights = [
            each.get("weights") or {} for each in groups.values() if isinstance(each, Mapping)
        ] if isinstance(groups, Mapping) else []
        kinds = {(each.get("num_bits"), each.get("type"), each.get("strategy")) for each in weights}
        if kinds and kinds <= {(8, "float", by) for by in ("tensor", "channel", "block")}:
            blocks = [each["block_structure"] for each in weights if each.get("block_structure")]
            return _in_blocks(blocks[0] if blocks else None)
        name = f"{table.get('format', 'another format')} ({method})"
    elif method == "modelopt":
        layers = table.get("quantized_layers")
        algorithms = {str(table.get("quant_algo"))}
        if isinstance(layers, Mapping) and layers:
            algorithms = {str(each.get("quant_algo")) for each in layers.values()}
        if all(each.startswith("FP8") for each in algorithms):
            return Quantisation()
        name = f"{', '.join(sorted(algorithms))} ({method})"
    raise CheckpointRefused(
        f"{where} says that the weights are quantised to {name:.99}, which is not read: load the "
        "model's checkpoint in FP8, or the one in BF16, with target_dtype float8 for 8 bits"
    )


def _in_blocks(size: Any) -> Quantisation:
    if size is None:
        return Quantisation()
    if not (isinstance(size, list) and len(size) == 2 and all(type(each) is int for each in size)):
        raise CheckpointRefused(f"blocks of {size!r:.99} weights, wanted two whole numbers")
    if min(size) < 1:
        raise CheckpointRefused(f"blocks of {size} weights, wanted at least 1 × 1")
    return Quantisation((size[0], size[1]))


def with_scales(stored: Mapping[str, StoredTensor], where: object) -> dict[str, StoredTensor]:
    """Return stored tensors, those in 8 bits with their scales, and no scale by itself.

    Raises `CheckpointRefused` for a weight without a scale, with `where` as the place.
    """
    found = {}
    for name, tensor in stored.items():
        if tensor.number_format == FLOAT8_FORMAT:
            scales = [stored[name + end] for end in _SCALES if name + end in stored]
            if not scales:
                raise CheckpointRefused(
                    f"{where} has no scale of {name}, which is in 8 bits: copy the checkpoint again"
                )
            tensor = tensor._replace(scale=scales[0])
        found[name] = tensor
    taken = {each.scale.name for each in found.values() if each.scale is not None}
    return {
        name: tensor for name, tensor in found.items()
        if name not in taken and not _OTHER_SCALES.fullmatch(name)
    }


def scale_grid(
    weight: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int]
) -> tuple[int, ...] | None:
    """Return the shape (…, rows, columns) of a weight's scales; None if they do not fit it.

    Args:
        weight: Shape (…, E, D) of the weight.
        scale: Shape of the scales as they are stored: one number, (E,), (…, E, 1), or one a block,
            for ModelOpt (E / 128, 1, D / 128, 1).
        block: Rows and columns of a block.
    """
    if math.prod(scale) == 1:
        return 1, 1
    if len(weight) < 2 or 0 in weight:
        return None
    grid = (*scale, 1) if len(scale) == 1 else scale
    if len(scale) == 4 and len(weight) == 2 and scale[1::2] == (1, 1):
        grid = scale[::2]
    if len(grid) != len(weight) or grid[:-2] != weight[:-2]:
        return None
    (outputs, inputs), (rows, columns) = weight[-2:], grid[-2:]
    by_rows = 1 if rows == outputs else block[0]
    by_columns = inputs if columns == 1 else block[1]
    return grid if (rows, columns) == (-(-outputs // by_rows), -(-inputs // by_columns)) else None
