"""CUDA graphs of the two calls of a decoding step: the target's and the drafter's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from stree.models.cache import HybridCache
from stree.models.hybrid import HybridModel, topology_of
from stree.tree import TokenTree
from stree_kernels import ops

MAX_KEPT = 8  # graphs, or pairs of them
BUCKET = 256  # without the fused kernels, cache slots are read in multiples of this, a graph each


K = TypeVar("K")
V = TypeVar("V")


class LastUsed(dict[K, V]):
    """Holds the `MAX_KEPT` values that were used last: graphs hold memory."""

    def __getitem__(self, key: K) -> V:
        value = self.pop(key)  # a dict is in the order of insertion
        super().__setitem__(key, value)
        return value

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        if len(self) > MAX_KEPT:
            del self[next(iter(self))]


class Capture:
    """A function of static tensors, captured once and replayed without host work.

    Args: device, the GPU; function, reads and writes static tensors only, and is not run here;
    rehearsal, the same work on scratch tensors, run beforehand so that libraries and lazy constants
    are ready; generators, the random generators the function draws from.
    """

    def __init__(
        self,
        device: torch.device,
        function: Callable[[], Any],
        rehearsal: Callable[[], object],
        generators: tuple[torch.Generator, ...] = (),
    ) -> None:
        with ops.current(device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                rehearsal()
                rehearsal()
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            for generator in generators:
                self.graph.register_generator_state(generator)
            # PyTorch's own stream for captures is of the GPU that was current at the first one
            with torch.cuda.graph(self.graph, stream=stream):
                self.outputs = function()

    def replay(self) -> Any:
        """Run it; returns the static outputs, which the next replay overwrites."""
        self.graph.replay()
        return self.outputs


class CapturedTree:
    """`HybridModel.tree_forward` over one tree and one cache, captured by bucket of length."""

    def __init__(self, model: HybridModel, tree: TokenTree, cache: HybridCache) -> None:
        self.model, self.tree, self.cache = model, tree, cache
        self.tokens = torch.zeros(1, tree.num_nodes, dtype=torch.long, device=model.device)
        self.captures: dict[int, Capture] = {}
        # Graphs read it by address: it must outlive the function's own cache
        self.topology = topology_of(tree, model.config.d_conv, model.device)

    @property
    def reads_lengths_on_device(self) -> bool:
        """Whether one graph serves every length: so it is with the fused kernels."""
        return ops.fused(self.model.device, self.model.dtype)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits (1, N, V) of tokens (1, N)."""
        bound = self.cache.num_slots
        if not self.reads_lengths_on_device:
            needed = self.cache.num_committed + self.tree.num_nodes
            bound = min(-(-needed // BUCKET) * BUCKET, bound)
        if bound not in self.captures:
            self.captures[bound] = self._capture(bound)
        self.tokens.copy_(tokens)
        return self.captures[bound].replay()

    def _capture(self, bound: int) -> Capture:
        scratch = self.model.new_cache(self.cache.max_length, self.cache.max_nodes)

        def run(cache: HybridCache) -> Tensor:
            return self.model.tree_forward(self.tokens, self.tree, cache, bound)

        return Capture(self.model.device, lambda: run(self.cache), lambda: run(scratch))
