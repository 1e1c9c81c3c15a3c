"""Rows picked by indices that only the device knows, each op in one launch (Triton).

The embeddings of a tree's nodes, and the root that a draft grows from. The naive twins are
`naive.embed` and `naive.take_root`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def embed(weight: Tensor, tokens: Tensor, nodes: Tensor | None) -> Tensor:
    """`naive.embed` in one launch; weight and tokens with unit last stride."""
    assert weight.stride(1) == tokens.stride(1) == 1
    (batch, num_nodes), width = tokens.shape, weight.shape[1]
    if nodes is not None:
        num_nodes = nodes.shape[0]
    out = weight.new_empty(batch, num_nodes, width)
    embed_kernel[(num_nodes, batch, triton.cdiv(width, BLOCK))](
        weight, weight.stride(0), tokens, tokens.stride(0), nodes, out, width,
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out


def take_root(hidden: Tensor, block: Tensor, tokens: Tensor, path_length: Tensor) -> Tensor:
    """`naive.take_root` in one launch; hidden with unit last stride."""
    assert hidden.stride(1) == block.stride(0) == 1
    width = hidden.shape[1]
    out = hidden.new_empty(1, width)
    root_kernel[(triton.cdiv(width, BLOCK),)](
        hidden, hidden.stride(0), block, tokens, path_length, out, width,
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def embed_kernel(
    weight, weight_stride, tokens, token_stride, nodes, out, width, BLOCK: tl.constexpr
):
    place, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    node = place
    if nodes is not None:
        node = tl.load(nodes + place)
    token = tl.load(tokens + row * token_stride + node)
    value = tl.load(weight + token * weight_stride + at, mask=at < width)
    tl.store(out + (row * tl.num_programs(0) + place) * width + at, value, mask=at < width)


@triton.jit
def root_kernel(hidden, stride, block, tokens, path_length, out, width, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(block)
    value = tl.load(hidden + (count - 1) * stride + at, mask=at < width)
    tl.store(out + at, value, mask=at < width)
    if tl.program_id(0) == 0:
        tl.store(tokens, tl.load(block + count))
        tl.store(path_length, count)
