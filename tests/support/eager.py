"""Decode without graphs, to compare the results of captured steps with those of plain ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from stree.batching.runners import EagerRunner

T = TypeVar("T")


def without_graphs(monkeypatch: Any, run: Callable[[], T]) -> T:
    """Return what `run()` gives when its decoders launch each operation by itself."""
    with monkeypatch.context() as patch:
        patch.setattr("stree.batching.batch_decoder.runner_of", EagerRunner)
        return run()
