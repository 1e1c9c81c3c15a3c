"""The fused Mamba-2 tree call against its naive twin in fp64.

Tolerances: with fp32 inputs the products are split into three tf32 ones, which leaves about
1e-6 of a norm, as does fp32's own rounding of sums of 128 terms; 1e-5 leaves room. With bf16
inputs both sides start from the same rounded numbers, and the kernel's tf32 products (2⁻¹¹ each)
and the output's own rounding (2⁻⁹) leave up to 3e-3. A state kept in bf16 is rounded likewise.
"""

import pytest
import torch
from kernel_cases import DEVICE, comb, normal, relative_error, star, steering_of, topology_of

from stree.tree import TokenTree
from stree_kernels import naive, tree_fused
from stree_kernels.shapes import MixerShape, MixerWeights, Steering

pytestmark = pytest.mark.skipif(
    DEVICE == "cpu", reason="on the CPU, the time goes to the newer scan in test_tree_scan.py"
)
SHAPES = {
    "grouped": MixerShape(4, 16, 16, 2, 1, 4, 4),
    "odd": MixerShape(3, 20, 18, 1, 3, 3, 4, dt_limit=(0.01, 0.4)),
    "repeated": MixerShape(4, 8, 24, 2, 1, 4, 3, repeat_before_conv=True),
    "two-blocks": MixerShape(2, 48, 16, 2, 2, 1, 2),
}
TREES = [TokenTree.chain(0), TokenTree.paper(), TokenTree.chain(16), star(17), comb(33), comb(65)]
TREES_ON_CUDA = [comb(128), star(256), comb(256), TokenTree.chain(255)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3}


def make(shape, trees, dtype, batch=2, state_dtype=torch.float32, bias=True, seed=0):
    """Inputs of `mamba_tree`, strided and with NaN wherever nothing is."""
    N = trees[0].num_nodes
    channels = shape.scan_groups
    conv_dim = channels[0] * shape.head_dim + (channels[1] + channels[2]) * shape.d_state
    wide = normal(batch, N, shape.d_inner + shape.num_kept + 5, seed=seed, dtype=dtype)
    projected = wide[..., : shape.d_inner + shape.num_kept]
    rows = torch.full(
        (2, batch, shape.tail + N + 2, shape.num_kept + 3), torch.nan, device=DEVICE, dtype=dtype
    )
    old = normal(batch, shape.tail + N, shape.num_kept, seed=seed + 1, dtype=dtype)
    rows[1, :, : shape.tail + N, : shape.num_kept] = old
    state = normal(batch, shape.num_heads, shape.head_dim, shape.d_state, seed=seed + 2)
    weights = MixerWeights(
        normal(conv_dim, shape.width, seed=3, dtype=dtype),
        normal(conv_dim, seed=4, dtype=dtype) if bias else None,
        normal(shape.num_heads, seed=5, dtype=dtype) - 2,
        normal(shape.num_heads, seed=6, dtype=dtype),
        normal(shape.num_heads, seed=7, dtype=dtype),
    )
    return projected, rows[..., : shape.num_kept], state.to(state_dtype), weights


def in_fp64(projected, rows, state, weights):
    wide = [None if each is None else each.double() for each in vars(weights).values()]
    return projected.double(), rows.double(), state.double(), MixerWeights(*wide)


def compare(shape, trees, paths, dtype=torch.float32, **options):
    inputs = make(shape, trees, dtype, batch=len(paths), **options)
    exact = in_fp64(*inputs)
    topology = topology_of(trees, shape.width)
    slots = max(1, *(len(path) for path in paths)) + 1
    steering = steering_of([0] * len(paths), paths, len(trees), slots)
    wanted = naive.mamba_tree(*exact, shape, topology, steering, 0)
    got = tree_fused.mamba_tree(*inputs, shape, topology, steering, 0)
    N, tolerance = trees[0].num_nodes, TOLERANCE[dtype]
    assert got.dtype == dtype and got.shape == wanted.shape
    assert relative_error(got, wanted) < tolerance
    state_tolerance = max(tolerance, 4e-3 if inputs[2].dtype == torch.bfloat16 else 0)
    assert relative_error(inputs[2], exact[2]) < state_tolerance
    used = slice(0, shape.tail + N)
    assert torch.equal(inputs[1][0, :, used].double(), exact[1][0, :, used])  # copies, bit by bit
    assert inputs[1][0, :, used.stop :].isnan().all()
    return inputs, steering, topology


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: f"{tree.name}-{tree.num_nodes}")
def test_trees(tree):
    path = tree.path_to(tree.num_nodes - 1)
    compare(SHAPES["grouped"], [tree], [path, path[:1]])


@pytest.mark.skipif(DEVICE == "cpu", reason="minutes in the interpreter")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tree", TREES_ON_CUDA, ids=lambda tree: f"{tree.name}-{tree.num_nodes}")
def test_large_trees(tree, dtype):
    path = tree.path_to(tree.num_nodes - 1)
    compare(MixerShape(32, 128, 128, 8, 8, 32, 4), [tree], [path, path[:3]], dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes(shape, dtype):
    compare(shape, [TokenTree.paper()], [[0, 1, 4, 7, 11], [], [0, 3]], dtype)


@pytest.mark.parametrize("options", [dict(bias=False), dict(state_dtype=torch.bfloat16)], ids=str)
def test_without_bias_and_with_a_narrow_state(options):
    compare(SHAPES["odd"], [TokenTree.paper()], [[0, 2, 6]], torch.bfloat16, **options)


def test_a_tree_per_sequence():
    trees = [TokenTree.paper(), TokenTree.chain(12), star(13)]
    compare(SHAPES["grouped"], trees, [[0], [0, 1, 2], [], [0, 4]])


@pytest.mark.parametrize("num_nodes, piece", [(6, 1), (21, 9), (21, 20)])
def test_growing_a_tree_in_pieces(num_nodes, piece):
    """A tree scanned a few nodes at a time gives what one scan of it gives."""
    shape, tree = SHAPES["grouped"], comb(num_nodes)
    whole = make(shape, [tree], torch.float32)
    parts = make(shape, [tree], torch.float32)
    topology = topology_of([tree])
    steering = steering_of([0, 0], [[0, 1, 2], [0]], 1, 4)
    wanted = tree_fused.mamba_tree(*whole, shape, topology, steering, 0)
    after = Steering(
        steering.length, steering.path, steering.path_length, steering.variant, 1 - steering.parity
    )
    for start in range(0, num_nodes, piece):
        new = parts[0][:, start : start + piece]
        now = steering if start == 0 else after
        for function, inputs in (
            (naive.mamba_tree, in_fp64(new, *parts[1:])),
            (tree_fused.mamba_tree, (new, *parts[1:])),
        ):
            got = function(*inputs, shape, topology, now, start)
            assert relative_error(got, wanted[:, start : start + piece]) < 1e-5
    assert torch.equal(parts[2], whole[2])
    assert torch.equal(parts[1][0, :, : 3 + num_nodes], whole[1][0, :, : 3 + num_nodes])


def test_siblings_and_uncounted_path_slots_are_invisible():
    shape, tree = SHAPES["grouped"], TokenTree.paper()
    _, steering, topology = compare(shape, [tree], [[0, 1], [0]])
    before = tree_fused.mamba_tree(
        *make(shape, [tree], torch.float32), shape, topology, steering, 0
    )
    changed = make(shape, [tree], torch.float32)
    changed[0][:, 2] += 1  # nodes 2 and 6 are its only readers
    after = tree_fused.mamba_tree(*changed, shape, topology, steering, 0)
    moved = (before != after).flatten(2).any(-1).any(0).nonzero().flatten().tolist()
    assert moved == [2, 6]
