"""A Mamba-1 layer's tree call: replay and tree conv, and after two products the scan (Triton).

Decays belong to a channel and a number of its state, so nothing here is a matrix product. In both
launches a program owns a block of channels with all of their states, and holds (channels, states)
tiles in registers.

Replay and conv (`mamba1_advance`): a program advances its channels' state along the last accepted
path, token by token, and convolves the new nodes. No other program reads what it keeps of the
channels, so there is one buffer, which is read before it is written.

Scan (`mamba1_scan`): a program serves one node besides, and walks from it to the root. With the sum
T of dt over the nodes already passed, what an ancestor j has written reaches the node with the
decay exp(A·T), so

    y = D·x + Σ_j dt_j·x_j·Σ_s C_s·exp(A_s·T_j)·B_js + Σ_s C_s·exp(A_s·T)·h_s

takes one exponential a level and needs no ancestor's state: a tree of N nodes costs N times its
mean depth, in programs that run side by side. The naive twins are in `naive/mamba1.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from stree_kernels.contracts import CacheState, Mamba1Held, Mamba1Weights, Topology
from stree_kernels.conv.tree_conv import positive_dt
from stree_kernels.launch import follow, load_kept, overlapping, store_kept
from stree_kernels.mamba.streamed_scan import gated_by_silu
from stree_kernels.shapes import Mamba1Shape

TILE = 512  # numbers of a state that a program holds
BLOCK_NODES = 16  # that a program convolves at a time
NO_LIMIT = tl.constexpr(float("inf"))


class Held(NamedTuple):
    """`Mamba1Held` as kernels take it; strides are of all dims but the last."""

    conv_state: Any
    conv_strides: Any
    state: Any
    state_strides: Any
    inputs: Any
    inputs_strides: Any
    dt: Any
    dt_strides: Any
    B: Any
    B_strides: Any


class Sizes(NamedTuple):
    """Dimensions and tiles, constants of the kernels."""

    channels: int
    states: int
    rank: int
    eps: float  # of the norms of dt, B and C; 0 is none
    C: int  # channels of a program
    S: int
    R: int
    Q: int  # nodes that a program convolves at a time


def mamba1_advance(
    inputs: Tensor, held: Mamba1Held, weights: Mamba1Weights, shape: Mamba1Shape,
    topology: Topology, cache_state: CacheState, num_read: int,
) -> Tensor:
    """Compute `naive.mamba1_advance` in one launch."""
    batch, num_new, channels = inputs.shape
    assert held.inputs.shape[1] >= num_read + num_new
    x = inputs.new_empty(batch, num_new, channels)
    sizes = _sizes(shape)
    mamba1_advance_kernel[(triton.cdiv(channels, sizes.C), batch)](
        inputs, inputs.stride()[:2], _held(held), x, weights.conv, weights.conv.stride(),
        weights.conv_bias, weights.dt_bias, weights.A_log, topology.args, cache_state.args,
        num_read, num_new, SIZES=sizes, WIDTH=shape.width, REPLAY=num_read == 0,
        READY=cache_state.ready, num_warps=2, **overlapping(x),
    )
    return x


def mamba1_scan(
    x: Tensor, selected: Tensor, dt: Tensor, gate: Tensor, held: Mamba1Held,
    weights: Mamba1Weights, shape: Mamba1Shape, topology: Topology, cache_state: CacheState,
    num_read: int, out: Tensor | None = None,
) -> Tensor:
    """Compute `naive.mamba1_scan` in one launch."""
    batch, num_new, channels = x.shape
    y = x.new_empty(x.shape) if out is None else out
    sizes = _sizes(shape)
    new = NewNodes(
        x, x.stride()[:2], selected, selected.stride()[:2], dt, dt.stride()[:2],
        gate, gate.stride()[:2], y, y.stride()[:2],
    )
    assert x.stride(2) == selected.stride(2) == dt.stride(2) == gate.stride(2) == y.stride(2) == 1
    mamba1_scan_kernel[(triton.cdiv(channels, sizes.C), num_new, batch)](
        new, _held(held), weights.conv, weights.conv.stride(), weights.conv_bias,
        weights.dt_bias, weights.A_log, weights.D, weights.c_scale, topology.args,
        cache_state.variant, num_read,
        SIZES=sizes, WIDTH=shape.width, GROWN=num_read > 0, num_warps=2, **overlapping(x),
    )
    return y


class NewNodes(NamedTuple):
    """Tensors of the new nodes in a scan; strides are of all dims but the last."""

    x: Any
    x_strides: Any
    selected: Any
    selected_strides: Any
    dt: Any
    dt_strides: Any
    gate: Any
    gate_strides: Any
    y: Any
    y_strides: Any


def _held(held: Mamba1Held) -> Held:
    assert all(each.stride(2) == 1 for each in held)
    return Held(*(part for each in held for part in (each, each.stride()[:2])))


def _sizes(shape: Mamba1Shape) -> Sizes:
    block_s = max(16, triton.next_power_of_2(shape.d_state))
    return Sizes(
        shape.d_inner, shape.d_state, shape.dt_rank, shape.norm_eps or 0.0,
        max(8, TILE // block_s), block_s, max(16, triton.next_power_of_2(shape.dt_rank)),
        BLOCK_NODES,
    )


@triton.jit
def mamba1_advance_kernel(
    given, given_strides, held, x, conv, conv_strides, conv_bias, dt_bias, A_log, tree, cache,
    num_read, num_new, SIZES: tl.constexpr, WIDTH: tl.constexpr, REPLAY: tl.constexpr,
    READY: tl.constexpr, OVERLAPS: tl.constexpr,
):
    channel = tl.program_id(0) * SIZES.C + tl.arange(0, SIZES.C)
    batch = tl.program_id(1).to(tl.int64)
    mine = channel < SIZES.channels
    # The previous launch, a product, touches nothing that the replay does
    if READY == "none":
        follow(OVERLAPS)
    conv_state = held.conv_state + batch * held.conv_strides[0] + channel
    inputs = held.inputs + batch * held.inputs_strides[0] + channel
    if REPLAY:
        path = cache.path + batch * cache.path_stride
        path_length = load_kept(cache.path_lengths + batch).to(tl.int32)
        if path_length > 0:
            _replay(
                held, batch, conv_state, inputs, conv + channel * conv_strides[0],
                conv_strides[1], conv_bias, dt_bias, A_log, path, path_length, channel, mine,
                SIZES, WIDTH,
            )
            newest = ()
            for place in tl.static_range(WIDTH - 1):
                newest += (  # type: ignore[assignment]
                    _seen(
                        path_length + place, conv_state, held.conv_strides[1], inputs,
                        held.inputs_strides[1], path, mine, WIDTH,
                    ),
                )
            tl.debug_barrier()  # all threads have read the old inputs: the new may be written
            for place in tl.static_range(WIDTH - 1):
                store_kept(conv_state + place * held.conv_strides[1], newest[place], mine)
            tl.debug_barrier()
    follow(OVERLAPS)
    windows = tree.windows + load_kept(cache.variants + batch) * tree.size * WIDTH
    given += batch * given_strides[0]
    x += batch * num_new * SIZES.channels
    for start in range(0, num_new, SIZES.Q):
        new = start + tl.arange(0, SIZES.Q)
        known = new < num_new
        here = known[:, None] & mine[None, :]
        y = _convolved(
            windows, num_read + new, known, num_read, given + channel[None, :], given_strides[1],
            conv_state[None, :], held.conv_strides[1], inputs[None, :], held.inputs_strides[1],
            conv + channel * conv_strides[0], conv_strides[1], conv_bias, channel, mine,
            SIZES, WIDTH,
        )
        raw = tl.load(
            given + new[:, None] * given_strides[1] + channel[None, :], mask=here, other=0.0
        )
        at = inputs[None, :] + (num_read + new)[:, None] * held.inputs_strides[1]
        store_kept(at, raw, here)
        at = x + new[:, None] * SIZES.channels + channel[None, :]
        tl.store(at, y.to(x.dtype.element_ty), mask=here)


@triton.jit
def _replay(
    held, batch, conv_state, inputs, conv, tap_stride, conv_bias, dt_bias, A_log,
    path, path_length, channel, mine, SIZES: tl.constexpr, WIDTH: tl.constexpr,
):
    """Advance the states of a block of channels along the accepted path."""
    s = tl.arange(0, SIZES.S)
    in_s = s < SIZES.states
    in_state = mine[:, None] & in_s[None, :]
    A = _decay_rates(A_log, channel, s, in_state, SIZES)
    bias = load_kept(dt_bias + channel, mine).to(tl.float32)
    state_at = held.state + batch * held.state_strides[0]
    state_at = state_at + channel[:, None] * held.state_strides[1] + s[None, :]
    state = tl.load(state_at, mask=in_state, other=0.0).to(tl.float32)
    for k in range(path_length):
        node = load_kept(path + k)
        x = tl.zeros_like(bias)
        if conv_bias is not None:
            x += load_kept(conv_bias + channel, mine).to(tl.float32)
        for tap in tl.static_range(WIDTH):
            value = _seen(
                k + tap, conv_state, held.conv_strides[1], inputs, held.inputs_strides[1],
                path, mine, WIDTH,
            )
            x += value.to(tl.float32) * load_kept(conv + tap * tap_stride, mine).to(tl.float32)
        x = (x * tl.sigmoid(x)).to(held.inputs.dtype.element_ty).to(tl.float32)
        at = held.dt + batch * held.dt_strides[0] + node * held.dt_strides[1] + channel
        dt = positive_dt(load_kept(at, mine), bias, 0.0, NO_LIMIT)
        at = held.B + batch * held.B_strides[0] + node * held.B_strides[1] + s
        B = load_kept(at, in_s).to(tl.float32)
        state = tl.exp(dt[:, None] * A) * state + (dt * x)[:, None] * B[None, :]
    tl.store(state_at, state.to(held.state.dtype.element_ty), mask=in_state)


@triton.jit
def _seen(
    place, conv_state, conv_stride, inputs, inputs_stride, path, mine, WIDTH: tl.constexpr
):
    """Return input `place` of [conv state, accepted path], of a block of channels."""
    places = place + tl.where(mine, 0, 0)  # of each channel
    on_path = mine & (places >= WIDTH - 1)
    node = load_kept(path + places - (WIDTH - 1), on_path)
    value = load_kept(conv_state + places * conv_stride, mine & (places < WIDTH - 1))
    return value + load_kept(inputs + node * inputs_stride, on_path)


@triton.jit
def _decay_rates(A_log, channel, s, in_state, SIZES: tl.constexpr):
    """Return A (channels, states), negative."""
    at = A_log + channel[:, None] * SIZES.states + s[None, :]
    return -tl.exp(load_kept(at, in_state).to(tl.float32))


@triton.jit
def _convolved(
    windows, node, known, num_read, given, given_stride, conv_state, conv_stride,
    inputs, inputs_stride, conv, tap_stride, conv_bias, channel, mine,
    SIZES: tl.constexpr, WIDTH: tl.constexpr,
):
    """Return silu(conv) (nodes, channels) of some nodes; those from `num_read` on are `given`."""
    y = tl.zeros([node.shape[0], channel.shape[0]], dtype=tl.float32)
    if conv_bias is not None:
        y += load_kept(conv_bias + channel, mine).to(tl.float32)[None, :]
    for tap in tl.static_range(WIDTH):
        place = load_kept(windows + node * WIDTH + tap, known).to(tl.int32)
        if tap == WIDTH - 1:  # whatever the windows of padding hold
            place = WIDTH - 1 + node
        seen = place - (WIDTH - 1)
        is_new, in_state = known & (seen >= num_read), known & (seen < 0)
        is_old = known & (seen >= 0) & (seen < num_read)
        at = given + (seen - num_read)[:, None] * given_stride
        value = tl.load(at, mask=is_new[:, None] & mine[None, :], other=0.0)
        at = conv_state + place[:, None] * conv_stride
        value += tl.load(at, mask=in_state[:, None] & mine[None, :], other=0.0)
        at = inputs + seen[:, None] * inputs_stride
        value += tl.load(at, mask=is_old[:, None] & mine[None, :], other=0.0)
        factor = load_kept(conv + tap * tap_stride, mine).to(tl.float32)
        y += value.to(tl.float32) * factor[None, :]
    return y * tl.sigmoid(y)


@triton.jit
def mamba1_scan_kernel(
    new, held, conv, conv_strides, conv_bias, dt_bias, A_log, D, c_scale, tree, variants, num_read,
    SIZES: tl.constexpr, WIDTH: tl.constexpr, GROWN: tl.constexpr, OVERLAPS: tl.constexpr,
):
    channel = tl.program_id(0) * SIZES.C + tl.arange(0, SIZES.C)
    q, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    s = tl.arange(0, SIZES.S)
    mine, in_s = channel < SIZES.channels, s < SIZES.states
    in_state = mine[:, None] & in_s[None, :]
    A = _decay_rates(A_log, channel, s, in_state, SIZES)
    bias = load_kept(dt_bias + channel, mine).to(tl.float32)
    skip = load_kept(D + channel, mine).to(tl.float32)
    follow(OVERLAPS)
    variant = load_kept(variants + batch)
    windows = tree.windows + variant * tree.size * WIDTH
    depth = load_kept(tree.depths + variant * tree.size + num_read + q)
    dtype = new.y.dtype.element_ty
    at = held.state + batch * held.state_strides[0]
    at = at + channel[:, None] * held.state_strides[1] + s[None, :]
    state = tl.load(at, mask=in_state, other=0.0).to(tl.float32)
    x_at = new.x + batch * new.x_strides[0] + channel
    dt_at = new.dt + batch * new.dt_strides[0] + channel
    selected = new.selected + batch * new.selected_strides[0]
    held_dt = held.dt + batch * held.dt_strides[0] + channel
    held_B = held.B + batch * held.B_strides[0] + s
    row = selected + q * new.selected_strides[1]
    C = _normed(row + SIZES.rank + SIZES.states + s, in_s, SIZES.states, SIZES)
    if c_scale is not None:
        C *= load_kept(c_scale + s, in_s).to(tl.float32)
    # Of the node itself, as the replay will read them
    scale = _dt_scale(row, q >= 0, SIZES)
    dt = tl.load(dt_at + q * new.dt_strides[1], mask=mine, other=0.0).to(tl.float32) * scale
    own_dt = dt.to(held.dt.dtype.element_ty)
    store_kept(held_dt + (num_read + q) * held.dt_strides[1], own_dt, mine)
    own_B = _normed(row + SIZES.rank + s, in_s, SIZES.states, SIZES)
    own_B = own_B.to(held.B.dtype.element_ty)
    if tl.program_id(0) == 0:
        store_kept(held_B + (num_read + q) * held.B_strides[1], own_B, in_s)
    x = tl.load(x_at + q * new.x_strides[1], mask=mine, other=0.0).to(tl.float32)
    y = skip * x
    passed = tl.zeros_like(bias)  # dt summed over the nodes below the present one
    node = num_read + q
    for _ in range(depth + 1):
        there = node >= 0
        fresh = node - num_read
        is_new = there & (fresh >= 0)
        its_row = selected + fresh * new.selected_strides[1]
        mine_new, in_s_new = _if(is_new, channel, SIZES.channels), _if(is_new, s, SIZES.states)
        its_scale = _dt_scale(its_row, is_new, SIZES)
        B = _normed(its_row + SIZES.rank + s, in_s_new, SIZES.states, SIZES)
        B = B.to(held.B.dtype.element_ty).to(tl.float32)
        x = tl.load(x_at + fresh * new.x_strides[1], mask=mine_new, other=0.0).to(tl.float32)
        raw = tl.load(dt_at + fresh * new.dt_strides[1], mask=mine_new, other=0.0)
        raw = raw.to(tl.float32) * its_scale
        raw = raw.to(held.dt.dtype.element_ty).to(tl.float32)  # as the replay will read it
        if GROWN:
            is_old = there & (fresh < 0)
            mine_old, in_s_old = _if(is_old, channel, SIZES.channels), _if(is_old, s, SIZES.states)
            B += load_kept(held_B + node * held.B_strides[1], in_s_old).to(tl.float32)
            raw += load_kept(held_dt + node * held.dt_strides[1], mine_old).to(tl.float32)
            if is_old:
                x = _kept_x(
                    held, batch, windows, node, conv + channel * conv_strides[0], conv_strides[1],
                    conv_bias, channel, mine, SIZES, WIDTH,
                ).to(dtype).to(tl.float32)
        dt = tl.where(there, positive_dt(raw, bias, 0.0, NO_LIMIT), 0.0)
        reaches = tl.exp(A * passed[:, None]) * (B * C)[None, :]
        y += tl.where(there, dt * x, 0.0) * tl.sum(reaches, axis=1)
        passed += dt
        above = load_kept(windows + node * WIDTH + WIDTH - 2, there).to(tl.int32)
        above = above - (WIDTH - 1)
        node = tl.where(there & (above < node), above, -1)
    y += tl.sum(tl.exp(A * passed[:, None]) * state * C[None, :], axis=1)
    to_gate = new.gate + batch * new.gate_strides[0] + q * new.gate_strides[1] + channel
    y = gated_by_silu(y, to_gate, mine, dtype)
    to_y = new.y + batch * new.y_strides[0] + q * new.y_strides[1] + channel
    tl.store(to_y, y.to(dtype), mask=mine)


@triton.jit
def _if(condition, index, size: tl.constexpr):
    """Return the mask of a vector's indices, all False unless a scalar condition holds."""
    return index < tl.where(condition, size, 0)


@triton.jit
def _kept_x(
    held, batch, windows, node, conv, tap_stride, conv_bias, channel, mine,
    SIZES: tl.constexpr, WIDTH: tl.constexpr,
):
    """Return silu(conv) (channels,) of a node that an earlier call has read."""
    y = tl.zeros([channel.shape[0]], dtype=tl.float32)
    if conv_bias is not None:
        y += load_kept(conv_bias + channel, mine).to(tl.float32)
    for tap in tl.static_range(WIDTH):
        place = load_kept(windows + node * WIDTH + tap).to(tl.int32)
        seen = place - (WIDTH - 1)
        at = held.conv_state + batch * held.conv_strides[0] + place * held.conv_strides[1]
        value = load_kept(at + channel, _if(seen < 0, channel, SIZES.channels))
        at = held.inputs + batch * held.inputs_strides[0] + seen * held.inputs_strides[1]
        value += load_kept(at + channel, _if(seen >= 0, channel, SIZES.channels))
        y += value.to(tl.float32) * load_kept(conv + tap * tap_stride, mine).to(tl.float32)
    return y * tl.sigmoid(y)


@triton.jit
def _normed(at, mask, size: tl.constexpr, SIZES: tl.constexpr):
    """Load a vector, and scale it to a root mean square of 1 if the layer norms."""
    value = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if SIZES.eps > 0:
        value = value * tl.rsqrt(tl.sum(value * value, axis=0) / size + SIZES.eps)
    return value


@triton.jit
def _dt_scale(row, there, SIZES: tl.constexpr):
    """Return the factor by which a norm of low-rank dt scales its product."""
    scale = 1.0
    if SIZES.eps > 0:
        r = tl.arange(0, SIZES.R)
        low = tl.load(row + r, mask=_if(there, r, SIZES.rank), other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(low * low, axis=0) / SIZES.rank + SIZES.eps)
    return scale
