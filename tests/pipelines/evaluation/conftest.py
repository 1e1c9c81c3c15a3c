"""Fixtures of the tests of evaluations."""

import pytest
from tiny_evaluation import export, make_world, quiet, settings_for

from stree_pipelines.evaluation.result_store import ResultStore


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def complete(world, tmp_path_factory):
    """Evaluate all three checkpoints at T = 0 and 1, in one process."""
    out = tmp_path_factory.mktemp("complete")
    evaluation = quiet(settings_for(world, out, temperatures=(0.0, 1.0)))
    for step in (1, 10, 100):
        evaluation.evaluate(export(world, step))
    return ResultStore(out)
