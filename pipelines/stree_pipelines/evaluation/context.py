"""Find an evaluation's processes and device, and describe its code and machine."""

from __future__ import annotations

import functools
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from stree.checkpoints.checked_json import LARGEST
from stree.common.errors import CheckpointRefused, UsageError
from stree.common.plain_data import read_json
from stree.common.words import device_name
from stree.loading import find_device
from stree_pipelines.console.command_line import typed_command
from stree_pipelines.evaluation.records import Environment
from stree_pipelines.resources.folder_locks import LOCK_NAME, locked

PACKAGES = ("torch", "transformers", "accelerate", "numpy", "triton", "stree-spec")
# One worker may have much longer answers than another; waiting for it is no failure.
PATIENCE = timedelta(hours=12)

T = TypeVar("T")
Item = TypeVar("Item")


@dataclass(frozen=True)
class Workers:
    """Processes that share the prompts; worker `rank` of `count` takes each count-th one."""

    rank: int = 0
    count: int = 1

    @classmethod
    def start(cls, device: str = "auto") -> Workers:
        """Join the processes of `accelerate launch`, `torchrun` or a running training.

        Without any, this process is alone.
        """
        if not dist.is_initialized():
            from accelerate import PartialState

            PartialState(cpu=pick_device(device).type == "cpu", timeout=PATIENCE)
        if not dist.is_initialized():
            return cls()
        return cls(dist.get_rank(), dist.get_world_size())

    @classmethod
    def unconnected(cls) -> Workers:
        """Return this process's number and their count, as its launcher says, without connecting.

        The launcher is accelerate, torchrun or srun; for work in which processes need not meet.
        """
        for rank, count in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
            if rank in os.environ and count in os.environ:
                return cls(int(os.environ[rank]), int(os.environ[count]))
        return cls()

    @contextmanager
    def locked(self, folder: Path, on_wait: Callable[[], None]) -> Iterator[None]:
        """Keep other commands out of a folder that these workers fill, each with its own part.

        Waits for them after calling `on_wait()`. The same worker of two launches counts as two.
        """
        with ExitStack() as stack:
            stack.enter_context(locked(folder / LOCK_NAME, on_wait, shared=self.count > 1))
            if self.count > 1:
                stack.enter_context(locked(folder / f"{LOCK_NAME}-{self.rank}", on_wait))
            yield

    def leave(self) -> None:
        """Disconnect at the end of a command, together with the others.

        A worker that just exits may bring another down that still holds a connection to it.
        """
        if self.count > 1:
            self.gather(None)
            dist.destroy_process_group()

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """Return this worker's items; every item goes to exactly one worker."""
        return items[self.rank :: self.count]

    def gather(self, item: T) -> list[T]:
        """Return all workers' items, by rank, on every worker; waits for all."""
        if self.count == 1:
            return [item]
        gathered: list[Any] = [None] * self.count
        dist.all_gather_object(gathered, item)
        return gathered


def pick_device(device: str) -> torch.device:
    """Return the device of that name; `auto` is this process's GPU, or the CPU without one."""
    if device == "cpu" or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true"):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if device == "auto":
            return torch.device("cpu")
        raise UsageError(f"device is {device!r} but PyTorch sees no GPU: use cpu or auto")
    if device in ("auto", "cuda"):
        index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        return torch.device("cuda", index)
    return find_device(device)


def checkpoint_step(directory: str | os.PathLike[str]) -> int | None:
    """Return the distillation step of an export, from provenance.json or a name step-N, or None."""
    directory = Path(directory)
    provenance = directory / "provenance.json"
    if provenance.exists():
        try:
            step = read_json(provenance).get("step")
        except (OSError, ValueError, AttributeError) as error:
            raise CheckpointRefused(f"{provenance} cannot be read: {error}") from error
        if isinstance(step, int) and 0 <= step <= LARGEST:
            return step
        if step is not None:
            raise CheckpointRefused(f"{provenance} has step {step!r}, wanted a number of steps")
    number = re.fullmatch(r"step-([0-9]{1,9})", directory.name)
    return int(number[1]) if number else None


def describe_environment(
    device: torch.device, dtypes: dict[str, str], num_processes: int
) -> Environment:
    """Describe the machine and the code, to compare two rows by."""
    return Environment(
        git_sha=_git_sha(), device=device_name(device), dtypes=dtypes, versions=dict(_versions()),
        command_line=typed_command(), num_processes=num_processes,
        num_threads=torch.get_num_threads(),
    )


def describe_code() -> dict[str, Any]:
    """Return commit and versions of the running code: {"git_sha", "versions"}."""
    environment = describe_environment(torch.device("cpu"), {}, 1)
    versions = {**environment.versions, "lightning": metadata.version("lightning")}
    return {"git_sha": environment.git_sha, "versions": versions}


@functools.cache
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
    return versions


@functools.cache
def _git_sha() -> str | None:
    """Return the commit of the running code, `-dirty` when it was changed; None when unknown.

    Looked up once: later changes are no part of the running code. Outside a clone (a copied tree, a
    container) the environment's STREE_GIT_SHA gives it.
    """
    here = str(Path(__file__).resolve().parent)
    command = ["git", "-C", here, "describe", "--always", "--abbrev=40", "--dirty"]
    command += ["--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return os.environ.get("STREE_GIT_SHA")
    return answer.stdout.strip() if answer.returncode == 0 else os.environ.get("STREE_GIT_SHA")
