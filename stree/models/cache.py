"""Cache of a model between calls: keys and values, recurrent states, and the last tree.

A call over a token tree writes no state. It keeps the inputs that the state update needs, and
the accepted path of that tree is replayed at the start of the next call (activation replay).
Every buffer is static and every length lives on the device, so that calls can be captured.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from stree.common.errors import UsageError
from stree.engine.row_store import SavedRow
from stree.models.config import HybridConfig
from stree.models.joint import LastTree, require_backtracking
from stree.models.layer_caches import EACH, KEYS, NODES, STATES, CacheSizes, LayerCache, Which, fill
from stree.models.layers.layer import MIXER_CLASSES
from stree.models.layers.rotary import rotary_angles
from stree.trees.build import make_tree_batch
from stree.trees.token_tree import TokenTree
from stree_kernels import naive
from stree_kernels.contracts import CacheState


class HybridCache:
    """Caches of all mixers of a model, committed lengths, and accepted paths not yet replayed.

    `layers` has one cache a mixer, in the order of `HybridConfig.mixers` over all layers. States
    are fp32, or fp64 in an fp64 model: in bf16 they drift over thousands of tokens.

    Args:
        config: Of the model.
        max_length: Most committed tokens of a sequence.
        max_nodes: Most nodes of a tree.
        batch: Number of sequences.
        device: Where the buffers lie.
        dtype: Of keys, values and conv inputs.
        backtracking: "replay" the accepted path from kept inputs, or "joint": feed it again
            (`stree.models.joint`).
    """

    def __init__(
        self, config: HybridConfig, max_length: int, max_nodes: int, *, batch: int = 1,
        device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32,
        backtracking: str = "replay",
    ) -> None:
        self.max_length = max_length
        self.max_nodes = max_nodes
        self.dtype = dtype
        # Moving a path's keys touches up to max_nodes slots past the committed ones
        self.num_slots = max_length + 2 * max_nodes

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(batch, *shape, device=device, dtype=torch.long)

        self.length = zeros()  # (B,) tokens in the state
        self.path = zeros(max_nodes)  # (B, K) nodes to replay
        self.path_length = zeros()  # (B,) how many of them count
        self.variant = zeros()  # (B,) the tree of each sequence, if several
        self.parity = torch.zeros(1, device=device, dtype=torch.long)
        self.cache_state = CacheState(
            self.length, self.path, self.path_length, self.variant, self.parity
        )
        self.last_tree: LastTree | None = None
        if require_backtracking(backtracking) == "joint":
            path = make_tree_batch([TokenTree.chain(max_nodes - 1)], self.parity.device)
            self.last_tree = LastTree.empty(batch, path.topology(config.d_conv), self.parity)
        rotary = None
        if config.attn_layers:
            positions = torch.arange(self.num_slots, device=device)
            rotary = rotary_angles(config, positions, naive.accumulation_dtype(dtype))

        sizes = CacheSizes(
            batch, max_nodes, self.num_slots, self.parity, rotary, device, dtype
        )
        self.layers: list[LayerCache] = []
        alike: dict[str, Any] = {}
        for kind in chain.from_iterable(map(config.mixers, range(config.num_layers))):
            layer = MIXER_CLASSES[kind].cache_class.of(config, sizes)
            if self.last_tree is not None:
                layer = layer.sharing(alike.setdefault(kind, layer))
            self.layers.append(layer)
        self.num_committed = 0  # the host's count, the pending path included

    @property
    def device(self) -> torch.device:
        """Device of the buffers."""
        return self.path.device

    def sequence_bytes(self) -> dict[str, int]:
        """Return the bytes of a sequence by part: states, keys and values, nodes of trees.

        The inputs of the nodes of trees are kept to replay the accepted path.
        """
        held = {
            id(each): (buffer.part, each)
            for layer in self.layers for _, buffer, each in layer.buffers()
        }
        parts = dict.fromkeys((STATES, KEYS, NODES), 0)
        for part, each in held.values():
            parts[part] += each.nbytes // len(self.length)
        return parts

    def bytes_per_row(self) -> int:
        """Return the bytes of a sequence."""
        return sum(self.sequence_bytes().values())

    def narrow(self, first: int, count: int) -> HybridCache:
        """Return a view of the buffers of `count` sequences from `first` on."""
        view = copy.copy(self)
        if count == len(self.length):
            return view
        for name in ("length", "path", "path_length", "variant"):
            setattr(view, name, getattr(self, name).narrow(0, first, count))
        view.cache_state = CacheState(
            view.length, view.path, view.path_length, view.variant, self.parity
        )
        view.last_tree = self.last_tree and self.last_tree.narrow(first, count)
        view.layers = [layer.narrow(first, count) for layer in self.layers]
        return view

    def at(self, row: int) -> HybridCache:
        """Return one sequence as a cache to read a prompt into. Waits for the device."""
        view = self.narrow(row, 1)
        view.num_committed = int(view.length + view.path_length)
        return view

    def clear(self, row: Which = EACH) -> None:
        """Empty all sequences, or those of `row`, so that their buffers serve others."""
        for layer in self.layers:
            layer.clear(row)
        fill(self.length, row)
        fill(self.path_length, row)
        self.num_committed = 0

    def save(self, row: int = 0, most: int | None = None) -> SavedRow:
        """Return copies of a sequence's caches after its committed tokens, a part for each layer.

        An accepted path that is not replayed yet is left out. most is an upper bound of the
        committed tokens; None asks the device, and waits for it.
        """
        most = int(self.length[row]) if most is None else most
        parts = tuple(layer.save(most, row) for layer in self.layers)
        return SavedRow(self.length[row].clone(), parts)

    def load(self, saved: SavedRow, row: int = 0) -> None:
        """Write saved copies into a sequence, as if it had just read these tokens."""
        for layer, each in zip(self.layers, saved.parts, strict=True):
            layer.load(each, row)
        self.length[row].copy_(saved.length)
        self.path_length[row].zero_()

    def commit(self, path: Sequence[int]) -> None:
        """Accept a path of the last tree, root first; it is replayed by the next call.

        Raises `UsageError` when the cache is full.
        """
        self.reserve(len(path))
        self.path[:, : len(path)] = torch.tensor(list(path), device=self.path.device)
        self.path_length.fill_(len(path))
        self.num_committed += len(path)

    def reserve(self, num_tokens: int, after: int | None = None) -> None:
        """Raise `UsageError` unless `num_tokens` more tokens fit after the committed ones.

        after replaces the host's count of committed tokens.
        """
        start = self.num_committed if after is None else after
        if start + num_tokens > self.max_length:
            raise UsageError(
                f"{start} + {num_tokens} tokens do not fit a cache of {self.max_length}; raise "
                "max_length"
            )
