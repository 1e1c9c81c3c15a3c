"""Read tensors of files that `torch.save` wrote, without running code that they name."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_LETTERS = {"float": "F", "bfloat": "BF"}  # of formats in safetensors' words


def format_of(dtype: torch.dtype) -> str:
    """Return safetensors' word for a dtype; all but floating point numbers are taken for I."""
    kind = re.sub(r"\d.*", "", str(dtype).removeprefix("torch."))
    return f"{_LETTERS.get(kind, 'I')}{dtype.itemsize * 8}"


def load_pickle(path: Path) -> dict[str, Tensor]:
    """Return the named tensors of a `.bin` file, on the CPU.

    A file in torch's zip format is mapped: a tensor takes memory when it is read. One in the format
    of before PyTorch 1.6 is read whole. Raises ValueError for a pickle of anything but tensors;
    PyTorch raises what it likes for a damaged one.
    """
    tensors = load_without_code(path, mmap=zipfile.is_zipfile(path))
    if not isinstance(tensors, dict):
        raise ValueError(f"it holds a {type(tensors).__name__}, not named tensors")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ValueError(f"{name!r} is a {type(tensor).__name__}, not a tensor")
        if tensor.nbytes > tensor.untyped_storage().nbytes():
            raise ValueError(f"{name} repeats its numbers, wanted them all")
    return tensors


def load_without_code(path: Path, mmap: bool) -> Any:
    """Return the tensors and plain values of a file of `torch.save`, on the CPU.

    mmap: map the file, so that a tensor takes memory when it is read. Raises ValueError for Python
    objects that are neither; PyTorch raises what it likes for a damaged file.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:
        if type(error).__name__ != "UnpicklingError":  # which advises to read it with code
            raise
        called = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"calls {called[1]!r}" if called else "holds more than tensors"
        raise ValueError(f"it {reason}: only plain tensors are read") from error
