"""Matrix products in plain PyTorch: the twins of `products.py` and `short_products.py`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from stree_kernels.naive.dtypes import widened
from stree_kernels.naive.gather import norm
from stree_kernels.naive.pointwise import activated, gated_rms_norm, swiglu
from stree_kernels.shapes import Gated, Stream


def linear(x: Tensor | Stream, weight: Tensor) -> Tensor:
    """x (…, D), or the norm of a stream, by a weight (E, D) → (…, E) in x's dtype."""
    return F.linear(norm(x) if isinstance(x, Stream) else x, weight)


def linear_wide(x: Tensor, weight: Tensor) -> Tensor:
    """`linear` in fp32 or wider, from what is not rounded first."""
    return F.linear(widened(x), widened(weight))


def laid(weight: Tensor) -> Tensor:
    """A weight (E, D) stored as products of a few rows read it fastest: on a CPU input by input."""
    return weight.t().contiguous().t() if weight.device.type == "cpu" else weight.contiguous()


def linear_parts(x: Tensor | Gated, weight: Tensor) -> Tensor:
    """`linear`, as parts of a sum (S, …, E): several in fp32, or one in x's dtype."""
    return linear(x.norm_by(gated_rms_norm) if isinstance(x, Gated) else x, weight)[None]


def linear_swiglu(x: Tensor | Stream, weight: Tensor) -> Tensor:
    """x (…, D), or the norm of a stream, by gate and up one above the other, (2·I, D), and SwiGLU
    of both → (…, I)."""
    return swiglu(linear(x, weight))


def linear_adapted(x: Tensor, weight: Tensor, low: Tensor, up: Tensor, kind: str) -> Tensor:
    """An MLP's inner values (…, I), as `activated` makes them of x (…, D) by a weight (2·I, D) and
    an adapter's term, low (…, R) by up (2·I, R)."""
    return activated(linear(x, weight) + linear(low, up), kind)
