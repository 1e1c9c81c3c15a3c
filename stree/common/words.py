"""Words for people: counts with their nouns, sizes, names of devices, dtypes and models."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_CPU_NAME = "CPU: "


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: 1 prompt, 2 prompts, 2 processes."""
    plural = "es" if noun.endswith(("s", "ch", "x")) else "s"
    return f"{count:,} {noun}{'' if count == 1 else plural}"


def size(num_bytes: int) -> str:
    """Return a size in bytes for people: 1.5 GiB."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{num_bytes} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def ends_of(eos_token_ids: Sequence[int]) -> str:
    """Return which tokens end an answer: answers end at 2, 7."""
    return f"answers end at {', '.join(map(str, eos_token_ids)) or 'no token'}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype: bfloat16."""
    return str(dtype).removeprefix("torch.")


def held_dtype(model: Any) -> str:
    """Return the name of the dtype of a model's weights, float8 if its products' are in 8 bits."""
    return "float8" if getattr(model, "is_in_8_bits", False) else dtype_name(model.dtype)


def device_name(device: torch.device) -> str:
    """Return a GPU's name, or the model of the CPU, as records have it."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{_CPU_NAME}{models[0] if models else platform.machine()}"


def is_cpu_name(name: str) -> bool:
    """Return whether a device's name, as `device_name` returns it, is a CPU's."""
    return name.startswith(_CPU_NAME)


def described(target: Any, drafter: Any, tree_policy: Any) -> str:
    """Return the models' sizes with their tree, or with the trees to choose among."""
    if drafter is None:
        return f"the target alone, {_model_size(target)}"
    model = drafter if hasattr(drafter, "config") else getattr(drafter, "model", None) or drafter
    tree = f"tree {tree_policy.name}"
    if len(tree_policy.trees) == 1:
        tree += f" of {tree_policy.largest.num_nodes} nodes"
    return f"{_model_size(target)}, drafter {_model_size(model)}, {tree}"


def placed(model: Any) -> str:
    """Return a model's dtype and device."""
    return f"{dtype_name(model.dtype)} on {model.device}"


def _model_size(model: Any) -> str:
    """Return the size of a model, or the type of any other object."""
    if not hasattr(model, "parameters"):
        return type(model).__name__
    num_parameters = sum(each.numel() for each in model.parameters())
    layers = counted(model.config.num_layers, "layer")
    return f"{num_parameters / 1e6:.1f} M parameters in {layers}"
