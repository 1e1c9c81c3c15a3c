"""The Mamba-2 tree call in two launches against its naive twin in fp64: a tree, then another one
after a path of the first was accepted.

Tolerances: with fp32 inputs the products are split into three tf32 ones, which leaves about
1e-6 of a norm, as does fp32's own rounding of sums of 128 terms; 1e-5 leaves room. With bf16
inputs x, B and C are rounded after the conv and y at the end (2⁻⁹ each, independent, so up to
3e-3 of a norm), beside which tf32 products (2⁻¹¹) hardly count. Triton's interpreter cuts bf16
off instead of rounding it: twice the error, and always downwards, so that the four add up to
4 · 2⁻⁸ at most. A state kept in bf16 is rounded likewise.
"""

from __future__ import annotations

from dataclasses import dataclass

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
from planted import edited_module
from toys import random_tree

from stree.trees.token_tree import TokenTree
from stree_kernels import naive
from stree_kernels.contracts import Derived, MixerShape, MixerWeights
from stree_kernels.conv import tree_conv
from stree_kernels.mamba import streamed_scan, tree_scan

SHAPES = {
    "grouped": MixerShape(4, 16, 16, 2, 1, 4, 4),
    "odd": MixerShape(3, 20, 18, 1, 3, 3, 4, dt_limit=(0.01, 0.4)),
    "repeated": MixerShape(4, 8, 24, 2, 1, 4, 3, repeat_before_conv=True),
    "gated, two-blocks": MixerShape(2, 48, 16, 2, 2, 1, 2, gated=True),
    "part of a block": MixerShape(2, 40, 18, 2, 1, 2, 4),
}
TREES = [TokenTree.chain(0), TokenTree.paper(), star(17), comb(33)]
LONG_TREES = [TokenTree.chain(16), comb(65), random_tree(257)]
TREES_ON_CUDA = [
    comb(128), star(256), comb(256), TokenTree.chain(255), random_tree(1000), random_tree(2048),
    TokenTree.chain(2047),
]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3 if DEVICE == "cuda" else 4 * 2**-8}


@dataclass
class Case:
    """Inputs of two calls, strided and with NaN wherever nothing is."""

    projected: list[torch.Tensor]
    rows: torch.Tensor
    derived: Derived
    state: torch.Tensor
    weights: MixerWeights
    as_chain: bool = False  # through the multi-step update

    def in_fp64(self) -> Case:
        wide = [None if each is None else each.double() for each in vars(self.weights).values()]
        return Case(
            [each.double() for each in self.projected],
            self.rows.double(), self.derived, self.state.double(), MixerWeights(*wide),
        )

    def call(self, number, shape, topology, cache_state, first=0, nodes=slice(None)):
        """Through the kernels, or in fp64 through the twin."""
        projected = self.projected[number][:, nodes]
        arguments = (
            projected, self.rows, self.derived, self.state, self.weights, shape, topology,
            cache_state, first,
        )
        if self.state.dtype == torch.float64:
            return naive.mamba_tree(*arguments)
        return tree_scan.mamba_tree(*arguments, as_chain=self.as_chain)


def make(shape, N, dtype, batch=2, state_dtype=torch.float32, bias=True, as_chain=False):
    x_conv, b_conv, c_conv = shape.scan_groups
    xb = x_conv * shape.head_dim + b_conv * shape.d_state
    conv_dim = xb + c_conv * shape.d_state
    width = shape.d_inner + shape.num_kept
    projected = [normal(batch, N, width + 5, seed=s, dtype=dtype)[..., :width] for s in (0, 1)]

    def nothing(*dims, dtype=dtype):
        return torch.full(dims, torch.nan, device=DEVICE, dtype=dtype)

    rows = nothing(2, batch, shape.tail + N + 2, shape.num_kept + 3)[..., : shape.num_kept]
    rows[1, :, : shape.tail] = normal(batch, shape.tail, shape.num_kept, seed=2, dtype=dtype)
    steps = nothing(2, batch, 2, N + 2, shape.num_heads + 1, dtype=torch.float32)
    derived = Derived(nothing(2, batch, N + 2, xb + 7), steps)
    state = normal(batch, shape.num_heads, shape.head_dim, shape.d_state, seed=2)
    weights = MixerWeights(
        normal(shape.width, conv_dim, seed=3, dtype=dtype).T,
        normal(conv_dim, seed=4, dtype=dtype) if bias else None,
        normal(shape.num_heads, seed=5, dtype=dtype) - 2,
        normal(shape.num_heads, seed=6, dtype=dtype),
        normal(shape.num_heads, seed=7, dtype=dtype),
    )
    return Case(projected, rows, derived, state.to(state_dtype), weights, as_chain)


def compare(shape, trees, paths, dtype=torch.float32, **options):
    tolerance = TOLERANCE[dtype]
    case = make(shape, trees[0].num_nodes, dtype, len(paths), **options)
    exact = case.in_fp64()
    steered = compare_calls(case, exact, shape, trees, paths, tolerance)
    state_tolerance = TOLERANCE[torch.bfloat16] if case.state.dtype != torch.float32 else tolerance
    assert relative_error(case.state, exact.state) < state_tolerance
    return steered


@pytest.mark.parametrize("tree", quick_first([(t,) for t in TREES], [(t,) for t in LONG_TREES]))
def test_trees(tree):
    path = tree.path_to(tree.num_nodes - 1)
    compare(SHAPES["grouped"], [tree], [path, path[:1]])


@pytest.mark.gpu  # minutes in the interpreter
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tree", TREES_ON_CUDA, ids=lambda tree: f"{tree.name}-{tree.num_nodes}")
def test_large_trees(tree, dtype):
    path = tree.path_to(tree.num_nodes - 1)
    compare(MixerShape(32, 128, 128, 8, 8, 32, 4), [tree], [path, path[:3]], dtype)


@pytest.mark.parametrize(
    "name, dtype",
    quick_first(
        [("grouped", torch.bfloat16), ("odd", torch.bfloat16), ("repeated", torch.float32),
         ("gated, two-blocks", torch.float32)],
        [(name, dtype) for name in SHAPES for dtype in TOLERANCE],
    ),
)
def test_shapes(name, dtype):
    compare(SHAPES[name], [TokenTree.paper()], [[0, 1, 4, 7, 11], []], dtype)


@pytest.mark.parametrize("options", [dict(bias=False), dict(state_dtype=torch.bfloat16)], ids=str)
def test_without_bias_and_with_a_narrow_state(options):
    compare(SHAPES["odd"], [TokenTree.paper()], [[0, 2, 6]], torch.bfloat16, **options)


def test_a_tree_per_sequence():
    trees = [TokenTree.paper(), TokenTree.chain(12), star(13)]
    compare(SHAPES["grouped"], trees, [[0], [0, 1, 2], [], [0, 1, 4]])  # real paths


@pytest.mark.parametrize(
    "name, num_nodes, dtype",
    quick_first(
        [("odd", 1, torch.float32), ("gated, two-blocks", 5, torch.bfloat16),
         ("repeated", 5, torch.float32)],
        [(name, count, dtype) for name, count in
         (("odd", 1), ("odd", 5), ("repeated", 17), ("gated, two-blocks", 5))
         for dtype in TOLERANCE],
    ),
)
def test_the_multi_step_update_of_chains(name, num_nodes, dtype):
    paths = [list(range(num_nodes)), [], [0]]
    compare(SHAPES[name], [TokenTree.chain(num_nodes - 1)], paths, dtype, as_chain=True)


FAR = [  # in one or two blocks of a head
    ("gated, two-blocks", TokenTree.chain(0), torch.float32, True),
    ("part of a block", TokenTree.chain(2), torch.bfloat16, True),
    ("part of a block", comb(9), torch.float32, False),
    ("odd", TokenTree.paper(), torch.bfloat16, False),
    ("grouped", comb(20), torch.float32, False),
]
LONG_FAR = [
    ("grouped", TokenTree.chain(17), torch.float32, True),
    ("repeated", TokenTree.paper(), torch.float32, False),
    ("gated, two-blocks", comb(33), torch.bfloat16, False),  # by two blocks of nodes: not there
]


def far_states(monkeypatch, shape):
    """However few bytes and heads there are, in blocks of 32 channels, as the other launches'."""
    numbers = 32 * max(16, 1 << (shape.d_state - 1).bit_length())
    monkeypatch.setattr(streamed_scan, "FAR_STATES", 0)
    monkeypatch.setattr(streamed_scan, "BLOCK", numbers)
    monkeypatch.setattr(streamed_scan, "device_of", lambda _: (1, streamed_scan.SHARED_BYTES))


@pytest.mark.parametrize("name, tree, dtype, as_chain", quick_first(FAR, LONG_FAR))
def test_the_scan_advances_states_that_are_far(name, tree, dtype, as_chain, monkeypatch):
    paths = [tree.path_to(tree.num_nodes - 1), [], [0]]
    near = steered_twice(SHAPES[name], tree, paths, dtype, as_chain)
    far_states(monkeypatch, SHAPES[name])
    compare(SHAPES[name], [tree], paths, dtype, as_chain=as_chain)
    far = steered_twice(SHAPES[name], tree, paths, dtype, as_chain)
    assert torch.equal(near[-1], far[-1])
    if not as_chain or DEVICE == "cpu":  # its sums over a state are in another order there
        assert all(torch.equal(one, other) for one, other in zip(near, far, strict=True))


MISTAKES = {
    "the last tree's inputs": ("xb += (1 - parity)", "xb += parity"),
    "no state after the root alone": ("if path_length > 0:", "if path_length > 1:"),
    "whoever is no ancestor": ("tl.where(above, ", "tl.where(above | True, "),
    "16 nodes of a path": ("if path_length > PATH_BLOCK:", "if path_length > 32:"),
    "the first head's decay": ("A_log + head", "A_log"),
    "the state ahead of the path": ("h = kept.to(tl.float32)", "h = h / decay"),
    "the first block again": ("p = start + tl.arange", "p = start * 0 + tl.arange"),
    "the first block's x": ("x_channel = x_start + p", "x_channel = x_start + p - start"),
}
QUICK = {"the last tree's inputs", "16 nodes of a path", "the first block again"}


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter reads edited sources")
@pytest.mark.parametrize(
    "mistake",
    [pytest.param(each, marks=[] if each in QUICK else pytest.mark.long) for each in MISTAKES],
)
def test_a_mistake_in_the_scan_of_far_states_is_caught(mistake, monkeypatch, tmp_path):
    broken = edited_module(streamed_scan, *MISTAKES[mistake], tmp_path)
    far_states(monkeypatch, SHAPES["part of a block"])
    monkeypatch.setattr(streamed_scan, "streamed_scan_kernel", broken.streamed_scan_kernel)
    tree = TokenTree.chain(17) if mistake == "16 nodes of a path" else TokenTree.paper()
    with pytest.raises(AssertionError):
        compare(SHAPES["part of a block"], [tree], [tree.path_to(tree.num_nodes - 1), [0]])


def steered_twice(shape, tree, paths, dtype, as_chain):
    """What two calls give, the second after these paths, and the states then."""
    case = make(shape, tree.num_nodes, dtype, len(paths), as_chain=as_chain)
    topology, slots = topology_of([tree], shape.width), 1 + max(map(len, paths))
    lengths, first = [0] * len(paths), [[] for _ in paths]
    outputs = [
        case.call(n, shape, topology, cache_state_of(lengths, each, 1, slots, parity=1 - n))
        for n, each in enumerate((first, paths))
    ]
    return [*outputs, case.state]


@pytest.mark.gpu  # 16 MiB of states are minutes in the interpreter
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tree", [TokenTree.chain(0), TokenTree.paper(), comb(32)], ids=str)
@pytest.mark.parametrize("batch", [8, 16])
def test_states_that_are_far(batch, tree, dtype):
    """In the blocks of a real shape, of few programs and of many."""
    shape = MixerShape(32, 128, 128, 8, 8, 32, 4)
    assert streamed_scan.streams(torch.empty(batch, 32, 128, 128, device=DEVICE), tree.num_nodes)
    path = tree.path_to(tree.num_nodes - 1)
    compare(shape, [tree], [path, path[:2], [], path[:1]] * (batch // 4), dtype)


@pytest.mark.parametrize("far", [False, True])
def test_what_a_path_held_before_does_not_count(far, monkeypatch):
    """Nodes of the tree that a longer path has left behind the accepted ones."""
    shape, tree, found = SHAPES["grouped"], TokenTree.paper(), []
    if far:
        far_states(monkeypatch, shape)
    for left in (10_000, 2):
        case = make(shape, tree.num_nodes, torch.float32)
        topology, before = topology_of([tree]), cache_state_of([0, 0], [[], []], 1, 4, parity=1)
        case.call(0, shape, topology, before)
        after = cache_state_of([0, 0], [[0], [0, 1]], 1, 4, parity=0)
        after.path[after.path == 10_000] = left
        found.append([case.call(1, shape, topology, after), case.state])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_the_conv_of_many_sequences(monkeypatch):
    outputs = []
    for many in (100, 1):
        monkeypatch.setattr(tree_conv, "MANY", many)
        shape, tree = SHAPES["repeated"], TokenTree.chain(2)
        outputs.append(steered_twice(shape, tree, [[0, 1], []], torch.float32, False))
    assert all(torch.equal(one, other) for one, other in zip(*outputs, strict=True))


@pytest.mark.parametrize("num_nodes, piece", quick_first([(4, 1), (21, 20)], [(6, 1), (21, 9)]))
def test_growing_a_tree_in_pieces(num_nodes, piece):
    shape = SHAPES["grouped"]
    whole, parts = (make(shape, num_nodes, torch.float32, batch=1) for _ in range(2))
    compare_pieces(whole, parts, shape, comb(num_nodes), piece)


def test_siblings_and_uncounted_path_slots_are_invisible():
    shape, tree = SHAPES["grouped"], TokenTree.paper()
    compare(shape, [tree], [[0, 1], [0]])
    before, changed = (make(shape, tree.num_nodes, torch.float32) for _ in range(2))
    assert readers_of(2, before, changed, shape, tree) == [2, 6]
