"""Joint attainment and advancement (Snakes and Ladders, section 3.2): the other way to backtrack.

Replay keeps inputs of a tree's nodes, and advances the states along the accepted path when the next
call begins. Here the path's tokens are fed again before the next tree, in the same products: every
layer reads the path as a chain from the state before it, advances the state along the nodes that
count, and reads the tree from there. Only the states, the conv states and the tokens of the tree
are left between two calls, so all layers share the buffers of a call.

Shapes: B sequences, P nodes of the longest path, N of the tree, K places of a path.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from stree.common.errors import UsageError
from stree.models.layers.part import Mixer, Nodes, TreePass, rows_of
from stree_kernels.contracts import CacheState, Stream, Topology

BACKTRACKING = ("replay", "joint")


def require_backtracking(name: str) -> str:
    """Return `name`. Raises `UsageError` unless it names a way to backtrack."""
    if name not in BACKTRACKING:
        raise UsageError(f"backtracking is {name!r}, wanted one of {', '.join(BACKTRACKING)}")
    return name


@dataclass(frozen=True)
class LastTree:
    """Tokens of the last tree, whose accepted path is fed again, and constants.

    Attributes:
        tokens: (B, K) int64.
        chain: (B, K), the nodes 0 to K − 1 of a chain.
        topology: Of the chain.
        none: (B,) zeros, the length of no path.
        parities: The two halves, (1,) each.
    """

    tokens: Tensor
    chain: Tensor
    topology: Topology
    none: Tensor
    parities: tuple[Tensor, Tensor]

    @classmethod
    def empty(cls, batch: int, topology: Topology, parity: Tensor) -> LastTree:
        """Return the record of `batch` sequences before any tree.

        topology is that of a chain of K nodes; parity (1,) is the cache's, which joint calls do
        not change.
        """
        num_places = topology.depths.shape[1]
        tokens = torch.zeros(batch, num_places, dtype=torch.long, device=parity.device)
        chain = torch.arange(num_places, device=parity.device).repeat(batch, 1)
        return cls(tokens, chain, topology, torch.zeros_like(chain[:, 0]), (parity, 1 - parity))

    def narrow(self, first: int, count: int) -> LastTree:
        tokens, chain, none = (
            each.narrow(0, first, count) for each in (self.tokens, self.chain, self.none)
        )
        return replace(self, tokens=tokens, chain=chain, none=none)

    def on(self, path: Tensor) -> Tensor:
        """Return the tokens (B, P) at the nodes of path (B, P)."""
        return self.tokens.gather(1, path)

    def cache_states(self, after: CacheState) -> tuple[CacheState, CacheState]:
        """Return the cache states of the path, with nothing to replay, and of the tree after it."""
        first, second = self.parities
        return (
            CacheState(after.length, self.chain, self.none, self.none, first).of_a_call("memory"),
            CacheState(after.length, self.chain, after.path_length, after.variant, second),
        )


@dataclass(kw_only=True)
class JointPass(TreePass):
    """Pass over [accepted path, tree]; `cache_state` and `topology` are the tree's.

    Attributes:
        chain: Topology of the path.
        before: Cache state of the path.
        path_nodes: Nodes of the longest path.
    """

    READY: ClassVar[str] = "none"  # the previous launch was over the path

    chain: Topology
    before: CacheState
    path_nodes: int

    @classmethod
    def of(
        cls, tokens: Tensor, topology: Topology, cache: Any, bound: int, longest: int | None,
        **model: Any,
    ) -> JointPass:
        """Return the pass over the last tree's accepted path and the new tree's tokens (B, N).

        The new tokens replace those of the last tree. longest is an upper bound of the paths'
        lengths; None asks the device, and waits for it.
        """
        last = cache.last_tree
        if longest is None:
            longest = max(1, int(cache.path_length.max()))
        fed = torch.cat([last.on(cache.path[:, :longest]), tokens], dim=1)
        last.tokens[:, : tokens.shape[1]] = tokens
        before, after = last.cache_states(cache.cache_state)
        return cls(
            topology, after, 0, bound + longest, cache.layers, tokens=fed, nodes=None,
            chain=last.topology, before=before, path_nodes=longest, **model,
        )

    def over_nodes(
        self, mixer: Mixer, projected: Tensor, cache: Any, out: Tensor | None = None
    ) -> Tensor:
        cache.begin_joint()
        y = [
            mixer.over_nodes(
                projected[:, part], cache, Nodes(*trees, 0, self.bound),
                None if out is None else out[:, part],
            )
            for part, trees in (
                (slice(self.path_nodes), (self.chain, self.before)),
                (slice(self.path_nodes, None), (self.topology, self.cache_state)),
            )
        ]
        cache.end_joint()
        return torch.cat(y, dim=1) if out is None else out

    def after_a_mixer(self) -> JointPass:
        return self

    def enter(self, layer: int, x: Tensor | Stream) -> None:
        """Take features of the tree's nodes, not of the path's."""
        super().enter(layer, rows_of(x)[:, self.path_nodes :])

    def end(self, hidden: Tensor) -> Tensor:
        self.cache_state.length.add_(self.cache_state.path_length)
        self.cache_state.path_length.zero_()
        return hidden[:, self.path_nodes :].contiguous()
