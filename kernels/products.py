"""Matrix products of a tree's rows with a weight: which of NVIDIA's libraries makes them.

PyTorch gives a product to cuBLAS, and one with a bias to cuBLASLt, which chooses among other
kernels. For some dozens of rows and a weight that has no more outputs than inputs, cuBLAS splits
the sum and adds the parts in a second kernel; cuBLASLt does without, in a tenth less time.
Elsewhere cuBLAS is as fast or faster (docs/results/h200-step).
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

FEWEST, MOST = 32, 96  # rows of which cuBLASLt's kernels were faster on an H200


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`naive.linear` by the faster library."""
    outputs, inputs = weight.shape
    narrow = x.element_size() == 2 and outputs <= inputs
    if not (narrow and FEWEST <= x.numel() // inputs <= MOST):
        return F.linear(x, weight)
    product = torch.addmm(_zeros(outputs, x.dtype, x.device), x.flatten(0, -2), weight.t())
    return product.unflatten(0, x.shape[:-1])


@functools.cache
def _zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A bias that changes nothing, made outside of any graph: a call is always run before it is
    captured."""
    return torch.zeros(size, dtype=dtype, device=device)
