"""Examples in the docstrings of `stree` run."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WITH_EXAMPLES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "stree").rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_run(name, monkeypatch):
    monkeypatch.chdir(ROOT)  # a model ships in checkpoints/
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted and not result.failed


def test_public_classes_and_functions_have_examples():
    assert {
        "stree.batching.batch_decoder", "stree.batching.sequences", "stree.decoder",
        "stree.generation", "stree.hf_model", "stree.loading", "stree.models.config.hybrid",
        "stree.models.model", "stree.tree_policy.adaptive", "stree.tree_policy.bandit",
        "stree.text_stream", "stree.tree_policy.step_times", "stree.trees.token_tree",
    } <= set(WITH_EXAMPLES)
