"""A target with a drafter, and its answers to six prompts."""

from pathlib import Path

import pytest
from generating import generate
from tiny_run import make_workspace

from stree.checkpoints.load_save import load_model, save_model
from stree.checkpoints.tokenizer import load_tokenizer
from stree.models.slicing import slice_drafter


@pytest.fixture(scope="session")
def workspace(tmp_path_factory) -> Path:
    folder = make_workspace(tmp_path_factory.mktemp("workspace"))
    target = load_model(folder / "target")
    save_model(slice_drafter(target), folder / "drafter", load_tokenizer(folder / "target"))
    return folder


@pytest.fixture(scope="session")
def whole(workspace, tmp_path_factory) -> Path:
    return generate(workspace, tmp_path_factory.mktemp("whole") / "data")
