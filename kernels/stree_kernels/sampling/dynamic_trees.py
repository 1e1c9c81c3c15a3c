"""Dynamic trees on the device: choose their nodes, and build the topology of a call (Triton).

To choose, one program per sequence picks nodes by their values. To build the topology, one program
per sequence and node block walks from each node to the root. The naive twins are in
`naive/sampling/dynamic_trees.py`.

Launches that follow read what these write. That is safe before their own `follow`, too, for all but
the next one: see `launch.py`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree_kernels.contracts import Topology
from stree_kernels.launch import follow, overlapping

BLOCK_NODES = 16
BLOCK_RANKS = 32  # picks that the others are ranked against at a time
ABOVE, RANKED = 4096, 8192  # either times all nodes of a tree: more would not fit the registers
LOWEST = tl.constexpr(-2139095041)  # below the key of −∞


def build_topology(parents: Tensor, max_depth: int, topology: Topology) -> None:
    """Compute `naive.build_topology` in one launch; all contiguous, parents with last stride 1."""
    batch, size = parents.shape
    assert parents.stride(1) == 1
    assert all(
        each.is_contiguous() for each in (topology.ancestors, topology.depths, topology.windows)
    )
    block_n = triton.next_power_of_2(size)
    block_q = min(BLOCK_NODES, max(1, ABOVE // block_n))
    topology_kernel[(triton.cdiv(size, block_q), batch)](
        parents, parents.stride(0), topology.ancestors.view(torch.uint8), topology.depths,
        topology.windows, size, max_depth + 1,
        WIDTH=topology.windows.shape[2], BLOCK_Q=block_q, BLOCK_N=block_n,
        num_warps=4, **overlapping(parents),
    )


def pick_level(
    values: Tensor, drawn_by: Tensor, begin: int, end: int, picks: Tensor, parents: Tensor
) -> None:
    """Compute `naive.pick_level` in one launch; last strides are 1."""
    _pick(values, drawn_by, begin, end, picks, parents, None, None, None, None, None, None)


def pick_tree(
    values: Tensor, drawn_by: Tensor, drawn: Tensor, pool_depths: Tensor, pool_tokens: Tensor,
    tokens: Tensor, parents: Tensor, depths: Tensor, inner: Tensor | None = None,
    least: float = -math.inf,
) -> None:
    """Compute `naive.pick_tree` in one launch; last strides are 1, row strides those of tokens."""
    numbers = torch.empty(values.shape, dtype=torch.int32, device=values.device)
    assert depths.stride() == tokens.stride()
    assert inner is None or inner.stride() == tokens.stride()
    _pick(
        values, drawn_by, 0, values.shape[1], tokens, parents,
        drawn, pool_depths, pool_tokens, depths, numbers, inner, least,
    )


def _pick(
    values: Tensor, drawn_by: Tensor, begin: int, end: int, picks: Tensor, parents: Tensor,
    drawn: Tensor | None, pool_depths: Tensor | None, pool_tokens: Tensor | None,
    depths: Tensor | None, numbers: Tensor | None, inner: Tensor | None, least: float = -math.inf,
) -> None:
    assert values.stride(1) == picks.stride(1) == parents.stride(1) == 1
    block = triton.next_power_of_2(end - begin)
    block_n = triton.next_power_of_2(picks.shape[1])
    pick_kernel[(len(values),)](
        values, values.stride(0), drawn_by, begin, end,
        picks, picks.stride(0), parents, parents.stride(0), picks.shape[1],
        drawn, 0 if drawn is None else drawn.stride(0), pool_depths,
        pool_tokens, 0 if pool_tokens is None else pool_tokens.stride(0), depths, numbers,
        inner, least, 0 if drawn is None else drawn.shape[1],
        BLOCK=block, BLOCK_N=block_n, BLOCK_R=min(BLOCK_RANKS, max(1, RANKED // block_n)),
        BLOCK_I=1 if drawn is None else triton.next_power_of_2(drawn.shape[1]),
        num_warps=min(8, max(1, block // 128)), **overlapping(values),
    )


# A bound of 1 is not made a constant: a loop over it was once compiled wrongly
@triton.jit(do_not_specialize=["num_steps"])
def topology_kernel(
    parents, parent_stride, ancestors, depths, windows, size, num_steps,
    WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, OVERLAPS: tl.constexpr,
):
    follow(OVERLAPS)
    row = tl.program_id(1).to(tl.int64)
    node = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    other = tl.arange(0, BLOCK_N)
    known = node < size
    line = row * size + node
    above = tl.zeros([BLOCK_Q, BLOCK_N], dtype=tl.int32)
    depth = tl.zeros([BLOCK_Q], dtype=tl.int32) - 1
    at = tl.where(known, node, -1)
    for step in range(num_steps):
        there = at >= 0
        above = tl.where(other[None, :] == at[:, None], 1, above)
        depth += there.to(tl.int32)
        place = line * WIDTH + WIDTH - 1 - step
        tl.store(windows + place, WIDTH - 1 + at, mask=there & (step < WIDTH))
        at = tl.load(parents + row * parent_stride + at, mask=there, other=-1).to(tl.int32)
    for back in tl.static_range(WIDTH):
        place = line * WIDTH + WIDTH - 1 - back
        tl.store(windows + place, WIDTH - 1 - back + depth, mask=known & (depth < back))
    tl.store(depths + line, depth, mask=known)
    tl.store(
        ancestors + line[:, None] * size + other[None, :], above.to(tl.uint8),
        mask=known[:, None] & (other < size)[None, :],
    )


# A bound of 1 is not made a constant here, either
@triton.jit(do_not_specialize=["count"])
def pick_kernel(
    values, value_stride, drawn_by, begin, end, picks, pick_stride, parents, parent_stride, count,
    drawn, drawn_stride, pool_depths, pool_tokens, pool_stride, depths, numbers,
    inner, least, num_drawn,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_I: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    follow(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    node = begin + tl.arange(0, BLOCK)
    known = node < end
    key = _key(values + row * value_stride + node, known)
    key = tl.where(known, key, LOWEST)
    # The largest key that `count` nodes reach
    low = tl.min(tl.where(known, key, 0), axis=0)
    high = tl.max(key, axis=0)
    for _ in range(31):
        middle = high - (high - low) // 2
        enough = tl.sum((key >= middle).to(tl.int32), axis=0) >= count
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, tl.maximum(middle - 1, low))
    above, equal = key > low, key == low
    left = count - tl.sum(above.to(tl.int32), axis=0)
    equal = equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= left)
    chosen = known & (above | equal)
    number = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    at = picks + row * pick_stride
    if drawn is None:
        by = tl.load(drawn_by + node, mask=chosen, other=0)
        tl.store(at + number, node.to(tl.int64), mask=chosen)
        tl.store(parents + row * parent_stride + number, by - 1, mask=chosen)
    else:
        # The picks in the pool's order, then ranked among each other
        tl.store(at + number, node.to(tl.int64), mask=chosen)
        numbers += row * end
        tl.store(numbers + node, -1, mask=known)
        tl.debug_barrier()
        number = tl.arange(0, BLOCK_N)
        there = number < count
        node = tl.load(at + number, mask=there, other=0)
        key = _key(values + row * value_stride + node, there)
        rank = tl.zeros([BLOCK_N], dtype=tl.int32)
        for start in range(0, count, BLOCK_R):
            other = start + tl.arange(0, BLOCK_R)
            is_pick = other < count
            pick = tl.load(at + other, mask=is_pick, other=0)
            value = _key(values + row * value_stride + pick, is_pick)[None, :]
            before = (value > key[:, None]) | (
                (value == key[:, None]) & (other[None, :] < number[:, None])
            )
            rank += tl.sum((before & is_pick[None, :]).to(tl.int32), axis=1)
        tl.store(numbers + node, rank, mask=there)
        if inner is not None:
            tl.store(inner + row * pick_stride + number, 0, mask=there)
        tl.debug_barrier()
        by = tl.load(drawn_by + node, mask=there, other=0)
        parent = tl.load(drawn + row * drawn_stride + by, mask=there, other=0)
        parent = tl.load(numbers + parent, mask=there & (node > 0), other=-1)
        value = tl.load(values + row * value_stride + node, mask=there, other=0.0)
        absent = value < least
        parent = tl.where(absent, -2, parent)
        tl.store(parents + row * parent_stride + rank, parent.to(tl.int64), mask=there)
        token = tl.load(pool_tokens + row * pool_stride + node, mask=there, other=0)
        tl.store(at + rank, token, mask=there)
        depth = tl.load(pool_depths + node, mask=there, other=0)
        tl.store(depths + row * pick_stride + rank, tl.where(absent, 0, depth), mask=there)
        if inner is not None:
            place = tl.arange(0, BLOCK_I)
            above = tl.load(drawn + row * drawn_stride + place, mask=place < num_drawn, other=0)
            rank = tl.load(numbers + above, mask=place < num_drawn, other=-1)
            tl.store(inner + row * pick_stride + rank, place.to(tl.int64), mask=rank >= 0)


@triton.jit
def _key(at, known):
    """Return whole numbers in the order of values up to 0, NaN with −∞."""
    value = tl.load(at, mask=known, other=0.0)
    value = tl.where(value != value, -float("inf"), value)
    # Without the sign their bits grow as they fall
    return -(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
