"""Fixtures of the tests of `stree.load`, and of ways to read prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stree.batching.prefillers import ChunkedPrefill, PromptCall
from stree.checkpoints.load_save import load_model, save_model
from stree.checkpoints.tokenizer import load_tokenizer


@pytest.fixture
def without_a_gpu(monkeypatch):
    """Let "auto" be the CPU, wherever these tests run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def drafter(workspace, tmp_path) -> Path:
    """Save the target again, as a drafter that is always right."""
    target = workspace / "target"
    save_model(load_model(target), tmp_path / "drafter", load_tokenizer(target))
    return tmp_path / "drafter"


@pytest.fixture(params=["whole", "in chunks"])
def either_way(request, monkeypatch):
    """Read prompts whole, or in chunks as on a GPU."""
    if request.param == "in chunks":
        chunked = "stree.batching.runners.Prefiller", lambda: ChunkedPrefill(PromptCall)
        monkeypatch.setattr(*chunked)
        monkeypatch.setattr("stree.batching.prefillers.SHORTEST_CHUNK", 2)
