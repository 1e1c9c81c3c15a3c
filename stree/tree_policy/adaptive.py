"""Adaptive trees: choose each step's tree by expected tokens per measured time.

A small tree is best for many rows and a large one for few, and acceptance changes with the text. So
the choice is made again and again, from recent acceptance by depth and rank, and changed seldom.
Plain decoding is always one of the choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from stree.tree_policy.acceptance import Acceptance
from stree.tree_policy.explorer import Explorer
from stree.tree_policy.policy import TreePolicy
from stree.tree_policy.step_times import Speeds
from stree.trees.token_tree import PLAIN, StepTree

HYSTERESIS = 0.01  # least relative gain for which the tree is changed, except to plain decoding
REVISED_AFTER = 8  # observed steps between revisions: their time matters with small models
OBSERVED_ROWS = 4  # of steps with k times as many rows only each k-th one is observed
MAX_PASSED = 4  # the largest such k
FIRST_ANSWERS = 16  # after each of which the choice is considered
READS_TIMED = 8  # later, prompts are timed from the end of each 8th answer to that of the next


@dataclass
class AdaptiveState:
    """Record of all that `AdaptiveTrees` have learned.

    Attributes:
        current: The tree that is taken for the best one, or is probed.
        acceptance: Expected tokens of steps.
        speeds: Expected tokens per second.
        explorer: Tries of other trees.
        missed_s: Seconds that drafting would have saved since it seems to be best.
        num_steps: Steps since the choice was considered last.
        num_passed: Steps since one was observed.
        num_answers: Answers that have ended.
        is_settled: False if the next step needs a new choice: the last one was a try or a part of a
            probe, drafting is about to begin, or one of the first answers has ended.
    """

    current: StepTree
    acceptance: Acceptance
    speeds: Speeds
    explorer: Explorer
    missed_s: float = 0.0
    num_steps: int = 0
    num_passed: int = 0
    num_answers: int = 0
    is_settled: bool = False


class AdaptiveTrees(TreePolicy):
    """Tree policy that chooses a tree for each step by step times.

    Times that were measured apart are the first guess; what steps take while it decodes replaces
    them, tree by tree. Plain decoding is timed by short probes, too, while trees are drafted.
    Drafting takes the time of its steps and, once for each request, the drafter's prefill of the
    prompt: with many rows and short answers this can decide the choice. While plain decoding is
    best, drafters read no prompts (`drafts`). All rows whose requests name no tree have the chosen
    one.

    Arguments and errors are `TreePolicy`'s.

    Example:
        >>> import stree
        >>> str(stree.AdaptiveTrees(["paper", "chain-4"]))
        'paper or chain-4'
    """

    state: AdaptiveState

    def new_state(self) -> AdaptiveState:
        acceptance = Acceptance(self.trees)
        speeds = Speeds(self.costs, acceptance.revise())
        return AdaptiveState(self.trees[-1], acceptance, speeds, Explorer(self.trees[1:]))

    @property
    def drafts(self) -> bool:
        """True if drafters have to read the prompts of new requests."""
        return self.state.current != PLAIN

    @property
    def times_reads(self) -> bool:
        """True for the first answers, and later for some: timing takes the host's time."""
        num_answers = self.state.num_answers
        return num_answers < FIRST_ANSWERS or num_answers % READS_TIMED == 0

    @property
    def speeds(self) -> Speeds:
        """Speeds by the step times of now."""
        speeds = self.state.speeds
        if speeds.costs is not self.costs:
            speeds.rest_on(self.costs)
        return speeds

    def choose(self, num_rows: int) -> StepTree:
        """Return the tree of the next step of `num_rows` rows.

        The tree is kept for REVISED_AFTER observed steps, unless a try or a probe is under way.
        """
        state = self.state
        state.num_steps += 1
        due = REVISED_AFTER * _every(num_rows)
        is_due = state.num_steps >= due or num_rows != state.acceptance.num_rows
        if state.is_settled and not is_due and state.speeds.costs is self.costs:
            return state.current
        tree = self._consider(num_rows)
        state.num_steps = 0
        is_changing = tree != state.current or state.missed_s > 0
        is_tried = state.explorer.is_busy or tree in state.explorer.untried
        state.is_settled = not (is_changing or is_tried)
        return tree

    def _consider(self, num_rows: int) -> StepTree:
        """Choose anew, after `state.num_steps` steps of the current tree."""
        state, speeds = self.state, self.speeds
        acceptance, explorer = state.acceptance, state.explorer
        if num_rows != acceptance.num_rows:
            acceptance.of_rows(num_rows)
        if explorer.probing == 1 or acceptance.num_new >= REVISED_AFTER:
            speeds.expect(acceptance.revise())  # by a probe, or by recent steps
        for tree in explorer.untried:
            if speeds.might_pay(num_rows, tree):
                return tree
        self._change_to_the_best(num_rows, speeds.of(num_rows))
        if state.current == PLAIN:
            probed = explorer.tree_to_probe(PLAIN, num_rows, speeds, state.num_steps)
            state.current = probed or PLAIN
            return state.current
        state.missed_s = 0.0
        if explorer.probing:  # all its steps have this tree
            return state.current
        if explorer.is_plain_probe(state.current, num_rows, speeds, state.num_steps):
            return PLAIN
        tried = explorer.tree_to_try(state.current, num_rows, speeds, state.num_steps)
        return tried or state.current

    def _change_to_the_best(self, num_rows: int, speed: dict[StepTree, float]) -> None:
        """Make the best tree the current one, if a probe ends or if a change pays."""
        state = self.state
        best = max(self.trees, key=speed.__getitem__)
        if state.explorer.probing:
            state.explorer.probing -= 1
            if not state.explorer.probing:
                state.current = best
        elif speed[best] <= speed[state.current] * (1 if best == PLAIN else 1 + HYSTERESIS):
            state.missed_s = 0.0
        elif state.current != PLAIN or self._pays_for_catching_up(best, num_rows, speed):
            state.current = best
            if best == PLAIN:
                state.explorer.end_drafting()

    def _pays_for_catching_up(
        self, tree: StepTree, num_rows: int, speed: dict[StepTree, float]
    ) -> bool:
        """Return whether plain steps have lost as much time as the drafter needs to catch up.

        So a change from plain decoding costs at most as much as staying has cost.
        """
        state = self.state
        plain_s = state.num_steps * self.speeds.step_s(num_rows, PLAIN)
        state.missed_s += plain_s * (1 - speed[PLAIN] / speed[tree])
        return state.missed_s >= num_rows * state.speeds.catch_up_s

    def observes(self, num_rows: int) -> bool:
        """Return whether the paths of the step that is planned now are learned.

        With many rows one step of several tells enough, and learning takes the host's time. All
        steps of tries and probes are observed.
        """
        state = self.state
        state.num_passed += 1
        if state.is_settled and state.num_passed < _every(num_rows):
            return False
        state.acceptance.after(state.num_passed)
        state.num_passed = 0
        return True

    def learn_paths(self, tree: StepTree, paths: Sequence[Sequence[int]]) -> None:
        """Learn from rows' steps of `tree`; plain decoding shows nothing."""
        if tree.num_nodes > 1:
            self.state.acceptance.learn(tree, paths)
            self.state.explorer.count(tree, len(paths))

    def learn_step(self, num_rows: int, tree: StepTree, seconds: float) -> None:
        """Learn what a step has taken (`TreePolicy.learn_step`)."""
        if tree is self.state.current or tree in self.trees:  # not one that a request has named
            self.speeds.learn_step(num_rows, tree, seconds)

    def learn_tokens(self, num_tokens: int) -> None:
        """Count new tokens of a request towards the length of the next answer that ends."""
        self.state.speeds.num_tokens += num_tokens

    def learn_answer(self, prefill_s: float | None = None, catch_up_s: float | None = None) -> None:
        """Learn that an answer has ended (`TreePolicy.learn_answer`).

        The first ones tell most of how long answers are; later ones do not hasten the next choice.
        """
        self.speeds.learn_answer(prefill_s, catch_up_s)
        state = self.state
        state.num_answers += 1
        if state.num_answers <= FIRST_ANSWERS:
            state.is_settled = False


@cache  # each step asks twice
def _every(num_rows: int) -> int:
    """Return N where each N-th step of that many rows is observed."""
    return min(max(1, num_rows // OBSERVED_ROWS), MAX_PASSED)
