"""Inputs for tests of the Triton kernels, on CUDA or through the interpreter on the CPU."""

from __future__ import annotations

import pytest
import torch

from stree.tree import TokenTree, balanced
from stree_kernels.shapes import Steering, Topology

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def comb(num_nodes: int) -> TokenTree:
    """A spine with a leaf on every second node: deep, wide and irregular."""
    parents, spine = [-1], 0
    for node in range(1, num_nodes):
        parents.append(spine)
        spine = node if node % 3 else spine
    return TokenTree(tuple(parents), f"comb-{num_nodes}")


def star(num_nodes: int) -> TokenTree:
    return balanced([num_nodes - 1], f"star-{num_nodes}") if num_nodes > 1 else TokenTree.chain(0)


def topology_of(trees: list[TokenTree], width: int = 4) -> Topology:
    """Trees of one size, as `Topology` on the test's device."""
    return Topology(
        torch.stack([tree.ancestors for tree in trees]).to(DEVICE),
        torch.tensor([tree.depths for tree in trees], dtype=torch.int32, device=DEVICE),
        torch.stack([tree.windows(width) for tree in trees]).int().to(DEVICE),
    )


def steering_of(
    lengths: list[int], paths: list[list[int]], num_trees: int, slots: int, parity: int = 1
) -> Steering:
    """Uncounted path entries point far outside, so that reading them shows."""
    path = torch.full((len(paths), slots), 10_000, dtype=torch.long)
    for row, nodes in enumerate(paths):
        path[row, : len(nodes)] = torch.tensor(nodes, dtype=torch.long)
    return Steering(
        torch.tensor(lengths).to(DEVICE),
        path.to(DEVICE),
        torch.tensor([len(nodes) for nodes in paths]).to(DEVICE),
        torch.tensor([row % num_trees for row in range(len(paths))]).to(DEVICE),
        torch.tensor([parity]).to(DEVICE),
    )


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, dtype)


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """‖got − wanted‖ / ‖wanted‖ in fp64; NaN when anything is."""
    got, wanted = got.double(), wanted.double()
    return float((got - wanted).norm() / wanted.norm().clamp(min=1e-30))
