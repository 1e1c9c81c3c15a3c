"""Which tree a step has, by a bandit over shapes (Choi et al. 2025, Mamba Drafters): each shape is
tried, and the one with the best mean reward, or about which least is known, is taken.

`AdaptiveTrees` predicts what a tree would accept from what others show, and knows when plain
decoding wins; a bandit knows of each shape what it was worth itself, and nothing else.
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
    """UCB over trees: the one with the highest mean reward + exploration · c · √(2 ln t / n), of t
    rounds n with that tree (the paper's Eq. 1); each once first, in the order given.

    A round is a row's step. Its reward is −1 / speed-up (the paper's Eq. 5): what the step takes by
    time of a plain one, c, for each token that it yields. The paper takes a draft to cost a fixed
    share of a step, and verification as much as one (Eq. 2); here both are in the measured costs.
    Rewards lie between −c and 0, so that what is unknown of them is counted in c, too: the paper's
    c is close to 1, that of a large tree on a small target is 2 or 3. All rounds count at the c of
    now: with other rows, or costs that are measured anew, they need not be played again.
    What is chosen depends on nothing but what rounds have accepted.

    Args: as of `AdaptiveTrees`; exploration, λ_UCB. Raises `UsageError` for fewer than two trees of
    drafts."""

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
        """Begin anew, with nothing but the costs."""
        super().forget()
        self._rounds = dict.fromkeys(self.arms, 0)
        self._steps = dict.fromkeys(self.arms, 0.0)  # steps a token, summed over rounds

    @property
    def arms(self) -> tuple[TokenTree, ...]:
        """All but plain decoding."""
        return self.trees[1:]

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
            unknown = self.exploration * math.sqrt(2 * math.log(total) / rounds)
            return (unknown - self._steps[tree] / rounds) * self._cost(tree)

        self.current = max(self.arms, key=bound)
        return self.current

    def learn_path(self, tree: TokenTree, path: Sequence[int]) -> None:
        """A row's step of `tree` has accepted the nodes of a path, the root included."""
        if tree not in self._rounds:
            return  # a request's own
        self._rounds[tree] += 1
        self._steps[tree] += 1 / len(path)

    def _cost(self, tree: TokenTree) -> float:
        """Of a step, by time of a plain one."""
        return self.costs.of(self._num_rows, tree) / self.costs.of(self._num_rows, PLAIN)
