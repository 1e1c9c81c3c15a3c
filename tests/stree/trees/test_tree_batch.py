"""Trees of a batch as tensors."""

import torch
from toys import tiny_config

from stree import TokenTree
from stree.trees.build import tree_batch
from stree.trees.tree_batch import StaticForest


def test_a_forest_pads_what_its_smaller_trees_lack():
    forest = tree_batch([TokenTree.chain(0), TokenTree((-1, 0, 1, 0))], torch.device("cpu"))
    assert forest.parents.tolist() == [[-1, -2, -2, -2], [-1, 0, 1, 0]]
    assert forest.children[1].tolist() == [[1, 3], [2, -1], [-1, -1], [-1, -1]]
    assert [level.nodes.tolist() for level in forest.levels] == [[[-1], [0]], [[-1], [1]]]
    topology = forest.topology(tiny_config().d_conv)
    assert topology.ancestors[0].equal(torch.eye(4, dtype=torch.bool))
    assert topology.depths.tolist() == [[0, 0, 0, 0], [0, 1, 2, 1]]


def test_trees_of_one_shape_take_each_other_s_place():
    """What was asked of the first ones' tensors then holds the others', where it was."""
    first = [TokenTree((-1, 0, 0, 1, 1)), TokenTree((-1, 0, 0, 2, 1))]
    second = [TokenTree((-1, 0, 0, 2, 2)), TokenTree((-1, 0, 0, 1, 2))]
    device, width = torch.device("cpu"), tiny_config().d_conv
    static, other = StaticForest(tree_batch(first, device)), tree_batch(second, device)
    assert static.shape == other.shape

    def tensors(forest):
        yield from (forest.parents, forest.depths, forest.children, forest.drawn_by)
        for level in forest.levels:
            yield from (level.nodes, level.depths, level.places)
        for topology in (forest.topology(width), forest.inner_topology(width)):
            yield from (topology.ancestors, topology.depths, topology.windows)

    before = [(each.data_ptr(), each.clone()) for each in tensors(static)]
    originals = [each.clone() for each in tensors(tree_batch(first, device))]
    static.hold(other)
    differ = 0
    for (address, old), mine, theirs in zip(before, tensors(static), tensors(other), strict=True):
        assert mine.data_ptr() == address and mine.data_ptr() != theirs.data_ptr()
        assert torch.equal(mine, theirs)
        differ += not torch.equal(mine, old)
    assert differ > 4
    for mine, theirs in zip(originals, tensors(tree_batch(first, device)), strict=True):
        assert torch.equal(mine, theirs)  # the constants stay as they were
