"""Gather rows by indices that only the device knows, each op in one launch (Triton).

The ops gather embeddings of trees' nodes with their first norm, features of accepted nodes with
their norm, and the roots of drafts. The naive twins are `naive.embed_norm`, `naive.norm_at` and
`naive.take_roots`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree_kernels.contracts import CacheState, Stream
from stree_kernels.launch import follow, load_kept, overlapping, store_kept
from stree_kernels.pointwise import normed, two_sums, warps, with_parts


def embed_norm(
    weight: Tensor, tokens: Tensor, nodes: Tensor | None, scale: Tensor, eps: float,
    written: bool = False, added: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `naive.embed_norm` in one launch; weight, tokens and added with unit last stride."""
    assert weight.stride(1) == tokens.stride(1) == 1
    assert added is None or added.stride(2) == 1
    (batch, num_nodes), width = tokens.shape, weight.shape[1]
    if nodes is not None:
        num_nodes = nodes.shape[1]
        assert nodes.stride(1) == 1
    x = weight.new_empty(batch, num_nodes, width)
    out = torch.empty_like(x)
    embed_kernel[(num_nodes, batch)](
        weight, weight.stride(0), tokens, tokens.stride(0),
        nodes, 0 if nodes is None else nodes.stride(0), scale,
        added, *((0, 0) if added is None else added.stride()[:2]), x, out, width, eps,
        WRITTEN=written, BLOCK=triton.next_power_of_2(width), num_warps=warps(width),
        **overlapping(weight),
    )
    return x, out


def norm_at(x: Tensor, nodes: Tensor, scale: Tensor, eps: float, groups: int) -> Tensor:
    """Compute `naive.norm_at` in one launch; last strides are 1."""
    assert x.stride(2) == nodes.stride(1) == 1
    (batch, num_nodes, channels), count = x.shape, nodes.shape[1]
    out, width = x.new_empty(batch, count, channels), channels // groups
    rows_at_kernel[(groups, count, batch)](
        x, x.stride(0), x.stride(1), num_nodes, nodes, nodes.stride(0), scale, out, width, eps,
        BLOCK=triton.next_power_of_2(width), num_warps=warps(width), **overlapping(x),
    )
    return out


def take_roots(
    stream: Stream, block: Tensor, active: Tensor, tokens: Tensor, cache_state: CacheState
) -> Tensor:
    """Compute `naive.take_roots` in one launch; last strides are 1, stream is rows and parts."""
    source, scale, (added, also) = stream.source, stream.scale, two_sums(stream.added)
    if stream.normed is not None:  # by more than the scale
        source, scale, added, also = stream.normed, None, None, None
    assert stream.tokens is None and block.stride(1) == tokens.stride(1) == 1
    assert all(each is None or each.is_contiguous() for each in (source, added, also))
    batch, num_nodes, width = source.shape
    out = source.new_empty(batch, 1, width)
    root_kernel[(batch,)](
        source, added, also, source.numel(), scale, stream.eps, num_nodes, width,
        block, block.stride(0), active.view(torch.uint8), tokens, tokens.stride(0),
        cache_state.length, cache_state.path_length, cache_state.parity, out,
        PARTS=0 if added is None else len(added), MORE_PARTS=0 if also is None else len(also),
        BLOCK=triton.next_power_of_2(width), num_warps=warps(width), **overlapping(source),
    )
    return out


@triton.jit
def embed_kernel(
    weight, weight_stride, tokens, token_stride, nodes, node_stride, scale,
    added, row_stride, place_stride, x, out, width, eps,
    WRITTEN: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):
    place, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < width
    factor = load_kept(scale + at, mask)
    if WRITTEN:
        follow(OVERLAPS)
    node = place
    if nodes is not None:
        node = tl.maximum(tl.load(nodes + row * node_stride + place), 0)
    if not WRITTEN:
        follow(OVERLAPS)
    token = tl.load(tokens + row * token_stride + node)
    value = tl.load(weight + token * weight_stride + at, mask=mask, other=0.0)
    if added is not None:
        more = tl.load(added + row * row_stride + place * place_stride + at, mask=mask, other=0.0)
        value = (value.to(tl.float32) + more.to(tl.float32)).to(value.dtype)
    line = (row * tl.num_programs(0) + place) * width
    store_kept(x + line + at, value, mask)
    y = normed(value.to(tl.float32)[None, :], factor[None, :], width, eps, value.dtype)
    tl.store(out + line + at[None, :], y, mask=mask[None, :])


@triton.jit
def rows_at_kernel(
    x, batch_stride, stride, num_nodes, nodes, node_stride, scale, out, width, eps,
    BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):
    group, place, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < width
    factor = load_kept(scale + group * width + at, mask)
    follow(OVERLAPS)
    node = tl.minimum(tl.load(nodes + row * node_stride + place), num_nodes - 1)
    source = x + row * batch_stride + node * stride + group * width
    value = tl.load(source + at, mask=mask, other=0.0)
    y = normed(value.to(tl.float32)[None, :], factor[None, :], width, eps, value.dtype)
    line = ((row * tl.num_programs(1) + place) * tl.num_programs(0) + group) * width
    tl.store(out + line + at[None, :], y, mask=mask[None, :])


@triton.jit
def root_kernel(
    source, added, also, part_stride, scale, eps, num_nodes, width,
    block, block_stride, active, tokens, token_stride, lengths, path_lengths, parities, out,
    PARTS: tl.constexpr, MORE_PARTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < width
    if scale is not None:
        factor = load_kept(scale + at, mask)
    follow(OVERLAPS)
    block += row * block_stride
    count = tl.where(tl.load(active + row) != 0, tl.load(block), 0)
    last = tl.maximum(count, 1)
    at += (row * num_nodes + last - 1) * width
    value = load_kept(source + at, mask)
    if PARTS > 0:
        if also is not None:
            also += at
        value = with_parts(value, added + at, also, part_stride, mask, PARTS, MORE_PARTS)
    y = value[None, :]
    if scale is not None:
        y = normed(value.to(tl.float32)[None, :], factor[None, :], width, eps, value.dtype)
    at = row * width + tl.arange(0, BLOCK)
    tl.store(out + at[None, :], y, mask=mask[None, :])
    tl.store(tokens + row * token_stride, tl.load(block + last))
    tl.store(lengths + row, tl.load(lengths + row) + tl.load(path_lengths + row))
    tl.store(path_lengths + row, count)
    if row == 0:
        tl.store(parities, 1 - tl.load(parities))
