"""List every comparison of a run's tokens with plain decoding, as Markdown."""

from __future__ import annotations

from pathlib import Path

from stree_pipelines.evaluation.plan import method_label
from stree_pipelines.evaluation.records import ResultRow
from stree_pipelines.evaluation.result_store import RESULTS_NAME, ResultStore
from stree_pipelines.reports.settings import differing, setting_of
from stree_pipelines.reports.tables.tables import MISSING, Table


def lossless_markdown(run: Path) -> str:
    """Format checks and divergences of all evaluations of a run; "" when nothing was compared.

    The evaluations are RUN/eval, RUN/eval-fp32 and so on, or RUN when it holds results itself. A
    decoding setting in which they differ has a column.
    """
    rows = _compared(run)
    if not rows:
        return ""
    identical, checked = _counts(rows)
    columns = [name for name in differing(rows) if name != "dtype"]
    parts = [
        "# Losslessness",
        f"{identical} of {checked} answers are token for token those of plain decoding, sampled "
        "ones those of the same seed. Where one is not, the gap is the target's own first logit "
        "(with its noise, when sampling) minus its second after the common prefix: rounding "
        "decides ties.",
        _checks(rows, columns).to_markdown(),
    ]
    if identical < checked:
        parts.append(_divergences(rows, columns).to_markdown())
    return "\n\n".join(parts)


def lossless_sentence(run: Path) -> str:
    """Count the answers of a run that equal plain decoding's; "" when nothing was compared."""
    identical, checked = _counts(_compared(run))
    rest = "; lossless.md has the others" if identical < checked else ""
    sentence = f"{identical} of {checked} answers are token for token plain decoding's{rest}."
    return sentence if checked else ""


def _compared(run: Path) -> list[ResultRow]:
    folders = [
        path for path in (run, *sorted(run.glob("eval*"))) if (path / RESULTS_NAME).is_file()
    ]
    return [row for folder in folders for row in ResultStore(folder).results() if row.lossless]


def _counts(rows: list[ResultRow]) -> tuple[int, int]:
    """Return the number of identical answers, and of compared ones."""
    checks = [row.lossless for row in rows if row.lossless]
    return sum(each.num_identical for each in checks), sum(each.num_prompts for each in checks)


def _checks(rows: list[ResultRow], columns: list[str]) -> Table:
    lines = [("Weights", *columns, "Benchmark", "T", "Method", "Step", "Identical", "Largest gap")]
    for row in rows:
        assert row.lossless is not None
        gaps = [each.logit_gap for each in row.lossless.divergences]
        lines.append((
            *_place(row, columns),
            f"{row.lossless.num_identical} of {row.lossless.num_prompts}",
            f"{max(gaps):.4f}" if gaps else MISSING,
        ))
    return Table("Checks", tuple(lines))


def _divergences(rows: list[ResultRow], columns: list[str]) -> Table:
    heads = ("Benchmark", "T", "Method", "Step", "Prompt", "Turn", "Position", "Gap")
    lines: list[tuple[str, ...]] = [("Weights", *columns, *heads)]
    for row in rows:
        for each in row.lossless.divergences if row.lossless else ():
            where = (each.prompt_id, str(each.turn), str(each.position), f"{each.logit_gap:.5f}")
            lines.append((*_place(row, columns), *where))
    return Table("Divergences", tuple(lines))


def _place(row: ResultRow, columns: list[str]) -> tuple[str, ...]:
    setting = setting_of(row)
    step = MISSING if row.step is None else str(row.step)
    where = (setting["dtype"], *(setting.get(name, MISSING) for name in columns))
    return *where, row.benchmark, f"{row.temperature:g}", method_label(row.method), step
