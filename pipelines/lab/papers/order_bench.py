"""Time attention of large trees by the order of their nodes (DySpec, Appendix C).

With and without skipping blocks that no node sees. Rows are those of `bench_decode.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stree.models.config import HybridConfig
from stree.trees.token_tree import TokenTree
from stree.trees.tree_batch import topology_of
from stree_kernels import naive, ops
from stree_kernels.contracts import CacheState
from stree_pipelines.lab.benches.timing import side_by_side
from stree_pipelines.lab.papers.node_order import (
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
LAYERS = 4  # sets of buffers, one after the other


def random_tree(num_nodes: int, seed: int) -> Parents:
    """Draw a tree: each node below any node before it, with equal chances."""
    rng = random.Random(seed)
    return (-1, *(rng.randrange(node) for node in range(1, num_nodes)))


def orders(
    config: HybridConfig, sizes: list[int], context: int, repeats: int, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Time an attention layer's tree call over a random tree of each size, in each order, in µs.

    blocks: non-empty blocks of 32 × 32 of the tree's mask, out of all_blocks. With the fused
    kernels also blocks_read, the blocks of the kernel's own size that it computes when it skips
    those that none of a program's queries sees, and blocks_below, the blocks that it computes
    otherwise.
    """
    for num_nodes in sizes:
        drawn = random_tree(num_nodes, 0)
        for name, order in {**ORDERS, "by level": by_level}.items():
            parents = order(drawn)
            row: dict[str, Any] = dict(
                what="orders", num_nodes=num_nodes, order=name, context=context,
                blocks=num_blocks(parents, BLOCK), all_blocks=(-(-num_nodes // BLOCK)) ** 2,
            )
            if _fused(device):
                queries, keys = _kernel_block(config)
                chain = tuple(range(-1, num_nodes - 1))  # which sees all that comes before
                row["blocks_read"] = num_blocks(parents, queries, keys)
                row["blocks_below"] = num_blocks(chain, queries, keys)
            times = side_by_side(
                _calls(config, TokenTree(parents), context, device), device, repeats
            )
            for way, each in times.items():
                row[f"us_{way}"] = {key: value / LAYERS for key, value in each.items()}
            yield row


def bytes_of(config: HybridConfig, num_nodes: int, context: int) -> int:
    """Count the bytes of keys and values, of the nodes' queries, keys and values, and of the
    mask."""
    slots, dim = context + 2 * num_nodes, config.head_dim
    columns = config.num_heads + 2 * config.num_kv_heads
    layers = 2 * LAYERS * (2 * config.num_kv_heads * slots + columns * num_nodes) * dim
    return layers + num_nodes * num_nodes


def _fused(device: torch.device) -> bool:
    return ops.fused(device, torch.bfloat16)


def _kernel_block(config: HybridConfig) -> tuple[int, int]:
    """Return the nodes and keys of a block of the fused kernel, in 16 bits."""
    from stree_kernels.attention.tree_attention import CORNER_KEYS, MAX_ROWS

    return max(1, MAX_ROWS * config.num_kv_heads // config.num_heads), CORNER_KEYS


def _calls(
    config: HybridConfig, tree: TokenTree, context: int, device: torch.device
) -> dict[str, Callable[[], object]]:
    topology = topology_of(tree, 1, device)

    def whole(value: int) -> Tensor:
        return torch.full((1,), value, device=device)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).bfloat16()

    path = torch.arange(tree.num_nodes, device=device)[None]
    cache_state = CacheState(whole(context), path, whole(1), whole(0), whole(0))
    slots, dim = context + 2 * tree.num_nodes, config.head_dim
    columns = (config.num_heads + 2 * config.num_kv_heads) * dim
    angles = torch.rand(2, slots, dim // 2, device=device)
    sets: list[tuple[Any, ...]] = [
        (
            normal(1, tree.num_nodes, columns),
            *(normal(1, config.num_kv_heads, slots, dim) for _ in range(2)),
            angles, topology, cache_state, 0, slots,
        )
        for _ in range(LAYERS)
    ]
    if not _fused(device):
        return {"naive": lambda: [naive.attend_tree(*each) for each in sets]}
    from stree_kernels.attention.tree_attention import attend_tree

    ways: dict[str, Callable[..., object]] = {
        "dense": partial(attend_tree, skips=False), "sparse": partial(attend_tree, skips=True)
    }

    def attend(way: str) -> None:
        for each in sets:
            ways[way](*each)

    return {way: partial(attend, way) for way in ways}
