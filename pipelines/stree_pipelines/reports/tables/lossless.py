"""List comparisons of answers with plain decoding's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stree_pipelines.evaluation.plan import method_label
from stree_pipelines.evaluation.records import ResultRow
from stree_pipelines.evaluation.result_store import RESULTS_NAME, ResultStore
from stree_pipelines.reports.settings import differing, setting_of
from stree_pipelines.reports.tables.tables import MISSING, Table


def lossless_markdown(run: Path) -> str:
    """Format checks and divergences of all evaluations of a run; "" when nothing was compared.

    The evaluations are RUN/eval, RUN/eval-fp32 and so on, or RUN when it holds results itself.
    """
    rows = _compared(run)
    tables = (table.to_markdown() for table in lossless_tables(rows))
    return "\n\n".join(["# Losslessness", counted_answers(rows), *tables]) if rows else ""


def lossless_sentence(run: Path) -> str:
    """Count the answers of a run that equal plain decoding's; "" when nothing was compared."""
    identical, checked = _counts(_compared(run))
    rest = "; lossless.md has the others" if identical < checked else ""
    sentence = f"{identical} of {checked} answers are token for token plain decoding's{rest}."
    return sentence if checked else ""


def counted_answers(rows: Sequence[ResultRow]) -> str:
    """Count the answers in compared rows that equal plain decoding's, and explain the others."""
    identical, checked = _counts(rows)
    return (
        f"{identical} of {checked} answers are token for token those of plain decoding, sampled "
        "ones those of the same seed. Where one is not, the gap is the target's own first logit "
        "(with its noise, when sampling) minus its second after the common prefix: rounding "
        "decides ties."
    )


def lossless_tables(rows: Sequence[ResultRow]) -> list[Table]:
    """Make the table of the comparisons and, where an answer differs, that of the differences.

    A decoding setting in which the rows differ has a column.
    """
    columns = [name for name in differing(rows) if name != "dtype"]
    places = ("Weights", *columns, "Benchmark", "T", "Method", "Step")
    checks: list[tuple[str, ...]] = [(*places, "Identical", "Largest gap")]
    divergences: list[tuple[str, ...]] = [(*places, "Prompt", "Turn", "Position", "Gap")]
    for row in rows:
        assert row.lossless is not None
        setting, found = setting_of(row), row.lossless.divergences
        place = (
            setting["dtype"], *(setting.get(name, MISSING) for name in columns), row.benchmark,
            f"{row.temperature:g}", method_label(row.method),
            MISSING if row.step is None else str(row.step),
        )
        largest = max((each.logit_gap for each in found), default=None)
        checks.append((
            *place, f"{row.lossless.num_identical} of {row.lossless.num_prompts}",
            MISSING if largest is None else f"{largest:.4f}",
        ))
        divergences += (
            (*place, each.prompt_id, str(each.turn), str(each.position), f"{each.logit_gap:.5f}")
            for each in found
        )
    tables = [Table("Checks", tuple(checks)), Table("Divergences", tuple(divergences))]
    return tables if len(divergences) > 1 else tables[:1]


def _compared(run: Path) -> list[ResultRow]:
    folders = [
        path for path in (run, *sorted(run.glob("eval*"))) if (path / RESULTS_NAME).is_file()
    ]
    return [row for folder in folders for row in ResultStore(folder).results() if row.lossless]


def _counts(rows: Sequence[ResultRow]) -> tuple[int, int]:
    """Return the number of identical answers, and of compared ones."""
    checks = [row.lossless for row in rows if row.lossless]
    return sum(each.num_identical for each in checks), sum(each.num_prompts for each in checks)
