"""Graphs give what steps one operation after the other give. Runs on CUDA only."""

import gc
import itertools
import weakref
from functools import partial

import pytest
import torch
from eager import assert_same, without_graphs
from toys import recurrent, right_now_and_then, tiny_model, with_head

from stree import BatchDecoder, Decoder, GenerationConfig, Request, TokenTree
from stree.batching.runners import MAX_KEPT, CudaGraph, GraphRunner
from stree.models.joint import BACKTRACKING
from stree.trees.token_tree import balanced
from stree_kernels import ops

pytestmark = pytest.mark.gpu
TREES = [TokenTree.chain(0), TokenTree.chain(4), TokenTree.paper(), balanced([3, 2])]


@pytest.fixture
def models():
    target = tiny_model(1, torch.float32, num_layers=4, attn_layers=(1, 3)).cuda()
    return target, right_now_and_then(target)


def same_as_eager(make, monkeypatch, *calls):
    """Return outputs of calls of `generate`, which are those of a decoder without graphs."""
    decoder, plain = make(), without_graphs(monkeypatch, make)
    assert isinstance(decoder.batch.worker.runner, GraphRunner)
    got, wanted = ([each.generate(*call) for call in calls] for each in (decoder, plain))
    assert_same(got, wanted)
    assert_same([decoder.generate(*call) for call in calls], got)
    return got


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(7 * i + seed) % 61 for i in range(length)]


@pytest.mark.parametrize("verifier", ["coupled", "naive", "multi_step", "traversal"])
@pytest.mark.parametrize("kernels", ["fused", "naive"])
@pytest.mark.parametrize("tree", TREES[1:], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_graphs_give_what_eager_steps_give(
    models, tree, temperature, kernels, verifier, monkeypatch
):
    if kernels == "naive":
        monkeypatch.setattr(ops, "fused", lambda *_: False)

    same_as_eager(
        lambda: Decoder(*models, tree, max_length=700, verifier=verifier), monkeypatch,
        *((prompt_of(length, seed), GenerationConfig(60, temperature=temperature, seed=seed))
          for seed, length in ((1, 5), (2, 250), (3, 300))),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_prompts_read_by_graphs_are_as_read_in_fp64(models, dtype):
    """Operations in fp32 differ: cuDNN's convolutions, at least, are of TF32."""
    exact = models[0].double()
    model = tiny_model(1, torch.float32, num_layers=4, attn_layers=(1, 3)).to("cuda", dtype)
    decoder = BatchDecoder(model, num_rows=3, max_length=2000)
    near = dict(rtol=1e-9, atol=1e-11) if dtype == torch.float64 else dict(rtol=0, atol=1e-4)
    wanted = exact.new_cache(2000, 1)
    for count in (5, 600, 30, 700):
        tokens = torch.randint(61, (1, count), device=model.device)
        got = decoder.worker.runner.prefiller.read_row(model, decoder.cache, 1, tokens[0])
        torch.testing.assert_close(got.double(), exact.prefill(tokens, wanted), **near)
    graphs = decoder.worker.runner.prefiller.graphs.values()
    assert {graph.size for graph in graphs} == {16, 512, 128, 32, 256}
    assert decoder.cache.length.tolist() == [0, 1335, 0]
    saved = (cache.save().parts for cache in (decoder.cache.narrow(1, 1), wanted))
    for got, each in zip(*saved, strict=True):
        mine = tuple(part.double() for part in got)
        torch.testing.assert_close(mine, each, **near)


@pytest.mark.parametrize("tree", ["chain-4", "beam-3-4-9", "beam-3-4"])
def test_graphs_of_a_transformer_that_drafts_for_itself(tree, monkeypatch):
    """Greedy chains are always right, but where the answer ends."""
    model = tiny_model(1, torch.float32, num_layers=2, attn_layers=(0, 1)).cuda()
    outputs = same_as_eager(
        lambda: Decoder(model, model, tree, max_length=400), monkeypatch,
        *((prompt_of(length), GenerationConfig(60)) for length in (5, 300)),
    )
    if tree == "chain-4":
        assert all(set(each.stats.accepted_per_call[:-1]) == {4} for each in outputs)


@pytest.mark.parametrize("backtracking", BACKTRACKING)
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("tree", [TREES[2], "beam-3-4-9"], ids=str)
def test_graphs_hand_features_over_as_eager_steps_do(tree, own, backtracking, monkeypatch):
    target, drafter = (model.float().cuda() for model in recurrent(own))
    outputs = same_as_eager(
        lambda: Decoder(target, drafter, tree, max_length=400, backtracking=backtracking),
        monkeypatch,
        *((prompt_of(length, seed), GenerationConfig(60, temperature=float(seed - 1), seed=seed))
          for seed, length in ((1, 5), (2, 250))),
    )
    assert all(each.stats.acceptance_length > 1.1 for each in outputs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_graphs_are_lossless(models, temperature, dtype):
    target, drafter = (model.to(dtype) for model in models)
    generation = GenerationConfig(100, temperature=temperature, seed=7)
    for length in (3, 200):
        prompt = (list(range(50)) * 4)[:length]
        wanted = Decoder(target, max_length=700).generate(prompt, generation).tokens
        grown = TokenTree.load("beam-3-4-13")
        for tree, backtracking in itertools.product((*TREES[1:], grown), BACKTRACKING):
            decoder = Decoder(target, drafter, tree, max_length=700, backtracking=backtracking)
            assert decoder.generate(prompt, generation).tokens == wanted, (tree, backtracking)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("verifier", ["coupled", "multi_step"])
def test_graphs_of_a_small_head_give_what_eager_steps_give(
    models, verifier, temperature, monkeypatch
):
    target, whole = models
    drafter = with_head(whole, ids=torch.arange(1, 61, 3, device="cuda"), rank=24)
    asked = [4, 5, 6], GenerationConfig(60, temperature=temperature, seed=3)
    for tree in ["paper", "beam-3-4-13"] if verifier == "coupled" else ["paper"]:
        make = partial(Decoder, target, drafter, tree, max_length=700, verifier=verifier)
        (got,) = same_as_eager(make, monkeypatch, asked)
        if verifier == "coupled":
            assert got.tokens == Decoder(target, max_length=700).generate(*asked).tokens


def test_rows_get_what_they_get_alone(models):
    """Requests of all settings come and go; 64 of them in up to 16 rows."""
    served = [
        Request(
            [(11 * seed + i) % 61 for i in range(1 + 3 * seed)],
            GenerationConfig(20 + seed, temperature=0.5 * (seed % 3), top_k=10 * (seed % 2),
                             seed=seed),
            TREES[seed % 4],
        )
        for seed in range(64)
    ]

    def serve(num_rows):
        decoder = BatchDecoder(*models, num_rows=num_rows, max_length=400, max_nodes=16)
        return [(each.tokens, each.finish_reason) for each in decoder.generate(served)]

    alone = serve(1)
    for num_rows in (5, 16):
        assert serve(num_rows) == alone


def test_phases_add_up(models):
    decoder = Decoder(*models, TokenTree.paper(), max_length=700)
    decoder.generate([1, 2, 3], GenerationConfig(20))
    stats = decoder.generate([1, 2, 3], GenerationConfig(50)).stats
    assert sum(stats.time_ms.values()) == pytest.approx(stats.decode_s * 1e3, rel=0.05)


def test_sampling_at_no_temperature_to_speak_of_is_greedy(models):
    target, drafter = models
    wanted = Decoder(target, max_length=700).generate([1, 2, 3], GenerationConfig(60)).tokens
    for tree in (TokenTree.chain(4), TokenTree.paper()):
        decoder = Decoder(target, drafter, tree, max_length=700)
        for temperature in (1e-4, 1.0):
            generation = GenerationConfig(60, temperature=temperature, seed=0)
            got = decoder.generate([1, 2, 3], generation).tokens
            assert (got == wanted) == (temperature < 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_moved_are_followed(models, temperature):
    target, drafter = models
    generation = GenerationConfig(60, temperature=temperature, seed=4)
    decoder = Decoder(target, drafter, TokenTree.paper(), max_length=700)
    before = decoder.generate([1, 2, 3], generation).tokens
    other = tiny_model(5, torch.float32, num_layers=4, attn_layers=(1, 3)).cuda()
    target.load_state_dict(other.state_dict(), assign=True)
    drafter.cpu().cuda()
    got = decoder.generate([1, 2, 3], generation).tokens
    fresh = Decoder(target, drafter, TokenTree.paper(), max_length=700)
    assert got == fresh.generate([1, 2, 3], generation).tokens != before


def test_graphs_of_many_trees_free_their_memory(models):
    num_trees = MAX_KEPT + 16
    decoder = BatchDecoder(*models, num_rows=1, max_length=700, max_nodes=num_trees + 1)

    def allocated(depth):
        decoder.generate([Request([1, 2, 3], GenerationConfig(20), TokenTree.chain(depth))])
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    # The last trees of both rounds are kept with the same others, whose graphs are as large
    first, second = ([allocated(1 + each) for each in range(num_trees)] for _ in range(2))
    assert max(second[MAX_KEPT:]) <= 1.01 * max(first[MAX_KEPT:])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_neither_decoding_nor_the_next_prefill_holds_the_step_ahead(models, temperature):
    """A generation takes as many long steps as it has calls."""
    decoder = Decoder(models[0], max_length=700)
    generation = GenerationConfig(4, temperature=temperature, seed=0)
    decoder.generate([1, 2, 3], generation)
    (graphs,) = decoder.batch.worker.runner.step_graphs.values()
    replay = graphs.rest.replay

    def slow():
        torch.cuda._sleep(200_000_000)  # cycles: about a tenth of a second
        return replay()

    graphs.rest.replay = slow
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    torch.cuda._sleep(200_000_000)
    after.record()
    after.synchronize()
    spin_s = before.elapsed_time(after) / 1e3
    for _ in range(2):
        stats = decoder.generate([1, 2, 3], generation).stats
        assert abs(stats.decode_s / spin_s - stats.num_calls) < 0.5
        assert stats.prefill_s < 0.5 * spin_s


def test_graphs_of_a_decoder_that_is_gone_are_not_destroyed_during_a_capture(models):
    decoder = BatchDecoder(*models, max_length=64)
    decoder.generate([1, 2, 3], max_new_tokens=4)
    decoder.itself = decoder
    gone = weakref.ref(decoder)
    there = torch.zeros(4, device="cuda")

    def collected() -> None:
        there.add_(1)
        if torch.cuda.is_current_stream_capturing():  # so much that Python looks for garbage
            _ = [[number] for number in range(100_000)]

    gc.collect()
    del decoder
    CudaGraph(torch.device("cuda"), collected).replay()
    assert there.tolist() == [3.0] * 4
    gc.collect()
    assert gone() is None
