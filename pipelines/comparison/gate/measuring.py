"""Measure a checkpoint and its baseline on the same prompts, and judge the difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stree.checkpoints.partners import require_made_for
from stree.common.errors import BadData, UsageError
from stree.common.words import device_name, is_cpu_name
from stree_pipelines.comparison.gate import gate
from stree_pipelines.comparison.gate.baseline import Baseline
from stree_pipelines.evaluation.context import Workers
from stree_pipelines.evaluation.evaluate import Evaluation
from stree_pipelines.evaluation.plan import AUTOREGRESSIVE, DrafterIdentity, EvaluationSettings
from stree_pipelines.evaluation.records import ResultRow, SampleRow
from stree_pipelines.evaluation.result_store import ResultStore


@dataclass(frozen=True)
class Comparison:
    """Rows of the checkpoint and of the baseline, the findings, and the worker processes."""

    mine: list[ResultRow]
    theirs: list[ResultRow]
    findings: list[gate.Finding]
    workers: Workers


def compare(
    settings: EvaluationSettings,
    checkpoint: str,
    baseline: Baseline,
    thresholds: Sequence[gate.Threshold],
) -> Comparison:
    """Evaluate the checkpoint, and the baseline unless its results exist, and judge.

    Raises UsageError before measuring when thresholds, settings and baseline do not go together,
    and the errors of `Evaluation.evaluate`.
    """
    evaluation = Evaluation(settings)
    theirs = stored_rows(evaluation, checkpoint, baseline, thresholds)
    evaluation.announce(1 if theirs else 2)
    mine = evaluation.evaluate(checkpoint)
    if not theirs:
        theirs = evaluation.evaluate(baseline.drafter)
    pairs = _pair_samples(
        mine, ResultStore(settings.out), theirs, ResultStore(baseline.results or settings.out)
    )
    findings = gate.judge(thresholds, pairs, settings.seed)
    return Comparison(mine, theirs, findings, evaluation.workers)


def stored_rows(
    evaluation: Evaluation,
    checkpoint: str,
    baseline: Baseline,
    thresholds: Sequence[gate.Threshold],
) -> list[ResultRow]:
    """Return the baseline's rows that are measured already; computes nothing.

    Raises UsageError when thresholds, settings and baseline do not go together, and
    CheckpointRefused when a checkpoint to be measured is none, or was made for another target.
    """
    jobs = evaluation.jobs_of(DrafterIdentity.at(checkpoint))
    gate.require_measurable(thresholds, jobs)
    theirs = baseline.rows(jobs) if baseline.results else []
    for given in [checkpoint] if theirs else [checkpoint, baseline.drafter]:
        identity = DrafterIdentity.at(given)
        if identity.name.folder is not None and not identity.name.retokenised:
            require_made_for(evaluation.settings.target, identity.name.folder)
    if any(threshold.metric in gate.SPEEDS for threshold in thresholds):
        _require_same_machine(theirs, evaluation)
    return theirs


def _require_same_machine(rows: Sequence[ResultRow], evaluation: Evaluation) -> None:
    """Raise UsageError when the stored rows' speeds are of other hardware or other CPU threads."""
    device = evaluation.decoders.device
    here = _machine(device_name(device), evaluation.workers.count, torch.get_num_threads())
    for row in rows:
        seen = row.environment
        there = _machine(seen.device, seen.num_processes, seen.num_threads)
        if there != here:
            raise UsageError(
                f"the baseline's speed was measured on {there}, this is {here}: give its "
                "checkpoint as --baseline, which is then measured here, or no threshold of speed"
            )


def _machine(device: str, num_processes: int, num_threads: int) -> str:
    if not is_cpu_name(device):
        return device
    return f"{device} ({num_processes} × {num_threads} threads)"


def _pair_samples(
    mine: Sequence[ResultRow], my_store: ResultStore,
    theirs: Sequence[ResultRow], their_store: ResultStore,
) -> gate.Pairs:
    """Return the prompts of each row of the checkpoint, with the baseline's.

    Raises BadData when the samples of a row are gone.
    """
    others = {row.key[1:]: row for row in theirs}
    pairs = {}
    for row in mine:
        if row.method == AUTOREGRESSIVE:
            continue
        other = others[row.key[1:]]
        key = (row.method, row.temperature, row.benchmark)
        pairs[key] = _samples(my_store, row), _samples(their_store, other)
    return pairs


def _samples(store: ResultStore, row: ResultRow) -> list[SampleRow]:
    samples = store.samples(row)
    if len(samples) != row.num_prompts:
        raise BadData(
            f"{store.directory / row.samples} holds {len(samples)} of {row.num_prompts} prompts: "
            "restore it, or evaluate again with --overwrite"
        )
    return samples
