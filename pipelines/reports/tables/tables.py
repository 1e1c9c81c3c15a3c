"""Make Table 6 of the STree paper from a run's rows, and the advice that follows from them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stree import metrics
from stree.common.text import shown
from stree_pipelines.comparison.answers import Answers, Figure, Gain, acceptance_length, speedup
from stree_pipelines.evaluation.plan import AUTOREGRESSIVE, CHAIN, TREE
from stree_pipelines.evaluation.records import ResultRow, SampleRow
from stree_pipelines.reports.run_data import (
    METHOD_LABELS,
    Cell,
    RunData,
    checkpoint_title,
    in_batches,
    method_label,
)
from stree_pipelines.reports.settings import require_one_ending, sampling_note
from stree_pipelines.reports.simulation import parting_sentence
from stree_pipelines.reports.tables.answer_notes import Samples, notes, without_repeats

MISSING = "–"
MINUS = "−"
TERMINAL_WIDTH = 100  # characters


@dataclass(frozen=True)
class Table:
    """Table of text cells; the first row holds the column heads.

    The first `num_left` columns hold words, aligned to the left. The note stands below.
    """

    title: str
    rows: tuple[tuple[str, ...], ...]
    num_left: int = 1
    note: str = ""

    def to_markdown(self) -> str:
        """Format a Markdown table whose columns also line up as plain text."""
        widths = [max(len(row[column]) for row in self.rows) for column in range(len(self.rows[0]))]
        lines = [
            "| " + " | ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)) + " |"
            for row in self.rows
        ]
        rules = [
            ":" + "-" * (width + 1) if column < self.num_left else "-" * (width + 1) + ":"
            for column, width in enumerate(widths)
        ]
        lines.insert(1, "|" + "|".join(rules) + "|")
        note = f"\n{self.note}\n" if self.note else ""
        return f"**{self.title}**\n\n" + "\n".join(lines) + f"\n{note}"

    _repr_markdown_ = to_markdown  # in a notebook

    def to_text(self, width: int = TERMINAL_WIDTH) -> str:
        """Format the table for a terminal.

        Columns beyond `width` characters go into a block below, after the first columns again.
        """
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        left, right = list(range(self.num_left)), list(range(self.num_left, len(widths)))
        blocks: list[str] = []
        while right or not blocks:
            taken = left + right[:1]
            for column in right[1:]:
                if sum(widths[each] + 2 for each in [*taken, column]) - 2 > width:
                    break
                taken.append(column)
            right = right[len(taken) - len(left) :]
            lines = [
                "  ".join(
                    row[column].ljust(widths[column])
                    if column < self.num_left
                    else row[column].rjust(widths[column])
                    for column in taken
                ).rstrip()
                for row in self.rows
            ]
            lines.insert(1, "─" * max(map(len, lines)))
            blocks.append("\n".join(lines))
        note = [in_lines(self.note, width)] if self.note else []
        return shown("\n\n".join([in_lines(self.title, width), *blocks, *note]) + "\n")

    def to_latex(self) -> str:
        """Format a LaTeX table with booktabs' rules, in ASCII except names; intervals are small."""
        columns = "l" * self.num_left + "r" * (len(self.rows[0]) - self.num_left)
        head, *body = (" & ".join(map(_latex, row)) + r" \\" for row in self.rows)
        body = [line for row in body for line in (row, r"\addlinespace[2pt]")]
        note = (rf"\par\smallskip {_latex(self.note)}",) if self.note else ()
        return "\n".join((
            r"\begin{table}", r"\centering\footnotesize", r"\setlength{\tabcolsep}{4pt}",
            rf"\caption{{{_latex(self.title)}}}",
            rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule", *body,
            r"\bottomrule", r"\end{tabular}", *note, r"\end{table}", "",
        ))


def in_lines(text: str, width: int = TERMINAL_WIDTH) -> str:
    """Wrap a sentence for a terminal."""
    return textwrap.fill(shown(text), width, break_long_words=False, break_on_hyphens=False)


_LATEX = str.maketrans({
    "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}",
    "τ": r"$\tau$", "×": r"$\times$", MINUS: "$-$", MISSING: "--",
})


def _latex(text: str) -> str:
    """Format a cell, with an interval below its figure, in braces so that it is no line end's
    argument."""
    text = text.translate(_LATEX)
    found = re.fullmatch(r"(.*?) ?(\[[^\]]*\])", text)
    if not found:
        return text
    interval = rf"{{\scriptsize {found[2]}}}"
    if not found[1]:
        return interval
    return rf"\begin{{tabular}}[t]{{@{{}}r@{{}}}}{found[1]}\\{interval}\end{{tabular}}"


def figure(
    value: float | None,
    interval: metrics.Interval | None = None,
    form: str = ".2f",
    unit: str = "",
) -> str:
    """Format a number, with its interval in brackets, for a table or a sentence."""
    if value is None:
        return MISSING
    return f"{value:{form}}{unit}".replace("-", MINUS) + bracket(interval, form)


def bracket(interval: metrics.Interval | None, form: str = ".2f") -> str:
    if interval is None:
        return ""
    return f" [{interval[0]:{form}}, {interval[1]:{form}}]".replace("-", MINUS)


def table6(data: RunData, benchmark: str, temperature: float) -> Table:
    """Make the table of speed and τ against distillation steps, in the paper's layout.

    A speed's bracket is the interval of its speedup, a τ's that of τ. The autoregressive speed of
    a column is the one that its speedups are relative to: measured in the same process. With a
    chain and a tree a last row has the difference of their τ, over the same prompts.
    """
    heads = ("", *(checkpoint_title(data, checkpoint) for checkpoint in data.checkpoints))
    baseline = [baseline_speed(data, c, benchmark, temperature) for c in data.checkpoints]
    rows = [heads, (f"Speed ({method_label(AUTOREGRESSIVE)})", *map(figure, baseline))]
    for method in data.methods:
        cells = [data.cell(c, method, benchmark, temperature) for c in data.checkpoints]
        label = method_label(method)
        rows.append((f"Speed ({label})", *map(speed_of, cells)))
        rows.append((f"Median speed-up ({label})", *map(_median_of, cells)))
        rows.append((f"τ ({label})", *map(tau_of, cells)))
        rows += _without_repeats(label, cells)
    rows += _gains(data, benchmark, temperature)
    prompts = {
        cell.num_prompts
        for key, cell in data.cells.items()
        if key[2] == benchmark and key[3] == temperature
    }
    count = "/".join(map(str, sorted(prompts)))
    at_once = f", {data.batch_size} at once" if data.batch_size > 1 else ""
    title = f"{benchmark}, T = {temperature:g} ({count} prompts{at_once})"
    return Table(title, tuple(rows), note=below(_samples(data, benchmark, temperature), data.rows))


def _without_repeats(label: str, cells: Sequence[Cell | None]) -> list[tuple[str, ...]]:
    """Return rows of τ and speed-up without answers that repeat; none where no answer does."""
    kept = [without_repeats(cell.samples) if cell else [] for cell in cells]
    found = [len(cell.samples) if cell else 0 for cell in cells]
    if [*map(len, kept)] == found:
        return []
    answers = [Answers.of([rows]) for rows in kept]
    taus = (figure(each.value(acceptance_length)) for each in answers)
    speeds = (figure(each.value(speedup), unit="×") for each in answers)
    counts = (f"{len(rows)} of {count}" for rows, count in zip(kept, found, strict=True))
    return [
        (f"Answers without repeats ({label})", *counts),
        (f"τ without repeats ({label})", *taus),
        (f"Speed-up without repeats ({label})", *speeds),
    ]


def _samples(data: RunData, benchmark: str, temperature: float) -> dict[str, list[SampleRow]]:
    """Return the answers of every method, those of all checkpoints together."""
    return {
        method_label(method): [
            sample
            for checkpoint in ("", *data.checkpoints)
            if (cell := data.cell(checkpoint, method, benchmark, temperature))
            for sample in cell.samples
        ]
        for method in (AUTOREGRESSIVE, *data.methods)
    }


def below(samples: Samples, rows: Sequence[ResultRow]) -> str:
    """Return what stands below a table of these answers, whose rows are of one setting."""
    require_one_ending(rows, "a table")
    return " ".join(filter(None, [*notes(samples), sampling_note(rows)]))


def all_tables(data: RunData) -> list[Table]:
    """Make all tables, the pooled ones first."""
    return [table6(data, scope, t) for scope in data.scopes for t in data.temperatures]


def to_latex(tables: Iterable[Table]) -> str:
    """Format tables as LaTeX that needs only the package booktabs."""
    return "\n".join(["% \\usepackage{booktabs}\n", *(table.to_latex() for table in tables)])


def table6_markdown(data: RunData, tables: Iterable[Table]) -> str:
    """Format all tables of a run, with an explanation of the numbers."""
    intro = (
        "# Speed and acceptance length against distillation steps\n\n"
        "Layout of the STree paper's Table 6. Speed: new tokens per second of decoding, with its "
        "ratio to autoregressive decoding of the same prompts in the same process. Median: of "
        "each prompt's own speed-up. τ: new tokens per target call, bonus included. Brackets: 95 % "
        "bootstrap intervals over prompts (of the ratio, paired, behind a speed; of τ behind a τ; "
        "of the difference, paired, behind a gain).\n"
    )
    notes = [f"{note}\n" for note in (parting_sentence(data), *data.notes) if note]
    return "\n".join([intro, *notes, *(table.to_markdown() for table in tables)])


class Advice(NamedTuple):
    """Method to decode with, and the reason.

    headline is empty when nothing can be compared; fastest is the fastest speculation, method the
    one to use: that, a simpler one, or autoregressive decoding.
    """

    headline: str
    reason: str
    method: str = ""
    fastest: str = ""


def advise(data: RunData, temperature: float) -> Advice:
    """Advise on the method at this temperature, by the last checkpoint over all benchmarks."""
    scope = data.scopes[0]
    cells = {m: data.cell(data.last, m, scope, temperature) for m in data.methods}
    timed = {m: cell for m, cell in cells.items() if cell and cell["speedup"]}
    if not timed:
        why = "no autoregressive baseline was measured, or samples are missing"
        return Advice("", f"Speeds of {scope} can't be compared: {why}.")
    best = max(timed, key=lambda method: timed[method]["speedup"])
    cell = timed[best]
    gain, interval, times = cell["speedup"], cell.interval("speedup"), _times(cell)
    batches = in_batches(data.batch_size)
    plain = f"Use plain decoding{batches}"
    if gain <= 1:
        reason = f"The fastest speculation, {method_label(best)}, is {times}."
        return Advice(plain, reason + _what_to_expect(cell), AUTOREGRESSIVE, best)
    if interval and interval[0] <= 1:
        reason = f"{method_label(best)} is {times}: the interval includes 1, so it may be none. "
        reason += "More prompts would tell; until then plain decoding needs no drafter."
        return Advice(plain, reason, AUTOREGRESSIVE, best)
    rivals = [method for method in timed if method != best]
    comparison, tie = "", ""
    if rivals:
        rival = max(rivals, key=lambda method: timed[method]["speedup"])
        ratio, between = speed_ratio(cell, timed[rival])
        if between and between[0] <= 1 <= between[1]:
            tie = rival
        comparison = f" and {figure(ratio, between, unit='× ' + method_label(rival))}"
    if tie:
        simpler = next((m for m in (best, tie) if m.startswith(CHAIN)), best)
        if simpler == best:
            reason = f"{method_label(best)} is {times}{comparison}: they can't be told apart"
        else:
            reason = f"{method_label(simpler)} is {_times(timed[simpler])}. {method_label(best)} "
            reason += f"is {times}{comparison}: they can't be told apart"
        reason += ", and a chain verifies fewer tokens." if simpler.startswith(CHAIN) else "."
        return Advice(f"Use the {_noun(simpler)}{batches}", reason, simpler, best)
    reason = f"{method_label(best)} is {times}{comparison}."
    return Advice(f"Use the {_noun(best)}{batches}", reason, best, best)


def _times(cell: Cell) -> str:
    """Format a speed-up, such as "1.46× plain decoding [1.29, 1.77], τ 2.44"."""
    times = figure(cell["speedup"], cell.interval("speedup"), unit="× plain decoding")
    return f"{times}, τ {cell['acceptance_length']:.2f}"


def _what_to_expect(cell: Cell) -> str:
    """Explain what would change a win of plain decoding."""
    cost = cell["acceptance_length"] / cell["speedup"]
    parts = cell["time_ms"]
    costliest = ""
    if parts:
        part = max(parts, key=lambda name: parts[name])
        costliest = f", {100 * parts[part] / sum(parts.values()):.0f} % of it for {part}"
    return (
        f" Expect no gain from it yet: a step takes {cost:.2f} times as long as a plain one"
        f"{costliest}, so it pays from τ {cost:.2f} on. A better drafter can turn that, or a "
        "target that takes longer for a token."
    )


def _noun(method: str) -> str:
    """Return "chain", "tree", or the name of a comparison's arm."""
    name, _, tree = method.partition(":")
    if name not in METHOD_LABELS:
        return f"arm {method}"
    if name == CHAIN:
        return "chain"
    return f"tree {tree}" if tree else "tree"


def chain_of_run(data: RunData, method: str) -> str | None:
    """Return the run's chain, to compare a tree with; None for other methods, or several chains."""
    chains = [each for each in data.methods if each.startswith(CHAIN)]
    return chains[0] if method.startswith(TREE) and len(chains) == 1 else None


def _gains(data: RunData, benchmark: str, temperature: float) -> list[tuple[str, ...]]:
    """Make a row for each tree: its τ minus the chain's, with the paired interval."""
    rows = []
    for tree in data.methods:
        chain = chain_of_run(data, tree)
        if chain is None:
            continue
        texts = []
        for checkpoint in data.checkpoints:
            mine = data.cell(checkpoint, tree, benchmark, temperature)
            theirs = data.cell(checkpoint, chain, benchmark, temperature)
            texts.append(
                MISSING
                if mine is None or theirs is None
                else figure(*acceptance_gain(mine, theirs), "+.2f")
            )
        rows.append((f"τ gain ({method_label(tree)} − {method_label(chain)})", *texts))
    return rows


def acceptance_gain(cell: Cell, other: Cell) -> Gain:
    """Return τ of `cell` minus that of `other`, paired by prompt."""
    mine, theirs = cell["acceptance_length"], other["acceptance_length"]
    if mine is None or theirs is None:
        return Gain(None, None)
    return Gain(mine - theirs, _paired(cell, other, acceptance_length, np.subtract))


def speed_ratio(cell: Cell, other: Cell) -> Gain:
    """Return the speed of `cell` over that of `other`, each over plain decoding in its own run."""
    mine, theirs = cell["speedup"], other["speedup"]
    interval = _paired(cell, other, speedup, np.divide)
    return Gain(mine / theirs if mine and theirs else None, interval)


def _paired(cell: Cell, other: Cell, of: Figure, compare: np.ufunc) -> metrics.Interval | None:
    mine, theirs = (Answers.of([each.samples]) for each in (cell, other))
    return mine.over(theirs, of, compare).interval


def baseline_speed(
    data: RunData, checkpoint: str, benchmark: str, temperature: float
) -> float | None:
    for method in data.methods:
        cell = data.cell(checkpoint, method, benchmark, temperature)
        if cell is not None and cell.baseline_speed:
            return cell.baseline_speed
    return None


def speed_of(cell: Cell | None) -> str:
    if cell is None or cell["tokens_per_second"] is None:
        return MISSING
    speed = figure(cell["tokens_per_second"])
    if cell["speedup"] is None:
        return speed
    return f"{speed} ({cell['speedup']:.2f}×){bracket(cell.interval('speedup'))}"


def _median_of(cell: Cell | None) -> str:
    return MISSING if cell is None else figure(cell["speedup_prompt_median"], unit="×")


def tau_of(cell: Cell | None) -> str:
    if cell is None:
        return MISSING
    return figure(cell["acceptance_length"], cell.interval("acceptance_length"))
