"""Make a study's tables: the gain of each arm's drafters over the first arm's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from stree import metrics
from stree_lab.studies.plan import Study, StudyArm
from stree_pipelines.comparison import answers as figures
from stree_pipelines.comparison.answers import Answers
from stree_pipelines.evaluation.arms import Tuning
from stree_pipelines.evaluation.records import ResultRow, SampleRow
from stree_pipelines.evaluation.result_store import ResultStore
from stree_pipelines.reports.tables.tables import Table, below, bracket, figure

HEADS = (
    "arm", "seeds", "τ", "of the seeds", "τ over the first arm's", "speed-up over plain",
    "median speed-up", "speed over the first arm's",
)
EACH = (
    "On each benchmark: how fast an arm decodes with each tree, over plain decoding, and its τ; of "
    "a tuned chain, which of the six was the fastest on its first prompts (one for each seed)."
)
INTRO = (
    "τ: new tokens a target call, over all prompts and seeds of an arm; then the lowest and the "
    "highest of its seeds. Speed counts drafting; the median is of each prompt's own. Over the "
    f"first arm's: the same prompts, one by one. Brackets: {figures.HOW}"
)

Seeds = dict[int, list[SampleRow]]  # an arm's answers


def tables(study: Study, rows: Sequence[ResultRow], store: ResultStore) -> list[Table]:
    """Make a table per tree and temperature, on the benchmarks and on the held-back prompts."""
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
                    made.append(_table(title, study.arms, arms, rows))
    return made


def by_benchmark(
    study: Study, rows: Sequence[ResultRow], store: ResultStore, tunings: Sequence[Tuning]
) -> list[Table]:
    """Make a table per temperature: a line for each arm and benchmark, a column for each tree."""
    answered: dict[tuple[str, str, float], list[SampleRow]] = {}
    for row in rows:
        place = row.method, row.benchmark, row.temperature
        answered.setdefault(place, []).extend(store.samples(row))
    chains = {(each.arm, each.benchmark, each.temperature): each.tree for each in tunings}
    benchmarks = list(dict.fromkeys(row.benchmark for row in rows))
    made = []
    for temperature in sorted({row.temperature for row in rows}):
        lines: list[tuple[str, ...]] = [("arm", "benchmark", *study.trees)]
        for arm in study.arms:
            runs = [run for run in study.runs if run.arm == arm]
            for benchmark in benchmarks:
                cells = []
                for tree in study.trees:
                    places = [(f"{run.name}, {tree}", benchmark, temperature) for run in runs]
                    seeds_of = [answered[place] for place in places if place in answered]
                    tuned = [chains[place] for place in places if place in chains]
                    cells.append(_with_tree(seeds_of, tuned) if seeds_of else "")
                if any(cells):
                    lines.append((arm.name, benchmark, *cells))
        made.append(Table(f"Each benchmark, T = {temperature:g}", tuple(lines), num_left=2))
    return made


def _with_tree(seeds_of: list[list[SampleRow]], tuned: list[str]) -> str:
    answers = Answers.of(seeds_of)
    speed = figure(answers.value(figures.speedup), unit="×")
    length = figure(answers.value(figures.acceptance_length))
    return f"{speed}, τ {length}" + (f" ({', '.join(tuned)})" if tuned else "")


def _table(
    title: str, order: Iterable[StudyArm], arms: dict[str, Seeds], rows: Sequence[ResultRow]
) -> Table:
    lines: list[tuple[str, ...]] = [HEADS]
    named = [each.name for each in order if each.name in arms]
    answers = {name: Answers.of(list(arms[name].values())) for name in named}
    first = answers[named[0]]
    for name in named:
        mine, own = answers[name], [metrics.acceptance_length(each) for each in arms[name].values()]
        known = [each for each in own if each is not None]
        gain = speed = ""
        if mine is not first:
            gain = figure(*mine.over(first, figures.acceptance_length, _percent), "+.1f", " %")
            speed = figure(*mine.over(first, figures.speedup, np.divide), unit="×")
        lines.append((
            name, str(len(arms[name])), figure(mine.value(figures.acceptance_length)),
            bracket((min(known), max(known))).strip() if len(known) > 1 else "",
            gain, figure(mine.value(figures.speedup), unit="×"),
            figure(figures.median_speedup(mine), unit="×"), speed,
        ))
    samples = {
        f"{name}, seed {seed}": answers
        for name, seeds in arms.items()
        for seed, answers in seeds.items()
    }
    return Table(title, tuple(lines), note=below(samples, rows))


def _percent(new_R: NDArray[np.float64], old_R: NDArray[np.float64]) -> NDArray[np.float64]:
    return 100 * figures.relative(new_R, old_R)


def markdown(
    study: Study, rows: Sequence[ResultRow], store: ResultStore, tunings: Sequence[Tuning]
) -> str:
    """Format the page of a study."""
    parts = ["# Drafters compared\n", f"{INTRO}\n"]
    parts += [table.to_markdown() for table in tables(study, rows, store)]
    parts.append(f"{EACH}\n")
    parts += [table.to_markdown() for table in by_benchmark(study, rows, store, tunings)]
    return "\n".join(parts)
