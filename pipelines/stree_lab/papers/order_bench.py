"""Time attention of large trees by the order of their nodes (DySpec, Appendix C).

With and without skipping blocks that no node sees. Rows are those of `bench_decode.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from stree.trees.token_tree import TokenTree
from stree_kernels import naive
from stree_lab.benches.buffers import OpCall
from stree_lab.benches.timing import per_layer, side_by_side, us_fields
from stree_lab.papers.node_order import (
    Parents,
    by_level,
    depth_first,
    heavy_path,
    num_blocks,
)

ORDERS: dict[str, Callable[[Parents], Parents]] = {
    "as grown": tuple, "depth first": depth_first, "heavy path": heavy_path
}
BLOCK = 32  # the paper's
SHAPE = (64, 64, 128)  # the paper's heads of queries and of keys, and their size
LAYERS = 4  # sets of buffers, one after the other


def random_tree(num_nodes: int, seed: int) -> Parents:
    """Draw a tree: each node below any node before it, with equal chances."""
    rng = random.Random(seed)
    return (-1, *(rng.randrange(node) for node in range(1, num_nodes)))


def orders(
    sizes: list[int], repeats: int, device: torch.device, shape: tuple[int, int, int] = SHAPE
) -> Iterator[dict[str, Any]]:
    """Time an attention layer's tree call over a random tree of each size, in each order, in µs.

    No tokens are committed. Beside the call, attention of the same tree is timed in PyTorch with a
    mask: manual, as products and a softmax, and xformers, by the memory-efficient kernel that
    PyTorch has from xFormers.

    blocks: non-empty blocks of 32 × 32 of the tree's mask, out of all_blocks. With the fused
    kernels also blocks_read, the blocks of the kernel's own size that it computes when it skips
    those that none of a program's queries sees, and blocks_below, the blocks that it computes
    otherwise.

    Args:
        sizes: Nodes of the trees.
        repeats: Timed calls of each way.
        device: Of the calls.
        shape: Heads of queries, heads of keys, and their size.
    """
    for num_nodes in sizes:
        drawn = random_tree(num_nodes, 0)
        for name, order in {**ORDERS, "by level": by_level}.items():
            parents = order(drawn)
            row: dict[str, Any] = dict(
                what="orders", num_nodes=num_nodes, order=name, context=0, heads=shape[0],
                blocks=num_blocks(parents, BLOCK), all_blocks=(-(-num_nodes // BLOCK)) ** 2,
            )
            call = OpCall(TokenTree(parents), 0, LAYERS, device, replayed=1)
            if call.fused:
                queries, keys = _kernel_block(shape)
                chain = tuple(range(-1, num_nodes - 1))  # which sees all that comes before
                row["blocks_read"] = num_blocks(parents, queries, keys)
                row["blocks_below"] = num_blocks(chain, queries, keys)
            ways = {**_ways(shape, call), **_masked(shape, call)}
            times = side_by_side(ways, device, repeats)
            yield {**row, **us_fields(per_layer(times, LAYERS))}


def _kernel_block(shape: tuple[int, int, int]) -> tuple[int, int]:
    """Return the nodes and keys of a block of the fused kernel, in 16 bits."""
    from stree_kernels.attention.tree_attention import CORNER_KEYS, MAX_ROWS

    num_heads, num_kv_heads, _ = shape
    return max(1, MAX_ROWS * num_kv_heads // num_heads), CORNER_KEYS.value


def _ways(shape: tuple[int, int, int], call: OpCall) -> dict[str, Callable[[], object]]:
    """Return calls of attention in all layers: by the twin, or by the kernel with and without
    skipping."""
    sets = call.attention_sets(*shape)
    if not call.fused:
        return {"naive": lambda: [naive.attend_tree(*each) for each in sets]}
    from stree_kernels.attention.tree_attention import attend_tree

    kernel: Callable[..., object] = attend_tree
    return {
        "dense": lambda: [kernel(*each, skips=False) for each in sets],
        "sparse": lambda: [kernel(*each, skips=True) for each in sets],
    }


def _masked(shape: tuple[int, int, int], call: OpCall) -> dict[str, Callable[[], object]]:
    """Return calls of all layers' attention by PyTorch with the tree's mask (1, 1, N, N)."""
    num_heads, _, dim = shape
    topology, _ = call.place()
    mask = topology.ancestors.bool()[:, None]
    sets = [
        [call.normal(1, num_heads, call.num_nodes, dim) for _ in range(3)]
        for _ in range(call.layers)
    ]

    def manual(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT * dim**-0.5).masked_fill(~mask, -torch.inf)
        return scores.softmax(-1) @ v

    def efficient() -> list[Tensor]:
        on_gpu = call.device.type == "cuda"
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION if on_gpu else SDPBackend.MATH):
            return [F.scaled_dot_product_attention(q, k, v, attn_mask=mask) for q, k, v in sets]

    return {"manual": lambda: [manual(*each) for each in sets], "xformers": efficient}
