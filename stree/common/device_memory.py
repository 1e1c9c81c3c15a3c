"""Free memory and disk of this machine for a command, within the limits of its control groups.

Slurm, containers and systemd limit a job's memory by control groups (cgroups, version 1 or 2); a
process above its group's limit is killed, however much the machine has.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch


def free_memory_bytes(on_cuda: bool) -> int:
    """Return the free bytes of the current GPU, or of the host for this process.

    Memory that PyTorch holds on the GPU and does not use counts as free.
    """
    if on_cuda:
        return torch.cuda.mem_get_info()[0] + _unused_bytes(torch.cuda.current_device())
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    return min([free, *granted_memory_bytes()])


def _unused_bytes(device: int) -> int:
    """Return the unused bytes that PyTorch's allocator may use for any tensor.

    Segments of CUDA graphs serve no other tensors, and do not count.
    """
    if torch.cuda.get_allocator_backend() != "native":  # others cannot list what they hold
        return 0
    return sum(
        each["total_size"] - each["active_size"]
        for each in torch.cuda.memory_snapshot()
        if each["device"] == device and each["segment_pool_id"] == (0, 0)
    )


def granted_memory_bytes(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Iterator[int]:
    """Yield the bytes that each control group of this process leaves of its limit, if it has one.

    File pages that were not used lately do not count as taken: the kernel frees them.
    """
    lines = membership.read_text(encoding="utf-8").splitlines() if membership.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, limit, taken, old = root, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, old = root / "memory", "total_inactive_file"
            limit, taken = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            granted = _number(folder / limit)
            if granted is not None:
                used = (_number(folder / taken) or 0) - _statistic(folder / "memory.stat", old)
                yield max(0, granted - max(0, used))
            if folder == top:
                break


def free_disk_bytes(path: str | os.PathLike[str]) -> int:
    """Return the free bytes of the disk of `path`, which need not exist yet."""
    absolute = Path(path).absolute()
    folder = next(each for each in (absolute, *absolute.parents) if each.is_dir())
    return shutil.disk_usage(folder).free


def _number(file: Path) -> int | None:
    """Read a number; None for "max" or no file (a container may not see its group's folder)."""
    try:
        text = file.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _statistic(file: Path, name: str) -> int:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)
