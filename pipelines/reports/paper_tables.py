"""The papers' tables and figures in their layout, with our numbers beside theirs, from rows of
benchmarks and evaluations; and which of them cannot be made, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stree.errors import NotFound
from stree.growths import BANDIT
from stree.tree import balanced
from stree_pipelines.bench_report import by_length, called, read_rows
from stree_pipelines.evaluation.plan import AUTOREGRESSIVE, CHAIN, TREE
from stree_pipelines.evaluation.records import RESULTS_NAME, ResultRow, ResultStore
from stree_pipelines.reports import by_length as lengths_of_prompts
from stree_pipelines.reports import paper_numbers as theirs
from stree_pipelines.reports.paper_numbers import Cells
from stree_pipelines.reports.run_data import load_run
from stree_pipelines.reports.tables import MISSING, Table, figure

BENCHMARKS = {"mt_bench": "MT-Bench", "humaneval": "HumanEval", "gsm8k": "GSM-8K"}
LABELS = {AUTOREGRESSIVE: "Autoregressive", CHAIN: "Vanilla SD", TREE: "STree"}
CHAIN_NODES, TREE_NODES = 5, 13  # of the paper's chain and tree, roots included
OURS = "ours"


@dataclass(frozen=True)
class Made:
    """A table with ours in it, and the environments that ours are from."""

    table: Table
    environments: tuple[str, ...]

    def to_markdown(self) -> str:
        return self.table.to_markdown() + "\nOurs: " + "; ".join(self.environments) + ".\n"


def made(title: str, lines: Iterable[Cells], used: Iterable[Any], num_left: int = 1) -> Made:
    """A table, given all rows that it took numbers from."""
    environments = dict.fromkeys(map(_environment, used))
    return Made(Table(title, tuple(lines), num_left), tuple(environments))


# From rows of `bench_decode.py` and `bench_kernels.py`


def stree_1(folder: Path) -> Made:
    rows = bench_rows(folder, what="target call", context=1024)
    used, columns = [], []
    for shape, name in (("mamba2-2.7b", "Mamba2-2.7B"), ("8b", "MambaInLlama-8B's shape")):
        calls = {row["num_nodes"]: row for row in rows if row["shape"] == shape}
        if not {CHAIN_NODES, TREE_NODES} <= calls.keys():
            continue
        tree, chain = calls[TREE_NODES], calls[CHAIN_NODES]
        used += [tree, chain]
        columns.append((
            f"{name}, {OURS}", f"{_ms(tree, 'us_step'):.2f}",
            *(f"{_ms(call, 'us_tree'):.2f} ({call['over_step']:.2f}x)" for call in (tree, chain)),
        ))  # fmt: skip
    require_rows(columns, "target call", folder)
    lines = [
        (*paper, *(column[at] for column in columns)) for at, paper in enumerate(theirs.STREE_1)
    ]
    return made("STree, Table 1: latency of a forward pass in ms", lines, used)


def stree_figure_2(folder: Path) -> Made:
    rows = bench_rows(folder, what="target call", context=1024)
    by_shape: dict[str, dict[int, Any]] = {}
    for row in rows:
        by_shape.setdefault(row["shape"], {})[row["num_nodes"]] = row
    calls = {shape: each for shape, each in by_shape.items() if CHAIN_NODES in each}
    require_rows(calls, "target call", folder)
    heads = [f"{shape}, {what}" for shape in calls for what in ("ms", "τ that it needs")]
    lines: list[Cells] = [("N", *heads)]
    for count in sorted({count for each in calls.values() for count in each}):
        cells = []
        for each in calls.values():
            call = each.get(count)
            needed = call and _ms(call, "us_tree") / _ms(each[CHAIN_NODES], "us_tree")
            cells += [figure(call and _ms(call, "us_tree")), figure(needed, unit="×")]
        lines.append((str(count), *cells))
    title = "STree, Figure 2: a call against nodes N, and the τ that it needs over N = 5"
    return made(title, lines, rows)


def stree_figure_3(folder: Path) -> Made:
    rows = {row["num_nodes"]: row for row in bench_rows(folder, what="unrolled")}
    ways = {"Packed": ("us_tree",), "Unrolled": ("us_unrolled_multi_step", "us_unrolled")}
    lines: list[Cells] = [(
        "Tree depth", "Methods", "#. of States", OURS, "Tokens Computed", OURS, "Runtime in ms",
        OURS,
    )]  # fmt: skip
    used = []
    for depth, way, *numbers in theirs.STREE_FIGURE_3:
        tree = balanced([2] * (int(depth) - 1))
        leaves = 1 if way == "Packed" else len(tree.levels[-1])
        tokens = tree.num_nodes if way == "Packed" else leaves * int(depth)
        row = rows.get(tree.num_nodes)
        key = next((key for key in ways[way] if row and key in row), None)
        if row and key:
            used.append(row)
        lines.append((
            depth, way, numbers[0], str(leaves), numbers[1], str(tokens),
            theirs.STREE_FIGURE_3_MS.get((depth, way), MISSING),
            figure(_ms(row, key) if row and key else None),
        ))  # fmt: skip
    require_rows(used, "unrolled", folder)
    return made("STree, Figure 3: full binary trees, packed and unrolled", lines, used, 2)


def snakes_1(folder: Path) -> Made:
    rows = {
        row["num_nodes"]: row for row in bench_rows(folder, op="mamba_tree") if row["shape"] == "8b"
    }
    keys = ("us_mamba_ssm_updates", "us_multi_step", "us_fused")
    ours = {count: row for count, row in rows.items() if count <= 16 and set(keys) <= row.keys()}
    require_rows(ours, "mamba_tree", folder)
    lines: list[Cells] = [(
        "seqlen", "SSU", "CS", "Ours", f"SSU, {OURS}", f"multi-step, {OURS}",
        f"tree scan with conv and replay, {OURS}",
    )]  # fmt: skip
    paper = {int(cells[0]): cells[1:] for cells in theirs.SNAKES_1}
    for count in sorted(paper.keys() | ours.keys()):
        row = ours.get(count)
        lines.append((
            str(count), *paper.get(count, (MISSING,) * 3),
            *(figure(_ms(row, key) if row else None, form=".4f") for key in keys),
        ))  # fmt: skip
    title = "Snakes and Ladders, Table 1, batch size 1: state update in ms"
    return made(title, lines, ours.values())


def snakes_3(folder: Path) -> Made:
    rows = [row for row in bench_rows(folder, what="joint") if row["num_rows"] == 1]
    require_rows(rows, "joint", folder)
    lines: list[Cells] = [("# of spec.", "ARP", "Joint")]
    lines += [(f"{name}, paper", *cells) for name, *cells in theirs.SNAKES_3]
    for row in rows:
        times = (figure(_ms(row, key)) for key in ("us_replay", "us_joint"))
        lines.append((f"{row['num_nodes'] - 1} ({row['shape']}, {row['tree']}), {OURS}", *times))
    title = "Snakes and Ladders, Table 3, one draft: ms of a step's target call"
    return made(title, lines, rows)


def snakes_figure_4(folder: Path) -> Made:
    rows = bench_rows(folder, what="serve")
    require_rows(rows, "serve", folder)
    ways = ("plain", "tree", "modes")
    heads = ("batch size", "τ", *(f"tokens/s, {way}" for way in ways), "tree", "modes")
    lines: list[Cells] = [heads]
    for row in sorted(rows, key=lambda row: (row["tau"], row["num_rows"])):
        lines.append((
            str(row["num_rows"]), f"{row['tau']:g}",
            *(f"{row[f'tokens_per_second_{way}']:.0f}" for way in ways),
            *(figure(row[f"speedup_{way}"], unit="×") for way in ways[1:]),
        ))  # fmt: skip
    return made("Snakes and Ladders, Figure 4: throughput against batch size", lines, rows)


def drafters_figure_1(folder: Path) -> Made:
    rows = bench_rows(folder, what="draft_lengths")
    require_rows(rows, "draft_lengths", folder)
    contexts = sorted({row["context"] for row in rows})
    lines: list[Cells] = [("", "", *(f"{context / 1024:g}k" for context in contexts))]
    for (_, drafter, nodes, _), group in by_length(rows).items():
        found = {row["context"]: row for row in group}
        name = f"{called(drafter)}, {nodes} a level, {OURS}"
        for what, key, unit, form in (
            ("µs a level", "us_level", 1, ".0f"), ("cache, MiB", "cache_bytes", 2**20, ".2f"),
        ):  # fmt: skip
            cells = (found[each][key] / unit if each in found else None for each in contexts)
            lines.append((name, what, *(figure(cell, form=form) for cell in cells)))
    title = "Mamba Drafters, Figure 1: drafting time and memory by context"
    return made(title, lines, rows, 2)


# From rows of `eval_spec.py`


def speeds(paper: dict[float, tuple[Cells, ...]], title: str) -> Callable[[Path], Made]:
    """The layout of STree's Tables 3 and 7, with ours of the drafter that was trained longest."""

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
    """Columns of ours are prompt lengths to the nearest 1,024 tokens, the paper's and further
    ones."""
    data = load_run(folder) if (folder / RESULTS_NAME).is_file() else None
    rungs = lengths_of_prompts.ladders(data)[:1] if data is not None else []
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
    }  # fmt: skip
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
    ]  # fmt: skip
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
        _one(row for row in models if row.tree and row.tree.name.startswith("beam-")),
    ]
    used = [row for row in picked if row]
    require_rows(used, "mt_bench at T = 0", folder)
    head, speed, tau = theirs.STREE_8
    mine = [_speed_and_tau(row) for row in picked]
    lines = [
        head, ("Speed, paper", *speed[1:]), (f"Speed, {OURS}", *(each[0] for each in mine)),
        ("τ, paper", *tau[1:]), (f"τ, {OURS}", *(each[1] for each in mine)),
    ]  # fmt: skip
    return made("STree, Table 8: static and grown trees, greedy", lines, used)


def stree_figure_4(folder: Path) -> Made:
    ways = {
        "Vanilla SD": ("chain-4", "multi_step"), "STree, MSS": ("paper", "multi_step"),
        "STree, naive": ("paper", "naive"),
    }  # fmt: skip
    rows = [row for row in _arms(folder) if row.benchmark == "mt_bench" and _is_model(row)]
    found = {
        (name, row.temperature): row
        for name, way in ways.items()
        for row in rows
        if row.tree and (row.tree.name, row.verifier) == way
    }
    require_rows(found, "mt_bench", folder)
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
    ]  # fmt: skip
    return made("STree, Table 4: static trees at T = 1", lines, used)


def drafters_4(folder: Path) -> Made:
    """Ours are called as the comparison's arms are."""
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
    mine = (f"Mamba-2, {OURS}", *(_speed_and_tau(rows.get(tree))[0] for tree in trees))
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
    """The layout of DySpec's Tables 1 and 2, of the data sets that we have, too."""

    def build(folder: Path) -> Made:
        keys = {"GSM8k": "gsm8k", "MT-Bench": "mt_bench"}
        rows = [row for row in _arms(folder) if _is_model(row) and row.tree]
        grown = ("beam-", "dyspec-", "expand-")
        arms = sorted({
            (row.tree.name, row.verifier or "") for row in rows
            if row.tree and row.tree.name.startswith(grown)
        })  # fmt: skip
        used: list[ResultRow] = []
        lines: list[Cells] = [
            (*theirs.DYSPEC_HEAD, *(f"{tree}, {verifier}, {OURS}" for tree, verifier in arms))
        ]
        for data, temperature, *cells in paper:
            mine = []
            for tree, verifier in arms:
                row = _one(
                    row for row in rows
                    if row.tree and row.tree.name == tree and row.benchmark == keys[data]
                    and row.verifier == verifier and row.temperature == float(temperature)
                )  # fmt: skip
                used += [row] if row else []
                mine.append(
                    f"{figure(row.speedup)}× ({figure(row.acceptance_length)})" if row else MISSING
                )
            lines.append((data, temperature, *cells, *mine))
        require_rows(used, "trees that grow", folder)
        return made(title, lines, used, 2)

    return build


def bench_rows(folder: Path, **wanted: Any) -> list[dict[str, Any]]:
    """Benchmark rows that have these values."""
    rows = read_rows(folder) if folder.is_dir() else []
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def _results(folder: Path) -> list[ResultRow]:
    return ResultStore(folder).results()


def _arms(folder: Path) -> list[ResultRow]:
    """Rows of a comparison, but for those that chains were tuned by."""
    return [row for row in _results(folder) if not row.method.endswith(f": {_tree_name(row)}")]


def _at(
    folder: Path, benchmark: str, temperature: float, verifier: str | None = None
) -> list[ResultRow]:
    """Rows of a comparison where a model drafts, there and (if it matters) by this verifier."""
    return [
        row for row in _arms(folder)
        if (row.benchmark, row.temperature) == (benchmark, temperature)
        and _is_model(row) and verifier in (None, row.verifier)
    ]  # fmt: skip


def _tree_name(row: ResultRow) -> str | None:
    return row.tree.name if row.tree else None


def _is_model(row: ResultRow) -> bool:
    """Whether a model alone drafts, and nothing but the row's verifier is out of the ordinary."""
    return "ngram" not in (row.checkpoint or "ngram") and row.backtracking != "joint"


def _is_png(row: ResultRow) -> bool:
    return (row.checkpoint or "").startswith("ngram") and _tree_name(row) == "png-6-2"


def _one(rows: Iterable[ResultRow]) -> ResultRow | None:
    """The fastest."""
    return max(rows, key=lambda row: row.tokens_per_second or 0.0, default=None)


def _speed_and_tau(row: ResultRow | None) -> tuple[str, str]:
    if row is None:
        return MISSING, MISSING
    over = "" if row.method == AUTOREGRESSIVE else f" ({figure(row.speedup)}×)"
    return figure(row.tokens_per_second, form=".1f") + over, figure(row.acceptance_length)


def _ms(row: dict[str, Any], key: str) -> float:
    value: float = row[key]["median"] / 1000
    return value


def require_rows(found: Sequence[Any] | Any, what: str, folder: Path) -> None:
    if not found:
        raise NotFound(
            f"{folder} has no rows of {what}: run the command that --list names, or give its "
            f"folder as --rows (*.jsonl of a benchmark, {RESULTS_NAME} of an evaluation)"
        )


def _environment(row: Any) -> str:
    """Machine, commit and command, of a row of either kind."""
    known = row["environment"] if isinstance(row, dict) else row.environment.model_dump()
    commit, _, dirty = (known["git_sha"] or "unknown").partition("-")
    return f"{known['device']}, commit {commit[:7]}{dirty and f' ({dirty})'}"
