"""Compute a frozen model's products in 8 bits: twice as fast as bf16, in half the memory.

GPUs from Ada and Hopper on have such products. Weights (E, D) and inputs (T, D) are e4m3 numbers
with one fp32 scale a row: a weight's rows are rounded once, the inputs' in each pass. Sums are
fp32. Embedding, head, norms, convolutions and experts keep their dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stree.common.errors import UsageError
from stree.models.layers.mlp import Experts
from stree.models.layers.part import has_products_in_8_bits, product_dtype
from stree.models.model import HybridModel
from stree_kernels.naive.products import rounded

FLOAT8 = torch.float8_e4m3fn
MULTIPLE = 16  # the matrix units want sizes that are multiples of this


class Float8Linear(nn.Module):
    """Linear layer (D to E) that is not trained; it takes `linear`'s weights and rounds them.

    scale (E, 1) is not finite where a row of the weight is not.
    """

    values: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        values, scale = rounded(linear.weight.detach())
        self.register_buffer("values", values)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        dtype = product_dtype(x)
        values, scale = rounded(x.flatten(0, -2))
        bias = None if self.bias is None else self.bias.to(dtype)
        y = product(values, scale, self.values, self.scale, bias, dtype)
        return y.unflatten(0, x.shape[:-1])


def product(
    x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Multiply x (T, D) by weight (E, D), both from `rounded`, to (T, E) in `dtype`.

    GPUs write bf16 first. A CPU multiplies the same numbers in fp32.
    """
    if not x.is_cuda:
        y = (x.float() * x_scale) @ (weight.float() * scale).T
        return (y if bias is None else y + bias).to(dtype)
    y = torch._scaled_mm(
        x, weight.t(), x_scale, scale.t(), bias=bias if dtype == torch.bfloat16 else None,
        out_dtype=torch.bfloat16, use_fast_accum=True,
    )
    return y if dtype == torch.bfloat16 else y.to(dtype) if bias is None else y + bias


def round_products(model: HybridModel) -> None:
    """Replace the model's projections by `Float8Linear`, except sizes that 8 bits do not serve.

    The model can neither be trained nor decode after that.
    """
    for parent in list(model.model.modules()):
        if isinstance(parent, Experts):
            continue
        for name, each in list(parent.named_children()):
            if type(each) is nn.Linear and not any(size % MULTIPLE for size in each.weight.shape):
                setattr(parent, name, Float8Linear(each))


def require_float8(device: torch.device) -> None:
    """Raise UsageError for a GPU without products in 8 bits."""
    if not has_products_in_8_bits(device):
        raise UsageError(
            "model.target_dtype float8 needs a GPU of compute capability 8.9 or later, "
            f"{torch.cuda.get_device_name(device)} is older: take bfloat16"
        )
