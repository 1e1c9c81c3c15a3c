"""Tree batch: the token trees of a batch as tensors, one a row, padded to the largest.

Shapes: B rows, N nodes of the largest tree, K children of the widest node, W conv width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from stree.trees.token_tree import TokenTree
from stree_kernels.contracts import Slots, Topology

# Positions between the noise of two nodes: above those of any sequence, and 2,047 times this
# fits 31 bits
NOISE_STRIDE = 2**20
MAX_KEPT_SMALL, MAX_KEPT_LARGE = 256, 8  # results that a function caches, by the trees' size
MAX_NODES_SMALL_MASK = 256  # nodes above which a tree's mask is counted in megabytes

P = ParamSpec("P")
R = TypeVar("R")


def cached_by_trees(make: Callable[P, R]) -> Callable[P, R]:
    """Cache the last results of a function whose first argument is a tree, or several trees."""
    of_large, of_small = (
        functools.lru_cache(size)(make) for size in (MAX_KEPT_LARGE, MAX_KEPT_SMALL)
    )

    @functools.wraps(make)
    def cached(*arguments: P.args, **options: P.kwargs) -> R:
        trees: Any = arguments[0]
        trees = trees if isinstance(trees, tuple) else (trees,)
        large = any(tree.num_nodes > MAX_NODES_SMALL_MASK for tree in trees)
        return (of_large if large else of_small)(*arguments, **options)  # type: ignore[arg-type]

    return cached


@cached_by_trees
def topology_of(tree: TokenTree, width: int, device: torch.device) -> Topology:
    """Return the topology of one tree on a device, for a conv of a width."""
    return Topology(
        tree.ancestors.to(device)[None],
        torch.tensor(tree.depths, dtype=torch.int32, device=device)[None],
        tree.windows(width).int().to(device)[None],
    )


@dataclass(frozen=True)
class Level:
    """One level of the trees of B rows, as drafting needs it.

    Attributes:
        nodes: (B, n), the level's nodes with children; −1 for none.
        depths: (B, n) int32.
        places: (B, n, k), indices of the children; −1 for none.
        above: (B, n), index of the parent among the nodes of the level above.
    """

    nodes: Tensor
    depths: Tensor
    places: Tensor
    above: Tensor

    def noise_at(self, unshared: bool) -> Tensor:
        """Return noise offsets (B, n) int32 from the root's position, to draw the children with.

        They are the nodes' depths, so that the children share the target's noise; with `unshared`
        every node has an offset that no other node uses in any step.
        """
        return self.nodes.clamp(min=0).int() * NOISE_STRIDE if unshared else self.depths

    def noise_of_each(self, unshared: bool) -> Tensor:
        """Return noise offsets (B, n, k) int32 when siblings are sampled independently.

        Every child gets an offset that no other node uses in any step. Unless `unshared`, the first
        child uses the target's.
        """
        noise = self.places.clamp(min=0).int() * NOISE_STRIDE
        return noise if unshared else torch.cat([self.depths[..., None], noise[..., 1:]], -1)


class NodePaths(NamedTuple):
    """Drafts between the root and each of n nodes.

    Attributes:
        tokens: (B, n, D), the node's own token first, then its ancestors'; a shorter path goes on
            with the root's token.
        lengths: (B, n) int64, the number of drafts of each path, which is the node's depth.
    """

    tokens: Tensor
    lengths: Tensor

    @property
    def are_drafts(self) -> Tensor:
        """Mask (B, n, D) of the tokens that are drafts."""
        number = torch.arange(self.tokens.shape[2], device=self.tokens.device)
        return number < self.lengths[..., None]

    def before_next(self, recent: Tensor) -> Tensor:
        """Return the last R tokens (B, n, R) up to each node, the last first.

        recent (B, R) are those up to the roots, the root first.
        """
        size, lengths = recent.shape[1], self.lengths[..., None]
        back = torch.arange(size, device=recent.device)
        at = (back - lengths).clamp(min=0)
        earlier = recent.gather(1, at.flatten(1)).view_as(at)
        drafts = F.pad(self.tokens[..., :size], (0, max(size - self.tokens.shape[2], 0)))
        return torch.where(back < lengths, drafts, earlier)


class TreeBatch:
    """Trees of B rows as tensors; `FixedTreeBatch` and `dynamic.DynamicTreeBatch` are its kinds.

    Attributes:
        trees: The tree of each row.
        parents: (B, N), −1 for the root and −2 for padding.
        depths: (B, N) int32.
        children: (B, N, K), of each node, −1 for none.
        drawn_by: (B, N), index of a node with children among those of all `levels`.
        levels: Nodes with children, the root's level first.
        device: Of the tensors.
        pool: (B, P) drawn tokens, from which dynamic trees are chosen; None for fixed trees.
        values: (B, P) fp32 values of the drawn nodes; None where no value is needed.
    """

    trees: tuple[TokenTree, ...]
    parents: Tensor
    depths: Tensor
    children: Tensor
    drawn_by: Tensor
    levels: tuple[Level, ...]
    device: torch.device
    pool: Tensor | None = None
    values: Tensor | None = None

    @property
    def shape(self) -> Hashable:
        """Key that two tree batches share if their tensors have the same shapes."""
        raise NotImplementedError

    def topology(self, width: int) -> Topology:
        """Return the topology for a conv of a width; padding nodes see only themselves."""
        raise NotImplementedError

    def inner_topology(self, width: int) -> Topology:
        """Return the topology of the nodes that a drafter reads: those of `levels` without roots.

        The roots are committed by then, so their children begin trees of their own.
        """
        raise NotImplementedError

    def static(self) -> TreeBatch:
        """Return a copy with static tensors, which may `hold` other tree batches of the shape."""
        raise NotImplementedError

    def own(self) -> TreeBatch:
        """Return a tree batch whose tensors no other step writes."""
        raise NotImplementedError

    def hold(self, tree_batch: TreeBatch) -> None:
        """Copy the trees of another tree batch into these tensors."""
        raise NotImplementedError

    # Calls of drafters, which matter for dynamic trees

    def grow(self, level: int) -> None:
        """Choose the nodes of a level, once the children of the level above are drawn."""

    def above(self, level: int) -> Tensor:
        """Return `Level.above` (B, n) of a level after `grow`."""
        return self.levels[level].above

    def slots_at(self, temperature: Tensor) -> Slots | None:
        """Return the slots to rate for drafts drawn at temperatures (B,); None for no slots."""
        return None

    def finish(self, tokens: Tensor) -> Tensor:
        """Choose the trees, and return their tokens (B, N), given all drawn tokens."""
        return tokens

    def paths_of(self, tokens: Tensor, wanted: bool) -> NodePaths | None:
        """Return the paths to all nodes of tokens (B, N); None unless they are `wanted`."""
        if not wanted:
            return None
        nodes = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        drafts = _path(tokens, nodes, lambda at: self.parents.gather(1, at), self.max_depth)
        return NodePaths(drafts, self.depths.long())

    def paths_at(self, tokens: Tensor, level: int, wanted: bool) -> NodePaths | None:
        """Return `paths_of` the nodes (B, n) of a level, given all drawn tokens."""
        if not wanted:
            return None
        nodes = self.levels[level].nodes
        drafts = _path(tokens, nodes, self._drawn_after, level)
        return NodePaths(drafts, torch.full_like(nodes, level))

    def _drawn_after(self, nodes: Tensor) -> Tensor:
        """Return the parents of nodes among all drawn nodes; below 0 for none."""
        return self.parents.gather(1, nodes)

    def report_depths(self, depths: Tensor) -> None:
        """Write the depths (B,) that trees were grown to; nothing where they are known before."""

    def report_ranks(self, nodes: Tensor) -> None:
        """Replace accepted nodes (B, M) by their ranks among a tree's best, where they differ."""

    @property
    def num_nodes(self) -> int:
        return self.parents.shape[1]

    @property
    def judged(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Nodes (B, n) with children and their children (B, n, k), by depth; −1 for none."""
        return tuple((level.nodes, level.places) for level in self.levels)

    @property
    def num_drawn_from(self) -> int:
        """Number of nodes with children in all levels, padding included."""
        return sum(level.nodes.shape[1] for level in self.levels)

    @property
    def max_depth(self) -> int:
        return len(self.levels)


class FixedTreeBatch(TreeBatch):
    """Trees whose shapes are known before the step.

    Args:
        trees: The tree of each row.
        parents, depths, children, drawn_by, levels: As in `TreeBatch`.
    """

    def __init__(
        self, trees: tuple[TokenTree, ...], parents: Tensor, depths: Tensor, children: Tensor,
        drawn_by: Tensor, levels: tuple[Level, ...],
    ) -> None:
        self.trees, self.children, self.device = trees, children, parents.device
        self.parents, self.depths, self.drawn_by, self.levels = parents, depths, drawn_by, levels

    @functools.cached_property
    def shape(self) -> tuple[tuple[int, ...], ...]:
        return (tuple(self.children.shape), *(tuple(each.places.shape) for each in self.levels))

    def topology(self, width: int) -> Topology:
        return _topology(self.trees, width, self.device)

    def inner_topology(self, width: int) -> Topology:
        return _inner_topology(self.trees, width, self.device)

    def static(self) -> TreeBuffers:
        return TreeBuffers(self)

    def own(self) -> TreeBatch:
        return self


@cached_by_trees
def fixed_trees(trees: tuple[TokenTree, ...], device: torch.device) -> FixedTreeBatch:
    """Return the tree batch of trees with fixed shapes, cached by the trees."""
    size = max(tree.num_nodes for tree in trees)
    widest = max(1, *(len(nodes) for tree in trees for nodes in tree.children))
    parents = [_padded(tree.parents, size, -2) for tree in trees]
    depths = [_padded(tree.depths, size, 0) for tree in trees]
    children = [
        [_padded(nodes, widest, -1) for nodes in tree.children]
        + [[-1] * widest] * (size - tree.num_nodes)
        for tree in trees
    ]
    inner = _inner(trees)
    drawn_by = torch.zeros(len(trees), size, dtype=torch.long)
    levels, done = [], 0
    for depth, level in enumerate(inner):
        count = max(map(len, level))
        width = max(
            len(tree.children[node]) for tree, row in zip(trees, level, strict=True) for node in row
        )
        nodes = torch.tensor([_padded(row, count, -1) for row in level])
        places = torch.full((len(trees), count, width), -1)
        above = torch.zeros_like(nodes)
        for row, (tree, there) in enumerate(zip(trees, level, strict=True)):
            for at, node in enumerate(there):
                drawn_by[row, node] = done + at
                if depth:
                    above[row, at] = inner[depth - 1][row].index(tree.parents[node])
                places[row, at, : len(tree.children[node])] = torch.tensor(tree.children[node])
        same = torch.full_like(nodes, depth, dtype=torch.int32)
        tensors = (each.to(device) for each in (nodes, same, places, above))
        levels.append(Level(*tensors))
        done += count
    return FixedTreeBatch(
        trees, torch.tensor(parents, device=device),
        torch.tensor(depths, dtype=torch.int32, device=device),
        torch.tensor(children, device=device), drawn_by.to(device), tuple(levels),
    )


class TreeBuffers(FixedTreeBatch):
    """Tree batch in static tensors, whose trees can be exchanged between replays of graphs."""

    def __init__(self, of: FixedTreeBatch) -> None:
        super().__init__(
            of.trees, of.parents.clone(), of.depths.clone(), of.children.clone(),
            of.drawn_by.clone(), tuple(map(_cloned, of.levels)),
        )
        self._topologies: dict[tuple[Callable[..., Topology], int], Topology] = {}

    def topology(self, width: int) -> Topology:
        return self._static(_topology, width)

    def inner_topology(self, width: int) -> Topology:
        return self._static(_inner_topology, width)

    def hold(self, tree_batch: TreeBatch) -> None:
        """Copy the trees of another tree batch of the same shape into these tensors."""
        if tree_batch.trees == self.trees:
            return
        for name in ("parents", "depths", "children", "drawn_by"):
            getattr(self, name).copy_(getattr(tree_batch, name))
        for mine, theirs in zip(self.levels, tree_batch.levels, strict=True):
            _copy(mine, theirs)
        for (make, width), topology in self._topologies.items():
            _copy(topology, make(tree_batch.trees, width, self.device))
        self.trees = tree_batch.trees

    def _static(self, make: Callable[..., Topology], width: int) -> Topology:
        if (make, width) not in self._topologies:
            self._topologies[make, width] = _cloned(make(self.trees, width, self.device))
        return self._topologies[make, width]


T = TypeVar("T", Level, Topology)


def _tensors(of: Level | Topology) -> dict[str, Any]:
    return {name: value for name, value in vars(of).items() if isinstance(value, Tensor)}


def _cloned(of: T) -> T:
    return replace(of, **{name: tensor.clone() for name, tensor in _tensors(of).items()})


def _copy(mine: T, theirs: T) -> None:
    for name, tensor in _tensors(mine).items():
        tensor.copy_(getattr(theirs, name))


def _path(tokens: Tensor, nodes: Tensor, above: Callable[[Tensor], Tensor], length: int) -> Tensor:
    """Return the tokens (B, n, length) from nodes (B, n) up to the root, which is repeated."""
    path = []
    for _ in range(length):
        nodes = nodes.clamp(min=0)
        path.append(tokens.gather(1, nodes))
        nodes = above(nodes)
    return torch.stack(path, -1) if path else nodes.new_zeros(*nodes.shape, 0)


def _inner(trees: tuple[TokenTree, ...]) -> list[list[list[int]]]:
    """Return each row's nodes with children, by depth, down to the deepest of any row."""
    deepest = max(tree.max_depth for tree in trees)
    return [
        [
            [node for node in tree.levels[depth] if tree.children[node]]
            if depth <= tree.max_depth
            else []
            for tree in trees
        ]
        for depth in range(deepest)
    ]


@cached_by_trees
def _topology(trees: tuple[TokenTree, ...], width: int, device: torch.device) -> Topology:
    size = max(tree.num_nodes for tree in trees)
    ancestors = torch.eye(size, dtype=torch.bool).repeat(len(trees), 1, 1)
    depths = torch.zeros(len(trees), size, dtype=torch.int32)
    windows = torch.zeros(len(trees), size, width, dtype=torch.int32)
    for row, tree in enumerate(trees):
        ancestors[row, : tree.num_nodes, : tree.num_nodes] = tree.ancestors
        depths[row, : tree.num_nodes] = torch.tensor(tree.depths)
        windows[row, : tree.num_nodes] = tree.windows(width)
    return Topology(
        ancestors.to(device), depths.to(device), windows.to(device),
        chains=all(tree.max_depth + 1 == tree.num_nodes for tree in trees),
    )


@cached_by_trees
def _inner_topology(trees: tuple[TokenTree, ...], width: int, device: torch.device) -> Topology:
    levels = _inner(trees)[1:]
    counts = [max(map(len, level)) for level in levels]
    size = sum(counts)
    ancestors = torch.eye(size, dtype=torch.bool).repeat(len(trees), 1, 1)
    depths = torch.zeros(len(trees), size, dtype=torch.int32)
    windows = torch.zeros(len(trees), size, width, dtype=torch.int32)
    for row, tree in enumerate(trees):
        place: dict[int, int] = {}
        done = 0
        for level, count in zip(levels, counts, strict=True):
            place |= {node: done + at for at, node in enumerate(level[row])}
            done += count
        for node, at in place.items():
            path = [place[each] for each in tree.path_to(node)[1:]]
            ancestors[row, at, path] = True
            depths[row, at] = len(path) - 1
            seen = list(range(width - 1)) + [width - 1 + each for each in path]
            windows[row, at] = torch.tensor(seen[-width:])
    return Topology(ancestors.to(device), depths.to(device), windows.to(device))


def _padded(values: Sequence[int], size: int, filler: int) -> list[int]:
    return [*values, *[filler] * (size - len(values))]
