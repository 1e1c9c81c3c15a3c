"""Keep Python's garbage collection out of timed code."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def left_alone() -> Iterator[None]:
    """Freeze existing objects (gc.freeze) so that no collection scans them inside the block.

    A full collection scans all objects of torch, transformers and datasets: a quarter of a second,
    in the middle of an answer.
    """
    if gc.get_freeze_count():  # an outer block has frozen them
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def collect() -> None:
    """Collect garbage, frozen objects included."""
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if frozen:
        gc.freeze()
