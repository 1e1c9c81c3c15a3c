"""Loggers that a user asks for with trainer.logger beside our own files: Weights & Biases, MLflow
and whatever else Lightning has one for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from lightning.pytorch.loggers import Logger, WandbLogger

from stree.errors import UsageError, first_line

_MISSING_PACKAGE = re.compile(
    r"class_path '(?:\w+\.)*(?P<name>\w+)':\s+Requirement '(?P<package>[^']+)' not met"
)


@contextmanager
def naming_missing_packages() -> Iterator[None]:
    """Turn jsonargparse's pages about a logger whose package is not installed into one line."""
    try:
        yield
    except ValueError as error:
        missing = _MISSING_PACKAGE.search(str(error))
        if missing is None:
            raise
        raise UsageError(
            f"{missing['name']} needs {missing['package']}, which is not installed: "
            f"pip install '{missing['package']}'"
        ) from error


def start_tracker(logger: Logger, config: Mapping[str, Any], until_the_end: ExitStack) -> None:
    """Give the resolved configuration to a logger, and let it end with `until_the_end`.

    Raises UsageError with the logger's own reason when it cannot start (nobody is logged in, say).
    """
    try:
        logger.log_hyperparams(dict(config))
    except Exception as error:  # each has exceptions of its own
        raise UsageError(
            f"{type(logger).__name__} cannot start: {first_line(error)}; metrics.csv and "
            "tensorboard/ have the same rows without it"
        ) from error
    if isinstance(logger, WandbLogger):
        # By itself it ends with the interpreter, which one of several processes does not wait for.
        until_the_end.push(partial(_finish, logger))


def _finish(logger: WandbLogger, error: type[BaseException] | None, *_: object) -> None:
    logger.experiment.finish(exit_code=int(error is not None))
