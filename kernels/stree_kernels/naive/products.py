"""Matrix products in plain PyTorch: the twins of `products/`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stree_kernels.contracts import Gated, Scaled, Stream
from stree_kernels.naive.dtypes import widened
from stree_kernels.naive.gather import norm
from stree_kernels.naive.pointwise import activated, gated_rms_norm, swiglu

ROWS_AT_ONCE = 8192  # of a weight that is put into 8 bits: larger ones go in parts
LARGEST = 448.0  # of e4m3
MIN_ROUNDED_ROWS = 128  # from which inputs are rounded, too, where a model asks for that
MULTIPLE = 16  # of both sizes of a weight that tensor cores of 8 bits take
LEAST_SCALE = torch.finfo(torch.float32).tiny  # which a row of zeros has


def linear(x: Tensor | Stream, weight: Tensor | Scaled) -> Tensor:
    """Multiply x (…, D), or the norm of a stream, by a weight (E, D) to (…, E) in x's dtype."""
    x = norm(x) if isinstance(x, Stream) else x
    if isinstance(weight, Tensor):
        return F.linear(x, weight)
    wide = widened(x)
    return F.linear(wide, dequantised(weight, wide.dtype)).to(x.dtype)


def dequantised(weight: Scaled, dtype: torch.dtype) -> Tensor:
    """Return a weight in 8 bits as numbers (…, E, D) of another dtype, rounded once."""
    grouped = weight.values.to(dtype).unflatten(-1, (-1, weight.group))
    return grouped.mul_(weight.scale[..., None]).flatten(-2)


def in_8_bits(weight: Tensor) -> Scaled:
    """Return a weight (…, E, D) in e4m3 with scales (…, E, 1): each row's largest number is 448.

    448 is the largest number of e4m3. A row that is not finite stays so.
    """
    shape, weight = weight.shape, weight.flatten(0, -2)
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty(len(weight), 1, dtype=torch.float32, device=weight.device)
    for start in range(0, len(weight), ROWS_AT_ONCE):
        piece = slice(start, start + ROWS_AT_ONCE)
        values[piece], scale[piece] = rounded(weight[piece])
    return Scaled(values.view(shape), scale.view(*shape[:-1], 1))


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x (T, D) as e4m3 numbers, and the fp32 scale of each row (T, 1)."""
    wide = widened(x)
    scale = (wide.abs().amax(1, keepdim=True) / LARGEST).clamp(min=LEAST_SCALE).float()
    return (wide / scale).to(torch.float8_e4m3fn), scale


def suits_tensor_cores(weight: Scaled) -> bool:
    """Return whether PyTorch's product in 8 bits takes a weight: by its sizes and scales."""
    aligned = all(size % MULTIPLE == 0 for size in weight.shape)
    return aligned and weight.scale.shape[1] == 1


def fits_rounded(x: Tensor, weight: Scaled) -> bool:
    """Return whether `linear_rounded` serves for x (…, D): many rows, and one scale an output."""
    return x.numel() >= MIN_ROUNDED_ROWS * x.shape[-1] and suits_tensor_cores(weight)


def linear_rounded(x: Tensor, weight: Scaled) -> Tensor:
    """Compute `linear` with x (…, D) rounded to e4m3, too, with one scale a row.

    A GPU multiplies by its tensor cores for 8 bits and writes bf16, a CPU multiplies the same
    numbers in fp32. Each number of x moves by at most 1/16 of itself, or of 2⁻⁶ / 448 of its row's
    largest.
    """
    values, scale = rounded(x.flatten(0, -2))
    if x.is_cuda:
        y = torch._scaled_mm(
            values, weight.values.t(), scale, weight.scale.t().contiguous(),
            out_dtype=torch.bfloat16, use_fast_accum=True,
        )
    else:
        y = F.linear(values.float() * scale, dequantised(weight, torch.float32))
    return y.to(x.dtype).unflatten(0, x.shape[:-1])


def linear_wide(x: Tensor, weight: Tensor) -> Tensor:
    """Compute `linear` in fp32 or wider, without rounding its inputs first."""
    return F.linear(widened(x), widened(weight))


def laid(weight: Tensor) -> Tensor:
    """Store a weight (E, D) as products of few rows read it fastest: on a CPU input by input."""
    return weight.t().contiguous().t() if weight.device.type == "cpu" else weight.contiguous()


def linear_parts(x: Tensor | Gated, weight: Tensor | Scaled) -> Tensor:
    """Compute `linear` as parts of a sum (S, …, E): several in fp32, or one in x's dtype."""
    return linear(x.norm_by(gated_rms_norm) if isinstance(x, Gated) else x, weight)[None]


def linear_swiglu(x: Tensor | Stream, weight: Tensor | Scaled) -> Tensor:
    """Multiply x (…, D), or a stream's norm, by gate and up (2·I, D); return SwiGLU (…, I)."""
    return swiglu(linear(x, weight))


def linear_adapted(x: Tensor, weight: Tensor, low: Tensor, up: Tensor, kind: str) -> Tensor:
    """Return an MLP's inner values (…, I) with an adapter.

    They are `activated` of x (…, D) by a weight (2·I, D), plus low (…, R) by up (2·I, R).
    """
    return activated(linear(x, weight) + linear(low, up), kind)
