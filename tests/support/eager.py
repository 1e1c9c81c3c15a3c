"""Decode without graphs, to compare the results of captured steps with those of plain ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from stree.batching.runners import EagerRunner

T = TypeVar("T")


def without_graphs(monkeypatch: Any, run: Callable[[], T]) -> T:
    """Return what `run()` gives when its decoders launch each operation by itself."""
    with monkeypatch.context() as patch:
        patch.setattr("stree.engine.worker.runner_of", EagerRunner)
        return run()


def assert_same(got: Iterable[Any], wanted: Iterable[Any]) -> None:
    """Compare outputs one by one: tokens, ends, and the drafts that each call accepted."""
    for mine, theirs in zip(got, wanted, strict=True):
        assert (mine.tokens, mine.finish_reason) == (theirs.tokens, theirs.finish_reason)
        assert mine.stats.accepted_per_call == theirs.stats.accepted_per_call
        assert mine.stats.end_node_per_call == theirs.stats.end_node_per_call
