"""In which types the twins compute: what is narrower than fp32 is widened."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for anything narrower, else the dtype itself."""
    return dtype if dtype == torch.float64 else torch.float32


def widened(x: Tensor) -> Tensor:
    """x in its accumulation dtype."""
    return as_dtype(x, accumulation_dtype(x.dtype))


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype), which is an operation even where there is nothing to do."""
    return x if x.dtype == dtype else x.to(dtype)
