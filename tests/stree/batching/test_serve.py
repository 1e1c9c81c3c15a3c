"""Serve requests that come and go, from several threads, without losing one or its row."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from toys import right_now_and_then, tiny_model

from stree import Decoder, GenerationConfig
from stree.batching.batch_decoder import BatchDecoder
from stree.batching.sequences import Request
from stree.common.errors import UsageError


def test_threads_admit_and_generate_without_losing_a_request():
    target = tiny_model(1)
    decoder = BatchDecoder(target, right_now_and_then(target), num_rows=3, max_length=64)
    prompts = [[1 + each, 2, 3] for each in range(12)]
    settings = GenerationConfig(5)
    wanted = [Decoder(target, max_length=64).generate(each, settings).tokens for each in prompts]

    def generate(place: int) -> list[list[int]]:
        requests = [Request(each, settings) for each in prompts[place::4]]
        return [out.tokens for out in decoder.generate(requests)]

    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(generate, range(4)))
    assert outputs == [wanted[place::4] for place in range(4)]


def test_threads_never_get_one_row():
    decoder = BatchDecoder(tiny_model(1), num_rows=40, max_length=64)
    together = threading.Barrier(4)

    class Slow(dict):
        def __setitem__(self, row, sequence):  # a row is found and not yet taken
            time.sleep(0.001)  # other threads run
            super().__setitem__(row, sequence)

    decoder.scheduler.sequences = Slow()

    def admit(_) -> list[int]:
        together.wait()
        return [decoder.admit(Request([1], GenerationConfig(2))) for _ in range(10)]

    with ThreadPoolExecutor(4) as pool:
        rows = [row for each in pool.map(admit, range(4)) for row in each]
    assert sorted(rows) == list(range(40))


def test_one_sequence_is_asked_by_several_threads():
    target = tiny_model(1)
    decoder = Decoder(target, max_length=64)
    prompts = [[1 + each, 2, 3] for each in range(9)]
    wanted = [decoder.generate(each, GenerationConfig(5)).tokens for each in prompts]
    with ThreadPoolExecutor(3) as pool:
        outputs = pool.map(lambda each: decoder.generate(each, GenerationConfig(5)), prompts)
        assert [out.tokens for out in outputs] == wanted


def test_serve_frees_all_rows_when_it_is_closed_or_fails():
    decoder = BatchDecoder(tiny_model(1), num_rows=2, max_length=64)
    reports = decoder.serve(Request([each], GenerationConfig(9)) for each in range(1, 6))
    served = next(reports)
    with pytest.raises(UsageError, match="rows are taken"):
        next(decoder.serve([]))
    reports.close()
    assert decoder.num_free_rows == 2 and served.output is None
    with pytest.raises(UsageError, match="empty"):
        list(decoder.serve([Request([1], GenerationConfig(9)), Request([])]))
    assert decoder.num_free_rows == 2


def test_serve_waits_for_requests_that_come_later_and_lets_answers_be_cut_short():
    decoder = BatchDecoder(tiny_model(1), num_rows=2, max_length=64)
    requests = [Request([each], GenerationConfig(9)) for each in range(1, 4)]
    outputs = {}
    for served in decoder.serve([requests[0], None, requests[1], None, None, requests[2]]):
        if served.number == 1 and len(served.report.tokens):
            outputs[1] = served.release()
        if served.report.finish_reason:
            outputs[served.number] = served.release()
    reasons = [outputs[number].finish_reason for number in range(3)]
    assert reasons == ["length", "released", "length"]
    assert [len(outputs[number].tokens) for number in range(3)] == [9, 1, 9]


def test_serve_refuses_rows_that_another_has_admitted_meanwhile():
    decoder = BatchDecoder(tiny_model(1), num_rows=2, max_length=64)
    reports = decoder.serve([Request([1], GenerationConfig(9))])
    next(reports)
    decoder.admit(Request([2], GenerationConfig(9)))
    with pytest.raises(UsageError, match="admitted by another caller"):
        list(reports)


def test_a_request_is_checked_before_it_waits_for_a_row():
    decoder = BatchDecoder(tiny_model(1), num_rows=1, max_length=32)
    decoder.admit(Request([1], GenerationConfig(2)))
    decoder.check(Request([1], GenerationConfig(2)))
    with pytest.raises(UsageError, match="max_length of 41"):
        decoder.check(Request([1] * 30, GenerationConfig(10)))
    with pytest.raises(UsageError, match="all rows"):
        decoder.admit(Request([1], GenerationConfig(2)))


@pytest.mark.parametrize("place", ["processor", "tokenizer"])
def test_what_a_signal_raises_ends_the_caller_and_not_a_request_alone(place):
    """Handlers raise in the main thread, wherever it is, as SIGTERM's often does by sys.exit."""

    def terminated(*_, **__):
        raise SystemExit(143)

    class Tokenizer:
        eos_token_id, all_special_ids, added_tokens_decoder = None, (), {}
        decode, convert_ids_to_tokens = terminated, staticmethod(str)

    changes = {"processor": {"logits_processor": terminated}, "tokenizer": {"stop_strings": ("x",)}}
    decoder = BatchDecoder(tiny_model(1), num_rows=2, max_length=64, tokenizer=Tokenizer())
    with pytest.raises(SystemExit):
        decoder.generate([Request([4, 2], GenerationConfig(3, **changes[place]))])
    assert decoder.num_free_rows == 2
    wanted = Decoder(decoder.target, max_length=64).generate([4, 2], GenerationConfig(3)).tokens
    assert decoder.generate([Request([4, 2], GenerationConfig(3))])[0].tokens == wanted
