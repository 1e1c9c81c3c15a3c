"""Matrix products of the kernels: which digits go in; sums are always fp32 (Triton)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def precision_for(tensor: Tensor) -> str:
    """The PRECISION of `dot` for inputs like this one.

    bf16 inputs are multiplied as they are, fp32 ones as three tf32 products (exact to about
    1e-6); tf32 holds every fp16 number.
    """
    if tensor.dtype == torch.float32:
        return "tf32x3"
    # The interpreter has no bf16 products
    return "bf16" if tensor.dtype == torch.bfloat16 and tensor.is_cuda else "tf32"


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a @ b in fp32."""
    if PRECISION == "bf16":
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)
