"""Requests that share a batch each take their share of its time."""

from __future__ import annotations

import pytest
from captures import Replayed
from tiny_evaluation import tiny_model

from stree.batching.batch_decoder import BatchDecoder
from stree.batching.sequences import Request
from stree.batching.step_loop import StepLoop
from stree.engine.worker import Worker
from stree.generation import GenerationConfig
from stree_pipelines.evaluation.answering.batching import Share, TimedRows

pytestmark = pytest.mark.usefixtures("one_thread")


class HandMadeClock:
    """A second for each piece of a prompt, ten for each call."""

    def __init__(self, monkeypatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("stree_pipelines.evaluation.answering.batching.time", self)
        monkeypatch.setattr("stree.engine.worker.time", self)
        monkeypatch.setattr("stree.common.clock.time", self)

    def perf_counter(self) -> float:
        return self.now


def decoded(batch: TimedRows, *requests: Request) -> list[Share]:
    """Decode the requests to their ends, and return the share of each."""
    rows, shares = [batch.admit(each) for each in requests], {}
    while len(shares) < len(rows):
        for report in batch.step():
            if report.finish_reason:
                batch.release(report.row)
                shares[report.row] = batch.shares[report.row]
    return [shares[row] for row in rows]


def test_a_step_s_seconds_are_shared_among_the_rows_that_it_decoded(monkeypatch):
    clock = HandMadeClock(monkeypatch)

    def timed_report(loop):
        clock.now += 10 * bool(loop.scheduler.awaits_steps)
        return take_report(loop)

    def timed_read(*arguments):
        clock.now += 1
        return read(*arguments)

    take_report, read = StepLoop.take_report, Worker.read
    monkeypatch.setattr(StepLoop, "take_report", timed_report)
    monkeypatch.setattr(Worker, "read", timed_read)
    batch = TimedRows(BatchDecoder(tiny_model(0, 64), num_rows=2, max_length=32))
    lengths = (GenerationConfig(n, ignore_eos=True) for n in (3, 5))
    shares = decoded(batch, *(Request([1, 2], each) for each in lengths))
    # The first token is the prompt's; two calls side by side, and two of the longer one alone.
    assert [each.prefill_s for each in shares] == [1, 1]
    assert [each.decode_s for each in shares] == [10, 30]
    assert [each.num_calls for each in shares] == [1, 3]
    assert sum(s.prefill_s + s.decode_s for s in shares) == clock.now == 42


def test_what_is_done_between_steps_counts_too(monkeypatch):
    """Keeping a turn counts for its row, waiting for a step for the rows that it decodes."""
    clock = HandMadeClock(monkeypatch)

    take_report = StepLoop.take_report

    def timed_report(loop):
        clock.now += 10 * bool(loop.scheduler.awaits_steps)
        return take_report(loop)

    class Timed(BatchDecoder):
        def await_prefixes(self):
            clock.now += 3 * bool(self.scheduler.sequences[0].stop.tokens)
            super().await_prefixes()

        def release(self, row, keep=False):
            clock.now += 5
            return super().release(row, keep)

    monkeypatch.setattr(StepLoop, "take_report", timed_report)
    batch = TimedRows(Timed(tiny_model(0, 64), num_rows=2, max_length=32))
    first = batch.admit(Request([1, 2], GenerationConfig(4, ignore_eos=True)))
    assert len(batch.step()) == 1  # the first token
    second = batch.admit(Request([1, 2], GenerationConfig(1, ignore_eos=True)))
    shares, left = {}, {first, second}
    while left:
        for report in batch.step():
            if report.finish_reason:
                left.remove(report.row)
                batch.release(report.row)
                shares[report.row] = batch.shares[report.row]
    assert (shares[first].prefill_s, shares[second].prefill_s) == (5, 5)
    assert (shares[first].decode_s, shares[second].decode_s) == (33, 0)
    assert clock.now == 43


class LateEvent:
    """Event of a device that is done with its work only when a test says so."""

    clock: HandMadeClock
    done_until = 0.0

    def record(self) -> None:
        self.at = self.clock.now

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return self.at <= self.done_until

    def elapsed_time(self, later: LateEvent) -> float:
        return (later.at - self.at) * 1e3


@pytest.fixture
def late(monkeypatch):
    """Let blocks be done when `done_until` is moved, and each piece of a prompt take a second."""
    clock = HandMadeClock(monkeypatch)
    monkeypatch.setattr(LateEvent, "clock", clock, raising=False)
    monkeypatch.setattr(LateEvent, "done_until", 0.0)
    monkeypatch.setattr("stree.common.clock.HostEvent", LateEvent)
    read = Worker.read

    def timed_read(*arguments):
        clock.now += 1
        return read(*arguments)

    monkeypatch.setattr(Worker, "read", timed_read)
    return clock


def test_prompt_work_that_ends_between_steps_counts_for_the_prompt(late):
    batch = TimedRows(BatchDecoder(tiny_model(0, 64), num_rows=2, max_length=64))
    first = batch.admit(Request([1, 2], GenerationConfig(8, ignore_eos=True)))
    batch.step()  # the device is not done with the prompt
    assert batch.decoder.worker.prefill_time.seconds == 0
    LateEvent.done_until = late.now
    second = batch.admit(Request([1, 2], GenerationConfig(8, ignore_eos=True)))
    batch.step()
    batch.step()
    for row in (first, second):
        batch.release(row)
    shares = [batch.shares[row] for row in (first, second)]
    assert batch.decoder.worker.prefill_time.seconds == 1  # the second prompt's end is not seen yet
    assert sum(share.prefill_s for share in shares) == 1


def test_nobody_has_to_read_the_time_of_prompts(late):
    """Steps drop the events of prompts that are done, however many requests come."""
    decoder = BatchDecoder(tiny_model(0, 64), num_rows=1, max_length=32)
    for count in range(1, 21):
        LateEvent.done_until = late.now  # of the request before
        decoder.generate([[1, 2]], GenerationConfig(3, ignore_eos=True))
        assert len(decoder.worker.prefill_time._marks) <= 1
        assert decoder.worker.prefill_time.seconds == count - 1


def test_graphs_of_prompts_of_a_new_length_count_for_nobody(captured_on_cpu, monkeypatch):
    clock = HandMadeClock(monkeypatch)
    target = tiny_model(0, 64)
    batch = TimedRows(BatchDecoder(target, target, "chain-1", num_rows=2, max_length=64))
    requests = [Request([1] * n, GenerationConfig(6, ignore_eos=True)) for n in (2, 3, 30, 40)]
    batch.decoder.generate(requests[:2])

    class Slow(Replayed):
        def __init__(self, *arguments):
            clock.now += 100
            super().__init__(*arguments)

    monkeypatch.setattr(batch.decoder.worker.runner.prefiller, "capture", Slow)
    shares = decoded(batch, *requests[2:])
    assert clock.now == 400  # a prompt of 32 and one of 64, by target and drafter
    assert all(each.prefill_s == each.decode_s == 0 for each in shares)
