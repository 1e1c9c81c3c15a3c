"""Make random inputs of single ops, in sets, so that no set's weights are left in a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stree.trees.token_tree import TokenTree
from stree.trees.tree_batch import topology_of
from stree_kernels import ops
from stree_kernels.contracts import CacheState, Topology


@dataclass(frozen=True)
class OpCall:
    """Size of an op's call over a tree: `context` committed tokens, `layers` sets of buffers.

    replayed: nodes of the last path, which it replays first; of usual length. batch: sequences,
    each with its own state.
    """

    tree: TokenTree
    context: int
    layers: int
    device: torch.device
    replayed: int = 3
    batch: int = 1

    @property
    def num_nodes(self) -> int:
        return self.tree.num_nodes

    @property
    def fused(self) -> bool:
        return ops.fused(self.device, torch.bfloat16)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).bfloat16()

    def place(self) -> tuple[Topology, CacheState]:
        """Return the tree's topology, for convs of width 4, and the state of a cache."""

        def whole(value: int) -> Tensor:
            return torch.full((self.batch,), value, device=self.device)

        path = torch.arange(self.num_nodes, device=self.device).repeat(self.batch, 1)
        replayed = whole(min(self.replayed, self.num_nodes))
        state = CacheState(whole(self.context), path, replayed, whole(0), whole(0)[:1])
        return topology_of(self.tree, 4, self.device), state

    def attention_sets(self, heads: int, kv_heads: int, dim: int) -> list[tuple[Any, ...]]:
        """Make the arguments of `attend_tree`, a tuple per layer."""
        topology, state = self.place()
        slots = self.context + 2 * self.num_nodes
        angles = torch.rand(2, slots, dim // 2, device=self.device)
        return [
            (
                self.normal(1, self.num_nodes, (heads + 2 * kv_heads) * dim),
                *(self.normal(1, kv_heads, slots, dim) for _ in range(2)),
                angles, topology, state, 0, slots,
            )
            for _ in range(self.layers)
        ]
