"""Check a benchmark's options before anything runs, also in a dry run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch

from stree.common.errors import CannotWrite, UsageError
from stree.trees.token_tree import MAX_NODES
from stree_pipelines.resources.dry_run import require_writable


def device_of(name: str) -> torch.device:
    """Return the device of that name, present or not. Raises UsageError for what cannot be
    timed."""
    with suppress(RuntimeError):
        device = torch.device(name)
        if device.type in ("cpu", "cuda"):
            return device
    raise UsageError(f"--device is {name!r}, wanted cpu, cuda or cuda:N")


def require_numbers(**options: int | list[int]) -> None:
    """Raise UsageError for an option without numbers, with one below 1, or with too many nodes."""
    for name, value in options.items():
        numbers = value if isinstance(value, list) else [value]
        most = MAX_NODES if name.endswith("nodes") else None
        if not numbers or min(numbers) < 1 or (most and max(numbers) > most):
            wanted = f"numbers from 1 to {most}" if most else "numbers from 1 on"
            raise UsageError(f"--{name}: wanted {wanted}, got {value}")


def require_results_file(path: str) -> None:
    """Raise CannotWrite when results could not be written there."""
    if Path(path).is_dir():
        raise CannotWrite(f"{path} is a folder: name a file in it")
    require_writable(Path(path).parent)
