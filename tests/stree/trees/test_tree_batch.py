"""Trees of a batch as tensors."""

import torch
from toys import tiny_config

from stree import TokenTree
from stree.trees.build import make_tree_batch
from stree.trees.tree_batch import TreeBuffers


def test_a_forest_pads_what_its_smaller_trees_lack():
    tree_batch = make_tree_batch(
        [TokenTree.chain(0), TokenTree((-1, 0, 1, 0))], torch.device("cpu")
    )
    assert tree_batch.parents.tolist() == [[-1, -2, -2, -2], [-1, 0, 1, 0]]
    assert tree_batch.children[1].tolist() == [[1, 3], [2, -1], [-1, -1], [-1, -1]]
    assert [level.nodes.tolist() for level in tree_batch.levels] == [[[-1], [0]], [[-1], [1]]]
    topology = tree_batch.topology(tiny_config().d_conv)
    assert topology.ancestors[0].equal(torch.eye(4, dtype=torch.bool))
    assert topology.depths.tolist() == [[0, 0, 0, 0], [0, 1, 2, 1]]
    assert not topology.chains


def test_a_topology_says_that_all_its_trees_are_chains():
    """A shorter chain is padded behind its end; a static tree batch holds chains only."""
    chains, device = [TokenTree.chain(3), TokenTree.chain(1)], torch.device("cpu")
    for tree_batch in (make_tree_batch(chains, device), make_tree_batch(chains, device).static()):
        assert tree_batch.topology(4).chains
    assert make_tree_batch(chains, device).shape != make_tree_batch(
        [TokenTree.paper(), TokenTree.chain(1)], device
    ).shape


def test_trees_of_one_shape_take_each_other_s_place():
    """Tensors of a static tree batch hold another's trees, where they were."""
    first = [TokenTree((-1, 0, 0, 1, 1)), TokenTree((-1, 0, 0, 2, 1))]
    second = [TokenTree((-1, 0, 0, 2, 2)), TokenTree((-1, 0, 0, 1, 2))]
    device, width = torch.device("cpu"), tiny_config().d_conv
    static, other = TreeBuffers(make_tree_batch(first, device)), make_tree_batch(second, device)
    assert static.shape == other.shape

    def tensors(tree_batch):
        yield from (tree_batch.parents, tree_batch.depths, tree_batch.children, tree_batch.drawn_by)
        for level in tree_batch.levels:
            yield from (level.nodes, level.depths, level.places)
        for topology in (tree_batch.topology(width), tree_batch.inner_topology(width)):
            yield from (topology.ancestors, topology.depths, topology.windows)

    before = [(each.data_ptr(), each.clone()) for each in tensors(static)]
    originals = [each.clone() for each in tensors(make_tree_batch(first, device))]
    static.hold(other)
    differ = 0
    for (address, old), mine, theirs in zip(before, tensors(static), tensors(other), strict=True):
        assert mine.data_ptr() == address and mine.data_ptr() != theirs.data_ptr()
        assert torch.equal(mine, theirs)
        differ += not torch.equal(mine, old)
    assert differ > 4
    for mine, theirs in zip(originals, tensors(make_tree_batch(first, device)), strict=True):
        assert torch.equal(mine, theirs)  # the constants stay as they were
