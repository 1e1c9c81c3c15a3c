"""Free memory and disk of this machine for a command, within the limits of its control groups.

Slurm, containers and systemd limit a job's memory by control groups; a process above its group's
limit is killed, however much the machine has.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from stree.common.control_groups import control_groups, lines_of
from stree.common.errors import UsageError


def free_memory_bytes(on_cuda: bool) -> int:
    """Return the free bytes of the current GPU, or of the host for this process.

    Memory that PyTorch holds on the GPU and does not use counts as free. Raises `UsageError` where
    the host does not say it.
    """
    if on_cuda:
        return torch.cuda.mem_get_info()[0] + _unused_bytes(torch.cuda.current_device())
    lines = lines_of(Path("/proc/meminfo"))
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    if not free:
        raise UsageError("/proc/meminfo says no MemAvailable: use Linux, with /proc mounted")
    return min([*free, *granted_memory_bytes()])


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


# Of a control group's version: files with limit and use, and the statistic of unused file pages
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def granted_memory_bytes(root: Path = Path("/")) -> Iterator[int]:
    """Yield the bytes that each control group of this process leaves of its limit, if it has one.

    File pages that were not used lately do not count as taken: the kernel frees them.
    """
    for version, folder in control_groups("memory", root):
        limit, taken, unused = _FILES[version]
        granted, statistics = lines_of(folder / limit), lines_of(folder / "memory.stat")
        if granted and granted[0].isdigit():  # not "max"
            used = sum(int(each) for each in lines_of(folder / taken))
            freed = sum(int(line.split()[1]) for line in statistics if line.split()[0] == unused)
            yield max(0, int(granted[0]) - max(0, used - freed))


def free_disk_bytes(path: str | os.PathLike[str]) -> int:
    """Return the free bytes of the disk of `path`, which need not exist yet."""
    absolute = Path(path).absolute()
    folder = next(each for each in (absolute, *absolute.parents) if each.is_dir())
    return shutil.disk_usage(folder).free

