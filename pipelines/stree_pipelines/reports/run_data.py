"""Read the inputs of a report, leniently: rows, samples and training metrics of a run folder."""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from stree import metrics
from stree.common.errors import BadData, UsageError
from stree.common.plain_data import parse_yaml, read_text
from stree.drafters.names import DrafterName
from stree.metrics import Timing
from stree_pipelines.comparison.answers import (
    Answers,
    Figure,
    Gain,
    acceptance_length,
    median_speedup,
    speedup,
    tokens_per_second,
)
from stree_pipelines.evaluation.evaluate import summarise_lossless
from stree_pipelines.evaluation.plan import AUTOREGRESSIVE, CHAIN, TREE, method_label
from stree_pipelines.evaluation.records import (
    Lossless,
    Reading,
    ReadingKey,
    ResultRow,
    SampleRow,
    Tree,
)
from stree_pipelines.evaluation.result_store import RESULTS_NAME, ResultStore
from stree_pipelines.reports import settings

POOLED = "all benchmarks"
CURVES_NAME, COMMAND_NAME, CONFIG_NAME = "metrics.csv", "command.json", "config.yaml"

RESAMPLED: dict[str, Figure] = {  # figures that are compared between cells
    "acceptance_length": acceptance_length,
    "tokens_per_second": tokens_per_second,
    "speedup": speedup,
}

# (checkpoint label, method with its tree, benchmark, temperature)
CellKey = tuple[str, str, str, float]


@dataclass(frozen=True)
class Cell:
    """Figures of one method at one checkpoint, on one benchmark or pooled over all.

    seeds: the samples of each seed of the training, as far as they are there; one without `joined`.
    files: the files that hold the samples.
    """

    summary: dict[str, Any]
    num_prompts: int
    files: tuple[str, ...] = ()
    seeds: tuple[tuple[SampleRow, ...], ...] = ()
    lossless: Lossless | None = None

    @classmethod
    def of(cls, row: ResultRow, samples: Sequence[SampleRow]) -> Cell:
        """Return a row's cell; its intervals are computed from its samples, if they are there."""
        summary = {name: getattr(row, name) for name in cls.figures()}
        baselines = [each.baseline for each in samples if each.baseline is not None]
        if samples:
            paired = baselines if len(baselines) == len(samples) else None
            summary["confidence_intervals"] = {
                **row.confidence_intervals, **metrics.confidence_intervals(samples, paired)
            }
        return cls(summary, row.num_prompts, (row.samples,), (tuple(samples),), row.lossless)

    @classmethod
    def joined(cls, cells: Sequence[Cell]) -> Cell:
        """Join the cells of several seeds, whose samples are there: figures over all seeds."""
        answers = Answers.of([cell.samples for cell in cells])
        gains = {name: answers.figure(of) for name, of in RESAMPLED.items()}
        summary = dict.fromkeys(cls.figures()) | {name: gain.value for name, gain in gains.items()}
        summary["speedup_prompt_median"] = median_speedup(answers)
        summary["confidence_intervals"] = {name: gain.interval for name, gain in gains.items()}
        seeds = tuple(cell.samples for cell in cells)
        files = tuple(name for cell in cells for name in cell.files)
        every = [sample for samples in seeds for sample in samples]
        return cls(summary, len(answers.prompts), files, seeds, summarise_lossless(every))

    def __getitem__(self, name: str) -> Any:
        return self.summary[name]

    @classmethod
    def figures(cls) -> tuple[str, ...]:
        """Return the names in a summary."""
        return tuple(metrics.summarise([]))

    @property
    def samples(self) -> tuple[SampleRow, ...]:
        """Samples of all seeds."""
        return tuple(sample for samples in self.seeds for sample in samples)

    @cached_property
    def answers(self) -> Answers:
        """Answers of all seeds, paired by prompt."""
        return Answers.of(self.seeds or [()])

    def interval(self, name: str) -> metrics.Interval | None:
        return self.summary["confidence_intervals"].get(name)

    def gain(self, name: str) -> Gain:
        """Return a figure with its interval."""
        return Gain(self[name], self.interval(name))

    @property
    def baseline_speed(self) -> float | None:
        """Tokens per second of plain decoding that this cell's speedup is relative to."""
        speed, speedup = self["tokens_per_second"], self["speedup"]
        return speed / speedup if speed and speedup else None


@dataclass
class RunData:
    """A run, as far as its files tell; all rows have one decoding setting.

    Attributes:
        names: of each (method, tree) of the rows, as `method_names` gives them.
        checkpoints: labels in order of distillation.
        methods: speculative methods present, a tree's name appended when there are several.
        cells: by (checkpoint, method, benchmark or POOLED, temperature). The baseline is at
            checkpoint "".
        curves: columns of metrics.csv as (step, value) pairs.
        notes: remarks for the reader on missing or mixed data.
    """

    folder: Path
    rows: list[ResultRow]
    names: dict[tuple[str, Tree | None], str] = field(default_factory=dict)
    checkpoints: list[str] = field(default_factory=list)
    steps: dict[str, int | None] = field(default_factory=dict)
    methods: list[str] = field(default_factory=list)
    benchmarks: list[str] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    cells: dict[CellKey, Cell] = field(default_factory=dict)
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    command: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def cell(self, checkpoint: str, method: str, benchmark: str, temperature: float) -> Cell | None:
        return self.cells.get((checkpoint, method, benchmark, temperature))

    def row_of(self, method: str) -> ResultRow | None:
        """Return a row of a method by its name here; its rows have one tree and one verifier."""
        named = (row for row in self.rows if self.names[row.method, row.tree] == method)
        return next(named, None)

    def tree(self, method: str) -> Tree | None:
        """Return the tree of a method by its name here."""
        row = self.row_of(method)
        return None if row is None else row.tree

    @cached_property
    def readings(self) -> dict[ReadingKey, Reading]:
        """Readings of the data's own answers, of any setting."""
        return {each.key: each for each in open_results(self.folder).readings()}

    @property
    def last(self) -> str:
        """Checkpoint to judge by: the one distilled longest."""
        return self.checkpoints[-1] if self.checkpoints else ""

    @property
    def batch_size(self) -> int:
        """Number of prompts decoded at once."""
        return max((row.batch_size for row in self.rows), default=1)

    @property
    def scopes(self) -> list[str]:
        """Benchmarks to show, the pool of several first."""
        return [POOLED, *self.benchmarks] if len(self.benchmarks) > 1 else list(self.benchmarks)


def load_run(
    folder: str | Path, shown: Sequence[str] = (),
    wanted: Callable[[ResultRow], bool] = lambda row: True,
    names: Mapping[tuple[str, Tree | None], str] | None = None,
) -> RunData:
    """Read RUN/eval (or RUN, when it holds results.jsonl itself), metrics.csv and command.json.

    Args:
        shown: NAME=VALUE pairs that choose among several decoding settings.
        wanted: keeps a row when it returns True.
        names: as of `arrange`.

    Raises UsageError when there are no results, and when they still have several settings.
    """
    folder = Path(folder)
    store = open_results(folder)
    rows = store.results()
    chosen = settings.chosen(rows, shown, store.directory)
    data = read_training(folder, [row for row in chosen if wanted(row)])
    if len(chosen) < len(rows):
        left = ", ".join(shown)
        data.notes.append(f"Shown are rows with {left}; {len(rows) - len(chosen)} others are not.")
    arrange(data, store, names)
    return data


def joined(runs: Sequence[RunData]) -> RunData:
    """Join runs of one recipe, a seed each: cells are of all seeds, where all have their samples.

    The runs' methods have the same names.
    """
    first = runs[0]
    if len(runs) == 1:
        return first
    every = {key: [run.cells[key] for run in runs if key in run.cells] for key in first.cells}
    cells = {
        key: Cell.joined(found)
        for key, found in every.items()
        if key[0] and sum(bool(cell.samples) for cell in found) == len(runs)
    }
    checkpoints = [each for each in first.checkpoints if all(each in r.checkpoints for r in runs)]
    rows = [row for run in runs for row in run.rows]
    return replace(first, rows=rows, checkpoints=checkpoints, cells=cells)


def read_training(folder: Path, rows: list[ResultRow]) -> RunData:
    """Make the data of a run from these rows and its training's files, not yet arranged."""
    data = RunData(folder, rows)
    data.curves = _read_curves(folder / CURVES_NAME, data.notes)
    data.command = read_table(folder / COMMAND_NAME)
    return data


def open_results(folder: Path) -> ResultStore:
    """Open RUN/eval, or RUN when it holds results.jsonl itself; raises UsageError without any
    row."""
    for path in (folder / "eval", folder):
        if (path / RESULTS_NAME).is_file():
            if not ResultStore(path).results():
                raise UsageError(f"{path / RESULTS_NAME} is empty: run eval_spec.py first")
            return ResultStore(path)
    raise UsageError(f"no {RESULTS_NAME} in {folder} or {folder}/eval: run eval_spec.py first")


def arrange(
    data: RunData, store: ResultStore, names: Mapping[tuple[str, Tree | None], str] | None = None,
) -> None:
    """Fill `data` in from its rows and their samples.

    names: of methods, where other runs' count, too; by default `method_names` of these rows.

    Raises UsageError when the rows have several decoding settings.
    """
    settings.require_one({str(store.directory): data.rows}, arms=True)
    current = without_replaced(data.rows)
    if len(current) < len(data.rows):
        data.notes.append(
            f"{len(data.rows) - len(current)} rows are of checkpoints that were replaced since, "
            "and not shown."
        )
    data.rows = current
    data.notes += settings.remarks(current)
    labels, data.names = _labels(current), dict(names or method_names(current))
    data.steps = {labels[_drafter(row)]: row.step for row in current}
    data.checkpoints = sorted(
        {label for label in labels.values() if label},
        key=lambda label: (data.steps[label] is None, data.steps[label] or 0, label),
    )
    data.methods = speculative_methods({each: data.names[each] for each in method_names(current)})
    data.benchmarks = list(dict.fromkeys(row.benchmark for row in current))
    data.temperatures = sorted({row.temperature for row in current})
    num_without = 0
    for row in current:
        key = (
            labels[_drafter(row)], data.names[row.method, row.tree], row.benchmark, row.temperature,
        )
        samples = tuple(store.samples(row))
        num_without += not samples
        data.cells[key] = Cell.of(row, samples)
    if num_without:
        data.notes.append(
            f"The samples of {num_without} rows are not there: what is pooled or paired over them "
            "is missing, and their intervals are those of the version that measured them."
        )
    if len(data.benchmarks) > 1:
        _pool(data)
    if data.batch_size > 1:
        data.notes.append(_about_batches(data))
    for row in current:
        if row.tree_shares:
            step = "" if row.step is None else f", step {row.step}"
            data.notes.append(
                f"{row.tree.name if row.tree else ''} on {row.benchmark}, T = {row.temperature:g}"
                f"{step}: {told_shares(row)}."
            )


def told_shares(row: ResultRow) -> str:
    """Format the share of steps that had each tree, when trees were chosen step by step."""
    return ", ".join(f"{name} {share:.0%}" for name, share in row.tree_shares.items())


def _pool(data: RunData) -> None:
    """Add the cells over all benchmarks, from the samples; none when a benchmark is missing."""
    for checkpoint, method, temperature in itertools.product(
        ("", *data.checkpoints), (AUTOREGRESSIVE, *data.methods), data.temperatures
    ):
        found = [data.cell(checkpoint, method, b, temperature) for b in data.benchmarks]
        parts = [part for part in found if part and part.samples]
        if len(parts) < len(data.benchmarks):
            continue
        samples = tuple(sample for part in parts for sample in part.samples)
        baselines: list[Timing] = [s.baseline for s in samples if s.baseline is not None]
        if method == AUTOREGRESSIVE:
            baselines = list(samples)
        paired = baselines if len(baselines) == len(samples) else None
        files = tuple(name for part in parts for name in part.files)
        data.cells[checkpoint, method, POOLED, temperature] = Cell(
            metrics.summarise(samples, paired), len(samples), files, (samples,),
            summarise_lossless(samples),
        )


def _about_batches(data: RunData) -> str:
    """Explain the speeds of batches, and how full those of the last checkpoint were."""
    full = []
    for method in (AUTOREGRESSIVE, *data.methods):
        checkpoint = "" if method == AUTOREGRESSIVE else data.last
        found = (data.cell(checkpoint, method, data.scopes[0], t) for t in data.temperatures)
        rows = [cell["rows_per_call"] for cell in found if cell and cell["rows_per_call"]]
        if rows:
            full.append(f"{'–'.join(f'{each:.1f}' for each in sorted({min(rows), max(rows)}))} "
                        f"({method_label(method)})")
    held = f" A call decoded {', '.join(full)} on average." if full else ""
    return (
        f"Up to {data.batch_size} prompts were decoded at once, fewer towards a benchmark's end: "
        f"speeds are new tokens of all of them per second, plain decoding's too.{held}"
    )


def in_batches(batch_size: int, before: str = " ") -> str:
    """Return "in batches of N", after `before`; "" for prompts alone."""
    return f"{before}in batches of {batch_size}" if batch_size > 1 else ""


def checkpoint_title(data: RunData, checkpoint: str) -> str:
    """Return a column's head, such as "step 12000"."""
    step = data.steps.get(checkpoint)
    if step is None or "/" in checkpoint:  # a whole name
        return checkpoint
    return checkpoint.replace(step_label(step), step_title(step))


def step_label(step: int) -> str:
    return f"step-{step:08d}"


def step_title(step: int) -> str:
    return f"step {step}"


def drafter_label(row: ResultRow, at_step: Callable[[int], str] = step_title) -> str:
    """Return a drafter's form (`float8:`, `+ngram:6`) with its step, or with its folder's name.

    "" for the target alone.
    """
    if row.checkpoint is None:
        return ""
    name = DrafterName.parse(row.checkpoint)
    return name.shown(Path(name.folder or "").name if row.step is None else at_step(row.step))


def _drafter(row: ResultRow) -> str | None:
    """Return a drafter's identity; None for the target alone."""
    return None if row.checkpoint is None else row.checkpoint_sha256 or row.checkpoint


def without_replaced(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Keep the rows of each checkpoint path's latest content: a new training may export to the
    same path."""
    live = set({row.checkpoint: _drafter(row) for row in rows}.values())
    return [row for row in rows if _drafter(row) in live]


def _labels(rows: Sequence[ResultRow]) -> dict[str | None, str]:
    """Return {drafter: label}, "" for the target alone; the whole name when two would share a
    label."""
    drafters = {_drafter(row): row for row in rows}
    short = {drafter: drafter_label(row, step_label) for drafter, row in drafters.items()}
    labels = list(short.values())
    return {
        drafter: label if labels.count(label) == 1 else drafters[drafter].checkpoint or ""
        for drafter, label in short.items()
    }


def speculative_methods(names: Mapping[tuple[str, Tree | None], str]) -> list[str]:
    """Return the names of the speculative methods among `method_names`, chains before trees."""
    order = [CHAIN, TREE]
    found = [
        (order.index(method) if method in order else 99, name)
        for (method, _), name in names.items()
        if method != AUTOREGRESSIVE
    ]
    return [name for _, name in sorted(found)]


def method_names(rows: Sequence[ResultRow]) -> dict[tuple[str, Tree | None], str]:
    """Return {(method, tree): name}.

    The tree's name is appended when the method has several, and a number when several share a name.
    """
    found = dict.fromkeys((row.method, row.tree) for row in rows)
    names = {}
    for method, tree in found:
        others = [each for name, each in found if name == method and each is not None]
        if tree is None or len(others) == 1:
            names[method, tree] = method
            continue
        alike = [each for each in others if each.name == tree.name]
        number = f" ({alike.index(tree) + 1})" if len(alike) > 1 else ""
        names[method, tree] = f"{method}:{tree.name}{number}"
    return names


def _read_curves(path: Path, notes: list[str]) -> dict[str, list[tuple[float, float]]]:
    """Read every numeric column against `step`, without gaps and words."""
    if not path.is_file():
        notes.append("No metrics.csv: the loss curve and the simulated acceptance are missing.")
        return {}
    curves: dict[str, list[tuple[float, float]]] = {}
    try:
        rows = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8", errors="replace"))))
    except (OSError, csv.Error) as error:
        raise BadData(f"{path} is no table: {error}; move it away") from error
    for row in rows:
        step = _number(row.get("step"))
        if step is None:
            continue
        for name, text in row.items():
            value = _number(text)
            if name not in (None, "step", "epoch") and value is not None:
                curves.setdefault(name, []).append((step, value))
    return curves


def read_table(path: Path) -> dict[str, Any]:
    """Read a JSON or YAML file's table, empty without the file; raises BadData for other
    content."""
    if not path.is_file():
        return {}
    try:
        content = parse_yaml(read_text(path))  # JSON is YAML too
    except (OSError, ValueError) as error:
        raise BadData(f"{path} cannot be read: {error}; restore it") from error
    if not isinstance(content, dict):
        raise BadData(f"{path} holds no table of names and values")
    return content


def _number(text: Any) -> float | None:
    try:
        value = float(text)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None
