"""A row's logits, bit for bit, in any company: in bf16, by the fused kernels, on a GPU or in
Triton's interpreter. docs/guarantees.md says what is promised.

Plain PyTorch on a CPU looks at as many keys as the longest row has, and sums of another number of
keys round otherwise: there tokens are compared (`test_batch_decoder.py`).
"""

import pytest
import torch
from kernel_cases import DEVICE
from toys import random_tree, tiny_model

from stree.models.layer_caches import AttentionCache
from stree.models.model import HybridModel
from stree.trees.build import make_tree_batch
from stree_kernels import ops

MODELS = {
    "hybrid": dict(num_layers=2),
    "mamba": dict(num_layers=2, attn_layers=()),
    "mamba-1": dict(
        layer_types=("mamba1", "mamba1"), num_layers=2, attn_layers=(), mamba1_channels=64,
        dt_rank=4, selection_norm_eps=1e-6,
    ),
    "gated-delta": dict(
        layer_types=("gated_delta", "attention"), num_layers=2, d_conv=4,
        num_delta_heads=4, num_delta_key_heads=2, delta_key_dim=16, delta_value_dim=16,
    ),
}
ON_GPU = DEVICE == "cuda"
LONGEST = 100


def long_in_the_interpreter(*values, quick, costly=()):
    def marks(value):
        if ON_GPU or value in quick:
            return []
        return pytest.mark.costly if value in costly else pytest.mark.long

    return [pytest.param(each, marks=marks(each)) for each in values]


each_model = pytest.mark.parametrize(
    "shape", long_in_the_interpreter(*MODELS, quick=["hybrid"], costly=["gated-delta", "mamba-1"])
)


@pytest.fixture
def kernels(monkeypatch):
    """Turn the fused kernels on; off the GPU prompts are read without them, to save time."""
    own, state = ops.fused, {"on": ON_GPU}

    def fused(device, dtype, largest_dim=0):
        return state["on"] and (not ON_GPU or own(device, dtype, largest_dim))

    monkeypatch.setattr(ops, "fused", fused)
    return state


def logits_of(kernels, model, trees, contents, max_length=LONGEST):
    """Return logits (B, N, V) of the second of two calls, between which each row accepts a path.

    contents has for each row a seed, the prompt's length, and whether its cache is poisoned.
    """
    rows, num_nodes = len(contents), trees[0].num_nodes
    kernels["on"] = True
    cache = model.new_cache(max_length, num_nodes, rows)
    kernels["on"] = ON_GPU
    cache.variant.copy_(torch.arange(rows))
    tokens = []
    for row, (seed, length, poisoned) in enumerate(contents):
        random = torch.Generator().manual_seed(seed)
        drawn = torch.randint(61, (length + 2 * num_nodes,), generator=random).to(DEVICE)
        model.prefill(drawn[None, :length], cache.at(row))
        tokens.append(drawn[length:].view(2, num_nodes))
        if poisoned:
            for layer in cache.narrow(row, 1).layers:
                kept = (
                    layer.keys[:, :, :length] if isinstance(layer, AttentionCache) else layer.state
                )
                kept.fill_(torch.nan)
    first, second = torch.stack(tokens, dim=1)
    tree_batch, bound = make_tree_batch(trees, torch.device(DEVICE)), cache.num_slots
    kernels["on"] = True
    model.tree_batch_forward(first, tree_batch, cache, bound)
    for row, tree in enumerate(trees):
        path = tree.path_to(tree.num_nodes - 1)
        cache.path[row, : len(path)] = torch.tensor(path, device=DEVICE)
        cache.path_length[row] = len(path)
    logits = model.tree_batch_forward(second, tree_batch, cache, bound)
    kernels["on"] = ON_GPU
    return logits


def in_company(kernels, model, num_rows, num_nodes, mine):
    """Return what row `mine` gets with two kinds of neighbours, one of them poisoned."""
    found = []
    for company in (1, 2):
        contents = [(100 * company + row, 3 + (7 * row * company) % 80, False)
                    for row in range(num_rows)]
        trees = [random_tree(num_nodes, 10 * company + row) for row in range(num_rows)]
        if company == 2:
            contents[mine - 1] = (0, 90, True)
        contents[mine], trees[mine] = (5, 40, False), random_tree(num_nodes, 3)
        found.append(logits_of(kernels, model, trees, contents))
    one, other = found
    assert not torch.equal(one[mine - 1], other[mine - 1])
    assert one[mine].isfinite().all() and not other[mine - 1].isfinite().any()
    return one[mine], other[mine]


@pytest.mark.parametrize("num_rows", long_in_the_interpreter(2, 4, 8, 16, quick=[2]))
@pytest.mark.parametrize(
    "num_nodes", [pytest.param(1, id="plain", marks=pytest.mark.costly), pytest.param(5, id="tree")]
)
@each_model
def test_at_one_envelope_nothing_depends_on_what_neighbours_hold(
    shape, num_nodes, num_rows, kernels
):
    """16 trees of 5 nodes are more rows than the products below serve alike."""
    model = tiny_model(1, torch.bfloat16, **MODELS[shape]).to(DEVICE)
    for mine in {0, num_rows - 1} if ON_GPU else {1}:
        one, other = in_company(kernels, model, num_rows, num_nodes, mine)
        assert torch.equal(one, other)


@pytest.mark.costly
def test_a_leak_between_rows_shows(kernels, monkeypatch):
    model, own = tiny_model(1, torch.bfloat16).to(DEVICE), HybridModel.tree_hidden

    def leaking(self, call):
        hidden = own(self, call)
        return hidden + hidden.nan_to_num().mean(0) / 100

    monkeypatch.setattr(HybridModel, "tree_hidden", leaking)
    assert not torch.equal(*in_company(kernels, model, 2, 1, 0))


@each_model
@pytest.mark.parametrize(
    ("num_nodes", "counts"),
    [
        pytest.param(1, (2, 4, 8, 16) if ON_GPU else (2, 8), id="plain", marks=pytest.mark.costly),
        pytest.param(4, (2, 4) if ON_GPU else (2,), id="tree", marks=pytest.mark.costly),
    ],
)
@pytest.mark.parametrize("width", long_in_the_interpreter(32, 1280, quick=[32]))
def test_up_to_16_rows_of_products_a_row_gets_what_it_gets_alone(
    width, num_nodes, counts, shape, kernels
):
    """With a head of few tokens, and so few keys that attention splits them alike for any number
    of sequences. A width of 1,280 is more than the products from registers serve. The interpreter
    adds up tiles of 8 and of 16 rows in other orders, so here there are 8 at most."""
    model = tiny_model(1, torch.bfloat16, d_model=width, **MODELS[shape]).to(DEVICE)
    contents = [(row, 3 + 5 * row % 30, False) for row in range(max(counts))]
    trees = [random_tree(num_nodes, row) for row in range(max(counts))]
    judged = range(max(counts)) if ON_GPU else sorted({0, *(count - 1 for count in counts)})
    alone = {row: logits_of(kernels, model, [trees[row]], [contents[row]], 50)[0] for row in judged}
    for count in counts:
        together = logits_of(kernels, model, trees[:count], contents[:count], 50)
        for row in judged:
            assert row >= count or torch.equal(together[row], alone[row]), (row, count)
