"""A Mamba-1 layer's tree call: the twin against the recurrence, the kernels against the twin.

The twin in fp64 is measured against the recurrence along each node's path (1e-12: sums of a few
dozen terms). fp32 leaves about 1e-6, bf16 rounds outputs to 2^-9 and what is kept of nodes besides.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from kernel_cases import DEVICE, cache_state_of, comb, normal, relative_error, star, topology_of
from lanes import costly

from stree.trees.token_tree import TokenTree
from stree_kernels import naive
from stree_kernels.contracts import Mamba1Held, Mamba1Weights
from stree_kernels.mamba1 import tree as kernels
from stree_kernels.shapes import Mamba1Shape

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
PLAIN, NORMED = Mamba1Shape(40, 5, 3, 4), Mamba1Shape(33, 16, 6, 3, norm_eps=0.1)
SHAPES = {"plain": PLAIN, "normed": NORMED, "wide state": Mamba1Shape(9, 70, 2, 2)}
TREES = [TokenTree.chain(0), TokenTree.chain(4), star(6), comb(19), TokenTree.paper()]


@dataclass
class Case:
    """A layer's buffers, NaN wherever nothing is, and the inputs of two calls."""

    shape: Mamba1Shape
    weights: Mamba1Weights
    products: tuple[torch.Tensor, torch.Tensor]  # (R + 2·S, E) and (E, R)
    held: Mamba1Held
    inputs: list[torch.Tensor]  # (B, N, 2·E) each

    def in_fp64(self):
        weights = [None if each is None else each.double() for each in vars(self.weights).values()]
        held = Mamba1Held(*(each.double() for each in self.held))
        return replace(
            self, weights=Mamba1Weights(*weights), held=held,
            products=tuple(each.double() for each in self.products),
            inputs=[each.double() for each in self.inputs],
        )

    def call(self, number, topology, cache_state, first=0, nodes=slice(None)):
        """Call the kernels, or in fp64 the twin; the products in between are PyTorch's."""
        ops = naive if self.held.state.dtype == torch.float64 else kernels
        rest = self.held, self.weights, self.shape, topology, cache_state, first
        inputs, gate = self.inputs[number][:, nodes].chunk(2, dim=-1)
        x = ops.mamba1_advance(inputs, *rest)
        selected = x @ self.products[0].T
        dt = selected[..., : self.shape.dt_rank] @ self.products[1].T
        return ops.mamba1_scan(x, selected, dt, gate, *rest)


def make(shape, N, dtype=torch.float32, batch=2, bias=True):
    E, S, R = shape.d_inner, shape.d_state, shape.dt_rank

    def held(*dims, dtype=dtype):
        whole = *dims[:-1], dims[-1] + 3
        return torch.full(whole, torch.nan, device=DEVICE, dtype=dtype)[..., :-3]

    buffers = Mamba1Held(
        held(batch, shape.tail, E).copy_(normal(batch, shape.tail, E, seed=1)),
        held(batch, E, S, dtype=torch.float32).copy_(normal(batch, E, S, seed=2)),
        held(batch, N + 2, E), held(batch, N + 2, E), held(batch, N + 2, S),
    )
    weights = Mamba1Weights(
        normal(shape.width, E, seed=3, dtype=dtype).T,
        normal(E, seed=4, dtype=dtype) if bias else None,
        normal(E, seed=5, dtype=dtype) - 1, normal(E, S, seed=6, dtype=dtype) * 0.5,
        normal(E, seed=7, dtype=dtype),
        None if shape.norm_eps is None else normal(S, seed=12, dtype=dtype),
    )
    products = (
        normal(R + 2 * S, E, seed=8, dtype=dtype) * E**-0.5,
        normal(E, R, seed=9, dtype=dtype) * R**-0.5,
    )
    inputs = [normal(batch, N, 2 * E, seed=10 + each, dtype=dtype) for each in range(2)]
    return Case(shape, weights, products, buffers, inputs)


def array(tensor):
    return tensor.cpu().numpy()


def recurrence(case, row, number, path, state, conv_state):
    """Return y (E,) after a path of nodes, its state and its conv state, token by token."""
    weights = {
        name: array(each) for name, each in vars(case.weights).items() if each is not None
    }
    (select, low_rank), shape = map(array, case.products), case.shape

    def unit(vector):
        if shape.norm_eps is None:
            return vector
        return vector / np.sqrt(np.mean(vector**2) + shape.norm_eps)

    for node in path:
        raw, gate = np.split(array(case.inputs[number][row, node]), 2)
        window = np.concatenate([conv_state, raw[None]])
        conv_state = window[1:]
        x = (weights["conv"].T * window).sum(0) + weights["conv_bias"]
        x = x / (1 + np.exp(-x))
        low, B, C = np.split(select @ x, [shape.dt_rank, shape.dt_rank + shape.d_state])
        dt = np.logaddexp(0, low_rank @ unit(low) + weights["dt_bias"])
        decay = np.exp(-np.exp(weights["A_log"]) * dt[:, None])
        state = decay * state + np.outer(dt * x, unit(B))
        y = state @ (unit(C) * weights.get("c_scale", 1)) + weights["D"] * x
        y = y * gate / (1 + np.exp(-gate))
    return y, state, conv_state


@pytest.mark.parametrize("shape", [PLAIN, NORMED], ids=["plain", "normed"])
def test_the_twin_equals_the_recurrence_along_each_path(shape):
    trees = [comb(9), TokenTree((-1, 0, 1, 0, 3, 4, 1, 6, 2))]
    paths = [list(comb(9).path_to(5)), [0, 1]]
    case = make(shape, 9).in_fp64()
    topology = topology_of(trees, shape.width)
    starts = [(array(case.held.state[row]).copy(), array(case.held.conv_state[row]).copy())
              for row in range(2)]
    for number, committed in enumerate([[[], []], paths]):
        cache_state = cache_state_of([0, 0], committed, 2, 5)
        got = case.call(number, topology, cache_state)
        for row, tree in enumerate(trees):
            if committed[row]:
                _, *starts[row] = recurrence(case, row, 0, committed[row], *starts[row])
            for node in range(9):
                wanted, *_ = recurrence(case, row, number, tree.path_to(node), *starts[row])
                assert np.abs(array(got[row, node]) - wanted).max() < 1e-12
            assert np.abs(array(case.held.state[row]) - starts[row][0]).max() < 1e-12
            assert np.array_equal(array(case.held.conv_state[row]), starts[row][1])


def compare(shape, tree, dtype, paths, **options):
    N, tolerance = tree.num_nodes, TOLERANCE[dtype]
    case = make(shape, N, dtype, len(paths), **options)
    exact, topology = case.in_fp64(), topology_of([tree], shape.width)
    for number, committed in enumerate([[[] for _ in paths], paths]):
        cache_state = cache_state_of([0] * len(paths), committed, 1, 8)
        wanted = exact.call(number, topology, cache_state)
        got = case.call(number, topology, cache_state)
        assert got.dtype == dtype and relative_error(got, wanted) < tolerance
        for ours, theirs in zip(case.held, exact.held, strict=True):
            used = slice(N if ours.shape[1] == N + 2 else None)
            assert relative_error(ours[:, used], theirs[:, used]) < tolerance
        for kept in case.held[2:]:
            assert kept[:, N:].isnan().all()


@pytest.mark.quick(2)
@pytest.mark.parametrize("tree", [*TREES[:3], *map(costly, TREES[3:])])
def test_kernels_equal_the_twin(tree):
    compare(PLAIN, tree, torch.float32, [list(tree.path_to(tree.num_nodes - 1))[:5], [0]])


@pytest.mark.parametrize(("name", "dtype"), [
    ("wide state", torch.float32), costly("plain", torch.float32),
    costly("normed", torch.bfloat16), costly("normed", torch.float32),
    costly("plain", torch.bfloat16),
    costly("wide state", torch.bfloat16),
], ids=str)
def test_shapes_and_dtypes(name, dtype):
    paths = [[0, 1], [], list(comb(9).path_to(8))]
    compare(SHAPES[name], comb(9), dtype, paths, bias=name == "normed")


@pytest.mark.parametrize(("name", "piece"), [
    ("normed", 4), costly("plain", 1), costly("plain", 4), costly("normed", 1),
])
def test_level_by_level(name, piece):
    """A tree given a few nodes at a time gives the same as the whole tree in one call."""
    shape, tree = SHAPES[name], comb(6)
    whole, parts, topology = make(shape, 6), make(shape, 6), topology_of([tree], shape.width)
    cache_state = cache_state_of([0, 0], [[], []], 1, 4)
    wanted = whole.call(0, topology, cache_state)
    for start in range(0, tree.num_nodes, piece):
        nodes = slice(start, start + piece)
        got = parts.call(0, topology, cache_state, start, nodes)
        assert relative_error(got, wanted[:, nodes]) < 1e-5
    for one, other in zip(parts.held, whole.held, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5, equal_nan=True)


def test_a_node_is_read_by_its_descendants_alone():
    tree = comb(5)
    topology, cache_state = topology_of([tree]), cache_state_of([0, 0], [[], []], 1, 4)
    before = make(PLAIN, 5).call(0, topology, cache_state)
    for node in range(5):
        changed = make(PLAIN, 5)
        changed.inputs[0][:, node] += 1
        after = changed.call(0, topology, cache_state)
        readers = (before != after).flatten(2).any(-1).any(0).nonzero().flatten().tolist()
        assert readers == [each for each in range(5) if node in tree.path_to(each)]
