"""Print a training's messages, and silence its libraries' noise."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path

import lightning
from lightning.pytorch.utilities import rank_zero_only

# Warnings of Lightning and mamba-ssm that no user can act on.
NOISE = (
    "You have overridden `",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    "Deterministic mode: set TRITON_CACHE_AUTOTUNING",
    # Lightning instantiates by it, too.
    r"\s*``ArgumentParser.add_instantiator`` was deprecated",
    "Since DeepSpeed handles gradient clipping internally",
    "The `srun` command is available on your system but is not used",
    r"The number of training batches \(\d+\) is smaller than the logging interval",
    "Total length of `list` across ranks is zero",  # without validation data
)
LIGHTNING = str(Path(lightning.__file__).parent)


def has_cursor() -> bool:
    """Return True when stderr is a terminal that can redraw a bar."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


@rank_zero_only
def say(line: str) -> None:
    """Print a line on the main process only."""
    print(line, flush=True)


def quieten() -> None:
    for message in NOISE:
        warnings.filterwarnings("ignore", message=message)
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(_is_no_banner)


def _is_no_banner(record: logging.LogRecord) -> bool:
    """Drop Lightning's own remarks, about missing devices and its products.

    Our data module logs through the same loggers, and passes.
    """
    return record.levelno > logging.INFO or not record.pathname.startswith(LIGHTNING)
