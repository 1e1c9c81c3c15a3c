"""Decode without graphs, or by fused kernels, to compare results with those of other steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest
import torch

from stree import BatchDecoder
from stree.batching.runners import EagerRunner
from stree_kernels import ops

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


def by_graphs(monkeypatch: Any, served: list[Any], *models: Any, **options: Any) -> list[Any]:
    """Return a batch decoder's outputs by graphs; require that steps without them give the same."""
    def serve() -> list[Any]:
        return BatchDecoder(*models, max_length=64, **options).generate(served)

    outputs = serve()
    assert_same(outputs, without_graphs(monkeypatch, serve))
    return outputs


def by_fused_kernels(
    monkeypatch: Any, served: list[Any], *models: Any, **options: Any
) -> list[int]:
    """Require that steps of two rows by fused kernels, which Triton's interpreter runs, give what
    steps of plain PyTorch give; return the number of drafts that each call accepted."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter's; tests/stree/batching/test_graphs.py compares them on a GPU")

    def serve() -> list[Any]:
        decoder = BatchDecoder(*models, num_rows=2, max_length=32, max_nodes=10, **options)
        return [(out.tokens, out.stats.accepted_per_call) for out in decoder.generate(served)]

    wanted = serve()
    monkeypatch.setattr(ops, "fused", lambda *_: True)
    assert serve() == wanted
    return [count for _, accepted in wanted for count in accepted]
