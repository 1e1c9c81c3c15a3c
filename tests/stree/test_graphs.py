"""Captured steps give what uncaptured ones give. Runs on CUDA only."""

import pytest
import torch
from toys import tiny_model

from stree import Decoder, GenerationConfig, TokenTree
from stree.engine import DecodingStats
from stree.graphs import MAX_KEPT
from stree.sampling import RandomChooser

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


class Uncaptured(RandomChooser):
    """The same draws, but the drafter does not recognise it as capturable."""

    on_cuda = property(lambda self: False, lambda self, value: None)  # type: ignore[assignment]


@pytest.fixture
def models():
    target = tiny_model(1, torch.float32, num_layers=4, attn_layers=(1, 3)).cuda()
    drafter = tiny_model(1, torch.float32, num_layers=2, attn_layers=()).cuda()
    return target, drafter


@pytest.mark.parametrize("tree", [TokenTree.chain(4), TokenTree.paper()], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_captured_equals_uncaptured(models, tree, temperature):
    target, drafter = models
    decoder = Decoder(target, drafter, tree, max_length=700)
    plain = Decoder(target, drafter, tree, max_length=700)
    plain._verify = lambda tokens: target.tree_forward(tokens, tree, plain.cache)
    for seed, length in ((1, 5), (2, 250), (3, 300)):
        prompt = torch.randint(
            61, (length,), generator=torch.Generator().manual_seed(seed)
        ).tolist()
        generation = GenerationConfig(60, temperature=temperature, seed=seed)
        got = decoder.generate(prompt, generation).tokens
        assert got == decoder.generate(prompt, generation).tokens  # the capture drew nothing
        choose = Uncaptured(seed, "cuda")
        assert got == plain.generate(prompt, generation, choose=choose).tokens


def test_greedy_graphs_are_lossless(models):
    target, drafter = (model.double() for model in models)
    generation = GenerationConfig(100)
    for length in (3, 200):
        prompt = list(range(50)) * 4
        wanted = Decoder(target, max_length=700).generate(prompt[:length], generation).tokens
        for tree in (TokenTree.chain(4), TokenTree.paper()):
            decoder = Decoder(target, drafter, tree, max_length=700)
            assert decoder.generate(prompt[:length], generation).tokens == wanted


def test_phases_add_up(models):
    decoder = Decoder(*models, TokenTree.paper(), max_length=700)
    decoder.generate([1, 2, 3], GenerationConfig(20))
    stats: DecodingStats = decoder.generate([1, 2, 3], GenerationConfig(50)).stats
    assert sum(stats.time_ms.values()) == pytest.approx(stats.decode_s * 1e3, rel=0.05)


@pytest.mark.parametrize("tree", [None, TokenTree.chain(4), TokenTree.paper()], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_steps_on_the_device_give_the_same_tokens(models, tree, temperature):
    target, drafter = models
    host = Decoder(target, drafter if tree else None, tree, max_length=700)
    device = Decoder(target, drafter if tree else None, tree, max_length=700)
    for seed, length in ((1, 5), (2, 250)):
        prompt = [(7 * i + seed) % 61 for i in range(length)]
        generation = GenerationConfig(60, temperature=temperature, seed=seed)
        wanted = host.generate(prompt, generation, choose=RandomChooser(seed, "cuda"))
        got = device.generate(prompt, generation)
        assert device._steps and not host._steps
        assert got.tokens == wanted.tokens
        assert got.stats.accepted_per_call == wanted.stats.accepted_per_call


def test_sampling_at_no_temperature_to_speak_of_is_greedy(models):
    target, drafter = models
    wanted = Decoder(target, max_length=700).generate([1, 2, 3], GenerationConfig(60)).tokens
    for tree in (TokenTree.chain(4), TokenTree.paper()):
        decoder = Decoder(target, drafter, tree, max_length=700)
        for temperature in (1e-4, 1.0):
            generation = GenerationConfig(60, temperature=temperature)
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


def test_graphs_of_many_rules_free_their_memory(models):
    decoder = Decoder(*models, TokenTree.paper(), max_length=700)

    def allocated(temperature):
        decoder.generate([1, 2, 3], GenerationConfig(20, temperature=temperature))
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    used = [allocated(0.5 + each / 100) for each in range(3 * MAX_KEPT)]
    assert max(used[2 * MAX_KEPT :]) <= 1.02 * max(used[MAX_KEPT : 2 * MAX_KEPT])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_neither_decoding_nor_the_next_prefill_holds_the_step_ahead(models, temperature):
    """A step made long by a spin of the GPU: a generation takes as many as its calls."""
    decoder = Decoder(models[0], max_length=700)
    generation = GenerationConfig(4, temperature=temperature)
    decoder.generate([1, 2, 3], generation)
    (steps,) = decoder._steps.values()
    replay = steps.verify.replay

    def slow():
        torch.cuda._sleep(200_000_000)  # cycles: about a tenth of a second
        return replay()

    steps.verify.replay = slow
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
