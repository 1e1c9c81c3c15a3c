"""Table 6 of the STree paper from a run's rows, and the advice that follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from stree import metrics
from stree_pipelines.evaluation.plan import AUTOREGRESSIVE, CHAIN, TREE
from stree_pipelines.evaluation.records import SampleRow
from stree_pipelines.reports.run_data import Cell, RunData, checkpoint_title, method_label

MISSING = "–"


@dataclass(frozen=True)
class Table:
    """Cells as text; the first row holds the column heads, the first column the row heads."""

    title: str
    rows: tuple[tuple[str, ...], ...]

    def to_markdown(self) -> str:
        """A Markdown table whose columns also line up as plain text."""
        widths = [max(len(row[column]) for row in self.rows) for column in range(len(self.rows[0]))]
        lines = [
            "| " + " | ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)) + " |"
            for row in self.rows
        ]
        first, *others = widths
        rules = [":" + "-" * (first + 1), *("-" * (width + 1) + ":" for width in others)]
        lines.insert(1, "|" + "|".join(rules) + "|")
        return f"**{self.title}**\n\n" + "\n".join(lines) + "\n"


def table6(data: RunData, benchmark: str, temperature: float) -> Table:
    """Speed and τ against distillation steps, in the paper's layout.

    A speed's bracket is the interval of its speedup, a τ's that of τ. The autoregressive speed of
    a column is the one that its speedups are relative to: measured in the same process. With a
    chain and a tree a last row has the difference of their τ, over the same prompts.
    """
    heads = ("", *(checkpoint_title(data, checkpoint) for checkpoint in data.checkpoints))
    baseline = [_baseline_speed(data, c, benchmark, temperature) for c in data.checkpoints]
    rows = [heads, (f"Speed ({method_label(AUTOREGRESSIVE)})", *map(_number, baseline))]
    for method in data.methods:
        cells = [data.cell(c, method, benchmark, temperature) for c in data.checkpoints]
        label = method_label(method)
        rows.append((f"Speed ({label})", *map(_speed, cells)))
        rows.append((f"τ ({label})", *map(_tau, cells)))
    rows += _gains(data, benchmark, temperature)
    prompts = {
        cell.num_prompts
        for key, cell in data.cells.items()
        if key[2] == benchmark and key[3] == temperature
    }
    count = "/".join(map(str, sorted(prompts)))
    title = f"{benchmark}, T = {temperature:g} ({count} prompts)"
    return Table(title, tuple(rows))


def table6_markdown(data: RunData) -> str:
    """All tables, the pooled ones first, with what the numbers mean."""
    intro = (
        "# Speed and acceptance length against distillation steps\n\n"
        "Layout of the STree paper's Table 6. Speed: new tokens per second of decoding, with its "
        "ratio to autoregressive decoding of the same prompts in the same process. τ: new tokens "
        "per target call, bonus included. Brackets: 95 % bootstrap intervals over prompts (of the "
        "ratio, paired, behind a speed; of τ behind a τ; of the difference, paired, behind a "
        "gain).\n"
    )
    tables = [
        table6(data, benchmark, temperature).to_markdown()
        for benchmark in data.scopes
        for temperature in data.temperatures
    ]
    return "\n".join([intro, *tables])


class Advice(NamedTuple):
    """What to decode with, and why. headline is empty when nothing can be compared; fastest is the
    fastest speculation, method what to use: that, a simpler one, or autoregressive decoding."""

    headline: str
    reason: str
    method: str = ""
    fastest: str = ""


def advise(data: RunData, temperature: float) -> Advice:
    """What to use at this temperature, judged at the last checkpoint over all benchmarks."""
    scope = data.scopes[0]
    cells = {m: data.cell(data.last, m, scope, temperature) for m in data.methods}
    timed = {m: cell for m, cell in cells.items() if cell and cell["speedup"]}
    if not timed:
        return Advice("", "No autoregressive baseline was measured, so speeds can't be compared.")
    best = max(timed, key=lambda method: timed[method]["speedup"])
    cell = timed[best]
    gain, interval = cell["speedup"], cell.interval("speedup")
    times = f"{gain:.2f}× plain decoding{_bracket(interval)}, τ {cell['acceptance_length']:.2f}"
    plain = "Use plain decoding"
    if gain <= 1:
        reason = f"The fastest speculation, {method_label(best)}, is {times}.{_costliest(cell)}"
        return Advice(plain, reason, AUTOREGRESSIVE, best)
    if interval and interval[0] <= 1:
        reason = f"{method_label(best)} is {times}: the interval includes 1, so its gain isn't "
        return Advice(plain, f"{reason}certain.{_costliest(cell)}", AUTOREGRESSIVE, best)
    rivals = [method for method in timed if method != best]
    comparison, tie = "", ""
    if rivals:
        rival = max(rivals, key=lambda method: timed[method]["speedup"])
        ratio = gain / timed[rival]["speedup"]
        between = _ratio_interval(cell, timed[rival])
        if between and between[0] <= 1 <= between[1]:
            tie = rival
        comparison = f" and {ratio:.2f}× {method_label(rival)}{_bracket(between)}"
    if tie:
        simpler = next((m for m in (best, tie) if m.startswith(CHAIN)), best)
        reason = f"{method_label(best)} is {times}{comparison}: they can't be told apart, and a "
        reason += "chain verifies fewer tokens."
        return Advice(f"Use the {_noun(simpler)}", reason, simpler, best)
    reason = f"{method_label(best)} is {times}{comparison}."
    return Advice(f"Use the {_noun(best)}", reason, best, best)


def _costliest(cell: Cell) -> str:
    """Where a call's time goes most: what to make faster."""
    parts = cell["time_ms"]
    if not parts:
        return ""
    part = max(parts, key=lambda name: parts[name])
    return f" Most of a call, {100 * parts[part] / sum(parts.values()):.0f} %, is {part}."


def _noun(method: str) -> str:
    if method.startswith(CHAIN):
        return "chain"
    tree = method.partition(":")[2]
    return f"tree {tree}" if tree else "tree"


def _gains(data: RunData, benchmark: str, temperature: float) -> list[tuple[str, ...]]:
    """A row for each tree: its τ minus the chain's, with the paired interval."""
    chains = [method for method in data.methods if method.startswith(CHAIN)]
    trees = [method for method in data.methods if method.startswith(TREE)]
    if len(chains) != 1:
        return []
    rows = []
    for tree in trees:
        texts = []
        for checkpoint in data.checkpoints:
            mine = data.cell(checkpoint, tree, benchmark, temperature)
            theirs = data.cell(checkpoint, chains[0], benchmark, temperature)
            texts.append(_gain(mine, theirs))
        rows.append((f"τ gain ({method_label(tree)} − {method_label(chains[0])})", *texts))
    return rows


def _gain(cell: Cell | None, other: Cell | None) -> str:
    if cell is None or other is None:
        return MISSING
    mine, theirs = cell["acceptance_length"], other["acceptance_length"]
    if mine is None or theirs is None:
        return MISSING
    interval = metrics.acceptance_gain_interval(*_pairs(cell, other))
    return f"{mine - theirs:+.2f}" + _bracket(interval, "+.2f")


def _ratio_interval(cell: Cell, other: Cell) -> metrics.Interval | None:
    return metrics.speedup_interval(*_pairs(cell, other))


def _pairs(cell: Cell, other: Cell) -> tuple[list[SampleRow], list[SampleRow]]:
    """The samples of both, prompt by prompt."""
    theirs = {(s.benchmark, s.prompt_id): s for s in other.samples}
    pairs = [
        (s, theirs[s.benchmark, s.prompt_id])
        for s in cell.samples
        if (s.benchmark, s.prompt_id) in theirs
    ]
    return [mine for mine, _ in pairs], [their for _, their in pairs]


def _baseline_speed(
    data: RunData, checkpoint: str, benchmark: str, temperature: float
) -> float | None:
    for method in data.methods:
        cell = data.cell(checkpoint, method, benchmark, temperature)
        if cell is not None and cell.baseline_speed:
            return cell.baseline_speed
    return None


def _number(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f}"


def _speed(cell: Cell | None) -> str:
    if cell is None or cell["tokens_per_second"] is None:
        return MISSING
    if cell["speedup"] is None:
        return _number(cell["tokens_per_second"])
    bracket = _bracket(cell.interval("speedup"))
    return f"{cell['tokens_per_second']:.2f} ({cell['speedup']:.2f}×){bracket}"


def _tau(cell: Cell | None) -> str:
    if cell is None:
        return MISSING
    return _number(cell["acceptance_length"]) + _bracket(cell.interval("acceptance_length"))


def _bracket(interval: tuple[float, float] | None, form: str = ".2f") -> str:
    return "" if interval is None else f" [{interval[0]:{form}}, {interval[1]:{form}}]"
