"""Figures of drafters that differ by their training's seed only, taken together, and differences of
such figures.

A figure is of all prompts and seeds. Its interval is a bootstrap over prompts and, where there are
several seeds, over seeds too, drawn apart from each other (the pigeonhole bootstrap, Owen 2007).
Both sides of a difference have the same prompts drawn; each has seeds of its own. Few seeds say
little of how far seeds differ: with two or three the interval is still too narrow.
Dims: S seeds, Q prompts, R resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stree import metrics
from stree_pipelines.evaluation.records import SampleRow
from stree_pipelines.reports.tables import Gain

HOW = (
    "95 % bootstrap intervals over prompts, and over seeds where there are several: both are drawn "
    "anew, apart from each other. With two or three seeds they are still too narrow."
)

Sums = Callable[[str], NDArray[np.float64]]  # of a count by name: over what was drawn, [R]
Figure = Callable[[Sums], NDArray[np.float64]]


def acceptance_length(sums: Sums) -> NDArray[np.float64]:
    return sums("tokens") / sums("calls")


def tokens_per_second(sums: Sums) -> NDArray[np.float64]:
    return sums("tokens") / sums("seconds")


def plain_tokens_per_second(sums: Sums) -> NDArray[np.float64]:
    return sums("plain_tokens") / sums("plain_seconds")


def speedup(sums: Sums) -> NDArray[np.float64]:
    return tokens_per_second(sums) / plain_tokens_per_second(sums)


@dataclass(frozen=True, eq=False)
class Answers:
    """Counts of the prompts that every seed answered: {name: [S, Q]}. What plain decoding beside
    them took is there when every answer says it."""

    prompts: tuple[tuple[str, str], ...]  # benchmark and id
    counts: dict[str, NDArray[np.float64]]

    @classmethod
    def of(cls, seeds: Sequence[Sequence[SampleRow]]) -> Answers:
        by_prompt = [{(s.benchmark, s.prompt_id): s for s in samples} for samples in seeds]
        shared = [key for key in by_prompt[0] if all(key in each for each in by_prompt)]
        rows = [[each[key] for key in shared] for each in by_prompt]
        counts = {
            "tokens": [[s.num_new_tokens for s in row] for row in rows],
            "calls": [[s.num_calls for s in row] for row in rows],
            "seconds": [[s.decode_s for s in row] for row in rows],
        }
        plain = [[s.baseline for s in row if s.baseline] for row in rows]
        if all(len(row) == len(shared) for row in plain):
            counts["plain_tokens"] = [[s.num_new_tokens for s in row] for row in plain]
            counts["plain_seconds"] = [[s.decode_s for s in row] for row in plain]
        return cls(tuple(shared), {k: np.array(v, dtype=float) for k, v in counts.items()})

    @property
    def num_seeds(self) -> int:
        return len(self.counts["tokens"])

    def figure(self, figure: Figure) -> Gain:
        """With its interval; None where a count that it needs is missing."""
        return _estimate(lambda sums: figure(*sums), self)

    def over(self, other: Answers, figure: Figure, compare: Callable[..., NDArray]) -> Gain:
        """`compare` (np.subtract or np.divide) of the figure and the other's, over the prompts that
        both have."""
        theirs = {key: at for at, key in enumerate(other.prompts)}
        mine = [at for at, key in enumerate(self.prompts) if key in theirs]
        shared = [theirs[self.prompts[at]] for at in mine]
        sides = self._only(mine), other._only(shared)
        return _estimate(lambda sums: compare(*map(figure, sums)), *sides)

    def _only(self, prompts: Sequence[int]) -> Answers:
        kept = {name: counts[:, list(prompts)] for name, counts in self.counts.items()}
        return Answers(tuple(self.prompts[at] for at in prompts), kept)


def _estimate(statistic: Callable[[list[Sums]], NDArray], *sides: Answers) -> Gain:
    """Of all that the sides have, and of resamples."""

    def sums_of(answers: Answers, i_RQ: NDArray, j_RS: NDArray) -> Sums:
        def sums(name: str) -> NDArray[np.float64]:
            of_seeds_RQ = answers.counts[name][j_RS].sum(axis=1)
            return np.take_along_axis(of_seeds_RQ, i_RQ, axis=1).sum(axis=1)

        return sums

    def resampled(i_RQ: NDArray[np.int64]) -> NDArray[np.float64]:
        drawn = []
        for number, answers in enumerate(sides, start=1):
            size = len(i_RQ), answers.num_seeds
            j_RS = np.random.default_rng(number).integers(answers.num_seeds, size=size)
            drawn.append(sums_of(answers, i_RQ, j_RS))
        return statistic(drawn)

    num_prompts = len(sides[0].prompts)
    everything = [
        sums_of(each, np.arange(num_prompts)[None], np.arange(each.num_seeds)[None])
        for each in sides
    ]
    try:
        with np.errstate(divide="ignore", invalid="ignore"):
            (value,) = statistic(everything)
    except KeyError:  # nothing was measured beside these
        return Gain(None, None)
    if not np.isfinite(value):
        return Gain(None, None)
    return Gain(float(value), metrics.bootstrap_interval(resampled, num_prompts))
