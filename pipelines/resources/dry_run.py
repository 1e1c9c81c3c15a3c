"""Run --dry_run: refuse what would be refused, print a command's resources, write nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from stree.common.device_memory import free_disk_bytes, free_memory_bytes
from stree.common.errors import CannotWrite, OutOfMemory
from stree.common.words import counted, size
from stree.models.config import HybridConfig
from stree_pipelines.resources.estimates import itemised, num_parameters


def require_writable(path: str | os.PathLike[str]) -> None:
    """Raise CannotWrite when a folder `path` could not be made or filled."""
    absolute = Path(path).absolute()
    existing = next(each for each in (absolute, *absolute.parents) if os.path.lexists(each))
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise CannotWrite(f"cannot write in {path} ({existing} forbids it): choose another folder")


def require_disk(path: str | os.PathLike[str], parts: Mapping[str, int]) -> str:
    """Return a line about the disk. Raises CannotWrite when it is too small."""
    wanted, free = sum(parts.values()), free_disk_bytes(path)
    if wanted > free:
        raise CannotWrite(
            f"{path} needs {itemised(parts)}, {size(free)} are free: free some or choose another "
            "folder"
        )
    return f"disk: {itemised(parts)}; {size(free)} are free at {path}"


class MemoryEstimate:
    """Estimated bytes of a command by part, compared with the free memory."""

    def __init__(self, parts: Mapping[str, int], on_cuda: bool) -> None:
        self.parts, self.kind = parts, "GPU memory" if on_cuda else "memory"
        is_here = torch.cuda.is_available() or not on_cuda
        self.free = free_memory_bytes(on_cuda) if is_here else None

    @property
    def too_little(self) -> bool:
        return self.free is not None and sum(self.parts.values()) > self.free

    def __str__(self) -> str:
        if self.free is None:
            return f"memory: about {itemised(self.parts)} on a GPU, which is not here"
        judged = " — TOO LITTLE" if self.too_little else ""
        return f"{self.kind}: about {itemised(self.parts)}; {size(self.free)} are free{judged}"

    def require(self, remedy: str) -> None:
        """Raise OutOfMemory when there is too little; `remedy` names smaller settings."""
        if self.free is not None and self.too_little:
            raise OutOfMemory(
                f"about {size(sum(self.parts.values()))} of {self.kind} are needed, "
                f"{size(self.free)} are free: {remedy}"
            )


def model_line(name: str, config: HybridConfig) -> str:
    return (
        f"{name}: {num_parameters(config):,} parameters, {counted(config.num_layers, 'layer')} "
        f"({len(config.attn_layers)} attention), width {config.d_model}, vocabulary "
        f"{config.vocab_size:,}"
    )


def config_lines(config: Mapping[str, Any]) -> str:
    plain = json.loads(json.dumps(config))  # tuples are lists in YAML
    return "config:\n" + yaml.safe_dump(plain, sort_keys=False).rstrip()
