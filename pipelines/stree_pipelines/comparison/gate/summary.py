"""Write the gate's summary: Markdown for a pull request."""

from __future__ import annotations

from collections.abc import Sequence

from stree.tree_policy.adaptive import PLAIN
from stree_pipelines.comparison.gate.gate import (
    INCONCLUSIVE,
    PASS,
    REGRESSION,
    Finding,
    level_of,
    overall,
)
from stree_pipelines.console.command_line import typed_command
from stree_pipelines.evaluation.plan import AUTOREGRESSIVE, method_label
from stree_pipelines.evaluation.records import ResultRow
from stree_pipelines.evaluation.sampling import sampling_text
from stree_pipelines.reports.rendering import markdown_page
from stree_pipelines.reports.run_data import in_batches, told_shares
from stree_pipelines.reports.settings import dtype_of
from stree_pipelines.reports.tables.tables import MISSING, Table, figure

HEADLINES = {
    PASS: "no regression",
    REGRESSION: "regression",
    INCONCLUSIVE: "inconclusive, the run is too small to tell",
}


def markdown(
    findings: Sequence[Finding], mine: Sequence[ResultRow], theirs: Sequence[ResultRow], note: str
) -> str:
    """Format the page: the verdict first, then each threshold, then the measured rows.

    Args:
        mine, theirs: rows of the checkpoint and of the baseline.
        note: a line on the baseline's fate, "" for none.
    """
    verdict = overall(findings)
    checkpoint = next(row for row in mine if row.checkpoint)
    baseline = next(row for row in theirs if row.checkpoint)
    same = checkpoint.checkpoint_sha256 == baseline.checkpoint_sha256
    here, there = (
        f"{at.num_processes} × {at.device}, {at.num_threads} threads, code {at.git_sha or '?'}"
        for at in (checkpoint.environment, baseline.environment)
    )
    lines = [
        f"## Checkpoint benchmark: {HEADLINES[verdict]}",
        "",
        f"- checkpoint: {_identity(checkpoint)}",
        f"- baseline: {_identity(baseline)}" + (", the same weights" if same else ""),
        f"- target: `{checkpoint.target}`; {checkpoint.environment.device}, "
        f"{dtype_of(checkpoint)}, at most {checkpoint.max_new_tokens} new "
        f"tokens a turn{in_batches(checkpoint.batch_size, ', ')}{sampling_text(checkpoint, ', ')}, "
        f"seed {checkpoint.seed}, code {checkpoint.environment.git_sha or '?'}",
        *([f"- measured apart: the baseline on {there}; this on {here}"] if here != there else []),
        *_chosen(mine, theirs),
        *([f"- {note}"] if note else []),
        "",
        _thresholds(findings).to_markdown(),
        *(f"- {finding.where}: {_explain(finding)}" for finding in findings if _explain(finding)),
        *_repeating(findings),
        "",
        "Changes are paired by prompt; brackets hold bootstrap intervals"
        f"{_together(len(findings))}. A regression is an interval that lies below its threshold "
        "as a whole.",
        "",
        "<details><summary>What was measured</summary>",
        "",
        _measured(mine, theirs).to_markdown(),
        f"`{typed_command()}`",
        "",
        "</details>",
    ]
    return markdown_page("\n".join(lines) + "\n")


def reason_to_fail(findings: Sequence[Finding]) -> str:
    """Return one line that names every regression."""
    return "; ".join(
        f"{finding.where}: {_explain(finding)}"
        for finding in findings
        if finding.verdict == REGRESSION
    )


def _explain(finding: Finding) -> str:
    if finding.verdict == INCONCLUSIVE:
        return f"inconclusive, {finding.reason}"
    if finding.verdict == REGRESSION and finding.interval is not None:
        allowed = finding.threshold.shown(finding.threshold.change)
        return f"regression, {finding.shown_interval} lies below {allowed}"
    return ""


def _repeating(findings: Sequence[Finding]) -> list[str]:
    """Return a line for each finding with left-out prompts."""
    found = {
        f"- left out, {method_label(finding.method)} on {finding.scope} at "
        f"T = {finding.temperature:g}: {finding.num_repeating} of "
        f"{finding.num_prompts + finding.num_repeating} prompts, an "
        "answer to which repeats itself: circles are easy to draft": None
        for finding in findings
        if finding.num_repeating
    }
    return list(found)


def _together(count: int) -> str:
    if count == 1:
        return " of 95 %"
    return f", {count} that hold together at 95 % (each at {100 * level_of(count):.2f} %)"


def _thresholds(findings: Sequence[Finding]) -> Table:
    heads = (
        "figure", "on", "method", "T", "prompts", "baseline", "checkpoint", "change",
        "95 % interval", "fails below", "verdict",
    )
    rows = [
        (
            finding.threshold.name, finding.scope, method_label(finding.method),
            f"{finding.temperature:g}", str(finding.num_prompts),
            figure(finding.baseline, form=".3f"),
            figure(finding.checkpoint, form=".3f"), finding.threshold.shown(finding.change),
            finding.shown_interval, finding.threshold.shown(finding.threshold.change),
            finding.verdict,
        )
        for finding in findings
    ]
    return Table("Thresholds", (heads, *rows))


def _measured(mine: Sequence[ResultRow], theirs: Sequence[ResultRow]) -> Table:
    """Make the table of both checkpoints' rows, baseline first."""
    heads = (
        "benchmark", "method", "T", "of", "prompts", "ended", "cut", "τ", "speedup", "tokens/s",
        "lossless",
    )
    others = {row.key[1:]: row for row in theirs}
    rows = [
        (
            row.benchmark, method_label(row.method), f"{row.temperature:g}", whose,
            str(row.num_prompts),
            *(MISSING if each is None else str(each) for each in (row.num_ended, row.num_cut)),
            *(
                figure(each, form=".3f")
                for each in (row.acceptance_length, row.speedup, row.tokens_per_second)
            ),
            MISSING if row.lossless is None
            else f"{row.lossless.num_identical}/{row.lossless.num_prompts}",
        )
        for own in mine
        if own.method != AUTOREGRESSIVE
        for whose, row in (("baseline", others[own.key[1:]]), ("checkpoint", own))
    ]
    return Table("Rows", (heads, *rows))


def _chosen(mine: Sequence[ResultRow], theirs: Sequence[ResultRow]) -> list[str]:
    """Return lines with the shares of the trees, when each step's tree was chosen."""
    others = {row.key[1:]: row for row in theirs}
    lines = []
    for row in mine:
        other = others.get(row.key[1:])
        if other is None or not (row.tree_shares or other.tree_shares):
            continue
        line = (
            f"- steps by tree, {method_label(row.method)} on {row.benchmark} at "
            f"T = {row.temperature:g}: of the baseline {told_shares(other)}; of the checkpoint "
            f"{told_shares(row)}"
        )
        if any(PLAIN.name in each.tree_shares for each in (row, other)):
            line += "; plain ones draft nothing, and say nothing about a drafter"
        lines.append(line)
    return lines


def _identity(row: ResultRow) -> str:
    step = "" if row.step is None else f", step {row.step}"
    return f"`{row.checkpoint}`{step}, sha256 {(row.checkpoint_sha256 or '')[:12]}"
