"""Chunk pass: read a chunk of a prompt as a tree that is a chain, and accept all of its tokens.

The chunk goes through the kernels of a step's tree, which need a fraction of the launches of the
operations over whole sequences. Each layer reads the chunk, then moves the row's state forward by
the tokens that count, as joint attainment does with a path (`stree.models.joint`). Its per-node
buffers are free afterwards, so all layers share one set. Row and number of tokens are known to the
device only, so that one graph serves any row and length.

Shapes: T tokens of a chunk, padding included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from stree.models.cache import HybridCache
from stree.models.layer_caches import AttentionCache, LayerCache
from stree.models.layers.part import Mixer, Nodes, TreePass
from stree.trees.token_tree import TokenTree
from stree.trees.tree_batch import topology_of
from stree_kernels.contracts import CacheState, Topology


class PrefillScratch:
    """Scratch buffers to read chunks of `size` ≥ 2 tokens, for convolutions of some width."""

    def __init__(self, cache: HybridCache, size: int, width: int) -> None:
        device = cache.device
        self.chain = topology_of(TokenTree.chain(size - 1), width, device)
        self.pair = topology_of(TokenTree.chain(1), width, device)
        self.places = torch.arange(size, device=device)[None]
        self.numbers = torch.zeros_like(cache.parity), torch.ones_like(cache.parity)
        alike: dict[type[LayerCache], LayerCache] = {}
        for layer in cache.layers:
            if type(layer) not in alike:
                alike[type(layer)] = layer.for_chunk(size)
        self.layers: list[Any] = [alike[type(layer)] for layer in cache.layers]


@dataclass(kw_only=True)
class ChunkPass(TreePass):
    """Pass over a chunk of one row.

    Attributes:
        cache: The cache of all rows.
        row: (1,) the row that reads.
        count: (1,) tokens of the chunk that count; the rest is padding.
        pair: Topology of the two-node tree that advances the states.
        after: Cache state by which the states advance along the chunk.
    """

    READY: ClassVar[str] = "none"  # the previous launch may be over the same chunk

    cache: HybridCache
    row: Tensor
    count: Tensor
    pair: Topology
    after: CacheState

    @classmethod
    def of(
        cls, tokens: Tensor, count: Tensor, row: Tensor, cache: HybridCache,
        scratch: PrefillScratch, bound: int, inputs: Tensor | None, **model: Any,
    ) -> ChunkPass:
        """Return the pass over the first `count` of tokens (1, T); the rest may be anything.

        inputs (1, T, D) are added to the embeddings; None adds nothing.
        """
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
        )

    def over_nodes(
        self, mixer: Mixer, projected: Tensor, cache: Any, out: Tensor | None = None
    ) -> Tensor:
        if isinstance(cache, AttentionCache):  # keys lie where they belong
            return super().over_nodes(mixer, projected, cache, out)
        cache.begin_joint()
        y = super().over_nodes(mixer, projected, cache, out)
        # The outputs of this tree are not used: it only advances the states. With a single node,
        # the gated delta rule would advance node by node
        mixer.over_nodes(projected[:, :2], cache, Nodes(self.pair, self.after, 0, self.bound), None)
        cache.end_joint()
        return y

    def after_a_mixer(self) -> ChunkPass:
        return self

    def end(self, hidden: Tensor) -> Tensor:
        for layer, taken in zip(self.cache.layers, self.caches, strict=True):
            layer.put_back(self.row, taken)
        self.cache.length.index_add_(0, self.row, self.count)
        return hidden
