"""How kernels follow one another, and what they leave to each other in the L2 cache.

Launches that begin before the one ahead of them has ended (programmatic dependent launch).

A launch with `overlapping` may begin as soon as every program of the one ahead has called `follow`
(or ended). The rule that keeps this safe: before its own `follow` a kernel touches only what no
launch writes, such as weights and trees. A kernel that is past it knows that the launch ahead is
complete; that one, to complete, had passed its own: so everything ahead is complete.

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
    """Options of a launch of a kernel that calls `follow`."""
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
    """Let the next launch begin before this one waits; `follow` comes later, all the same."""
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def load_kept(at, mask=None):
    """What is small and read again in each layer or each step; zeros off the mask. The products
    between stream the weights through the L2 cache, and would drive it out."""
    if mask is None:
        return tl.load(at, eviction_policy="evict_last")
    else:
        return tl.load(at, mask=mask, other=0, eviction_policy="evict_last")


@triton.jit
def store_kept(at, value, mask):
    """The same of what is written."""
    tl.store(at, value, mask=mask, eviction_policy="evict_last")
