"""Dynamic trees: each row's shape is found on the device in each step, in static tensors.

Shapes: B rows, N nodes of a tree, P nodes of the pool that it is chosen from, W nodes of a level
with W children each. The pool has the root, its children, and then level by level the children of
the W best nodes above, in their order.
"""

from __future__ import annotations

import functools
import math
from typing import ClassVar

import torch
from torch import Tensor

from stree.trees.token_tree import BeamSearchTree, BeamTree, SlotTree, StepTree, TokenTree
from stree.trees.tree_batch import Level, TreeBatch
from stree_kernels import ops
from stree_kernels.contracts import Slots, Topology

ABSENT = -2  # the parent of a node that a tree does not have in a step
NUM_NODES_REORDERED = 256  # from which on a depth-first order spares attention whole blocks


class DynamicTreeBatch(TreeBatch):
    """Tree batch of one `BeamTree`, whose tensors a draft writes in each step.

    `levels` are the pool's: their nodes, written by `grow`, and the indices of their children.
    """

    pool: Tensor
    inner: Tensor | None = None  # (B, N), `drawn_by` where a verifier needs it
    least: float = -math.inf  # the value below which nodes of a tree stay empty
    ranks: Tensor | None = None  # (B, N), of each node by value, where nodes come depth first
    picks_leaves: ClassVar[bool] = False  # the last level's nodes are picked like the others'

    def __init__(self, tree: BeamTree, batch: int, device: torch.device) -> None:
        def filled(value: int, *shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.full((batch, *shape), value, dtype=dtype, device=device)

        self.tree, self.device = tree, device
        self.pool = filled(0, tree.num_drawn)
        # The nodes with the best values get children, and become the tree
        self._paths = self._slots = filled(0, tree.num_drawn, dtype=torch.float32)
        self.values = self._paths
        self.tokens = filled(0, tree.num_nodes)
        self.parents = filled(-1, tree.num_nodes)
        self.depths = filled(0, tree.num_nodes, dtype=torch.int32)
        # The picked nodes of all levels, one level after the other, below the root
        num_picked = tree.num_inner + tree.width * self.picks_leaves
        self._drawn = filled(0, 1 + num_picked)
        self._picked_parents = filled(-1, num_picked)
        self._inner_parents = self._picked_parents[:, : tree.num_inner]
        self._drawn_by, self._pool_depths = _constants(tree, device)
        self._numbers = torch.arange(tree.num_nodes, device=device)
        if tree.num_nodes >= NUM_NODES_REORDERED and not self.picks_leaves:
            self.ranks = filled(0, tree.num_nodes)
        self._topologies: dict[tuple[int, int], Topology] = {}
        levels, width = [], tree.width
        for depth in range(tree.depth):
            count = width if depth else 1
            start, children = (1 + (depth - 1) * width, self._first(depth + 1)) if depth else (0, 1)
            places = torch.arange(children, children + count * width, device=device)
            levels.append(Level(
                self._drawn[:, start : start + count], filled(depth, count, dtype=torch.int32),
                places.view(1, count, width).repeat(batch, 1, 1), filled(0, count),
            ))
        self.levels = tuple(levels)

    @property
    def trees(self) -> tuple[StepTree, ...]:
        """Trees of the rows in the last step. Waits for the device."""
        return tuple(
            TokenTree(tuple(parent for parent in row if parent > ABSENT))
            for row in self.parents.tolist()
        )

    @property
    def sizes(self) -> Tensor:
        """Number of nodes (B,) of each tree in the last step, without empty ones."""
        return (self.parents > ABSENT).sum(1)

    @property
    def children(self) -> Tensor:
        """Children (B, N, W) of each node, −1 for none."""
        batch, size = self.parents.shape
        parents = torch.where(self.parents < 0, size, self.parents)
        rank = (parents[..., None] == parents[:, None]).tril(-1).sum(-1)
        rank = torch.where(parents == size, 0, rank)  # of empty nodes there may be more
        width = self.tree.width
        children = self.parents.new_full((batch, (size + 1) * width), -1)
        nodes = torch.arange(size, device=self.device).expand(batch, -1)
        return children.scatter(1, parents * width + rank, nodes)[:, : size * width].unflatten(
            1, (size, width)
        )

    @property
    def judged(self) -> tuple[tuple[Tensor, Tensor], ...]:
        children = self.children
        levels = []
        for depth in range(self.tree.depth):
            nodes = torch.where(self.depths == depth, self._numbers, -1)
            levels.append((nodes, torch.where(nodes[..., None] < 0, -1, children)))
        return tuple(levels)

    @property
    def shape(self) -> tuple[StepTree, ...]:
        return (self.tree,)

    def own(self) -> DynamicTreeBatch:
        return type(self)(self.tree, len(self.pool), self.device)

    def static(self) -> DynamicTreeBatch:
        return self.own()

    def hold(self, tree_batch: TreeBatch) -> None:
        """Do nothing: the draft makes the trees."""

    def topology(self, width: int) -> Topology:
        return self._built(self.parents, self.tree.depth, width)

    def inner_topology(self, width: int) -> Topology:
        return self._built(self._inner_parents, self.tree.depth - 2, width)

    def grow(self, level: int) -> None:
        start, width = (level - 1) * self.tree.width, self.tree.width
        ops.pick_level(
            self._paths, self._drawn_by, self._first(level), self._first(level + 1),
            self._drawn[:, 1 + start : 1 + start + width],
            self._picked_parents[:, start : start + width],
        )

    def above(self, level: int) -> Tensor:
        if level < 2:  # below the root, or the root
            return self.levels[level].above
        start = (level - 1) * self.tree.width
        parents = self._inner_parents[:, start : start + self.tree.width]
        return parents - (start - self.tree.width)

    def finish(self, tokens: Tensor) -> Tensor:
        ops.pick_tree(
            self._slots, self._drawn_by, self._drawn, self._pool_depths, tokens,
            self.tokens, self.parents, self.depths, self.inner, self.least,
        )
        if self.ranks is not None:
            self._renumber(depth_first(self.parents, self.topology(2).ancestors))
        return self.tokens

    def _renumber(self, places: Tensor) -> None:
        """Move each node to its place (B, N)."""
        assert self.ranks is not None
        self.ranks.scatter_(1, places, self._numbers.expand_as(places))
        above = places.gather(1, self.parents.clamp(min=0))
        self.parents.copy_(torch.where(self.parents < 0, self.parents, above))
        for values in (self.parents, self.tokens, self.depths, self.inner):
            if values is not None:
                values.copy_(values.gather(1, self.ranks))

    def report_depths(self, depths: Tensor) -> None:
        depths.copy_(self.depths.amax(1))

    def report_ranks(self, nodes: Tensor) -> None:
        if self.ranks is not None:
            nodes.copy_(torch.where(nodes < 0, nodes, self.ranks.gather(1, nodes.clamp(min=0))))

    def _drawn_after(self, nodes: Tensor) -> Tensor:
        return self._drawn.gather(1, self._drawn_by[nodes])

    def _first(self, depth: int) -> int:
        """Return the index of the pool's first node of a depth."""
        return 1 + (depth > 1) * self.tree.width + max(depth - 2, 0) * self.tree.width**2

    def _built(self, parents: Tensor, max_depth: int, width: int) -> Topology:
        batch, size = parents.shape
        key = (size, width)
        if key not in self._topologies:
            self._topologies[key] = Topology(
                torch.zeros(batch, size, size, dtype=torch.bool, device=self.device),
                torch.zeros(batch, size, dtype=torch.int32, device=self.device),
                torch.zeros(batch, size, width, dtype=torch.int32, device=self.device),
                written=True,
            )
        ops.build_topology(parents, max_depth, self._topologies[key])
        return self._topologies[key]


class BeamSearchTreeBatch(DynamicTreeBatch):
    """Tree batch of one `BeamSearchTree`: the picked nodes of all levels are the tree."""

    picks_leaves = True

    def __init__(self, tree: BeamSearchTree, batch: int, device: torch.device) -> None:
        super().__init__(tree, batch, device)
        self.depths.copy_(torch.tensor(tree.shape.depths))

    def finish(self, tokens: Tensor) -> Tensor:
        self.grow(self.tree.depth)
        torch.gather(tokens, 1, self._drawn, out=self.tokens)
        torch.add(self._picked_parents, 1, out=self.parents[:, 1:])
        return self.tokens


class SlotTreeBatch(DynamicTreeBatch):
    """Tree batch of one `SlotTree`, chosen by the values of slots, not of the tokens in them."""

    def __init__(self, tree: SlotTree, batch: int, device: torch.device) -> None:
        super().__init__(tree, batch, device)
        self._slots = torch.zeros_like(self._paths)
        self.drawn_by = self.inner = torch.zeros_like(self.parents)
        self.least = math.log(tree.threshold) if tree.threshold else -math.inf

    def slots_at(self, temperature: Tensor) -> Slots:
        return Slots(self._slots, temperature)


def depth_first(parents: Tensor, ancestors: Tensor) -> Tensor:
    """Return the places (B, N) of nodes when each is followed by all below it (DySpec, App. C).

    Siblings stay in their order, which verifiers follow. Empty nodes come last.

    Args:
        parents: (B, N), −1 for the root and `ABSENT` for an empty node; each before its children.
        ancestors: (B, N, N) bool, as in `Topology`.
    """
    siblings = (parents[:, :, None] == parents[:, None]).tril(-1)
    wide = ancestors.float()  # sums of at most N ones are exact
    before = siblings.float() @ wide.sum(1)[..., None]
    empty = parents == ABSENT
    start = torch.where(empty, (~empty).sum(1, keepdim=True), parents >= 0)
    return (wide @ (start[..., None] + before))[..., 0].long()


_KINDS = {"beam": DynamicTreeBatch, "beam search": BeamSearchTreeBatch, "dyspec": SlotTreeBatch}


@functools.lru_cache(maxsize=64)
def dynamic_tree_batch(tree: BeamTree, batch: int, device: torch.device) -> DynamicTreeBatch:
    """Return the shared tree batch to read sizes from; a step that runs grows its `own`."""
    return _KINDS[tree.kind](tree, batch, device)


@functools.lru_cache(maxsize=64)
def _constants(tree: BeamTree, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return for each node of a pool the index, among all levels, of its parent, and its depth."""
    drawn_by, depths = [0], [0]
    for depth in range(1, tree.depth + 1):
        parents = range(1 + (depth - 2) * tree.width, 1 + (depth - 1) * tree.width)
        for parent in parents if depth > 1 else range(1):
            drawn_by += [parent] * tree.width
            depths += [depth] * tree.width
    return (
        torch.tensor(drawn_by, device=device),
        torch.tensor(depths, dtype=torch.int32, device=device),
    )
