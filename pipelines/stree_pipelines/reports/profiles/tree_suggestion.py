"""Find the static tree with the longest expected acceptance, by where measured paths ended.

The model: once its parent is accepted, a draft is accepted with a probability that depends on its
depth d and its rank r among its siblings alone. The expected number of accepted drafts of a tree is
then the sum over its nodes of the product of these probabilities from the root, and the best tree
of N nodes follows by dynamic programming over depth, rank and nodes, as in Sequoia (Chen et al.
2024), whose probabilities depend on the rank only. (EAGLE-2, Li et al. 2024, grows another tree at
each step from the drafter's confidence; these are static.) Dims: D depths, R ranks, N nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from stree import metrics
from stree.common.errors import UsageError
from stree.speculation_profile import SuggestedTree, Tree, TreeCheck
from stree.trees.token_tree import StepTree, TokenTree
from stree_pipelines.evaluation.records import ResultRow, SampleRow

# Calls at the rank's rate over all depths that are added to a rate's own, to steady rare ones.
PRIOR_CALLS = 10
MAX_NODES = 768  # of a suggested tree: time grows with the cube, memory with the square


# A tree, and the calls whose paths ended at each of its nodes: all, and those that judged no draft
# after the end (`metrics.open_ends`)
MeasuredEnds = tuple[StepTree, Mapping[int, int], Mapping[int, int]]


@dataclass(frozen=True)
class AcceptanceRates:
    """Counts behind the acceptance probabilities, each [..., d − 1, r].

    `reached` counts calls that accepted the parent of such a draft and judged the draft, `accepted`
    calls that accepted it. Leading dims are resamples of the prompts, or none.
    """

    reached_DR: NDArray[np.int64]
    accepted_DR: NDArray[np.int64]

    @classmethod
    def of(cls, measured: Iterable[MeasuredEnds]) -> AcceptanceRates:
        """Count from trees with their `end_nodes` and `open_ends`."""
        measured = list(measured)
        deepest = max((tree.max_depth for tree, *_ in measured), default=0)
        widest = max((tree.widest for tree, *_ in measured), default=0)
        reached, accepted = np.zeros((2, deepest, widest), dtype=np.int64)
        for tree, ends, open_ends in measured:
            visits = [ends.get(node, 0) for node in range(tree.num_nodes)]
            for node in range(tree.num_nodes - 1, 0, -1):
                visits[tree.parents[node]] += visits[node]
            for parent, children in enumerate(tree.shape.children):
                depth, judged = tree.shape.depths[parent], visits[parent] - open_ends.get(parent, 0)
                for rank, child in enumerate(children):
                    reached[depth, rank] += judged
                    accepted[depth, rank] += visits[child]
        return cls(reached, accepted)

    @property
    def max_depth(self) -> int:
        return int(self.reached_DR.any(axis=-1).sum())

    def rates(self, num_depths: int) -> NDArray[np.float64]:
        """Return the rates [..., d − 1, r] of `num_depths` depths.

        A depth that no tree had gets the rank's rate over all depths; a rank that was never tried
        gets 0.
        """
        reached_R = self.reached_DR.sum(axis=-2, keepdims=True)
        prior_R = self.accepted_DR.sum(axis=-2, keepdims=True) / np.maximum(reached_R, 1)
        rates_DR = (self.accepted_DR + PRIOR_CALLS * prior_R) / (self.reached_DR + PRIOR_CALLS)
        beyond = np.repeat(prior_R, max(num_depths - rates_DR.shape[-2], 0), axis=-2)
        return np.concatenate([rates_DR, beyond], axis=-2)[..., :num_depths, :]

    def expected_drafts(self, tree: StepTree) -> NDArray[np.float64]:
        """Return the expected accepted drafts per call, [...]."""
        rates = self.rates(tree.max_depth)
        probability = [np.ones(rates.shape[:-2])] * tree.num_nodes
        for parent, children in enumerate(tree.shape.children):
            for rank, child in enumerate(children):
                known = rank < rates.shape[-1]
                rate = rates[..., tree.shape.depths[parent], rank] if known else 0.0
                probability[child] = probability[parent] * rate
        return np.asarray(sum(probability[1:]))


def best_tree(rates: AcceptanceRates, num_nodes: int, max_depth: int | None = None) -> StepTree:
    """Return the tree of at most `num_nodes` nodes, root included, with the most expected drafts.

    None is deeper than `max_depth` (each depth is a call of the drafter). Raises UsageError for a
    size that no tree has.
    """
    return _grown(_shares(rates, num_nodes, max_depth), num_nodes - 1)


def _shares(
    rates: AcceptanceRates, num_nodes: int, max_depth: int | None = None
) -> NDArray[np.int64]:
    """Return the best trees of all sizes, as [d, r, n]: with n nodes for the child of rank r and
    its later siblings, this many go to the child and the nodes below it, and 0 ends the siblings.
    """
    if not 2 <= num_nodes <= MAX_NODES:
        raise UsageError(f"a tree of {num_nodes} nodes was asked for, wanted 2 to {MAX_NODES}")
    num_drafts = num_nodes - 1
    num_levels = num_drafts if max_depth is None else min(max_depth, num_drafts)
    if num_levels < 1:
        raise UsageError(f"a tree of depth {max_depth} was asked for, wanted at least 1")
    rates_DR = rates.rates(num_levels)
    # below[n]: the most expected drafts below an accepted node of the depth, with n nodes in all.
    below = np.zeros(num_drafts + 1)
    share = np.zeros((*rates_DR.shape, num_drafts + 1), dtype=np.int64)
    for depth in reversed(range(num_levels)):
        later = np.zeros(num_drafts + 1)
        for rank in reversed(range(rates_DR.shape[1])):
            best = np.zeros(num_drafts + 1)
            for nodes in range(1, num_drafts + 1):
                values = rates_DR[depth, rank] * (1 + below[:nodes]) + later[:nodes][::-1]
                share[depth, rank, nodes] = 1 + values.argmax()
                best[nodes] = values.max()
            later = best
        below = later
    return share


def _grown(share: NDArray[np.int64], num_drafts: int) -> StepTree:
    """Return the tree of a number of drafts among `_shares`."""
    num_levels, widest, _ = share.shape
    parents, queue = [-1], [(0, 0, num_drafts)]
    for node, depth, nodes in queue:
        for rank in range(widest):
            if nodes == 0 or depth == num_levels:
                break
            given = int(share[depth, rank, nodes])
            queue.append((len(parents), depth + 1, given - 1))
            parents.append(node)
            nodes -= given
    return TokenTree(tuple(parents), f"suggested-{len(parents)}")


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of trees; own_tokens: the target's own tokens per call."""

    rates: AcceptanceRates
    own_tokens: float

    @classmethod
    def of(cls, with_ends: Sequence[ResultRow]) -> Acceptance:
        measured = [
            (row.tree.to_token_tree(), row.end_nodes, row.open_ends)
            for row in with_ends if row.tree
        ]
        own = sum(
            _tokens(row)
            - sum(accepted * calls for accepted, calls in row.acceptance_histogram.items())
            for row in with_ends
        )
        return cls(AcceptanceRates.of(measured), own / sum(map(_calls, with_ends)))

    def length(self, tree: StepTree) -> float:
        """Return the predicted acceptance length."""
        return self.own_tokens + float(self.rates.expected_drafts(tree))


@dataclass(frozen=True)
class MeasuredTimes:
    """Measured milliseconds of a step: of each level of a draft, and of the rest by nodes.

    A call of a size that no row has is interpolated; none is larger than theirs.
    """

    level: float
    calls: Mapping[int, float]

    @classmethod
    def of(cls, rows: Sequence[ResultRow]) -> MeasuredTimes:
        """Average rows at one temperature.

        Dynamic trees give the time of a call, but not that of a level of static ones.
        """
        calls: dict[int, list[float]] = {}
        levels = []
        for row in rows:
            if row.tree is None or row.tree_shares or not row.time_ms:
                continue
            tree = row.tree.to_token_tree()
            calls.setdefault(tree.num_nodes, []).append(_call_ms(row.time_ms))
            if row.baseline_time_ms:
                calls.setdefault(1, []).append(_call_ms(row.baseline_time_ms))
            if tree.num_nodes > 1 and not tree.grows:
                levels.append(row.time_ms["draft"] / tree.max_depth)
        if not levels:
            raise UsageError(
                "no row has the drafting time of a static tree: evaluate a tree of one shape"
            )
        return cls(fmean(levels), {nodes: fmean(each) for nodes, each in sorted(calls.items())})

    @property
    def max_nodes(self) -> int:
        return max(self.calls)

    def step_ms(self, tree: StepTree) -> float:
        call = np.interp(tree.num_nodes, list(self.calls), list(self.calls.values()))
        return tree.max_depth * self.level + float(call)


@dataclass(frozen=True)
class Fastest:
    """Tree of a number of levels with the most predicted tokens per second."""

    tree: StepTree
    acceptance_length: float
    step_ms: float

    @property
    def tokens_per_second(self) -> float:
        return 1e3 * self.acceptance_length / self.step_ms


def fastest(
    rows: Sequence[ResultRow], temperature: float, num_nodes: int | None = None,
    max_depth: int | None = None,
) -> list[Fastest]:
    """Find the fastest tree of each number of levels, from one on.

    Sizes and levels are limited, by default to the measured ones. Raises UsageError as `suggest`
    does, for a larger tree than was measured, and when rows have no times.
    """
    with_ends = _with_ends(rows, temperature)
    model = Acceptance.of(with_ends)
    times = MeasuredTimes.of([row for row in rows if row.temperature == temperature])
    most = min(times.max_nodes, MAX_NODES) if num_nodes is None else num_nodes
    if most > times.max_nodes:
        raise UsageError(
            f"trees of {most} nodes were asked for, and calls of at most {times.max_nodes} were "
            "measured: lower --nodes, or evaluate a larger tree first"
        )
    _shares(model.rates, most, max_depth)  # raises for sizes that no tree has
    found: dict[int, Fastest] = {}
    for levels in range(1, (model.rates.max_depth if max_depth is None else max_depth) + 1):
        share = _shares(model.rates, most, levels)
        for size in range(levels + 1, most + 1):
            tree = _grown(share, size - 1)
            one = Fastest(tree, model.length(tree), times.step_ms(tree))
            best = found.get(tree.max_depth)
            if best is None or one.tokens_per_second > best.tokens_per_second:
                found[tree.max_depth] = one
    return [found[levels] for levels in sorted(found)]


def _with_ends(rows: Sequence[ResultRow], temperature: float) -> list[ResultRow]:
    """Return the rows of static trees that record where their paths ended.

    In dynamic trees a rank is no place. Raises UsageError when there is none.
    """
    with_ends = [row for row in rows if tells_ranks(row) and row.temperature == temperature]
    if not with_ends:
        raise UsageError(
            f"no row at T = {temperature:g} says at which nodes of a tree of one shape paths "
            "ended: evaluate again with --overwrite, with --tree paper or another such tree"
        )
    return with_ends


def _call_ms(times: Mapping[str, float]) -> float:
    """Return the ms of a step without its draft."""
    return sum(ms for phase, ms in times.items() if phase != "draft")


def suggest(
    rows: Sequence[ResultRow], temperature: float, num_nodes: int | None,
    samples_of: Callable[[ResultRow], Sequence[SampleRow]] = lambda row: (),
    max_depth: int | None = None,
) -> SuggestedTree:
    """Suggest the best tree for rows of one checkpoint at one temperature.

    By default it has the nodes of the largest measured tree, at most MAX_NODES. The prediction has
    an interval when `samples_of` has the prompts of all the rows.

    Raises UsageError as `_with_ends` does.
    """
    with_ends = _with_ends(rows, temperature)
    trees = [row.tree.to_token_tree() for row in with_ends if row.tree]
    model = Acceptance.of(with_ends)
    if num_nodes is None:
        num_nodes = min(max(tree.num_nodes for tree in trees), MAX_NODES)
    tree = best_tree(model.rates, num_nodes, max_depth)
    prompts = [(each, sample) for each, row in zip(trees, with_ends, strict=True)
               for sample in samples_of(row)]
    complete = len(prompts) == sum(row.num_prompts for row in with_ends)
    return SuggestedTree(
        temperature=temperature,
        tree=Tree(name=tree.name, parents=tree.parents),
        predicted_acceptance_length=model.length(tree),
        predicted_acceptance_length_interval=_interval(tree, prompts) if complete else None,
        num_calls=sum(map(_calls, with_ends)),
        num_extrapolated=sum(depth > model.rates.max_depth for depth in tree.shape.depths),
        checks=tuple(
            TreeCheck(
                tree=each, predicted_acceptance_length=model.length(each.to_token_tree()),
                measured_acceptance_length=_tau([row for row in with_ends if row.tree == each]),
            )
            for each in dict.fromkeys(row.tree for row in with_ends if row.tree)
        ),
    )


def tells_ranks(row: ResultRow) -> bool:
    """Return True when a row records accepted drafts by depth and rank."""
    if row.tree is None or not row.end_nodes:
        return False
    return not row.tree.to_token_tree().grows


def _interval(
    tree: StepTree, prompts: Sequence[tuple[StepTree, SampleRow]]
) -> metrics.Interval | None:
    """Bootstrap the predicted τ over prompts, each with all the trees that it was run with.

    The interval covers the choice of prompts, not the model's error.
    """
    groups: dict[tuple[str, str], list[tuple[StepTree, SampleRow]]] = {}
    for each in prompts:
        groups.setdefault((each[1].benchmark, each[1].prompt_id), []).append(each)
    # Gives all counts one shape.
    blank: list[MeasuredEnds] = [(measured, {}, {}) for measured, _ in prompts]
    counts, own, calls = [], [], []
    for group in groups.values():
        ends = [
            (measured, metrics.end_nodes([sample]), metrics.open_ends([sample]))
            for measured, sample in group
        ]
        rates = AcceptanceRates.of([*ends, *blank])
        counts.append([rates.reached_DR, rates.accepted_DR])
        samples = [sample for _, sample in group]
        own.append(sum(s.num_new_tokens - sum(s.accepted_per_call) for s in samples))
        calls.append(sum(s.num_calls for s in samples))
    counts_Q2DR, own_Q, calls_Q = np.array(counts), np.array(own), np.array(calls)

    def predicted(i_RQ: NDArray[np.int64]) -> NDArray[np.float64]:
        times_RQ = np.zeros_like(i_RQ)  # how often each resample has each prompt
        np.add.at(times_RQ, (np.arange(len(i_RQ))[:, None], i_RQ), 1)
        reached_RDR, accepted_RDR = np.einsum("rq,qcdk->crdk", times_RQ, counts_Q2DR)
        drafts_R = AcceptanceRates(reached_RDR, accepted_RDR).expected_drafts(tree)
        return (times_RQ @ own_Q) / (times_RQ @ calls_Q) + drafts_R

    return metrics.bootstrap_interval(predicted, len(groups))


def _calls(row: ResultRow) -> int:
    return sum(row.end_nodes.values())


def _tokens(row: ResultRow) -> float:
    return (row.acceptance_length or 0.0) * _calls(row)


def _tau(rows: Sequence[ResultRow]) -> float:
    """Return τ over the calls of several rows."""
    return sum(map(_tokens, rows)) / sum(map(_calls, rows))
