"""Explorer: which tree to try now, though another one seems to be the best."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from stree.tree_policy.step_times import MIN_STEPS_SEEN, Speeds
from stree.trees.token_tree import PLAIN, StepTree

PROBE_SHARE = 0.01  # share of plain decoding's time that may be lost to probes of trees
FIRST_PROBE_SHARE = 0.08  # for the first probe after long drafting; each probe halves the share
LONG_DRAFTING = 32  # steps
TRY_SHARE = 0.005  # share of the time that may be lost to tries of other trees
MIN_LOSS = 0.3  # share of a step that a try of another tree counts as losing, at least
PROBE_STEPS = 4  # consecutive steps with a tree that make a probe
PLAIN_SHARE = 0.002  # share of the time of drafting that may be lost to probes of plain decoding
MAX_PLAIN_STEPS = 2 * MIN_STEPS_SEEN  # of such a probe; some are not timed, as prompts are read
TRIED_FIRST = 8  # first observations of each tree whose acceptance no other tree reveals


class Explorer:
    """Tries of trees whose acceptance no other tree shows (`telling`), and of plain decoding.

    At first each tree that might pay is used until TRIED_FIRST accepted paths of it were observed,
    one a row and step. While drafts are made, each gets a step now and then (`tree_to_try`), and
    plain decoding is timed (`is_plain_probe`). While decoding is plain, trees take turns with
    probes of PROBE_STEPS steps (`tree_to_probe`).

    Args:
        trees: All trees with drafts.

    Attributes:
        untried: Observations that are missing, by tree; only trees with any.
        probing: Steps that are left of a probe.
    """

    def __init__(self, trees: Sequence[StepTree]) -> None:
        self._telling = telling(trees)
        self.untried = dict.fromkeys(self._telling, TRIED_FIRST)
        self.probing = 0
        self._unseen_s = dict.fromkeys(self._telling, 0.0)  # seconds since such a tree was tried
        self._plain_s = 0.0  # seconds of plain decoding since the last probe
        self._probe_share = PROBE_SHARE  # of the next probe
        self._probed = deque(self._telling)  # trees to probe, the next one first
        self._drafted_s = 0.0  # seconds of drafting since the last probe of plain decoding
        self._drafted_steps = 0  # since decoding was plain
        self._plain_left = 0  # steps that such a probe may still have
        # Numbers of rows with which plain decoding was timed, or such a probe has begun
        self._plain_timed: set[int] = set()

    def count(self, tree: StepTree, number: int) -> None:
        """Count a number of observations of a tree."""
        if self.untried and tree in self.untried:
            self.untried[tree] -= number
            if self.untried[tree] <= 0:
                del self.untried[tree]

    @property
    def is_busy(self) -> bool:
        """True while the next steps belong to a probe."""
        return bool(self.probing or self._plain_left)

    def end_drafting(self) -> None:
        """Note that plain decoding begins.

        After long drafting one hard text may be the reason, so the next probes come sooner.
        """
        if self._drafted_steps >= LONG_DRAFTING:
            self._probe_share = FIRST_PROBE_SHARE
        self._drafted_steps = self._plain_left = 0

    def tree_to_try(
        self, current: StepTree, num_rows: int, speeds: Speeds, num_steps: int
    ) -> StepTree | None:
        """Return a tree to try now instead of the current one, or None, after `num_steps` steps.

        A tree that seems to lose less is tried more often.
        """
        speed, step_s = speeds.of(num_rows), speeds.step_s
        share = TRY_SHARE / len(self._telling)
        for tree in self._telling:
            if tree == current:
                self._unseen_s[tree] = 0.0
                continue
            self._unseen_s[tree] += num_steps * step_s(num_rows, current)
            slower = max(1 - speed[tree] / speed[current], MIN_LOSS)
            if self._unseen_s[tree] > slower * step_s(num_rows, tree) / share:
                self._unseen_s[tree] = 0.0
                return tree
        return None

    def tree_to_probe(
        self, plain: StepTree, num_rows: int, speeds: Speeds, num_steps: int
    ) -> StepTree | None:
        """Return a tree to probe now, if plain decoding has lasted long enough for it, or None.

        The trees take turns: if only the best one were tried, no other could show that it is
        better.
        """
        self._plain_s += num_steps * speeds.step_s(num_rows, plain)
        tree = self._probed[0]
        step_s = speeds.step_s(num_rows, tree)
        lost = PROBE_STEPS * step_s + num_rows * speeds.catch_up_s
        if self._plain_s <= lost / self._probe_share:
            return None
        self._probe_share = max(self._probe_share / 2, PROBE_SHARE)
        self._plain_s, self.probing = 0.0, PROBE_STEPS
        if speeds.is_timed(num_rows, plain):  # by the steps until now
            self._plain_timed.add(num_rows)
        self._probed.rotate(-1)
        return tree

    def is_plain_probe(
        self, current: StepTree, num_rows: int, speeds: Speeds, num_steps: int
    ) -> bool:
        """Return whether the next step shall be plain, to time plain decoding as it is now.

        No probe begins before steps of the current tree were timed. That is enough where plain
        decoding was never timed with this number of rows; else drafting must have lasted long
        enough to pay for the probe.
        """
        self._drafted_steps += num_steps
        if self._plain_left:
            self._plain_left -= 1
            if speeds.is_timed(num_rows, PLAIN):
                self._plain_left = 0
            return self._plain_left > 0
        if not speeds.is_timed(num_rows, current):
            return False
        self._drafted_s += num_steps * speeds.step_s(num_rows, current)
        if num_rows in self._plain_timed:
            speed = speeds.of(num_rows)
            slower = max(1 - speed[PLAIN] / speed[current], MIN_LOSS)
            lost = MIN_STEPS_SEEN * slower * speeds.step_s(num_rows, PLAIN)
            if self._drafted_s <= (lost + num_rows * speeds.catch_up_s) / PLAIN_SHARE:
                return False
        self._plain_timed.add(num_rows)
        self._drafted_s, self._plain_left = 0.0, MAX_PLAIN_STEPS
        speeds.forget_steps(num_rows, PLAIN)
        return True


def telling(trees: Sequence[StepTree]) -> list[StepTree]:
    """Return the trees whose acceptance no other tree shows.

    Tree B shows the acceptance of tree A if B has all of A's children by depth and rank, or, for
    dynamic trees of one width, if B is at least as deep and as large. Of two trees that show each
    other the first is kept.
    """
    return [
        tree for number, tree in enumerate(trees)
        if not any(
            each.shows_all_of(tree) and (other < number or not tree.shows_all_of(each))
            for other, each in enumerate(trees) if other != number
        )
    ]
