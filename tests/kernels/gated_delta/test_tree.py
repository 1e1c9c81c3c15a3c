"""The gated-delta tree call in two launches against its naive twin in fp64: a tree, then another
one after a path of the first was accepted.

Tolerances: with fp32 inputs the products are split into three tf32 ones, which leaves about 1e-6
of a norm, as does fp32's own rounding of sums of 128 terms; the triangular system multiplies it by
its condition, a few for random keys: 1e-5 leaves room. With bf16 inputs q, k and v are rounded
after the conv and y at the end (2⁻⁹ each, independent); k is in the system twice. Triton's
interpreter cuts bf16 off instead of rounding it: twice the error, and always downwards, so that the
four add up to 4 · 2⁻⁸ at most. u and the state are fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from kernel_cases import (
    DEVICE,
    cache_state_of,
    comb,
    compare_calls,
    compare_pieces,
    normal,
    readers_of,
    relative_error,
    star,
    topology_of,
)
from lanes import quick_first
from toys import random_tree

from stree.trees.token_tree import TokenTree, balanced
from stree_kernels import naive
from stree_kernels.contracts import Derived, GatedDeltaShape, GatedDeltaWeights
from stree_kernels.gated_delta import tree as gated_delta_tree

SHAPES = {
    "grouped": GatedDeltaShape(2, 1, 16, 16, 4),
    "odd": GatedDeltaShape(2, 2, 20, 18, 4),
    "two-keys": GatedDeltaShape(4, 2, 8, 12, 3),
    "two-blocks": GatedDeltaShape(1, 1, 16, 48, 2),
}
TREES = [TokenTree.chain(0), star(17), balanced([2, 2, 2, 2]), comb(33)]
LARGE_TREES = [
    TokenTree.chain(99), comb(256), star(256), TokenTree.chain(255), random_tree(257),
]
TREES_ON_CUDA = [*LARGE_TREES, random_tree(2048), TokenTree.chain(2047)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3 if DEVICE == "cuda" else 4 * 2**-8}


@dataclass
class Case:
    """Inputs of two calls, strided and with NaN wherever nothing is."""

    projected: list[torch.Tensor]
    rows: torch.Tensor
    derived: Derived
    updates: torch.Tensor
    state: torch.Tensor
    weights: GatedDeltaWeights
    as_chain: bool = False  # through the multi-step update

    def in_fp64(self) -> Case:
        wide = [None if each is None else each.double() for each in vars(self.weights).values()]
        return Case(
            [each.double() for each in self.projected], self.rows.double(), self.derived,
            self.updates.double(), self.state.double(), GatedDeltaWeights(*wide),
        )

    def call(self, number, shape, topology, cache_state, first=0, nodes=slice(None)):
        """Through the kernels, or in fp64 through the twin."""
        projected = self.projected[number][:, nodes]
        arguments = (
            projected, self.rows, self.derived, self.updates, self.state, self.weights, shape,
            topology, cache_state, first,
        )
        if self.state.dtype == torch.float64:
            return naive.gated_delta_tree(*arguments)
        return gated_delta_tree.gated_delta_tree(*arguments, as_chain=self.as_chain)


def nothing(*dims, dtype=torch.float32):
    return torch.full(dims, torch.nan, device=DEVICE, dtype=dtype)


def make(shape, N, dtype, batch=2, bias=True, as_chain=False, calls=2):
    width = shape.num_projected
    projected = [
        normal(batch, N, width + 5, seed=s, dtype=dtype)[..., :width] for s in range(calls)
    ]
    rows = nothing(2, batch, shape.tail + N + 2, shape.num_kept + 3, dtype=dtype)
    rows = rows[..., : shape.num_kept]
    rows[1, :, : shape.tail] = normal(batch, shape.tail, shape.num_kept, seed=20, dtype=dtype)
    derived = Derived(
        nothing(2, batch, N + 2, 2 * shape.conv_dims[0] + 7, dtype=dtype),
        nothing(2, batch, 2, N + 2, shape.num_heads + 1),
    )
    weights = GatedDeltaWeights(
        normal(shape.width, shape.num_channels, seed=23, dtype=dtype).T,
        normal(shape.num_channels, seed=24, dtype=dtype) if bias else None,
        normal(shape.num_heads, seed=25, dtype=dtype) - 2,
        normal(shape.num_heads, seed=26, dtype=dtype),
    )
    updates = nothing(batch, N + 2, shape.num_heads, shape.value_dim)
    state = normal(batch, shape.num_heads, shape.key_dim, shape.value_dim, seed=22)
    return Case(projected, rows, derived, updates, state, weights, as_chain)


def compare(shape, trees, paths, dtype=torch.float32, **options):
    N, tolerance = trees[0].num_nodes, TOLERANCE[dtype]
    case = make(shape, N, dtype, len(paths), **options)
    exact = case.in_fp64()

    def compare_updates():
        assert relative_error(case.updates[:, :N], exact.updates[:, :N]) < tolerance
        assert case.updates[:, N:].isnan().all()

    steered = compare_calls(case, exact, shape, trees, paths, tolerance, compare_updates)
    assert relative_error(case.state, exact.state) < tolerance
    return steered


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: f"{tree.name}-{tree.num_nodes}")
def test_trees(tree):
    path = tree.path_to(tree.num_nodes - 1)
    compare(SHAPES["grouped"], [tree], [path, path[:1]])


@pytest.mark.parametrize("tree", quick_first([(LARGE_TREES[0],)], [(t,) for t in LARGE_TREES]))
def test_large_trees(tree):
    path = tree.path_to(tree.num_nodes - 1)
    compare(GatedDeltaShape(1, 1, 16, 16, 4), [tree], [path])


@pytest.mark.gpu  # minutes in the interpreter
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tree", TREES_ON_CUDA, ids=lambda tree: f"{tree.name}-{tree.num_nodes}")
def test_large_trees_at_full_width(tree, dtype):
    path = tree.path_to(tree.num_nodes - 1)
    compare(GatedDeltaShape(48, 16, 128, 128, 4), [tree], [path, path[:3]], dtype)


@pytest.mark.parametrize(
    "name, dtype",
    quick_first(
        [("odd", torch.float32), ("two-keys", torch.bfloat16), ("two-blocks", torch.bfloat16)],
        [(name, dtype) for name in SHAPES for dtype in TOLERANCE],
    ),
)
def test_shapes(name, dtype):
    compare(SHAPES[name], [TokenTree.paper()], [[0, 1, 4, 7, 11], []], dtype)


def test_without_bias():
    compare(SHAPES["grouped"], [TokenTree.paper()], [[0, 2, 6]], torch.bfloat16, bias=False)


@pytest.mark.parametrize(
    "tree, as_chain",
    [(TokenTree.paper(), False), (comb(37), False), (TokenTree.chain(4), True)],
    ids=["tree", "pairs", "chain"],
)
def test_negative_eigenvalues(tree, as_chain):
    """The strength of a write goes up to 2 in each of the kernels that read it."""
    shape = replace(SHAPES["grouped"], negative_eigenvalues=True)
    path = tree.path_to(tree.num_nodes - 1)
    compare(shape, [tree], [path, path[:1]], as_chain=as_chain)


def test_a_tree_per_sequence():
    trees = [TokenTree.paper(), TokenTree.chain(12), star(13)]
    compare(SHAPES["grouped"], trees, [[0], [0, 1, 2], [0, 5]])  # real paths


@pytest.mark.parametrize(
    "name, num_nodes, dtype",
    quick_first(
        [("odd", 1, torch.bfloat16), ("odd", 5, torch.float32)],
        [(name, count, each) for name in ("odd", "two-keys") for count in (1, 5, 17)
         for each in TOLERANCE],
    ),
)
def test_the_multi_step_update_of_chains(name, num_nodes, dtype):
    paths = [list(range(num_nodes)), []]
    compare(SHAPES[name], [TokenTree.chain(num_nodes - 1)], paths, dtype, as_chain=True)


@pytest.mark.parametrize(
    "num_nodes, piece", quick_first([(4, 1), (37, 33)], [(20, 17), (40, 9), (70, 35)])
)
def test_growing_a_tree_in_pieces(num_nodes, piece):
    shape = SHAPES["grouped"]
    whole, parts = (make(shape, num_nodes, torch.float32, batch=1) for _ in range(2))
    compare_pieces(whole, parts, shape, comb(num_nodes), piece)


def test_siblings_are_invisible():
    shape, tree = SHAPES["grouped"], TokenTree.paper()
    before, changed = (make(shape, tree.num_nodes, torch.float32) for _ in range(2))
    assert readers_of(2, before, changed, shape, tree) == [2, 6]


@pytest.mark.parametrize("as_chain", [False, True], ids=["tree", "chain"])
def test_what_was_not_accepted_is_invisible(as_chain):
    """Slots of the path that do not count name nodes of the last tree, as a longer path before has
    left them; what those nodes hold, NaN included, reaches nothing."""
    shape, tree = SHAPES["grouped"], TokenTree.chain(3)
    topology = topology_of([tree])
    results = []
    for poison in (0.0, torch.nan):
        case = make(shape, 4, torch.float32, batch=1, as_chain=as_chain)
        case.call(0, shape, topology, cache_state_of([0], [[]], 1, 4, parity=1))
        kept = case.updates[:, 2:4], case.derived.xb[0, :, 2:4], case.derived.steps[0, :, :, 2:4]
        for each in (*kept, case.rows[0, :, shape.tail + 2 : shape.tail + 4]):
            each += poison
        cache_state = cache_state_of([0], [[0, 1, 2, 3]], 1, 4, parity=0)
        cache_state.path_length.fill_(2)
        y = case.call(1, shape, topology, cache_state)
        results.append((y, case.state, case.updates[:, :4]))
    for clean, poisoned in zip(*results, strict=True):
        assert torch.equal(clean, poisoned)


@pytest.mark.parametrize("negative", [False, True], ids=["positive", "negative"])
def test_a_chain_of_one_key(negative):
    """All keys alike, full strength and hardly any decay: (I + A)⁻¹ has entries of 1, or of 2 with
    alternating signs, and the powers of A, from which a series would take it, grow to 10⁸ on a
    chain of 32."""
    shape, tree = GatedDeltaShape(1, 1, 16, 16, 1, negative), TokenTree.chain(31)
    case = make(shape, 32, torch.float32, batch=1)
    case.weights.conv.fill_(1)
    case.weights.conv_bias.zero_()
    case.weights.dt_bias.fill_(-12)
    projected = case.projected[0]
    keys = slice(shape.d_inner + 16, shape.d_inner + 32)
    projected[..., keys] = 1
    projected[..., -1] = 12  # b
    exact = case.in_fp64()
    cache_state = cache_state_of([0], [[]], 1, 2, parity=1)
    wanted, got = (
        each.call(0, shape, topology_of([tree], 1), cache_state) for each in (exact, case)
    )
    assert relative_error(got, wanted) < 1e-5
    assert relative_error(case.updates[:, :32], exact.updates[:, :32]) < 1e-5


@pytest.mark.parametrize("through", ["twin", pytest.param("kernels", marks=pytest.mark.long)])
def test_the_state_after_5000_tokens(through):
    """Call after call over a tree, of whose longest path 1, 2, … nodes are accepted: the state of
    the fp32 twin, and of the kernels, beside the twin's in fp64."""
    shape, tree = GatedDeltaShape(1, 1, 16, 16, 4), comb(16)
    case = make(shape, 16, torch.float32, batch=1, calls=7)
    case.weights.dt_bias.fill_(-8)  # remembers for some thousand tokens
    case.weights.A_log.fill_(0)
    exact, topology = case.in_fp64(), topology_of([tree])
    longest = max((tree.path_to(node) for node in range(16)), key=len)
    path, left, call = [], 5_000, 0
    while left > 0 or path:
        cache_state = cache_state_of([0], [path], 1, len(longest), parity=(call + 1) % 2)
        exact.call(call % 7, shape, topology, cache_state)
        if through == "kernels":
            case.call(call % 7, shape, topology, cache_state)
        else:
            naive.gated_delta_tree(
                case.projected[call % 7], case.rows, None, case.updates, case.state, case.weights,
                shape, topology, cache_state, 0,
            )
        path = longest[: min(left, 1 + call % len(longest))]
        left, call = left - len(path), call + 1
    assert exact.state.norm() > 1
    assert relative_error(case.state, exact.state) < 1e-4


@pytest.mark.parametrize("num_nodes, first, steps", [(1, 0, True), (2, 0, False), (2, 1, False)])
def test_one_token_is_a_step_of_a_chain(monkeypatch, num_nodes, first, steps):
    """The chain's kernel takes one token, but not where a tree grows by one node."""
    asked, shape = [], SHAPES["grouped"]
    monkeypatch.setattr(gated_delta_tree, "advance_chain", lambda *_: asked.append(True))
    monkeypatch.setattr(gated_delta_tree, "_advance_tree", lambda *_: asked.append(False))
    case = make(shape, num_nodes, torch.float32, as_chain=None)
    cache_state = cache_state_of([0, 0], [[], []], 1, 4)
    topology = topology_of([TokenTree.chain(num_nodes - 1)])
    case.call(0, shape, topology, cache_state, first, slice(first, num_nodes))
    assert asked == [steps]
