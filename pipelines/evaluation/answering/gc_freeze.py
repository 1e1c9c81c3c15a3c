"""Python's garbage collection, kept out of what is timed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def left_alone() -> Iterator[None]:
    """What there is at the beginning is looked at by no collection before the end. A full one looks
    at all that torch, transformers and datasets have made: a quarter of a second, in the middle of
    somebody's answer."""
    if gc.get_freeze_count():  # somebody around this has asked for it
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def collect() -> None:
    """Free whatever nothing refers to but itself, what is left alone included."""
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if frozen:
        gc.freeze()
