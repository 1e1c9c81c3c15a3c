"""Check a benchmark's options, and measure only when its tests are green."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from stree.common.errors import (
    CannotWrite,
    InvariantBroken,
    UsageError,
    naming_what_does_not_fit,
)
from stree.trees.token_tree import MAX_NODES
from stree_kernels import ops
from stree_lab.benches.timing import Row, write_rows
from stree_pipelines.resources.disk import require_writable

ROOT = Path(__file__).resolve().parents[3]
NUM_WORKERS = 4  # processes that run the tests


def device_of(name: str) -> torch.device:
    """Return the device of that name, present or not. Raises UsageError for what cannot be
    timed."""
    with suppress(RuntimeError):
        device = torch.device(name)
        if device.type in ("cpu", "cuda"):
            return device
    raise UsageError(f"--device is {name!r}, wanted cpu, cuda or cuda:N")


def require_numbers(options: Any, *names: str) -> None:
    """Raise UsageError for an option without numbers, with one below 1, or with too many nodes."""
    for name in names:
        value = getattr(options, name)
        numbers = value if isinstance(value, list) else [value]
        most = MAX_NODES if name.endswith("nodes") else None
        if not numbers or min(numbers) < 1 or (most and max(numbers) > most):
            wanted = f"numbers from 1 to {most}" if most else "numbers from 1 on"
            raise UsageError(f"--{name}: wanted {wanted}, got {value}")


def require_some(name: str, given: Collection[str], known: Collection[str]) -> None:
    """Raise UsageError unless an option has names, known ones only."""
    if not given or set(given) - set(known):
        raise UsageError(f"--{name}: wanted some of {', '.join(known)}, got {', '.join(given)}")


def require_results_file(path: str) -> None:
    """Raise CannotWrite when results could not be written there."""
    if Path(path).is_dir():
        raise CannotWrite(f"{path} is a folder: name a file in it")
    require_writable(Path(path).parent)


def measure_when_green(
    out: str, rows: Iterable[Row], device: torch.device, tests: Iterable[str], less: str,
    num_devices: int = 1,
) -> None:
    """Run the tests, then measure and write the rows, which must be lazy.

    Args:
        tests: files and folders in tests/.
        less: settings that need less memory, for the error when there is too little.

    Raises UsageError without the devices, or when there is nothing to measure; InvariantBroken when
    a test fails.
    """
    if device.type == "cuda" and torch.cuda.device_count() < num_devices:
        raise UsageError(
            f"{num_devices} CUDA devices are wanted, there are {torch.cuda.device_count()}; "
            "--device cpu --shape tiny tries the script"
        )
    require_green(tests)
    with ops.current(device), naming_what_does_not_fit(less):
        if not write_rows(out, rows, device):
            raise UsageError("no measurement applies to these shapes: give others")


def require_green(tests: Iterable[str]) -> None:
    """Run test files of tests/. Raises InvariantBroken when one fails: then nothing is measured."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", *(f"tests/{each}" for each in tests)]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(NUM_WORKERS)]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        last = answer.stdout.strip().splitlines()[-3:]
        raise InvariantBroken("the tests are red, so nothing is measured: " + " | ".join(last))
