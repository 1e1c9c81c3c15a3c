"""Read how a published checkpoint is quantised; refuse formats that are not read by name.

Formats read, by the names that their libraries give them: `fp8` (DeepSeek's and Qwen's, with a
`weight_scale_inv` for each block of 128 × 128 weights), `compressed-tensors` with fp8 weights (a
`weight_scale` for each output, tensor or block) and `modelopt` in FP8, also where only
hf_quant_config.json says so. All three mean: a weight is its stored value times its scale.
Scales of activations and of keys and values are passed over, because activations are not rounded
here: a checkpoint with no others is not quantised.
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

KEYS = ("quantization", "quantization_config", "compression_config")  # MLX writes the second, too
SIDE_FILES = {  # beside a config.json that does not say it, and who writes them
    "hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq",
}
FLOAT8_FORMAT = "F8_E4M3"  # as safetensors calls it
_SCALES = ("_scale_inv", "_scale")  # behind a weight's name
_OTHER_SCALES = re.compile(
    r".*(\.([kqv]|kv|prob)|[._](input|output|activation))_scale(_inv)?"  # of fused experts: _input
)
_STRATEGIES = ("tensor", "channel", "block")  # of compressed-tensors
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
        if given := config.get(key) or _table(config.get("text_config")).get(key):
            told = {"quant_method": "mlx"} if key == "quantization" else given
            return _read(told, f"{config.path}, by its {key},")
    for name, method in SIDE_FILES.items():
        if (path := directory / name).exists():
            return _read({"quant_method": method, **CheckedJson.load(path)}, path)
    return None


def _table(given: Any) -> Mapping[str, Any]:
    """Return a table of a config; an empty one in the place of anything else."""
    return given if isinstance(given, Mapping) else {}


def _read(given: Any, where: object) -> Quantisation:
    table = {**_table(given), **_table(_table(given).get("quantization"))}  # the latter: ModelOpt's
    method = str(table.get("quant_method", "an unnamed format"))
    if method == "fp8" and table.get("fmt", "e4m3") == "e4m3":
        return _in_blocks(table.get("weight_block_size"), where)
    name = _NAMES.get(method, method)
    if method == "compressed-tensors":
        groups = map(_table, _table(table.get("config_groups")).values())
        weights = [_table(each.get("weights", "?")) for each in groups if each.get("weights", "?")]
        kinds = [[each.get(key) for key in ("num_bits", "type", "strategy")] for each in weights]
        is_read = all(each in ([8, "float", by] for by in _STRATEGIES) for each in kinds)
        if is_read and (kinds or table.get("kv_cache_scheme")):
            blocks = [each["block_structure"] for each in weights if each.get("block_structure")]
            return _in_blocks(blocks[0] if blocks else None, where)
        name = f"{table.get('format', 'another format')} ({method})"
    elif method == "modelopt":
        layers = _table(table.get("quantized_layers")).values()
        algorithms = sorted({str(_table(each).get("quant_algo")) for each in layers or [table]})
        has_cache = any(map(table.get, ("kv_cache_quant_algo", "kv_cache_scheme")))
        is_cache_alone = has_cache and algorithms == ["None"]
        if is_cache_alone or all(each.startswith("FP8") for each in algorithms):
            return Quantisation()
        name = f"{', '.join(algorithms)} ({method})"
    raise CheckpointRefused(
        f"{where} says that the weights are quantised to {name:.99}, which is not read: load the "
        "model's checkpoint in FP8, or the one in BF16, with target_dtype float8 for 8 bits"
    )


def _in_blocks(size: Any, where: object) -> Quantisation:
    if size is None:
        return Quantisation()
    is_list = isinstance(size, list) and len(size) == 2
    if not (is_list and all(type(each) is int and each >= 1 for each in size)):
        raise CheckpointRefused(
            f"{where} has blocks of {size!r:.99} weights, wanted two whole numbers of at least 1: "
            "copy the checkpoint again"
        )
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
        scale: Shape of the scales as they are stored: one number, one for each matrix (N,) or
            (N, 1, 1), (E,), (…, E, 1), or one a block, for ModelOpt (E / 128, 1, D / 128, 1).
        block: Rows and columns of a block.
    """
    if math.prod(scale) == 1:
        return 1, 1
    if len(weight) < 2 or 0 in weight:
        return None
    grid = (*scale, *(1,) * (len(weight) - 1)) if len(scale) == 1 else scale
    if len(scale) == 4 and len(weight) == 2 and scale[1::2] == (1, 1):
        grid = scale[::2]
    if len(grid) != len(weight) or grid[:-2] != weight[:-2]:
        return None
    (outputs, inputs), (rows, columns) = weight[-2:], grid[-2:]
    if (rows, columns) == (1, 1):
        return grid
    by_rows = 1 if rows == outputs else block[0]
    by_columns = inputs if columns == 1 else block[1]
    return grid if (rows, columns) == (-(-outputs // by_rows), -(-inputs // by_columns)) else None
