"""Rows picked by indices that only the device knows, each op in one launch (Triton).

The embeddings of a tree's nodes with their first norm, and the root that a draft grows from. The
naive twins are `naive.embed_norm` and `naive.take_root`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree_kernels.launch import follow, load_kept, overlapping, store_kept
from stree_kernels.pointwise import normed, warps

BLOCK = 1024


def embed_norm(
    weight: Tensor, tokens: Tensor, nodes: Tensor | None, scale: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`naive.embed_norm` in one launch; weight and tokens with unit last stride."""
    assert weight.stride(1) == tokens.stride(1) == 1
    (batch, num_nodes), width = tokens.shape, weight.shape[1]
    if nodes is not None:
        num_nodes = nodes.shape[0]
    x = weight.new_empty(batch, num_nodes, width)
    out = torch.empty_like(x)
    embed_kernel[(num_nodes, batch)](
        weight, weight.stride(0), tokens, tokens.stride(0), nodes, scale, x, out, width, eps,
        BLOCK=triton.next_power_of_2(width), num_warps=warps(width), **overlapping(weight),
    )  # fmt: skip
    return x, out


def take_root(hidden: Tensor, block: Tensor, tokens: Tensor, path_length: Tensor) -> Tensor:
    """`naive.take_root` in one launch; hidden with unit last stride."""
    assert hidden.stride(1) == block.stride(0) == 1
    width = hidden.shape[1]
    out = hidden.new_empty(1, width)
    root_kernel[(triton.cdiv(width, BLOCK),)](
        hidden, hidden.stride(0), block, tokens, path_length, out, width,
        BLOCK=BLOCK, num_warps=4, **overlapping(hidden),
    )  # fmt: skip
    return out


@triton.jit
def embed_kernel(
    weight, weight_stride, tokens, token_stride, nodes, scale, x, out, width, eps,
    BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    place, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < width
    factor = load_kept(scale + at, mask)
    node = place
    if nodes is not None:
        node = tl.load(nodes + place)
    follow(OVERLAPS)
    token = tl.load(tokens + row * token_stride + node)
    value = tl.load(weight + token * weight_stride + at, mask=mask, other=0.0)
    line = (row * tl.num_programs(0) + place) * width
    store_kept(x + line + at, value, mask)
    y = normed(value.to(tl.float32)[None, :], factor[None, :], width, eps, value.dtype)
    tl.store(out + line + at[None, :], y, mask=mask[None, :])


@triton.jit
def root_kernel(
    hidden, stride, block, tokens, path_length, out, width,
    BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(block)
    value = tl.load(hidden + (count - 1) * stride + at, mask=at < width)
    tl.store(out + at, value, mask=at < width)
    if tl.program_id(0) == 0:
        tl.store(tokens, tl.load(block + count))
        tl.store(path_length, count)
