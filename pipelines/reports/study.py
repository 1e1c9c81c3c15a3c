"""A study's tables: what each arm's drafters gain over the first arm's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from stree import metrics
from stree_pipelines.evaluation.records import ResultRow, ResultStore, SampleRow
from stree_pipelines.reports import seeds
from stree_pipelines.reports.seeds import Answers
from stree_pipelines.reports.settings import sampling_note
from stree_pipelines.reports.tables import Gain, Table, bracket, figure
from stree_pipelines.studies.plan import Study, StudyArm

HEADS = (
    "arm", "seeds", "τ", "of the seeds", "τ over the first arm's", "speed-up over plain",
    "speed over the first arm's",
)  # fmt: skip
INTRO = (
    "τ: new tokens a target call, over all prompts and seeds of an arm; then the lowest and the "
    "highest of its seeds. Speed counts drafting. Over the first arm's: the same prompts, one by "
    f"one. Brackets: {seeds.HOW}"
)

Seeds = dict[int, list[SampleRow]]  # an arm's answers


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
                arms: dict[str, Seeds] = {}
                for run in study.runs:
                    for sample in samples.get(f"{run.name}, {tree}", ()):
                        is_other = sample.benchmark == held_back
                        if sample.temperature == temperature and is_other is others:
                            arm = arms.setdefault(run.arm.name, {})
                            arm.setdefault(run.seed, []).append(sample)
                if arms:
                    where = "on what was held back" if others else "on the benchmarks"
                    title = f"{tree}, T = {temperature:g}, {where}"
                    made.append(_table(title, study.arms, arms, sampling_note(rows)))
    return made


def _table(title: str, order: Iterable[StudyArm], arms: dict[str, Seeds], note: str) -> Table:
    lines: list[tuple[str, ...]] = [HEADS]
    named = [each.name for each in order if each.name in arms]
    answers = {name: Answers.of(list(arms[name].values())) for name in named}
    first = answers[named[0]]
    for name in named:
        mine, own = answers[name], [metrics.acceptance_length(each) for each in arms[name].values()]
        known = [each for each in own if each is not None]
        gain = speed = ""
        if mine is not first:
            ratio = mine.over(first, seeds.acceptance_length, np.divide)
            gain = figure(*_percent(ratio), "+.1f", " %")
            speed = figure(*mine.over(first, seeds.speedup, np.divide), unit="×")
        lines.append((
            name, str(len(arms[name])), figure(mine.figure(seeds.acceptance_length).value),
            bracket((min(known), max(known))).strip() if len(known) > 1 else "",
            gain, figure(mine.figure(seeds.speedup).value, unit="×"), speed,
        ))  # fmt: skip
    return Table(title, tuple(lines), note=note)


def _percent(ratio: Gain) -> Gain:
    low, high = ratio.interval or (1.0, 1.0)
    return Gain(
        None if ratio.value is None else 100 * (ratio.value - 1),
        None if ratio.interval is None else (100 * (low - 1), 100 * (high - 1)),
    )


def markdown(study: Study, rows: Sequence[ResultRow], store: ResultStore) -> str:
    """The page of a study."""
    parts = ["# Drafters compared\n", f"{INTRO}\n"]
    return "\n".join(parts + [table.to_markdown() for table in tables(study, rows, store)])
