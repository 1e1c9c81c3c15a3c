"""Trees that grow while a tiny pair answers."""

from __future__ import annotations

import json

import pytest
from tiny_evaluation import export, make_world

from stree.common.errors import UsageError
from stree_lab import grown_trees
from stree_lab.grown_trees import GrownTree, blocks_of
from stree_lab.papers.node_order import depth_first


def test_blocks_by_hand():
    """Chains of 31, 32 and 32 nodes below a root: numbered in turns, and one after the other.

    96 nodes are 3 rows of blocks, and 40 tokens two columns before the tree. Depth first the first
    chain fills the root's block, so that the third sees nothing of the second's.
    """
    turns = (-1, 0, 0, 0, *range(1, 91), 92, 93)
    means = blocks_of([GrownTree(turns, 0)], 40)
    assert means == {"by level": 6 + 6, "depth first": 6 + 5, "heavy path": 6 + 6}
    assert blocks_of([GrownTree(depth_first(turns), 0)], 40) == means, "as recorded does not count"


def test_each_step_s_tree_is_recorded(tmp_path, capsys):
    root = make_world(tmp_path)
    drafter, out = str(export(root, 10)), tmp_path / "out"
    given = [str(root / "target"), drafter, str(out), "--prompts", str(root / "talk.jsonl")]
    given += ["--limit", "2", "--num_tokens", "8", "--device", "cpu"]
    grown_trees.main([*given, "--tree", "dyspec-3-3-12-0.004"])
    content = json.loads((out / "trees.json").read_text())
    lengths = [len(each["parents"]) for each in content["trees"]]
    assert len(set(lengths)) > 1 and max(lengths) <= 12 and content["mean_nodes"] < 12
    assert all(0 <= each["accepted"] <= 3 for each in content["trees"])
    for name in ("sizes", "blocks"):
        assert "<svg" in (out / f"{name}.svg").read_text()
    assert "trees of" in capsys.readouterr().out
    with pytest.raises(UsageError, match="--tree paper has one shape"):
        grown_trees.main([*given, "--tree", "paper"])
