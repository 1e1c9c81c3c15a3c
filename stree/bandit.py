"""Which tree a step has, by a bandit over shapes (Choi et al. 2025, Mamba Drafters): each shape is
tried, and the one with the best mean reward, or about which least is known, is taken.

`Modes` predicts what a tree would accept from what others show, and knows when plain decoding wins;
a bandit knows of each shape what it was worth itself, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from stree.costs import Costs
from stree.errors import UsageError
from stree.modes import PLAIN, Modes
from stree.tree import TokenTree

# Rewards are at most 0, and −1 is plain decoding's. A tree whose first steps had bad luck, which
# makes about −1.5 of −0.5, is tried again within a thousand
EXPLORATION = 0.3


class Bandit(Modes):
    """UCB over trees: the one with the highest mean reward + exploration · √(2 ln t / n), of t
    rounds n with that tree (the paper's Eq. 1); each once first, in the order given.

    A round is a row's step. Its reward is −1 / speed-up (the paper's Eq. 5): what the step takes by
    time of a plain one, for each token that it yields. The paper takes a draft to cost a fixed
    share of a step, and verification as much as one (Eq. 2); here both are in the measured costs.
    What is chosen depends on nothing but what rounds have accepted.

    Args: as of `Modes`; exploration, λ_UCB. Raises `UsageError` for fewer than two trees of drafts.
    """

    def __init__(
        self,
        trees: Sequence[TokenTree | str],
        costs: Costs | None = None,
        exploration: float = EXPLORATION,
    ) -> None:
        super().__init__(trees, costs)
        self.arms = tuple(dict.fromkeys(self.trees[1:]))  # the first is plain decoding
        if len(self.arms) < 2:
            raise UsageError(
                "a bandit needs two trees at least: give more, or take the tree itself"
            )
        self.exploration = exploration
        self._num_rows = 1
        self._rounds = dict.fromkeys(self.arms, 0)
        self._reward = dict.fromkeys(self.arms, 0.0)

    def __str__(self) -> str:
        return f"bandit {super().__str__()}"

    def choose(self, num_rows: int) -> TokenTree:
        """The tree of the next step of so many rows."""
        self._num_rows = num_rows
        total = sum(self._rounds.values())

        def bound(tree: TokenTree) -> float:
            rounds = self._rounds[tree]
            if not rounds:
                return math.inf
            mean = self._reward[tree] / rounds
            return mean + self.exploration * math.sqrt(2 * math.log(total) / rounds)

        self.current = max(self.arms, key=bound)
        return self.current

    def learn_path(self, tree: TokenTree, path: Sequence[int]) -> None:
        """A row's step of `tree` has accepted the nodes of a path, the root included."""
        if tree not in self._rounds:
            return  # a request's own
        rows = self._num_rows
        cost = self.costs.of(rows, tree) / self.costs.of(rows, PLAIN)
        self._rounds[tree] += 1
        self._reward[tree] -= cost / len(path)
