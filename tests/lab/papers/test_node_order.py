"""Orders of nodes: the same tree, and fewer blocks of its mask with anything in them."""

from __future__ import annotations

import random

import pytest
import torch

from stree import TokenTree
from stree_lab.papers.node_order import by_level, depth_first, heavy_path, num_blocks


def random_tree(size: int, seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return (-1, *(rng.randrange(node) for node in range(1, size)))


def shape(parents) -> tuple:
    """Return a tree's shape, which does not depend on the order of nodes and siblings."""
    below = [[] for _ in parents]
    for node in range(len(parents) - 1, 0, -1):
        below[parents[node]].append(tuple(sorted(below[node])))
    return tuple(sorted(below[0]))


@pytest.mark.parametrize("order", [depth_first, heavy_path])
def test_it_is_the_same_tree_depth_first(order):
    for seed in range(10):
        parents = random_tree(60, seed)
        new = order(parents)
        assert shape(new) == shape(parents)
        tree = TokenTree(new)
        for node in range(60):  # all below a node come right after it
            below = [other for other in range(60) if tree.ancestors[other, node]]
            assert below == list(range(node, node + len(below)))
        if order is heavy_path:
            sizes = tree.ancestors.sum(0).tolist()
            for children in tree.children:
                assert [sizes[c] for c in children] == sorted(sizes[c] for c in children)[::-1]


def test_siblings_keep_their_order():
    assert depth_first((-1, 0, 0, 1, 2, 1)) == (-1, 0, 1, 1, 0, 4)
    assert heavy_path((-1, 0, 0, 2, 2, 1)) == (-1, 0, 1, 1, 0, 4)


def test_by_level_it_is_the_same_tree_in_the_order_of_depths():
    for seed in range(5):
        parents = random_tree(60, seed)
        assert shape(by_level(parents)) == shape(parents)
        depths = TokenTree(by_level(parents)).depths
        assert list(depths) == sorted(TokenTree(parents).depths)


@pytest.mark.parametrize("size, width", [(1, None), (4, None), (32, None), (32, 8), (3, 16)])
def test_blocks_are_counted_as_in_the_mask(size, width):
    columns = width or size
    for seed in range(5):
        parents = random_tree(70, seed)
        mask = torch.zeros(-(-70 // size) * size, -(-70 // columns) * columns, dtype=torch.bool)
        mask[:70, :70] = TokenTree(parents).ancestors
        blocks = mask.unflatten(0, (-1, size)).unflatten(2, (-1, columns)).any(3).any(1)
        assert num_blocks(parents, size, width) == int(blocks.sum())


def test_fewer_blocks_than_as_they_were_drawn():
    """Depth-first orders leave fewer blocks; a chain has the whole triangle in any order."""
    for size in (256, 1024):
        drawn = random_tree(size, 0)
        first, heavy = num_blocks(depth_first(drawn)), num_blocks(heavy_path(drawn))
        assert max(heavy, first) < 0.8 * num_blocks(drawn)
    chain = tuple(range(-1, 255))
    assert num_blocks(chain) == num_blocks(heavy_path(chain)) == 36
