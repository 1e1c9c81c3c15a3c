"""Make the papers' tables from rows of `eval_spec.py` and `compare.py`.

A builder gets the folder of the rows and the paper's table, heads first. It returns all lines of
ours, and the rows that their numbers come from, None where one is missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from stree.drafters import SiblingSampling
from stree.drafters.names import DrafterName
from stree.tree_policy.names import BANDIT, UCB
from stree_pipelines.evaluation.answering.stalls import waiting_share
from stree_pipelines.evaluation.plan import AUTOREGRESSIVE, CHAIN, TREE
from stree_pipelines.evaluation.records import ResultRow
from stree_pipelines.evaluation.result_store import RESULTS_NAME, ResultStore
from stree_pipelines.reports.settings import require_one_ending
from stree_pipelines.reports.tables.answer_notes import doubts, endings
from stree_pipelines.reports.tables.tables import MISSING, Table, figure

BENCHMARKS = {"mt_bench": "MT-Bench", "humaneval": "HumanEval", "gsm8k": "GSM-8K"}
TUNED_CHAIN = "tuned chain"  # an arm of configs/compare/paper-speeds.yaml
LABELS = {AUTOREGRESSIVE: "Autoregressive", CHAIN: "Vanilla SD", TREE: "STree"}
BEAM_SEARCH = "beam-3-4"  # M = 3, N = 4
ALL_BEAMS = "beam-3-4-31"  # the same beams with all their children, of rows older than `beam-3-4`
OURS = "ours"
WAITED_NOTE = "Speed-ups of this table are over plain decoding without its waiting."
BATCHES_NOTE = (
    "Speed-ups with one sequence are over plain decoding without its waiting; with more sequences "
    "the waiting is not known, and plain decoding's times include it."
)
DYSPEC_SETS = {  # the paper's names of data sets
    "GSM8k": "gsm8k", "MT-Bench": "mt_bench", "C4": "c4", "OWT": "openwebtext",
    "CNN": "cnn_dailymail",
}

Cells = Sequence[str]
Rows = Iterable[ResultRow | dict[str, Any] | None]
Builder = Callable[[Path, Sequence[Cells]], tuple[list[Cells], Rows]]


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


def made(title: str, lines: Iterable[Cells], used: Rows, num_left: int = 1) -> Made:
    """Make the table, given all rows that it took numbers from."""
    there = [row for row in used if row is not None]
    results = [row for row in there if isinstance(row, ResultRow)]
    require_one_ending(results, title)
    table = Table(title, tuple(map(tuple, lines)), num_left)
    environments = tuple(dict.fromkeys(map(_environment, there)))
    return Made(table, environments, _answered(results) if results else "", tuple(results))


def with_notes(made: Made, folder: Path) -> Made:
    """Add below a table how its answers ended, and which of them the machine held up."""
    if not made.results:
        return made
    store = _store(folder, (folder / RESULTS_NAME).stat().st_mtime_ns)
    measured = {row.samples: row for row in store.results()}
    samples = {row.samples: store.samples(measured[row.samples]) for row in made.results}
    every = [sample for rows in samples.values() for sample in rows]
    reasons = (each[0].upper() + each[1:] for each in doubts(samples))  # cells have no marks
    note = " ".join([*endings({"": every}), *reasons])
    if any(map(_waiting, measured.values())):
        in_batches = any(row.batch_size > 1 for row in made.results)
        note += f" {BATCHES_NOTE if in_batches else WAITED_NOTE}"
    return replace(made, table=replace(made.table, note=note))


@lru_cache(maxsize=8)
def _store(folder: Path, stamp: int) -> ResultStore:
    """Open a folder whose rows were written at that time; many tables are of one folder."""
    return ResultStore(folder)


def of_paper(lines: Iterable[Cells]) -> list[Cells]:
    """Return the paper's lines, labelled so."""
    return [(f"{name}, paper", *cells) for name, *cells in lines]


# From rows of `eval_spec.py`


def speeds(folder: Path, paper: Sequence[Cells]) -> tuple[list[Cells], Rows]:
    """Build STree's Tables 3 and 7, of the drafter trained longest.

    Where the rows have a tuned chain, a line of ours follows the tree's. Each temperature ends with
    the tree's speeds and τ divided by the chain's.
    """
    head, *lines_of_paper = paper
    rows, labels = _results(folder), {**LABELS, TUNED_CHAIN: "Tuned chain"}
    last = max((row.step or 0 for row in rows), default=0)
    found = {
        (f"T = {row.temperature:g}, {labels[row.method]}", row.benchmark): row
        for row in rows
        if row.step in (None, last) and row.benchmark in BENCHMARKS and row.method in labels
    }
    lines: list[Cells] = [head]
    for line in lines_of_paper:
        ours = _speeds_and_taus(found, [(line[0], benchmark) for benchmark in BENCHMARKS])
        lines += [*of_paper([line]), (f"{line[0]}, {OURS}", *ours)]
        name = line[0].replace(LABELS[TREE], labels[TUNED_CHAIN])
        if name != line[0] and any(key[0] == name for key in found):
            ours = _speeds_and_taus(found, [(name, benchmark) for benchmark in BENCHMARKS])
            lines.append((f"{name}, {OURS}", *ours))
        if name != line[0]:
            lines += _tree_over_chain(lines, line[0])
    return lines, found.values()


def _tree_over_chain(lines: Sequence[Cells], tree: str) -> list[Cells]:
    """Divide the tree's speeds and τ by the chain's, of the paper and of ours."""
    cells_of = {name: cells for name, *cells in lines}
    divided: list[Cells] = []
    for whose in ("paper", OURS):
        chain = cells_of[f"{tree.replace(LABELS[TREE], LABELS[CHAIN])}, {whose}"]
        pairs = list(zip(cells_of[f"{tree}, {whose}"], chain, strict=True))
        ratios = [
            MISSING if MISSING in pair else figure(_number(pair[0]) / _number(pair[1]))
            for pair in pairs
        ]
        divided.append((f"{tree} over {LABELS[CHAIN]}, {whose}", *ratios))
    return divided


def _number(cell: str) -> float:
    """Return the number that a cell begins with."""
    return float(cell.split()[0])


def stree_6(folder: Path, paper: Sequence[Cells]) -> tuple[list[Cells], Rows]:
    rows = [
        row for row in _results(folder)
        if row.step is not None and row.benchmark == "mt_bench" and row.temperature == 1.0
    ]
    found = {(row.step, row.method): row for row in rows}
    steps = sorted({step for step, _ in found if step is not None})
    head, *lines_of_paper = paper
    lines: list[Cells] = [(*head, *(f"{step} step, {OURS}" for step in steps))]
    methods = (CHAIN, CHAIN, TREE, TREE)  # speed and τ of either
    for at, (cells, method) in enumerate(zip(lines_of_paper, methods, strict=True)):
        mine = [speed_and_tau(found.get((step, method)))[at % 2] for step in steps]
        lines.append((*cells, *mine))
    return lines, rows


# From rows of `compare.py`


def stree_8(folder: Path, paper: Sequence[Cells]) -> tuple[list[Cells], Rows]:
    rows = [row for row in arm_rows(folder) if row.benchmark == "mt_bench" and not row.temperature]
    named = {tree_name(row) for row in rows}
    beams = BEAM_SEARCH if BEAM_SEARCH in named else ALL_BEAMS
    kinds = [
        [row for row in rows if row.tree is None],
        *([row for row in rows if is_model(row) and tree_name(row) == tree]
          for tree in ("chain-4", "paper", beams)),
    ]
    return _columns(paper, [_fastest(kind) for kind in kinds])


def stree_4(folder: Path, paper: Sequence[Cells]) -> tuple[list[Cells], Rows]:
    rows = _by_tree(folder, "mt_bench", 1.0, "multi_step")
    trees = ("paper", "stree-b", "stree-c", "stree-d", "stree-e")
    return _columns(paper, [rows.get(tree) for tree in trees])


def _columns(
    paper: Sequence[Cells], picked: Sequence[ResultRow | None]
) -> tuple[list[Cells], Rows]:
    """Put our speeds and τ below the paper's, which are its last two lines; a row has a column."""
    lines = list(paper[:-2])
    for line, ours in zip(paper[-2:], zip(*map(speed_and_tau, picked), strict=True), strict=True):
        lines += [*of_paper([line]), (f"{line[0]}, {OURS}", *ours)]
    return lines, picked


def stree_figure_4(folder: Path, paper: Sequence[Cells]) -> tuple[list[Cells], Rows]:
    drawn, top = SiblingSampling.WITHOUT_REPLACEMENT, SiblingSampling.DETERMINISTIC
    ways = {
        "Vanilla SD": ("chain-4", "multi_step", drawn),
        "STree, MSS": ("paper", "multi_step", drawn),
        "STree, naive": ("paper", "naive", drawn), "STree, naive, top k": ("paper", "naive", top),
    }
    found = {
        (name, row.temperature): row
        for name, (*way, siblings) in ways.items()
        for row in arm_rows(folder)
        if row.benchmark == "mt_bench" and is_model(row, siblings)
        and [tree_name(row), row.verifier] == way
    }
    names = [name for name in ways if name in {each for each, _ in found}]
    lines: list[Cells] = [("T", *(f"{name}, {what}" for name in names for what in ("speed", "τ")))]
    for temperature in sorted({temperature for _, temperature in found}):
        cells = _speeds_and_taus(found, [(name, temperature) for name in names])
        lines.append((f"{temperature:g}", *cells))
    return lines, found.values()


def drafters_4(folder: Path, paper: Sequence[Cells]) -> tuple[list[Cells], Rows]:
    """Build the table; our lines have the names of the comparison's arms."""
    rows = [row for row in arm_rows(folder) if not row.temperature and tree_name(row) == "chain-5"]
    lines = [paper[0], *of_paper(paper[1:])]
    for row in rows:
        speed, tau = speed_and_tau(row)
        lines.append((f"Mamba-2, {OURS}", row.method, tau, speed))
    return lines, rows


def drafters_5(folder: Path, paper: Sequence[Cells]) -> tuple[list[Cells], Rows]:
    rows = _by_tree(folder, "mt_bench", 0.0)
    head, *lines_of_paper = paper
    picked = [rows.get(tree) for tree in ("chain-5", "drafters-3-2-2-1-1")]
    lines = [head, *of_paper(lines_of_paper)]
    for (mark, *_), row in zip(lines_of_paper, picked, strict=True):
        speed, tau = speed_and_tau(row)
        latency = figure(row.time_ms.get("draft") if row else None)
        lines.append((f"{mark}, {OURS}", tau, latency, speed))
    return lines, picked


def drafters_6(folder: Path, paper: Sequence[Cells]) -> tuple[list[Cells], Rows]:
    """Build the table; arms whose names begin with "Transformer" have a line of their own."""
    rows = _of_models(folder, "mt_bench", 0.0)
    head, *lines_of_paper = paper
    trees = [f"drafters-{title.strip('()').replace(',', '-')}" for title in head[1:]]
    lines, used = [head, *of_paper(lines_of_paper)], []
    for kind in ("Transformer", "Mamba"):
        of_tree = {
            tree_name(row): row for row in rows
            if row.method.startswith("Transformer") == (kind == "Transformer")
        }
        picked = [of_tree.get(tree) for tree in trees]
        if kind == "Mamba" or any(picked):
            lines.append((f"{kind}, {OURS}", *(speed_and_tau(row)[0] for row in picked)))
        used += picked
    return lines, used


def drafters_7(folder: Path, paper: Sequence[Cells]) -> tuple[list[Cells], Rows]:
    """Build the table; where the paper's search is there, ours has a line of its own."""
    searches = {
        kind for row in arm_rows(folder) for kind in (UCB, BANDIT)
        if (tree_name(row) or "").startswith(kind)
    }
    kinds: dict[str, Callable[[str], bool]] = {
        "×": lambda tree: tree == "drafters-3-3-2-1",
        "✓": lambda tree: tree.startswith(UCB if UCB in searches else BANDIT),
    }
    if {UCB, BANDIT} <= searches:
        kinds["✓ by our bandit"] = lambda tree: tree.startswith(BANDIT)
    benchmarks = ("mt_bench", "alpaca", "humaneval")  # in the order of the paper's heads
    picked = {
        (mark, benchmark): _fastest(
            row for row in _of_models(folder, benchmark, 0.0) if is_kind(tree_name(row) or "")
        )
        for benchmark in benchmarks for mark, is_kind in kinds.items()
    }
    return _with_speeds(paper, kinds, benchmarks, picked)


def snakes_5(folder: Path, paper: Sequence[Cells]) -> tuple[list[Cells], Rows]:
    """Build the table; n-grams that a corpus has, too, have lines of their own."""
    rows = [row for row in arm_rows(folder) if not row.temperature]
    kinds: dict[str, Callable[[ResultRow], bool]] = {"Baseline": lambda row: row.tree is None}
    for name, backtracking in (("Joint", "joint"), ("ARP", "replay")):
        for corpus, drafter in (("", r"ngram[^,]*"), (" of a corpus, too", r"ngram[^,]*,.+")):
            kinds[f"{name} + PNG(6,2){corpus}"] = partial(_is_png, backtracking, drafter)
    kinds = {
        name: is_kind for name, is_kind in kinds.items()
        if "corpus" not in name or any(map(is_kind, rows))
    }
    benchmarks = ("mt_bench", "gsm8k", "humaneval")  # in the order of the paper's heads
    picked = {
        (name, benchmark): _fastest(
            row for row in rows if is_kind(row) and row.benchmark == benchmark
        )
        for name, is_kind in kinds.items() for benchmark in benchmarks
    }
    return _with_speeds(paper, kinds, benchmarks, picked)


def _is_png(backtracking: str, drafter: str, row: ResultRow) -> bool:
    of_ngrams = re.fullmatch(drafter, row.checkpoint or "") and tree_name(row) == "png-6-2"
    return bool(of_ngrams) and row.backtracking == backtracking


def _with_speeds(
    paper: Sequence[Cells], names: Iterable[str], benchmarks: Sequence[str],
    picked: Mapping[tuple[str, str], ResultRow | None],
) -> tuple[list[Cells], Rows]:
    """Put a line of our speeds per name below the paper's table, a column per benchmark."""
    lines = [paper[0], *of_paper(paper[1:])]
    for name in names:
        ours = (speed_and_tau(picked[name, benchmark])[0] for benchmark in benchmarks)
        lines.append((f"{name}, {OURS}", *ours))
    return lines, picked.values()


def dyspec(folder: Path, paper: Sequence[Cells]) -> tuple[list[Cells], Rows]:
    """Build DySpec's Tables 1, 2 and 4; benchmarks that the paper's table has not come last."""
    labels, lines_of_paper = paper[0][:2], paper[1:]
    rows = [row for row in arm_rows(folder) if _drafting(row) is not None]
    arms = sorted({
        (name, row.verifier or "", _drafting(row) or "") for row in rows
        if (name := tree_name(row) or "").startswith(("beam-", "dyspec-", "expand-", "sequoia-"))
    })
    theirs = (f"{name}, paper" for name in paper[0][len(labels):])
    ours = (f"{tree}, {verifier}, {drafting}{OURS}" for tree, verifier, drafting in arms)
    lines: list[Cells] = [(*labels, *theirs, *ours)]
    of_paper = {(DYSPEC_SETS[cells[0]], float(cells[1])) for cells in lines_of_paper}
    others = sorted({(row.benchmark, row.temperature) for row in rows} - of_paper)
    missing = [MISSING] * (len(paper[0]) - len(labels))
    used: list[ResultRow | None] = []
    for cells in [*paper[1:], *((name, f"{warm:g}", *missing) for name, warm in others)]:
        wanted = DYSPEC_SETS.get(cells[0], cells[0]), float(cells[1])
        picked = [
            _fastest(
                row for row in rows
                if (row.benchmark, row.temperature) == wanted
                and (tree_name(row), row.verifier, _drafting(row)) == arm
            )
            for arm in arms
        ]
        used += picked
        lines.append((*cells, *(
            f"{figure(row.speedup)}× ({figure(row.acceptance_length)})" if row else MISSING
            for row in picked
        )))
    return lines, used


def dyspec_figure_4(folder: Path, paper: Sequence[Cells]) -> tuple[list[Cells], Rows]:
    """Build the table: milliseconds of each part of a step, and their shares of it."""
    rows = [row for row in arm_rows(folder) if row.tree is not None and row.time_ms]
    parts = {"draft": "drafting", "verify": "target", "accept": "verification", "host": "host"}
    names = {ours: name for name, ours in DYSPEC_SETS.items()}
    lines: list[Cells] = [("Dataset", "Temp", "Arm", "a step, ms", *parts.values())]
    for row in rows:
        step = sum(row.time_ms.values())
        cells = (
            f"{figure(ms)} ({100 * ms / step:.0f} %)"
            for ms in (row.time_ms.get(part, 0.0) for part in parts)
        )
        place = names.get(row.benchmark, row.benchmark), f"{row.temperature:g}"
        lines.append((*place, row.method, figure(step), *cells))
    return lines, rows


def _results(folder: Path) -> list[ResultRow]:
    return without_waiting(ResultStore(folder).results())


def without_waiting(rows: list[ResultRow]) -> list[ResultRow]:
    """Take plain decoding's waiting, where it is known, out of all speed-ups."""
    return [
        row.model_copy(update={
            name: value * (1 - _waiting(row))
            for name in ("speedup", "speedup_per_tau") if (value := getattr(row, name)) is not None
        })
        for row in rows
    ]


def _waiting(row: ResultRow) -> float:
    """Return the share of its steps that plain decoding waited; 0 where it is not known."""
    return waiting_share(row.baseline_time_ms) or 0.0


def arm_rows(folder: Path) -> list[ResultRow]:
    """Read the rows of a comparison, except those that tuned chains."""
    return [row for row in _results(folder) if not row.method.endswith(f": {tree_name(row)}")]


def _of_models(folder: Path, benchmark: str, temperature: float) -> list[ResultRow]:
    """Read a comparison's rows of a model drafter, by benchmark and temperature."""
    wanted = benchmark, temperature
    return [
        row for row in arm_rows(folder)
        if (row.benchmark, row.temperature) == wanted and is_model(row)
    ]


def _by_tree(
    folder: Path, benchmark: str, temperature: float, verifier: str | None = None
) -> dict[str | None, ResultRow]:
    """Read a model drafter's rows by tree, of any verifier if none is given."""
    rows = _of_models(folder, benchmark, temperature)
    return {tree_name(row): row for row in rows if verifier in (None, row.verifier)}


def tree_name(row: ResultRow) -> str | None:
    return row.tree.name if row.tree else None


def is_model(
    row: ResultRow, siblings: SiblingSampling = SiblingSampling.WITHOUT_REPLACEMENT
) -> bool:
    """Return True when a model alone drafts, with these siblings and the usual backtracking."""
    name = DrafterName.parse(row.checkpoint or "ngram")
    alone = name == DrafterName(name.folder, siblings=siblings)
    return alone and row.backtracking != "joint"


def _drafting(row: ResultRow) -> str | None:
    """Return in words how a model drafts, "" for as usual; None where more than a model does."""
    name = DrafterName.parse(row.checkpoint or "ngram")
    if is_model(row):
        return ""
    if row.backtracking == "joint" or not name.draws or name.context or name.float8:
        return None
    warm = "" if name.temperature is None else f"drawn at {name.temperature:g}, "
    return warm + ("" if name.draws_in_turn else "independent siblings, ")


def _fastest(rows: Iterable[ResultRow]) -> ResultRow | None:
    return max(rows, key=lambda row: row.tokens_per_second or 0.0, default=None)


def speed_and_tau(row: ResultRow | None) -> tuple[str, str]:
    if row is None:
        return MISSING, MISSING
    over = "" if row.method == AUTOREGRESSIVE else f" ({figure(row.speedup)}×)"
    return figure(row.tokens_per_second, form=".1f") + over, figure(row.acceptance_length)


def _speeds_and_taus(found: Mapping[Any, ResultRow], keys: Iterable[Hashable]) -> list[str]:
    return [cell for key in keys for cell in speed_and_tau(found.get(key))]


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
