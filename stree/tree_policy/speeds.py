"""Speeds of trees: expected tokens by measured step times and the drafter's prefills."""

from __future__ import annotations

import math

from stree.tree_policy.acceptance import MovingAverage
from stree.tree_policy.policy import PLAIN
from stree.tree_policy.step_times import StepTimes
from stree.trees.token_tree import TokenTree


class Speeds:
    """Expected tokens per second and row of steps with each tree.

    The time of a step includes its share of the drafter's prefills.

    Args:
        costs: Step times.
        expected: Expected tokens of a step with each tree.

    Attributes:
        num_tokens: New tokens of all requests since the last answer ended. When many requests begin
            at once, the first answers that end are the short ones, and their own lengths would
            promise too few tokens.
    """

    def __init__(self, costs: StepTimes, expected: dict[TokenTree, float]) -> None:
        self._answer_tokens = MovingAverage(math.inf)
        self.num_tokens = 0
        self.rest_on(costs)
        self.expect(expected)

    def rest_on(self, costs: StepTimes) -> None:
        """Rest on other step times, and forget the drafter's prefills."""
        self.costs = costs
        # The drafter's seconds a request: to read a prompt, and to catch up after plain steps
        self._prefills_s, self._catch_ups_s = (MovingAverage(costs.catch_up) for _ in range(2))
        self._by_rows: dict[int, dict[TokenTree, float]] = {}

    def expect(self, expected: dict[TokenTree, float]) -> None:
        """Rest on other expected tokens of steps."""
        self._expected, self._by_rows = expected, {}

    def learn_answer(self, prefill_s: float | None, catch_up_s: float | None) -> None:
        """Learn that an answer has ended (`TreePolicy.learn_answer`)."""
        self._answer_tokens.learn(self.num_tokens)
        self.num_tokens = 0
        if prefill_s is not None:
            self._prefills_s.learn(prefill_s)
        if catch_up_s is not None:
            self._catch_ups_s.learn(catch_up_s)
        self._by_rows = {}

    @property
    def prefill_s(self) -> float:
        """Seconds of a drafter's prefill; those of a catch-up before any prefill."""
        return (self._prefills_s or self._catch_ups_s).value

    @property
    def catch_up_s(self) -> float:
        """Seconds of a drafter's catch-up; those of a prefill before any catch-up."""
        return (self._catch_ups_s or self._prefills_s).value

    def of(self, num_rows: int) -> dict[TokenTree, float]:
        """Return the expected tokens per second and row, by tree."""
        if num_rows not in self._by_rows:
            self._by_rows[num_rows] = {
                tree: self.with_tokens(num_rows, tree, tokens)
                for tree, tokens in self._expected.items()
            }
        return self._by_rows[num_rows]

    def with_tokens(self, num_rows: int, tree: TokenTree, tokens: float) -> float:
        """Return tokens per second and row of steps that yield `tokens` tokens."""
        seconds = self.costs.of(num_rows, tree)
        if tree != PLAIN:
            answer_tokens = max(self._answer_tokens.value, 1.0)
            seconds += num_rows * self.prefill_s * tokens / answer_tokens
        return tokens / seconds

    def might_pay(self, num_rows: int, tree: TokenTree) -> bool:
        """Return whether a tree would be faster than plain decoding if all drafts were accepted."""
        most = self.with_tokens(num_rows, tree, tree.max_depth + 1)
        return most > self.with_tokens(num_rows, PLAIN, 1.0)
