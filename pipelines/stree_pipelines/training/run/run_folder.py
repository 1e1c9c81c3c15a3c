"""Write the folder of a training run: its configuration, its command and its metrics.

RUN/config.yaml (resolved), RUN/command.json (command line, commit, versions), RUN/metrics.csv.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from stree.common.errors import BadData, CheckpointRefused, UsageError
from stree.common.files import reporting_refusals, sweep_leftovers, write_atomically
from stree.common.plain_data import parse_yaml, read_text
from stree_pipelines.console.command_line import typed_command
from stree_pipelines.console.config_files import dotted
from stree_pipelines.evaluation.context import describe_code
from stree_pipelines.evaluation.records import config_hash
from stree_pipelines.resources.folder_locks import LOCK_NAME, locked

# Sections that a resumed run may not change: the curve would be of two different runs.
FIXED_SECTIONS = ("seed_everything", "model", "data", "tokenizer")
# Trainer options that a resumed run may change: length, place and output of the run. A larger
# max_steps extends a finished run.
FREE_TRAINER_OPTIONS = {
    "max_steps", "max_epochs", "max_time", "accelerator", "strategy", "devices", "num_nodes",
    "logger", "callbacks", "log_every_n_steps", "enable_progress_bar", "enable_model_summary",
    "profiler", "default_root_dir", "enable_autolog_hparams", "model_registry",
    "val_check_interval", "check_val_every_n_epoch", "limit_val_batches", "num_sanity_val_steps",
    "detect_anomaly", "enable_checkpointing",
}
# Also free: how the rows of a global batch are shared (the checkpoint has their number), and
# options that trade memory for time.
FREE_OPTIONS = {
    "data": {"batch_size", "global_batch_size"},
    "model": {"target_placement", "activation_checkpointing"},
}
LOCK_PATIENCE_S = 10.0
FILES_BEFORE_FIRST_STEP = {LOCK_NAME, "config.yaml", "command.json"}
COLUMNS = (
    "step", "loss", "simulated_acceptance", "val_loss", "val_simulated_acceptance",
    "tokens_per_second", "lr", "grad_norm", "divergence", "cross_entropy", "tokens_seen",
)


def fixed_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a resolved config that decides the weights (no folders, no devices)."""
    fixed = {section: config.get(section) for section in FIXED_SECTIONS}
    for section, free in FREE_OPTIONS.items():
        values = fixed[section] or {}
        fixed[section] = {name: values[name] for name in values if name not in free}
    trainer = config.get("trainer", {})
    free = FREE_TRAINER_OPTIONS - {"max_steps"}
    fixed["trainer"] = {name: value for name, value in trainer.items() if name not in free}
    # JSON has no tuples: a config read back from YAML must hash like the parsed one.
    return json.loads(json.dumps(fixed))


def hash_of_config(config: Mapping[str, Any], global_batch_size: int) -> str:
    """Hash `fixed_config` and the rows per step (sha256): runs with one hash are the same run."""
    return config_hash({**fixed_config(config), "global_batch_size": global_batch_size})


def take_run_folder(run_dir: Path) -> AbstractContextManager[None]:
    """Create RUN and keep other trainings out of it inside the block.

    Waits a little, for the last process of a training that was just killed. Raises CannotWrite when
    the folder or disk refuses, and UsageError when another training has the folder.
    """

    def refuse() -> None:
        raise UsageError(
            f"another training is running in {run_dir}: wait for its end, or choose another "
            "--run_dir"
        )

    return locked(run_dir / LOCK_NAME, refuse, patience_s=LOCK_PATIENCE_S)


@contextmanager
def removing_what_was_refused(run_dir: Path) -> Iterator[None]:
    """Remove a new run folder when the block is refused (exit codes 2, 65, 66) before the first
    step.

    Such a folder holds only files that the next command writes anew. A folder that was there before
    stays.
    """
    is_new = not run_dir.exists()
    try:
        yield
    except (UsageError, BadData, CheckpointRefused):
        if is_new and {each.name for each in run_dir.glob("*")} <= FILES_BEFORE_FIRST_STEP:
            shutil.rmtree(run_dir, ignore_errors=True)
        raise


def prepare_run_folder(run_dir: Path, config: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Write RUN's config.yaml and command.json; called before anything is computed.

    Args:
        config: the resolved configuration.
        facts: further entries of command.json, after argv, commit and versions (target, seed).

    Raises CannotWrite when the folder or disk refuses.
    """
    sweep_leftovers(run_dir)
    write_atomically(run_dir / "config.yaml", yaml.safe_dump(dict(config), sort_keys=False))
    command = {
        "argv": sys.argv,
        "command_line": typed_command(),
        **describe_code(),
        **facts,
    }
    write_atomically(run_dir / "command.json", json.dumps(command, indent=2) + "\n")


def require_same_run(run_dir: Path, config: Mapping[str, Any]) -> None:
    """Raise UsageError when RUN was made with another model, other data, seed or numerics.

    A run that never got to its first checkpoint has nothing that another config could spoil.
    """
    path = run_dir / "config.yaml"
    if not path.is_file() or not any((run_dir / "checkpoints").glob("step-*")):
        return
    if changed := changes_since(run_dir, config, but={"trainer.max_steps"}):
        raise UsageError(
            f"{run_dir} holds a run with another configuration ({changed}): choose another "
            "--run_dir, or the old values"
        )


def changes_since(
    run_dir: Path, config: Mapping[str, Any], but: Collection[str] = frozenset()
) -> str:
    """Name up to three options that decide the weights and differ from RUN/config.yaml's.

    Return "" when nothing differs; raise UsageError when RUN/config.yaml cannot be read.

    Args:
        config: a resolved configuration.
        but: dotted names of options that may differ.
    """
    path = run_dir / "config.yaml"
    try:
        old = _flatten(fixed_config(parse_yaml(read_text(path))))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UsageError(
            f"{path} cannot be read ({error}): restore it, or choose another --run_dir"
        ) from error
    new = _flatten(fixed_config(config))
    changed = [
        f"{key} was {old.get(key)!r}, now {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and key not in but
    ]
    return "; ".join(changed[:3]) + ("; …" if len(changed) > 3 else "")


def _flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: each for key, each in dotted(values).items() if not isinstance(each, Mapping)}


class Curves(TensorBoardLogger):
    """Logger of RUN/tensorboard.

    metrics.csv has the same rows, so a disk that refuses these is reported once and the training
    goes on without them.
    """

    def __init__(self, run_dir: Path, last_step: int = 0) -> None:
        super().__init__(str(run_dir), name="", version="tensorboard", purge_step=last_step + 1)
        self._is_refused = False

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._try(super().log_metrics, metrics, step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self._try(super().finalize, status)

    def _try(self, write: Callable[..., None], *arguments: Any) -> None:
        if self._is_refused:
            return
        try:
            write(*arguments)
        except (OSError, ValueError) as error:
            # Lightning reports every error as a value that cannot be logged.
            reason = error.__cause__ if isinstance(error, ValueError) else error
            if not isinstance(reason, OSError):
                raise
            self._is_refused = True
            print(f"{self.log_dir} ends here: {reason.strerror}", file=sys.stderr, flush=True)


class MetricsFile(Logger):
    """Logger of RUN/metrics.csv, one row per logged step, flushed as it is written.

    Rows after `last_step` (of a run that was killed after its last checkpoint) are dropped at the
    start, so a resumed run leaves the file that an uninterrupted one would have left.
    """

    def __init__(self, path: Path, last_step: int = 0) -> None:
        super().__init__()
        self.path = path
        self._last_step = last_step
        self._columns: list[str] = []

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: config.yaml holds them."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add a row. Raises CannotWrite when the disk refuses it.

        A partly written row is dropped when the run goes on from the checkpoint before it.
        """
        row = {"step": step, **metrics}
        if not self._columns:
            self._start()
        new = [key for key in row if key not in self._columns]
        if new:
            rows = _read_rows(self.path)
            self._columns += new
            write_atomically(self.path, _as_csv(self._columns, rows, header=True))
        text = _as_csv(self._columns, [row], header=False)
        with (
            reporting_refusals(self.path, needed_bytes=len(text), codes=None),
            open(self.path, "a", encoding="utf-8", newline="") as file,
        ):
            file.write(text)

    def _start(self) -> None:
        rows = [row for row in _read_rows(self.path) if int(row["step"]) <= self._last_step]
        seen = list(rows[0]) if rows else []
        self._columns = [*COLUMNS, *(key for key in seen if key not in COLUMNS)]
        write_atomically(self.path, _as_csv(self._columns, rows, header=True))


def _read_rows(path: Path) -> list[dict[str, str]]:
    """Read the rows of a metrics file, without a last line that a killed writer left unfinished."""
    if not path.is_file():
        return []
    try:
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        rows = list(csv.DictReader(io.StringIO(whole)))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadData(f"{path} is no table of metrics ({error}): move it away") from error
    return [row for row in rows if (row.get("step") or "").isdecimal()]


def _as_csv(columns: list[str], rows: list[Any], header: bool) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
