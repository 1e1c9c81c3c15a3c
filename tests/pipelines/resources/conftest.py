"""Fixtures of the tests of dry runs and estimates."""

import json
from pathlib import Path

import pytest
from dry_runs import PROMPTS, options_of
from tiny_run import make_workspace

from stree_pipelines.commands import distill


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    folder = make_workspace(tmp_path_factory.mktemp("workspace"))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return folder


@pytest.fixture(scope="module")
def finished(workspace, tmp_path_factory) -> Path:
    """A run that keeps two checkpoints and has three exports."""
    run_dir = tmp_path_factory.mktemp("finished")
    distill.main(options_of(workspace, run_dir))
    return run_dir
