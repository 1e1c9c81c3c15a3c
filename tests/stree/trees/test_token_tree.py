import re
from pathlib import Path

import pytest
import torch

from stree.common.errors import UsageError
from stree.trees.token_tree import TokenTree, balanced


def test_no_code_asks_for_the_class_of_a_tree():
    """Shapes, recipes and policies answer by their methods; only what users give is checked."""
    root = Path(__file__).parents[3]
    found = {
        f"{path.relative_to(root)}: {line.strip()}"
        for folder in ("stree", "pipelines", "kernels") for path in (root / folder).rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"isinstance\(.*\b(TokenTree|StepTree|Beam(Search)?Tree|SlotTree)\b", line)
    }
    assert found == {"stree/trees/token_tree.py: if not isinstance(tree, StepTree):"}
    recipe, shape = TokenTree.load("beam-3-3-9"), TokenTree.paper()
    assert recipe.grows and not shape.grows and not isinstance(recipe, TokenTree)
    assert recipe.shape.parents == recipe.parents and shape.shape is shape


def test_paper_tree():
    tree = TokenTree.paper()
    assert tree == TokenTree.load("paper")
    assert tree.depths == (0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4)
    assert tree.levels[1] == (1, 2, 3)
    assert tree.path_to(11) == [0, 1, 4, 7, 11]
    assert tree.ancestors[11].nonzero().flatten().tolist() == [0, 1, 4, 7, 11]


def test_windows_go_from_the_committed_tail_to_the_ancestors():
    windows = TokenTree.paper().windows(4)  # tail is 0, 1, 2; node i is 3 + i
    assert windows[0].tolist() == [0, 1, 2, 3]
    assert windows[5].tolist() == [2, 3, 4, 8]
    assert windows[11].tolist() == [4, 7, 10, 14]


def test_shapes():
    assert TokenTree.chain(3).parents == (-1, 0, 1, 2)
    assert TokenTree.load("chain-3") == TokenTree.chain(3)
    assert balanced([2, 2]).parents == (-1, 0, 0, 1, 1, 2, 2)
    assert torch.equal(TokenTree.chain(5).ancestors, torch.ones(6, 6, dtype=torch.bool).tril())


@pytest.mark.parametrize(
    "parents, complaint",
    [
        ((), "0 nodes"),
        ((0,), "root"),
        ((-1, 2, 0), "node 1 has parent 2"),
        ((-1, 1), "node 1 has parent 1"),
        ((-1, -1), "node 1 has parent -1"),
        ((-1, 0.5), "whole numbers"),
        (tuple(range(-1, 2048)), "2049 nodes"),
        ((-1, *[0] * 256), "256 children, wanted at most 255"),
    ],
)
def test_bad_trees_are_refused(parents, complaint):
    with pytest.raises(UsageError, match=complaint):
        TokenTree(parents)


@pytest.mark.parametrize(
    "content, complaint",
    [
        ("parents: [-1, 2, 0]", "node 1 has parent 2"),
        ("nodes: []", "must hold"),
        ("parents: [-1, 0]\nwidth: 3", "unknown keys"),
        ("parents: [", "no YAML"),
        ("parents: [\n  - 1: {", "no YAML"),
        ("parents: !!python/object/apply:os.system ['true']", "no YAML"),
    ],
)
def test_bad_files_are_refused(tmp_path, content, complaint):
    path = tmp_path / "tree.yaml"
    path.write_text(content)
    with pytest.raises(UsageError, match=complaint) as refused:
        TokenTree.load(path)
    assert "\n" not in str(refused.value)  # one line


def test_the_shipped_files_are_what_their_names_say():
    found = sorted((Path(__file__).parents[3] / "configs/trees").glob("*.yaml"))
    assert {"paper", "png-6-2"} < {path.stem for path in found}
    for path in found:
        tree = TokenTree.load(path)
        assert tree.name == path.stem
        if path.stem in ("paper", "png-6-2"):  # which need no file
            assert tree == TokenTree.load(path.stem)


def test_names_need_no_files_beside_the_package(tmp_path, monkeypatch):
    """An installation that is not editable has no files beside the package."""
    monkeypatch.setattr(Path, "read_text", None)
    monkeypatch.chdir(tmp_path)
    assert TokenTree.load("paper") == TokenTree.paper()


def test_unknown_name_lists_what_ships():
    with pytest.raises(UsageError, match="paper"):
        TokenTree.load("papr")
