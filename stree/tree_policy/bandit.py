"""Bandit trees: choose each step's tree by a bandit over shapes (Choi et al. 2025, Mamba Drafters).

Each shape is tried; then the one with the highest upper bound of its mean reward is taken.
`AdaptiveTrees` predicts a tree's acceptance from that of others, and knows when plain decoding
wins; a bandit knows only the rewards of each shape itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stree.common.errors import UsageError
from stree.tree_policy.policy import TreePolicy
from stree.tree_policy.step_times import StepTimes
from stree.trees.token_tree import PLAIN, StepTree

# A tree whose first step had bad luck, one token where five are usual, is tried again within a
# hundred steps
EXPLORATION = 0.3


@dataclass
class Rounds:
    """Rounds so far, by tree: their number, and their sum of steps a token."""

    count: dict[StepTree, int]
    steps: dict[StepTree, float]


class BanditTrees(TreePolicy):
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

    state: Rounds

    def __init__(
        self, trees: Sequence[StepTree | str], costs: StepTimes | None = None,
        exploration: float = EXPLORATION,
    ) -> None:
        super().__init__(trees, costs)
        if len(self.trees) < 3:
            raise UsageError(
                "a bandit needs two trees at least: give more, or take the tree itself"
            )
        if not exploration >= 0:
            raise UsageError(f"exploration is {exploration}, wanted a number of at least 0")
        self.exploration = exploration

    def new_state(self) -> Rounds:
        arms = self.trees[1:]  # without plain decoding
        return Rounds(dict.fromkeys(arms, 0), dict.fromkeys(arms, 0.0))

    @property
    def name(self) -> str:
        return f"bandit {super().name}"

    def choose(self, num_rows: int) -> StepTree:
        """Return the tree of the next step of `num_rows` rows."""
        rounds, total = self.state, sum(self.state.count.values())

        def bound(tree: StepTree) -> float:
            count = rounds.count[tree]
            if not count:
                return math.inf
            unknown = self.exploration * math.sqrt(2 * math.log(total) / count)
            cost = self.cost(num_rows, tree)
            return unknown * self.unit(cost) - rounds.steps[tree] / count * cost

        return max(rounds.count, key=bound)

    def cost(self, num_rows: int, tree: StepTree) -> float:
        """Return c, the time of a step of `tree` in units of a plain step."""
        return self.costs.of(num_rows, tree) / self.costs.of(num_rows, PLAIN)

    def unit(self, cost: float) -> float:
        """Return the unit of the bound of a tree whose steps cost `cost` plain steps."""
        return cost

    def learn_paths(self, tree: StepTree, paths: Sequence[Sequence[int]]) -> None:
        """Learn from rows' steps of `tree`, given the accepted nodes of each, the root first."""
        if tree in self.state.count:  # else its request has a tree of its own
            self.state.count[tree] += len(paths)
            for path in paths:
                self.state.steps[tree] += 1 / len(path)


class UCBTrees(BanditTrees):
    """Bandit as the paper has it: the bound of its Eq. 1 unscaled, the reward of its Eq. 2.

    The reward of a step is −(1/N + λ_γ·γ/N): N are its tokens, the target's own included (or N
    could be 0), γ the tree's levels, and λ_γ the time of drafting a level in units of a plain step.
    A query is a bandit of its own: all that was learned is forgotten when an answer ends. The paper
    has one query at a time; with several rows it is forgotten when any of their answers ends.

    Args:
        trees, costs: As for `BanditTrees`.
        exploration: λ_UCB, at least 0; the paper names no value.
        draft_share: λ_γ, at least 0. None takes what the step times say of the deepest tree: its
            time beyond a plain step's, by level.

    Raises:
        UsageError: As `BanditTrees`, and for a negative draft_share.

    Example:
        >>> str(UCBTrees(["paper", "chain-4"]))
        'ucb paper or chain-4'
    """

    def __init__(
        self, trees: Sequence[StepTree | str], costs: StepTimes | None = None,
        exploration: float = EXPLORATION, draft_share: float | None = None,
    ) -> None:
        super().__init__(trees, costs, exploration)
        if draft_share is not None and not draft_share >= 0:
            raise UsageError(f"draft_share is {draft_share}, wanted a number of at least 0")
        self.draft_share = draft_share

    @property
    def name(self) -> str:
        return super().name.replace("bandit", "ucb", 1)

    def cost(self, num_rows: int, tree: StepTree) -> float:
        """Return 1 + λ_γ·γ, the time that Eq. 6 takes a step of `tree` to have."""
        share = self.draft_share
        if share is None:
            share = (super().cost(num_rows, self.deepest) - 1) / self.deepest.max_depth
        return 1 + share * tree.max_depth

    def unit(self, cost: float) -> float:
        """Return 1: Eq. 1 does not scale the bound."""
        return 1.0

    def learn_answer(self, prefill_s: float | None = None, catch_up_s: float | None = None) -> None:
        """Forget everything: the next query is another bandit."""
        self.forget()
