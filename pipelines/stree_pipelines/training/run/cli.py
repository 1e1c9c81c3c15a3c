"""Run distill.py and train_target.py: one YAML, dotted overrides, one run folder."""

from __future__ import annotations

import argparse
import sys
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.utils.deterministic
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from stree.checkpoints.tokenizer import fingerprint
from stree.common.errors import (
    CheckpointRefused,
    StreeError,
    UsageError,
    naming_what_does_not_fit,
)
from stree.common.files import FULL_DISK, read_manifest, reporting_refusals, sweep_leftovers
from stree.common.words import counted
from stree_pipelines.console.command_line import SUBCOMMAND, input_path
from stree_pipelines.console.input_checks import TRAINING_INPUTS, of_training, require_there
from stree_pipelines.data.datamodule import ConversationDataModule, accumulation
from stree_pipelines.evaluation.context import describe_code
from stree_pipelines.resources.disk import disk_shortage, require_writable
from stree_pipelines.resources.estimates import config_lines, model_line
from stree_pipelines.training.checkpoints.export import Exports
from stree_pipelines.training.checkpoints.saving import (
    SafeCheckpointIO,
    TrainingCheckpoints,
    latest_valid,
    remove_all_but,
)
from stree_pipelines.training.lightning_internals import handle_signals_ourselves
from stree_pipelines.training.module import Training
from stree_pipelines.training.optimization import OptimizerConfig
from stree_pipelines.training.run.callbacks import EvaluateExports, LogMetrics
from stree_pipelines.training.run.console import has_cursor, quieten, say
from stree_pipelines.training.run.estimates import SMALLER_TRAINING, describe_training, disk_of
from stree_pipelines.training.run.parser import HelpAll, TrainingParser
from stree_pipelines.training.run.progress import TrainingBar
from stree_pipelines.training.run.restarts import Restarts
from stree_pipelines.training.run.run_folder import (
    Curves,
    MetricsFile,
    hash_of_config,
    prepare_run_folder,
    removing_what_was_refused,
    require_same_run,
    take_run_folder,
)
from stree_pipelines.training.run.trainer_settings import (
    TRAINER_DEFAULTS,
    make_tracker,
    require_trainable,
    start_tracker,
)
from stree_pipelines.training.teachers.on_policy_check import OnPolicyCheck

SHOWN_FROM = 64  # conversations in which --show_mask looks for one with a loss


class TrainingCLI(LightningCLI):
    """LightningCLI with a run folder that is resumed by default, and our own checkpoints."""

    program: str
    description = "Train in a run folder that the same command resumes."
    usage = f"{SUBCOMMAND} --config FILE --run_dir FOLDER"
    export_folder = "drafter"
    evaluates = True
    resume_path: Path | None = None

    def __init__(self, model_class: type[Training], args: list[str] | None = None) -> None:
        self.trackers: list[Logger] = []
        with ExitStack() as self._until_the_end:
            self._run(model_class, args)

    def _run(self, model_class: type[Training], args: list[str] | None) -> None:
        quieten()
        texts = {"usage": f"{self._synopsis} [options]", "description": self.description}
        super().__init__(
            model_class,
            ConversationDataModule,
            trainer_defaults={**TRAINER_DEFAULTS, "enable_progress_bar": has_cursor()},
            seed_everything_default=0,
            save_config_callback=None,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            parser_class=TrainingParser,
            parser_kwargs={"prog": self.program, SUBCOMMAND: texts},
            args=args,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        inputs = {"model", "train_dataloaders", "val_dataloaders", "datamodule"}
        return {SUBCOMMAND: inputs | {"ckpt_path", "weights_only"}}

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse, with the subcommand first, and resolve the input paths of the configuration."""
        given = sys.argv[1:] if args is None else list(args)
        self.config = parser.parse_args(self._with_subcommand(given))
        self._dump_config()  # with names as they were given: the same run from any folder
        for section, name in TRAINING_INPUTS:
            options = self.options.get(section, {})
            value = options.get(name)
            if isinstance(value, str):
                options[name] = input_path(value)
            elif value is not None:
                options[name] = [input_path(each) for each in value]

    def _with_subcommand(self, given: list[str]) -> list[str]:
        if given[:1] in (["-h"], ["--help"], ["--help_all"], ["--help-all"]):
            return [SUBCOMMAND, *given]
        if given[:1] != [SUBCOMMAND]:
            raise UsageError(f"`{SUBCOMMAND}` is missing, which comes first: {self._synopsis}")
        if len(given) == 1:
            raise UsageError(f"--config and --run_dir are missing: {self._synopsis}")
        return given

    @property
    def _synopsis(self) -> str:
        return f"{self.program} {self.usage}"

    def add_arguments_to_parser(self, parser: TrainingParser) -> None:
        self._add_own_options(parser)
        parser.add_lightning_class_args(LogMetrics, "progress")
        parser.add_lightning_class_args(Exports, "export")
        # Training state before evaluations: an evaluation that fails must not cost a step.
        parser.add_lightning_class_args(TrainingCheckpoints, "checkpoint")
        if self.evaluates:
            parser.add_lightning_class_args(EvaluateExports, "evaluation")
        parser.link_arguments("seed_everything", "data.seed", compute_fn=int)

    def _add_own_options(self, parser: TrainingParser) -> None:
        """Add the options that are no part of a YAML file."""
        add = parser.add_argument
        add("--help_all", action=HelpAll, default=argparse.SUPPRESS,
            help="Show the help with all options of Lightning's trainer, and exit.")
        add("--run_dir", type=str | None, default=None,
            help="Run folder; running the same command again goes on where it stopped. Needed "
            "unless with --show_mask.")
        add("--show_mask", action="store_true",
            help="Print a training conversation with its loss mask in colour, and exit.")
        add("--dry_run", action="store_true",
            help="Read config and data, say what the run would take, write nothing, and exit.")

    @property
    def options(self) -> Any:
        """The parsed configuration of the subcommand."""
        return self.config[self.config["subcommand"]]

    @property
    def run_dir(self) -> Path:
        return Path(self.options["run_dir"])

    def _set_seed(self) -> None:
        seed = self.options["seed_everything"]
        if not 0 <= seed < 2**32:
            raise UsageError(f"seed_everything is {seed}, wanted 0 to 2³² − 1")
        super()._set_seed()

    def before_instantiate_classes(self) -> None:
        if torch.cuda.is_available():
            torch.set_float32_matmul_precision("high")
        # Deterministic mode would also fill every new tensor with NaN.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        require_trainable(self.options["trainer"], self.options["model"])
        if self.options["show_mask"]:
            return
        if self.options["run_dir"] is None:
            raise UsageError("--run_dir is missing: name the folder that the run is to be kept in")
        self._make_trackers()
        if not self.options["dry_run"]:
            self._take_folder()
        require_same_run(self.run_dir, self.config_dump)
        self.resume_path = latest_valid(self.run_dir)
        if not self.is_finished:
            require_there(of_training(lambda *key: self.options.get(key[0], {}).get(key[1])))
        if self.options["dry_run"]:
            require_writable(self.run_dir)
            # The plan stands in for the model.
            self.parser.add_instantiator(
                lambda model_class, **options: model_class.planned(**options), self._model_class,
                prepend=True,
            )
        elif not self.is_finished:
            self.restarts = Restarts(self.run_dir)
            self._prepare_run()

    def _make_trackers(self) -> None:
        """Make the loggers of trainer.logger, which are added to our own.

        Called before a folder is made and a model is loaded, since a logger's package may be
        missing.
        """
        given = self.options["trainer"]["logger"]
        if not isinstance(given, bool):
            self.trackers = [make_tracker(each) for each in _as_list(given)]
            self.options["trainer"]["logger"] = None

    @rank_zero_only
    def _take_folder(self) -> None:
        self._until_the_end.enter_context(removing_what_was_refused(self.run_dir))
        self._until_the_end.enter_context(take_run_folder(self.run_dir))

    @rank_zero_only
    def _prepare_run(self) -> None:
        """Write the run folder, before a model loads."""
        facts = {"target": self.target_path, "seed": int(self.options["seed_everything"])}
        prepare_run_folder(self.run_dir, self.config_dump, facts)
        counted = self.restarts.counted(self.resume_step, repr(self.config_dump))
        self._until_the_end.enter_context(counted)

    @property
    def resume_step(self) -> int:
        """Optimiser steps done by the checkpoint to resume from; 0 without one."""
        return int(self.resume_path.name.removeprefix("step-")) if self.resume_path else 0

    @property
    def is_finished(self) -> bool:
        return self.resume_step >= self.options["trainer"]["max_steps"]

    @property
    def target_path(self) -> str | None:
        """The target's folder; None when the target is trained."""
        return self.options["model"].get("target")

    def instantiate_classes(self) -> None:
        """Load models, unless nothing is to be trained."""
        if not self.options["show_mask"] and not self.is_finished:
            super().instantiate_classes()

    def _run_subcommand(self, subcommand: str) -> None:
        if self.options["show_mask"]:
            self._show_mask()
        elif self.is_finished:
            step, max_steps = self.resume_step, self.options["trainer"]["max_steps"]
            done = f"{step} of {max_steps} steps are done"
            if step > max_steps:
                done = f"{step} steps are done, trainer.max_steps asks for {max_steps}"
            self._tidy_up()
            say(f"{self.run_dir} is finished: {done}")
        elif self.options["dry_run"]:
            self._dry_run()
        else:
            super()._run_subcommand(subcommand)

    @rank_zero_only
    def _tidy_up(self) -> None:
        """Remove the leftovers of a kill after the last save."""
        for folder in ("", "checkpoints", self.export_folder):
            sweep_leftovers(self.run_dir / folder)
        remove_all_but(self.options["checkpoint"]["keep_last"], self.run_dir / "checkpoints")

    def _dry_run(self) -> None:
        say(config_lines(self.config_dump))
        plan: Any = self.model
        self._let_exports_decay()
        self._prepare_data(plan.trained.vocab_size)
        if self.evaluates:
            self._prepare_evaluation().require_settings()
        for line in describe_training(
            plan, self.datamodule, self.trainer, self._saving, self.run_dir, self.resume_step,
            self.export_folder, self.options["trainer"]["accelerator"],
        ):
            say(line)

    def _show_mask(self) -> None:
        """Print a conversation with its loss mask, reading only the first few of the data."""
        data = dict(self.options["data"])
        limit = data["limit"]
        data["limit"] = SHOWN_FROM if limit is None else min(limit, SHOWN_FROM)
        module = ConversationDataModule(**{**data, "valid": None})
        module.setup("fit")
        print(module.show_mask())

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        step = self.resume_step
        trainer_options = self._get(self.config_init, "trainer")
        own: list[Logger] = []
        if trainer_options.get("logger") is not False:
            own = [MetricsFile(self.run_dir / "metrics.csv", step), Curves(self.run_dir, step)]
        plugins: list[Any] = [SafeCheckpointIO()]
        if SLURMEnvironment.detect():
            plugins.append(SLURMEnvironment(auto_requeue=False))
        callbacks = [*_as_list(trainer_options.get("callbacks"))]
        has_bar = any(isinstance(each, ProgressBar) for each in callbacks)
        if trainer_options["enable_progress_bar"] and not has_bar:
            callbacks.append(TrainingBar())
        try:
            return super().instantiate_trainer(
                logger=own + self.trackers,
                callbacks=callbacks,
                plugins=plugins + _as_list(trainer_options.get("plugins")),
                default_root_dir=str(self.run_dir),
                **kwargs,
            )
        except StreeError:
            raise
        # Fewer GPUs than asked for, most often; an accelerator of no name
        except (MisconfigurationException, ValueError) as error:
            raise UsageError(
                f"trainer: {error}; see trainer.accelerator, trainer.devices and "
                "trainer.strategy (stree doctor says what is here)"
            ) from error

    def before_fit(self) -> None:
        self._prepare_data(self.model.exported.config.vocab_size)
        tokenizer = self.datamodule.tokenizer
        identity = {
            "config_hash": hash_of_config(self.config_dump, self._rows_a_step),
            "tokenizer_fingerprint": fingerprint(tokenizer),
            "global_batch_size": self._rows_a_step,
        }
        exports = self._callback(Exports)
        self._let_exports_decay()
        exports.directory = self.run_dir / self.export_folder
        exports.tokenizer = tokenizer
        exports.provenance = {**identity, **self.origin(), **describe_code()}
        checkpoints = self._callback(TrainingCheckpoints)
        checkpoints.run_dir = self.run_dir
        checkpoints.manifest_extra = identity
        for logger in self.trackers:
            start_tracker(logger, self.config_dump, self._until_the_end)
        callbacks = [OnPolicyCheck(), self.restarts]
        self.trainer.callbacks += callbacks  # type: ignore[attr-defined]
        if self.evaluates:
            self._prepare_evaluation()

    def _prepare_evaluation(self) -> EvaluateExports:
        evaluation: EvaluateExports = self._callback(EvaluateExports)
        evaluation.exports = self._callback(Exports)
        evaluation.target, evaluation.out = self.target_path or "", self.run_dir / "eval"
        return evaluation

    def _let_exports_decay(self) -> None:
        optimizer = OptimizerConfig(**self.options["model"]["optimizer"])
        if optimizer.branches:
            self._callback(Exports).decays = optimizer

    def _prepare_data(self, vocab_size: int) -> None:
        """Read the data, and refuse a tokenizer that does not fit the model."""
        self._share_global_batch()
        self.datamodule.setup("fit")
        num_ids = len(self.datamodule.tokenizer)
        if num_ids > vocab_size:
            raise UsageError(
                f"the tokenizer {self.datamodule.tokenizer_path} has {num_ids} ids, the "
                f"model {vocab_size}: set its vocab_size to at least that, or give the tokenizer "
                "that belongs to the model"
            )

    def _share_global_batch(self) -> None:
        """Set the trainer's accumulation to keep the global batch, and count validations in its
        steps."""
        trainer, data = self.trainer, self.datamodule
        trained = None
        if self.resume_path is not None:
            trained = read_manifest(self.resume_path).get("global_batch_size")
            if not isinstance(trained, int) or trained < 1:
                raise CheckpointRefused(
                    f"{self.resume_path} does not say its global batch (got {trained!r}): resume "
                    "from another checkpoint, or start in another run folder"
                )
        given = trainer.accumulate_grad_batches
        trainer.accumulate_grad_batches = accumulation(
            data.batch_size, trainer.world_size, given, data.global_batch_size, trained
        )
        if isinstance(trainer.val_check_interval, int):
            trainer.val_check_interval *= trainer.accumulate_grad_batches

    @property
    def _rows_a_step(self) -> int:
        trainer = self.trainer
        return self.datamodule.batch_size * trainer.world_size * trainer.accumulate_grad_batches

    def origin(self) -> dict[str, Any]:
        """Return the part of an export's provenance that names its inputs."""
        return {}

    @property
    def _saving(self) -> tuple[Exports, TrainingCheckpoints]:
        return self._callback(Exports), self._callback(TrainingCheckpoints)

    def _callback(self, kind: type) -> Any:
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        return next(each for each in callbacks if isinstance(each, kind))

    def fit(self, **kwargs: Any) -> None:
        """Train, from the last valid checkpoint if there is one."""
        max_steps = self.trainer.max_steps
        if self.resume_path is not None:
            say(f"resuming from {self.resume_path}")
        say(
            f"{model_line(self.export_folder, self.model.exported.config)}; {max_steps} steps of "
            f"{counted(self._rows_a_step, 'row')} on {self.trainer.world_size} "
            f"process{'es' if self.trainer.world_size > 1 else ''}"
        )
        disk = disk_of(
            self.model.plan(), self.datamodule, self.trainer, self._saving, self.run_dir,
            self.resume_step,
        )
        if shortage := disk_shortage(self.run_dir, disk):
            say(f"warning: {shortage}")
        with (
            naming_what_does_not_fit(SMALLER_TRAINING),
            self._noted_signals(),
            reporting_refusals(self.run_dir, codes=FULL_DISK),
        ):
            self.trainer.fit(ckpt_path=self.resume_path, **kwargs)
        latest = self.run_dir / self.export_folder / "latest"
        where = f"; the {self.export_folder} is {latest}" if latest.exists() else ""
        say(f"{self.run_dir}: {self.trainer.global_step} of {max_steps} steps are done{where}")
        if self._callback(OnPolicyCheck).found is not None:
            say(str(self._callback(OnPolicyCheck).found))
        if self.evaluates:
            self._callback(EvaluateExports).finish()

    def _noted_signals(self) -> AbstractContextManager[None]:
        signals = self._callback(TrainingCheckpoints).signals
        handle_signals_ourselves(self.trainer, signals.note)
        signals.waits_for_others = SLURMEnvironment.detect() and self.trainer.world_size > 1
        is_main = self.trainer.is_global_zero
        return signals.noted(is_main, self.restarts.forget if is_main else lambda: None)


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
