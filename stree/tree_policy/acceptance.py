"""Acceptance: the tokens that steps of each tree are expected to yield, by recent steps."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from stree.trees.token_tree import StepTree, TokenTree

MEMORY = 0.99  # weight of a row's observation one step later
PRIOR_TRIES = 2  # weight of the assumed rate, in observations
PRIOR_STEPS = 10  # weight of a rank's assumed rate, in steps


class Acceptance:
    """Expected tokens of a step with each tree, by the paths that recent steps have accepted.

    Args:
        trees: The trees of the expectations.

    Attributes:
        num_new: Observed steps since the last revision.
    """

    def __init__(self, trees: Sequence[StepTree]) -> None:
        self.trees, self.num_new = trees, 0
        self.rates = AcceptanceRates()
        self._fixed = tuple(tree.shape for tree in trees if not tree.grows)
        self._dynamic_rates: dict[Any, DynamicAcceptanceRates] = {}
        dynamic = [tree for tree in trees if tree.grows]
        for key in dict.fromkeys(tree.alike for tree in dynamic):
            alike = [tree for tree in dynamic if tree.alike == key]
            self._dynamic_rates[key] = DynamicAcceptanceRates(
                max(tree.max_depth for tree in alike), max(tree.num_nodes for tree in alike)
            )
        self.of_rows(1)

    def of_rows(self, num_rows: int) -> None:
        """Let observations fade by one step, in which `num_rows` rows were observed."""
        self.num_rows = num_rows
        self.after(1)

    def after(self, num_steps: int) -> None:
        """Let observations fade by `num_steps` steps, of which the last one is observed."""
        self._memory = MEMORY ** (num_steps / self.num_rows)

    def learn(self, tree: StepTree, paths: Sequence[Sequence[int]]) -> None:
        """Learn from rows' steps of a tree with drafts, given the accepted nodes of each."""
        if tree.grows:
            rates = self._dynamic_rates[tree.alike]
            for path in paths:
                rates.learn(tree, path, self._memory)
        else:
            self.rates.learn(tree.shape, [path[-1] for path in paths], self._memory)
        self.num_new += 1

    def revise(self) -> dict[StepTree, float]:
        """Return the expected tokens of a step with each tree, by all observations so far."""
        self.num_new = 0
        for rates in self._dynamic_rates.values():
            rates.revise()
        fixed = iter(self.rates.expected_tokens(self._fixed))
        return {
            tree: self._dynamic_rates[tree.alike].expected_tokens(tree)
            if tree.grows else next(fixed)
            for tree in self.trees
        }


class AcceptanceRates:
    """Acceptance rates of children by depth and rank; recent observations count most.

    Whether a child of some rank is accepted, given its parent, does not depend on its siblings, so
    that one tree's observations hold for all trees. Old observations are forgotten also where
    recent trees show nothing, and the rate there follows that of the depth above: text that has
    become easier for the drafter is easier at all depths.
    """

    def __init__(self) -> None:
        self._tried: dict[tuple[int, int], float] = defaultdict(float)
        self._accepted: dict[tuple[int, int], float] = defaultdict(float)
        # The weight of new observations rises, which is cheaper than lowering those of all others
        self._weight = 1.0
        # Weights of observations that are not counted yet, by tree and the path's last node:
        # batches have many in each step
        self._ended: dict[TokenTree, dict[int, float]] = {}
        self._rates: dict[tuple[int, int], float] = {}  # of now, by depth and rank

    def learn(self, tree: TokenTree, ends: Sequence[int], memory: float = MEMORY) -> None:
        """Learn from steps of `tree`, each of which has accepted the path to a node of `ends`.

        memory is the factor by which each of them lowers the weights of all earlier observations.
        """
        weight, ended = self._weight, self._ended.setdefault(tree, {})
        for end in ends:
            weight /= memory
            ended[end] = ended.get(end, 0.0) + weight
        self._weight = weight
        if weight > 1e100:
            self._work_in()
            for counts in (self._tried, self._accepted):
                counts.update({key: count / self._weight for key, count in counts.items()})
            self._weight = 1.0

    def _work_in(self) -> None:
        if self._ended:
            self._rates.clear()
        for tree, weights in self._ended.items():
            for end, weight in weights.items():
                tried, accepted = _verdicts(tree, end)
                for place in tried:
                    self._tried[place] += weight
                for place in accepted:
                    self._accepted[place] += weight
        self._ended.clear()

    def rate(self, depth: int, rank: int) -> float:
        """Return the rate at which the child of a rank is accepted, given its parent at `depth`.

        The prior, with the weight of PRIOR_TRIES observations, is the rate of the depth above; at
        the root it is ½ for rank 0, and half as much for each further rank.
        """
        self._work_in()
        return self._rate(depth, rank)

    def _rate(self, depth: int, rank: int) -> float:
        if (found := self._rates.get((depth, rank))) is not None:
            return found
        assumed = self._rate(depth - 1, rank) if depth else 0.5 ** (rank + 1)
        weight = PRIOR_TRIES * self._weight
        accepted = self._accepted[depth, rank] + weight * assumed
        rate = self._rates[depth, rank] = accepted / (self._tried[depth, rank] + weight)
        return rate

    def expected_tokens(self, trees: tuple[TokenTree, ...]) -> list[float]:
        """Return the expected tokens of a step with each tree: accepted drafts and the bonus token.

        Paths that trees have in common are computed once.
        """
        self._work_in()
        paths, paths_of = _paths(trees)
        reached = [1.0]
        for above, depth, rank in paths:
            reached.append(reached[above] * self._rate(depth, rank))
        return [sum(map(reached.__getitem__, numbers)) for numbers in paths_of]


@lru_cache(4096)
def _verdicts(tree: TokenTree, end: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return depth and rank of each child of the path from the root to a node.

    The second list has those of accepted children.
    """
    path = [*tree.path_to(end), -1]
    verdicts = [
        ((depth, rank), each == child)
        for depth, (node, child) in enumerate(itertools.pairwise(path))
        for rank, each in enumerate(tree.children[node])
    ]
    return [place for place, _ in verdicts], [place for place, accepted in verdicts if accepted]


@lru_cache(64)
def _paths(trees: tuple[TokenTree, ...]) -> tuple[list[tuple[int, int, int]], list[list[int]]]:
    """Give each path of ranks from a root to a node of any tree a number; that to the root has 0.

    The first list has the number of the path above, and depth and rank of the last child, of each
    path from number 1 on. The second list has the numbers of the paths to each tree's nodes.
    """
    numbers: dict[tuple[int, int], int] = {}  # by the number of the path above, and rank
    paths, paths_of = [], []
    for tree in trees:
        paths_of.append([0] * tree.num_nodes)
        for node, children in enumerate(tree.children):
            above = paths_of[-1][node]
            for rank, child in enumerate(children):
                if (above, rank) not in numbers:
                    paths.append((above, tree.depths[node], rank))
                    numbers[above, rank] = len(paths)
                paths_of[-1][child] = numbers[above, rank]
    return paths, paths_of


class DynamicAcceptanceRates:
    """Acceptance rates of the n-th best nodes of dynamic trees of one width.

    Recent steps count most.
    The smaller of two trees of one depth is the first nodes of the larger, so that a tree's
    observations hold for all smaller ones. Ranks with few observations follow their neighbours, the
    n-th best node as 1/n. A shallower tree's expected drafts are the deepest tree's, scaled by the
    ratio of the expected chain lengths.
    """

    def __init__(self, depth: int, num_nodes: int) -> None:
        """Begin without observations; depth and num_nodes are the most of any such tree."""
        ranks = np.arange(num_nodes).clip(min=1)
        self._share = 1 / ranks
        # Twice or half the rank counts a sixteenth
        self._near = 16.0 ** -np.abs(np.log2(ranks[:, None] / ranks))
        # The weight of new observations rises, which is cheaper than lowering those of all others
        self._weight = 1.0
        self._trees = np.zeros(num_nodes + 1)  # by number of nodes
        self._accepted = np.zeros(num_nodes)
        self._paths = tuple(TokenTree.chain(each) for each in range(depth + 1))
        self._going_on = AcceptanceRates()
        self._parts = self._parts_by_depth()

    def learn(self, tree: StepTree, path: Sequence[int], memory: float = MEMORY) -> None:
        """Learn from a step of a tree that has accepted the nodes of a path, the root included.

        memory is the factor of the weights of all earlier observations.
        """
        self._going_on.learn(self._paths[tree.max_depth], [len(path) - 1], memory)
        self._weight /= memory
        self._trees[tree.num_nodes] += self._weight * self._parts[tree.max_depth]
        for node in path[1:]:
            self._accepted[node] += self._weight
        if self._weight > 1e100:
            self._trees /= self._weight
            self._accepted /= self._weight
            self._weight = 1.0

    def revise(self) -> None:
        """Compute the expected drafts from all observations so far."""
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

    def expected_tokens(self, tree: StepTree) -> float:
        """Return the expected tokens of a step, as of the last call of `revise`."""
        return 1.0 + self._parts[tree.max_depth] * self._drafts[tree.num_nodes - 1]

    def _parts_by_depth(self) -> list[float]:
        """Return the expected drafts of trees of each depth as a share of the deepest tree's."""
        drafts = [each - 1 for each in self._going_on.expected_tokens(self._paths)]
        return [each / drafts[-1] for each in drafts]
