"""Make the papers' tables in their layout, with our numbers next to theirs.

Ours come from rows of benchmarks and evaluations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from stree.common.errors import NotFound
from stree.drafters import SiblingSampling
from stree.drafters.names import DrafterName
from stree.tree_policy.names import BANDIT
from stree_pipelines.evaluation.plan import AUTOREGRESSIVE, CHAIN, TREE
from stree_pipelines.evaluation.records import ResultRow
from stree_pipelines.evaluation.result_store import RESULTS_NAME, ResultStore
from stree_pipelines.lab.bench_report import read_rows
from stree_pipelines.lab.papers import numbers as theirs
from stree_pipelines.lab.papers.numbers import Cells
from stree_pipelines.reports.run_data import load_run
from stree_pipelines.reports.settings import require_one_ending
from stree_pipelines.reports.tables import by_length
from stree_pipelines.reports.tables.answer_notes import endings, marks
from stree_pipelines.reports.tables.tables import MISSING, Table, figure

BENCHMARKS = {"mt_bench": "MT-Bench", "humaneval": "HumanEval", "gsm8k": "GSM-8K"}
LABELS = {AUTOREGRESSIVE: "Autoregressive", CHAIN: "Vanilla SD", TREE: "STree"}
ALL_BEAMS = "beam-3-4-31"  # M = 3, N = 4, with all that was drawn
OURS = "ours"


@dataclass(frozen=True)
class Made:
    """A table with our numbers, and the environments that made them."""

    table: Table
    environments: tuple[str, ...]
    answered: str = ""  # the drafters and the amount of decoded text, if any
    results: tuple[ResultRow, ...] = ()  # rows of evaluations among those that made them

    def to_markdown(self) -> str:
        ours = "; ".join(self.environments)
        return f"{self.table.to_markdown()}\nOurs: {ours}.{self.answered}\n"


def made(title: str, lines: Iterable[Cells], used: Iterable[Any], num_left: int = 1) -> Made:
    """Make the table, given all rows that it took numbers from."""
    used = list(used)
    environments = dict.fromkeys(map(_environment, used))
    results = [row for row in used if isinstance(row, ResultRow)]
    require_one_ending(results, title)
    return Made(
        Table(title, tuple(lines), num_left), tuple(environments),
        _answered(results) if results else "", tuple(results),
    )


def with_notes(made: Made, folder: Path) -> Made:
    """Add below a table how its answers ended, and which of them the machine held up."""
    if not made.results:
        return made
    stamp = (folder / RESULTS_NAME).stat().st_mtime_ns
    store = _store(folder, stamp)
    samples = {f"{number}": store.samples(row) for number, row in enumerate(made.results)}
    every = [sample for rows in samples.values() for sample in rows]
    note = " ".join([*endings({"": every}), *marks(samples)])
    return replace(made, table=replace(made.table, note=note))


@lru_cache(maxsize=8)
def _store(folder: Path, stamp: int) -> ResultStore:
    """Open a folder whose rows were written at that time; many tables are of one folder."""
    return ResultStore(folder)


# From rows of `eval_spec.py`


def speeds(paper: dict[float, tuple[Cells, ...]], title: str) -> Callable[[Path], Made]:
    """Return a builder in the layout of STree's Tables 3 and 7, of the drafter trained longest."""

    def build(folder: Path) -> Made:
        rows = _results(folder)
        last = max((row.step or 0 for row in rows), default=0)
        found = {
            (row.method, row.benchmark, row.temperature): row
            for row in rows
            if row.step in (None, last) and row.benchmark in BENCHMARKS and row.method in LABELS
        }
        require_rows(found, "evaluation", folder)
        heads = [
            "",
            *(f"{name}, {what}" for name in BENCHMARKS.values() for what in ("speed", "τ")),
        ]
        lines: list[Cells] = [tuple(heads)]
        for temperature, published in paper.items():
            for (method, label), cells in zip(LABELS.items(), published, strict=True):
                assert cells[0] == label
                lines.append((f"T = {temperature:g}, {label}, paper", *cells[1:]))
                mine: list[str] = []
                for benchmark in BENCHMARKS:
                    mine += _speed_and_tau(found.get((method, benchmark, temperature)))
                lines.append((f"T = {temperature:g}, {label}, {OURS}", *mine))
        return made(title, lines, found.values())

    return build


def drafters_3(folder: Path) -> Made:
    """Make the table; our columns are prompt lengths to the nearest 1,024 tokens, also further
    ones."""
    data = load_run(folder) if (folder / RESULTS_NAME).is_file() else None
    rungs = by_length.ladders(data)[:1] if data is not None else []
    require_rows(rungs, "prompts of several lengths", folder)
    assert data is not None
    found = {f"{round(rung.num_tokens / 1024)}k": rung for rung in rungs[0]}
    head, *paper = theirs.DRAFTERS_3
    lengths = [*head[1:], *(length for length in found if length not in (*head, "0k"))]
    lines: list[Cells] = [("Method", *lengths)]
    lines += [
        (f"{name}, paper", *cells, *[MISSING] * (len(lengths) - len(cells)))
        for name, *cells in paper
    ]
    used = {
        (row.method, row.benchmark): row
        for row in data.rows
        if row.temperature == 0 and row.step in (None, data.steps.get(data.last))
        and row.benchmark in {rung.benchmark for rung in found.values()}
    }
    require_rows(used, "prompts of several lengths at T = 0", folder)
    for method, label in LABELS.items():
        cells = []
        for length in lengths:
            row = used.get((method, found[length].benchmark)) if length in found else None
            tau = (
                ""
                if row is None or method == AUTOREGRESSIVE
                else (f" ({figure(row.acceptance_length)})")
            )
            cells.append(figure(row.tokens_per_second if row else None) + tau)
        lines.append((f"{label}, {OURS}", *cells))
    return made("Mamba Drafters, Table 3: tokens/s (τ) by prompt length", lines, used.values())


def stree_6(folder: Path) -> Made:
    rows = [
        row for row in _results(folder)
        if row.step is not None and row.benchmark == "mt_bench" and row.temperature == 1.0
    ]
    found = {(row.step, row.method): row for row in rows}
    require_rows(found, "mt_bench at T = 1", folder)
    steps = sorted({step for step, _ in found if step is not None})
    head, *paper = theirs.STREE_6
    lines: list[Cells] = [(*head, *(f"{step} step, {OURS}" for step in steps))]
    methods = (CHAIN, CHAIN, TREE, TREE)
    for at, (cells, method) in enumerate(zip(paper, methods, strict=True)):
        mine = [_speed_and_tau(found.get((step, method)))[at % 2] for step in steps]
        lines.append((*cells, *mine))
    return made("STree, Table 6: speed and τ against distillation steps", lines, rows)


# From rows of `compare.py`


def stree_8(folder: Path) -> Made:
    rows = [row for row in _arms(folder) if row.benchmark == "mt_bench" and not row.temperature]
    models = [row for row in rows if _is_model(row)]
    picked = [
        _one(row for row in rows if row.tree is None),
        _one(row for row in models if row.tree and row.tree.name == "chain-4"),
        _one(row for row in models if row.tree and row.tree.name == "paper"),
        _one(row for row in models if row.tree and row.tree.name == ALL_BEAMS),
    ]
    used = [row for row in picked if row]
    require_rows(used, "mt_bench at T = 0", folder)
    head, speed, tau = theirs.STREE_8
    mine = [_speed_and_tau(row) for row in picked]
    lines = [
        head, ("Speed, paper", *speed[1:]), (f"Speed, {OURS}", *(each[0] for each in mine)),
        ("τ, paper", *tau[1:]), (f"τ, {OURS}", *(each[1] for each in mine)),
    ]
    return made("STree, Table 8: static and grown trees, greedy", lines, used)


def stree_figure_4(folder: Path) -> Made:
    drawn, top = SiblingSampling.WITHOUT_REPLACEMENT, SiblingSampling.DETERMINISTIC
    ways = {
        "Vanilla SD": ("chain-4", "multi_step", drawn),
        "STree, MSS": ("paper", "multi_step", drawn),
        "STree, naive": ("paper", "naive", drawn), "STree, naive, top k": ("paper", "naive", top),
    }
    found = {
        (name, row.temperature): row
        for name, (*way, siblings) in ways.items()
        for row in _arms(folder)
        if row.benchmark == "mt_bench" and _is_model(row, siblings)
        and [_tree_name(row), row.verifier] == way
    }
    require_rows(found, "mt_bench", folder)
    ways = {name: way for name, way in ways.items() if name in {each for each, _ in found}}
    lines: list[Cells] = [("T", *(f"{name}, {w}" for name in ways for w in ("speed", "τ")))]
    for temperature in sorted({temperature for _, temperature in found}):
        cells = [_speed_and_tau(found.get((name, temperature))) for name in ways]
        lines.append((f"{temperature:g}", *(text for each in cells for text in each)))
    return made("STree, Figure 4: speed and τ against temperature", lines, found.values())


def stree_4(folder: Path) -> Made:
    rows = {_tree_name(row): row for row in _at(folder, "mt_bench", 1.0, "multi_step")}
    trees = ("paper", "stree-b", "stree-c", "stree-d", "stree-e")
    picked = [rows.get(tree) for tree in trees]
    used = [row for row in picked if row]
    require_rows(used, "mt_bench at T = 1", folder)
    *heads, speed, tau = theirs.STREE_4
    mine = [_speed_and_tau(row) for row in picked]
    lines = [
        *heads, ("Speed, paper", *speed[1:]), (f"Speed, {OURS}", *(each[0] for each in mine)),
        ("τ, paper", *tau[1:]), (f"τ, {OURS}", *(each[1] for each in mine)),
    ]
    return made("STree, Table 4: static trees at T = 1", lines, used)


def drafters_4(folder: Path) -> Made:
    """Make the table; our lines have the names of the comparison's arms."""
    rows = [row for row in _arms(folder) if not row.temperature and _tree_name(row) == "chain-5"]
    require_rows(rows, "chain-5 at T = 0", folder)
    head, *paper = theirs.DRAFTERS_4
    lines = [head, *((f"{name}, paper", *cells) for name, *cells in paper)]
    for row in rows:
        speed, tau = _speed_and_tau(row)
        lines.append((f"Mamba-2, {OURS}", row.method, tau, speed))
    title = "Mamba Drafters, Table 4: a drafter of another tokenizer, T = 0"
    return made(title, lines, rows, 2)


def drafters_5(folder: Path) -> Made:
    rows = {_tree_name(row): row for row in _at(folder, "mt_bench", 0.0)}
    used, ours = [], []
    head, *paper = theirs.DRAFTERS_5
    for (mark, *_), tree in zip(paper, ("chain-5", "drafters-3-2-2-1-1"), strict=True):
        row = rows.get(tree)
        used += [row] if row else []
        speed, tau = _speed_and_tau(row)
        ours.append(
            (f"{mark}, {OURS}", tau, figure(row.time_ms.get("draft") if row else None), speed)
        )
    require_rows(used, "mt_bench at T = 0", folder)
    lines = [head, *((f"{mark}, paper", *cells) for mark, *cells in paper), *ours]
    return made("Mamba Drafters, Table 5: a chain and a tree on MT-Bench", lines, used)


def drafters_6(folder: Path) -> Made:
    rows = {_tree_name(row): row for row in _at(folder, "mt_bench", 0.0)}
    head, *paper = theirs.DRAFTERS_6
    trees = [f"drafters-{title.strip('()').replace(',', '-')}" for title in head[1:]]
    used = [rows[tree] for tree in trees if tree in rows]
    require_rows(used, "mt_bench at T = 0", folder)
    mine = (f"Mamba, {OURS}", *(_speed_and_tau(rows.get(tree))[0] for tree in trees))
    lines = [head, *((f"{name}, paper", *cells) for name, *cells in paper), mine]
    return made("Mamba Drafters, Table 6: tokens/s by tree", lines, used)


def drafters_7(folder: Path) -> Made:
    used, columns = [], []
    head, *paper = theirs.DRAFTERS_7
    for benchmark in ("mt_bench", "humaneval"):
        rows = _at(folder, benchmark, 0.0)
        fixed = _one(row for row in rows if _tree_name(row) == "drafters-3-3-2-1")
        chosen = _one(row for row in rows if (_tree_name(row) or "").startswith(BANDIT))
        used += [row for row in (fixed, chosen) if row]
        columns.append([_speed_and_tau(row)[0] for row in (fixed, chosen)])
    require_rows(used, "T = 0", folder)
    lines = [head, *((f"{mark}, paper", *cells) for mark, *cells in paper)]
    lines += [
        (f"{mark}, {OURS}", *(column[at] for column in columns))
        for at, (mark, *_) in enumerate(paper)
    ]
    return made("Mamba Drafters, Table 7: tokens/s with a fixed tree and a chosen one", lines, used)


def snakes_5(folder: Path) -> Made:
    rows = [row for row in _arms(folder) if not row.temperature]
    head, *paper = theirs.SNAKES_5
    order = {name: key for key, name in BENCHMARKS.items()}
    used, lines = [], [head]
    lines += [(f"{name}, paper", *cells) for name, *cells in paper]
    ours = {
        "Baseline": lambda row: row.tree is None,
        "Joint + PNG(6,2)": lambda row: _is_png(row) and row.backtracking == "joint",
        "ARP + PNG(6,2)": lambda row: _is_png(row) and row.backtracking == "replay",
    }
    for name, fits in ours.items():
        picked = [
            _one(row for row in rows if fits(row) and row.benchmark == order[title])
            for title in head[1:]
        ]
        used += [row for row in picked if row]
        lines.append((f"{name}, {OURS}", *(_speed_and_tau(row)[0] for row in picked)))
    require_rows(used, "T = 0", folder)
    return made("Snakes and Ladders, Table 5: tokens/s with n-grams", lines, used)


def dyspec(paper: tuple[Cells, ...], title: str) -> Callable[[Path], Made]:
    """Return a builder in the layout of DySpec's Tables 1 and 2, for the data sets that we have."""

    def build(folder: Path) -> Made:
        keys = {"GSM8k": "gsm8k", "MT-Bench": "mt_bench"}
        rows = [row for row in _arms(folder) if _is_model(row) and row.tree]
        grown = ("beam-", "dyspec-", "expand-")
        arms = sorted({
            (row.tree.name, row.verifier or "") for row in rows
            if row.tree and row.tree.name.startswith(grown)
        })
        used: list[ResultRow] = []
        lines: list[Cells] = [
            ("Dataset", "Temp", "DySpec, paper", "Sequoia, paper", "SpecInfer, paper",
             *(f"{tree}, {verifier}, {OURS}" for tree, verifier in arms))
        ]
        for data, temperature, *cells in paper:
            mine = []
            for tree, verifier in arms:
                row = _one(
                    row for row in rows
                    if row.tree and row.tree.name == tree and row.benchmark == keys[data]
                    and row.verifier == verifier and row.temperature == float(temperature)
                )
                used += [row] if row else []
                mine.append(
                    f"{figure(row.speedup)}× ({figure(row.acceptance_length)})" if row else MISSING
                )
            lines.append((data, temperature, *cells, *mine))
        require_rows(used, "trees that grow", folder)
        return made(title, lines, used, 2)

    return build


def bench_rows(folder: Path, **wanted: Any) -> list[dict[str, Any]]:
    """Read the benchmark rows that have these values."""
    rows = read_rows(folder) if folder.is_dir() else []
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def _results(folder: Path) -> list[ResultRow]:
    return ResultStore(folder).results()


def _arms(folder: Path) -> list[ResultRow]:
    """Read the rows of a comparison, except those that tuned chains."""
    return [row for row in _results(folder) if not row.method.endswith(f": {_tree_name(row)}")]


def _at(
    folder: Path, benchmark: str, temperature: float, verifier: str | None = None
) -> list[ResultRow]:
    """Read a comparison's rows of a model drafter, by benchmark, temperature and any given
    verifier."""
    return [
        row for row in _arms(folder)
        if (row.benchmark, row.temperature) == (benchmark, temperature)
        and _is_model(row) and verifier in (None, row.verifier)
    ]


def _tree_name(row: ResultRow) -> str | None:
    return row.tree.name if row.tree else None


def _is_model(
    row: ResultRow, siblings: SiblingSampling = SiblingSampling.WITHOUT_REPLACEMENT
) -> bool:
    """Return True when a model alone drafts, with these siblings and the usual backtracking."""
    name = DrafterName.parse(row.checkpoint or "ngram")
    alone = name == DrafterName(name.folder, siblings=siblings)
    return alone and row.backtracking != "joint"


def _is_png(row: ResultRow) -> bool:
    return (row.checkpoint or "").startswith("ngram") and _tree_name(row) == "png-6-2"


def _one(rows: Iterable[ResultRow]) -> ResultRow | None:
    """Return the fastest row; None without any."""
    return max(rows, key=lambda row: row.tokens_per_second or 0.0, default=None)


def _speed_and_tau(row: ResultRow | None) -> tuple[str, str]:
    if row is None:
        return MISSING, MISSING
    over = "" if row.method == AUTOREGRESSIVE else f" ({figure(row.speedup)}×)"
    return figure(row.tokens_per_second, form=".1f") + over, figure(row.acceptance_length)


def require_rows(found: Sequence[Any] | Any, what: str, folder: Path) -> None:
    if not found:
        raise NotFound(
            f"{folder} has no rows of {what}: run the command that --list names, or give its "
            f"folder as --rows (*.jsonl of a benchmark, {RESULTS_NAME} of an evaluation)"
        )


def _environment(row: Any) -> str:
    """Format machine and commit of a row of either kind."""
    known = row["environment"] if isinstance(row, dict) else row.environment.model_dump()
    commit, _, dirty = (known["git_sha"] or "unknown").partition("-")
    return f"{known['device']}, commit {commit[:7]}{dirty and f' ({dirty})'}"


def _answered(rows: Sequence[ResultRow]) -> str:
    """Format the drafters, the number of prompts and the most tokens of these rows."""
    runs = dict.fromkeys(
        re.sub(r"/drafter/[^+/]+", "", row.checkpoint) for row in rows if row.checkpoint
    )
    prompts, tokens = (
        " or ".join(map(str, sorted({getattr(row, name) for row in rows})))
        for name in ("num_prompts", "max_new_tokens")
    )
    by = f" Drafted by {', '.join(f'`{run}`' for run in runs)};" if runs else ""
    return f"{by} {prompts} prompts of each, up to {tokens} new tokens."
