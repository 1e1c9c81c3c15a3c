"""Bandit trees: choose each step's tree by a bandit over shapes (Choi et al. 2025, Mamba Drafters).

Each shape is tried; then the one with the highest upper bound of its mean reward is taken.
`AdaptiveTrees` predicts a tree's acceptance from that of others, and knows when plain decoding
wins; a bandit knows only the rewards of each shape itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from stree.common.errors import UsageError
from stree.tree_policy.adaptive import PLAIN, AdaptiveTrees
from stree.tree_policy.step_times import StepTimes
from stree.trees.token_tree import TokenTree

# A tree whose first step had bad luck, one token where five are usual, is tried again within a
# hundred steps
EXPLORATION = 0.3


class BanditTrees(AdaptiveTrees):
    """Tree policy by UCB (the paper's Eq. 1).

    It takes the tree with the highest mean reward + exploration · c · √(2 ln t / n), after t
    rounds, n of them with that tree; each tree once first, in the order given.

    A round is a row's step. Its reward is −1 / speed-up (the paper's Eq. 5): c / tokens of the
    step, where c is the step's time in units of a plain step. The paper takes a draft to cost a
    fixed share of a step, and verification as much as a step (Eq. 2); here both are measured.
    Rewards lie between −c and 0, so the bound is in units of c, too: the paper's c is close to 1,
    that of a large tree on a small target is 2 or 3. All rounds count at the present c, so that
    they stay valid with another number of rows or new step times. The choice depends on accepted
    tokens and step times alone.

    Args:
        trees: At least two trees with drafts, or their names.
        costs: Step times, as for `AdaptiveTrees`.
        exploration: λ_UCB, at least 0.

    Raises:
        UsageError: For fewer than two trees with drafts, or a negative exploration.

    Example:
        >>> import stree
        >>> str(stree.BanditTrees(["paper", "chain-4"]))
        'bandit paper or chain-4'
    """

    def __init__(
        self,
        trees: Sequence[TokenTree | str],
        costs: StepTimes | None = None,
        exploration: float = EXPLORATION,
    ) -> None:
        super().__init__(trees, costs)
        if len(self.arms) < 2:
            raise UsageError(
                "a bandit needs two trees at least: give more, or take the tree itself"
            )
        if not exploration >= 0:
            raise UsageError(f"exploration is {exploration}, wanted a number of at least 0")
        self.exploration = exploration

    def forget(self) -> None:
        """Forget all rounds, and keep the step times."""
        super().forget()
        self._rounds = dict.fromkeys(self.arms, 0)
        self._steps = dict.fromkeys(self.arms, 0.0)  # steps a token, summed over rounds

    @property
    def arms(self) -> tuple[TokenTree, ...]:
        """All trees except plain decoding."""
        return self.trees[1:]

    def __str__(self) -> str:
        return f"bandit {super().__str__()}"

    def choose(self, num_rows: int) -> TokenTree:
        """Return the tree of the next step of `num_rows` rows."""
        self._num_rows = num_rows
        total = sum(self._rounds.values())

        def bound(tree: TokenTree) -> float:
            rounds = self._rounds[tree]
            if not rounds:
                return math.inf
            unknown = self.exploration * math.sqrt(2 * math.log(total) / rounds)
            return (unknown - self._steps[tree] / rounds) * self._cost(tree)

        self.current = max(self.arms, key=bound)
        return self.current

    def learn_path(self, tree: TokenTree, path: Sequence[int]) -> None:
        """Learn from a row's step of `tree`, given the accepted nodes, the root first."""
        if tree not in self._rounds:
            return  # the request has a tree of its own
        self._rounds[tree] += 1
        self._steps[tree] += 1 / len(path)

    def _cost(self, tree: TokenTree) -> float:
        """Return the time of a step with the tree in units of a plain step."""
        return self.costs.of(self._num_rows, tree) / self.costs.of(self._num_rows, PLAIN)
