"""After a commit, every buffer equals sequential decoding, whatever the unused slots hold.

Tolerances: in fp64 both sides sum the same few hundred terms in another order, which leaves
about 1e-14; fp32 leaves about 1e-6 on states of size 1.
"""

import pytest
import torch
from lanes import quick_first
from poisoned import poison
from toys import tiny_model

from stree import TokenTree
from stree.models.cache import HybridCache
from stree.models.layer_caches import AttentionCache
from stree.trees.token_tree import balanced

TREES = [TokenTree.paper(), TokenTree.chain(5), balanced([3, 2]),
         TokenTree((-1, 0, 1, 0, 2, 3, 3, 4, 0, 7))]
MAMBA_1 = dict(  # alone and side by side with attention
    layer_types=("mamba1 mlp", "mamba1+attention"), attn_layers=(), num_layers=2,
    mamba1_channels=40, dt_rank=3, selection_norm_eps=1e-2,
)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def assert_same(got: HybridCache, wanted: HybridCache, tolerance: float) -> None:
    assert got.num_committed == wanted.num_committed == int(got.length)
    used = got.num_committed
    for ours, theirs in zip(got.layers, wanted.layers, strict=True):
        if isinstance(ours, AttentionCache):
            pairs = [(ours.keys[:, :, :used], theirs.keys[:, :, :used]),
                     (ours.values[:, :, :used], theirs.values[:, :, :used])]
        else:
            pairs = [(ours.state, theirs.state), (ours.conv_state, theirs.conv_state)]
        for one, other in pairs:
            scale = other.abs().max().clamp(min=1)
            torch.testing.assert_close(one / scale, other / scale, rtol=0, atol=tolerance)


def sequential(model, tokens: list[int]) -> HybridCache:
    cache = model.new_cache(64, 16)
    for token in tokens:
        model.tree_forward(torch.tensor([[token]]), TokenTree.chain(0), cache)
        cache.commit([0])
    model.apply_path(cache)
    return cache


PROMPT_LENGTHS = [1, 2, 7, 8, 9]  # below the conv; around a chunk of 8


@pytest.mark.quick(4)
@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.name)
@pytest.mark.parametrize("config", [dict(), MAMBA_1], ids=["hybrid", "mamba-1"])
@pytest.mark.parametrize(
    "prompt_length, dtype",
    quick_first(
        [(9, torch.float64)],
        [(length, dtype) for length in PROMPT_LENGTHS for dtype in TOLERANCE],
        [(8, torch.float32)],
    ),
)
def test_every_path_of_every_tree(tree, config, prompt_length, dtype):
    model = tiny_model(3, dtype, **config)
    generator = torch.Generator().manual_seed(prompt_length)
    prompt = torch.randint(61, (1, prompt_length), generator=generator)
    tokens = torch.randint(61, (1, tree.num_nodes), generator=generator)
    for leaf in range(tree.num_nodes):
        path = tree.path_to(leaf)
        cache = model.new_cache(64, 16)
        model.prefill(prompt, cache)
        poison(cache)
        logits = model.tree_forward(tokens, tree, cache)
        assert logits.isfinite().all()
        cache.commit(path)
        model.apply_path(cache)
        accepted = prompt[0].tolist() + tokens[0, path].tolist()
        wanted = sequential(model, accepted)
        assert_same(cache, wanted, TOLERANCE[dtype])
        # And the next call agrees, on both sides, with a bound that reads unused slots too
        poison(cache)
        step = torch.tensor([[5]])
        after = model.tree_forward(step, TokenTree.chain(0), cache, bound=cache.num_slots)
        plain = model.tree_forward(step, TokenTree.chain(0), wanted)
        torch.testing.assert_close(after, plain, rtol=0, atol=TOLERANCE[dtype] * 1e3)


@pytest.mark.parametrize(
    "config", [dict(), dict(attn_layers=()), dict(repeat_before_conv=True), MAMBA_1]
)
def test_a_chain_equals_the_sequence_and_siblings_cannot_see_each_other(config):
    model = tiny_model(5, **config)
    prompt, tokens = torch.arange(9)[None], torch.arange(20, 33)[None]

    def run(tree, nodes):
        cache = model.new_cache(64, 16)
        model.prefill(prompt, cache)
        return model.tree_forward(nodes, tree, cache)[0]

    whole = model(torch.cat([prompt, tokens], dim=1))[0, 9:]
    torch.testing.assert_close(run(TokenTree.chain(12), tokens), whole, rtol=0, atol=1e-9)
    tree = TokenTree.paper()
    logits = run(tree, tokens)
    changed = tokens.clone()
    changed[0, 2] = 60  # nodes 2 and 6 are its only readers
    moved = (run(tree, changed) != logits).any(-1).nonzero().flatten().tolist()
    assert moved == [2, 6]


def test_relabelling_nodes_permutes_outputs():
    model = tiny_model(6)
    tree, order = TokenTree((-1, 0, 0, 1, 2, 2)), [0, 2, 1, 4, 5, 3]
    relabelled = TokenTree((-1, 0, 0, 1, 1, 2))
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9]])
    outputs = []
    for each, row in ((tree, tokens), (relabelled, tokens[:, order])):
        cache = model.new_cache(64, 16)
        model.prefill(torch.arange(5)[None], cache)
        outputs.append(model.tree_forward(row, each, cache)[0])
    torch.testing.assert_close(outputs[0][order], outputs[1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("num_tokens", quick_first([(1000,)], [(5000,)]))
def test_states_after_many_tokens_through_random_trees(num_tokens):
    """The fp32 state stays within 1e-4 (relative) of an fp64 recomputation."""
    torch.set_num_threads(1)
    model = tiny_model(7, torch.float32, attn_layers=(), num_layers=2)
    generator = torch.Generator().manual_seed(0)
    trees = [TokenTree.paper(), TokenTree.chain(7), balanced([2, 2, 2]), TokenTree.chain(0)]
    cache, committed, calls = model.new_cache(num_tokens + 100, 16), [3], 0
    model.prefill(torch.tensor([committed]), cache)
    while len(committed) < num_tokens:
        tree = trees[calls % len(trees)]
        tokens = torch.randint(61, (1, tree.num_nodes), generator=generator)
        model.tree_forward(tokens, tree, cache)
        leaf = int(torch.randint(tree.num_nodes, (1,), generator=generator))
        cache.commit(tree.path_to(leaf))
        committed += tokens[0, tree.path_to(leaf)].tolist()
        calls += 1
    model.apply_path(cache)
    exact = tiny_model(7, torch.float32, attn_layers=(), num_layers=2).double()
    again = exact.new_cache(num_tokens + 100, 16)
    exact.prefill(torch.tensor([committed]), again)
    for got, wanted in zip(cache.layers, again.layers, strict=True):
        error = (got.state - wanted.state).norm() / wanted.state.norm()
        assert error < 1e-4, error


def test_batch_rows_have_their_own_lengths_and_paths():
    model, tree = tiny_model(8), TokenTree.paper()
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(61, (2, 6), generator=generator)
    tokens = torch.randint(61, (2, 13), generator=generator)
    paths = [[0, 1, 4, 7, 11], [0, 3]]
    both = model.new_cache(64, 16, batch=2)
    model.prefill(prompts, both)
    together = model.tree_forward(tokens, tree, both)
    for row, path in enumerate(paths):
        both.path[row, : len(path)] = torch.tensor(path)
        both.path_length[row] = len(path)
    both.num_committed += 5
    again = model.tree_forward(tokens, tree, both)
    for row, path in enumerate(paths):
        alone = model.new_cache(64, 16)
        model.prefill(prompts[row : row + 1], alone)
        row_tokens = tokens[row : row + 1]
        logits = model.tree_forward(row_tokens, tree, alone)
        torch.testing.assert_close(together[row], logits[0], rtol=0, atol=1e-10)
        alone.commit(path)
        logits = model.tree_forward(row_tokens, tree, alone)
        torch.testing.assert_close(again[row], logits[0], rtol=0, atol=1e-10)


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_states_of_a_narrow_model_do_not_drift(dtype):
    """Roundings of a narrow state would add up to several times eps (seen: 3 to 13)."""
    model = tiny_model(9, dtype, attn_layers=(), num_layers=1)
    model.model.layers[0].mamba.A_log.data.fill_(-5.0)
    tokens = torch.randint(61, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    cache = model.new_cache(512, 4)
    for token in tokens:
        model.tree_forward(torch.tensor([[token]]), TokenTree.chain(0), cache)
        cache.commit([0])
    model.apply_path(cache)
    model.double()
    exact = model.new_cache(512, 4)
    model.prefill(torch.tensor([tokens]), exact)
    got, wanted = cache.layers[0].state, exact.layers[0].state
    assert (got - wanted).norm() / wanted.norm() < torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("config", "backtracking"),
    [(dict(attn_layers=()), "replay"), (dict(), "replay"), (MAMBA_1, "replay"), (dict(), "joint")],
    ids=["recurrent", "hybrid", "mamba-1", "joint"],
)
@pytest.mark.parametrize("path", [[], [0], [0, 2], [0, 1, 3]], ids=str)
def test_a_prefill_goes_on_from_the_accepted_path(path, config, backtracking):
    """A second turn is read after the first one's last block, which no call has replayed yet."""
    model, tree = tiny_model(10, **config), TokenTree((-1, 0, 0, 1))
    cache = model.new_cache(64, 4, backtracking=backtracking)
    tokens = torch.tensor([[7, 8, 9, 10]])
    model.prefill(torch.tensor([[1, 2, 3]]), cache)
    model.tree_forward(tokens, tree, cache)
    cache.commit(path)
    turn = [11, 12, 13, 14, 15]
    logits = model.prefill(torch.tensor([turn]), cache)
    sequence = [1, 2, 3, *tokens[0, path].tolist(), *turn]
    wanted = model(torch.tensor([sequence]))[:, -1]
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-9)
    step = model.tree_forward(torch.tensor([[4]]), TokenTree.chain(0), cache)[:, 0]
    wanted = model(torch.tensor([[*sequence, 4]]))[:, -1]
    torch.testing.assert_close(step, wanted, rtol=0, atol=1e-9)
