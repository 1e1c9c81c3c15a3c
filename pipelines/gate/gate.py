"""Whether a checkpoint is worse than its baseline beyond noise: thresholds, and their verdicts.

A threshold says how much of a figure may be lost. Both checkpoints answered the same prompts, so
the change is bootstrapped over prompts in pairs, and its 95 % interval decides: a regression when
all of it lies below the threshold, a pass when none of it does, and inconclusive in between, or
when there are too few prompts for an interval to mean anything.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stree import metrics
from stree.errors import BadData, InvariantBroken, UsageError
from stree.modes import PLAIN
from stree_pipelines.evaluation.plan import AUTOREGRESSIVE, Job
from stree_pipelines.evaluation.records import SampleRow
from stree_pipelines.reports.run_data import POOLED

PASS, REGRESSION, INCONCLUSIVE = "pass", "regression", "inconclusive"
# Among fewer prompts not even "all of them got worse" is unlikely enough: 2 · 2^-5 > 0.05.
LEAST_PROMPTS = 6
DEPTH_RATES = "depth_accept_rates"
RELATIVE_SPEEDS = ("speedup", "speedup_per_tau")
# Not tokens_per_second_e2e: prefill is slower for the method that meets a prompt first.
SPEEDS = (*RELATIVE_SPEEDS, "tokens_per_second")
METRICS = ("acceptance_length", "acceptance_length_prompt_mean", DEPTH_RATES, *SPEEDS)
SYNTAX = (
    "wanted [BENCHMARK.]METRIC=CHANGE such as acceptance_length=-3%, gsm8k.speedup=-5%, "
    f"{DEPTH_RATES}[1]=-0.02 or speedup=+1%"
)

_THRESHOLD = re.compile(
    r"(?:(?P<benchmark>.+)\.)?(?P<metric>\w+)(?:\[(?P<depth>\d+)\])?"
    r"=(?P<change>[+-]\d+(?:\.\d*)?|0)(?P<percent>%)?"
)

# (method, temperature, benchmark) → its prompts under both checkpoints, in one order
Pairs = Mapping[tuple[str, float, str], tuple[Sequence[SampleRow], Sequence[SampleRow]]]
# Maps prompt indices (R, Q) to a figure of every resample (R,).
Figure = Callable[[NDArray[np.int64]], NDArray[np.float64]]


class Regression(InvariantBroken):
    """A checkpoint lost more than was allowed."""


@dataclass(frozen=True)
class Threshold:
    """The least change of a figure that is allowed.

    Attributes:
        benchmark: where; None is over the prompts of all benchmarks together.
        change: relative to the baseline's figure (-0.03 for "-3%"), or the difference.
    """

    text: str
    benchmark: str | None
    metric: str
    depth: int | None
    change: float
    is_relative: bool

    @classmethod
    def parse(cls, text: str) -> Threshold:
        """Read `[BENCHMARK.]METRIC[[DEPTH]]=CHANGE[%]`. Raises UsageError saying what is wrong."""
        found = _THRESHOLD.fullmatch(text)
        if found is None:
            raise UsageError(
                f"--fail_below {text!r} is no threshold: {SYNTAX}; the change has a sign"
            )
        metric, depth = found["metric"], found["depth"]
        if metric not in METRICS:
            raise UsageError(
                f"--fail_below {text!r}: no metric {metric!r}, there are {', '.join(METRICS)}"
            )
        if (metric == DEPTH_RATES) != (depth is not None) or depth == "0":
            raise UsageError(
                f"--fail_below {text!r}: {DEPTH_RATES} wants a depth from 1 in brackets, the other "
                f"metrics none; {SYNTAX}"
            )
        change = float(found["change"]) / (100 if found["percent"] else 1)
        if found["percent"] and change <= -1:
            raise UsageError(f"--fail_below {text!r}: nothing can lose all of itself or more")
        return cls(
            text, found["benchmark"], metric, int(depth) if depth else None, change,
            bool(found["percent"]),
        )  # fmt: skip

    @property
    def name(self) -> str:
        return self.metric if self.depth is None else f"{self.metric}[{self.depth}]"

    def shown(self, change: float | None) -> str:
        """A change in the threshold's own unit."""
        if change is None:
            return "–"
        return f"{100 * change:+.1f} %" if self.is_relative else f"{change:+.3f}"


@dataclass(frozen=True)
class Finding:
    """A threshold's verdict on one method at one temperature. None: undefined for these prompts."""

    threshold: Threshold
    method: str
    temperature: float
    num_prompts: int
    baseline: float | None
    checkpoint: float | None
    change: float | None
    interval: metrics.Interval | None
    verdict: str
    reason: str = ""

    @property
    def scope(self) -> str:
        return self.threshold.benchmark or POOLED

    @property
    def where(self) -> str:
        return f"{self.threshold.name} of {self.method} on {self.scope} at T = {self.temperature:g}"


def require_measurable(thresholds: Sequence[Threshold], jobs: Sequence[Job]) -> None:
    """Raise UsageError, before anything is measured, for a threshold that these rows can't meet."""
    if not thresholds:
        raise UsageError(f"--fail_below is empty: {SYNTAX}")
    trees = [job.tree for job in jobs if job.tree is not None]
    if not trees:
        raise UsageError("--methods holds nothing that drafts: add stree or vanilla_sd")
    benchmarks = list(dict.fromkeys(job.benchmark.name for job in jobs))
    for threshold in thresholds:
        if threshold.benchmark not in (None, *benchmarks):
            raise UsageError(
                f"--fail_below {threshold.text!r}: no benchmark {threshold.benchmark!r} is "
                f"measured, only {', '.join(benchmarks)}"
            )
        deepest = min(tree.max_depth for tree in trees)
        if threshold.depth is not None and threshold.depth > deepest:
            raise UsageError(
                f"--fail_below {threshold.text!r}: depth {threshold.depth} is below the tree, "
                f"whose depth is {deepest}"
            )
        compared = any(job.method == AUTOREGRESSIVE for job in jobs)
        if threshold.metric in RELATIVE_SPEEDS and not compared:
            raise UsageError(
                f"--fail_below {threshold.text!r} compares with autoregressive decoding: add "
                "autoregressive to --methods"
            )


def judge(thresholds: Sequence[Threshold], pairs: Pairs, seed: int = 0) -> list[Finding]:
    """Each threshold's verdict for each speculative method and temperature in `pairs`, whose
    first samples are the checkpoint's and second the baseline's."""
    groups = dict.fromkeys((method, temperature) for method, temperature, _ in pairs)
    findings = []
    for threshold in thresholds:
        for method, temperature in groups:
            chosen = [
                pair
                for (m, t, benchmark), pair in pairs.items()
                if (m, t) == (method, temperature) and threshold.benchmark in (None, benchmark)
            ]
            mine = [sample for ours, _ in chosen for sample in ours]
            theirs = [sample for _, others in chosen for sample in others]
            findings.append(_judge_one(threshold, method, temperature, mine, theirs, seed))
    return findings


def overall(findings: Sequence[Finding]) -> str:
    """The gate's verdict: the worst of all."""
    verdicts = {finding.verdict for finding in findings}
    return next(each for each in (REGRESSION, INCONCLUSIVE, PASS) if each in verdicts)


def is_better(findings: Sequence[Finding]) -> bool:
    """Whether the checkpoint deserves to be the next baseline: all thresholds pass, something got
    better beyond noise and nothing worse. Small losses, each within its threshold, would otherwise
    add up from baseline to baseline."""
    intervals = [finding.interval for finding in findings if finding.interval is not None]
    return (
        overall(findings) == PASS
        and any(low > 0 for low, _ in intervals)
        and not any(high < 0 for _, high in intervals)
    )


def _judge_one(
    threshold: Threshold, method: str, temperature: float,
    mine: Sequence[SampleRow], theirs: Sequence[SampleRow], seed: int,
) -> Finding:  # fmt: skip
    if [(s.benchmark, s.prompt_id) for s in mine] != [(s.benchmark, s.prompt_id) for s in theirs]:
        raise BadData(
            f"{threshold.name} of {method}: the samples of checkpoint and baseline are of other "
            "prompts; one of the folders was changed, evaluate again with --overwrite"
        )
    my_figure, their_figure = _figure(threshold, mine), _figure(threshold, theirs)

    def change(i_RQ: NDArray[np.int64]) -> NDArray[np.float64]:
        new_R, old_R = my_figure(i_RQ), their_figure(i_RQ)
        return new_R / old_R - 1 if threshold.is_relative else new_R - old_R

    num_prompts = len(mine)
    everything_1Q = np.arange(num_prompts)[None]
    with np.errstate(divide="ignore", invalid="ignore"):
        figures = [_value(each(everything_1Q)) for each in (my_figure, their_figure, change)]
    new, old, point = figures
    interval = metrics.bootstrap_interval(change, num_prompts, seed)
    verdict, reason = _verdict(threshold, point, interval, num_prompts)
    if not any(map(_has_drafted, (*mine, *theirs))):
        verdict, reason = INCONCLUSIVE, "plain decoding was chosen for every step of both"
    return Finding(
        threshold, method, temperature, num_prompts, old, new, point, interval, verdict, reason
    )


def _has_drafted(sample: SampleRow) -> bool:
    """False where the tree of each step was chosen, and none was."""
    return not sample.calls_by_tree or bool(sample.calls_by_tree.keys() - {PLAIN.name})


def _verdict(
    threshold: Threshold, point: float | None, interval: metrics.Interval | None, num_prompts: int
) -> tuple[str, str]:
    if num_prompts < LEAST_PROMPTS:
        return INCONCLUSIVE, f"too few prompts: {num_prompts}, {LEAST_PROMPTS} the least"
    if point is None or interval is None:
        return INCONCLUSIVE, "it is undefined for one of the two, or the baseline's is 0"
    low, high = interval
    if high < threshold.change:
        return REGRESSION, ""
    if low >= threshold.change:
        return PASS, ""
    margin = abs(point - threshold.change)
    if margin == 0:
        return INCONCLUSIVE, "the change is just the threshold"
    # An interval shrinks with the square root of the number of prompts.
    needed = math.ceil(num_prompts * ((high - low) / 2 / margin) ** 2)
    return INCONCLUSIVE, f"about {max(needed, num_prompts + 1)} prompts would tell"


def _figure(threshold: Threshold, samples: Sequence[SampleRow]) -> Figure:
    """The threshold's metric of any resample of these prompts, as `stree.metrics` defines it."""
    tokens, calls = _column(samples, "num_new_tokens"), _column(samples, "num_calls")
    decode_s = _column(samples, "decode_s")
    length, speed = _ratio(tokens, calls), _ratio(tokens, decode_s)
    if threshold.metric == "acceptance_length":
        return length
    if threshold.metric == "acceptance_length_prompt_mean":
        spoken = calls > 0
        return _ratio(np.divide(tokens, calls, out=np.zeros_like(tokens), where=spoken), spoken)
    if threshold.metric == DEPTH_RATES:
        assert threshold.depth is not None
        counts = np.array([_depth_counts(sample, threshold.depth) for sample in samples])
        return _ratio(counts[:, 0], counts[:, 1])
    if threshold.metric == "tokens_per_second":
        return speed
    plain = [sample.baseline for sample in samples]
    if any(each is None for each in plain):
        raise BadData(
            f"{threshold.name} wants the autoregressive run of each prompt, and some samples have "
            "none: evaluate again with autoregressive among the methods and --overwrite"
        )
    plain_speed = _ratio(_column(plain, "num_new_tokens"), _column(plain, "decode_s"))
    if threshold.metric == "speedup":
        return lambda i_RQ: speed(i_RQ) / plain_speed(i_RQ)
    return lambda i_RQ: speed(i_RQ) / plain_speed(i_RQ) / length(i_RQ)


def _depth_counts(sample: SampleRow, depth: int) -> tuple[int, int]:
    """Calls that accepted `depth` drafts, and calls that could have."""
    if depth > sample.tree_max_depth:
        return 0, 0
    reached = [accepted for accepted in sample.accepted_per_call if accepted >= depth - 1]
    return sum(accepted >= depth for accepted in reached), len(reached)


def _ratio(top_Q: NDArray[Any], bottom_Q: NDArray[Any]) -> Figure:
    return lambda i_RQ: top_Q[i_RQ].sum(1) / bottom_Q[i_RQ].sum(1)


def _column(prompts: Sequence[Any], name: str) -> NDArray[np.float64]:
    return np.array([getattr(prompt, name) for prompt in prompts], dtype=np.float64)


def _value(value_1: NDArray[np.float64]) -> float | None:
    return float(value_1[0]) if np.isfinite(value_1[0]) else None
