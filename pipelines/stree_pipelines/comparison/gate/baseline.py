"""Look up a gate's baseline, a checkpoint or the results of one, and pair its answers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from stree.checkpoints.partners import require_made_for
from stree.common.errors import BadData, NotFound, UsageError
from stree.common.files import point_to
from stree.common.words import device_name, is_cpu_name
from stree.drafters.names import DrafterName
from stree_pipelines.comparison.gate import gate
from stree_pipelines.evaluation.evaluate import Evaluation
from stree_pipelines.evaluation.plan import AUTOREGRESSIVE, DrafterIdentity, Job, method_label
from stree_pipelines.evaluation.records import ResultRow, SampleRow
from stree_pipelines.evaluation.result_store import RESULTS_NAME, ResultStore


@dataclass(frozen=True)
class Baseline:
    """A baseline as given and the folder it leads to.

    Attributes:
        given: a checkpoint or results folder, or a symlink to one; or another drafter's name, such
            as float8:FOLDER.
        drafter: the folder in the end, or that name.
        results: folder of its rows; None for a checkpoint that is yet to be measured.
    """

    given: Path
    drafter: str
    results: Path | None

    @classmethod
    def at(cls, given: str | Path, movable: bool = False) -> Baseline:
        """Look the baseline up.

        Raises NotFound when there is none, and UsageError when it cannot be moved (`movable`)
        because it is no symlink.
        """
        path = Path(given)  # without a trailing slash, behind which a symlink is not seen
        if movable and not path.is_symlink():
            raise UsageError(f"--promote moves a symlink, --baseline {given} is none: give one")
        if names_form(given):
            return cls(path, str(given), None)
        folder = folder_of(path)
        candidates = [path for path in (folder, folder / "eval") if (path / RESULTS_NAME).is_file()]
        return cls(path, str(folder), candidates[0] if candidates else None)

    def measured_rows(
        self, evaluation: Evaluation, checkpoint: str, thresholds: Sequence[gate.Threshold]
    ) -> list[ResultRow]:
        """Return the baseline's rows that are measured already; computes nothing.

        Raises UsageError when thresholds, settings and baseline do not go together, and
        CheckpointRefused when a checkpoint to be measured is none, or was made for another target.
        """
        jobs = evaluation.jobs_of(DrafterIdentity.at(checkpoint))
        gate.require_measurable(thresholds, jobs)
        rows = []
        if self.results is not None:
            stored = ResultStore(self.results).results()
            rows = [self._row(job, stored) for job in jobs if job.method != AUTOREGRESSIVE]
        for given in [checkpoint] if rows else [checkpoint, self.drafter]:
            name = DrafterIdentity.at(given).name
            if name.folder is not None and not name.retokenised:
                require_made_for(evaluation.settings.target, name.folder)
        if any(threshold.metric in gate.SPEEDS for threshold in thresholds):
            _require_same_machine(rows, evaluation)
        return rows

    def _row(self, job: Job, stored: Sequence[ResultRow]) -> ResultRow:
        """Return the row of the job's target, prompts and decoding.

        Raises UsageError when it is missing, or several checkpoints have one.
        """
        place = f"{method_label(job.method)} on {job.benchmark.name} at T = {job.temperature:g}"
        found = [row for row in stored if row.checkpoint and row.key[1:] == job.result_key[1:]]
        if not found:
            raise UsageError(
                f"{self.results} does not have {place} of this target, tree, prompts and decoding "
                "options: use its options (and --limit), or give the baseline's checkpoint, which "
                "is then measured"
            )
        if len({row.checkpoint_sha256 for row in found}) > 1:
            steps = ", ".join(str(row.step) for row in found)
            raise UsageError(
                f"{self.results} has {place} of several checkpoints (steps {steps}): give the one, "
                "which is then measured"
            )
        return found[-1]

    def pairs(
        self, mine: Sequence[ResultRow], theirs: Sequence[ResultRow], out: str
    ) -> gate.Pairs:
        """Return the prompts of each row of the checkpoint, with the baseline's.

        mine, theirs: rows in the folder `out` and in that of the results, if there are any. Raises
        BadData when the samples of a row are gone.
        """
        my_store, their_store = ResultStore(out), ResultStore(self.results or out)
        others = {row.key[1:]: row for row in theirs}
        return {
            (row.method, row.temperature, row.benchmark): (
                _samples(my_store, row), _samples(their_store, others[row.key[1:]])
            )
            for row in mine
            if row.method != AUTOREGRESSIVE
        }

    def promote(self, checkpoint: str | Path) -> None:
        """Let the pointer lead to `checkpoint`: a reader finds the old one or the new one."""
        target = os.path.relpath(Path(checkpoint).resolve(), self.given.parent.resolve())
        point_to(self.given, target)


def names_form(given: str | Path) -> bool:
    """Return True for a name of n-grams, or of a folder's drafter in another form, not a path."""
    return not os.path.lexists(given) and not DrafterName.parse(str(given)).is_plain


def folder_of(given: Path) -> Path:
    """Follow a baseline to its folder; rows name the folder itself, since a pointer may lead
    elsewhere tomorrow.

    Raises NotFound when there is none.
    """
    if os.path.isfile(given):
        raise NotFound(
            f"{given} is a file, wanted a folder or a symlink: make a symlink to the folder "
            f"(ln -sfn FOLDER {given})"
        )
    folder = Path(os.path.realpath(given)) if os.path.islink(given) else given
    if not os.path.isdir(folder):
        raise NotFound(f"{given} leads to no folder ({os.path.abspath(folder)})")
    return folder


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


def _samples(store: ResultStore, row: ResultRow) -> list[SampleRow]:
    samples = store.samples(row)
    if len(samples) != row.num_prompts:
        raise BadData(
            f"{store.directory / row.samples} holds {len(samples)} of {row.num_prompts} prompts: "
            "restore it, or evaluate again with --overwrite"
        )
    return samples
