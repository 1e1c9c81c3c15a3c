"""Judge whether a checkpoint is worse than its baseline beyond noise, by thresholds.

A threshold is the loss of a figure that is allowed. Both checkpoints answered the same prompts, so
the change is bootstrapped over prompts in pairs, and its interval decides: a regression when all of
it lies below the threshold, a pass when none of it does, and inconclusive in between, or when there
are too few prompts for an interval to mean anything. The intervals of all thresholds, methods and
temperatures hold together at 95 %.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stree import metrics
from stree.common.errors import BadData, InvariantBroken, UsageError
from stree.tree_policy.adaptive import PLAIN
from stree_pipelines.comparison.answers import (
    COUNTS,
    Answers,
    Count,
    Figure,
    acceptance_length,
    ratio,
    relative,
    repeats,
    speedup,
    speedup_per_tau,
    tokens_per_second,
)
from stree_pipelines.evaluation.plan import AUTOREGRESSIVE, Job, method_label
from stree_pipelines.evaluation.records import SampleRow
from stree_pipelines.reports.run_data import POOLED
from stree_pipelines.reports.tables.answer_notes import marks

PASS, REGRESSION, INCONCLUSIVE = "pass", "regression", "inconclusive"
NUM_RESAMPLES = 10_000  # intervals that hold together have far-out ends
DEPTH_RATES = "depth_accept_rates"
RELATIVE_SPEEDS = ("speedup", "speedup_per_tau")
# Not tokens_per_second_e2e: prefill is slower for the method that meets a prompt first.
SPEEDS = (*RELATIVE_SPEEDS, "tokens_per_second")
FIGURES: dict[str, Figure] = {  # as `stree.metrics` defines them
    "acceptance_length": acceptance_length,
    "acceptance_length_prompt_mean": ratio("lengths", "answers"),
    DEPTH_RATES: ratio("passed", "reached"),
    "speedup": speedup,
    "speedup_per_tau": speedup_per_tau,
    "tokens_per_second": tokens_per_second,
}
METRICS = tuple(FIGURES)
SYNTAX = (
    "wanted [BENCHMARK.]METRIC=CHANGE such as acceptance_length=-3%, gsm8k.speedup=-5%, "
    f"{DEPTH_RATES}[1]=-0.02 or speedup=+1%"
)

_THRESHOLD = re.compile(
    r"(?:(?P<benchmark>.+)\.)?(?P<metric>\w+)(?:\[(?P<depth>[1-9]\d*)\])?"
    r"=(?P<change>[+-]\d+(?:\.\d*)?|0)(?P<percent>%)?"
)

# (method, temperature, benchmark) → its prompts under both checkpoints, in one order
Pairs = Mapping[tuple[str, float, str], tuple[Sequence[SampleRow], Sequence[SampleRow]]]


class Regression(InvariantBroken):
    """Error of a checkpoint that lost more than its thresholds allow."""


@dataclass(frozen=True)
class Threshold:
    """Least allowed change of a figure.

    Attributes:
        benchmark: the benchmark that it is about; None pools the prompts of all benchmarks.
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
        """Read `[BENCHMARK.]METRIC[[DEPTH]]=CHANGE[%]`. Raises UsageError with the mistake."""
        found = _THRESHOLD.fullmatch(text)
        metric = found["metric"] if found else ""
        if not found or metric not in METRICS or (metric == DEPTH_RATES) != bool(found["depth"]):
            raise UsageError(
                f"--fail_below {text!r} is no threshold: {SYNTAX}; METRIC is one of "
                f"{', '.join(METRICS)}, {DEPTH_RATES} with a depth from 1 in brackets and the "
                "others without, and the change has a sign"
            )
        change = float(found["change"]) / (100 if found["percent"] else 1)
        if found["percent"] and change <= -1:
            raise UsageError(f"--fail_below {text!r}: nothing can lose all of itself or more")
        depth = int(found["depth"]) if found["depth"] else None
        return cls(text, found["benchmark"], metric, depth, change, bool(found["percent"]))

    @property
    def name(self) -> str:
        return self.metric if self.depth is None else f"{self.metric}[{self.depth}]"

    def shown(self, change: float | None) -> str:
        """Format a change in the threshold's own unit."""
        if change is None:
            return "–"
        return f"{100 * change:+.1f} %" if self.is_relative else f"{change:+.3f}"


@dataclass(frozen=True)
class Finding:
    """Verdict of a threshold on one method at one temperature.

    Attributes:
        num_prompts: number of compared prompts.
        baseline, checkpoint, change, interval: None when undefined for these prompts.
        num_repeating: prompts that are left out, since an answer to them repeats itself.
    """

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
    num_repeating: int = 0

    @property
    def scope(self) -> str:
        return self.threshold.benchmark or POOLED

    @property
    def shown_interval(self) -> str:
        """The interval in the threshold's own unit."""
        if self.interval is None:
            return "–"
        return f"[{', '.join(map(self.threshold.shown, self.interval))}]"

    @property
    def where(self) -> str:
        what = f"{self.threshold.name} of {method_label(self.method)}"
        return f"{what} on {self.scope} at T = {self.temperature:g}"


def require_measurable(thresholds: Sequence[Threshold], jobs: Sequence[Job]) -> None:
    """Raise UsageError, before measuring, for a threshold that the jobs' rows cannot meet."""
    if not thresholds:
        raise UsageError(f"--fail_below is empty: {SYNTAX}")
    trees = [job.tree for job in jobs if job.tree is not None]
    if not trees:
        raise UsageError("--methods holds nothing that drafts: add tree or chain")
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
                f"--fail_below {threshold.text!r} compares with plain decoding: add "
                "plain to --methods"
            )


def judge(thresholds: Sequence[Threshold], pairs: Pairs, seed: int = 0) -> list[Finding]:
    """Judge each threshold for each speculative method and temperature in `pairs`.

    A pair holds the checkpoint's samples first, the baseline's second.
    """
    groups = dict.fromkeys((method, temperature) for method, temperature, _ in pairs)
    findings, level = [], level_of(len(thresholds) * len(groups))
    for threshold in thresholds:
        for method, temperature in groups:
            chosen = [
                pair
                for (m, t, benchmark), pair in pairs.items()
                if (m, t) == (method, temperature) and threshold.benchmark in (None, benchmark)
            ]
            mine = [sample for ours, _ in chosen for sample in ours]
            theirs = [sample for _, others in chosen for sample in others]
            findings.append(_judge_one(threshold, method, temperature, mine, theirs, seed, level))
    return findings


def level_of(num_findings: int) -> float:
    """Return the level of each interval at which all of them together have 95 % (Bonferroni).

    With a change of just the threshold in all figures, the probability that any of them is called
    a regression is then at most 2.5 %, however they hang together.
    """
    return 1 - (1 - metrics.LEVEL) / max(num_findings, 1)


def least_prompts(level: float) -> int:
    """Return the least number of prompts at which an interval of this level says something.

    With fewer, even "all of them got worse" is too likely by chance: 2 · 2^-Q. At 95 % it is six.
    """
    return math.floor(math.log2(2 / (1 - level))) + 1


def overall(findings: Sequence[Finding]) -> str:
    """Return the gate's verdict: the worst of all."""
    verdicts = {finding.verdict for finding in findings}
    return next(each for each in (REGRESSION, INCONCLUSIVE, PASS) if each in verdicts)


def is_better(findings: Sequence[Finding]) -> bool:
    """Return True when the checkpoint deserves to be the next baseline.

    All thresholds must pass, some figure must gain beyond noise and none lose. Otherwise small
    losses, each within its threshold, would add up from baseline to baseline.
    """
    intervals = [finding.interval for finding in findings if finding.interval is not None]
    return (
        overall(findings) == PASS
        and any(low > 0 for low, _ in intervals)
        and not any(high < 0 for _, high in intervals)
    )


def _judge_one(
    threshold: Threshold, method: str, temperature: float,
    mine: Sequence[SampleRow], theirs: Sequence[SampleRow], seed: int, level: float,
) -> Finding:
    what = f"{threshold.name} of {method_label(method)}"
    if threshold.depth is not None and None in (s.depth_per_call for s in (*mine, *theirs)):
        raise BadData(
            f"{what}: some samples do not say how deep each call's drafts were judged: evaluate "
            "again with --overwrite"
        )
    new, old = (Answers.of([each], _counted(threshold)) for each in (mine, theirs))
    if new.prompts != old.prompts:
        raise BadData(
            f"{what}: the samples of checkpoint and baseline are of other prompts; one of the "
            "folders was changed, evaluate again with --overwrite"
        )
    if threshold.metric in RELATIVE_SPEEDS and any(s.baseline is None for s in (*mine, *theirs)):
        raise BadData(
            f"{threshold.name} wants plain decoding of each prompt, and some samples have none: "
            "evaluate again with plain among the methods and --overwrite"
        )
    if threshold.metric in SPEEDS and (reasons := marks({"": mine}) + marks({"": theirs})):
        raise BadData(
            f"{what} cannot be judged. {reasons[0]} Evaluate again with --overwrite where nothing "
            "else runs, or give no threshold of speed"
        )
    circles = {(s.benchmark, s.prompt_id) for s in (*mine, *theirs) if repeats(s)}
    new, old = (each.without(circles.__contains__) for each in (new, old))
    figure = FIGURES[threshold.metric]
    change, interval = new.over(
        old, figure, relative if threshold.is_relative else np.subtract,
        seed=seed, level=level, num_resamples=NUM_RESAMPLES,
    )
    verdict, reason = _verdict(threshold, change, interval, len(new.prompts), least_prompts(level))
    by_tree = [sample.calls_by_tree for sample in (*mine, *theirs)]  # {} without a choice
    if all(each and each.keys() <= {PLAIN.name} for each in by_tree):
        verdict, reason = INCONCLUSIVE, "plain decoding was chosen for every step of both"
    return Finding(
        threshold, method, temperature, len(new.prompts), old.value(figure), new.value(figure),
        change, interval, verdict, reason, len(circles),
    )


def _verdict(
    threshold: Threshold, point: float | None, interval: metrics.Interval | None,
    num_prompts: int, least: int,
) -> tuple[str, str]:
    if num_prompts < least:
        return INCONCLUSIVE, f"too few prompts: {num_prompts}, {least} the least"
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


def _counted(threshold: Threshold) -> dict[str, Count]:
    """Return the counts that a threshold's metric is made of."""
    depth = threshold.depth
    more: dict[str, Count] = {
        "answers": lambda sample: sample.num_calls > 0,
        "lengths": lambda sample: metrics.acceptance_length([sample]) or 0.0,
    }
    if depth is not None:
        more["passed"] = lambda sample: metrics.depth_counts(sample, depth)[0]
        more["reached"] = lambda sample: metrics.depth_counts(sample, depth)[1]
    return {**COUNTS, **more}
