"""Load tensors from a `.bin` file, which is a pickle, by PyTorch's loader that runs no code."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import torch
from torch import Tensor


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Return the named tensors of a `.bin` file, on the CPU.

    A file in torch's zip format is mapped: a tensor takes memory when it is read. One in the format
    of before PyTorch 1.6 is read whole. Raises ValueError for a pickle of anything but tensors;
    PyTorch raises what it likes for a damaged one.
    """
    zipped = zipfile.is_zipfile(path)
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:
        if type(error).__name__ != "UnpicklingError":  # which advises to read it with code
            raise
        called = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"calls {called[1]!r}" if called else "holds more than tensors"
        raise ValueError(f"it {reason}: only plain tensors are read") from error
    if not isinstance(tensors, dict):
        raise ValueError(f"it holds a {type(tensors).__name__}, not named tensors")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ValueError(f"{name!r} is a {type(tensor).__name__}, not a tensor")
        if tensor.nbytes > tensor.untyped_storage().nbytes():
            raise ValueError(f"{name} repeats its numbers, wanted them all")
    return tensors
