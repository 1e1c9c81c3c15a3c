"""Make Table 6 of the STree paper from a run's rows, and the advice that follows from them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from stree import metrics
from stree.common.errors import shown
from stree_pipelines.comparison.answers import Answers, Gain, acceptance_length, speedup
from stree_pipelines.evaluation.plan import (
    AUTOREGRESSIVE,
    CHAIN,
    METHOD_LABELS,
    TREE,
    method_label,
)
from stree_pipelines.evaluation.records import ResultRow, SampleRow, Tree
from stree_pipelines.reports.run_data import (
    RESAMPLED,
    Cell,
    RunData,
    checkpoint_title,
    in_batches,
)
from stree_pipelines.reports.settings import dtype_of, require_one_ending, sampling_note
from stree_pipelines.reports.simulation import parting_sentence
from stree_pipelines.reports.tables.answer_notes import Samples, notes, without_repeats

MISSING = "–"
MINUS = "−"
TERMINAL_WIDTH = 100  # characters
MAX_SPEED_RATIO = 1.25  # fastest over slowest; quiet machines had up to 1.15 (docs/results)
TOLD_SPREAD = 1.01  # what is less is no news
Row = TypeVar("Row")
Column = tuple[str, Callable[[Row], str]]  # a head, and the text of a row


@dataclass(frozen=True)
class Table:
    """Table of text cells; the first row holds the column heads.

    The first `num_left` columns hold words, aligned to the left. The note stands below.
    """

    title: str
    rows: tuple[tuple[str, ...], ...]
    num_left: int = 1
    note: str = ""

    @classmethod
    def of_columns(
        cls, title: str, columns: Iterable[tuple[str, Sequence[str]]], note: str = ""
    ) -> Table:
        """Make a table of columns, each a head and its cells."""
        heads, cells = zip(*columns, strict=True)
        return cls(title, (heads, *zip(*cells, strict=True)), note=note)

    @classmethod
    def of_rows(
        cls, title: str, rows: Iterable[Row], columns: Iterable[Column[Row]], num_left: int = 1,
        note: str = "",
    ) -> Table:
        """Make a table with a line for each row."""
        heads, texts = zip(*columns, strict=True)
        lines = (tuple(text(row) for text in texts) for row in rows)
        return cls(title, (heads, *lines), num_left, note)

    def to_markdown(self) -> str:
        """Format a Markdown table whose columns also line up as plain text."""
        widths, lines = self._widths, []
        for row in self.rows:
            cells = (text.ljust(width) for text, width in zip(row, widths, strict=True))
            lines.append("| " + " | ".join(cells) + " |")
        rules = [":" + "-" * (width + 1) for width in widths[: self.num_left]]
        rules += ["-" * (width + 1) + ":" for width in widths[self.num_left :]]
        lines.insert(1, "|" + "|".join(rules) + "|")
        note = f"\n{self.note}\n" if self.note else ""
        return f"**{self.title}**\n\n" + "\n".join(lines) + f"\n{note}"

    _repr_markdown_ = to_markdown  # in a notebook

    def to_text(self, width: int = TERMINAL_WIDTH) -> str:
        """Format the table for a terminal.

        Columns beyond `width` characters go into a block below, after the first columns again.
        """
        columns = [
            [text.ljust(wide) if number < self.num_left else text.rjust(wide) for text in column]
            for number, (wide, *column) in enumerate(zip(self._widths, *self.rows, strict=True))
        ]
        left, right = columns[: self.num_left], columns[self.num_left :]
        blocks: list[str] = []
        while right or not blocks:
            count = 1
            while count < len(right) and _width([*left, *right[: count + 1]]) <= width:
                count += 1
            rows = zip(*left, *right[:count], strict=True)
            lines = ["  ".join(row).rstrip() for row in rows]
            lines.insert(1, "─" * max(map(len, lines)))
            blocks.append("\n".join(lines))
            right = right[count:]
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

    @property
    def _widths(self) -> list[int]:
        return [max(map(len, column)) for column in zip(*self.rows, strict=True)]


def _width(columns: Sequence[Sequence[str]]) -> int:
    return len("  ".join(column[0] for column in columns))


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


def to_latex(tables: Iterable[Table]) -> str:
    """Format tables as LaTeX that needs only the package booktabs."""
    return "\n".join(["% \\usepackage{booktabs}\n", *(table.to_latex() for table in tables)])


def figure(
    value: float | None, interval: metrics.Interval | None = None, form: str = ".2f",
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


def figures_of(method: str, cells: Sequence[Cell | None]) -> list[tuple[str, ...]]:
    """Return a method's lines of speeds and τ, a cell a column."""
    label = method_label(method)
    return [
        (f"Speed ({label})", *map(speed_of, cells)),
        (f"Median speed-up ({label})", *map(median_of, cells)),
        (f"τ ({label})", *map(tau_of, cells)),
    ]


def plain_speed(cells: Iterable[Cell | None]) -> str:
    """Return plain decoding's speed, as the first of these methods' cells that has it says."""
    speeds = (cell.baseline_speed for cell in cells if cell)
    return figure(next(filter(None, speeds), None))


def table6(data: RunData, benchmark: str, temperature: float) -> Table:
    """Make the table of speed and τ against distillation steps, in the paper's layout.

    A speed's bracket is the interval of its speedup, a τ's that of τ. Plain decoding's speed in a
    column is the one that its speedups are relative to: measured in the same process. With a
    chain and a tree a last row has the difference of their τ, over the same prompts.
    """
    place = benchmark, temperature
    cells = {m: [data.cell(c, m, *place) for c in data.checkpoints] for m in data.methods}
    heads = ("", *(checkpoint_title(data, checkpoint) for checkpoint in data.checkpoints))
    of_checkpoints = zip(*cells.values(), strict=True)
    rows = [heads, (f"Speed ({method_label(AUTOREGRESSIVE)})", *map(plain_speed, of_checkpoints))]
    for method in data.methods:
        rows += figures_of(method, cells[method]) + _without_repeats(method, cells[method])
    for tree in data.methods:
        if chain := chain_of_run(data, tree):
            gains = map(acceptance_gain, cells[tree], cells[chain])
            label = f"τ gain ({method_label(tree)} − {method_label(chain)})"
            rows.append((label, *(figure(*gain, "+.2f") for gain in gains)))
    here = [each for key, each in data.cells.items() if key[2:] == place]
    count = "/".join(map(str, sorted({cell.num_prompts for cell in here})))
    at_once = f", {data.batch_size} at once" if data.batch_size > 1 else ""
    title = f"{benchmark}, T = {temperature:g} ({count} prompts{at_once})"
    return Table(title, tuple(rows), note=below(_samples(data, *place), data.rows))


def _without_repeats(method: str, cells: Sequence[Cell | None]) -> list[tuple[str, ...]]:
    """Return lines of τ and speed-up without answers that repeat; none where no answer does."""
    found = [cell.samples if cell else () for cell in cells]
    kept = [without_repeats(samples) for samples in found]
    if [*map(len, kept)] == [*map(len, found)]:
        return []
    label, answers = method_label(method), [Answers.of([samples]) for samples in kept]
    counts = (f"{len(some)} of {len(all_)}" for some, all_ in zip(kept, found, strict=True))
    return [
        (f"Answers without repeats ({label})", *counts),
        (f"τ without repeats ({label})", *(figure(a.value(acceptance_length)) for a in answers)),
        (f"Speed-up without repeats ({label})",
         *(figure(each.value(speedup), unit="×") for each in answers)),
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


def table6_markdown(data: RunData, tables: Iterable[Table]) -> str:
    """Format all tables of a run, with an explanation of the numbers."""
    intro = (
        "# Speed and acceptance length against distillation steps\n\n"
        "Layout of the STree paper's Table 6. Speed: new tokens per second of decoding, with its "
        "ratio to plain decoding of the same prompts in the same process. Median: of each "
        "prompt's own speed-up. τ: new tokens per target call, bonus included. Brackets: 95 % "
        "bootstrap intervals over prompts (of the ratio, paired, behind a speed; of τ behind a τ; "
        "of the difference, paired, behind a gain).\n"
    )
    notes = [f"{note}\n" for note in (parting_sentence(data), *data.notes) if note]
    return "\n".join([intro, *notes, *(table.to_markdown() for table in tables)])


@dataclass(frozen=True)
class PlainSpread:
    """Hold the slowest and the fastest tokens/s of plain decoding beside a run's checkpoints."""

    benchmark: str
    slowest: float
    fastest: float

    @property
    def ratio(self) -> float:
        return self.fastest / self.slowest

    def __str__(self) -> str:
        return (
            f"Plain decoding of {self.benchmark} made {self.slowest:,.0f} to {self.fastest:,.0f} "
            f"tokens/s beside the checkpoints ({self.ratio:.2f}×)"
        )


def plain_spread(rows: Iterable[ResultRow], temperature: float) -> PlainSpread | None:
    """Return the widest spread of a benchmark; None where plain decoding's speed was the same.

    Speeds of several devices, dtypes, batch sizes or numbers of processes are not compared.
    """
    speeds: dict[tuple[object, ...], list[float]] = {}
    for row in rows:
        if row.temperature == temperature and row.tokens_per_second and row.speedup:
            where = row.environment
            alike = (
                row.benchmark, row.prompts_hash, row.batch_size, dtype_of(row), where.device,
                where.num_processes, where.num_threads,
            )
            speeds.setdefault(alike, []).append(row.tokens_per_second / row.speedup)
    spreads = [PlainSpread(str(at[0]), min(each), max(each)) for at, each in speeds.items()]
    widest = max(spreads, key=lambda each: each.ratio, default=None)
    return widest if widest is not None and widest.ratio >= TOLD_SPREAD else None


class Advice(NamedTuple):
    """Method to decode with, and the reason.

    headline is empty when nothing can be compared; fastest is the fastest speculation, method the
    one to use: that, a simpler one, or plain decoding.
    """

    headline: str
    reason: str
    method: str = ""
    fastest: str = ""


def advise(data: RunData, temperature: float, rows: Sequence[ResultRow] | None = None) -> Advice:
    """Advise on the method at this temperature, by the last checkpoint over all benchmarks.

    rows: those of all checkpoints, by which the machine's noise is judged; None is the run's.
    """
    spread = plain_spread(data.rows if rows is None else rows, temperature)
    if spread is not None and spread.ratio > MAX_SPEED_RATIO:
        return Advice(
            "", f"{spread}: the machine had other work, so no method is advised. Evaluate again "
            "with --overwrite where nothing else runs."
        )
    scope = data.scopes[0]
    cells = {m: data.cell(data.last, m, scope, temperature) for m in data.methods}
    trees = {method: data.tree(method) for method in data.methods}
    advice = advise_among(cells, trees, scope, data.batch_size)
    return advice if spread is None else advice._replace(reason=f"{advice.reason} {spread}.")


def advise_among(
    cells: Mapping[str, Cell | None], trees: Mapping[str, Tree | None], scope: str, batch_size: int
) -> Advice:
    """Advise on one of these methods, measured on the same prompts, or on plain decoding.

    That is the fastest that beats plain decoding beyond noise, or a chain that cannot be told from
    it. trees: of the methods, by which chains are known.
    """
    timed = {m: cell for m, cell in cells.items() if cell and cell["speedup"]}
    if not timed:
        why = "plain decoding was not measured, or samples are missing"
        return Advice("", f"Speeds of {scope} can't be compared: {why}.")
    by_speed = sorted(timed, key=lambda m: (not _beats_plain(timed[m]), -timed[m]["speedup"]))
    best, *others = by_speed
    cell = timed[best]
    outcome = f"{_subject(best)} is {_times(cell)}"
    plain = f"Use plain decoding{in_batches(batch_size)}"
    if cell["speedup"] <= 1:
        reason = f"The fastest speculation, {_called(best)}, is {_times(cell)}."
        return Advice(plain, reason + _what_to_expect(cell), AUTOREGRESSIVE, best)
    if not _beats_plain(cell):
        known = cell.interval("speedup") is not None
        why = "the interval includes 1" if known else "one prompt has no interval"
        reason = f"{outcome}: {why}, so it may be none. More prompts would tell; "
        return Advice(
            plain, f"{reason}until then plain decoding needs no drafter.", AUTOREGRESSIVE, best
        )
    ratios = {method: speed_ratio(cell, timed[method]) for method in others}
    alike = [m for m, (_, ends) in ratios.items() if ends and ends[0] <= 1 <= ends[1]]
    chains = [method for method in (best, *alike) if _is_chain(trees[method])]
    used = chains[0] if alike and chains else best
    rival = used if used != best else next(iter(alike or others), None)
    if rival:
        outcome += f" and {figure(*ratios[rival], unit='× ' + _called(rival))}"
    if used != best:
        outcome = f"{_subject(used)} is {_times(timed[used])}. {outcome}"
    if alike:
        is_mixed = 0 < len(chains) <= len(alike)  # the fastest and those alike are not all chains
        end = ", and a chain verifies fewer tokens" if is_mixed else ""
        outcome += f": they can't be told apart{end}"
    return Advice(f"Use the {_noun(used)}{in_batches(batch_size)}", f"{outcome}.", used, best)


def _beats_plain(cell: Cell) -> bool:
    interval = cell.interval("speedup")
    return interval is not None and interval[0] > 1


def _is_chain(tree: Tree | None) -> bool:
    return tree is not None and tree.parents == tuple(range(-1, len(tree.parents) - 1))


def _times(cell: Cell) -> str:
    """Format a speed-up, such as "1.46× plain decoding [1.29, 1.77], τ 2.44"."""
    times = figure(*cell.gain("speedup"), unit="× plain decoding")
    return f"{times}, τ {cell['acceptance_length']:.2f}"


def _what_to_expect(cell: Cell) -> str:
    """Explain what would change a win of plain decoding."""
    cost, parts = cell["acceptance_length"] / cell["speedup"], cell["time_ms"]
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
    return "chain" if name == CHAIN else f"tree {tree}".rstrip()


def _called(method: str) -> str:
    """Return what a sentence calls a method: "the chain", "the tree paper", or an arm's name."""
    is_arm = method.partition(":")[0] not in METHOD_LABELS
    return method if is_arm else f"the {_noun(method)}"


def _subject(method: str) -> str:
    """Return what a sentence that begins with a method calls it: "The chain"."""
    return re.sub("^the ", "The ", _called(method))


def chain_of_run(data: RunData, method: str) -> str | None:
    """Return the run's chain, to compare a tree with; None for other methods, or several chains."""
    chains = [each for each in data.methods if each.startswith(CHAIN)]
    return chains[0] if method.startswith(TREE) and len(chains) == 1 else None


def acceptance_gain(cell: Cell | None, other: Cell | None) -> Gain:
    """Return τ of `cell` minus that of `other`, paired by prompt."""
    return _compared(cell, other, "acceptance_length", np.subtract)


def speed_ratio(cell: Cell | None, other: Cell | None) -> Gain:
    """Return the speed of `cell` over that of `other`, each over plain decoding in its own run."""
    return _compared(cell, other, "speedup", np.divide)


def _compared(cell: Cell | None, other: Cell | None, name: str, compare: np.ufunc) -> Gain:
    if cell is None or other is None or not cell[name] or not other[name]:
        return Gain(None, None)
    gain = cell.answers.over(other.answers, RESAMPLED[name], compare)
    return Gain(float(compare(cell[name], other[name])), gain.interval)


def speed_of(cell: Cell | None) -> str:
    if cell is None or cell["tokens_per_second"] is None:
        return MISSING
    speed = figure(cell["tokens_per_second"])
    if cell["speedup"] is None:
        return speed
    return f"{speed} ({cell['speedup']:.2f}×){bracket(cell.interval('speedup'))}"


def median_of(cell: Cell | None) -> str:
    return MISSING if cell is None else figure(cell["speedup_prompt_median"], unit="×")


def tau_of(cell: Cell | None) -> str:
    return MISSING if cell is None else figure(*cell.gain("acceptance_length"))
