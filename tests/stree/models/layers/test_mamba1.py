"""The Mamba-1 mixer through Triton's kernels, side by side with others, and its trees' memory."""

import pytest
import torch
from kernel_cases import DEVICE
from toys import tiny_model

from stree.models.config import HybridConfig
from stree.models.layer_caches import NODES, CacheSizes, Mamba1Cache
from stree.trees.token_tree import TokenTree
from stree_kernels import ops

KIND = dict(attn_layers=(), mamba1_channels=24, dt_rank=3, d_state=6, num_layers=2)


@pytest.mark.quick(2)
@torch.no_grad()
@pytest.mark.parametrize("layers", [("mamba1", "mamba1 mlp"), ("mamba1+attention", "mamba1+mamba")])
@pytest.mark.parametrize("eps", [None, 1e-3], ids=["plain", "normed"])
def test_through_the_kernels(monkeypatch, layers, eps):
    """Two tree calls in fp32, whose ops are all Triton's, equal those in plain PyTorch.

    fp32 leaves about 1e-6 of logits of size 1 on both sides; 1e-4 leaves room for sums of layers.
    """
    norms = dict(selection_norm_eps=eps, selection_scaled=eps is not None)
    model = tiny_model(1, torch.float32, layer_types=layers, **norms, **KIND)
    for name, scale in model.named_parameters():
        if name.endswith("c_scale"):
            scale.uniform_(0.5, 1.5)
    model, tree = model.to(DEVICE), TokenTree((-1, 0, 0, 1, 3))
    draw = torch.Generator().manual_seed(0)
    nodes = torch.randint(61, (2, 1, 5), generator=draw).to(DEVICE)
    found = {}
    for fused in (False, True):
        monkeypatch.setattr(ops, "fused", lambda *_, fused=fused: fused)
        cache = model.new_cache(32, 5)
        first = model.tree_forward(nodes[0], tree, cache)
        cache.commit([0, 1, 3])
        found[fused] = first, model.tree_forward(nodes[1], tree, cache)
    for plain, fast in zip(found[False], found[True], strict=True):
        torch.testing.assert_close(fast, plain, rtol=0, atol=1e-4)


def test_memory_of_a_node():
    """At Mamba-2.8B's shape a tree takes at most 7 % of a state a node, in bf16."""
    config = HybridConfig(
        64, d_model=2560, num_layers=1, layer_types=("mamba1",), mamba1_channels=5120, d_state=16,
        dt_rank=160,
    )

    def num_bytes(num_nodes):
        sizes = CacheSizes(1, num_nodes, 0, torch.zeros(1), None, "meta", torch.bfloat16)
        cache = Mamba1Cache.of(config, sizes)
        return sum(each.nbytes for _, _, each in cache.buffers(NODES)), cache.state.nbytes

    (more, state), (fewer, _) = num_bytes(17), num_bytes(16)
    assert state == 5120 * 16 * 4
    assert 0.06 * state < more - fewer <= 0.07 * state
