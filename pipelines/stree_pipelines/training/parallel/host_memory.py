"""Keep freed memory in the process, for trainings on a CPU; copy to a GPU without a wait."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

# glibc's names for the settings of `mallopt`
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 2**30  # most free memory to keep
LARGEST_BYTES = 2**25  # largest block to keep; older glibc takes no more


def keep_freed_memory() -> bool:
    """Keep freed blocks for the next operation, and return True when the C library does.

    By default glibc gives large blocks back at once, and the kernel clears each page of the next
    block anew, some ten thousand a step. Returns False with another C library.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_BYTES) and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the host to the device without waiting for what the device does.

    Copies out of memory that is not pinned wait until the device has done all its earlier work.
    """
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
