"""Make the tree batch of a step, whether its trees are fixed or dynamic."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stree.trees.dynamic import dynamic_tree_batch
from stree.trees.token_tree import StepTree
from stree.trees.tree_batch import TreeBatch, fixed_trees


def make_tree_batch(trees: Sequence[StepTree], device: torch.device) -> TreeBatch:
    """Return the trees of B rows as tensors on a device.

    Args:
        trees: A tree a row. If one is dynamic (`BeamTree`), all rows must have that tree.
        device: The device of the tensors.

    Example:
        >>> from stree.trees.token_tree import TokenTree
        >>> make_tree_batch([TokenTree.chain(2)], torch.device("cpu")).parents.tolist()
        [[-1, 0, 1]]
    """
    if dynamic := {tree for tree in trees if tree.grows}:
        (tree,) = dynamic
        return dynamic_tree_batch(tree, len(trees), device)
    return fixed_trees(tuple(tree.shape for tree in trees), device)
