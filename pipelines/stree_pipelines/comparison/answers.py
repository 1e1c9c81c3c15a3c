"""Pair answers to the same prompts, and bootstrap the intervals of their figures.

The gate, arm comparisons, studies and multi-run tables use this module. A figure is over all
prompts and, when drafters differ by their training's seed only, over all seeds. Its interval is a
bootstrap over prompts and, with several seeds, over seeds too, drawn independently (the pigeonhole
bootstrap, Owen 2007). Both sides of a difference have the same prompts drawn; each has seeds of its
own. Few seeds say little of how far seeds differ: with two or three the interval is still too
narrow.

Dims: S seeds, Q prompts, R resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stree import metrics
from stree_pipelines.evaluation.records import SampleRow

HOW = (
    "95 % bootstrap intervals over prompts, and over seeds where there are several: both are drawn "
    "anew, apart from each other. With two or three seeds they are still too narrow."
)

MIN_QUARTER_TOKENS = 8  # of an answer's last quarter; fewer repeat in any text

Sums = Callable[[str], NDArray[np.float64]]  # a count's name -> its sums over resamples, [R]
Figure = Callable[[Sums], NDArray[np.float64]]
Count = Callable[[Any], float | None]  # of a row; None when the row lacks it

Key = tuple[str, ...]

COUNTS: dict[str, Count] = {
    "tokens": lambda row: row.num_new_tokens,
    "calls": lambda row: row.num_calls,
    "seconds": lambda row: row.decode_s,
    "plain_tokens": lambda row: row.baseline and row.baseline.num_new_tokens,
    "plain_seconds": lambda row: row.baseline and row.baseline.decode_s,
}


def ratio(top: str, bottom: str) -> Figure:
    """Return the figure that divides one count's sum by another's."""
    return lambda sums: sums(top) / sums(bottom)


tokens_per_second = ratio("tokens", "seconds")
plain_tokens_per_second = ratio("plain_tokens", "plain_seconds")


def acceptance_length(sums: Sums) -> NDArray[np.float64]:
    return metrics.tau(sums("tokens"), sums("calls"))


def speedup(sums: Sums) -> NDArray[np.float64]:
    return tokens_per_second(sums) / plain_tokens_per_second(sums)


def speedup_per_tau(sums: Sums) -> NDArray[np.float64]:
    return speedup(sums) / acceptance_length(sums)


def relative(new_R: NDArray[np.float64], old_R: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the change of a figure as a share of the old one; a comparison for `Answers.over`."""
    return new_R / old_R - 1


def median_speedup(answers: Answers) -> float | None:
    """Return the median of the speed-ups of each prompt and seed; None where a row lacks one."""
    counts = answers.counts
    with np.errstate(divide="ignore", invalid="ignore"):
        speed_SQ = counts["tokens"] / counts["seconds"]
        value = np.median(speed_SQ / (counts["plain_tokens"] / counts["plain_seconds"]))
    return float(value) if np.isfinite(value) else None


def repeats(sample: SampleRow) -> bool:
    """Return True when the last quarter of one of the sample's answers came earlier in that answer.

    Such answers go in circles: easy to draft, they flatter every drafter.
    """
    for tokens in (turn.tokens for turn in sample.turns):
        size = len(tokens) // 4
        if size >= MIN_QUARTER_TOKENS and any(
            tokens[at : at + size] == tokens[-size:] for at in range(len(tokens) - size)
        ):
            return True
    return False


class Gain(NamedTuple):
    """A figure, or a difference or ratio of two over the same prompts, with its interval."""

    value: float | None
    interval: metrics.Interval | None


@dataclass(frozen=True, eq=False)
class Answers:
    """Counts of the prompts that every seed answered, {name: [S, Q]}; NaN where a row lacks one.

    prompts: each prompt's identity, its benchmark and id.
    """

    prompts: tuple[Key, ...]
    counts: dict[str, NDArray[np.float64]]

    @classmethod
    def of(
        cls, seeds: Sequence[Sequence[Any]], counted: Mapping[str, Count] = COUNTS,
        key: Callable[[Any], Key] = lambda row: (row.benchmark, row.prompt_id),
    ) -> Answers:
        """Pair the rows of every seed by prompt (`key`), and take the counts of each."""
        by_prompt = [{key(row): row for row in rows} for rows in seeds]
        shared = [key for key in by_prompt[0] if all(key in each for each in by_prompt)]
        rows = [[each[key] for key in shared] for each in by_prompt]
        counts = {
            name: np.array([[count(row) for row in each] for each in rows], dtype=float)
            for name, count in counted.items()
        }
        return cls(tuple(shared), counts)

    @property
    def num_seeds(self) -> int:
        return len(next(iter(self.counts.values())))

    def value(self, figure: Figure) -> float | None:
        """Return a figure of all prompts; None where it is undefined, or a row lacks a count."""
        return _estimate(figure, [self]).value

    def figure(self, figure: Figure, **options: Any) -> Gain:
        """Return a figure with its interval; options are those of `metrics.bootstrap_interval`."""
        return _estimate(figure, [self], options)

    def over(
        self, other: Answers, figure: Figure, compare: Callable[..., NDArray], **options: Any
    ) -> Gain:
        """Compare (np.subtract, np.divide) a figure with the other's over the prompts of both."""
        theirs = {key: at for at, key in enumerate(other.prompts)}
        mine = [at for at, key in enumerate(self.prompts) if key in theirs]
        sides = [self._only(mine), other._only([theirs[self.prompts[at]] for at in mine])]
        return _estimate(lambda *sums: compare(*map(figure, sums)), sides, options)

    def without(self, left: Callable[[Key], bool]) -> Answers:
        """Leave out the prompts for which `left` is true."""
        return self._only([at for at, prompt in enumerate(self.prompts) if not left(prompt)])

    def _only(self, kept: Sequence[int]) -> Answers:
        counts = {name: values[:, list(kept)] for name, values in self.counts.items()}
        return Answers(tuple(self.prompts[at] for at in kept), counts)

    def sums(self, i_RQ: NDArray[np.int64], j_RS: NDArray[np.int64]) -> Sums:
        """Return the sums over drawn prompts and seeds."""

        def sums(name: str) -> NDArray[np.float64]:
            of_seeds_RQ = self.counts[name][j_RS].sum(axis=1)
            return np.take_along_axis(of_seeds_RQ, i_RQ, axis=1).sum(axis=1)

        return sums


def _estimate(
    statistic: Callable[..., NDArray[np.float64]],
    sides: Sequence[Answers],
    options: Mapping[str, Any] | None = None,
) -> Gain:
    """Return a statistic over everything the sides have; with `options` its interval, too."""
    num_prompts = len(sides[0].prompts)
    sizes = [side.num_seeds for side in sides]

    def resampled(i_RQ: NDArray[np.int64]) -> NDArray[np.float64]:
        draws = [
            np.random.default_rng(number).integers(size, size=(len(i_RQ), size))
            for number, size in enumerate(sizes, start=1)
        ]
        return statistic(*(side.sums(i_RQ, j_RS) for side, j_RS in zip(sides, draws, strict=True)))

    everything = np.arange(num_prompts)[None]
    with np.errstate(divide="ignore", invalid="ignore"):
        all_of_them = (
            side.sums(everything, np.arange(size)[None])
            for side, size in zip(sides, sizes, strict=True)
        )
        (value,) = statistic(*all_of_them)
    if not np.isfinite(value):
        return Gain(None, None)
    interval = (
        None if options is None else metrics.bootstrap_interval(resampled, num_prompts, **options)
    )
    return Gain(float(value), interval)
