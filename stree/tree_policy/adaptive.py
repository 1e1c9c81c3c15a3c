"""Adaptive trees: choose each step's tree by expected tokens per measured time.

A small tree is best for many rows and a large one for few, and acceptance changes with the text. So
the choice is made again and again, from recent acceptance by depth and rank, and changed seldom.
Plain decoding is always one of the choices.
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

HYSTERESIS = 0.01  # least relative gain for which the tree is changed
PROBE_SHARE = 0.01  # share of plain decoding's time that may be lost to probes of trees
TRY_SHARE = 0.005  # share of the time that may be lost to tries of other trees
LEAST_LOSS = 0.3  # share of a step that a try of another tree counts as losing, at least
PROBE_STEPS = 4  # consecutive steps with a tree that make a probe
REVISED_AFTER = 8  # steps between revisions, each of which takes the host as long as a step
TRIED_FIRST = 8  # first observations of each tree whose acceptance no other tree reveals
PLAIN = TokenTree.chain(0, "plain")


class AdaptiveTrees:
    """Tree policy that chooses a tree for each step by measured step times.

    Drafting takes the time of its steps and, once for each request, the drafter's prefill of the
    prompt, which decides with many rows and short answers. While plain decoding is best, drafters
    read no prompts (`drafts`). All rows whose requests name no tree have the chosen one.

    Args:
        trees: Trees or their names, at least one with drafts; plain decoding is added.
        costs: Step times, as `BatchDecoder.measure_step_times` returns them; None until they are
            measured.

    Raises:
        UsageError: Without a tree that has drafts.

    Example:
        >>> import stree
        >>> str(stree.AdaptiveTrees(["paper", "chain-4"]))
        'paper or chain-4'
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
        """Forget all observations, and keep the step times."""
        self._speeds: dict[int, dict[TokenTree, float]] = {}  # by number of rows
        self._answer_tokens = MovingAverage(math.inf)
        self._num_tokens = 0  # tokens of all requests since one of them ended
        self.costs = self._costs
        self.rates = AcceptanceRates()
        self._untried = dict.fromkeys(self._telling, TRIED_FIRST)  # observations that are missing
        dynamic: dict[tuple[str, int], list[BeamTree]] = defaultdict(list)
        for tree in self.trees:
            if isinstance(tree, BeamTree):
                dynamic[tree.kind, tree.width].append(tree)
        self._dynamic_rates = {
            key: DynamicAcceptanceRates(
                max(t.depth for t in trees), max(t.num_nodes for t in trees)
            )
            for key, trees in dynamic.items()
        }
        self._unseen_s = dict.fromkeys(self._telling, 0.0)  # seconds since such a tree was tried
        self._expected: dict[TokenTree, float] = {}  # tokens of a step
        self._news = 0  # observations since `_expected` was computed
        self._num_rows = 1  # rows of the last step, each of which gives an observation
        self._memory = MEMORY  # weight of an observation one observation later
        self._revise()
        self.current = self.trees[-1]
        self._plain_s = 0.0  # seconds of plain decoding since the last probe
        self._missed_s = 0.0  # seconds that drafting would have saved since it is best
        self._probing = 0  # steps left of a probe
        self._probed = deque(self._telling)  # trees to probe, the next one first

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """Forget all observations inside the block, and restore them after it.

        A warm-up's answers are few, short and alike, and would be taken for those of requests. Step
        times that are set inside the block stay. A subclass that learns more resets it in `forget`.
        """
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
        """Step times that the choice rests on."""
        return self._costs

    @costs.setter
    def costs(self, costs: StepTimes) -> None:
        self._costs, self._speeds = costs, {}
        # The drafter's seconds a request: to read a prompt, and to catch up after plain steps
        self._prefill_s, self._catch_up_s = (
            MovingAverage(costs.catch_up),
            MovingAverage(costs.catch_up),
        )

    @property
    def drafts(self) -> bool:
        """True if drafters have to read the prompts of new requests."""
        return self.current != PLAIN

    def choose(self, num_rows: int) -> TokenTree:
        """Return the tree of the next step of `num_rows` rows."""
        if num_rows != self._num_rows:
            self._num_rows = num_rows
            self._memory = MEMORY ** (1 / num_rows)
        if self._probing == 1 or self._news >= REVISED_AFTER * num_rows:
            self._revise()  # by the observations of a probe, or of recent steps
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
            if self.current != PLAIN or self._pays_for_catching_up(best, num_rows):
                self.current = best
        else:
            self._missed_s = 0.0
        if self.current == PLAIN:
            self._consider_a_probe(num_rows)
            return self.current
        self._missed_s = 0.0
        return self._unseen(num_rows) or self.current

    def _might_pay(self, tree: TokenTree, num_rows: int) -> bool:
        """Return whether a tree would be faster than plain decoding if all drafts were accepted."""
        most = self._speed_of(num_rows, tree, tree.max_depth + 1)
        return most > self._speed_of(num_rows, PLAIN, 1.0)

    def _pays_for_catching_up(self, tree: TokenTree, num_rows: int) -> bool:
        """Return whether plain steps have lost as much time as the drafter needs to catch up.

        So a change from plain decoding costs at most as much as staying has cost.
        """
        speed = self._speed(num_rows)
        self._missed_s += self.costs.of(num_rows, PLAIN) * (1 - speed[PLAIN] / speed[tree])
        return self._missed_s >= num_rows * self._catching_up.value

    def learn(self, tree: TokenTree, end: int) -> None:
        """Learn from a row's step of `tree` that has accepted the path to the node `end`."""
        if tree.num_nodes == 1:
            return  # plain decoding shows nothing
        if not isinstance(tree, BeamTree):
            self.rates.learn(tree, end, self._memory)
        self._count(tree)

    def learn_path(self, tree: TokenTree, path: Sequence[int]) -> None:
        """Learn from a row's step of `tree`, given the accepted nodes, the root first.

        The nodes of dynamic trees are ranks.
        """
        if isinstance(tree, BeamTree):
            self._dynamic_rates[tree.kind, tree.width].learn(tree, path, self._memory)
        self.learn(tree, tree.end_of(path))

    def learn_tokens(self, num_tokens: int) -> None:
        """Count new tokens of a request towards the length of the next answer that ends.

        When many requests begin at once, the first answers that end are the short ones, and their
        own lengths would promise too few tokens.
        """
        self._num_tokens += num_tokens

    def learn_answer(self, prefill_s: float | None = None, catch_up_s: float | None = None) -> None:
        """Learn that an answer has ended.

        Args:
            prefill_s: Seconds of the drafter's prefill of the prompt; None if it did not read it.
            catch_up_s: Seconds of the drafter's catch-ups; None if there were none.
        """
        self._answer_tokens.learn(self._num_tokens)
        self._num_tokens = 0
        if prefill_s is not None:
            self._prefill_s.learn(prefill_s)
        if catch_up_s is not None:
            self._catch_up_s.learn(catch_up_s)
        self._speeds = {}

    @property
    def _prefill(self) -> MovingAverage:
        """Seconds of a drafter's prefill; those of a catch-up before any prefill."""
        return self._prefill_s or self._catch_up_s

    @property
    def _catching_up(self) -> MovingAverage:
        """Seconds of a drafter's catch-up; those of a prefill before any catch-up."""
        return self._catch_up_s or self._prefill_s

    def _count(self, tree: TokenTree) -> None:
        """Count an observation of a tree."""
        if self._untried and tree in self._untried:
            self._untried[tree] -= 1
            if not self._untried[tree]:
                del self._untried[tree]
        self._news += 1

    def expected_tokens(self, tree: TokenTree) -> float:
        """Return the expected tokens of a step with a tree, by recent acceptance."""
        found = self._expected.get(tree)
        return self.rates.expected_tokens(tree) if found is None else found

    def _revise(self) -> None:
        for rates in self._dynamic_rates.values():
            rates.revise()
        self._expected = {
            tree: self._dynamic_rates[tree.kind, tree.width].expected_tokens(tree)
            if isinstance(tree, BeamTree)
            else self.rates.expected_tokens(tree)
            for tree in self.trees
        }
        self._speeds, self._news = {}, 0

    def _speed(self, num_rows: int) -> dict[TokenTree, float]:
        """Return the expected tokens per second and row, by tree."""
        if num_rows not in self._speeds:
            self._speeds[num_rows] = {
                tree: self._speed_of(num_rows, tree, tokens)
                for tree, tokens in self._expected.items()
            }
        return self._speeds[num_rows]

    def _speed_of(self, num_rows: int, tree: TokenTree, tokens: float) -> float:
        """Return tokens per second and row of steps that yield `tokens` tokens.

        The time of a step includes its share of the drafter's prefills.
        """
        seconds = self.costs.of(num_rows, tree)
        if tree != PLAIN:
            answer_tokens = max(self._answer_tokens.value, 1.0)
            seconds += num_rows * self._prefill.value * tokens / answer_tokens
        return tokens / seconds

    def _unseen(self, num_rows: int) -> TokenTree | None:
        """Return a tree to try now, or None; a tree that seems to lose less is tried more often.

        Try only trees whose acceptance no other tree reveals (`telling`).
        """
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
        """Begin a probe of the next tree if plain decoding has lasted long enough.

        The trees take turns: if only the best one were tried, no other could show that it is
        better.
        """
        self._plain_s += self.costs.of(num_rows, PLAIN)
        tree = self._probed[0]
        lost = PROBE_STEPS * self.costs.of(num_rows, tree) + num_rows * self._catching_up.value
        if self._plain_s > lost / PROBE_SHARE:
            self._plain_s, self._probing, self.current = 0.0, PROBE_STEPS, tree
            self._probed.rotate(-1)


def trees_of(tree_policy: TokenTree | AdaptiveTrees) -> tuple[TokenTree, ...]:
    """Return the trees that a step may have: the tree itself, or all adaptive trees."""
    return tree_policy.trees if isinstance(tree_policy, AdaptiveTrees) else (tree_policy,)


def deepest_of(tree_policy: TokenTree | AdaptiveTrees) -> TokenTree:
    """Return the deepest tree that a step may have."""
    return max(trees_of(tree_policy), key=lambda tree: tree.max_depth)


def largest_of(tree_policy: TokenTree | AdaptiveTrees) -> TokenTree:
    """Return the tree with the most nodes that a step may have."""
    return max(trees_of(tree_policy), key=lambda tree: tree.num_nodes)


def telling(trees: Sequence[TokenTree]) -> list[TokenTree]:
    """Return the trees whose acceptance no other tree shows.

    Another tree shows it if it has all of their children by depth and rank, or, among dynamic trees
    of one width, if it is as deep and as large.
    """
    return [
        tree for number, tree in enumerate(trees)
        if not any(
            _shows_all_of(each, tree) and (other < number or not _shows_all_of(tree, each))
            for other, each in enumerate(trees) if other != number
        )
    ]


def _shows_all_of(tree: TokenTree, other: TokenTree) -> bool:
    if isinstance(tree, BeamTree) and isinstance(other, BeamTree):
        alike = (tree.kind, tree.width) == (other.kind, other.width)
        return alike and tree.depth >= other.depth and tree.num_nodes >= other.num_nodes
    if isinstance(tree, BeamTree) or isinstance(other, BeamTree):
        return False
    return _ranks(tree) >= _ranks(other)


def _ranks(tree: TokenTree) -> set[tuple[int, int]]:
    """Return depth of the parent and rank of each child in a tree."""
    return {
        (depth, rank)
        for depth, children in zip(tree.depths, tree.children, strict=True)
        for rank in range(len(children))
    }
