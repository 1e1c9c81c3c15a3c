"""The causal convolution of training and prefill over packed sequences, with its gradient (Triton).

One launch forward; one backward, which computes the sums before the activation again, and a sum
over blocks of tokens. A program serves a block of tokens and one of channels. It reads each input
once a tap, all but the first time from the L1 cache. Gradients of weight and bias are partial sums
a block of tokens, added up in a fixed order. The naive twin is `naive.segment_conv`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK_TOKENS = 64
BLOCK_CHANNELS = 64
WARPS = 8


def segment_conv(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, segment_ids: Tensor | None,
    silu: bool = False,
) -> Tensor:
    """Compute `naive.segment_conv` in one launch; sums and the activation are in fp32."""
    y: Tensor = _SegmentConv.apply(inputs, weight, bias, segment_ids, silu)
    return y


class _SegmentConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, weight, bias, segment_ids, silu):
        inputs = inputs if inputs.stride(2) == 1 else inputs.contiguous()
        segment_ids = None if segment_ids is None else segment_ids.contiguous()
        ctx.save_for_backward(inputs, weight, bias, segment_ids)
        ctx.silu = silu
        y = inputs.new_empty(inputs.shape)
        grid, given, options = _launch(inputs, weight, bias, segment_ids, silu)
        if y.numel():
            segment_conv_kernel[grid](*given, y, **options)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        inputs, weight, bias, segment_ids = ctx.saved_tensors
        grid, given, options = _launch(inputs, weight, bias, segment_ids, ctx.silu)
        channels, width = weight.shape
        grad_inputs = inputs.new_empty(inputs.shape)
        blocks = grid[1] * grid[2]
        partial = inputs.new_empty(blocks, width + 1, channels, dtype=torch.float32)
        if inputs.numel():
            given = (*given, grads[0].contiguous())
            segment_conv_grad_kernel[grid](*given, grad_inputs, partial, **options)
        sums = partial.sum(0)
        grad_bias = None if bias is None else sums[width].to(bias.dtype)
        return grad_inputs, sums[:width].t().to(weight.dtype), grad_bias, None, None


def _launch(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, segment_ids: Tensor | None, silu: bool
) -> tuple[tuple[int, int, int], tuple[Any, ...], dict[str, Any]]:
    """Return the grid, the arguments that both kernels share, and the options of a launch."""
    batch, tokens, channels = inputs.shape
    grid = (triton.cdiv(channels, BLOCK_CHANNELS), triton.cdiv(tokens, BLOCK_TOKENS), batch)
    given = (
        inputs, inputs.stride(0), inputs.stride(1),
        weight, weight.stride(0), weight.stride(1), bias, segment_ids, tokens, channels,
    )
    options = dict(
        WIDTH=weight.shape[1], SILU=silu, BLOCK_T=BLOCK_TOKENS, BLOCK_C=BLOCK_CHANNELS,
        num_warps=WARPS,
    )
    return grid, given, options


@triton.jit
def segment_conv_kernel(
    inputs, batch_stride, token_stride, weight, channel_stride, tap_stride, bias, segments,
    tokens, channels, out,
    WIDTH: tl.constexpr, SILU: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):
    batch = tl.program_id(2).to(tl.int64)
    inputs += batch * batch_stride
    out += batch * tokens * channels
    if segments is not None:
        segments += batch * tokens
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    token = token.to(tl.int64)
    mine = channel < channels
    weight += channel * channel_stride
    y = _convolved(
        inputs, token_stride, weight, tap_stride, bias, segments, token, tokens, channel, mine,
        WIDTH, BLOCK_T, BLOCK_C,
    )
    if SILU:
        y *= tl.sigmoid(y)
    at = out + token[:, None] * channels + channel[None, :]
    tl.store(at, y.to(out.dtype.element_ty), mask=(token < tokens)[:, None] & mine[None, :])


@triton.jit
def segment_conv_grad_kernel(
    inputs, batch_stride, token_stride, weight, channel_stride, tap_stride, bias, segments,
    tokens, channels, grad_out, grad_inputs, partial,
    WIDTH: tl.constexpr, SILU: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):
    batch = tl.program_id(2).to(tl.int64)
    inputs += batch * batch_stride
    grad_out += batch * tokens * channels
    grad_inputs += batch * tokens * channels
    partial += (batch * tl.num_programs(1) + tl.program_id(1)) * (WIDTH + 1) * channels
    if segments is not None:
        segments += batch * tokens
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    token = token.to(tl.int64)
    mine = channel < channels
    weight += channel * channel_stride
    own_grad = tl.zeros([BLOCK_T, BLOCK_C], dtype=tl.float32)
    grad = tl.zeros([BLOCK_T, BLOCK_C], dtype=tl.float32)
    for offset in tl.static_range(WIDTH):
        later = token + offset
        there = _in_one_segment(segments, token, later, tokens)
        at = grad_out + later[:, None] * channels + channel[None, :]
        later_grad = tl.load(at, mask=there[:, None] & mine[None, :], other=0.0).to(tl.float32)
        if SILU:
            y = _convolved(
                inputs, token_stride, weight, tap_stride, bias, segments, later, tokens,
                channel, mine, WIDTH, BLOCK_T, BLOCK_C,
            )
            opened = tl.sigmoid(y)
            later_grad *= opened * (1.0 + y * (1.0 - opened))
            later_grad = tl.where(there[:, None], later_grad, 0.0)  # y may be NaN elsewhere
        if offset == 0:
            own_grad = later_grad
        scale = tl.load(weight + (WIDTH - 1 - offset) * tap_stride, mask=mine, other=0.0)
        grad += later_grad * scale.to(tl.float32)[None, :]
    at = grad_inputs + token[:, None] * channels + channel[None, :]
    here = (token < tokens)[:, None] & mine[None, :]
    tl.store(at, grad.to(grad_inputs.dtype.element_ty), mask=here)
    for back in tl.static_range(WIDTH):
        seen = _seen(inputs, token_stride, segments, token, tokens, channel, mine, back)
        at = partial + (WIDTH - 1 - back) * channels + channel
        tl.store(at, tl.sum(own_grad * seen, axis=0), mask=mine)
    tl.store(partial + WIDTH * channels + channel, tl.sum(own_grad, axis=0), mask=mine)


@triton.jit
def _convolved(
    inputs, token_stride, weight, tap_stride, bias, segments, token, tokens, channel, mine,
    WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):
    """Convolve the windows that end at a block of tokens; weight points to the channels' taps."""
    y = tl.zeros([BLOCK_T, BLOCK_C], dtype=tl.float32)
    for back in tl.static_range(WIDTH):
        seen = _seen(inputs, token_stride, segments, token, tokens, channel, mine, back)
        scale = tl.load(weight + (WIDTH - 1 - back) * tap_stride, mask=mine, other=0.0)
        y += seen * scale.to(tl.float32)[None, :]
    if bias is not None:
        y += tl.load(bias + channel, mask=mine, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit
def _seen(inputs, token_stride, segments, token, tokens, channel, mine, back: tl.constexpr):
    """Return the inputs `back` tokens before each, in fp32; zeros of another segment."""
    before = token - back
    there = _in_one_segment(segments, before, token, tokens)
    at = inputs + before[:, None] * token_stride + channel[None, :]
    return tl.load(at, mask=there[:, None] & mine[None, :], other=0.0).to(tl.float32)


@triton.jit
def _in_one_segment(segments, first, last, tokens):
    """Return True where both tokens are in the row and have the same segment."""
    there = (first >= 0) & (last < tokens)
    if segments is not None:
        own = tl.load(segments + first, mask=there, other=0)
        there &= tl.load(segments + last, mask=there, other=0) == own
    return there
