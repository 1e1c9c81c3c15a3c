"""Describe models and trees in a few words, for decoders' reprs."""

from __future__ import annotations

from typing import Any

from stree.common.words import counted, dtype_name
from stree.tree_policy.policy import TreePolicy


def described(target: Any, drafter: Any, tree_policy: TreePolicy) -> str:
    """Return the models' sizes with their tree, or with the trees to choose among."""
    if drafter is None:
        return f"the target alone, {_size(target)}"
    model = drafter if hasattr(drafter, "config") else getattr(drafter, "model", None) or drafter
    tree = f"tree {tree_policy.name}"
    if len(tree_policy.trees) == 1:
        tree += f" of {tree_policy.largest.num_nodes} nodes"
    return f"{_size(target)}, drafter {_size(model)}, {tree}"


def placed(model: Any) -> str:
    """Return a model's dtype and device."""
    return f"{dtype_name(model.dtype)} on {model.device}"


def _size(model: Any) -> str:
    """Return the size of a model, or the type of any other object."""
    if not hasattr(model, "parameters"):
        return type(model).__name__
    num_parameters = sum(each.numel() for each in model.parameters())
    layers = counted(model.config.num_layers, "layer")
    return f"{num_parameters / 1e6:.1f} M parameters in {layers}"
