"""Make the loggers of trainer.logger: Weights & Biases, MLflow and Lightning's others.

They come in addition to our own files.
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

_MISSING_PACKAGE = re.compile(r"(?:Requirement|Module not found:) '(?P<package>[^']+)'")


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
