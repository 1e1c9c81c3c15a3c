"""The tree ops against one root-to-node sequence at a time (fp64: about 1e-14 of rounding)."""

import pytest
import torch
import torch.nn.functional as F

from stree.trees.token_tree import TokenTree, balanced
from stree_kernels import naive
from stree_kernels.index_plan import attention_mask

TREES = [
    TokenTree.chain(0), TokenTree.chain(6), TokenTree.paper(), balanced([9]), balanced([2, 3, 2]),
    TokenTree((-1, 0, 1, 0, 2, 3, 3, 4, 0, 7)),
]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scan_inputs(N, heads=4, groups=(2, 1, 4), P=4, S=6, batch=2):
    return (
        normal(batch, N, groups[0], P), normal(batch, N, heads, seed=1).abs(),
        -normal(heads, seed=2).abs() * 3, normal(batch, N, groups[1], S, seed=3),
        normal(batch, N, groups[2], S, seed=4), normal(heads, seed=5),
        normal(batch, heads, P, S, seed=6),
    )


def walk(x, dt, A, B, C, D, state, path):
    """Return the state after a path and the output at its end, one token at a time."""
    heads = dt.shape[-1]
    x, B, C = (part.repeat_interleave(heads // part.shape[2], dim=2) for part in (x, B, C))
    for node in path:
        added = (dt[:, node, :, None] * x[:, node])[..., None] * B[:, node, :, None]
        state = (dt[:, node] * A).exp()[..., None, None] * state + added
    y = (state * C[:, path[-1], :, None]).sum(-1) + D[:, None] * x[:, path[-1]]
    return state, y


def replayed(state, x, dt, A, B, path, lengths):
    """Return the state after the first lengths (B,) nodes of path (B, K)."""
    rows, state = torch.arange(len(path))[:, None], state.clone()
    counts = torch.arange(path.shape[1]) < lengths[:, None]
    naive.replay(state, x[rows, path], dt[rows, path], A, B[rows, path], counts)
    return state


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: f"{tree.name}-{tree.num_nodes}")
def test_tree_scan_and_replay(tree):
    x, dt, A, B, C, D, state = scan_inputs(tree.num_nodes)
    y = naive.tree_scan(x, dt, A, B, C, D, tree.ancestors.expand(2, -1, -1), state)
    for node in range(tree.num_nodes):
        path = tree.path_to(node)
        wanted_state, wanted = walk(x, dt, A, B, C, D, state, path)
        torch.testing.assert_close(y[:, node], wanted, rtol=0, atol=1e-12)
        padded = torch.zeros(2, tree.num_nodes, dtype=torch.long)
        padded[:, : len(path)] = torch.tensor(path)
        lengths = torch.tensor([len(path), 0])
        after = replayed(state, x, dt, A, B, padded, lengths)
        torch.testing.assert_close(after[0], wanted_state[0], rtol=0, atol=1e-12)
        assert torch.equal(after[1], state[1])


def test_a_fast_decay_beside_a_path_does_not_overflow():
    """The decay from a node of another branch, e^960 here, is no path's and counts nowhere."""
    x, _, _, B, C, D, state = scan_inputs(3)
    dt = torch.tensor([0.1, 0.1, 60.0], dtype=torch.float64).view(1, 3, 1).expand(2, 3, 4)
    A, tree = torch.full((4,), -16.0, dtype=torch.float64), balanced([2])
    y = naive.tree_scan(x, dt, A, B, C, D, tree.ancestors.expand(2, -1, -1), state)
    for node in range(3):
        _, wanted = walk(x, dt, A, B, C, D, state, tree.path_to(node))
        torch.testing.assert_close(y[:, node], wanted, rtol=0, atol=1e-12)


def test_replay_ignores_what_uncounted_slots_hold():
    x, dt, A, B, _, _, state = scan_inputs(5)
    path, lengths = torch.tensor([[0, 1, 4], [0, 2, 3]]), torch.tensor([2, 1])
    wanted = replayed(state, x, dt, A, B, path, lengths)
    for part in (x, dt, B):
        part[0, 4] = part[1, 2:4] = torch.nan
    assert torch.equal(replayed(state, x, dt, A, B, path, lengths), wanted)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("tree", TREES, ids=lambda tree: f"{tree.name}-{tree.num_nodes}")
def test_tree_conv(tree, width):
    N, C = tree.num_nodes, 5
    inputs, tail = normal(2, N, C), normal(2, width - 1, C, seed=1)
    weight, bias = normal(C, width, seed=2), normal(C, seed=3)
    y = naive.tree_conv(inputs, tail, weight, bias, tree.windows(width))
    for node in range(N):
        path = tree.path_to(node)
        sequence = torch.cat([tail, inputs[:, path]], dim=1).transpose(1, 2)
        wanted = F.conv1d(sequence, weight[:, None], bias, groups=C)[..., -1]
        torch.testing.assert_close(y[:, node], wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("length", [1, 2, 3, 10])
def test_segment_conv(length):
    inputs, weight, bias = normal(1, length, 5), normal(5, 4, seed=2), normal(5, seed=3)
    padded = F.pad(inputs.transpose(1, 2), (3, 0))
    wanted = F.conv1d(padded, weight[:, None], bias, groups=5).transpose(1, 2)
    torch.testing.assert_close(naive.segment_conv(inputs, weight, bias, None), wanted)
    if length > 2:
        segments = torch.tensor([[0, 0] + [1] * (length - 2)])
        got = naive.segment_conv(inputs, weight, bias, segments)
        halves = (inputs[:, :2], inputs[:, 2:])
        parts = [naive.segment_conv(half, weight, bias, None) for half in halves]
        torch.testing.assert_close(got, torch.cat(parts, dim=1))


@pytest.mark.parametrize("lengths", [[5, 0], [5, 5]], ids=["ragged", "full"])
@pytest.mark.parametrize("tree", TREES, ids=lambda tree: f"{tree.name}-{tree.num_nodes}")
def test_tree_attention_and_the_move(tree, lengths):
    N, heads, kv_heads, dim = tree.num_nodes, 4, 2, 6
    slots = 40 if lengths == [5, 0] else 5 + N  # where all rows fill them, no slot is unused
    q = normal(2, N, heads, dim)
    keys, values = normal(2, kv_heads, slots, dim, seed=1), normal(2, kv_heads, slots, dim, seed=2)
    for row, length in enumerate(lengths):
        keys[row, :, length + N :] = values[row, :, length + N :] = torch.nan
    ancestors = tree.ancestors.expand(2, -1, -1)
    mask, unused = attention_mask(torch.tensor(lengths), ancestors, slots, q.dtype)
    if mask is not None:
        mask = mask.repeat(1, heads // kv_heads, 1)[:, None]
    y = naive.tree_attention(q.transpose(1, 2), keys, values, mask, unused)
    y = y.transpose(1, 2)
    for row, length in enumerate(lengths):
        for node in range(N):
            path = tree.path_to(node)
            seen = list(range(length)) + [length + each for each in path]
            wanted = F.scaled_dot_product_attention(
                q[row : row + 1, node : node + 1].transpose(1, 2),
                keys[row : row + 1, :, seen], values[row : row + 1, :, seen], enable_gqa=True,
            )[0, :, 0]
            torch.testing.assert_close(y[row, node], wanted, rtol=0, atol=1e-12)
    node = N - 1
    path = tree.path_to(node)
    moved = keys.clone()
    counts = torch.tensor([len(path)] * 2)
    naive.move_accepted(moved, torch.tensor(lengths), torch.tensor([path, path]), counts)
    for row, length in enumerate(lengths):
        source = [length + each for each in path]
        assert torch.equal(moved[row, :, length : length + len(path)], keys[row, :, source])
