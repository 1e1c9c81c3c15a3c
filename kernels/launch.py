"""Launches that begin before the one ahead of them has ended (programmatic dependent launch).

A launch with `overlapping` may begin as soon as every program of the one ahead has called `follow`
(or ended). The rule that keeps this safe: before its own `follow` a kernel touches only what no
launch writes, such as weights and trees. A kernel that is past it knows that the launch ahead is
complete; that one, to complete, had passed its own: so everything ahead is complete.

The second launch of an op may go further where the first one begins with `follow`: what was written
before both is there from the start, and it has only to wait for what the first one writes.
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
