"""Dtypes in which the twins compute: narrower ones than fp32 are widened."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return fp32 for a narrower dtype, else the dtype itself."""
    return dtype if dtype == torch.float64 else torch.float32


def widened(x: Tensor) -> Tensor:
    """Return x in its accumulation dtype."""
    return as_dtype(x, accumulation_dtype(x.dtype))


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in a dtype, without the operation of x.to(dtype) if it has that dtype."""
    return x if x.dtype == dtype else x.to(dtype)
