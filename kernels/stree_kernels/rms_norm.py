"""The norm of training and prefill, with its gradient (Triton): one launch each way.

Forward is the kernel of `pointwise.py`, launched after all that comes before it has ended, because
a training writes weights. Backward computes the root mean square again. The weight's gradient is
partial sums a block of rows, added up in a fixed order. The naive twin is `naive.rms_norm`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from stree_kernels.launch import load_kept
from stree_kernels.pointwise import GATED_BLOCK, norm_kernel, warps

TILE = 4096  # numbers that a program of the gradient holds at once, at least a group's
TILES = 8  # of a program


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, groups: int = 1, gate: Tensor | None = None
) -> Tensor:
    """Compute `naive.rms_norm` in one launch."""
    y: Tensor = _RMSNorm.apply(x, weight, eps, groups, gate)
    return y


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, groups, gate):
        x = x.contiguous()
        if gate is not None:
            gate = gate if gate.stride(-1) == 1 else gate.contiguous()
        ctx.save_for_backward(x, weight, gate)
        ctx.eps, ctx.groups = eps, groups
        channels = x.shape[-1]
        width = channels // groups
        gates = None if gate is None else gate.flatten(0, -2)
        block = triton.next_power_of_2(width)
        together = max(1, min(triton.next_power_of_2(groups), GATED_BLOCK // block))
        y = torch.empty_like(x)
        if x.numel():
            norm_kernel[(x.numel() // channels, triton.cdiv(groups, together))](
                x, channels, None, 0, None, gates, 0 if gates is None else gates.stride(0), None,
                weight, None, y, None, None, channels, width, groups, eps,
                BITWISE=False, PARTS=1, MORE_PARTS=0, GROUPS=together, GATE_AFTER=False,
                BLOCK=block, num_warps=warps(block * together),
                OVERLAPS=False,
            )
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        x, weight, gate = ctx.saved_tensors
        channels = x.shape[-1]
        width, rows = channels // ctx.groups, x.numel() // channels
        grad_x = torch.empty_like(x)
        gates = None if gate is None else gate.flatten(0, -2)
        grad_gate = None if gate is None else gate.new_empty(gate.shape)
        block = triton.next_power_of_2(width)
        rows_a_tile = max(1, TILE // block)
        programs = triton.cdiv(rows, rows_a_tile * TILES)
        partial = x.new_empty(programs, channels, dtype=torch.float32)
        if x.numel():
            norm_grad_kernel[(programs, ctx.groups)](
                x, weight, gates, 0 if gates is None else gates.stride(0), grads[0].contiguous(),
                grad_x, grad_gate, partial, rows, channels, width, ctx.eps,
                ROWS=rows_a_tile, TILES=TILES, BLOCK=block, num_warps=max(4, warps(block)),
            )
        return grad_x, partial.sum(0).to(weight.dtype), None, None, grad_gate


@triton.jit
def norm_grad_kernel(
    x, weight, gate, gate_stride, grad_out, grad_x, grad_gate, partial, rows, channels, width, eps,
    ROWS: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):
    at = tl.arange(0, BLOCK)
    mine = at < width
    at += tl.program_id(1) * width
    scale = load_kept(weight + at, mine).to(tl.float32)[None, :]
    grad_weight = tl.zeros([BLOCK], dtype=tl.float32)
    for tile in range(TILES):
        row = (tl.program_id(0) * TILES + tile) * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & mine[None, :]
        row = row.to(tl.int64)[:, None]
        place = row * channels + at[None, :]
        value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
        wide = value
        if gate is not None:
            z = tl.load(gate + row * gate_stride + at[None, :], mask=mask, other=0.0)
            z = z.to(tl.float32)
            opened = tl.sigmoid(z)
            wide = value * (z * opened)
        inverse = tl.rsqrt(tl.sum(wide * wide, axis=1) / width + eps)[:, None]
        wide *= inverse
        grad = tl.load(grad_out + place, mask=mask, other=0.0).to(tl.float32)
        grad_weight += tl.sum(grad * wide, axis=0)
        grad *= scale
        grad = inverse * (grad - wide * (tl.sum(grad * wide, axis=1) / width)[:, None])
        if gate is not None:
            of_gate = grad * value * (opened * (1.0 + z * (1.0 - opened)))
            tl.store(grad_gate + place, of_gate.to(grad_gate.dtype.element_ty), mask=mask)
            grad *= z * opened
        tl.store(grad_x + place, grad.to(grad_x.dtype.element_ty), mask=mask)
    tl.store(partial + tl.program_id(0).to(tl.int64) * channels + at, grad_weight, mask=mine)
