"""The fused tree attention against its naive twin in fp64.

Tolerances: fp32 inputs leave about 1e-6 of a norm (three tf32 products for one), 1e-5 leaves
room. With bf16 inputs the rotated queries, the softmax weights and the output are rounded to
bf16 (2⁻⁹ each), and the twin in fp64 is not: about 4e-3, 1e-2 leaves room.
"""

from dataclasses import replace

import pytest
import torch
from kernel_cases import (
    DEVICE,
    cache_state_of,
    comb,
    normal,
    relative_error,
    star,
    topology_of,
)
from lanes import costly, quick_first
from node_orders import depth_first
from toys import random_tree

from stree.trees.token_tree import TokenTree
from stree_kernels import naive
from stree_kernels.attention import tree_attention
from stree_kernels.contracts import CacheState

TREES = [TokenTree.chain(0), TokenTree.paper(), star(17), comb(40)]
TREES_ON_CUDA = [
    comb(65), star(256), comb(256), TokenTree.chain(255), random_tree(257), random_tree(1000),
    random_tree(2048), TokenTree.chain(2047),
    TokenTree(depth_first(random_tree(2048).parents, heaviest_first=True), "heavy"),
]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def make(tree, lengths, paths, dtype, heads=2, kv_heads=1, head_dim=16, slack=7):
    """Make inputs of `attend_tree`: slots beyond the last tree hold NaN, rows have strides."""
    batch, N = len(lengths), tree.num_nodes
    slots = max(lengths) + 2 * N + slack
    last = max(max(path, default=0) for path in paths) + 1
    keys, values = (
        normal(batch, slots, kv_heads, head_dim, seed=seed, dtype=dtype).transpose(1, 2)
        for seed in (1, 2)
    )
    for row, length in enumerate(lengths):
        for cache in (keys, values):
            cache[row, :, length + last :] = torch.nan
    qkv = normal(batch, N, (heads + 2 * kv_heads) * head_dim + 3, dtype=dtype)[..., :-3]
    angles = torch.arange(slots)[:, None] * 0.7 ** torch.arange(head_dim // 2)
    rotary = torch.stack([angles.cos(), angles.sin()]).to(DEVICE, torch.float32)
    return qkv, keys, values, rotary


def compare(tree, lengths, paths, dtype=torch.float32, window=0, **options):
    qkv, keys, values, rotary = make(tree, lengths, paths, dtype, **options)
    exact = [qkv.double(), keys.double(), values.double(), rotary.double()]
    topology = topology_of([tree])
    cache_state = cache_state_of(lengths, paths, 1, max(1, *(len(path) for path in paths)) + 1)
    wanted = naive.attend_tree(
        *exact, topology, cache_state, 0, keys.shape[2], window=window
    )
    got = tree_attention.attend_tree(
        qkv, keys, values, rotary, topology, cache_state, 0, 0, window=window
    )
    tolerance = TOLERANCE[dtype]
    assert got.dtype == dtype and got.shape == wanted.shape
    assert relative_error(got, wanted) < tolerance
    for row, length in enumerate(lengths):
        used = slice(0, length + len(paths[row]) + tree.num_nodes)
        for ours, theirs in ((keys, exact[1]), (values, exact[2])):
            assert relative_error(ours[row, :, used], theirs[row, :, used]) < tolerance
    return got


@pytest.mark.quick(2)
@pytest.mark.parametrize("tree", TREES, ids=lambda tree: f"{tree.name}-{tree.num_nodes}")
def test_trees(tree):
    path = tree.path_to(tree.num_nodes - 1)
    compare(tree, [70, 3], [path, path[:1]])


@pytest.mark.parametrize(
    "num_nodes, head_dim, dtype",
    quick_first([(3, 64, torch.bfloat16)], [(1, 128, torch.bfloat16), (20, 20, torch.float32)]),
)
def test_many_sequences(num_nodes, head_dim, dtype, monkeypatch):
    """Keys of many sequences arrive by way of shared memory; here a few count as many."""
    monkeypatch.setattr(tree_attention, "STAGED_FROM", 1)
    paths = [[0], [0, 1], [], [0, 1]] if num_nodes > 1 else [[0], [], [], [0]]
    options = dict(heads=4, kv_heads=1, head_dim=head_dim)
    compare(comb(num_nodes), [300, 3, 64, 129], paths, dtype, **options)


@pytest.mark.gpu  # minutes in the interpreter
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tree", TREES_ON_CUDA, ids=lambda tree: f"{tree.name}-{tree.num_nodes}")
def test_large_trees(tree, dtype):
    path = tree.path_to(tree.num_nodes - 1)
    options = dict(heads=32, kv_heads=8, head_dim=128)
    compare(tree, [1027, 0, 63], [path, [], path[:2]], dtype, **options)


@pytest.mark.long
def test_a_tree_of_more_than_256_nodes():
    tree = random_tree(257)
    compare(tree, [3], [tree.path_to(256)], heads=1, head_dim=8)


@pytest.mark.parametrize(
    "tree", [costly(random_tree(70)), TokenTree(depth_first(random_tree(70).parents))]
)
def test_keys_that_are_left_out_change_nothing(tree):
    """Keys are left out of a new tree, and of one that grows."""
    outputs = []
    for skips in (False, True):
        inputs = make(tree, [9], [[0]], torch.float32, heads=1)
        for first, nodes in ((0, slice(40)), (40, slice(40, 70))):
            cache_state = cache_state_of([10 if first else 9], [[] if first else [0]], 1, 2)
            qkv, *rest = inputs
            outputs.append(tree_attention.attend_tree(
                qkv[:, nodes], *rest, topology_of([tree]), cache_state, first, 0, skips=skips
            ))
    for dense, sparse in zip(outputs[:2], outputs[2:], strict=True):
        assert torch.equal(dense, sparse)


def test_keys_that_nobody_sees_are_not_read():
    """A block of one of two chains below a root spoils that chain only."""
    tree = TokenTree((-1, *range(31), 0, *range(32, 63)))
    topology, cache_state = topology_of([tree]), cache_state_of([9], [[0]], 1, 2)
    spoiled = []
    for skips in (False, True):
        qkv, *rest = make(tree, [9], [[0]], torch.float32, heads=1, head_dim=8)
        qkv[:, 20, -8:] = torch.nan  # its value
        got = tree_attention.attend_tree(qkv, *rest, topology, cache_state, 0, 0, skips=skips)
        spoiled.append(got[0].isnan().any(-1).nonzero().flatten().tolist())
    assert spoiled[1] == list(range(32)) and set(spoiled[0]) > set(spoiled[1])


@pytest.mark.quick(1)
@pytest.mark.parametrize("slack", [7, -16])
def test_some_sequences_of_a_cache(slack):
    """The call takes the third and first of four; nodes without a slot leave nothing."""
    tree, paths, chosen = TokenTree.chain(19), [[], [0, 1]], [2, 0]
    topology, cache_state = topology_of([tree]), cache_state_of([33, 5], paths, 1, 3)
    rows = torch.tensor(chosen, device=DEVICE)
    qkv, keys, values, rotary = make(tree, [5, 40, 33, 9], [[0, 1]] * 4, torch.float32, slack=0)
    count = 40 + 40 if slack > 0 else 33 + 20 + slack
    held = [cache[:, :, :count].clone() for cache in (keys, values)]
    exact, before = ([each.clone() for each in held] for _ in range(2))
    exact = [each.double() for each in exact]
    qkv = qkv[:2].contiguous()
    cache_state = replace(cache_state, rows=rows)
    wanted = naive.attend_tree(
        qkv.double(), *exact, rotary.double(), topology, cache_state, 0, 40 + 40
    )
    got = tree_attention.attend_tree(qkv, *held, rotary, topology, cache_state, 0, 0)
    assert relative_error(got, wanted) < TOLERANCE[torch.float32]
    for ours, theirs, old in zip(held, exact, before, strict=True):
        for length, row in zip((33, 7), chosen, strict=True):
            used = slice(0, length + 20)
            assert relative_error(ours[row, :, used], theirs[row, :, used]) < 1e-5
            assert not torch.equal(ours[row].nan_to_num(9.0), old[row].nan_to_num(9.0))
        for row in (1, 3):
            assert torch.equal(ours[row].nan_to_num(9.0), old[row].nan_to_num(9.0))


HEADS = [(4, 4, 20), (6, 2, 64), (3, 1, 8)]


@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, dtype",
    quick_first(
        [(*HEADS[0], torch.float32), (*HEADS[1], torch.bfloat16)],
        [(*each, dtype) for each in HEADS for dtype in TOLERANCE],
    ),
)
def test_shapes(heads, kv_heads, head_dim, dtype):
    options = dict(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    compare(TokenTree.paper(), [33, 0, 65], [[0, 1, 4, 7, 11], [], [0, 3]], dtype, **options)


@pytest.mark.parametrize("num_nodes, piece", quick_first([(4, 1), (20, 9)], [(6, 1)]))
def test_growing_a_tree_in_pieces(num_nodes, piece):
    tree, lengths, paths = comb(num_nodes), [37, 2], [[0, 1, 4], [0]]
    whole, parts = (make(tree, lengths, paths, torch.float32) for _ in range(2))
    topology, cache_state = topology_of([tree]), cache_state_of(lengths, paths, 1, 4)
    wanted = tree_attention.attend_tree(*whole, topology, cache_state, 0, 0)
    later = CacheState(
        cache_state.length + cache_state.path_length,
        cache_state.path,
        cache_state.path_length * 0,
        cache_state.variant,
        cache_state.parity,
    )
    for start in range(0, num_nodes, piece):
        new = parts[0][:, start : start + piece]
        now = cache_state if start == 0 else later
        exact = [new.double(), *(each.double() for each in parts[1:])]
        bound = parts[1].shape[2]
        for got in (
            naive.attend_tree(*exact, topology, now, start, bound),
            tree_attention.attend_tree(new, *parts[1:], topology, now, start, bound),
        ):
            assert relative_error(got, wanted[:, start : start + piece]) < 1e-5
    for ours, theirs in zip(parts[1:3], whole[1:3], strict=True):
        assert torch.equal(ours.nan_to_num(9.0), theirs.nan_to_num(9.0))


def test_siblings_are_invisible():
    tree, cache_state = TokenTree.paper(), cache_state_of([9], [[0]], 1, 2)
    outputs = []
    for change in (0.0, 1.0):
        qkv, *rest = make(tree, [9], [[0]], torch.float32)
        qkv[:, 2] += change  # nodes 2 and 6 are its only readers
        outputs.append(
            tree_attention.attend_tree(qkv, *rest, topology_of([tree]), cache_state, 0, 0)
        )
    moved = (outputs[0] != outputs[1]).any(-1).any(0).nonzero().flatten().tolist()
    assert moved == [2, 6]


@pytest.mark.parametrize(("programs", "staged", "many_queries", "splits"), [
    (33, False, False, 31), (8, False, True, 7), (4, True, False, 4), (2, True, False, 2),
    (0, True, False, 2), (4, True, True, 3), (2, True, True, 1), (1, True, True, 2),
])
def test_in_how_many_splits_keys_are_read(programs, staged, many_queries, splits):
    """The cases are 1 and 4, then 8, 16 and 64 sequences with 8 heads of keys on an H200, of a few
    nodes and of the tree of 13 (docs/results/h200-batch)."""
    assert tree_attention._num_splits(programs, 1, staged, many_queries) == splits


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("window", "alone"),
    [*((window, True) for window in (1, 3, 40, 1000)), (3, False),
     *(costly(window, False) for window in (1, 40, 1000))],
)
def test_windows(window, alone):
    """Nodes see the last positions alone: of committed tokens, of the path, of the tree."""
    tree = TokenTree.chain(0) if alone else comb(40)
    path = tree.path_to(tree.num_nodes - 1)
    plain = compare(tree, [70, 3], [path, path[:1]])
    got = compare(tree, [70, 3], [path, path[:1]], window=window)
    assert torch.equal(got, plain) == (window == 1000)


def test_keys_before_the_window_are_not_read():
    tree, length, window = comb(5), 200, 70
    inputs = make(tree, [length], [[0]], torch.float32)
    outputs = []
    for spoilt in (0, length + 2 - window):  # the first slot that the root at length + 1 sees
        qkv, keys, values, rotary = (each.clone() for each in inputs)
        keys[:, :, :spoilt] = values[:, :, :spoilt] = torch.nan
        outputs.append(tree_attention.attend_tree(
            qkv, keys, values, rotary, topology_of([tree]), cache_state_of([length], [[0]], 1, 2),
            0, 0, window=window,
        ))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("first", [0, 4])
def test_a_window_is_that_of_positions(first):
    """Each node gets what its own path gives without a window, once earlier keys are cut."""
    tree, window, length = TokenTree((-1, 0, 0, 1, 2, 4, 5)), 3, 5
    qkv, *held, rotary = (each.double() for each in make(tree, [length], [[]], torch.float64))
    keys, values = (each.clone() for each in held)
    for start, stop in ((0, first), (first, 7)) if first else ((0, 7),):
        y = naive.attend_tree(
            qkv[:, start:stop], keys, values, rotary, topology_of([tree]),
            cache_state_of([length], [[]], 1, 2), start, keys.shape[2], window=window,
        )
    for node in range(first, 7):
        path = tree.path_to(node)
        begin = max(0, length + len(path) - window)
        slots, nodes = min(begin, length), max(0, begin - length)
        alone = naive.attend_tree(
            qkv[:, list(path[nodes:])], *(each[:, :, slots:].clone() for each in held),
            rotary[:, begin:], topology_of([TokenTree.chain(len(path) - nodes - 1)]),
            cache_state_of([length - slots], [[]], 1, 2), 0, keys.shape[2],
        )
        assert relative_error(y[:, node - first], alone[:, -1]) < 1e-12, node
