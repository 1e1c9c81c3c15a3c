"""A gated short convolution over a tree and its memory, in one launch (Triton).

One program serves a sequence and a block of channels, which no other reads or writes. It takes the
accepted path's last inputs from one half of the buffer, writes them and the new nodes' gated inputs
to the other half, convolves each node with its ancestors, and gates the result. A new node's input
is computed again for each node that sees it, which is faster than to read it back. The naive twin
is `naive.short_conv_tree`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from stree_kernels.contracts import CacheState, Topology
from stree_kernels.launch import follow, load_kept, overlapping, store_kept

BLOCK_CHANNELS = 64  # as in tree_conv.py, no other was measured here
BLOCK_NODES = 16


def short_conv_tree(
    projected: Tensor, history: Tensor, weight: Tensor, bias: Tensor | None, topology: Topology,
    cache_state: CacheState, num_read: int,
) -> Tensor:
    """Compute `naive.short_conv_tree` in one launch; last strides of projected and history: 1."""
    batch, num_new, channels = *projected.shape[:2], len(weight)
    assert projected.stride(2) == history.stride(3) == 1
    out = projected.new_empty(batch, num_new, channels)
    short_conv_kernel[(triton.cdiv(channels, BLOCK_CHANNELS), batch)](
        projected, projected.stride(0), projected.stride(1),
        history, history.stride(0), history.stride(1), history.stride(2),
        weight, weight.stride(0), weight.stride(1), bias, out,
        topology.windows, topology.windows.shape[1],
        cache_state.path, cache_state.path.stride(0), cache_state.path_length, cache_state.variant,
        cache_state.parity, num_read, num_new, channels,
        WIDTH=weight.shape[1], NEW=num_read == 0, READY=cache_state.ready,
        BLOCK_C=BLOCK_CHANNELS, BLOCK_Q=BLOCK_NODES, num_warps=4, **overlapping(projected),
    )
    return out


@triton.jit(do_not_specialize=["num_read", "num_new"])
def short_conv_kernel(
    projected, batch_stride, node_stride, history, half_stride, history_batch_stride, row_stride,
    weights, channel_stride, tap_stride, bias, out, windows, tree_size,
    path, path_stride, path_lengths, variants, parities, num_read, num_new, channels,
    WIDTH: tl.constexpr, NEW: tl.constexpr, READY: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_Q: tl.constexpr, OVERLAPS: tl.constexpr,
):
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    batch = tl.program_id(1).to(tl.int64)
    mine = channel < channels
    projected += batch * batch_stride
    history += batch * history_batch_stride
    out += batch * num_new * channels
    if READY == "none":
        follow(OVERLAPS)
    parity = load_kept(parities)
    windows += load_kept(variants + batch) * tree_size * WIDTH
    old = history + parity * half_stride
    half = 1 - parity if NEW else parity
    now = history + half * half_stride
    path += batch * path_stride
    path_length = 0
    if NEW:
        path_length = load_kept(path_lengths + batch).to(tl.int32)
        for place in tl.static_range(WIDTH - 1):
            newest = _newest(place, path, path_length, WIDTH)
            kept = load_kept(old + newest * row_stride + channel, mine)
            store_kept(now + place * row_stride + channel, kept, mine)
    for start in range(0, num_new, BLOCK_Q):
        new = start + tl.arange(0, BLOCK_Q)
        known = new < num_new
        here = known[:, None] & mine[None, :]
        sums = tl.zeros([BLOCK_Q, BLOCK_C], dtype=tl.float32)  # (nodes, channels)
        if bias is not None:
            sums += load_kept(bias + channel, mine).to(tl.float32)[None, :]
        at_new, taps = (), ()
        for tap in tl.static_range(WIDTH):
            seen = load_kept(windows + (num_read + new) * WIDTH + tap, known)
            weight = load_kept(weights + channel * channel_stride + tap * tap_stride, mine)
            fresh = seen - (WIDTH - 1) - num_read
            at_new += (fresh,)  # type: ignore[assignment]
            taps += (weight.to(tl.float32),)  # type: ignore[assignment]
            row = seen  # row of the tree so far, or of the conv state when the tree began
            if NEW:
                for place in tl.static_range(WIDTH - 1):
                    newest = _newest(place, path, path_length, WIDTH)
                    row = tl.where(seen == place, newest, row)
            earlier = load_kept(
                old + row[:, None] * row_stride + channel[None, :],
                (known & (fresh < 0))[:, None] & mine[None, :],
            )
            sums += earlier.to(tl.float32) * taps[tap][None, :]
        follow(OVERLAPS)
        value = sums.to(out.dtype.element_ty)
        for tap in tl.static_range(WIDTH):  # the last tap's is the node's own
            fresh = at_new[tap]
            given = projected + fresh[:, None] * node_stride + channel[None, :]
            there = (known & (fresh >= 0))[:, None] & mine[None, :]
            opened = tl.load(given, mask=there, other=0.0).to(tl.float32)
            value = tl.load(given + 2 * channels, mask=there, other=0.0)
            value = (opened * value.to(tl.float32)).to(value.dtype)
            sums += value.to(tl.float32) * taps[tap][None, :]
        row = WIDTH - 1 + num_read + new
        store_kept(now + row[:, None] * row_stride + channel[None, :], value, here)
        given = projected + new[:, None] * node_stride + channel[None, :]
        gate = tl.load(given + channels, mask=here, other=0.0)
        y = gate.to(tl.float32) * sums.to(gate.dtype).to(tl.float32)
        written = out + new[:, None] * channels + channel[None, :]
        tl.store(written, y.to(gate.dtype), mask=here)


@triton.jit
def _newest(place, path, path_length, WIDTH: tl.constexpr):
    """Return the row of the old half that becomes input `place` of the new conv state.

    It is a row of the old conv state, or of a node of the accepted path.
    """
    at = path_length + place
    on_path = at >= WIDTH - 1
    node = load_kept(path + at - (WIDTH - 1), on_path).to(tl.int32)
    return tl.where(on_path, WIDTH - 1 + node, at)
