"""What the rows of an evaluation say of one drafter: the content of speculation_profile.json."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from stree.speculation_profile import (
    Measurement,
    Recommendation,
    SpeculationProfile,
    SuggestedTree,
)
from stree_pipelines.evaluation.context import is_cpu_name
from stree_pipelines.evaluation.records import ResultRow, ResultStore
from stree_pipelines.reports.run_data import RunData, arrange
from stree_pipelines.reports.tables import advise
from stree_pipelines.reports.tree_suggestion import suggest


def profile_of(
    store: ResultStore, folder: Path, sha256: str, num_nodes: int | None = None
) -> SpeculationProfile | None:
    """The profile of the drafter with this checkpoint hash; None when no row is about it.

    Args: store, the evaluation of the run `folder`; num_nodes of the suggested trees, by default
    as many as the largest that was measured.
    """
    rows = _latest(store.results(), sha256)
    mine = [row for row in rows if row.checkpoint_sha256 == sha256]
    if not mine:
        return None
    return SpeculationProfile(
        step=mine[-1].step,
        checkpoint_sha256=sha256,
        target=mine[-1].target,
        target_sha256=mine[-1].target_sha256,
        measurements=tuple(map(_measurement, rows)),
        recommendations=tuple(_recommendations(store, folder, rows)),
        suggested_trees=tuple(_suggestions(store, mine, num_nodes)),
    )


def _latest(rows: Sequence[ResultRow], sha256: str) -> list[ResultRow]:
    """The drafter's rows and its target's plain ones; of those that differ in less than what they
    measured and where, the one that was written last."""
    target = {row.target_sha256 for row in rows if row.checkpoint_sha256 == sha256}
    return list({
        (r.method, r.tree, r.benchmark, r.temperature, *_where(r)): r
        for r in rows
        if r.checkpoint_sha256 in (None, sha256) and r.target_sha256 in target
    }.values())  # fmt: skip


def _where(row: ResultRow) -> tuple[str, str]:
    return row.environment.device, row.environment.dtypes.get("weights", "unknown")


def _measurement(row: ResultRow) -> Measurement:
    device, dtype = _where(row)
    same = {name: getattr(row, name) for name in Measurement.model_fields if hasattr(row, name)}
    return Measurement(
        **same,
        draft_length=row.tree.to_token_tree().max_depth if row.tree else 0,
        device=device,
        dtype=dtype,
        acceptance_length_interval=row.confidence_intervals.get("acceptance_length"),
        speedup_interval=row.confidence_intervals.get("speedup"),
        lossless_share=row.lossless.share if row.lossless else None,
        git_sha=row.environment.git_sha,
    )


def _recommendations(
    store: ResultStore, folder: Path, rows: Sequence[ResultRow]
) -> Iterator[Recommendation]:
    """One for each device, dtype and temperature at which speeds can be compared: the report's."""
    for device, dtype in dict.fromkeys(map(_where, rows)):
        data = RunData(folder, [row for row in rows if _where(row) == (device, dtype)])
        arrange(data, store)
        for temperature in data.temperatures:
            advice = advise(data, temperature)
            cell = data.cell(data.last, advice.fastest, data.scopes[0], temperature)
            if cell is None:
                continue
            yield Recommendation(
                device=device,
                device_type="cpu" if is_cpu_name(device) else "cuda",
                dtype=dtype,
                temperature=temperature,
                benchmarks=tuple(data.benchmarks),
                num_prompts=cell.num_prompts,
                method=advice.method.partition(":")[0],
                tree=data.tree(advice.method),
                acceptance_length=cell["acceptance_length"],
                speedup=cell["speedup"],
                speedup_interval=cell.interval("speedup"),
                reason=f"{advice.headline}. {advice.reason}",
            )


def _suggestions(
    store: ResultStore, rows: Sequence[ResultRow], num_nodes: int | None
) -> Iterator[SuggestedTree]:
    """None for temperatures whose rows are from before ends of paths were recorded."""
    for temperature in sorted({row.temperature for row in rows if row.end_nodes}):
        yield suggest(rows, temperature, num_nodes, store.samples)
