"""Which tree a step has, by measured cost: of several trees, the chain and plain decoding among
them, the one with the most expected tokens by time for as many rows as are active.

A small tree is best for many rows and a large one for few, and how well drafts are accepted changes
with the text: so the choice is made again and again, from what each depth and rank of a draft was
accepted lately, and changed seldom.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from stree.common.errors import UsageError
from stree.common.words import counted
from stree.tree_policy.acceptance import (
    MEMORY,
    AcceptanceRates,
    DynamicAcceptanceRates,
    MovingAverage,
)
from stree.tree_policy.step_times import StepTimes
from stree.trees.token_tree import BeamTree, TokenTree, as_tree

HYSTERESIS = 0.01  # what another tree must promise more, to be changed to
PROBE_SHARE = 0.01  # of the time that may be lost to see whether drafts have become better
TRY_SHARE = 0.005  # of the time that may be lost to see whether other trees have
LEAST_LOSS = 0.3  # of a step, that one with another tree counts as losing
PROBE_STEPS = 4  # steps with a tree, one after the other, that make a probe
REVISED_AFTER = 8  # steps, since working out what to expect takes the host as long as one does
TRIED_FIRST = 8  # observations of each tree that shows what no other does, before any is judged
PLAIN = TokenTree.chain(0, "plain")


class AdaptiveTrees:
    """Chooses among trees; plain decoding is always one of them.

    What drafting takes is its steps and, once for each request, the drafter's reading of the
    prompt: with many rows and short answers the latter decides. While plain decoding is best,
    drafters read no prompts (`drafts`).

    Args: trees, at most one a step for all rows that leave it to the decoder; costs, as measured
    by `BatchDecoder.measure_step_times`.
    """

    def __init__(self, trees: Sequence[TokenTree | str], costs: StepTimes | None = None) -> None:
        if isinstance(trees, str):
            raise UsageError(
                f"adaptive trees of {trees!r:.60}, wanted a list of trees: [{trees!r:.60}]"
            )
        given = dict.fromkeys(tree for tree in map(as_tree, trees) if tree.num_nodes > 1)
        if not given:
            raise UsageError(
                "adaptive trees without a tree: give at least one, to choose it or plain decoding"
            )
        self.trees = (PLAIN, *given)
        self._telling = telling(self.trees[1:])
        self._costs = costs or StepTimes()
        self.forget()

    def forget(self) -> None:
        """Begin anew, with nothing but the costs."""
        self._speeds: dict[int, dict[TokenTree, float]] = {}  # by number of rows
        self._answer_tokens = MovingAverage(math.inf)
        self._num_tokens = 0  # of all requests, since one of them ended
        self.costs = self._costs
        self.rates = AcceptanceRates()
        self._untried = dict.fromkeys(self._telling, TRIED_FIRST)  # observations that are missing
        grown: dict[tuple[str, int], list[BeamTree]] = defaultdict(list)
        for tree in self.trees:
            if isinstance(tree, BeamTree):
                grown[tree.kind, tree.width].append(tree)
        self._grown = {
            key: DynamicAcceptanceRates(
                max(t.depth for t in trees), max(t.num_nodes for t in trees)
            )
            for key, trees in grown.items()
        }
        self._unseen_s = dict.fromkeys(self._telling, 0.0)  # since such a tree was tried
        self._expected: dict[TokenTree, float] = {}
        self._news = 0  # observations that it does not know of
        self._num_rows = 1  # of the last step: as many observations are one step
        self._memory = MEMORY  # what one counts one later: of many rows each is part of a step
        self._revise()
        self.current = self.trees[-1]
        self._plain_s = 0.0  # since the last probe
        self._missed_s = 0.0  # of those, what drafting would have saved since it is best
        self._probing = 0  # steps of a probe that are left
        self._probed = deque(self._telling)  # the next probe's tree first

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """Begin anew, and go on after it with what was known before: a warm-up's answers are few,
        short and all alike, and would be taken for what requests get. Costs that are set inside
        stay. A subclass that learns more makes that anew in `forget`."""
        before, costs = dict(vars(self)), self._costs
        self.forget()
        try:
            yield
        finally:
            measured = self._costs
            vars(self).update(before)
            if measured is not costs:
                self.costs = measured

    def __str__(self) -> str:
        return " or ".join(tree.name for tree in self.trees[1:])

    def __repr__(self) -> str:
        names = [tree.name for tree in self.trees[1:]]
        most = max((rows for rows, _ in self.costs.seconds), default=0)
        measured = f"costs of up to {counted(most, 'row')}" if most else "no costs measured"
        return f"{type(self).__name__}({names}, {measured}, now {self.current.name})"

    @property
    def costs(self) -> StepTimes:
        return self._costs

    @costs.setter
    def costs(self, costs: StepTimes) -> None:
        self._costs, self._speeds = costs, {}
        # By the drafter, a request: of a prompt beside the target, and of what plain steps left it
        self._reading_s, self._catch_up_s = (
            MovingAverage(costs.catch_up),
            MovingAverage(costs.catch_up),
        )

    @property
    def drafts(self) -> bool:
        """Whether drafters have to read new prompts."""
        return self.current != PLAIN

    def choose(self, num_rows: int) -> TokenTree:
        """The tree of the next step of so many rows."""
        if num_rows != self._num_rows:
            self._num_rows = num_rows
            self._memory = MEMORY ** (1 / num_rows)
        if self._probing == 1 or self._news >= REVISED_AFTER * num_rows:
            self._revise()  # by what a probe has shown, or late steps
        speed = self._speed(num_rows)
        for tree in self._untried:
            if self._might_pay(tree, num_rows):
                return tree
        best = max(self.trees, key=speed.__getitem__)
        if self._probing:
            self._probing -= 1
            if not self._probing:
                self.current = best
        elif speed[best] > speed[self.current] * (1 if best == PLAIN else 1 + HYSTERESIS):
            if self.current != PLAIN or self._pays_for_reading(best, num_rows):
                self.current = best
        else:
            self._missed_s = 0.0
        if self.current == PLAIN:
            self._consider_a_probe(num_rows)
            return self.current
        self._missed_s = 0.0
        return self._unseen(num_rows) or self.current

    def _might_pay(self, tree: TokenTree, num_rows: int) -> bool:
        """Whether it would be faster than plain decoding were all of it accepted."""
        most = self._speed_of(num_rows, tree, tree.max_depth + 1)
        return most > self._speed_of(num_rows, PLAIN, 1.0)

    def _pays_for_reading(self, tree: TokenTree, num_rows: int) -> bool:
        """Whether steps that were plain instead of a tree's have lost what all rows' drafter takes
        to read what it has missed: then so much is given for the change, and not more often."""
        speed = self._speed(num_rows)
        self._missed_s += self.costs.of(num_rows, PLAIN) * (1 - speed[PLAIN] / speed[tree])
        return self._missed_s >= num_rows * self._catching_up.value

    def learn(self, tree: TokenTree, end: int) -> None:
        """A row's step of `tree` has accepted the path to the node `end`."""
        if tree.num_nodes == 1:
            return  # it shows nothing, of each row in each step where plain decoding is best
        if not isinstance(tree, BeamTree):
            self.rates.learn(tree, end, self._memory)
        self._count(tree)

    def learn_path(self, tree: TokenTree, path: Sequence[int]) -> None:
        """`learn`, given the accepted nodes, the root first. Of trees that grow these are ranks."""
        if isinstance(tree, BeamTree):
            self._grown[tree.kind, tree.width].learn(tree, path, self._memory)
        self.learn(tree, tree.end_of(path))

    def learn_tokens(self, num_tokens: int) -> None:
        """A request has got so many more. They count for the next answer that ends, whichever that
        is: where many begin at once the first that end are the short ones, whose own tokens would
        promise too few."""
        self._num_tokens += num_tokens

    def learn_answer(self, reading_s: float | None = None, catch_up_s: float | None = None) -> None:
        """A request has got all its tokens; reading_s and catch_up_s, what the drafter took to read
        its prompt beside the target, and later what it had missed, unless it did not."""
        self._answer_tokens.learn(self._num_tokens)
        self._num_tokens = 0
        if reading_s is not None:
            self._reading_s.learn(reading_s)
        if catch_up_s is not None:
            self._catch_up_s.learn(catch_up_s)
        self._speeds = {}

    @property
    def _reading(self) -> MovingAverage:
        """Of a prompt by the drafter, in seconds; as long as none was read, what is known of the
        other."""
        return self._reading_s or self._catch_up_s

    @property
    def _catching_up(self) -> MovingAverage:
        """Of what it has missed, likewise."""
        return self._catch_up_s or self._reading_s

    def _count(self, tree: TokenTree) -> None:
        """An observation of a tree: now and then expectations follow from all of them."""
        if self._untried and tree in self._untried:
            self._untried[tree] -= 1
            if not self._untried[tree]:
                del self._untried[tree]
        self._news += 1

    def expected_tokens(self, tree: TokenTree) -> float:
        """Of a step, by what was accepted lately."""
        found = self._expected.get(tree)
        return self.rates.expected_tokens(tree) if found is None else found

    def _revise(self) -> None:
        for grown in self._grown.values():
            grown.revise()
        self._expected = {
            tree: self._grown[tree.kind, tree.width].expected_tokens(tree)
            if isinstance(tree, BeamTree)
            else self.rates.expected_tokens(tree)
            for tree in self.trees
        }
        self._speeds, self._news = {}, 0

    def _speed(self, num_rows: int) -> dict[TokenTree, float]:
        """Expected tokens a second and row, by tree."""
        if num_rows not in self._speeds:
            self._speeds[num_rows] = {
                tree: self._speed_of(num_rows, tree, tokens)
                for tree, tokens in self._expected.items()
            }
        return self._speeds[num_rows]

    def _speed_of(self, num_rows: int, tree: TokenTree, tokens: float) -> float:
        """Tokens a second and row of steps that yield so many, and of reading for all rows what
        these take of the drafter's prompts."""
        seconds = self.costs.of(num_rows, tree)
        if tree != PLAIN:
            answer_tokens = max(self._answer_tokens.value, 1.0)
            seconds += num_rows * self._reading.value * tokens / answer_tokens
        return tokens / seconds

    def _unseen(self, num_rows: int) -> TokenTree | None:
        """Now and then a tree that alone shows what it accepts: the less it seems to lose, the more
        often."""
        speed, share = self._speed(num_rows), TRY_SHARE / len(self._telling)
        for tree in self._telling:
            if tree == self.current:
                self._unseen_s[tree] = 0.0
                continue
            self._unseen_s[tree] += self.costs.of(num_rows, self.current)
            slower = max(1 - speed[tree] / speed[self.current], LEAST_LOSS)
            if self._unseen_s[tree] > slower * self.costs.of(num_rows, tree) / share:
                self._unseen_s[tree] = 0.0
                return tree
        return None

    def _consider_a_probe(self, num_rows: int) -> None:
        """In turns: if only what looks best is tried, no other tree can show that it is better."""
        self._plain_s += self.costs.of(num_rows, PLAIN)
        tree = self._probed[0]
        lost = PROBE_STEPS * self.costs.of(num_rows, tree) + num_rows * self._catching_up.value
        if self._plain_s > lost / PROBE_SHARE:
            self._plain_s, self._probing, self.current = 0.0, PROBE_STEPS, tree
            self._probed.rotate(-1)


def trees_of(tree_policy: TokenTree | AdaptiveTrees) -> tuple[TokenTree, ...]:
    """Those that a step may have: the tree itself, or what is chosen among."""
    return tree_policy.trees if isinstance(tree_policy, AdaptiveTrees) else (tree_policy,)


def deepest_of(tree_policy: TokenTree | AdaptiveTrees) -> TokenTree:
    return max(trees_of(tree_policy), key=lambda tree: tree.max_depth)


def largest_of(tree_policy: TokenTree | AdaptiveTrees) -> TokenTree:
    return max(trees_of(tree_policy), key=lambda tree: tree.num_nodes)


def telling(trees: Sequence[TokenTree]) -> list[TokenTree]:
    """Those that show what none of the others does: none has all of their children by depth and
    rank; of trees that grow with one width, none is as deep and as large."""
    return [
        tree for number, tree in enumerate(trees)
        if not any(
            _shows_all_of(each, tree) and (other < number or not _shows_all_of(tree, each))
            for other, each in enumerate(trees) if other != number
        )
    ]  # fmt: skip


def _shows_all_of(tree: TokenTree, other: TokenTree) -> bool:
    if isinstance(tree, BeamTree) and isinstance(other, BeamTree):
        alike = (tree.kind, tree.width) == (other.kind, other.width)
        return alike and tree.depth >= other.depth and tree.num_nodes >= other.num_nodes
    if isinstance(tree, BeamTree) or isinstance(other, BeamTree):
        return False
    return _ranks(tree) >= _ranks(other)


def _ranks(tree: TokenTree) -> set[tuple[int, int]]:
    """Of the children of its nodes, by depth of these."""
    return {
        (depth, rank)
        for depth, children in zip(tree.depths, tree.children, strict=True)
        for rank in range(len(children))
    }
