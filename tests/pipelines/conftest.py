"""Training sets switches of the whole process; each test starts from PyTorch's defaults."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture(autouse=True)
def default_torch_switches():
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(scope="session", autouse=True)
def short_on_policy_check():
    """Shorten the on-policy check, which would take half the time of a tiny training.

    test_on_policy_check.py runs it whole.
    """
    with pytest.MonkeyPatch.context() as patch:
        if on_policy_check := sys.modules.get("stree_pipelines.training.teachers.on_policy_check"):
            patch.setattr(on_policy_check, "NUM_ROWS", 2)
            patch.setattr(on_policy_check, "NEW_TOKENS", 4)
        yield


@pytest.fixture(scope="session", autouse=True)
def imports_stay_frozen():
    """Free an evaluation's decoders without looking through all that was imported."""
    with pytest.MonkeyPatch.context() as patch:
        if decoders := sys.modules.get("stree_pipelines.evaluation.answering.decoders"):
            patch.setattr(decoders, "gc_freeze", SimpleNamespace(collect=gc.collect))
        yield


@pytest.fixture
def drawn():
    """Let matplotlib draw a test's figures; without this fixture they are blank."""


@pytest.fixture(autouse=True)
def blank_figures(request, monkeypatch):
    """Leave figures blank, whose drawing takes most of a report's time."""
    plots = sys.modules.get("stree_pipelines.reports.plots")
    if plots and "drawn" not in request.fixturenames:
        blank = {"svg": "<svg></svg>", "pdf": b"%PDF"}
        monkeypatch.setattr(
            plots.Figure, "savefig", lambda _, file, format, **options: file.write(blank[format])
        )
