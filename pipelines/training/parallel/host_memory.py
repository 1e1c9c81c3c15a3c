"""How a training on a CPU gets its memory."""

from __future__ import annotations

import ctypes

# glibc's names for what `mallopt` sets
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 2**30  # that are free, at most
LARGEST_BYTES = 2**25  # of a block that is kept; older glibc takes no more


def keep_freed_memory() -> bool:
    """Keep what is freed, for the next operation. By default glibc gives large blocks back at once,
    and the kernel clears each page of the next one anew, some ten thousand a step.

    Returns whether it does; False where the C library is another one.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_BYTES) and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))
