"""Tensors from a `.bin` file, which is a pickle: only what plain state dicts are made of is read.

`torch.load(weights_only=True)` runs no code, but a few bytes still make it allocate or hash without
end (a tuple of tuples that are all the same one, an array of 10^12 zeros). So the pickle's
instructions are looked over first, without doing what they say.
"""

from __future__ import annotations

import pickletools
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

_GLOBALS = re.compile(
    r"collections OrderedDict|torch \w+Storage|torch\.storage \w+Storage|"
    r"torch\._utils _rebuild_(tensor_v2|parameter)|torch\.nn\.parameter Parameter"
)
_PUT, _GET = ("BINPUT", "LONG_BINPUT"), ("BINGET", "LONG_BINGET")
_REPEATING = ("DUP", "MEMOIZE", "PUT", "GET")  # not written by torch.save
_MOST_IN_A_TUPLE = 1000  # a shape has a handful
_PICKLES_BEFORE_ZIP = 5  # magic number, protocol, machine, content, names of the storages


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The named tensors of a `.bin` file, on the CPU and mapped rather than read where it can be.

    Raises ValueError for a pickle that is anything else; PyTorch raises what it likes for a
    damaged one.
    """
    with open(path, "rb") as file:
        zipped = file.read(4) == b"PK\x03\x04"
    if zipped:
        with zipfile.ZipFile(path) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("it is compressed, which torch.save never does")
        # PyTorch's own view of the archive: two readers can be told two things by one file.
        _require_plain(torch._C.PyTorchFileReader(str(path)).get_record("data.pkl"))
    else:
        with open(path, "rb") as file:
            for _ in range(_PICKLES_BEFORE_ZIP):
                _require_plain(file)
    tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    if not isinstance(tensors, dict):
        raise ValueError(f"it holds a {type(tensors).__name__}, not named tensors")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ValueError(f"{name!r} is a {type(tensor).__name__}, not a tensor")
        if tensor.nbytes > tensor.untyped_storage().nbytes():
            raise ValueError(f"{name} repeats its numbers, wanted them all")
    return tensors


def _require_plain(content: bytes | BinaryIO) -> None:
    """Follow a pickle with nothing on the stack but how many values each tuple stands for."""
    stack: list[int | None] = []  # None is a mark
    memo: dict[int, int | None] = {}
    argument: Any
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name in _PUT:
            memo[argument] = stack[-1]
        elif opcode.name in _GET:
            stack.append(memo[argument])
        elif opcode.name in _REPEATING or opcode.name == "STACK_GLOBAL":
            raise ValueError(f"it has the instruction {opcode.name}, which torch.save never writes")
        elif opcode.name == "GLOBAL" and not _GLOBALS.fullmatch(argument):
            raise ValueError(f"it calls {argument!r}: only plain tensors are read")
        else:
            popped = _pop(stack, opcode.stack_before)
            is_tuple = opcode.name.startswith("TUPLE")
            weight = 1 + sum(popped) if is_tuple else 1
            if is_tuple and weight > _MOST_IN_A_TUPLE:
                raise ValueError(f"it has a tuple of more than {_MOST_IN_A_TUPLE} values")
            stack += [None if after.name == "mark" else weight for after in opcode.stack_after]


def _pop(stack: list[int | None], wanted: Iterable[Any]) -> list[int]:
    """Take what an instruction takes; a slice is all down to the last mark, which goes too."""
    popped = []
    for each in reversed([item for item in wanted if item.name != "mark"]):
        if each.name != "stackslice":
            popped.append(stack.pop() or 1)
            continue
        while (value := stack.pop()) is not None:
            popped.append(value)
    return popped
