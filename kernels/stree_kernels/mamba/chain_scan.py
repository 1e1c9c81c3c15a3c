"""A Mamba-2 layer's call over a chain, step by step: the multi-step state update (Triton).

`tree_scan.py` does it by matrix products, this as the recurrence itself: each program keeps
its part of the state in registers and takes the new tokens one by one (the fused update of Snakes
and Ladders, Wu et al. 2024). Useless for a tree, which has to be unrolled into chains. Replay and
conv are the same launch as for a tree; many sequences go another way (`streamed_scan.py`). The
naive twin is `naive.mamba_tree`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from stree_kernels.contracts import CacheState, Derived
from stree_kernels.launch import follow, load_kept, overlapping
from stree_kernels.mamba.streamed_scan import gated_by_silu
from stree_kernels.shapes import MixerShape


def scan_chain(scan: Any, derived: Derived, shape: MixerShape, cache_state: CacheState) -> None:
    """Scan new chains, by a `ScanArgs`."""
    batch, num_new, _ = scan.y.shape
    block_p = max(16, min(32, triton.next_power_of_2(shape.head_dim)))
    chain_scan_kernel[(triton.cdiv(shape.head_dim, block_p), shape.num_heads, batch)](
        derived.args, scan, cache_state.parity, num_new,
        SHAPE=shape.scan, BLOCK_P=block_p, BLOCK_S=max(16, triton.next_power_of_2(shape.d_state)),
        num_warps=4, **overlapping(scan.y),
    )


@triton.jit
def chain_scan_kernel(
    nodes, scan, parities, num_new, SHAPE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, OVERLAPS: tl.constexpr,
):
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    p = block * BLOCK_P + tl.arange(0, BLOCK_P)
    s = tl.arange(0, BLOCK_S)
    in_p, in_s = p < SHAPE.head_dim, s < SHAPE.d_state
    x_channel = (head // SHAPE.heads_a_x) * SHAPE.head_dim + p
    b_channel = SHAPE.b_channel + (head // SHAPE.heads_a_b) * SHAPE.d_state + s
    c_channel = (head // SHAPE.heads_a_c) * SHAPE.d_state + s
    A = -tl.exp(load_kept(scan.A_log + head).to(tl.float32))
    D = load_kept(scan.D + head).to(tl.float32)
    # The first launch waited for all before it: the cache state is complete already
    parity = load_kept(parities)
    xb = nodes.convolved + batch * nodes.convolved_strides[1]
    steps = nodes.decays + (batch * nodes.decays_strides[1] + head)
    to_state = scan.state + (batch * scan.state_strides[0] + head * scan.state_strides[1])
    follow(OVERLAPS)
    state = tl.load(
        to_state + p[:, None] * scan.state_strides[2] + s[None, :],
        mask=in_p[:, None] & in_s[None, :], other=0.0,
    ).to(tl.float32)
    xb += (1 - parity) * nodes.convolved_strides[0]
    steps += (1 - parity) * nodes.decays_strides[0]
    dtype = scan.y.dtype.element_ty
    for node in range(0, num_new):
        dt = load_kept(steps + node * nodes.decays_strides[3])
        x = load_kept(xb + node * nodes.convolved_strides[2] + x_channel, in_p).to(tl.float32)
        B = load_kept(xb + node * nodes.convolved_strides[2] + b_channel, in_s).to(tl.float32)
        at_C = scan.C + batch * scan.C_strides[0] + node * scan.C_strides[1] + c_channel
        C = tl.load(at_C, mask=in_s, other=0.0).to(tl.float32)
        state = tl.exp(dt * A) * state + (dt * x)[:, None] * B[None, :]  # (P, S)
        y = tl.sum(state * C[None, :], axis=1) + D * x
        if scan.gate is not None:
            at = scan.gate + batch * scan.gate_strides[0] + node * scan.gate_strides[1]
            y = gated_by_silu(y, at + head * SHAPE.head_dim + p, in_p, dtype)
        at = scan.y + batch * scan.y_strides[0] + node * scan.y_strides[1]
        tl.store(at + head * SHAPE.head_dim + p, y.to(dtype), mask=in_p)
