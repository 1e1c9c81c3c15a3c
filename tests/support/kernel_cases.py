"""Make inputs for tests of the Triton kernels, on CUDA or through the interpreter on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from stree.trees.token_tree import TokenTree, balanced
from stree_kernels.contracts import CacheState, Topology

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def comb(num_nodes: int) -> TokenTree:
    """Make a tree with a leaf on every second node of its spine: deep, wide and irregular."""
    parents, spine = [-1], 0
    for node in range(1, num_nodes):
        parents.append(spine)
        spine = node if node % 3 else spine
    return TokenTree(tuple(parents), f"comb-{num_nodes}")


def star(num_nodes: int) -> TokenTree:
    return balanced([num_nodes - 1], f"star-{num_nodes}") if num_nodes > 1 else TokenTree.chain(0)


def topology_of(trees: list[TokenTree], width: int = 4) -> Topology:
    """Stack trees of one size into a `Topology` on the test's device."""
    return Topology(
        torch.stack([tree.ancestors for tree in trees]).to(DEVICE),
        torch.tensor([tree.depths for tree in trees], dtype=torch.int32, device=DEVICE),
        torch.stack([tree.windows(width) for tree in trees]).int().to(DEVICE),
    )


def cache_state_of(
    lengths: list[int], paths: list[list[int]], num_trees: int, slots: int, parity: int = 1
) -> CacheState:
    """Make a `CacheState` of sequences with committed `lengths` and accepted `paths`.

    Entries of a path behind its end point far outside of the tree, so that reading them shows.
    """
    path = torch.full((len(paths), slots), 10_000, dtype=torch.long)
    for row, nodes in enumerate(paths):
        path[row, : len(nodes)] = torch.tensor(nodes, dtype=torch.long)
    return CacheState(
        torch.tensor(lengths).to(DEVICE),
        path.to(DEVICE),
        torch.tensor([len(nodes) for nodes in paths]).to(DEVICE),
        torch.tensor([row % num_trees for row in range(len(paths))]).to(DEVICE),
        torch.tensor([parity]).to(DEVICE),
    )


def compare_pieces(whole: Any, parts: Any, shape: Any, tree: TokenTree, piece: int) -> None:
    """Assert that a tree given a few nodes at a time gives the same as the whole tree in one call.

    Compared are the outputs, what is kept of the tree, and the replay of that. `parts` and `whole`
    are two cases with the same inputs; `piece` is the number of nodes a call.
    """
    topology = topology_of([tree])
    cache_state = cache_state_of([0], [[]], 1, 4, parity=1)
    growing = replace(cache_state, parity=1 - cache_state.parity)
    wanted = whole.call(0, shape, topology, cache_state)
    for start in range(0, tree.num_nodes, piece):
        nodes = slice(start, start + piece)
        got = parts.call(0, shape, topology, cache_state if start == 0 else growing, start, nodes)
        assert relative_error(got, wanted[:, nodes]) < 1e-5
    used = shape.tail + tree.num_nodes
    assert torch.equal(parts.rows[0, :, :used], whole.rows[0, :, :used])
    accepted = cache_state_of([0], [[0, 1, 2]], 1, 4, parity=0)
    wanted = whole.call(1, shape, topology, accepted)
    assert relative_error(parts.call(1, shape, topology, accepted), wanted) < 1e-5
    assert relative_error(parts.state, whole.state) < 1e-5


def readers_of(node: int, case: Any, changed: Any, shape: Any, tree: TokenTree) -> list[int]:
    """List the nodes whose output changes when the input of `node` does.

    `case` and `changed` are two cases with the same inputs; those of `changed` are edited.
    """
    topology, cache_state = topology_of([tree]), cache_state_of([0, 0], [[], []], 1, 4, parity=1)
    before = case.call(0, shape, topology, cache_state)
    changed.projected[0][:, node] += 1
    after = changed.call(0, shape, topology, cache_state)
    return (before != after).flatten(2).any(-1).any(0).nonzero().flatten().tolist()


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, dtype)


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return ‖got − wanted‖ / ‖wanted‖ in fp64; NaN when an entry of either is."""
    got, wanted = got.double(), wanted.double()
    return float((got - wanted).norm() / wanted.norm().clamp(min=1e-30))


def compare_calls(
    case: Any, exact: Any, shape: Any, trees: list[TokenTree], paths: list[list[int]],
    tolerance: float, after_each: Callable[[], None] = lambda: None, copies: bool = True,
) -> tuple[Topology, CacheState]:
    """Compare two calls of a recurrent op with the same calls in fp64 (`exact`).

    The second call replays `paths` of the first one's trees. Kept values must be equal to their
    inputs if `copies`, else near them, and nothing behind them may be touched. Returns the trees'
    topology, and the cache state of the second call.
    """
    N, batch, dtype = trees[0].num_nodes, len(paths), case.projected[0].dtype
    topology = topology_of(trees, shape.width)
    slots = max(1, *(len(path) for path in paths)) + 1
    before = cache_state_of([0] * batch, [[]] * batch, len(trees), slots, parity=1)
    after = cache_state_of([0] * batch, paths, len(trees), slots, parity=0)
    for number, cache_state in enumerate((before, after)):
        wanted = exact.call(number, shape, topology, cache_state)
        got = case.call(number, shape, topology, cache_state)
        assert got.dtype == dtype and got.shape == wanted.shape
        assert relative_error(got, wanted) < tolerance
        after_each()
    used = shape.tail + N
    kept, wanted = case.rows[:, :, :used].double(), exact.rows[:, :, :used]
    assert torch.equal(kept, wanted) if copies else relative_error(kept, wanted) < tolerance
    assert case.rows[:, :, used:].isnan().all()
    return topology, after
