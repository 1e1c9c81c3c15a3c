"""A study's tables: what each arm's drafters gain over the first arm's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from stree import metrics
from stree_pipelines.evaluation.records import ResultRow, ResultStore, SampleRow
from stree_pipelines.reports.tables import Table, bracket, figure
from stree_pipelines.studies.plan import Study, StudyArm

HEADS = (
    "arm", "seeds", "τ", "of the seeds", "τ over the first arm's", "speed-up over plain",
    "speed over the first arm's",
)  # fmt: skip
INTRO = (
    "τ: new tokens a target call, over all prompts and seeds of an arm; then the lowest and the "
    "highest of its seeds. Speed counts drafting. Brackets: 95 % bootstrap intervals over prompts, "
    "paired, seeds of an arm taken together."
)


@dataclass
class Pooled:
    """One prompt, decoded with the drafters of all seeds of an arm: a `metrics.Timing`, and plain
    decoding of the same, as often."""

    num_new_tokens: int = 0
    num_calls: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    time_ms: dict[str, float] = field(default_factory=dict)
    baseline: Pooled | None = None

    def add(self, sample: Any) -> None:
        for name in ("num_new_tokens", "num_calls", "prefill_s", "decode_s"):
            setattr(self, name, getattr(self, name) + getattr(sample, name))
        if getattr(sample, "baseline", None) is not None:
            self.baseline = self.baseline or Pooled()
            self.baseline.add(sample.baseline)


Prompts = dict[tuple[str, str], Pooled]  # by benchmark and id


@dataclass
class Arm:
    """Prompts by seed, and of all seeds together."""

    seeds: dict[int, Prompts] = field(default_factory=lambda: defaultdict(dict))
    prompts: Prompts = field(default_factory=dict)

    def add(self, seed: int, sample: SampleRow) -> None:
        for prompts in (self.seeds[seed], self.prompts):
            key = sample.benchmark, sample.prompt_id
            prompts.setdefault(key, Pooled()).add(sample)


def tables(study: Study, rows: Sequence[ResultRow], store: ResultStore) -> list[Table]:
    """For each temperature, on the benchmarks and on what was held back, with each tree."""
    samples = {row.method: [] for row in rows}  # type: dict[str, list[SampleRow]]
    for row in rows:
        samples[row.method] += store.samples(row)
    temperatures = sorted({row.temperature for row in rows})
    held_back = study.prompts_file.stem
    made = []
    for tree in study.trees:
        for temperature in temperatures:
            for others in (False, True):
                arms: dict[str, Arm] = {}
                for run in study.runs:
                    for sample in samples.get(f"{run.name}, {tree}", ()):
                        is_other = sample.benchmark == held_back
                        if sample.temperature == temperature and is_other is others:
                            arms.setdefault(run.arm.name, Arm()).add(run.seed, sample)
                if arms:
                    where = "on what was held back" if others else "on the benchmarks"
                    title = f"{tree}, T = {temperature:g}, {where}"
                    made.append(_table(title, study.arms, arms))
    return made


def _table(title: str, order: Iterable[StudyArm], arms: dict[str, Arm]) -> Table:
    lines: list[tuple[str, ...]] = [HEADS]
    named = [each.name for each in order if each.name in arms]
    first = arms[named[0]]
    for name in named:
        arm = arms[name]
        own = [tau(prompts.values()) for prompts in arm.seeds.values()]
        mine, theirs = _paired(arm.prompts, first.prompts)
        gain = speed = metrics_pair = None
        if arm is not first and mine:
            metrics_pair = mine, theirs
            gain = figure(
                100 * (tau(mine) / tau(theirs) - 1),
                _percent(metrics.acceptance_ratio_interval(mine, theirs)), "+.1f", " %",
            )  # fmt: skip
        plain = [each.baseline for each in mine if each.baseline]
        their_plain = [each.baseline for each in theirs if each.baseline]
        timed = len(plain) == len(their_plain) == len(mine)
        speedup = metrics.speedup(mine, plain) if timed and mine else None
        if metrics_pair and timed:
            ratio = metrics.speedup(mine, plain), metrics.speedup(theirs, their_plain)
            if ratio[0] and ratio[1]:
                interval = metrics.speedup_ratio_interval(mine, plain, theirs, their_plain)
                speed = figure(ratio[0] / ratio[1], interval, unit="×")
        lines.append((
            name, str(len(arm.seeds)), figure(tau(arm.prompts.values())),
            bracket((min(own), max(own))).strip() if len(own) > 1 else "",
            gain or "", figure(speedup, unit="×"), speed or "",
        ))  # fmt: skip
    return Table(title, tuple(lines))


def tau(prompts: Iterable[Pooled]) -> float:
    """Acceptance length over all of them."""
    prompts = list(prompts)
    return sum(each.num_new_tokens for each in prompts) / sum(each.num_calls for each in prompts)


def _paired(mine: Prompts, theirs: Prompts) -> tuple[list[Pooled], list[Pooled]]:
    shared = [key for key in mine if key in theirs]
    return [mine[key] for key in shared], [theirs[key] for key in shared]


def _percent(interval: metrics.Interval | None) -> metrics.Interval | None:
    return None if interval is None else (100 * (interval[0] - 1), 100 * (interval[1] - 1))


def markdown(study: Study, rows: Sequence[ResultRow], store: ResultStore) -> str:
    """The page of a study."""
    parts = ["# Drafters compared\n", f"{INTRO}\n"]
    return "\n".join(parts + [table.to_markdown() for table in tables(study, rows, store)])
