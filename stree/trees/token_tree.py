"""Trees of steps: token trees, whose shape is fixed, and recipes by which a step grows one."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from stree.common.errors import NotFound, UsageError
from stree.common.plain_data import parse_yaml, read_text

if TYPE_CHECKING:
    from torch import Tensor

MAX_NODES = 2048  # noise of each is at a position of its own in 31 bits (`NOISE_STRIDE`)
MAX_CHILDREN = 255  # of a node: one program finds a row's best (kernel `top`)
# Forms of names that `TokenTree.load` takes
FORMS = (
    "paper, chain-N, expand-K-…, png-N-D, beam-M-N, beam-W-D-N, dyspec-W-D-N, dyspec-W-D-N-T or "
    "a YAML file"
)


class StepTree:
    """Tree of a step: a shape (`TokenTree`), or a recipe that grows one (`BeamTree`).

    A policy (`stree.tree_policy`) chooses among them.

    Attributes:
        name: A name for people.
        grows: True for a recipe. All rows of a step have the same recipe, or none has one.
        by_slots: True if it does not depend on a draft's own token whether the draft is verified.
    """

    name: str
    grows: ClassVar[bool] = False
    by_slots: ClassVar[bool] = True

    @cached_property
    def shape(self) -> TokenTree:
        """Its shape; of a recipe, an example of the shapes that it grows."""
        raise NotImplementedError

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """The parent's index of each node of `shape`, −1 for the root."""
        return self.shape.parents

    @cached_property
    def num_nodes(self) -> int:
        """Number of nodes, the root included; of a recipe, the most."""
        return len(self.parents)

    @cached_property
    def max_depth(self) -> int:
        """Depth of the deepest node, which is the most drafts that a call can accept."""
        return max(self.shape.depths)

    @cached_property
    def widest(self) -> int:
        """Largest number of children of a node."""
        return max(map(len, self.shape.children))

    @property
    def num_inner(self) -> int:
        """Number of nodes that a recipe gives children, below the root; 0 for a shape."""
        return 0

    @property
    def num_drawn(self) -> int:
        """Number of nodes that a recipe chooses the tree from, the root included."""
        return self.num_nodes

    @property
    def alike(self) -> tuple[str | int | float, ...]:
        """Key that two recipes share if one shows what the other accepts; () for a shape."""
        return ()

    def end_of(self, path: Sequence[int]) -> int:
        """Return the node of `parents` at which an accepted path ends."""
        raise NotImplementedError

    def shows_all_of(self, other: StepTree) -> bool:
        """Return whether paths that are accepted in this tree tell all that another's would."""
        raise NotImplementedError


@dataclass(frozen=True)
class TokenTree(StepTree):
    """A token tree of a fixed shape; node 0 is the root, the last token that is already certain.

    Args:
        parents: The parent's index of each node, −1 for the root; parents come before children.
        name: A name for people; two trees with the same parents and names are equal.

    Raises:
        UsageError: For another order, no node, more than 2,048 nodes, or a node with more than 255
            children.

    Example:
        >>> import stree
        >>> tree = stree.TokenTree.load("expand-2-1")
        >>> tree.parents, tree.max_depth
        ((-1, 0, 0, 1, 2), 2)
    """

    parents: tuple[int, ...] = field()
    name: str = "tree"

    def __post_init__(self) -> None:
        parents = tuple(self.parents)
        object.__setattr__(self, "parents", parents)
        if not 1 <= len(parents) <= MAX_NODES:
            raise UsageError(
                f"tree {self.name!r} has {len(parents)} nodes, wanted 1 to {MAX_NODES}"
            )
        if any(isinstance(parent, bool) or not isinstance(parent, int) for parent in parents):
            raise UsageError(f"tree {self.name!r}: parents must be whole numbers, got {parents}")
        if parents[0] != -1:
            raise UsageError(f"tree {self.name!r}: node 0 is the root, so its parent must be -1")
        for node, parent in enumerate(parents[1:], start=1):
            if not 0 <= parent < node:
                raise UsageError(
                    f"tree {self.name!r}: node {node} has parent {parent}; a parent comes before "
                    f"its children, so wanted 0 to {node - 1}. Renumber the nodes by depth"
                )
        if len(parents) > MAX_CHILDREN and (most := max(map(len, self.children))) > MAX_CHILDREN:
            raise UsageError(
                f"tree {self.name!r} has a node with {most} children, wanted at most {MAX_CHILDREN}"
            )

    @classmethod
    def chain(cls, num_drafts: int, name: str | None = None) -> TokenTree:
        """Return a root followed by a chain of `num_drafts` ≥ 0 drafts."""
        if num_drafts >= MAX_NODES:  # before their nodes are made
            raise UsageError(f"a chain of {num_drafts} drafts, wanted at most {MAX_NODES - 1}")
        return cls(tuple(range(-1, num_drafts)), name or f"chain-{num_drafts}")

    @classmethod
    def paper(cls) -> TokenTree:
        """Return STree's static tree: 13 nodes, 4 levels of 3 (its Fig. 4a)."""
        return cls((-1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 7, 7, 7), "paper")

    @classmethod
    def load(cls, name_or_path: str | Path) -> StepTree:
        """Return the tree of a name, or of a YAML file such as those in configs/trees/.

        Names are "paper", "chain-4", "expand-3-2-1", "png-6-2", "beam-3-4", "beam-4-5-16",
        "dyspec-4-5-16" and so on. A file holds `name` and `parents`. Raises `NotFound` for an
        unknown name, and `UsageError` for a file that is no tree.
        """
        name = str(name_or_path)
        if re.fullmatch(r"chain-[0-9]{1,9}", name):
            return cls.chain(int(name[6:]))
        if chains := re.fullmatch(r"png-([0-9]{1,3})-([0-9]{1,3})", name):
            return several_chains(*map(int, chains.groups()))
        if re.fullmatch(r"expand(-[0-9]{1,3}){1,64}", name):
            return expanded([int(count) for count in name.split("-")[1:]])
        if dynamic := BeamTree.named(name):
            return dynamic
        if name == "paper":
            return cls.paper()
        path = Path(name)
        if not os.path.isfile(path):
            raise NotFound(f"no tree {name!r:.200}: give {FORMS}")
        try:
            content = parse_yaml(read_text(path))
        except (OSError, ValueError) as error:
            raise UsageError(f"tree {path} is no YAML: {error}") from error
        if not isinstance(content, dict) or not isinstance(content.get("parents"), list):
            raise UsageError(f"tree {path} must hold `parents: [-1, 0, …]`")
        unknown = sorted(str(key) for key in content.keys() - {"name", "parents", "description"})
        if unknown:
            raise UsageError(f"tree {path} has unknown keys {unknown}")
        name = content.get("name", path.stem)
        if not isinstance(name, str):
            raise UsageError(f"tree {path} has the name {name!r}, wanted a text")
        return cls(tuple(content["parents"]), name)

    def __hash__(self) -> int:
        """Return a cached hash: trees are dictionary keys many times a step."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.parents)  # not of text, whose hash is another in each process

    @property
    def shape(self) -> TokenTree:
        return self

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; 0 for the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of each node, in the order of their indices."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(node)
        return tuple(tuple(nodes) for nodes in children)

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Node indices by depth, the root's level first."""
        levels: list[list[int]] = [[] for _ in range(self.max_depth + 1)]
        for node, depth in enumerate(self.depths):
            levels[depth].append(node)
        return tuple(map(tuple, levels))

    def end_of(self, path: Sequence[int]) -> int:
        return path[-1]

    @cached_property
    def ranks(self) -> frozenset[tuple[int, int]]:
        """Depth of the parent and rank of each child."""
        return frozenset(
            (depth, rank) for depth, children in zip(self.depths, self.children, strict=True)
            for rank in range(len(children))
        )

    def shows_all_of(self, other: StepTree) -> bool:
        return not other.grows and self.ranks >= other.shape.ranks

    def path_to(self, node: int) -> list[int]:
        """Return the nodes from the root to `node`, both included."""
        path = [node]
        while self.parents[path[-1]] >= 0:
            path.append(self.parents[path[-1]])
        return path[::-1]

    @cached_property
    def ancestors(self) -> Tensor:
        """Mask (N, N) bool on the CPU: [i, j] is true when j is i or an ancestor of i."""
        import torch  # only here: schedulers choose trees without it

        mask = torch.eye(self.num_nodes, dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            mask[node] |= mask[parent]
        return mask

    def windows(self, width: int) -> Tensor:
        """Return the inputs (N, width) of a causal convolution at each node, on the CPU.

        They are indices into [the width − 1 last committed inputs, the nodes' inputs], oldest
        first.
        """
        import torch

        rows: list[list[int]] = []
        for node, parent in enumerate(self.parents):
            above = list(range(width - 1)) if parent < 0 else rows[parent][1:]
            rows.append([*above, width - 1 + node])
        return torch.tensor(rows)

    def __str__(self) -> str:
        shape = list(self.parents) if self.num_nodes <= 32 else f"of {self.num_nodes} nodes"
        return f"{self.name} {shape}"


PLAIN = TokenTree.chain(0, "plain")


@dataclass(frozen=True)
class BeamTree(StepTree):
    """Recipe of a dynamic tree, grown for each row in each step, level by level, on the device.

    At each of `depth` levels the `width` best nodes are given `width` children each; of all drawn
    nodes the num_nodes best (the root included) are verified. The value of a node is its path's
    probability by the drafter, as in EAGLE-2 (Li et al. 2024). Whether a draft is left out depends
    on its own token, so only verifiers that do not use the drafter's probabilities keep the
    target's distribution.

    Each step grows a shape of its own, so statistics record depths only. Make the recipe with `of`.
    """

    name: str
    width: int
    depth: int
    num_nodes: int = field()

    grows: ClassVar[bool] = True
    by_slots: ClassVar[bool] = False
    kind: ClassVar[str] = "beam"
    most_drawn: ClassVar[int] = 4096  # limit of the nodes that a tree is chosen from

    @classmethod
    def of(cls, width: int, depth: int, num_nodes: int) -> Self:
        """Return the tree of these numbers. Raises `UsageError` if there is none."""
        name = f"{cls.kind}-{width}-{depth}-{num_nodes}"
        pool = cls.require_drawn(name, width, depth)
        most = min(pool, MAX_NODES)
        if not depth < num_nodes <= most:
            raise UsageError(
                f"{name} verifies {num_nodes} nodes of {pool}, wanted {depth + 1} (a path to its "
                f"depth) to {most}"
            )
        return cls(name, width, depth, num_nodes)

    def __hash__(self) -> int:
        return hash((self.width, self.depth, self.num_nodes))

    @cached_property
    def shape(self) -> TokenTree:
        left, levels = self.num_nodes - 1 - self.depth, [1]
        for _ in range(self.depth):
            more = min(left, self.width * levels[-1] - 1)
            levels.append(1 + more)
            left -= more
        parents, start = [-1], 0
        for above, count in pairwise(levels):
            parents += [start + at // self.width for at in range(count)]
            start += above
        return TokenTree(tuple(parents), self.name)

    @classmethod
    def require_drawn(cls, name: str, width: int, depth: int) -> int:
        """Return the number of nodes that a tree is chosen from, the root included.

        Raises `UsageError` for none, and for more than `most_drawn`.
        """
        pool = 1 + width + width * width * (depth - 1)
        if min(width, depth) < 1 or pool > cls.most_drawn:
            raise UsageError(
                f"{name} draws {pool} nodes in {depth} levels of width {width}, wanted at least "
                f"one level and at most {cls.most_drawn} nodes"
            )
        return pool

    @classmethod
    def named(cls, name: str) -> BeamTree | None:
        """Return the tree of "KIND-WIDTH-DEPTH-NODES" (beam or dyspec) or "beam-WIDTH-DEPTH".

        A threshold may follow a dyspec's nodes: "dyspec-8-10-64-0.01". None for another name.
        Raises `UsageError` as `of` and `above`.
        """
        if beams := re.fullmatch(r"beam-([0-9]{1,4})-([0-9]{1,4})", name):
            return BeamSearchTree.of(*map(int, beams.groups()))
        sizes = r"-(\d{1,4})-(\d{1,4})-(\d{1,4})"
        if beams := re.fullmatch(f"beam{sizes}", name, re.A):
            return BeamTree.of(*map(int, beams.groups()))
        slots = re.fullmatch(rf"dyspec{sizes}(?:-(\d\.\d{{1,9}}))?", name, re.A)
        if slots is None:
            return None
        tree = SlotTree.of(*map(int, slots.groups()[:3]))
        return tree.above(slots[4]) if slots[4] else tree

    @property
    def alike(self) -> tuple[str | int | float, ...]:
        return self.kind, self.width

    @property
    def num_drawn(self) -> int:
        return 1 + self.width + self.width * self.width * (self.depth - 1)

    @property
    def num_inner(self) -> int:
        return self.width * (self.depth - 1)

    @property
    def widest(self) -> int:
        return self.width

    def end_of(self, path: Sequence[int]) -> int:
        return self.shape.levels[len(path) - 1][0]

    def shows_all_of(self, other: StepTree) -> bool:
        larger = self.max_depth >= other.max_depth and self.num_nodes >= other.num_nodes
        return larger and self.alike == other.alike

    def __str__(self) -> str:
        return f"{self.name} (grown in each step)"


@dataclass(frozen=True)
class BeamSearchTree(BeamTree):
    """STree's dynamic tree (Wu et al. 2025, Appendix C): the tokens of a beam search, `beam-M-N`.

    Each of N = `depth` levels has the M = `width` best continuations of the level above by the
    path's probability. All of them stay in the tree, also those whose beams end later: 1 + M·N
    nodes, numbered level by level. Of a `BeamTree` the best drafts are verified instead, wherever
    they are.
    """

    __hash__ = BeamTree.__hash__

    kind = "beam search"

    @classmethod
    def of(cls, width: int, depth: int, num_nodes: int | None = None) -> Self:
        """Return the tree of `width` beams and `depth` levels, of 1 + width · depth nodes.

        Raises `UsageError` if there is none.
        """
        name, wanted = f"beam-{width}-{depth}", 1 + width * depth
        if num_nodes not in (None, wanted):
            raise UsageError(f"{name} verifies {num_nodes} nodes, wanted {wanted}")
        cls.require_drawn(name, width, depth)
        return cls(name, width, depth, wanted)

    @cached_property
    def shape(self) -> TokenTree:
        return TokenTree(several_chains(self.depth, self.width).parents, self.name)  # no beam ends

    @property
    def alike(self) -> tuple[str | int | float, ...]:
        return *super().alike, self.depth


@dataclass(frozen=True)
class SlotTree(BeamTree):
    """DySpec's dynamic tree (Xiong et al. 2024, Algorithm 1), grown level by level.

    It differs from `BeamTree` in that the nodes with the best slots are verified. A slot's value is
    the drafter's probability that the path to its parent is accepted and its elder siblings are
    not.

    The value is known before the slot's token is drawn, so that every verifier stays exact. The
    token in a slot may take another node's children away, but all slots below that node are worth
    less than this slot, so it does not help the slot itself.

    With a `threshold` slots of a lower value stay empty (Algorithm 2, whose printed loop must go on
    while v ≥ t): the size varies from step to step, and `num_nodes` is the most. Without one the
    last slot's value is what a threshold would be.
    """

    threshold: float = 0.0

    __hash__ = BeamTree.__hash__

    kind = "dyspec"
    by_slots = True
    most_drawn = 2047  # noise of each is at a position of its own in 31 bits (`NOISE_STRIDE`)

    def above(self, threshold: str) -> SlotTree:
        """Return the tree whose slots are worth a threshold at least, written as a decimal number.

        Raises `UsageError` for one that is not between 0 and 1.
        """
        value = float(threshold)
        if not 0 < value < 1:
            raise UsageError(
                f"{self.name}-{threshold}: the threshold of slots is {threshold}, wanted a number "
                "between 0 and 1"
            )
        return replace(self, name=f"{self.name}-{threshold}", threshold=value)

    @property
    def alike(self) -> tuple[str | int | float, ...]:
        return *super().alike, self.threshold


def expanded(counts: Sequence[int]) -> TokenTree:
    """Return SpecInfer's expansion ⟨k1, k2, …⟩ (Miao et al. 2024).

    Each node at depth i has k_i ≥ 1 children. Raises `UsageError` for more than 2,048 nodes.
    """
    name = "-".join(["expand", *map(str, counts)])
    if min(counts) < 1 or 1 + sum(accumulate(counts, mul)) > MAX_NODES:
        raise UsageError(
            f"{name} has {1 + sum(accumulate(counts, mul))} nodes, wanted at least one child a "
            f"node and at most {MAX_NODES} nodes"
        )
    return balanced(counts, name)


def balanced(branching: Sequence[int], name: str = "balanced") -> TokenTree:
    """Return a tree whose nodes at depth d all have branching[d] children."""
    parents, level = [-1], [0]
    for width in branching:
        start = len(parents)
        parents += [node for node in level for _ in range(width)]
        level = list(range(start, len(parents)))
    return TokenTree(tuple(parents), name)


def several_chains(num_drafts: int, count: int) -> TokenTree:
    """Return `count` chains of num_drafts drafts below one root: PNG(n, d) (Snakes and Ladders)."""
    parents = [-1, *[0] * count, *range(1, (num_drafts - 1) * count + 1)]
    return TokenTree(tuple(parents[: 1 + num_drafts * count]), f"png-{num_drafts}-{count}")


def as_tree(tree: StepTree | str | Path) -> StepTree:
    """Return a tree as it is, or that of a name or file. Raises `UsageError` for anything else."""
    if isinstance(tree, str | Path):
        return TokenTree.load(tree)
    if not isinstance(tree, StepTree):
        raise UsageError(f"a tree is {tree!r:.60}, wanted a TokenTree, its name or a YAML file")
    return tree
