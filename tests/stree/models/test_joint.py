"""Feeding the accepted path again gives what replaying it gives: logits, states and tokens."""

import random

import pytest
import torch
from lanes import costly
from toys import mixed_requests, right_now_and_then, tiny_model

from stree import BatchDecoder, Decoder, GenerationConfig, Request, TokenTree
from stree.batching.runners import GraphRunner
from stree.common.errors import UsageError
from stree.trees.build import make_tree_batch
from stree.trees.token_tree import balanced
from stree_kernels import ops
from stree_kernels.contracts import CacheState

TREES = [TokenTree.paper(), TokenTree.chain(5), balanced([3, 2]), TokenTree.chain(0)]
OPS = "mamba_tree", "attend_tree", "short_conv_tree", "gated_delta_tree", "mamba1_advance"
KINDS = dict(  # every mixer, two of them more than once and side by side
    num_layers=7, attn_layers=(),
    layer_types=("mamba mlp", "attention mlp", "mamba+attention mlp", "short_conv", "gated_delta",
                 "mamba1+attention", "mamba1 mlp"),
    mamba1_channels=40, dt_rank=3,
    num_delta_heads=4, num_delta_key_heads=2, delta_key_dim=8, delta_value_dim=8,
)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("dtype", "verifier", "runner"),
    [
        costly(torch.float64, "coupled", "eager"),
        (torch.float64, "coupled", "graphs"),
        (torch.float32, "traversal", "graphs"),
    ],
    ids=str,
)
def test_it_gives_the_same_tokens(dtype, verifier, runner, request):
    if runner == "graphs":
        request.getfixturevalue("captured_on_cpu")
    target = tiny_model(1, dtype)
    drafter, served = right_now_and_then(target), mixed_requests(7, TREES, seed=2)

    def serve(backtracking):
        decoder = BatchDecoder(
            target, drafter, num_rows=4, max_length=64, max_nodes=13, verifier=verifier,
            backtracking=backtracking,
        )
        assert isinstance(decoder.worker.runner, GraphRunner) == (runner == "graphs")
        return decoder.generate(served)

    outputs = serve("joint")
    for got, wanted in zip(outputs, serve("replay"), strict=True):
        assert got.tokens == wanted.tokens and got.finish_reason == wanted.finish_reason
        assert got.stats.end_node_per_call == wanted.stats.end_node_per_call
    assert len({each for out in outputs for each in out.stats.accepted_per_call}) > 2


@torch.no_grad()
def test_states_after_commits_are_those_of_the_committed_tokens():
    """Rows of their own trees, lengths and paths; of idle ones nothing is accepted."""
    model, rng = tiny_model(3, **KINDS), random.Random(0)
    generator = torch.Generator().manual_seed(1)
    cache = model.new_cache(64, 16, 4, backtracking="joint")
    cache.variant.copy_(torch.arange(4))
    lines = [torch.randint(61, (length,), generator=generator).tolist() for length in (1, 3, 9, 4)]
    for row, line in enumerate(lines):
        model.prefill(torch.tensor([line]), cache.at(row))
    for _ in range(6):
        trees = [rng.choice(TREES) for _ in lines]
        tree_batch = make_tree_batch(trees, model.device)
        tokens = torch.randint(61, (4, tree_batch.num_nodes), generator=generator)
        for layer in cache.layers:
            if hasattr(layer, "history"):  # nothing of what a call has computed is left to the next
                layer.history.fill_(torch.nan)
        logits = model.tree_batch_forward(tokens, tree_batch, cache, bound=60)
        for row, tree in enumerate(trees):
            path = tree.path_to(rng.randrange(tree.num_nodes))
            seen = torch.tensor([lines[row] + tokens[row, path].tolist()])
            wanted = model(seen)[0, -1]
            torch.testing.assert_close(logits[row, path[-1]], wanted, rtol=0, atol=1e-9)
            if row < 3 and rng.random() < 0.7:
                cache.path[row, : len(path)] = torch.tensor(path)
                cache.path_length[row] = len(path)
                lines[row] = seen[0].tolist()
    for row, line in enumerate(lines):
        one, again = cache.at(row), model.new_cache(64, 1)
        model.apply_path(one)
        model.prefill(torch.tensor([line]), again)
        assert one.length == again.length == len(line)
        for got, wanted in zip(one.layers, again.layers, strict=True):
            for mine, other in zip(got.save(len(line)), wanted.save(len(line)), strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


@pytest.mark.costly
@pytest.mark.parametrize(
    "layers",
    [("mamba", "attention"), pytest.param(KINDS["layer_types"], marks=pytest.mark.long)],
    ids=len,
)
@torch.no_grad()
def test_the_fused_kernels_do_it_too(layers, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("tests/stree/batching/test_graphs.py compares whole steps on the GPU itself")
    kinds = KINDS | dict(layer_types=layers, num_layers=len(layers))
    model = tiny_model(3, torch.float32, **kinds)
    trees = [TokenTree((-1, 0, 0, 1, 3)), TokenTree.chain(2)]
    tree_batch = make_tree_batch(trees, model.device)

    def calls():
        cache = model.new_cache(32, 5, 2, backtracking="joint")
        cache.variant.copy_(torch.arange(2))
        model.prefill(torch.arange(10).view(2, 5), cache)
        yield model.tree_batch_forward(torch.arange(10).view(2, 5), tree_batch, cache, 32)
        cache.path[:] = torch.tensor([[0, 1, 3, 0, 0], [0, 0, 0, 0, 0]])
        cache.path_length.copy_(torch.tensor([3, 1]))
        yield model.tree_batch_forward(torch.arange(20, 30).view(2, 5), tree_batch, cache, 32)

    wanted = list(calls())
    monkeypatch.setattr(ops, "fused", lambda *_: True)
    for got, each in zip(calls(), wanted, strict=True):
        for row, tree in enumerate(trees):
            nodes = slice(tree.num_nodes)
            torch.testing.assert_close(got[row, nodes], each[row, nodes], rtol=0, atol=1e-4)


def test_it_keeps_less_and_plain_decoding_has_nothing_to_take_back():
    target = tiny_model(1)

    def kept(backtracking):
        cache = target.new_cache(64, 13, 4, backtracking=backtracking)
        buffers = {
            layer.history.data_ptr(): layer.history
            for layer in cache.layers if hasattr(layer, "history")
        }
        return sum(each.nbytes for each in buffers.values())

    assert kept("joint") * 2 == kept("replay")  # two recurrent layers
    assert Decoder(target, backtracking="joint").batch.cache.last_tree is None
    assert Decoder(target, target, backtracking="joint").batch.cache.last_tree is not None
    with pytest.raises(UsageError, match="wanted one of replay, joint"):
        Decoder(target, backtracking="copies")


def test_what_is_kept_of_a_row_is_right_however_late_it_is_released():
    """Its last path may be deeper than any that the rows beside it still have, and the host says of
    all of them how long they are at most."""
    target = tiny_model(1)
    decoder = BatchDecoder(
        target, target, num_rows=2, max_length=96, max_nodes=13, num_prefixes=1,
        backtracking="joint",
    )
    launch = decoder.worker.runner.launch

    def listening(inputs, mark):
        assert int(decoder.cache.path_length.max()) <= inputs.longest_block
        launch(inputs, mark)

    decoder.worker.runner.launch = listening
    prompt = [3, 1, 4]
    row = decoder.admit(Request(prompt, GenerationConfig(11), TokenTree.chain(4)))
    decoder.admit(Request([9], GenerationConfig(60), TokenTree.chain(0)))
    while not any(report.row == row and report.finish_reason for report in decoder.step()):
        pass
    for _ in range(3):
        decoder.step()
    first = decoder.release(row, keep=True)  # the drafter is always right: 1 + 5 + 5 tokens
    turn = [*prompt, *first.tokens, 7]
    assert decoder.num_reusable(turn) == len(turn) - 2  # all but the last, which no call has read
    kept = turn[: decoder.num_reusable(turn)]
    again = target.new_cache(96, 1)
    target.prefill(torch.tensor([kept]), again)
    for got, wanted in zip(decoder.cache.at(row).layers, again.layers, strict=True):
        for mine, other in zip(got.save(len(kept)), wanted.save(len(kept)), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("backtracking", ["replay", "joint"])
@pytest.mark.parametrize("normed", [False, True])
def test_ops_know_what_is_ready_when_they_begin(backtracking, normed, monkeypatch):
    """After a product a mixer's memory, after another mixer its inputs too, unless a norm makes
    them; of a tree after its path nothing."""
    seen = []

    def note(name, own):
        def run(*arguments):
            cache_state = next(each for each in arguments if isinstance(each, CacheState))
            seen.append((name, cache_state.ready))
            return own(*arguments)

        return run

    for name in OPS:
        monkeypatch.setattr(ops, name, note(name.split("_")[0], getattr(ops, name)))
    model = tiny_model(3, **KINDS, qk_norm=normed)
    cache = model.new_cache(64, 4, backtracking=backtracking)
    model.tree_forward(torch.tensor([[5]]), TokenTree.chain(0), cache)
    mixers = ["mamba", "attend", "mamba", "attend", "short", "gated", "mamba1", "attend", "mamba1"]
    if backtracking == "joint":
        assert seen == [(name, ready) for name in mixers for ready in ("memory", "none")]
    else:
        readies = ["memory"] * 9
        readies[3] = readies[7] = "memory" if normed else "all"
        assert seen == list(zip(mixers, readies, strict=True))
