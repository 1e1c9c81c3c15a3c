"""Figures of an evaluation, each defined once.

Everything is computed from per-prompt counts, so that a figure can be pooled over any set of
prompts and bootstrapped over them. Dims: R resamples, Q prompts.

The counts follow one convention: the first token, which the prefill yields and no verification call
produced, is not counted; a call's bonus (or correction) token is; tokens that the stop rule cuts
off are not. Plain decoding therefore has an acceptance length of exactly 1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from statistics import NormalDist, median
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stree.common.errors import InvariantBroken

Interval = tuple[float, float]
Figure = Callable[[NDArray[np.int64]], NDArray[np.float64]]  # prompt indices (R, Q) to figures (R,)

STEP_PARTS = ("draft", "verify", "accept", "host")
NUM_RESAMPLES = 2000
LEVEL = 0.95  # of intervals
# Clocks of the parts and of the whole loop are read apart: parts may exceed the whole by this much.
CLOCK_TOLERANCE = 0.02


class Timing(Protocol):
    """Tokens, calls and times of one prompt, from which speeds are computed.

    A prompt that was decoded in a batch has shares of the batch's wall time: a call that decoded n
    prompts adds 1/n of its seconds to decode_s of each, and the time of prefills is shared in the
    same way among prefill_s of the prompts that were read. Their sum is the wall time of decoding,
    in which every second counts once at any batch size: speeds are the throughput of the batch.
    """

    @property
    def num_new_tokens(self) -> int: ...
    @property
    def num_calls(self) -> int: ...
    @property
    def prefill_s(self) -> float: ...
    @property
    def decode_s(self) -> float: ...
    @property
    def time_ms(self) -> Mapping[str, float]: ...


class PromptCounts(Timing, Protocol):
    """Counts and times of decoding one prompt (all its turns)."""

    @property
    def num_nodes(self) -> int: ...
    @property
    def accepted_per_call(self) -> Sequence[int]: ...
    @property
    def end_node_per_call(self) -> Sequence[int] | None: ...
    @property
    def depth_per_call(self) -> Sequence[int] | None:
        """Depth down to which each call's drafts were judged; None if it was not recorded."""

    @property
    def calls_by_tree(self) -> Mapping[str, int]:
        """Number of calls with each tree, if trees are chosen by step; else empty."""

    @property
    def call_share(self) -> float | None:
        """Sum over the target's calls of 1 / prompts in the call; None for a prompt alone."""


def tau(num_new_tokens: NDArray[Any] | float, num_calls: NDArray[Any] | float) -> Any:
    """Return τ, the new tokens per verification call, of numbers or arrays; NaN without a call."""
    calls = np.asarray(num_calls, dtype=float)
    length = np.asarray(num_new_tokens, dtype=float) / np.where(calls > 0, calls, np.nan)
    return length if length.ndim else float(length)


def acceptance_length(prompts: Sequence[Timing]) -> float | None:
    """Return τ of all prompts' calls; None, which results files can hold, instead of NaN."""
    length = tau(sum(p.num_new_tokens for p in prompts), sum(p.num_calls for p in prompts))
    return None if math.isnan(length) else length


def acceptance_length_prompt_mean(prompts: Sequence[PromptCounts]) -> float | None:
    """Return the mean of the prompts' τ: answers of any length weigh the same."""
    lengths = [tau(p.num_new_tokens, p.num_calls) for p in prompts if p.num_calls]
    return _ratio(sum(lengths), len(lengths))


def acceptance_histogram(prompts: Sequence[PromptCounts]) -> dict[int, int]:
    """Count calls by their number of accepted drafts; the bonus token is not a draft."""
    return dict(sorted(Counter(a for p in prompts for a in p.accepted_per_call).items()))


def end_nodes(prompts: Sequence[PromptCounts]) -> dict[int, int]:
    """Count calls by the tree node at which their accepted path ended, 0 being the root.

    Empty when some prompt does not have it, or not how deep its drafts were judged.
    """
    return _counted_ends(prompts, lambda accepted, depth: True)


def open_ends(prompts: Sequence[PromptCounts]) -> dict[int, int]:
    """Count the calls of `end_nodes` that judged no draft after the path's end.

    The tree had none that was deeper, or a stop cut the answer there.
    """
    return _counted_ends(prompts, lambda accepted, depth: accepted == depth)


def _counted_ends(
    prompts: Sequence[PromptCounts], is_counted: Callable[[int, int], bool]
) -> dict[int, int]:
    ends: Counter[int] = Counter()
    for prompt in prompts:
        if prompt.end_node_per_call is None or prompt.depth_per_call is None:
            return {}
        calls = zip(
            prompt.end_node_per_call, prompt.accepted_per_call, prompt.depth_per_call, strict=True
        )
        ends.update(node for node, accepted, depth in calls if is_counted(accepted, depth))
    return dict(sorted(ends.items()))


def depth_accept_rates(prompts: Sequence[PromptCounts]) -> dict[int, float]:
    """Divide, for each depth d, the calls that accepted ≥ d drafts by those that could have.

    These accepted ≥ d − 1 and judged drafts down to depth d or deeper. Depths that no call reached
    are left out; all are where some prompt does not say how deep its calls judged drafts.
    """
    if any(prompt.depth_per_call is None for prompt in prompts):
        return {}
    deepest = max((max(p.depth_per_call or (), default=0) for p in prompts), default=0)
    counts = {
        depth: tuple(map(sum, zip(*(depth_counts(p, depth) for p in prompts), strict=True)))
        for depth in range(1, deepest + 1)
    }
    return {depth: passed / reached for depth, (passed, reached) in counts.items() if reached}


def depth_counts(prompt: PromptCounts, depth: int) -> tuple[int, int]:
    """Count the calls that accepted `depth` drafts, and the calls that could have."""
    calls = zip(prompt.accepted_per_call, prompt.depth_per_call or (), strict=True)
    reached = [each for each, deepest in calls if depth <= deepest and each >= depth - 1]
    return sum(accepted >= depth for accepted in reached), len(reached)


def expected_acceptance_length(acceptance: float, num_drafts: int) -> float:
    """Return τ of a chain when each draft is accepted with probability α, independently.

    It is the geometric sum 1 + α + … + α^n (Leviathan et al. 2023, Eq. 1).
    """
    return sum(acceptance**depth for depth in range(num_drafts + 1))


def nodes_per_call(prompts: Sequence[PromptCounts]) -> float | None:
    """Return the mean number of tree nodes verified in a call, the root included."""
    return _ratio(sum(p.num_nodes for p in prompts), sum(p.num_calls for p in prompts))


def tree_shares(prompts: Sequence[PromptCounts]) -> dict[str, float]:
    """Return each tree's share of the steps, the most used first, if trees are chosen by step.

    A batch's step counts once for each of its prompts. Empty if trees are not chosen.
    """
    calls = sum((Counter(p.calls_by_tree) for p in prompts), Counter[str]())
    return {tree: count / calls.total() for tree, count in calls.most_common()}


def rows_per_call(prompts: Sequence[PromptCounts]) -> float | None:
    """Return the mean number of prompts that a target call decoded; 1 without a batch."""
    shares = (p.num_calls if p.call_share is None else p.call_share for p in prompts)
    return _ratio(sum(p.num_calls for p in prompts), sum(shares))


def tokens_per_second(prompts: Sequence[Timing]) -> float | None:
    """Return new tokens per second of decoding, without the prefill's token and time.

    For a batch it is all its new tokens over the wall time of decoding.
    """
    return _ratio(sum(p.num_new_tokens for p in prompts), sum(p.decode_s for p in prompts))


def tokens_per_second_e2e(prompts: Sequence[Timing]) -> float | None:
    """Return new tokens per second of prefill and decoding together."""
    seconds = sum(p.prefill_s + p.decode_s for p in prompts)
    return _ratio(sum(p.num_new_tokens for p in prompts), seconds)


def speedup(prompts: Sequence[Timing], baseline: Sequence[Timing]) -> float | None:
    """Return tokens_per_second over plain decoding's of the same prompts."""
    _require_pairs(prompts, baseline)
    mine, theirs = tokens_per_second(prompts), tokens_per_second(baseline)
    return None if mine is None or not theirs else mine / theirs


def speedup_prompt_median(prompts: Sequence[Timing], baseline: Sequence[Timing]) -> float | None:
    """Return the median of each prompt's own speedup, which one stalled answer does not move."""
    _require_pairs(prompts, baseline)
    ratios = (speedup([p], [b]) for p, b in zip(prompts, baseline, strict=True))
    known = [each for each in ratios if each is not None]
    return median(known) if known else None


def speedup_per_tau(prompts: Sequence[PromptCounts], baseline: Sequence[Timing]) -> float | None:
    """Return the speed-up over τ: the share of acceptance that becomes speed (STree, Table 5)."""
    faster, length = speedup(prompts, baseline), acceptance_length(prompts)
    return None if faster is None or not length else faster / length


def time_ms(prompts: Sequence[Timing]) -> dict[str, float]:
    """Return the milliseconds per call of each part of a step.

    `host` is the decode time without the other parts, so that the parts add up to the step. Empty
    without calls, or when some prompt has no times of its parts.

    Raises:
        InvariantBroken: the measured parts exceed the decode time: something was timed twice.
    """
    num_calls = sum(p.num_calls for p in prompts)
    if num_calls == 0 or not all(p.time_ms for p in prompts if p.num_calls):
        return {}
    step = 1e3 * sum(p.decode_s for p in prompts) / num_calls
    parts = {
        name: sum(p.time_ms.get(name, 0.0) for p in prompts) / num_calls
        for name in STEP_PARTS
        if name != "host"
    }
    host = step - sum(parts.values())
    if host < -CLOCK_TOLERANCE * step:
        raise InvariantBroken(
            f"the parts of a step take {sum(parts.values()):.3f} ms of its {step:.3f} ms: "
            "a part of the decoding loop is timed twice"
        )
    return {**parts, "host": max(host, 0.0)}


def first_difference(tokens: Sequence[int], reference: Sequence[int]) -> int | None:
    """Return the position of the first token that differs, or None for equal sequences.

    When one is a prefix of the other, they differ at the end of the shorter one.
    """
    for position, (mine, theirs) in enumerate(zip(tokens, reference, strict=False)):
        if mine != theirs:
            return position
    return None if len(tokens) == len(reference) else min(len(tokens), len(reference))


def bootstrap_interval(
    statistic: Figure, num_prompts: int, seed: int = 0, num_resamples: int = NUM_RESAMPLES,
    level: float = LEVEL,
) -> Interval | None:
    """Return a bootstrap interval over prompts, between `quantiles_of` the resampled figures.

    Args:
        statistic: maps prompt indices (R, Q) to the figure of every resample (R,). Reading two
            methods at the same indices is what pairs them.
        num_prompts: Q. With fewer than two prompts nothing can be said: None.
        level: how often the interval is to hold the figure of all possible prompts.
    """
    if num_prompts < 2:
        return None
    rng = np.random.default_rng(seed)
    draws_RQ = rng.integers(num_prompts, size=(num_resamples, num_prompts))
    with np.errstate(divide="ignore", invalid="ignore"):
        values_R = statistic(draws_RQ)
    values_R = values_R[np.isfinite(values_R)]
    if values_R.size == 0:
        return None
    low, high = np.quantile(values_R, quantiles_of(num_prompts, level))
    return float(low), float(high)


def quantiles_of(num_prompts: int, level: float = LEVEL) -> tuple[float, float]:
    """Return which quantiles of resampled figures are the ends of an interval over Q prompts.

    Resamples of few prompts spread too little: by √((Q − 1)/Q), and as if their spread were known.
    The quantiles lie further out by both, the second by Student's t in place of the normal
    distribution (Hesterberg 2015, "What Teachers Should Know About the Bootstrap", 5.3): at 95 %
    0.2 and 99.8 % of 6 prompts, 1.6 and 98.4 % of 20, 2.5 and 97.5 % in the limit.
    """
    t = _student_quantile((1 + level) / 2, num_prompts - 1)
    tail = NormalDist().cdf(-t * math.sqrt(num_prompts / (num_prompts - 1)))
    return tail, 1 - tail


def summarise(
    prompts: Sequence[PromptCounts], baseline: Sequence[Timing] | None = None, seed: int = 0
) -> dict[str, Any]:
    """Return every figure under its published name, and their `confidence_intervals`.

    Without a baseline, figures relative to it are None.
    """

    def relative(figure: Callable[..., float | None]) -> float | None:
        return None if baseline is None else figure(prompts, baseline)

    return {
        "acceptance_length": acceptance_length(prompts),
        "acceptance_length_prompt_mean": acceptance_length_prompt_mean(prompts),
        "acceptance_histogram": acceptance_histogram(prompts),
        "depth_accept_rates": depth_accept_rates(prompts),
        "end_nodes": end_nodes(prompts),
        "open_ends": open_ends(prompts),
        "nodes_per_call": nodes_per_call(prompts),
        "tree_shares": tree_shares(prompts),
        "rows_per_call": rows_per_call(prompts),
        "tokens_per_second": tokens_per_second(prompts),
        "tokens_per_second_e2e": tokens_per_second_e2e(prompts),
        "speedup": relative(speedup),
        "speedup_prompt_median": relative(speedup_prompt_median),
        "speedup_per_tau": relative(speedup_per_tau),
        "time_ms": time_ms(prompts),
        "baseline_time_ms": {} if baseline is None else time_ms(baseline),
        "confidence_intervals": confidence_intervals(prompts, baseline, seed),
    }


# Figures that have an interval, as ratios of two sums over prompts
_RATIOS = {
    "acceptance_length": ("num_new_tokens", "num_calls"),
    "tokens_per_second": ("num_new_tokens", "decode_s"),
}
# Those that are divided by the baseline's tokens per second. In speedup_per_tau, which is
# (tokens / s) / baseline / (tokens / calls), the method's own tokens cancel.
_RATIOS_TO_SPEED = {
    "speedup": ("num_new_tokens", "decode_s"), "speedup_per_tau": ("num_calls", "decode_s"),
}


def confidence_intervals(
    prompts: Sequence[Timing], baseline: Sequence[Timing] | None = None, seed: int = 0
) -> dict[str, Interval | None]:
    """Return the interval of each figure that has one; without a baseline of no relative one.

    Element q of prompts and baseline is the same prompt.
    """

    def ratios(rows: Sequence[Timing], names: tuple[str, str]) -> Figure:
        over_Q, under_Q = (np.array([getattr(p, n) for p in rows], np.float64) for n in names)
        return lambda i_RQ: over_Q[i_RQ].sum(1) / under_Q[i_RQ].sum(1)

    figures = {name: ratios(prompts, names) for name, names in _RATIOS.items()}
    if baseline is not None:
        _require_pairs(prompts, baseline)
        theirs = ratios(baseline, _RATIOS["tokens_per_second"])
        for name, names in _RATIOS_TO_SPEED.items():
            figures[name] = _divided(ratios(prompts, names), theirs)
    return {
        name: bootstrap_interval(figure, len(prompts), seed) for name, figure in figures.items()
    }


def _divided(figure: Figure, other: Figure) -> Figure:
    return lambda i_RQ: figure(i_RQ) / other(i_RQ)


@lru_cache
def _student_quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's t with this many degrees of freedom, at least ½.

    By bisection over the angle atan(t/√freedom), in which the distribution function is a finite sum
    (Abramowitz and Stegun, 26.7.3 and 26.7.4).
    """
    odd = freedom % 2
    k = np.arange(1, (freedom - odd) // 2)  # of the sum's terms but the first
    factors = (2 * k - 1 + odd) / (2 * k + odd)

    def distribution(angle: float) -> float:
        terms = np.cumprod(factors * math.cos(angle) ** 2).sum() + 1
        if not odd:
            return 0.5 + math.sin(angle) * terms / 2
        terms = math.sin(angle) * math.cos(angle) * terms if freedom > 1 else 0.0
        return 0.5 + (angle + terms) / math.pi

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if distribution(middle) < probability else (low, middle)
    return math.tan(low) * math.sqrt(freedom)


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def _require_pairs(prompts: Sequence[Timing], baseline: Sequence[Timing]) -> None:
    if len(prompts) != len(baseline):
        raise ValueError(
            f"got {len(prompts)} prompts and {len(baseline)} of the baseline; a paired "
            "comparison wants the same prompts in the same order"
        )
