"""The gated delta rule's tree call in plain PyTorch agrees with the recurrence along each path.

In fp64 rounding leaves about 1e-14 on sums of some dozen terms of size 1; solving the triangular
system multiplies it by its condition, below 1e3 here.
"""

import copy

import numpy as np
import oracle
import pytest
import torch
from kernel_cases import DEVICE, cache_state_of, comb, star, topology_of

from stree.trees.token_tree import TokenTree, balanced
from stree_kernels import naive
from stree_kernels.contracts import GatedDeltaWeights
from stree_kernels.shapes import GatedDeltaShape

TREES = [
    TokenTree.chain(0), TokenTree.chain(6), TokenTree.paper(), star(9), balanced([2, 3, 2]),
    comb(20),
]
SHAPES = {
    "grouped": GatedDeltaShape(4, 2, 6, 4, 4),
    "odd": GatedDeltaShape(3, 3, 5, 7, 3),
    "one-key-head": GatedDeltaShape(3, 1, 4, 2, 2),
    "negative": GatedDeltaShape(4, 2, 6, 12, 4, negative_eigenvalues=True),
}


def on_device(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE)


def make_weights(shape, bias=True):
    heads = shape.num_heads
    return GatedDeltaWeights(
        on_device(shape.num_channels, shape.width, seed=3),
        on_device(shape.num_channels, seed=4) if bias else None,
        on_device(heads, seed=5) - 2, on_device(heads, seed=6),
    )


def for_oracle(weights):
    arrays = {
        name: value.cpu().numpy() for name, value in vars(weights).items() if value is not None
    }
    return {"conv_bias": 0.0, **arrays}


def along(shape, weights, projected, state, path):
    """Return the oracle's state and output after the nodes of a path."""
    state = copy.deepcopy(state)
    for node in path:
        y = oracle.gated_delta_step(
            shape, for_oracle(weights), projected[node].cpu().numpy(), state
        )
    return state, torch.from_numpy(y).to(DEVICE)


def buffers(shape, num_nodes, batch=1):
    """Make rows, updates and state: NaN where nothing is, zeros before a sequence begins."""

    def filled(value, *dims):
        return torch.full(dims, value, dtype=torch.float64, device=DEVICE)

    heads = shape.num_heads
    rows = filled(torch.nan, 2, batch, shape.tail + num_nodes + 2, shape.num_kept)
    rows[:, :, : shape.tail] = 0
    updates = filled(torch.nan, batch, num_nodes + 2, heads, shape.value_dim)
    return rows, updates, filled(0, batch, heads, shape.key_dim, shape.value_dim)


@pytest.mark.parametrize("name, bias", [*((name, True) for name in SHAPES), ("grouped", False)])
@pytest.mark.parametrize("tree", TREES, ids=lambda tree: f"{tree.name}-{tree.num_nodes}")
def test_trees_are_their_paths(tree, name, bias):
    """Every node's output, the state and the tail are those of its path, in three trees of which
    each follows a path of the one before."""
    shape = SHAPES[name]
    weights = make_weights(shape, bias)
    rows, updates, state = buffers(shape, tree.num_nodes)
    topology, expected = topology_of([tree], shape.width), oracle.empty_gated_delta_state(shape)
    projected = on_device(3, 1, tree.num_nodes, shape.num_projected, seed=1)
    paths = [[], tree.path_to(tree.num_nodes - 1), [0]]
    for number, path in enumerate(paths):
        if path:
            expected, _ = along(shape, weights, projected[number - 1, 0], expected, path)
        cache_state = cache_state_of([0], [path], 1, tree.num_nodes + 1, parity=number % 2)
        y = naive.gated_delta_tree(
            projected[number], rows, None, updates, state, weights, shape, topology, cache_state, 0
        )
        torch.testing.assert_close(
            state[0], torch.from_numpy(expected["delta"]).to(DEVICE), rtol=0, atol=1e-11
        )
        tail = rows[1 - number % 2, 0, : shape.tail, : shape.num_channels]
        assert torch.equal(tail, torch.from_numpy(np.stack(expected["conv_inputs"])).to(DEVICE))
        for node in range(tree.num_nodes):
            _, wanted = along(shape, weights, projected[number, 0], expected, tree.path_to(node))
            torch.testing.assert_close(y[0, node], wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize("pieces", [(1, 1, 1, 1, 1, 1), (1, 5), (4, 2)], ids=str)
def test_growing_a_tree_in_pieces(pieces):
    shape, tree = SHAPES["grouped"], comb(6)
    weights, topology = make_weights(shape), topology_of([tree], shape.width)
    projected = on_device(2, 6, shape.num_projected, seed=1)
    whole, parts = (buffers(shape, 6, batch=2) for _ in range(2))

    def call(held, nodes, parity):
        cache_state = cache_state_of([0, 0], [[], []], 1, 3, parity=parity)
        return naive.gated_delta_tree(
            projected[:, nodes], held[0], None, *held[1:], weights, shape, topology, cache_state,
            nodes.start,
        )

    wanted = call(whole, slice(0, 6), 1)
    outputs, start = [], 0
    for piece in pieces:
        outputs.append(call(parts, slice(start, start + piece), 1 if start == 0 else 0))
        start += piece
    torch.testing.assert_close(torch.cat(outputs, dim=1), wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(parts[1][:, :6], whole[1][:, :6], rtol=0, atol=1e-12)


def test_a_tree_per_sequence_and_uncounted_slots():
    """Rows have their own trees and paths; what uncounted nodes hold, NaN included, is not seen."""
    shape, trees = SHAPES["grouped"], [TokenTree.paper(), star(13), TokenTree.chain(12)]
    weights, topology = make_weights(shape), topology_of(trees, shape.width)
    paths = [[0, 1, 4], [0], [0, 1, 2, 3]]
    rows, updates, state = buffers(shape, 13, batch=3)
    projected = [on_device(3, 13, shape.num_projected, seed=seed) for seed in (1, 2)]
    first = cache_state_of([0] * 3, [[]] * 3, 3, 5, parity=1)
    held = rows, None, updates, state, weights, shape, topology
    naive.gated_delta_tree(projected[0], *held, first, 0)
    for row, path in enumerate(paths):
        others = [node for node in range(13) if node not in path]
        updates[row, others] = rows[0, row, [shape.tail + node for node in others]] = torch.nan
    second = cache_state_of([0] * 3, paths, 3, 5, parity=0)
    y = naive.gated_delta_tree(projected[1], *held, second, 0)
    for row, (tree, path) in enumerate(zip(trees, paths, strict=True)):
        empty = oracle.empty_gated_delta_state(shape)
        expected, _ = along(shape, weights, projected[0][row], empty, path)
        torch.testing.assert_close(
            state[row], torch.from_numpy(expected["delta"]).to(DEVICE), rtol=0, atol=1e-11
        )
        _, wanted = along(shape, weights, projected[1][row], expected, tree.path_to(12))
        torch.testing.assert_close(y[row, 12], wanted, rtol=0, atol=1e-11)
