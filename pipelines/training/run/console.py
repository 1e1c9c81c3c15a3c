"""What a training says on a terminal, and what it keeps others from saying."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path

import lightning
from lightning.pytorch.utilities import rank_zero_only

# What Lightning and mamba-ssm say to everybody and nobody here can act on.
NOISE = (
    "You have overridden `(on_before_batch_transfer|transfer_batch_to_device)`",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    "Deterministic mode: set TRITON_CACHE_AUTOTUNING",
    # Lightning instantiates by it, too.
    r"\s*``ArgumentParser.add_instantiator`` was deprecated",
    "Since DeepSpeed handles gradient clipping internally",
    "The `srun` command is available on your system but is not used",
    r"The number of training batches \(\d+\) is smaller than the logging interval",
)
LIGHTNING = str(Path(lightning.__file__).parent)


def has_cursor() -> bool:
    """Whether what is said goes to a terminal that a bar can be drawn anew on."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


@rank_zero_only
def say(line: str) -> None:
    """Print on the main process."""
    print(line, flush=True)


def quieten() -> None:
    for message in NOISE:
        warnings.filterwarnings("ignore", message=message)
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(_is_no_banner)


def _is_no_banner(record: logging.LogRecord) -> bool:
    """What Lightning itself remarks in passing is about devices that are not there and products of
    its own; through the same loggers our data module says what it has read."""
    return record.levelno > logging.INFO or not record.pathname.startswith(LIGHTNING)
