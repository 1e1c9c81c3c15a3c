"""What trees may be expected to accept, by what was accepted lately."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from stree.trees.token_tree import BeamTree, TokenTree

MEMORY = 0.99  # what a row's observation counts one step later
ANSWERS_MEMORY = 0.98  # what an answer counts one answer later
PRIOR_TRIES = 2  # what is assumed of a rate counts as so many observations
PRIOR_STEPS = 10  # what is assumed of a rank counts as so many steps


class AcceptanceRates:
    """How often the child of each rank is what the target says, by depth; the latest count most.

    Whether a child of some rank is accepted, given its parent, does not depend on what other
    children there are, so what one tree shows is true of all. What the trees of late have not
    shown is forgotten, too, and taken to be as at the depth above: where text has become easier
    for the drafter it has at all depths.
    """

    def __init__(self) -> None:
        self._tried: dict[tuple[int, int], float] = defaultdict(float)
        self._accepted: dict[tuple[int, int], float] = defaultdict(float)
        # Each observation weighs more than the one before it, so that none has to be made less
        self._weight = 1.0
        # Observations that are not worked in yet: batches have many in each step
        self._ended: dict[tuple[TokenTree, int], float] = defaultdict(float)

    def learn(self, tree: TokenTree, end: int, memory: float = MEMORY) -> None:
        """A step of `tree` has accepted the path to the node `end`; memory, what each observation
        before counts now. Plain decoding shows nothing, and nothing is forgotten meanwhile."""
        if tree.num_nodes == 1:
            return
        self._weight /= memory
        self._ended[tree, end] += self._weight
        if self._weight > 1e100:
            self._work_in()
            for counts in (self._tried, self._accepted):
                counts.update({key: count / self._weight for key, count in counts.items()})
            self._weight = 1.0

    def _work_in(self) -> None:
        for (tree, end), weight in self._ended.items():
            path = [*tree.path_to(end), -1]
            for depth, (node, child) in enumerate(itertools.pairwise(path)):
                for rank, each in enumerate(tree.children[node]):
                    self._tried[depth, rank] += weight
                    self._accepted[depth, rank] += weight * (each == child)
        self._ended.clear()

    def rate(self, depth: int, rank: int) -> float:
        """Assumed, and worth as much as PRIOR_TRIES observations: that of the depth above; at
        first ½ for the first rank, and half as much for each further one."""
        self._work_in()
        return self._rate(depth, rank)

    def _rate(self, depth: int, rank: int) -> float:
        assumed = self._rate(depth - 1, rank) if depth else 0.5 ** (rank + 1)
        weight = PRIOR_TRIES * self._weight
        accepted = self._accepted[depth, rank] + weight * assumed
        return accepted / (self._tried[depth, rank] + weight)

    def expected_tokens(self, tree: TokenTree) -> float:
        """Of a step: its drafts that are accepted, and the target's own token."""
        self._work_in()
        reached = [1.0] * tree.num_nodes
        for node, children in enumerate(tree.children):
            for rank, child in enumerate(children):
                reached[child] = reached[node] * self._rate(tree.depths[node], rank)
        return sum(reached)


class DynamicAcceptanceRates:
    """How often the n-th best node is accepted of trees that grow with one width, as deep as the
    deepest of them; the latest steps count most.

    The smaller of two trees of one depth is the first nodes of the larger, so what a tree shows is
    true of all smaller ones. Of ranks that were tried little it is assumed that they go on from
    those next to them, the n-th best node as 1/n. A tree that is less deep is taken to accept as
    much less as paths end above its depth: what it misses shows in the deeper ones, and how often a
    path goes on from one depth to the next in all that have both.
    """

    def __init__(self, depth: int, num_nodes: int) -> None:
        """depth and num_nodes, the most of any such tree."""
        ranks = np.arange(num_nodes).clip(min=1)
        self._share = 1 / ranks
        # Twice or half the rank counts a sixteenth
        self._near = 16.0 ** -np.abs(np.log2(ranks[:, None] / ranks))
        # Each observation weighs more than the one before it, so that none has to be made less
        self._weight = 1.0
        self._trees = np.zeros(num_nodes + 1)  # by number of nodes
        self._accepted = np.zeros(num_nodes)
        self._paths = [TokenTree.chain(each) for each in range(depth + 1)]
        self._going_on = AcceptanceRates()
        self._parts = self._parts_by_depth()

    def learn(self, tree: BeamTree, path: Sequence[int], memory: float = MEMORY) -> None:
        """A step of a tree has accepted the nodes on a path, the root included; memory, what each
        observation before counts now."""
        self._going_on.learn(self._paths[tree.depth], len(path) - 1, memory)
        self._weight /= memory
        self._trees[tree.num_nodes] += self._weight * self._parts[tree.depth]
        for node in path[1:]:
            self._accepted[node] += self._weight
        if self._weight > 1e100:
            self._trees /= self._weight
            self._accepted /= self._weight
            self._weight = 1.0

    def revise(self) -> None:
        """Work out what is expected now."""
        self._parts = self._parts_by_depth()
        trees, accepted = self._trees / self._weight, self._accepted / self._weight
        tried = trees[:0:-1].cumsum()[::-1]  # node n, in trees of more than n nodes
        tried[0] = 0.0
        promised = self._near @ (self._share * tried)
        scale = (self._near @ accepted + 0.005) / (promised + 0.01)  # ½ to begin with
        prior = (scale * self._share).clip(max=1.0)
        rates = (accepted + PRIOR_STEPS * prior) / (tried + PRIOR_STEPS)
        rates[0] = 0.0  # the root
        self._drafts = rates.cumsum().tolist()

    def expected_tokens(self, tree: BeamTree) -> float:
        """Of a step, as of the last time that it was worked out."""
        return 1.0 + self._parts[tree.depth] * self._drafts[tree.num_nodes - 1]

    def _parts_by_depth(self) -> list[float]:
        """What trees of each depth accept, by what the deepest ones do."""
        drafts = [self._going_on.expected_tokens(each) - 1 for each in self._paths]
        return [each / drafts[-1] for each in drafts]


class MovingAverage:
    """Of numbers of which the latest count most; `first` while there are none."""

    def __init__(self, first: float) -> None:
        self.value, self._weight = first, 0.0

    def __bool__(self) -> bool:
        """Whether there is any."""
        return self._weight > 0

    def learn(self, number: float) -> None:
        self._weight = ANSWERS_MEMORY * self._weight + 1
        share = 1 / self._weight
        self.value = number if share == 1 else self.value + share * (number - self.value)
