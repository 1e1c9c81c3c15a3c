"""Mamba-1's scan of training and prefill, with its gradient (Triton).

A program owns a sequence and a block of channels, keeps their states in registers, and takes the
tokens one by one. The forward pass keeps the states at the beginning of every `CHUNK` tokens. The
backward pass goes through the chunks from the last to the first: it computes a chunk's states
again, and then goes back through its tokens. B and C belong to all channels, so their gradients are
sums of what each block of channels gives. The naive twin is `naive.selective_scan`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE = 512  # numbers of a state that a program holds
CHUNK = 32  # tokens between states that are kept


def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *,
    initial_state: Tensor | None = None, segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `naive.selective_scan`; no gradient goes through either state."""
    y, state = _SelectiveScan.apply(x, dt, A, B, C, initial_state, segment_ids)
    return y, state


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dt, A, B, C, initial_state, segment_ids):
        x, dt, A, B, C = (each.contiguous() for each in (x, dt.float(), A.float(), B, C))
        segment_ids = None if segment_ids is None else segment_ids.contiguous()
        batch, tokens, channels = x.shape
        num_states = A.shape[1]
        y, starts = torch.empty_like(x), None
        if any(ctx.needs_input_grad):
            starts = dt.new_empty(batch, triton.cdiv(tokens, CHUNK), channels, num_states)
        state = dt.new_zeros(batch, channels, num_states)
        if initial_state is not None:
            state.copy_(initial_state)
        grid, sizes = _launch(batch, channels, num_states)
        selective_scan_kernel[grid](
            x, dt, A, B, C, y, state, starts, segment_ids, tokens, channels, num_states,
            CHUNK=CHUNK, **sizes, num_warps=2,
        )
        ctx.save_for_backward(x, dt, A, B, C, starts, segment_ids)
        ctx.mark_non_differentiable(state)
        return y, state

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        x, dt, A, B, C, starts, segment_ids = ctx.saved_tensors
        batch, tokens, channels = x.shape
        num_states = A.shape[1]
        grid, sizes = _launch(batch, channels, num_states)
        grad_x, grad_dt = torch.empty_like(x), torch.empty_like(dt)
        grad_A = dt.new_empty(batch, channels, num_states)
        grad_B, grad_C = dt.new_empty(2, grid[0], batch, tokens, num_states)
        states = dt.new_empty(batch, CHUNK, channels, num_states)
        selective_scan_grad_kernel[grid](
            x, dt, A, B, C, grads[0].contiguous(), starts, states, segment_ids,
            grad_x, grad_dt, grad_A, grad_B, grad_C, tokens, channels, num_states,
            CHUNK=CHUNK, **sizes, num_warps=2,
        )
        grad_B, grad_C = (each.sum(0).to(B.dtype) for each in (grad_B, grad_C))
        return grad_x, grad_dt, grad_A.sum(0), grad_B, grad_C, None, None


def _launch(batch: int, channels: int, num_states: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the grid and the tiles of both kernels."""
    block_s = max(16, triton.next_power_of_2(num_states))
    block_c = max(8, TILE // block_s)
    return (triton.cdiv(channels, block_c), batch), dict(BLOCK_C=block_c, BLOCK_S=block_s)


@triton.jit
def selective_scan_kernel(
    x, dt, A, B, C, y, state, starts, segments, tokens, channels, num_states,
    CHUNK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):
    channel, batch = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C), tl.program_id(1)
    batch = batch.to(tl.int64)
    s = tl.arange(0, BLOCK_S)
    mine, in_s = channel < channels, s < num_states
    in_state = mine[:, None] & in_s[None, :]
    place = channel[:, None] * num_states + s[None, :]
    rates = tl.load(A + place, mask=in_state, other=0.0)
    at_state = state + batch * channels * num_states + place
    h = tl.load(at_state, mask=in_state, other=0.0)
    for token in range(0, tokens):
        if starts is not None:  # noqa: SIM102 (known when it is compiled, the other when it runs)
            if token % CHUNK == 0:
                chunk = batch * tl.cdiv(tokens, CHUNK) + token // CHUNK
                tl.store(starts + chunk * channels * num_states + place, h, mask=in_state)
        row = batch * tokens + token
        h = _advanced(
            h, x, dt, B, segments, row, token, rates, channel, mine, s, in_s, channels, num_states
        )
        C_row = tl.load(C + row * num_states + s, mask=in_s, other=0.0).to(tl.float32)
        out = tl.sum(h * C_row[None, :], axis=1)
        tl.store(y + row * channels + channel, out.to(y.dtype.element_ty), mask=mine)
    tl.store(at_state, h, mask=in_state)


@triton.jit
def _keeps(segments, row, token):
    """Return 0 where a token begins a segment, whose state is empty, else 1."""
    keeps = 1.0
    if segments is not None:
        own = tl.load(segments + row)
        before = tl.load(segments + row - 1, mask=token > 0, other=0)
        keeps = tl.where((token == 0) | (own == before), 1.0, 0.0)
    return keeps


@triton.jit
def _advanced(
    h, x, dt, B, segments, row, token, rates, channel, mine, s, in_s, channels, num_states
):
    """Return the states (channels, states) after one more token."""
    step = tl.load(dt + row * channels + channel, mask=mine, other=0.0)
    value = tl.load(x + row * channels + channel, mask=mine, other=0.0).to(tl.float32)
    B_row = tl.load(B + row * num_states + s, mask=in_s, other=0.0).to(tl.float32)
    kept = h * _keeps(segments, row, token)
    return tl.exp(step[:, None] * rates) * kept + (step * value)[:, None] * B_row[None, :]


@triton.jit
def selective_scan_grad_kernel(
    x, dt, A, B, C, grad_y, starts, states, segments, grad_x, grad_dt, grad_A, grad_B, grad_C,
    tokens, channels, num_states, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):
    block, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    channel = block * BLOCK_C + tl.arange(0, BLOCK_C)
    s = tl.arange(0, BLOCK_S)
    mine, in_s = channel < channels, s < num_states
    in_state = mine[:, None] & in_s[None, :]
    place = channel[:, None] * num_states + s[None, :]
    rates = tl.load(A + place, mask=in_state, other=0.0)
    size = channels * num_states
    partial = (block.to(tl.int64) * tl.num_programs(1) + batch) * tokens
    num_chunks = tl.cdiv(tokens, CHUNK)
    grad_h = tl.zeros([BLOCK_C, BLOCK_S], dtype=tl.float32)  # of the state after a token
    grad_rates = tl.zeros([BLOCK_C, BLOCK_S], dtype=tl.float32)
    for back in range(0, num_chunks):
        chunk = num_chunks - 1 - back
        begin = chunk * CHUNK
        count = tl.minimum(CHUNK, tokens - begin)
        at_start = starts + (batch * num_chunks + chunk) * size + place
        h = tl.load(at_start, mask=in_state, other=0.0)
        for number in range(0, count):  # the state before each token
            tl.store(states + (batch * CHUNK + number) * size + place, h, mask=in_state)
            token = begin + number
            h = _advanced(
                h, x, dt, B, segments, batch * tokens + token, token, rates, channel, mine,
                s, in_s, channels, num_states,
            )
        tl.debug_barrier()
        for number in range(0, count):
            token = begin + count - 1 - number
            row = batch * tokens + token
            at = states + (batch * CHUNK + token - begin) * size + place
            before = tl.load(at, mask=in_state, other=0.0) * _keeps(segments, row, token)
            step = tl.load(dt + row * channels + channel, mask=mine, other=0.0)
            value = tl.load(x + row * channels + channel, mask=mine, other=0.0).to(tl.float32)
            B_row = tl.load(B + row * num_states + s, mask=in_s, other=0.0).to(tl.float32)
            C_row = tl.load(C + row * num_states + s, mask=in_s, other=0.0).to(tl.float32)
            given = tl.load(grad_y + row * channels + channel, mask=mine, other=0.0)
            given = given.to(tl.float32)
            decay = tl.exp(step[:, None] * rates)
            after = decay * before + (step * value)[:, None] * B_row[None, :]
            grad_h += given[:, None] * C_row[None, :]
            at = grad_C + (partial + token) * num_states + s
            tl.store(at, tl.sum(given[:, None] * after, axis=0), mask=in_s)
            at = grad_B + (partial + token) * num_states + s
            tl.store(at, tl.sum(grad_h * (step * value)[:, None], axis=0), mask=in_s)
            written = tl.sum(grad_h * B_row[None, :], axis=1)
            at = grad_x + row * channels + channel
            tl.store(at, (step * written).to(grad_x.dtype.element_ty), mask=mine)
            faded = grad_h * decay * before
            at = grad_dt + row * channels + channel
            tl.store(at, value * written + tl.sum(faded * rates, axis=1), mask=mine)
            grad_rates += faded * step[:, None]
            grad_h = grad_h * decay * _keeps(segments, row, token)
        tl.debug_barrier()  # all threads have read these states: the next chunk's may be written
    tl.store(grad_A + batch * size + place, grad_rates, mask=in_state)
