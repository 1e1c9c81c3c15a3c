"""The gated delta rule in plain PyTorch: the twin's tree call against the recurrence along each
root-to-node path, and its chunks against the recurrence and against transformers' own functions.

In fp64 rounding leaves about 1e-14 on sums of some dozen terms of size 1; solving the triangular
system multiplies it by its condition, below 1e3 here. transformers computes in fp32 (2⁻²⁴ a
number), which leaves about 1e-6 of sums of this size.
"""

import copy

import numpy as np
import oracle
import pytest
import torch
from kernel_cases import DEVICE, cache_state_of, comb, relative_error, star, topology_of

from stree.trees.token_tree import TokenTree, balanced
from stree_kernels import naive
from stree_kernels.contracts import GatedDeltaShape, GatedDeltaWeights
from stree_kernels.gated_delta.scan import flash_linear_attention_kernel, gated_delta_scan

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
RULE = ("q", "k", "v", "log_decay", "beta")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def on_device(*shape, seed=0):
    return normal(*shape, seed=seed).to(DEVICE)


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
    """The oracle's state and output after the nodes of a path."""
    state = copy.deepcopy(state)
    for node in path:
        y = oracle.gated_delta_step(
            shape, for_oracle(weights), projected[node].cpu().numpy(), state
        )
    return state, torch.from_numpy(y).to(DEVICE)


def buffers(shape, num_nodes, batch=1):
    """Rows, updates and state: NaN wherever nothing is, zeros for a sequence that has not begun."""

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
    """Three trees in a row, each after a path of the one before: every node's output, the state
    and the tail."""
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
    """Rows with their own trees and paths; what uncounted nodes hold, NaN included, is not seen."""
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


def rule_inputs(T, heads=4, key_heads=2, K=6, V=5, batch=2, dtype=torch.float64):
    q, k = (normal(batch, T, key_heads, K, seed=seed) for seed in (1, 2))
    values = (
        q, k, normal(batch, T, heads, V, seed=3), -normal(batch, T, heads, seed=4).abs(),
        normal(batch, T, heads, seed=5).sigmoid(),
    )
    return {name: value.to(dtype) for name, value in zip(RULE, values, strict=True)}


def recurrence(q, k, v, log_decay, beta, state=None, segment_ids=None):
    batch, T, heads = beta.shape
    q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    q, k = (part.repeat_interleave(heads // part.shape[2], dim=2) for part in (q, k))
    if state is None:
        state = v.new_zeros(batch, heads, k.shape[-1], v.shape[-1])
    y = torch.empty_like(v)
    for t in range(T):
        if segment_ids is not None and t:
            new = segment_ids[:, t] != segment_ids[:, t - 1]
            state = torch.where(new[:, None, None, None], 0.0, state)
        state = log_decay[:, t, :, None, None].exp() * state
        update = beta[:, t, :, None] * (v[:, t] - (k[:, t, :, None] @ state)[..., 0, :])
        state = state + k[:, t, ..., None] * update[..., None, :]
        y[:, t] = (q[:, t, :, None] @ state)[..., 0, :] * q.shape[-1] ** -0.5
    return y, state


@pytest.mark.parametrize("strongest", [1, 2])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("T", [1, 7, 8, 9, 63, 100])
def test_chunks_equal_the_recurrence(T, key_heads, strongest):
    given, state = rule_inputs(T, key_heads=key_heads), normal(2, 4, 6, 5, seed=6)
    given["beta"] *= strongest
    y, last = naive.gated_delta_scan(**given, chunk_size=8, initial_state=state)
    wanted, wanted_last = recurrence(**given, state=state)
    torch.testing.assert_close(y, wanted, rtol=0, atol=1e-11)
    torch.testing.assert_close(last, wanted_last, rtol=0, atol=1e-11)


@pytest.mark.parametrize("chunk_size", [4, 16, 64])
def test_packed_samples_do_not_leak(chunk_size):
    given, state = rule_inputs(40), normal(2, 4, 6, 5, seed=6)
    segment_ids = torch.tensor([[0] * 8 + [1] * 1 + [2] * 23 + [3] * 8, [0] * 15 + [1] * 25])
    options = dict(chunk_size=chunk_size, initial_state=state, segment_ids=segment_ids)
    y, last = naive.gated_delta_scan(**given, **options)
    wanted, wanted_last = recurrence(**given, state=state, segment_ids=segment_ids)
    torch.testing.assert_close(y, wanted, rtol=0, atol=1e-11)
    torch.testing.assert_close(last, wanted_last, rtol=0, atol=1e-11)
    given["v"][0, :9] = 1e30  # the first two samples of row 0: nobody else may notice
    again, _ = naive.gated_delta_scan(**given, **options)
    assert torch.equal(again[0, 9:], y[0, 9:])


def test_chunks_are_no_longer_than_the_sequence():
    """Else 10⁸ × 10⁸ numbers a head for four tokens."""
    given = rule_inputs(4)
    y, _ = naive.gated_delta_scan(**given, chunk_size=10**8)
    torch.testing.assert_close(y, recurrence(**given)[0], rtol=0, atol=1e-11)


def test_gradients():
    given = rule_inputs(7, heads=2, key_heads=1, K=3, V=2, batch=1)
    segment_ids = torch.tensor([[0] * 3 + [1] * 4])
    leaves = [value.requires_grad_() for value in given.values()]
    leaves.append(normal(1, 2, 3, 2, seed=6).requires_grad_())

    def run(*values):
        return naive.gated_delta_scan(
            *values[:-1], chunk_size=4, initial_state=values[-1], segment_ids=segment_ids
        )

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


def test_steep_decay_stays_finite():
    """e^{c_i − c_j} overflows off the causal mask when the decay is steep."""
    given = rule_inputs(64, dtype=torch.float32)
    given["log_decay"] = given["log_decay"] * 400
    leaves = [value.requires_grad_() for value in given.values()]
    y, _ = naive.gated_delta_scan(*leaves)
    y.sum().backward()
    assert y.isfinite().all() and all(leaf.grad.isfinite().all() for leaf in leaves)


@pytest.mark.parametrize("T", [1, 63, 130])
@pytest.mark.parametrize(
    "name", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"]
)
def test_equals_transformers(name, T):
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    given = rule_inputs(T, K=32, V=16, dtype=torch.float32)
    state = normal(2, 4, 32, 16, seed=6).float()
    q, k, v, log_decay, beta = given.values()
    # Of grouped heads only newer versions know
    q, k = (each.repeat_interleave(v.shape[2] // each.shape[2], dim=2) for each in (q, k))
    wanted, wanted_last = getattr(modeling, name)(
        q, k, v, g=log_decay, beta=beta, initial_state=state, output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    y, last = naive.gated_delta_scan(**given, initial_state=state)
    torch.testing.assert_close(y, wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(last, wanted_last, rtol=0, atol=1e-5)


@pytest.fixture
def flash_linear_attention_twin(monkeypatch):
    """In the place of flash-linear-attention's kernel, and as strict: one number of heads and one
    16-bit type; one row and a state a segment where segments have bounds."""

    def kernel(
        q, k, v, g, beta, *, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    ):
        assert q.shape[2] == k.shape[2] == v.shape[2] and output_final_state
        assert q.dtype == k.dtype == v.dtype == torch.bfloat16 and use_qk_l2norm_in_kernel
        assert g.dtype == torch.float32
        if cu_seqlens is None:
            return recurrence(*(part.float() for part in (q, k, v, g, beta)), initial_state)
        assert q.shape[0] == 1 and len(initial_state) == len(cu_seqlens) - 1
        parts = [
            recurrence(*(part[:, start:end].float() for part in (q, k, v, g, beta)), state[None])
            for start, end, state in zip(cu_seqlens, cu_seqlens[1:], initial_state, strict=False)
        ]
        return torch.cat([y for y, _ in parts], dim=1), torch.cat([state for _, state in parts])

    monkeypatch.setattr(
        "stree_kernels.gated_delta.scan.flash_linear_attention_kernel", lambda: kernel
    )
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)


@pytest.mark.parametrize("segment_ids", [None, [[0] * 8 + [2] * 13, [3] * 20 + [4]]], ids=str)
def test_through_flash_linear_attention(flash_linear_attention_twin, segment_ids):
    """Grouped heads, packed rows and initial states reach its kernel as it takes them. In fp32,
    which leaves some 1e-6, of inputs that are bf16 on both sides."""
    given = {name: value.bfloat16() for name, value in rule_inputs(21).items()}
    given["log_decay"] = given["log_decay"].float()
    segment_ids = None if segment_ids is None else torch.tensor(segment_ids)
    options = dict(initial_state=normal(2, 4, 6, 5, seed=6).float(), segment_ids=segment_ids)
    y, last = gated_delta_scan(**given, **options)
    wanted, wanted_last = naive.gated_delta_scan(
        **{name: value.double() for name, value in given.items()}, **options
    )
    torch.testing.assert_close(y.double(), wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(last.double(), wanted_last, rtol=0, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(flash_linear_attention_kernel() is None, reason="needs flash-linear-attention")
def test_flash_linear_attention_agrees():
    """Its kernel multiplies in bf16, whose rounding of 4e-3 a product bounds its error."""
    given = {name: each.cuda() for name, each in rule_inputs(200, K=64, V=64).items()}
    segment_ids = torch.tensor([[0] * 90 + [1] * 110, [0] * 200]).cuda()
    wanted, _ = recurrence(**given, segment_ids=segment_ids)
    narrow = {name: each.bfloat16() for name, each in given.items()}
    y, _ = gated_delta_scan(**narrow, segment_ids=segment_ids)
    assert relative_error(y, wanted) < 2e-2
