"""Blocks whose norm comes after them, and norms of all heads together: tree calls beside whole
sequences, of which tests/stree/checkpoints/families has the parity with transformers.

In fp64 sums in another order leave about 1e-12.
"""

import pytest
import torch
from lanes import costly
from toys import tiny_model

from stree.trees.token_tree import TokenTree

BLOCKS = {
    "without a stream yet": ("attention>norm mlp>norm", "mamba mlp"),
    "after another block": ("mamba mlp", "attention>norm mlp>norm"),
    "several parts": ("mamba+attention>norm mlp+shared_mlp>norm", "mamba mlp>norm"),
}


@pytest.mark.parametrize("num_kv_heads", [costly(4), 2])
@pytest.mark.parametrize("backtracking", ["replay", "joint"])
@pytest.mark.parametrize("blocks", BLOCKS)
@torch.no_grad()
def test_norms_after_blocks_and_of_all_heads(blocks, backtracking, num_kv_heads):
    model = tiny_model(
        1, num_layers=2, attn_layers=(), layer_types=BLOCKS[blocks], num_kv_heads=num_kv_heads,
        qk_norm=True, qk_norm_whole=True, shared_intermediate_size=24,
    )
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            weight.uniform_(0.5, 1.5)
    tree, committed = TokenTree((-1, 0, 0, 2)), [3, 1, 4]
    cache = model.new_cache(32, tree.num_nodes, backtracking=backtracking)
    model.prefill(torch.tensor([committed]), cache)
    for nodes in ([5, 9, 2, 6], [8, 7, 20, 30]):
        logits = model.tree_forward(torch.tensor([nodes]), tree, cache)
        for node in range(tree.num_nodes):
            path = [nodes[each] for each in tree.path_to(node)]
            wanted = model(torch.tensor([committed + path]))[0, -1]
            torch.testing.assert_close(logits[0, node], wanted, rtol=0, atol=1e-9)
        cache.commit(path_taken := tree.path_to(3))
        committed += [nodes[each] for each in path_taken]
