"""What it would be worth to stop a tree by the drafter's probabilities of this very step, computed
from recorded steps in which every draft was verified.

A tree grows level by level, the most probable paths first, as `BeamTree` does. Who stops in the
step knows after each level how probable the paths are that the next one would start from, and goes
on while what another level may bring is worth its time; then as many nodes are verified as pay.
What a token is worth in time is what the whole makes of it: the speed itself (the optimal stopping
of a renewal process). The rival has one number of levels and nodes for all steps.

Shapes: N nodes, the most probable first, the root among them; S steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stree import metrics
from stree.drafters import Proposal
from stree.errors import UsageError
from stree.forest import Forest
from stree.rows import Rows
from stree.tree import BeamTree
from stree.verifiers.coupled import Coupled
from stree_pipelines.reports.tables import Table, figure

NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # how many may be verified
NUM_GROUPS = 24  # of observations with alike values, whose means are a curve
LEAST = -60.0  # a path less probable counts as one of this logarithm
NUM_ROUNDS = 4  # until the speed that a token is worth is the one that follows from it
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Times:
    """Milliseconds of a plain step, of a level of drafts, and of each further node of a call. That
    the host looks in the middle of a step is taken to cost nothing."""

    name: str
    plain: float
    level: float
    node: float

    @classmethod
    def named(cls, text: str) -> Times:
        """Of "NAME=PLAIN,LEVEL,NODE"."""
        name, _, values = text.rpartition("=")
        try:
            found = [float(value) for value in values.split(",")]
        except ValueError:
            found = []
        if not name or len(found) != 3 or min(found) < 0 or found[0] == 0:
            raise UsageError(
                f"times are {text!r}, wanted NAME=PLAIN,LEVEL,NODE in milliseconds, such as "
                "8B=4.2,0.14,0.011"
            )
        return cls(name, *found)

    def call(self, num_nodes: int) -> float:
        return self.plain + self.node * (num_nodes - 1)


@dataclass(frozen=True)
class Drafted:
    """A step: of each node how probable its path is by the drafter (N,), as a logarithm and
    falling, its depth (N,), and whether it was accepted (N,); and whose prompt's step it is."""

    logs: Floats
    depths: NDArray[np.int64]
    accepted: NDArray[np.bool_]
    prompt: int = 0


class Recorder(Coupled):
    """Accepts as `coupled` does, and notes the steps. For one sequence on a CPU, with a `BeamTree`
    that verifies all that it draws."""

    def __init__(self) -> None:
        self.steps: list[Drafted] = []
        self.prompt = 0

    def accept(
        self,
        logits: Tensor,
        proposal: Proposal,
        forest: Forest,
        rows: Rows,
        cache: Any,
        report: Tensor,
    ) -> None:
        super().accept(logits, proposal, forest, rows, cache, report)
        assert forest.values is not None
        assert forest.values.shape == forest.parents.shape == (1, forest.num_nodes)
        _, count, *rest = report[0].tolist()
        accepted = np.zeros(forest.num_nodes, dtype=bool)
        accepted[rest[len(rest) // 2 :][:count]] = True
        values = forest.values[0].double().nan_to_num(nan=-np.inf).clamp(min=LEAST)
        logs = values.sort(descending=True).values
        self.steps.append(
            Drafted(logs.numpy(), forest.depths[0].long().numpy().copy(), accepted, self.prompt)
        )


@dataclass(frozen=True)
class Curve:
    """Means of a quantity in groups of alike values of another, and lines between them."""

    places: Floats
    means: Floats

    @classmethod
    def of(cls, values: Sequence[float] | Floats, quantity: Sequence[float] | Floats) -> Curve:
        value, mean = np.asarray(values, float), np.asarray(quantity, float)
        # Equal values are never of two groups
        ends = np.unique(np.quantile(value, np.linspace(0, 1, NUM_GROUPS + 1)[1:], method="lower"))
        group = np.searchsorted(ends, value)
        counts = np.bincount(group, minlength=len(ends))
        there = counts > 0
        sums = (np.bincount(group, each, len(ends))[there] for each in (value, mean))
        return cls(*(each / counts[there] for each in sums))

    def at(self, value: Any) -> Any:
        return np.interp(value, self.places, self.means)


@dataclass(frozen=True)
class Outcome:
    """Of each step (S,): the tokens that it yields, its milliseconds, levels and nodes."""

    tokens: Floats
    ms: Floats
    levels: Floats
    nodes: Floats

    @classmethod
    def of(cls, steps: Sequence[tuple[float, float, int, int]]) -> Outcome:
        return cls(*np.array(steps, dtype=float).reshape(-1, 4).T)

    @property
    def speed(self) -> float:
        """Tokens a millisecond."""
        return float(self.tokens.sum() / self.ms.sum())


@dataclass(frozen=True)
class Fixed:
    """So many levels and nodes in each step; none is plain decoding."""

    levels: int
    nodes: int

    def outcome(self, steps: Sequence[Drafted], times: Times) -> Outcome:
        ms = times.call(self.nodes) + self.levels * times.level
        return Outcome.of([
            (_tokens(each, self.levels, self.nodes), ms, self.levels, self.nodes) for each in steps
        ])  # fmt: skip

    @classmethod
    def best(cls, steps: Sequence[Drafted], times: Times, width: int) -> Fixed:
        """The fastest on these steps."""
        deepest = _deepest(steps)
        choices = [cls(0, 1)] + [
            cls(levels, nodes)
            for levels in range(1, deepest + 1)
            for nodes in NODES
            if levels < nodes <= _num_drawn(width, levels)
        ]
        return max(choices, key=lambda each: each.outcome(steps, times).speed)


class Stopping:
    """Stops in the step, by what it learned from other steps: how often a path of some probability
    is accepted, and what another level is worth, given how probable the paths are that it starts
    from."""

    def __init__(self, steps: Sequence[Drafted], times: Times, width: int) -> None:
        self.times, self.width, self.deepest = times, width, _deepest(steps)
        self.probability = Curve.of(
            np.concatenate([each.logs[1:] for each in steps]),
            np.concatenate([each.accepted[1:] for each in steps]),
        )
        self.speed = Fixed.best(steps, times, width).outcome(steps, times).speed
        for _ in range(NUM_ROUNDS):
            self.gains = self._gains(steps)
            self.speed = self.outcome(steps).speed

    def outcome(self, steps: Sequence[Drafted]) -> Outcome:
        return Outcome.of([self._step(each) for each in steps])

    def _step(self, step: Drafted) -> tuple[float, float, int, int]:
        expected, levels = self._expected(step), 0
        while levels < self.deepest and self._goes_on(step, expected, levels):
            levels += 1
        _, nodes = self._worth(step, expected, levels)
        ms = levels * self.times.level + self.times.call(nodes)
        return _tokens(step, levels, nodes), ms, levels, nodes

    def _goes_on(self, step: Drafted, expected: Floats, levels: int) -> bool:
        return bool(self.gains[levels].at(self._hope(step, expected, levels)) > 0)

    def _expected(self, step: Drafted) -> Floats:
        """How often such nodes are accepted (N,)."""
        return np.concatenate([[1.0], self.probability.at(step.logs[1:])])

    def _hope(self, step: Drafted, expected: Floats, levels: int) -> float:
        """How many of the nodes are expected to be accepted that the next level starts from."""
        return float(expected[step.depths == levels][: self.width].sum())

    def _worth(self, step: Drafted, expected: Floats, levels: int) -> tuple[float, int]:
        """Expected tokens less the time of their call, and the number of nodes with the most."""
        reached = expected[step.depths <= levels].cumsum()
        found = [(reached[nodes - 1] - self.speed * self.times.call(nodes), nodes)
                 for nodes in NODES if nodes <= len(reached)]  # fmt: skip
        return max(found)

    def _gains(self, steps: Sequence[Drafted]) -> list[Curve]:
        """By level what going on is worth more than stopping, given the hope: from the last level
        back, each with what is done at the next ones (Longstaff and Schwartz 2001)."""
        all_expected = [self._expected(each) for each in steps]

        def worths(levels: int) -> Floats:
            pairs = zip(steps, all_expected, strict=True)
            return np.array([self._worth(step, each, levels)[0] for step, each in pairs])

        value, curves = worths(self.deepest), []
        for levels in reversed(range(self.deepest)):
            pairs = zip(steps, all_expected, strict=True)
            hopes = np.array([self._hope(step, each, levels) for step, each in pairs])
            stopped = worths(levels)
            going_on = value - self.speed * self.times.level
            curve = Curve.of(hopes, going_on - stopped)
            value = np.where(curve.at(hopes) > 0, going_on, stopped)
            curves.append(curve)
        return curves[::-1]


def table(steps: Sequence[Drafted], all_times: Sequence[Times], width: int, title: str) -> Table:
    """Both at each of the times, over plain decoding; each half of the prompts with what the other
    half says. Raises `UsageError` for fewer than four prompts."""
    prompts = sorted({each.prompt for each in steps})
    if len(prompts) < 4:
        raise UsageError(f"steps of {len(prompts)} prompts were recorded, wanted at least 4")
    halves = [[each for each in steps if each.prompt in prompts[part::2]] for part in range(2)]
    rows: list[tuple[str, ...]] = [
        ("times", "fixed", "levels, nodes", "stopped", "levels, nodes", "stopped over fixed")
    ]
    for times in all_times:
        fixed, stopped, of_prompt = [], [], []
        for known, new in (halves, halves[::-1]):
            fixed.append(Fixed.best(known, times, width).outcome(new, times))
            stopped.append(Stopping(known, times, width).outcome(new))
            of_prompt += [prompts.index(each.prompt) for each in new]
        cells, speeds = [times.name], []
        for outcomes in (fixed, stopped):
            whole = Outcome(*(np.concatenate([getattr(each, name) for each in outcomes])
                              for name in ("tokens", "ms", "levels", "nodes")))  # fmt: skip
            cells += [f"{whole.speed * times.plain:.2f}×",
                      f"{whole.levels.mean():.1f}, {whole.nodes.mean():.1f}"]  # fmt: skip
            speeds.append([np.bincount(of_prompt, each) for each in (whole.tokens, whole.ms)])
        rows.append((*cells, _gain(*speeds)))
    note = f"{len(steps):,} steps after {len(prompts)} prompts; [95 % intervals over prompts]"
    return Table(title, tuple(rows), note=note)


def _gain(fixed: Sequence[Any], stopped: Sequence[Any]) -> str:
    """Tokens and milliseconds by prompt, of both: the one's speed over the other's."""

    def gain(at: Any) -> Any:
        speed = [tokens[at].sum(-1) / ms[at].sum(-1) for tokens, ms in (fixed, stopped)]
        return 100 * (speed[1] / speed[0] - 1)

    number = len(fixed[0])
    interval = metrics.bootstrap_interval(gain, number)
    return figure(float(gain(np.arange(number))), interval, "+.1f") + " %"


def _tokens(step: Drafted, levels: int, nodes: int) -> float:
    """What a step yields of the first so many nodes of so many levels, the target's own included:
    the root stands for it."""
    return float(step.accepted[step.depths <= levels][:nodes].sum())


def _deepest(steps: Sequence[Drafted]) -> int:
    return int(max(each.depths.max() for each in steps))


def _num_drawn(width: int, levels: int) -> int:
    return BeamTree.of(width, levels, levels + 1).num_drawn
