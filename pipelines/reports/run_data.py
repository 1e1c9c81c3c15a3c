"""What a report is made of: rows, samples and training metrics of a run folder, read leniently."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stree import metrics
from stree.errors import BadData, UsageError
from stree.plain_data import read_json
from stree_pipelines.evaluation.evaluate import summarise_lossless
from stree_pipelines.evaluation.plan import AUTOREGRESSIVE, CHAIN, TREE
from stree_pipelines.evaluation.records import (
    RESULTS_NAME,
    Lossless,
    ResultRow,
    ResultStore,
    SampleRow,
    Tree,
)

POOLED = "all benchmarks"
METHOD_LABELS = {AUTOREGRESSIVE: "Autoregressive", CHAIN: "Vanilla SD", TREE: "STree"}
CHAIN_DRAFTS = 4  # of the simulated curve: the paper's chain

# (checkpoint label, method with its tree, benchmark, temperature)
CellKey = tuple[str, str, str, float]


@dataclass(frozen=True)
class Cell:
    """The figures of one method at one checkpoint, on one benchmark or pooled over all."""

    summary: dict[str, Any]
    num_prompts: int
    samples: tuple[SampleRow, ...] = ()
    lossless: Lossless | None = None

    def __getitem__(self, name: str) -> Any:
        return self.summary[name]

    def interval(self, name: str) -> tuple[float, float] | None:
        return self.summary["confidence_intervals"].get(name)

    @property
    def baseline_speed(self) -> float | None:
        """Tokens per second of the autoregressive run that this cell's speedup is relative to."""
        speed, speedup = self["tokens_per_second"], self["speedup"]
        return speed / speedup if speed and speedup else None


@dataclass
class RunData:
    """A run, as far as its files tell.

    Attributes:
        checkpoints: labels in order of distillation.
        methods: speculative methods present, a tree's name appended when there are several.
        cells: by (checkpoint, method, benchmark or POOLED, temperature). The baseline is at
            checkpoint "".
        curves: columns of metrics.csv as (step, value) pairs.
        notes: what is missing or mixed, for the reader.
    """

    folder: Path
    rows: list[ResultRow]
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

    def tree(self, method: str) -> Tree | None:
        """The tree behind a method's name here."""
        name = method.partition(":")[0]
        trees = [row.tree for row in self.rows if row.method == name and row.tree is not None]
        return next((t for t in trees if method in (name, f"{name}:{t.name}")), None)

    @property
    def last(self) -> str:
        """The checkpoint to judge by: the one distilled longest."""
        return self.checkpoints[-1] if self.checkpoints else ""

    @property
    def scopes(self) -> list[str]:
        """Benchmarks to show, the pool of several first."""
        return [POOLED, *self.benchmarks] if len(self.benchmarks) > 1 else list(self.benchmarks)


def load_run(folder: str | Path) -> RunData:
    """Read RUN/eval (or RUN, when it holds results.jsonl itself), metrics.csv and command.json.

    Raises UsageError when there are no results.
    """
    folder = Path(folder)
    store = open_results(folder)
    data = RunData(folder, store.results())
    data.curves = _read_curves(folder / "metrics.csv", data.notes)
    data.command = _read_command(folder / "command.json", data.notes)
    arrange(data, store)
    return data


def open_results(folder: Path) -> ResultStore:
    """RUN/eval, or RUN when it holds results.jsonl itself; raises UsageError without any row."""
    for path in (folder / "eval", folder):
        if (path / RESULTS_NAME).is_file():
            if not ResultStore(path).results():
                raise UsageError(f"{path / RESULTS_NAME} is empty: run eval_spec.py first")
            return ResultStore(path)
    raise UsageError(f"no {RESULTS_NAME} in {folder} or {folder}/eval: run eval_spec.py first")


def expected_tau(acceptance: float, num_drafts: int = CHAIN_DRAFTS) -> float:
    """τ of a chain when each draft is accepted with this probability, independently: the geometric
    sum 1 + α + … + α^n (Leviathan et al. 2023, Eq. 1)."""
    return sum(acceptance**depth for depth in range(num_drafts + 1))


def arrange(data: RunData, store: ResultStore) -> None:
    """Fill `data` in from its rows and their samples."""
    # Of rows that differ in settings only, the one that was written last counts.
    chosen = {_cell_key(row, data.rows): row for row in data.rows}
    if len(chosen) < len(data.rows):
        data.notes.append(
            f"{len(data.rows) - len(chosen)} rows were measured again with other settings; the "
            "latest are shown."
        )
    settings = {
        (r.max_new_tokens, r.ignore_eos, r.seed, r.environment.device, r.target_sha256,
         tuple(sorted(r.environment.dtypes.items())))
        for r in chosen.values()
    }  # fmt: skip
    if len(settings) > 1:
        data.notes.append(
            "The rows were measured under different settings or on different devices."
        )
    ordered = sorted({(r.step is None, r.step or 0, _checkpoint(r)) for r in chosen.values()})
    data.checkpoints = [label for _, _, label in ordered if label]
    data.steps = {_checkpoint(row): row.step for row in chosen.values()}
    order = list(METHOD_LABELS)
    methods = {(order.index(r.method) if r.method in order else 99, _cell_key(r, data.rows)[1])
               for r in chosen.values() if r.checkpoint is not None}  # fmt: skip
    data.methods = [name for _, name in sorted(methods)]
    data.benchmarks = list(dict.fromkeys(row.benchmark for row in chosen.values()))
    data.temperatures = sorted({row.temperature for row in chosen.values()})
    names = set(metrics.summarise([]))
    for key, row in chosen.items():
        samples = tuple(store.samples(row))
        summary = {name: getattr(row, name) for name in names}
        data.cells[key] = Cell(summary, row.num_prompts, samples, row.lossless)
    if len(data.benchmarks) > 1:
        _pool(data)


def _pool(data: RunData) -> None:
    """Add the cells over all benchmarks, from the samples; none where a benchmark is missing."""
    for checkpoint in ("", *data.checkpoints):
        for method in (AUTOREGRESSIVE, *data.methods):
            for temperature in data.temperatures:
                parts = [data.cell(checkpoint, method, b, temperature) for b in data.benchmarks]
                samples = [s for part in parts if part for s in part.samples]
                if not all(part and part.samples for part in parts):
                    continue
                baselines = [s.baseline for s in samples if s.baseline is not None]
                if method == AUTOREGRESSIVE:
                    baselines = list(samples)  # type: ignore[arg-type]
                paired = baselines if len(baselines) == len(samples) else None
                data.cells[checkpoint, method, POOLED, temperature] = Cell(
                    metrics.summarise(samples, paired), len(samples), tuple(samples),
                    summarise_lossless(samples),
                )  # fmt: skip


def method_label(method: str) -> str:
    name, _, tree = method.partition(":")
    return METHOD_LABELS.get(name, name) + (f", {tree}" if tree else "")


def checkpoint_title(data: RunData, checkpoint: str) -> str:
    """A column's head, as in the paper: "12000 step"."""
    step = data.steps.get(checkpoint)
    return checkpoint if step is None else f"{step} step"


def _cell_key(row: ResultRow, rows: Sequence[ResultRow]) -> CellKey:
    trees = {r.tree.name for r in rows if r.method == row.method and r.tree is not None}
    suffix = f":{row.tree.name}" if row.tree is not None and len(trees) > 1 else ""
    return _checkpoint(row), row.method + suffix, row.benchmark, row.temperature


def _checkpoint(row: ResultRow) -> str:
    if row.checkpoint is None:
        return ""
    return Path(row.checkpoint).name if row.step is None else f"step-{row.step:08d}"


def _read_curves(path: Path, notes: list[str]) -> dict[str, list[tuple[float, float]]]:
    """Every numeric column against `step`; gaps and words are left out."""
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


def _read_command(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise BadData(f"{path} is no JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _number(text: Any) -> float | None:
    try:
        value = float(text)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None
