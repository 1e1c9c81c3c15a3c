"""Decoding without graphs, to compare steps that are graphs with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from stree.batching.runners import EagerRunner

T = TypeVar("T")


def without_graphs(monkeypatch: Any, run: Callable[[], T]) -> T:
    """What it gives when its decoders launch one operation after the other."""
    with monkeypatch.context() as patch:
        patch.setattr("stree.batching.batch_decoder.runner_of", EagerRunner)
        return run()
