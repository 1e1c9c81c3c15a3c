"""Look up a gate's baseline: a checkpoint, the results of one, or a pointer to either."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stree.common.errors import CannotWrite, NotFound, UsageError
from stree.common.files import write_atomically
from stree.drafters.names import DrafterName
from stree_pipelines.evaluation.plan import AUTOREGRESSIVE, Job
from stree_pipelines.evaluation.records import ResultRow
from stree_pipelines.evaluation.result_store import RESULTS_NAME, ResultStore

MAX_POINTER_BYTES = 4096


@dataclass(frozen=True)
class Baseline:
    """A baseline as given and the folder it leads to.

    Attributes:
        given: a checkpoint or results folder, a symlink to one, or a text file of one line that
            names one, relative to itself; or another drafter's name, such as float8:FOLDER.
        drafter: the folder in the end, or that name.
        results: folder of its rows; None for a checkpoint that is yet to be measured.
        step: the checkpoint's step among the results; None when they hold one checkpoint.
    """

    given: Path
    drafter: str
    results: Path | None
    step: int | None = None

    @classmethod
    def at(cls, given: str | Path, step: int | None = None, movable: bool = False) -> Baseline:
        """Look the baseline up.

        Raises `folder_of`'s errors, and UsageError when it cannot be moved (`movable`) because it
        is a folder and no pointer.
        """
        if names_form(given):
            if movable or step is not None:
                raise UsageError(
                    f"--baseline {given} is a drafter's name: it cannot be moved by --promote, and "
                    "--baseline_step chooses among results, of which it has none"
                )
            return cls(Path(given), str(given), None)
        given = Path(given)
        folder = folder_of(given)
        if movable and not given.is_symlink() and not given.is_file():
            raise UsageError(
                f"--promote moves a pointer and --baseline {given} is a folder: give a symlink to "
                "it, or a text file that holds its path"
            )
        candidates = [path for path in (folder, folder / "eval") if (path / RESULTS_NAME).is_file()]
        results = candidates[0] if candidates else None
        if step is not None and results is None:
            raise UsageError(f"--baseline_step chooses among results, and {folder} holds none")
        return cls(given, str(folder), results, step)

    def rows(self, jobs: Sequence[Job]) -> list[ResultRow]:
        """Return the baseline's row for each job that drafts: same target, prompts and decoding.

        Raises UsageError when one is missing, or several checkpoints have one.
        """
        assert self.results is not None
        stored = ResultStore(self.results).results()
        return [self._row(job, stored) for job in jobs if job.method != AUTOREGRESSIVE]

    def _row(self, job: Job, stored: Sequence[ResultRow]) -> ResultRow:
        where = f"{job.method} on {job.benchmark.name} at T = {job.temperature:g}"
        steps = [row for row in stored if row.checkpoint and self.step in (None, row.step)]
        found = [row for row in steps if row.key[1:] == job.result_key[1:]]
        if not found:
            kin = any(row.method == job.method and row.benchmark == job.benchmark.name
                      for row in steps)
            why = "only with another target, tree, prompts or decoding options" if kin else "at all"
            if not kin and self.step is not None:
                why += f" at step {self.step}"
            raise UsageError(
                f"{self.results} does not have {where} {why}: use its options (and --limit), or "
                "give the baseline's checkpoint, which is then measured"
            )
        if len({row.checkpoint_sha256 for row in found}) > 1:
            steps_found = ", ".join(str(row.step) for row in found)
            raise UsageError(
                f"{self.results} has {where} of several checkpoints (steps {steps_found}): choose "
                "one with --baseline_step"
            )
        return found[-1]

    def promote(self, checkpoint: str | Path) -> None:
        """Let the pointer lead to `checkpoint`: a reader finds the old one or the new one."""
        target = os.path.relpath(Path(checkpoint).resolve(), self.given.parent.resolve())
        if not self.given.is_symlink():
            write_atomically(self.given, target + "\n")
            return
        from stree_pipelines.training.checkpoints.export import point_to  # brings the trainer along

        try:
            point_to(self.given, target)
        except OSError as error:
            raise CannotWrite(
                f"cannot move {self.given}: {error.strerror}; the old baseline stays"
            ) from error


def names_form(given: str | Path) -> bool:
    """Return True for a name of n-grams, or of a folder's drafter in another form, not a path."""
    return not os.path.lexists(given) and not DrafterName.parse(str(given)).is_plain


def folder_of(given: Path) -> Path:
    """Follow a baseline to its folder.

    Raises NotFound when there is none, UsageError for a file that is no pointer.
    """
    try:
        folder = _follow(given)
        is_there = folder.is_dir()
    except (OSError, ValueError, RuntimeError) as error:  # a loop of links, a name of 10^6 bytes
        raise UsageError(f"--baseline {given} is no pointer to a folder: {error}") from error
    if not is_there:
        raise NotFound(f"{given} leads to no folder ({folder.resolve()})")
    return folder


def _follow(given: Path) -> Path:
    """Resolve a pointer; rows name the folder itself, since a pointer may lead elsewhere
    tomorrow."""
    if not given.is_file():
        return given.resolve() if given.is_symlink() else given
    if given.stat().st_size > MAX_POINTER_BYTES:
        raise ValueError("wanted one line, a folder")
    text = given.read_text(encoding="utf-8", errors="replace").strip()
    if len(text.splitlines()) != 1:
        raise ValueError("wanted one line, a folder")
    return (given.parent / text).resolve()
