"""Prefill, decoding and its phases, on clocks that move by known amounts."""

from types import SimpleNamespace

import pytest
import torch
from simulated_gpu import SimulatedGPU
from toys import Streamer, TableDrafter, TableTarget, tiny_model

import stree.common.clock
import stree.decoder
from stree import Decoder, GenerationConfig, TokenTree

PREFILL_S, DRAFT_S, VERIFY_S, CAPTURE_S = 0.1, 0.002, 0.005, 3.0


@pytest.fixture
def gpu(monkeypatch):
    gpu = SimulatedGPU()
    monkeypatch.setattr(stree.common.clock, "time", SimpleNamespace(perf_counter=lambda: gpu.now))
    return gpu


def slow(gpu):
    """Return a streamer that takes its time."""

    def wait(value):
        gpu.now += 0.02

    return Streamer(wait)


class TimedTarget(TableTarget):
    def prefill(self, tokens, cache):
        self.gpu.now += PREFILL_S
        return super().prefill(tokens, cache)

    def tree_batch_forward(self, *arguments):
        self.gpu.now += VERIFY_S
        return super().tree_batch_forward(*arguments)


class TimedDrafter(TableDrafter):
    def read(self, *arguments):
        self.gpu.now += PREFILL_S
        super().read(*arguments)

    def draft(self, *arguments):
        self.gpu.now += DRAFT_S
        return super().draft(*arguments)


def require_times_of_calls(stats):
    assert stats.decode_s == pytest.approx(stats.num_calls * (DRAFT_S + VERIFY_S))
    assert stats.time_ms["draft"] == pytest.approx(stats.num_calls * DRAFT_S * 1e3)
    assert stats.time_ms["verify"] == pytest.approx(stats.num_calls * VERIFY_S * 1e3)
    assert sum(stats.time_ms.values()) == pytest.approx(stats.decode_s * 1e3)


@pytest.mark.parametrize("streamed", [False, True])
def test_on_the_host_prefill_and_streamer_are_no_decoding(gpu, streamed):
    torch.manual_seed(0)
    target, drafter = TimedTarget(torch.randn(9, 9, 9)), TimedDrafter(torch.randn(9, 9, 9))
    target.gpu = drafter.gpu = gpu
    decoder = Decoder(target, drafter, TokenTree.chain(2))
    streamer = slow(gpu) if streamed else None
    for _ in range(2):
        stats = decoder.generate([1, 2], GenerationConfig(20), streamer=streamer).stats
        assert stats.prefill_s == pytest.approx(2 * PREFILL_S)
        require_times_of_calls(stats)


@pytest.fixture
def on_device(gpu, monkeypatch, captured_on_cpu):
    """Let replays take fixed times, as on a GPU: admission, the target's reading of a prompt, its
    first token, the drafter's reading, draft and target call."""
    capture = gpu.capture([0, PREFILL_S, 0, 0, DRAFT_S, VERIFY_S], CAPTURE_S)
    monkeypatch.setattr("stree.batching.runners.CudaGraph", capture)
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    clock = stree.common.clock.PhaseClock
    monkeypatch.setattr(stree.decoder, "PhaseClock", lambda device: clock(torch.device("cuda")))
    return gpu


@pytest.mark.parametrize("streamed", [False, True])
def test_on_a_gpu_the_step_ahead_counts_neither_here_nor_in_the_next_prefill(on_device, streamed):
    gpu, target = on_device, tiny_model(1)
    decoder = Decoder(target, tiny_model(1, attn_layers=()), TokenTree.chain(2), max_length=99)
    streamer = slow(gpu) if streamed else None
    for length in (8, 2, 20):  # turns of a conversation
        stats = decoder.generate([1, 2, 3], GenerationConfig(length), streamer=streamer).stats
        assert gpu.busy_until - gpu.now > 0.9 * (DRAFT_S + VERIFY_S) or streamed
        assert stats.prefill_s == pytest.approx(PREFILL_S)
        require_times_of_calls(stats)
    assert gpu.now > 6 * CAPTURE_S  # which no figure had


def stall_before(decoder, gpu, call, seconds):
    """Let the host do nothing for a while before it launches one call."""
    launch, calls = decoder.batch.worker.runner.launch, []

    def launched(*arguments):
        calls.append(None)
        if len(calls) == call:
            gpu.now += seconds
        launch(*arguments)

    decoder.batch.worker.runner.launch = launched


def test_on_a_gpu_waiting_for_the_host_is_no_draft(on_device):
    drafter = tiny_model(1, attn_layers=())
    decoder = Decoder(tiny_model(1), drafter, TokenTree.chain(2), max_length=99)
    decoder.generate([1, 2, 3], GenerationConfig(20))
    stall_before(decoder, on_device, 3, 0.25)
    stats = decoder.generate([1, 2, 3], GenerationConfig(20)).stats
    assert stats.time_ms["draft"] == pytest.approx(stats.num_calls * DRAFT_S * 1e3)
    assert 230 < stats.time_ms["host"] < 250  # the step on its way hides some of it


def test_on_the_host_waiting_between_steps_is_no_draft(gpu):
    target, drafter = TimedTarget(torch.randn(9, 9, 9)), TimedDrafter(torch.randn(9, 9, 9))
    target.gpu = drafter.gpu = gpu
    decoder = Decoder(target, drafter, TokenTree.chain(2))
    stall_before(decoder, gpu, 3, 0.25)
    stats = decoder.generate([1, 2], GenerationConfig(20)).stats
    assert stats.time_ms["draft"] == pytest.approx(stats.num_calls * DRAFT_S * 1e3)
    assert stats.time_ms["host"] == pytest.approx(250)
