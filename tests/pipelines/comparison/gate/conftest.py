"""Fixtures of the gate's tests."""

import pytest

from stree_pipelines.evaluation.answering import stalls
from stree_pipelines.reports.tables import answer_notes


@pytest.fixture(scope="module")
def calm():
    """Mark no rows: a machine that runs many tests holds answers up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stalls, "MIN_ANSWERS", 10**9)
        patch.setattr(answer_notes, "MAX_WAITING_SHARE", 1.0)
        yield
