"""Set the trainer's defaults, refuse settings that no run can have, and make further loggers.

Loggers of trainer.logger (Weights & Biases, MLflow and others) come in addition to our own files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.cli import instantiate_class
from lightning.pytorch.loggers import Logger, WandbLogger

from stree.common.errors import UsageError, first_line
from stree_pipelines.training.parallel.precision import supported_precision
from stree_pipelines.training.parallel.sharding import SHARDED, require_supported

_MISSING_PACKAGE = re.compile(r"(?:Requirement|Module not found:) '(?P<package>[^']+)'")
TRAINER_DEFAULTS: dict[str, Any] = {
    "max_epochs": -1,  # steps count, not passes over the data
    "max_steps": 1000,
    "log_every_n_steps": 10,
    "gradient_clip_val": 1.0,
    "val_check_interval": 100,
    "check_val_every_n_epoch": None,
    "num_sanity_val_steps": 0,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "devices": 1,
    # Otherwise a resumed run on a GPU would not be the same run; costs a few percent.
    "deterministic": True,
}


def require_trainable(trainer: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Raise UsageError for trainer.* settings that no run can have, or that model.* excludes."""
    max_steps = trainer["max_steps"]
    if max_steps < 1:
        raise UsageError(
            f"trainer.max_steps is {max_steps}, wanted the number of optimiser steps: data and "
            "learning rate depend on it"
        )
    for name in ("accumulate_grad_batches", "log_every_n_steps", "val_check_interval"):
        value = trainer[name]
        if value is not None and value <= 0:
            raise UsageError(f"trainer.{name} is {value}, wanted more than 0")
    require_supported(trainer["strategy"])
    supported_precision(trainer["precision"])
    _require_one_whole_model(trainer["strategy"], model)


def _require_one_whole_model(strategy: str, model: Mapping[str, Any]) -> None:
    """Refuse a sharding strategy with options that need whole weights in each process.

    Decay phases copy the weights as each process has them; Muon orthogonalises whole matrices.
    """
    optimizer = model["optimizer"]
    used = {
        "model.features.ahead": bool((model.get("features") or {}).get("ahead")),
        "model.optimizer.schedule wsd": optimizer["schedule"] == "wsd",
        "model.optimizer.kind muon": optimizer["kind"] == "muon",
    }
    for name, is_used in used.items():
        if is_used and strategy in SHARDED:
            raise UsageError(
                f"{name} needs the whole weights in each process, trainer.strategy {strategy} "
                "shares them: use ddp, or leave one of them out"
            )


def make_tracker(given: Namespace) -> Logger:
    """Make a logger from its class_path and init_args.

    Raises `UsageError` when the package that it needs is not installed.
    """
    options = given.as_dict()
    try:
        return instantiate_class((), {"init_args": {}, **options})
    except ModuleNotFoundError as error:
        name = options["class_path"].rpartition(".")[2]
        missing = _MISSING_PACKAGE.search(str(error))
        package = missing["package"] if missing else error.name
        raise UsageError(
            f"{name} needs {package}, which is not installed: pip install '{package}'"
        ) from error


def start_tracker(logger: Logger, config: Mapping[str, Any], until_the_end: ExitStack) -> None:
    """Give the resolved configuration to a logger, and let it end with `until_the_end`.

    Raises UsageError with the logger's own reason when it cannot start (no login, for example).
    """
    try:
        logger.log_hyperparams(dict(config))
    except Exception as error:  # each has exceptions of its own
        raise UsageError(
            f"{type(logger).__name__} cannot start: {first_line(error)}; metrics.csv and "
            "tensorboard/ have the same rows without it"
        ) from error
    if isinstance(logger, WandbLogger):
        # By itself it ends with the interpreter, and one of several processes does not wait for it.
        until_the_end.push(partial(_finish, logger))


def _finish(logger: WandbLogger, error: type[BaseException] | None, *_: object) -> None:
    logger.experiment.finish(exit_code=int(error is not None))
