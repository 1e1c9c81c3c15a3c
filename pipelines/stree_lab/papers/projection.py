"""Project a comparison's accepted drafts to the step times of another target.

Computed, not measured: the other target would have other drafts. Accepted lengths come from the
comparison's samples, step times from calls and drafts that `bench_decode.py` has timed.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

import numpy as np

from stree.common.errors import UsageError
from stree.metrics import acceptance_length
from stree.tree_policy.adaptive import PLAIN, AdaptiveTrees
from stree.tree_policy.step_times import StepTimes
from stree.trees.token_tree import StepTree, as_tree
from stree_pipelines.evaluation.records import ResultRow, SampleRow
from stree_pipelines.evaluation.result_store import ResultStore, read_rows
from stree_pipelines.reports.settings import require_one_ending
from stree_pipelines.reports.tables.tables import Table

TUNING_NAME = "tuning.jsonl"  # rows of the chains that a comparison tried
NUM_RUNS = 10  # simulations of a choice, each with draws of its own
NOTE = (
    "Computed, not measured: the accepted lengths that this comparison has recorded, at the step "
    "times of another target, over plain decoding. Beams of fewer levels than the one recorded "
    "are taken to accept what it did down to their depth, which is the least that they would."
)


@dataclass(frozen=True)
class PairTimes:
    """Step times of one sequence in µs, from rows of `bench_decode.py` of target calls and of
    drafts.

    Times of other call sizes are interpolated. A draft that was not timed takes its share of the
    levels of one that was: of the deepest beam, or of the paper's tree.
    """

    rows: Sequence[Mapping[str, Any]]

    def step_us(self, tree: StepTree, sampled: bool) -> float:
        return self._call_us(tree.num_nodes) + self._draft_us(tree, sampled)

    def _call_us(self, num_nodes: int) -> float:
        sizes, times = zip(*sorted(self._calls.items()), strict=True)
        if not sizes[0] <= num_nodes <= sizes[-1]:
            raise UsageError(
                f"calls of {sizes[0]} to {sizes[-1]} nodes were timed, none of {num_nodes}: "
                'time more with bench_decode.py --what "[calls]" --nodes'
            )
        return float(np.interp(num_nodes, sizes, times))

    def _draft_us(self, tree: StepTree, sampled: bool) -> float:
        if tree.num_nodes == 1:
            return 0.0
        timed = [each for each in self._drafts if each.grows is tree.grows]
        if not timed:
            raise UsageError(f"no draft like that of {tree.name} was timed")
        like = tree if tree in timed else max(timed, key=lambda each: (each.max_depth, each.name))
        return self._drafts[like][sampled] * tree.max_depth / like.max_depth

    @cached_property
    def _calls(self) -> dict[int, float]:
        return {
            row["num_nodes"]: row["us_tree"]["median"]
            for row in self.rows if row["what"] == "target call"
        }

    @cached_property
    def _drafts(self) -> dict[StepTree, tuple[float, float]]:
        """µs of a draft by tree, at temperature 0 and sampled; of drafters with a whole head."""
        return {
            as_tree(row.get("tree", "paper")): (
                row["us_draft"]["median"], row["us_draft_sampled"]["median"]
            )
            for row in self.rows if row["what"] == "draft" and "drafter" not in row
        }


@dataclass(frozen=True)
class Place:
    """A benchmark at a temperature: the last accepted node of each call, by tree.

    Only prompts that all trees answered count.
    """

    benchmark: str
    temperature: float
    ends: Mapping[StepTree, Sequence[int]]
    taus: Mapping[StepTree, float]
    num_tokens: int  # of the answers, on the mean of the trees

    def tau(self, tree: StepTree) -> float:
        """Return the tokens per call of a tree.

        A call that ends an answer yields fewer tokens than it has accepted: an unrecorded tree has
        the deeper beam's share of that.
        """
        if tree.num_nodes == 1 or tree in self.taus:
            return self.taus.get(tree, 1.0)
        ends, deeper = self.ends_of(tree), self._shown_by(tree)
        kept = self.taus[deeper] / _mean_length(deeper, self.ends[deeper])
        return kept * _mean_length(tree, ends)

    def ends_of(self, tree: StepTree) -> Sequence[int]:
        """Return the last accepted nodes as recorded, or the least that a deeper beam shows.

        Raises UsageError without such a beam.
        """
        if tree.num_nodes == 1:
            return [0]
        if tree in self.ends:
            return self.ends[tree]
        deeper = self._shown_by(tree)
        depths = (min(deeper.shape.depths[end], tree.max_depth) for end in self.ends[deeper])
        return [tree.shape.levels[depth][0] for depth in depths]

    def _shown_by(self, tree: StepTree) -> StepTree:
        for each in self.ends:
            if _is_end_of(tree, each):
                return each
        raise UsageError(
            f"what {tree.name} accepts was not recorded for {self.benchmark}, T = "
            f"{self.temperature:g}, nor what a deeper beam of its width does: compare it, too"
        )


def read_places(folder: Path) -> list[Place]:
    """Read the places of a comparison whose arms have one tree each, with its tuned chains."""
    store = ResultStore(folder)
    rows: dict[tuple[float, str], dict[StepTree, ResultRow]] = {}
    for row in (*store.results(), *read_rows(folder / TUNING_NAME, ResultRow)):
        if row.tree is not None and not row.tree_shares:
            found = rows.setdefault((row.temperature, row.benchmark), {})
            found.setdefault(row.tree.to_token_tree(), row)
    if not rows:
        raise UsageError(f"{folder} has no rows of a comparison whose arms have a tree each")
    require_one_ending([row for trees in rows.values() for row in trees.values()], folder)
    return [
        _place(benchmark, temperature, {tree: store.samples(row) for tree, row in trees.items()})
        for (temperature, benchmark), trees in sorted(rows.items())
    ]


def _place(
    benchmark: str, temperature: float, samples: Mapping[StepTree, Sequence[SampleRow]]
) -> Place:
    prompts = set.intersection(*({each.prompt_id for each in rows} for rows in samples.values()))
    if not prompts:
        raise UsageError(f"no prompt of {benchmark}, T = {temperature:g} has samples of every arm")
    same = {
        tree: [each for each in rows if each.prompt_id in prompts] for tree, rows in samples.items()
    }
    ends = {
        tree: [end for each in rows for end in each.end_node_per_call or ()]
        for tree, rows in same.items()
    }
    taus = {tree: acceptance_length(rows) or 1.0 for tree, rows in same.items()}
    tokens = fmean(sum(each.num_new_tokens for each in rows) for rows in same.values())
    return Place(benchmark, temperature, ends, taus, round(tokens))


def chosen_speed(
    name: str, places: Sequence[Place], times: PairTimes
) -> list[tuple[float, dict[str, float]]]:
    """Simulate a choice by cost that knows these times, and return its result in each place.

    A result is the speed over plain decoding, and the shares of steps by tree. The choice decodes
    the recorded number of tokens, place by place, and keeps what it has learnt. Each step accepts a
    recorded path of its tree, drawn at random; it yields the tree's mean number of tokens, so that
    draws act only through the choices.
    """
    results: list[list[tuple[float, dict[str, float]]]] = [[] for _ in places]
    trees = AdaptiveTrees(name.split(" or ")).trees
    for seed in range(NUM_RUNS):
        rng, adaptive_trees = random.Random(seed), AdaptiveTrees(trees)
        for place, found in zip(places, results, strict=True):
            seconds = {
                (1, tree): 1e-6 * times.step_us(tree, place.temperature > 0) for tree in trees
            }
            adaptive_trees.costs = StepTimes(seconds)
            ends = {tree: place.ends_of(tree) for tree in trees}
            taus = {tree: place.tau(tree) for tree in trees}
            steps: dict[StepTree, int] = dict.fromkeys(trees, 0)
            tokens = spent = 0.0
            while tokens < place.num_tokens:
                tree = adaptive_trees.choose(1)
                adaptive_trees.learn_paths(tree, [tree.shape.path_to(rng.choice(ends[tree]))])
                steps[tree] += 1
                tokens, spent = tokens + taus[tree], spent + seconds[1, tree]
            total = sum(steps.values())
            shares = {tree.name: count / total for tree, count in steps.items() if count}
            found.append((tokens / spent * seconds[1, PLAIN], shares))
    return [
        (
            geometric_mean(speed for speed, _ in found),
            {tree.name: fmean(shares.get(tree.name, 0.0) for _, shares in found) for tree in trees},
        )
        for found in results
    ]


def speed_of(tree: StepTree, place: Place, times: PairTimes) -> float:
    """Return a tree's speed over plain decoding."""
    sampled = place.temperature > 0
    return place.tau(tree) * times.step_us(PLAIN, sampled) / times.step_us(tree, sampled)


def tables(places: Sequence[Place], times: PairTimes, choice: str) -> list[Table]:
    """Make the table of geometric means by temperature, and the table of each place."""
    fixed = [tree for tree in places[0].ends if not _is_chain(tree)]
    if not fixed or not any(map(_is_chain, places[0].ends)):
        raise UsageError("wanted the rows of a chain and of another tree, to compare them")
    heads = ("best chain", *(tree.name for tree in fixed), "chosen by cost", "over the best chain",
             "over the best shape")
    rows, by_temperature = [], dict[float, list[list[float]]]()
    for place, (speed, shares) in zip(places, chosen_speed(choice, places, times), strict=True):
        chains = {tree: speed_of(tree, place, times) for tree in place.ends if _is_chain(tree)}
        best = max(chains, key=chains.__getitem__)
        shapes = [speed_of(tree, place, times) for tree in fixed]
        values = [chains[best], *shapes, speed, speed / chains[best], speed / max(shapes)]
        by_temperature.setdefault(place.temperature, []).append(values)
        most = max(shares, key=shares.__getitem__)
        rows.append((
            f"{place.benchmark}, T = {place.temperature:g}", *_cells(values),
            best.name, f"{most} ({shares[most]:.0%})",
        ))
    means = [
        (f"T = {temperature:g}", *_cells(map(geometric_mean, zip(*each, strict=True))))
        for temperature, each in by_temperature.items()
    ]
    head = ("over plain decoding", *heads)
    return [
        Table("Geometric means", (head, *means)),
        Table(f"Each place; choices: {choice}",
              ((*head, "which chain", "chosen most"), *rows), note=NOTE),
    ]


def _cells(values: Iterable[float]) -> list[str]:
    *speeds, over_chain, over_shape = values
    return [f"{each:.2f}×" for each in speeds] + [
        f"{100 * (each - 1):+.1f} %" for each in (over_chain, over_shape)
    ]


def _mean_length(tree: StepTree, ends: Iterable[int]) -> float:
    return 1 + fmean(tree.shape.depths[end] for end in ends)


def _is_chain(tree: StepTree) -> bool:
    return not tree.grows and tree.max_depth == tree.num_nodes - 1


def _is_end_of(tree: StepTree, deeper: StepTree) -> bool:
    """Return True when a beam is `deeper` with fewer levels and all nodes that these allow."""
    return (
        tree.grows
        and tree.alike == deeper.alike
        and tree.max_depth < deeper.max_depth
        and tree.num_nodes == min(deeper.num_nodes, tree.num_drawn)
    )
