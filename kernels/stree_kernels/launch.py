"""Order of overlapping kernels (programmatic dependent launch), and hints for the L2 cache.

A launch with `overlapping` may begin as soon as every program of the launch before it has called
`follow` or ended. One rule keeps this safe: before its own `follow` a kernel touches only memory
that no launch writes, such as weights and trees. After its `follow` the previous launch is
complete; that launch had passed its own `follow` first, so all earlier launches are complete.

Launches of the same step write dynamic trees (`sampling/dynamic_trees.py`): where
`Topology.written` is set, kernels read the trees, and which nodes they are called for, after
their `follow`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def overlapping(tensor: Tensor) -> dict[str, bool]:
    """Return the options of a launch whose kernel calls `follow`."""
    if tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) >= (9, 0):
        return {"OVERLAPS": True, "launch_pdl": True}
    return {"OVERLAPS": False}


@triton.jit
def follow(OVERLAPS: tl.constexpr):
    """Wait for all earlier launches, and let the next one begin."""
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def lead(OVERLAPS: tl.constexpr):
    """Let the next launch begin before this one waits; the kernel still calls `follow` later."""
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def load_kept(at, mask=None):
    """Load small values that each layer or step reads again, and keep them in the L2 cache.

    Returns zeros off the mask. Without the hint the products, which stream the weights through the
    cache, would evict these values.
    """
    if mask is None:
        return tl.load(at, eviction_policy="evict_last")
    else:
        return tl.load(at, mask=mask, other=0, eviction_policy="evict_last")


@triton.jit
def store_kept(at, value, mask):
    """Store small values that are read again, and keep them in the L2 cache."""
    tl.store(at, value, mask=mask, eviction_policy="evict_last")
