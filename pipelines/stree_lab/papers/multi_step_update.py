"""Mamba-2's recurrence over short sequences in one launch, which also writes the last states.

It is the fused multi-step update of Snakes and Ladders (Wu et al. 2024, Algorithm 1). The engine's
`chain_scan_kernel` writes no state. Shapes: R rows, T tokens, H heads, P head dim, S state, G
groups of heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree_kernels.naive.dtypes import widened

BLOCK_P = 32  # places of a head that a program has


def multi_step_update(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor
) -> Tensor:
    """Take T tokens one after the other; return y (R, T, H, P), and write the states in place.

    Args:
        x: (R, T, Gx, P).
        dt: (R, T, H) after softplus; 0 leaves a state alone.
        A: (H,), negative.
        B: (R, T, Gb, S).
        C: (R, T, Gc, S).
        D: (H,).
        state: (R, H, P, S), contiguous.
    """
    if not x.is_cuda:
        return naive_update(x, dt, A, B, C, D, state)
    return launched_update(x, dt, A, B, C, D, state)


def launched_update(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor
) -> Tensor:
    """Compute `multi_step_update` by the kernel."""
    rows, num_tokens, num_heads = dt.shape
    head_dim, d_state = state.shape[2:]
    groups = [part.shape[2] for part in (x, B, C)]
    x, dt, B, C = (part.contiguous() for part in (x, dt, B, C))
    y = x.new_empty(rows, num_tokens, num_heads, head_dim)
    grid = triton.cdiv(head_dim, BLOCK_P), num_heads, rows
    multi_step_update_kernel[grid](
        x, dt, A, B, C, D, state, y, num_tokens, num_heads, head_dim, d_state, *groups,
        BLOCK_P=BLOCK_P, BLOCK_S=triton.next_power_of_2(d_state), num_warps=4,
    )
    return y


@triton.jit
def multi_step_update_kernel(
    x, dt, A, B, C, D, state, y, num_tokens, num_heads, head_dim, d_state,
    groups_x, groups_b, groups_c, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr,
):
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    s = tl.arange(0, BLOCK_S)
    in_p, in_s = p < head_dim, s < d_state
    decay_rate = tl.load(A + head).to(tl.float32)
    skip = tl.load(D + head).to(tl.float32)
    at = state + (row * num_heads + head) * head_dim * d_state + p[:, None] * d_state + s[None, :]
    in_state = in_p[:, None] & in_s[None, :]
    h = tl.load(at, mask=in_state, other=0.0).to(tl.float32)
    for token in range(num_tokens):
        place = row * num_tokens + token
        step = tl.load(dt + place * num_heads + head).to(tl.float32)
        at_x = x + (place * groups_x + head // (num_heads // groups_x)) * head_dim
        at_b = B + (place * groups_b + head // (num_heads // groups_b)) * d_state
        at_c = C + (place * groups_c + head // (num_heads // groups_c)) * d_state
        value = tl.load(at_x + p, mask=in_p, other=0.0).to(tl.float32)
        key = tl.load(at_b + s, mask=in_s, other=0.0).to(tl.float32)
        query = tl.load(at_c + s, mask=in_s, other=0.0).to(tl.float32)
        h = tl.exp(step * decay_rate) * h + (step * value)[:, None] * key[None, :]
        out = tl.sum(h * query[None, :], axis=1) + skip * value
        at_y = y + (place * num_heads + head) * head_dim
        tl.store(at_y + p, out.to(y.dtype.element_ty), mask=in_p)
    tl.store(at, h.to(state.dtype.element_ty), mask=in_state)


def naive_update(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor
) -> Tensor:
    """Compute `multi_step_update` in plain PyTorch, in fp32 or wider."""
    num_heads, dtype = dt.shape[2], x.dtype
    x, B, C = (part.repeat_interleave(num_heads // part.shape[2], dim=2) for part in (x, B, C))
    x, dt, A, B, C, D = (widened(each) for each in (x, dt, A, B, C, D))
    h, outputs = state.to(x.dtype), []
    for token in range(dt.shape[1]):
        step, value = dt[:, token, :, None], x[:, token]
        decay = (step * A[:, None]).exp()[..., None]
        h = decay * h + (step * value)[..., None] * B[:, token, :, None]
        outputs.append((h * C[:, token, :, None]).sum(-1) + D[:, None] * value)
    state.copy_(h)
    return torch.stack(outputs, 1).to(dtype)
