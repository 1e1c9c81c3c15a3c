"""The tree calls of Mamba-2 and of the gated delta rule agree with their naive twins in fp64: a
tree, then another one after a path of the first was accepted.

Tolerances: with fp32 inputs the products are split into three tf32 ones, which leaves about 1e-6
of a norm, as does fp32's own rounding of sums of 128 terms; the triangular system of the gated
delta rule multiplies it by its condition, a few for random keys: 1e-5 leaves room. With bf16
inputs x, B and C (q, k and v) are rounded after the conv and y at the end (2⁻⁹ each, independent,
so up to 3e-3 of a norm; k is in the system twice), beside which tf32 products (2⁻¹¹) hardly count.
Triton's interpreter cuts bf16 off instead of rounding it: twice the error, and always downwards, so
that the four add up to 4 · 2⁻⁸ at most. A state kept in bf16 is rounded likewise; u and other
states are fp32.
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
from lanes import costly, quick_first
from planted import edited_module
from toys import random_tree

from stree.trees.token_tree import TokenTree, balanced
from stree_kernels import naive
from stree_kernels.contracts import Derived, GatedDeltaWeights, MixerWeights
from stree_kernels.conv import tree_conv
from stree_kernels.gated_delta import tree as gated_delta_tree
from stree_kernels.mamba import streamed_scan, tree_scan
from stree_kernels.shapes import GatedDeltaShape, MixerShape

MAMBA = {
    "grouped": MixerShape(4, 16, 16, 2, 1, 4, 4),
    "odd": MixerShape(3, 20, 18, 1, 3, 3, 4, dt_limit=(0.01, 0.4)),
    "repeated": MixerShape(4, 8, 24, 2, 1, 4, 3, repeat_before_conv=True),
    "gated, two-blocks": MixerShape(2, 48, 16, 2, 2, 1, 2, gated=True),
    "part of a block": MixerShape(2, 40, 18, 2, 1, 2, 4),
}
GATED_DELTA = {
    "delta grouped": GatedDeltaShape(2, 1, 16, 16, 4),
    "delta odd": GatedDeltaShape(2, 2, 20, 18, 4),
    "delta two-keys": GatedDeltaShape(4, 2, 8, 12, 3),
    "delta two-blocks": GatedDeltaShape(1, 1, 16, 48, 2),
}
SHAPES = {**MAMBA, **GATED_DELTA}
SMALL = GatedDeltaShape(1, 1, 16, 16, 4)
WIDE = MixerShape(32, 128, 128, 8, 8, 32, 4), GatedDeltaShape(48, 16, 128, 128, 4)
TREES = [
    *(("grouped", tree) for tree in (TokenTree.chain(0), TokenTree.paper(), star(17))),
    *(("delta grouped", tree) for tree in
      (TokenTree.chain(0), star(17), balanced([2, 2, 2, 2]))),
]
DEAR_TREES = [
    ("grouped", comb(33)), ("delta grouped", comb(33)), ("delta grouped", TokenTree.chain(99)),
]
LONG_TREES = [
    *(("grouped", tree) for tree in (TokenTree.chain(16), comb(65), random_tree(257))),
    *(("delta grouped", tree) for tree in
      (comb(256), star(256), TokenTree.chain(255), random_tree(257))),
]
TREES_ON_CUDA = [
    TokenTree.chain(99), comb(128), star(256), comb(256), TokenTree.chain(255), random_tree(257),
    random_tree(1000), random_tree(2048), TokenTree.chain(2047),
]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3 if DEVICE == "cuda" else 4 * 2**-8}
each_kind = pytest.mark.parametrize("name", ["grouped", "delta grouped"])


@dataclass
class Case:
    """Inputs of calls, strided and with NaN wherever nothing is."""

    projected: list[torch.Tensor]
    rows: torch.Tensor
    derived: Derived
    updates: torch.Tensor | None  # of a gated delta rule
    state: torch.Tensor
    weights: MixerWeights | GatedDeltaWeights
    as_chain: bool | None = False  # through the multi-step update

    def in_fp64(self) -> Case:
        wide = [None if each is None else each.double() for each in vars(self.weights).values()]
        return replace(
            self, projected=[each.double() for each in self.projected], rows=self.rows.double(),
            updates=None if self.updates is None else self.updates.double(),
            state=self.state.double(), weights=type(self.weights)(*wide),
        )

    def call(self, number, shape, topology, cache_state, first=0, nodes=slice(None)):
        """Call the kernels, or in fp64 the twin."""
        held = (self.state,) if self.updates is None else (self.updates, self.state)
        arguments = (
            self.projected[number][:, nodes], self.rows, self.derived, *held, self.weights, shape,
            topology, cache_state, first,
        )
        if self.state.dtype == torch.float64:
            twin = naive.mamba_tree if self.updates is None else naive.gated_delta_tree
            return twin(*arguments)
        if self.updates is None:
            return tree_scan.mamba_tree(*arguments, as_chain=self.as_chain)
        return gated_delta_tree.gated_delta_tree(*arguments, as_chain=self.as_chain)


def nothing(*dims, dtype=torch.float32):
    return torch.full(dims, torch.nan, device=DEVICE, dtype=dtype)


def make(
    shape, N, dtype, batch=2, state_dtype=torch.float32, bias=True, as_chain=False, calls=2
):
    is_mamba, heads = isinstance(shape, MixerShape), shape.num_heads
    width = shape.d_inner + shape.num_kept if is_mamba else shape.num_projected
    projected = [
        normal(batch, N, width + 5, seed=s, dtype=dtype)[..., :width] for s in range(calls)
    ]
    rows = nothing(2, batch, shape.tail + N + 2, shape.num_kept + 3, dtype=dtype)
    rows = rows[..., : shape.num_kept]
    rows[1, :, : shape.tail] = normal(batch, shape.tail, shape.num_kept, seed=20, dtype=dtype)
    steps = nothing(2, batch, 2, N + 2, heads + 1)
    xb = nothing(2, batch, N + 2, sum(shape.conv_dims[:2]) + 7, dtype=dtype)
    weights = [
        normal(shape.width, sum(shape.conv_dims), seed=23, dtype=dtype).T,
        normal(sum(shape.conv_dims), seed=24, dtype=dtype) if bias else None,
        normal(heads, seed=25, dtype=dtype) - 2, normal(heads, seed=26, dtype=dtype),
    ]
    if is_mamba:
        state, updates = normal(batch, heads, shape.head_dim, shape.d_state, seed=22), None
        weights = MixerWeights(*weights, normal(heads, seed=27, dtype=dtype))
    else:
        state = normal(batch, heads, shape.key_dim, shape.value_dim, seed=22)
        updates = nothing(batch, N + 2, heads, shape.value_dim)
        weights = GatedDeltaWeights(*weights)
    derived, state = Derived(xb, steps), state.to(state_dtype)
    return Case(projected, rows, derived, updates, state, weights, as_chain)


def compare(shape, trees, paths, dtype=torch.float32, **options):
    N, tolerance = trees[0].num_nodes, TOLERANCE[dtype]
    case = make(shape, N, dtype, len(paths), **options)
    exact = case.in_fp64()

    def compare_updates():
        if case.updates is not None:
            assert relative_error(case.updates[:, :N], exact.updates[:, :N]) < tolerance
            assert case.updates[:, N:].isnan().all()

    compare_calls(case, exact, shape, trees, paths, tolerance, compare_updates)
    state_tolerance = TOLERANCE[torch.bfloat16] if case.state.dtype != torch.float32 else tolerance
    assert relative_error(case.state, exact.state) < state_tolerance


@pytest.mark.quick(4)
@pytest.mark.parametrize(("name", "tree"), quick_first(TREES, LONG_TREES, DEAR_TREES))
def test_trees(name, tree):
    path = tree.path_to(tree.num_nodes - 1)
    paths = [path, path[:1]] if name == "grouped" or tree.num_nodes < 99 else [path]
    compare(SMALL if len(paths) == 1 else SHAPES[name], [tree], paths)


@pytest.mark.gpu  # minutes in the interpreter
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", WIDE, ids=["mamba", "delta"])
@pytest.mark.parametrize("tree", TREES_ON_CUDA, ids=lambda tree: f"{tree.name}-{tree.num_nodes}")
def test_large_trees(tree, shape, dtype):
    path = tree.path_to(tree.num_nodes - 1)
    compare(shape, [tree], [path, path[:3]], dtype)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "name, dtype",
    quick_first(
        [("grouped", torch.bfloat16), ("repeated", torch.float32), ("delta odd", torch.float32),
         ("delta two-blocks", torch.bfloat16)],
        [(name, dtype) for name in SHAPES for dtype in TOLERANCE],
        [("odd", torch.bfloat16), ("gated, two-blocks", torch.float32),
         ("delta two-keys", torch.bfloat16)],
    ),
)
def test_shapes(name, dtype):
    compare(SHAPES[name], [TokenTree.paper()], [[0, 1, 4, 7, 11], []], dtype)


@pytest.mark.parametrize(
    ("name", "options"),
    [("odd", dict(bias=False)), ("odd", dict(state_dtype=torch.bfloat16)),
     ("delta grouped", dict(bias=False))],
    ids=str,
)
def test_without_bias_and_with_a_narrow_state(name, options):
    compare(SHAPES[name], [TokenTree.paper()], [[0, 2, 6]], torch.bfloat16, **options)


@each_kind
def test_a_tree_per_sequence(name):
    trees = [TokenTree.paper(), TokenTree.chain(12), star(13)]
    compare(SHAPES[name], trees, [[0], [0, 1, 2], [], [0, 1, 4]])  # real paths


@pytest.mark.parametrize(
    "name, num_nodes, dtype",
    quick_first(
        [("odd", 1, torch.float32), ("repeated", 5, torch.float32),
         ("delta odd", 1, torch.bfloat16)],
        [(name, count, dtype) for name, count in
         (("odd", 1), ("odd", 5), ("repeated", 17), ("gated, two-blocks", 5),
          *((each, count) for each in ("delta odd", "delta two-keys") for count in (1, 5, 17)))
         for dtype in TOLERANCE],
        [("gated, two-blocks", 5, torch.bfloat16), ("delta odd", 5, torch.float32)],
    ),
)
def test_the_multi_step_update_of_chains(name, num_nodes, dtype):
    paths = [list(range(num_nodes)), [], [0]]
    compare(SHAPES[name], [TokenTree.chain(num_nodes - 1)], paths, dtype, as_chain=True)


@pytest.mark.parametrize(
    "num_nodes, first, updates, steps",
    [(1, 0, False, True), (2, 0, False, False), (2, 1, False, False), (2, 0, True, True),
     (2, 1, True, False)],
)
@each_kind
def test_one_token_is_a_step_of_a_chain(monkeypatch, name, num_nodes, first, updates, steps):
    """The chain's kernel takes one token, and chains if asked to, but not where a tree grows."""
    monkeypatch.setenv("STREE_CHAINS", "multi_step" if updates else "")
    asked, shape = [], SHAPES[name]
    for module, chain, tree in (
        (tree_scan, "scan_chain", "_scan_tree"),
        (gated_delta_tree, "advance_chain", "_advance_tree"),
    ):
        monkeypatch.setattr(module, chain, lambda *_: asked.append(True))
        monkeypatch.setattr(module, tree, lambda *_: asked.append(False))
    case = make(shape, num_nodes, torch.float32, as_chain=None)
    topology = replace(topology_of([TokenTree.chain(num_nodes - 1)]), chains=True)
    cache_state = cache_state_of([0, 0], [[], []], 1, 4)
    case.call(0, shape, topology, cache_state, first, slice(first, num_nodes))
    assert asked == [steps]


@pytest.mark.parametrize(
    "name, num_nodes, piece",
    quick_first(
        [("grouped", 4, 1), ("delta grouped", 4, 1)],
        [("grouped", 6, 1), ("grouped", 21, 9),
         *(("delta grouped", *each) for each in ((20, 17), (40, 9), (70, 35)))],
        [("grouped", 21, 20), ("delta grouped", 37, 33)],
    ),
)
def test_growing_a_tree_in_pieces(name, num_nodes, piece):
    shape = SHAPES[name]
    whole, parts = (make(shape, num_nodes, torch.float32, batch=1) for _ in range(2))
    compare_pieces(whole, parts, shape, comb(num_nodes), piece)


@each_kind
def test_siblings_are_invisible(name):
    shape, tree = SHAPES[name], TokenTree.paper()
    before, changed = (make(shape, tree.num_nodes, torch.float32) for _ in range(2))
    assert readers_of(2, before, changed, shape, tree) == [2, 6]


def test_uncounted_path_slots_are_invisible():
    compare(SHAPES["grouped"], [TokenTree.paper()], [[0, 1], [0]])


FAR = [  # in one or two blocks of a head
    ("gated, two-blocks", TokenTree.chain(0), torch.float32, True),
    ("part of a block", comb(9), torch.float32, False),
]
LONG_FAR = [
    ("grouped", TokenTree.chain(17), torch.float32, True),
    ("repeated", TokenTree.paper(), torch.float32, False),
    ("gated, two-blocks", comb(33), torch.bfloat16, False),  # by two blocks of nodes: not there
]


def far_states(monkeypatch, shape):
    """Take any states for far ones, in blocks of 32 channels, as the other launches do."""
    numbers = 32 * max(16, 1 << (shape.d_state - 1).bit_length())
    monkeypatch.setattr(streamed_scan, "STATE_BYTES_PAST_L2", 0)
    monkeypatch.setattr(streamed_scan, "BLOCK", numbers)
    monkeypatch.setattr(streamed_scan, "device_of", lambda _: (1, streamed_scan.SHARED_BYTES))


@pytest.mark.parametrize("name, tree, dtype, as_chain", [
    *quick_first(FAR, LONG_FAR),
    costly("odd", TokenTree.paper(), torch.bfloat16, False),
    costly("part of a block", TokenTree.chain(2), torch.bfloat16, True),
    costly("grouped", comb(20), torch.float32, False),
])
def test_the_scan_advances_states_that_are_far(name, tree, dtype, as_chain, monkeypatch):
    paths = [tree.path_to(tree.num_nodes - 1), [], [0]]
    near = steered_twice(MAMBA[name], tree, paths, dtype, as_chain)
    far_states(monkeypatch, MAMBA[name])
    compare(MAMBA[name], [tree], paths, dtype, as_chain=as_chain)
    far = steered_twice(MAMBA[name], tree, paths, dtype, as_chain)
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
    far_states(monkeypatch, MAMBA["part of a block"])
    monkeypatch.setattr(streamed_scan, "streamed_scan_kernel", broken.streamed_scan_kernel)
    tree = TokenTree.chain(17) if mistake == "16 nodes of a path" else TokenTree.paper()
    with pytest.raises(AssertionError):
        compare(MAMBA["part of a block"], [tree], [tree.path_to(tree.num_nodes - 1), [0]])


def steered_twice(shape, tree, paths, dtype, as_chain):
    """Return what two calls give, the second after these paths, and the states then."""
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
    """States stream in the blocks of a real shape, in few programs and in many."""
    shape = WIDE[0]
    assert streamed_scan.streams(torch.empty(batch, 32, 128, 128, device=DEVICE), tree.num_nodes)
    path = tree.path_to(tree.num_nodes - 1)
    compare(shape, [tree], [path, path[:2], [], path[:1]] * (batch // 4), dtype)


@pytest.mark.parametrize("far", [False, True])
def test_what_a_path_held_before_does_not_count(far, monkeypatch):
    """Nodes that a longer path has left behind the accepted ones change nothing."""
    shape, tree, found = MAMBA["grouped"], TokenTree.paper(), []
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
        monkeypatch.setattr(tree_conv, "MIN_ROWS_WIDE_BLOCKS", many)
        shape, tree = MAMBA["repeated"], TokenTree.chain(2)
        outputs.append(steered_twice(shape, tree, [[0, 1], []], torch.float32, False))
    assert all(torch.equal(one, other) for one, other in zip(*outputs, strict=True))


@pytest.mark.parametrize(
    "tree, as_chain",
    [(TokenTree.paper(), False), (comb(37), False), (TokenTree.chain(4), True)],
    ids=["tree", "pairs", "chain"],
)
def test_negative_eigenvalues(tree, as_chain):
    """The strength of a write goes up to 2 in each of the kernels that read it."""
    shape = replace(SHAPES["delta grouped"], negative_eigenvalues=True)
    path = tree.path_to(tree.num_nodes - 1)
    compare(shape, [tree], [path, path[:1]], as_chain=as_chain)


@pytest.mark.parametrize("as_chain", [False, True], ids=["tree", "chain"])
def test_what_was_not_accepted_is_invisible(as_chain):
    """Slots of the path that do not count name nodes of the last tree, as a longer path before has
    left them; what those nodes hold, NaN included, reaches nothing."""
    shape, tree = SHAPES["delta grouped"], TokenTree.chain(3)
    topology = topology_of([tree])
    results = []
    for poison in (0.0, torch.nan):
        case = make(shape, 4, torch.float32, batch=1, as_chain=as_chain)
        case.call(0, shape, topology, cache_state_of([0], [[]], 1, 4, parity=1))
        derived = case.derived
        kept = case.updates[:, 2:4], derived.convolved[0, :, 2:4], derived.decays[0, :, :, 2:4]
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
    """(I + A)⁻¹ of keys alike, full strength and hardly any decay has entries of 1, or of 2 with
    alternating signs; the powers of A, from which a series would take it, grow to 10⁸ on a chain of
    32."""
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


@pytest.mark.costly
@pytest.mark.parametrize("through", ["twin", pytest.param("kernels", marks=pytest.mark.long)])
def test_the_state_after_5000_tokens(through):
    """The state of the fp32 twin, and of the kernels, stays near the twin's in fp64.

    Call after call goes over a tree, of whose longest path 1, 2, … nodes are accepted.
    """
    shape, tree = SMALL, comb(16)
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
