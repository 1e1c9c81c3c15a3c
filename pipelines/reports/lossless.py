"""Every greedy comparison of a run with autoregressive decoding, as Markdown."""

from __future__ import annotations

from pathlib import Path

from stree_pipelines.evaluation.records import RESULTS_NAME, ResultRow, ResultStore
from stree_pipelines.reports.run_data import method_label
from stree_pipelines.reports.tables import MISSING, Table


def lossless_markdown(run: Path) -> str:
    """Checks and divergences of all evaluations of a run: RUN/eval, RUN/eval-fp32 and so on, or RUN
    when it holds results itself. Empty when nothing was compared."""
    folders = [
        path for path in (run, *sorted(run.glob("eval*"))) if (path / RESULTS_NAME).is_file()
    ]
    rows = [row for folder in folders for row in ResultStore(folder).results() if row.lossless]
    if not rows:
        return ""
    checked, identical = (
        sum(getattr(row.lossless, name) for row in rows)
        for name in ("num_prompts", "num_identical")
    )
    parts = [
        "# Losslessness",
        f"{identical} of {checked} greedy answers are token for token those of autoregressive "
        "decoding. Where one is not, the gap is the target's own first logit minus its second "
        "after the common prefix: rounding decides ties.",
        _checks(rows).to_markdown(),
    ]
    if identical < checked:
        parts.append(_divergences(rows).to_markdown())
    return "\n\n".join(parts)


def _checks(rows: list[ResultRow]) -> Table:
    lines = [("Weights", "Benchmark", "Method", "Step", "Identical", "Largest gap")]
    for row in rows:
        assert row.lossless is not None
        gaps = [each.logit_gap for each in row.lossless.divergences]
        lines.append((
            *_place(row), f"{row.lossless.num_identical} of {row.lossless.num_prompts}",
            f"{max(gaps):.4f}" if gaps else MISSING,
        ))  # fmt: skip
    return Table("Checks", tuple(lines))


def _divergences(rows: list[ResultRow]) -> Table:
    lines = [("Weights", "Benchmark", "Method", "Step", "Prompt", "Turn", "Position", "Gap")]
    for row in rows:
        for each in row.lossless.divergences if row.lossless else ():
            where = (each.prompt_id, str(each.turn), str(each.position), f"{each.logit_gap:.5f}")
            lines.append((*_place(row), *where))
    return Table("Divergences", tuple(lines))


def _place(row: ResultRow) -> tuple[str, str, str, str]:
    step = MISSING if row.step is None else str(row.step)
    dtype = row.environment.dtypes.get("weights", MISSING)
    return dtype, row.benchmark, method_label(row.method), step
