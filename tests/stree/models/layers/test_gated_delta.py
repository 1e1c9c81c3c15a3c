"""The gated-delta mixer against transformers' own layers with the same weights, and its three ways
to run (whole sequences, prefill, trees) against one another.

fp32 leaves about 1e-6 of outputs of size 1 on both sides; 1e-5 leaves room. In fp64 the ways differ
by the order of sums alone: 1e-14 and the condition of a system of some dozen tokens.
"""

import pytest
import torch
from kernel_cases import DEVICE, cache_state_of, topology_of

from stree.checkpoints.families.qwen3_next import of_key_heads
from stree.models.config import HybridConfig
from stree.models.layer_caches import GatedDeltaCache
from stree.models.layers.gated_delta import GatedDeltaNet
from stree.models.layers.part import PrefillPass, TrainingPass, TreePass
from stree.trees.token_tree import TokenTree
from stree_kernels import ops
from stree_kernels.contracts import GatedDeltaShape

SHAPES = {
    "as-many-heads": GatedDeltaShape(2, 2, 16, 16, 4),
    "grouped": GatedDeltaShape(6, 2, 8, 12, 4),
    "one-key-head": GatedDeltaShape(3, 1, 12, 4, 3),
}
D_MODEL = 20


def mixer_of(shape, conv_bias=False):
    return GatedDeltaNet(HybridConfig(
        vocab_size=1, d_model=D_MODEL, num_layers=1, layer_types=("gated_delta",),
        num_delta_heads=shape.num_heads, num_delta_key_heads=shape.num_key_heads,
        delta_key_dim=shape.key_dim, delta_value_dim=shape.value_dim, d_conv=shape.width,
        conv_bias=conv_bias, gated_norm_eps=1e-6, chunk_size=8,
    ))


def theirs(shape, family):
    """transformers' layer with random weights."""
    modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    name = {"qwen3_next": "Qwen3Next", "qwen3_5": "Qwen3_5"}[family]
    config = pytest.importorskip(f"transformers.models.{family}.configuration_{family}")
    config = getattr(config, "Qwen3NextConfig" if family == "qwen3_next" else "Qwen3_5TextConfig")(
        hidden_size=D_MODEL, num_hidden_layers=1, layer_types=["linear_attention"],
        linear_num_value_heads=shape.num_heads, linear_num_key_heads=shape.num_key_heads,
        linear_key_head_dim=shape.key_dim, linear_value_head_dim=shape.value_dim,
        linear_conv_kernel_dim=shape.width, hidden_act="silu", rms_norm_eps=1e-6,
    )
    layer = getattr(modeling, f"{name}GatedDeltaNet")(config, 0)
    randomise(layer)
    return layer


@torch.no_grad()
def randomise(layer):
    generator = torch.Generator().manual_seed(0)
    for name, parameter in layer.named_parameters():
        parameter.normal_(generator=generator)
        if parameter.ndim > 1 and "conv1d" not in name:
            parameter.mul_(parameter.shape[1] ** -0.5)
        if name == "A_log":
            parameter.sub_(1)  # remembers for some tokens


def ours(shape, dtype=torch.float64):
    layer = mixer_of(shape, conv_bias=True).to(dtype)
    randomise(layer)
    return layer.to(DEVICE)


def tokens(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, D_MODEL, generator=generator, dtype=dtype).to(DEVICE)


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_equals_transformers(shape, family):
    layer = theirs(shape, family)
    weights = dict(layer.state_dict())
    if family == "qwen3_next":
        for ours, (place, make) in of_key_heads(shape).items():
            weights[f"{ours}.weight"] = make(weights[f"{place}.weight"])
        del weights["in_proj_qkvz.weight"], weights["in_proj_ba.weight"]
    mixer = mixer_of(shape)
    mixer.load_state_dict(weights)
    x = tokens(2, 70, dtype=torch.float32).cpu()
    torch.testing.assert_close(mixer(x, TrainingPass()), layer(x), rtol=0, atol=1e-5)


def call_over(x, topology, cache_state):
    """A call of the mixer alone: nothing else of it is read."""
    return TreePass(topology, cache_state, 0, 0, [], torch.empty(0), x, None)


def new_cache(shape, batch=1, num_nodes=13, dtype=torch.float64):
    return GatedDeltaCache.empty(
        shape, batch, num_nodes, torch.zeros(1, dtype=torch.long, device=DEVICE), device=DEVICE,
        dtype=dtype,
    )


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_prefill_trees_and_commits_equal_one_pass(shape):
    """A prompt in two pieces, two trees with a path accepted of each, and more prompt behind them:
    every output is that of a pass over the tokens that lead to it."""
    mixer, cache, tree = ours(shape), new_cache(shape), TokenTree.paper()
    mixer.pack()
    topology, num_nodes = topology_of([tree], shape.width), tree.num_nodes
    history = tokens(1, 11, seed=1)
    wanted = mixer(history, TrainingPass())
    for piece in (slice(0, 1), slice(1, 11)):
        got = mixer.extend(history[:, piece], cache, PrefillPass())
        torch.testing.assert_close(got, wanted[:, piece], rtol=0, atol=1e-11)
    accepted: list[int] = []
    for number, path in enumerate([[0, 1, 4], tree.path_to(num_nodes - 1)]):
        x = tokens(1, num_nodes, seed=2 + number)
        cache_state = cache_state_of([0], [accepted], 1, num_nodes, parity=number)
        call = call_over(x, topology, cache_state)
        got = mixer.tree(x, cache, call)[0]
        cache.parity.bitwise_xor_(1)
        for node in range(num_nodes):
            line = torch.cat([history, x[:, tree.path_to(node)]], dim=1)
            wanted = mixer(line, TrainingPass())[:, -1]
            torch.testing.assert_close(got[:, node], wanted, rtol=0, atol=1e-11)
        history, accepted = torch.cat([history, x[:, path]], dim=1), path
    cache.apply_path(mixer, cache_state_of([0], [accepted], 1, num_nodes, parity=0))
    more = tokens(1, 5, seed=9)
    got = mixer.extend(more, cache, PrefillPass())
    wanted = mixer(torch.cat([history, more], dim=1), TrainingPass())[:, -5:]
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)


@torch.no_grad()
@pytest.mark.parametrize("tree", [TokenTree.chain(0), TokenTree.paper()], ids=["step", "tree"])
def test_through_the_kernels(monkeypatch, tree):
    """Two calls of a layer in fp32, all of whose ops are Triton's, beside plain PyTorch."""
    shape, num_nodes = SHAPES["grouped"], tree.num_nodes
    topology, mixer = topology_of([tree], shape.width), ours(shape, torch.float32)
    outputs = {}
    for fused in (False, True):
        monkeypatch.setattr(ops, "fused", lambda *_, fused=fused: fused)
        mixer.pack()
        cache = new_cache(shape, num_nodes=num_nodes, dtype=torch.float32)
        calls = []
        for number, path in enumerate([[], tree.path_to(num_nodes - 1)]):
            cache_state = cache_state_of([0], [path], 1, num_nodes, parity=number)
            x = tokens(1, num_nodes, seed=number, dtype=torch.float32)
            call = call_over(x, topology, cache_state)
            calls.append(mixer.tree(x, cache, call).sum(0))
        outputs[fused] = (*calls, cache.state)
    for plain, fast in zip(outputs[False], outputs[True], strict=True):
        torch.testing.assert_close(fast, plain, rtol=0, atol=1e-5)


@torch.no_grad()
def test_packed_samples_and_rows_of_a_cache():
    shape = SHAPES["grouped"]
    mixer, x = ours(shape), tokens(1, 20)
    segment_ids = torch.tensor([[0] * 3 + [1] * 17], device=DEVICE)
    apart = torch.cat([mixer(x[:, :3], TrainingPass()), mixer(x[:, 3:], TrainingPass())], dim=1)
    packed = mixer(x, TrainingPass(segment_ids=segment_ids))
    torch.testing.assert_close(packed, apart, rtol=0, atol=1e-12)
    cache = new_cache(shape, batch=2)
    got = mixer.extend(x, cache.narrow(1, 1), PrefillPass())
    torch.testing.assert_close(got, mixer(x, TrainingPass()), rtol=0, atol=1e-12)
    assert cache.state[1].any() and not cache.state[0].any()
    cache.reset()
    assert not cache.state.any() and not cache.conv_state.any()


def test_gradients_reach_every_weight():
    mixer = ours(SHAPES["grouped"])
    mixer(tokens(2, 20), TrainingPass()).square().sum().backward()
    for name, parameter in mixer.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def test_memory_of_a_node(monkeypatch):
    """At Qwen3.5-27B's shape a tree takes at most 3 % of a state a node, in bf16."""
    shape = GatedDeltaShape(48, 16, 128, 128, 4)
    monkeypatch.setattr(ops, "fused", lambda *_: True)

    def num_bytes(num_nodes):
        cache = GatedDeltaCache.empty(
            shape, 1, num_nodes, torch.zeros(1), device="meta", dtype=torch.bfloat16
        )
        assert cache.derived is not None
        kept = (cache.rows, cache.updates, cache.derived.xb, cache.derived.steps)
        return sum(each.nbytes for each in kept), cache.state.nbytes

    (more, state), (fewer, _) = num_bytes(17), num_bytes(16)
    assert state == 48 * 128 * 128 * 4
    assert 0 < more - fewer <= 0.03 * state
