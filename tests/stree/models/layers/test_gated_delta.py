"""The gated-delta mixer through Triton's kernels, and the memory of its trees.

Its parity, prefill, trees and training are in tests/stree/checkpoints/families.
"""

import pytest
import torch
from kernel_cases import DEVICE, cache_state_of, topology_of

from stree.models.config import HybridConfig
from stree.models.layer_caches import NODES, CacheSizes, GatedDeltaCache
from stree.models.layers.gated_delta import GatedDeltaNet
from stree.models.layers.part import TreePass
from stree.trees.token_tree import TokenTree
from stree_kernels import ops
from stree_kernels.shapes import GatedDeltaShape

SHAPE, D_MODEL = GatedDeltaShape(6, 2, 8, 12, 4), 20


@torch.no_grad()
def random_mixer():
    layer = GatedDeltaNet(HybridConfig(
        vocab_size=1, d_model=D_MODEL, num_layers=1, layer_types=("gated_delta",),
        num_delta_heads=6, num_delta_key_heads=2, delta_key_dim=8, delta_value_dim=12, d_conv=4,
        conv_bias=True, gated_norm_eps=1e-6, chunk_size=8,
    ))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in layer.named_parameters():
        parameter.normal_(generator=generator)
        if parameter.ndim > 1 and "conv1d" not in name:
            parameter.mul_(parameter.shape[1] ** -0.5)
        if name == "A_log":
            parameter.sub_(1)  # remembers for some tokens
    return layer.to(DEVICE)


@torch.no_grad()
@pytest.mark.parametrize("tree", [TokenTree.chain(0), TokenTree.paper()], ids=["step", "tree"])
def test_through_the_kernels(monkeypatch, tree):
    """Two calls in fp32, whose ops are all Triton's, equal those in plain PyTorch.

    fp32 leaves about 1e-6 of outputs of size 1 on both sides; 1e-5 leaves room.
    """
    topology, mixer, num_nodes = topology_of([tree], SHAPE.width), random_mixer(), tree.num_nodes
    outputs = {}
    for fused in (False, True):
        monkeypatch.setattr(ops, "fused", lambda *_, fused=fused: fused)
        mixer.pack()
        parity = torch.zeros(1, dtype=torch.long, device=DEVICE)
        sizes = CacheSizes(1, num_nodes, 0, parity, None, DEVICE, torch.float32)
        cache = GatedDeltaCache.empty(SHAPE, sizes)
        calls = []
        for number, path in enumerate([[], tree.path_to(num_nodes - 1)]):
            cache_state = cache_state_of([0], [path], 1, num_nodes, parity=number)
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(1, num_nodes, D_MODEL, generator=generator).to(DEVICE)
            call = TreePass(topology, cache_state, 0, 0, [], torch.empty(0), x, None)
            calls.append(mixer.tree(x, cache, call).sum(0))
        outputs[fused] = (*calls, cache.state)
    for plain, fast in zip(outputs[False], outputs[True], strict=True):
        torch.testing.assert_close(fast, plain, rtol=0, atol=1e-5)


def test_memory_of_a_node(monkeypatch):
    """At Qwen3.5-27B's shape a tree takes at most 3 % of a state a node, in bf16."""
    shape = GatedDeltaShape(48, 16, 128, 128, 4)
    monkeypatch.setattr(ops, "fused", lambda *_: True)

    def num_bytes(num_nodes):
        sizes = CacheSizes(1, num_nodes, 0, torch.zeros(1), None, "meta", torch.bfloat16)
        cache = GatedDeltaCache.empty(shape, sizes)
        kept = {name: each.nbytes for name, _, each in cache.buffers(NODES)}
        assert set(kept) == {"history", "q_and_k", "gate_and_decay", "updates"}
        return sum(kept.values()), cache.state.nbytes

    (more, state), (fewer, _) = num_bytes(17), num_bytes(16)
    assert state == 48 * 128 * 128 * 4
    assert 0 < more - fewer <= 0.03 * state
