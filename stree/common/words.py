"""Counts with their nouns, sizes, and names of devices and dtypes, as people read them."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

import torch

_CPU_NAME = "CPU: "


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: 1 prompt, 2 prompts."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


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


def device_name(device: torch.device) -> str:
    """Return a GPU's name, or the model of the CPU, as records have it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{_CPU_NAME}{models[0] if models else platform.machine()}"


def is_cpu_name(name: str) -> bool:
    """Return whether a device's name, as `device_name` returns it, is a CPU's."""
    return name.startswith(_CPU_NAME)
