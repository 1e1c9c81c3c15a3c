"""Pieces of prompts read as trees that are chains, with all of their tokens accepted.

A piece goes through the kernels of a step's tree, which need a fraction of the launches that the
operations over whole sequences do. Every layer goes over it from the state before it and then
advances the state along as many of its nodes as count, as joint attainment does with a path
(`stree.models.joint`); so what a layer keeps of nodes is not needed after it, and all share it.
Only the device knows which sequence reads and how many tokens there are: one graph serves any.

Shapes: T tokens of a piece, the padding behind them included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from stree.models.cache import HybridCache
from stree.models.layer_caches import AttentionCache, LayerCache
from stree.models.layers.part import TreePass
from stree.trees.token_tree import TokenTree
from stree.trees.tree_batch import topology_of
from stree_kernels.contracts import CacheState, Topology


class PrefillScratch:
    """What reading pieces of `size` tokens (two at least) takes beside a cache, for a conv of some
    width."""

    def __init__(self, cache: HybridCache, size: int, width: int) -> None:
        device = cache.device
        self.chain = topology_of(TokenTree.chain(size - 1), width, device)
        self.pair = topology_of(TokenTree.chain(1), width, device)
        self.places = torch.arange(size, device=device)[None]
        self.numbers = torch.zeros_like(cache.parity), torch.ones_like(cache.parity)
        alike: dict[type[LayerCache], LayerCache] = {}
        for layer in cache.layers:
            if type(layer) not in alike:
                alike[type(layer)] = layer.for_piece(size)
        self.layers: list[Any] = [alike[type(layer)] for layer in cache.layers]


@dataclass(kw_only=True)
class ChunkPass(TreePass):
    """A call over a piece; `cache_state` and `topology` are its own, the others say how states go
    on along it."""

    READY: ClassVar[str] = "none"  # the launch ahead may be over the same piece

    cache: HybridCache
    row: Tensor  # (1,) the sequence that reads
    count: Tensor  # (1,) tokens that count
    pair: Topology
    after: CacheState

    @classmethod
    def of(
        cls, tokens: Tensor, count: Tensor, row: Tensor, cache: HybridCache,
        scratch: PrefillScratch, bound: int, inputs: Tensor | None, **model: Any,
    ) -> ChunkPass:  # fmt: skip
        """Of the first `count` of tokens (1, T), by one sequence of a cache; the rest may be
        anything. inputs (1, T, D), likewise, or None."""
        padding = scratch.places >= count
        if inputs is not None:
            inputs = inputs.masked_fill(padding[..., None], 0)
        zero, one = scratch.numbers
        length = cache.length.index_select(0, row)
        before, after = (
            CacheState(length, scratch.places, accepted, zero, parity, row).of_a_call(cls.READY)
            for accepted, parity in ((zero, zero), (count, one))
        )
        layers = zip(cache.layers, scratch.layers, strict=True)
        return cls(
            scratch.chain, before, 0, bound, [layer.taken(row, nodes) for layer, nodes in layers],
            tokens=tokens.masked_fill(padding, 0), nodes=None, inputs=inputs,
            cache=cache, row=row, count=count, pair=scratch.pair, after=after, **model,
        )  # fmt: skip

    def over_nodes(
        self, cache: Any, op: Callable[..., Tensor], x: Tensor, out: Tensor | None = None
    ) -> Tensor:
        if isinstance(cache, AttentionCache):  # keys lie where they belong
            return op(x, out, self.topology, self.cache_state, 0)
        cache.begin_joint()
        y = op(x, out, self.topology, self.cache_state, 0)
        # A tree that nobody wants, for what comes before it. Of a single node, the gated delta rule
        # would go on node by node
        op(x[:, :2], None, self.pair, self.after, 0)
        cache.end_joint()
        return y

    def after_a_mixer(self) -> ChunkPass:
        return self

    def end(self, hidden: Tensor) -> Tensor:
        for layer, taken in zip(self.cache.layers, self.caches, strict=True):
            layer.put_back(self.row, taken)
        self.cache.length.index_add_(0, self.row, self.count)
        return hidden
