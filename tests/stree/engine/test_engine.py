"""Requests of many threads: each has the answer that it would have alone, whatever ends others."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psutil
import pytest
import torch
from lanes import costly
from toys import mixed_requests, right_now_and_then, tiny_model

from stree import (
    BatchDecoder,
    Decoder,
    Engine,
    GenerationConfig,
    InvariantBroken,
    QueueFull,
    Request,
    TokenTree,
    UsageError,
)
from stree.batching.sequences import samples_of
from stree.drafters.ngram import NGram
from stree.engine.engine import Handle
from stree.engine.sequence import StepOutput
from stree.trees.token_tree import balanced

TREES = [TokenTree.chain(0), TokenTree.chain(3), TokenTree.paper(), balanced([3, 2]), None]
SETTINGS = GenerationConfig(9, ignore_eos=True)


def batch(num_rows: int = 3, **options) -> BatchDecoder:
    target = tiny_model(1)
    options = {"max_length": 64, "max_nodes": 13, **options}
    return BatchDecoder(
        target, right_now_and_then(target), TokenTree.paper(), num_rows=num_rows, **options
    )


def requests_with_stops(count: int, seed: int) -> list[Request]:
    """Return requests of all settings for `batch`, every eighth as long as its rows.

    Some end at a token, some are samples of one prompt.
    """
    draw, requests = random.Random(seed), []
    for number, each in enumerate(mixed_requests(count, TREES, seed)):
        if number % 8 == 7:
            most = 64 - 1 - TokenTree.paper().max_depth - each.generation.max_new_tokens
            each = replace(each, prompt_ids=[draw.randrange(61) for _ in range(most)])
        ends = dict(eos_token_id=draw.sample(range(61), 4)) if draw.random() < 0.5 else {}
        each = replace(each, generation=replace(each.generation, **ends))
        if each.generation.temperature and draw.random() < 0.2:
            several = replace(each.generation, num_return_sequences=3)
            requests += samples_of(replace(each, generation=several))
        else:
            requests.append(replace(each, keep_prompt=draw.random() < 0.3))
    return requests


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "count", [16, costly(60), pytest.param(2000, marks=pytest.mark.long)]
)
def test_many_threads_get_what_each_would_get_alone(count):
    requests = requests_with_stops(count, seed=5)
    decoder = batch(5, num_prefixes=6, prompt_tokens_per_step=8)
    alone = Decoder(decoder.target, max_length=64)
    wanted = [alone.generate(list(each.prompt_ids), each.generation).tokens for each in requests]

    cancelled = set()

    def ask(place: int) -> list[tuple[int, list[int], str]]:
        draw, under_way, answers = random.Random(place), {}, []
        for number in range(place, len(requests), 4):
            under_way[number] = engine.submit(requests[number])
            if draw.random() < 0.3:
                time.sleep(0.002)
            if draw.random() < 0.2:
                chosen = draw.choice(list(under_way))
                cancelled.add(chosen)
                engine.cancel(under_way[chosen])
        for number, handle in under_way.items():
            told = [token for report in handle for token in report.tokens]
            output = handle.result()
            assert told == output.tokens
            answers.append((number, output.tokens, output.finish_reason))
        return answers

    with Engine(decoder) as engine, ThreadPoolExecutor(4) as pool:
        answers = sorted(each for some in pool.map(ask, range(4)) for each in some)
    assert [number for number, _, _ in answers] == list(range(len(requests)))
    released = 0
    for number, tokens, reason in answers:
        if reason == "released":
            released += 1
            assert number in cancelled
            assert tokens == wanted[number][: len(tokens)]
        else:
            assert tokens == wanted[number]
    assert 0 < released < len(requests) / 2
    assert decoder.num_free_rows == 5


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_memory_is_flat_over_20_000_requests():
    """One layer, n-grams and at most three tokens: what an engine keeps of a request is no less."""
    target = tiny_model(1, num_layers=1, attn_layers=(), intermediate_size=0)
    chain, draw, process, sizes = TokenTree.chain(2), random.Random(0), psutil.Process(), []
    requests = [
        replace(each, generation=replace(each.generation, max_new_tokens=draw.randint(1, 3)),
                keep_prompt=True)
        for each in mixed_requests(500, [TokenTree.chain(0), chain, None], seed=8)
    ]
    decoder = BatchDecoder(
        target, NGram(2), chain, num_rows=16, max_length=64, num_prefixes=4
    )
    with Engine(decoder, max_waiting=500) as engine:
        for _ in range(40):
            handles = [engine.submit(each) for each in requests]
            for handle in handles[::25]:
                engine.cancel(handle)
            for handle in handles:
                handle.result()
            del handles, handle
            gc.collect()
            sizes.append(process.memory_info().rss)
    assert max(sizes[20:]) - sizes[10] < 2**24, sizes


def test_a_processor_that_fails_ends_its_own_answer_alone():
    def fails_later(ids, scores):
        if ids.shape[1] > 6:
            raise ZeroDivisionError("of the processor")
        return scores

    decoder = batch(3)
    wanted = Decoder(decoder.target, max_length=64).generate([4, 2], SETTINGS).tokens
    with Engine(decoder) as engine:
        good = [engine.submit(Request([4, 2], SETTINGS)) for _ in range(2)]
        bad = engine.submit(Request([7, 5, 3], replace(SETTINGS, logits_processor=fails_later)))
        with pytest.raises(ZeroDivisionError, match="of the processor"):
            bad.result()
        assert len(bad.output.tokens) > 0 and bad.output.finish_reason == "error"
        with pytest.raises(ZeroDivisionError):
            list(bad)
        assert [each.result().tokens for each in good] == [wanted] * 2


@pytest.mark.quick(1)
@pytest.mark.parametrize("graphs", [costly(False), True])
@pytest.mark.parametrize("place", ["read", "runner.launch", "runner.collect"])
def test_a_worker_that_raises_ends_the_rows_of_its_plan_and_goes_on(place, graphs, request):
    if graphs:
        request.getfixturevalue("captured_on_cpu")
    decoder = batch(3, num_prefixes=2)
    wanted = Decoder(decoder.target, max_length=64).generate([4, 2], SETTINGS).tokens
    asked = Request([4, 2], SETTINGS, keep_prompt=True)
    plain = replace(asked, tree=TokenTree.chain(0))
    owner = decoder.worker
    *path, name = place.split(".")
    for each in path:
        owner = getattr(owner, each)
    work, left = getattr(owner, name), iter([False, False, True])

    def fail(*arguments):
        failing = next(left, False)
        if failing and name != "collect":
            raise RuntimeError("of the device")
        result = work(*arguments)
        if failing:
            raise RuntimeError("of the device")
        return result

    setattr(owner, name, fail)
    with Engine(decoder) as engine:
        handles = [engine.submit(each) for each in (asked, plain, asked, plain, asked)]
        errors = []
        for handle in handles:
            try:
                assert handle.result(60).tokens == wanted
            except RuntimeError as error:
                errors.append(str(error))
        assert errors == ["of the device"] * len(errors)
        assert 0 < len(errors) < 5
        assert engine.submit(asked).result(60).tokens == wanted
    assert decoder.num_free_rows == 3


@pytest.mark.parametrize("place", ["step", "admission"])
def test_an_engine_that_cannot_free_rows_ends_all_handles_and_says_why(place):
    """As after an error of a GPU: every later call of it fails, too."""
    decoder = batch(3)
    execute, left = decoder.worker.execute, iter(range(6 if place == "step" else 0))

    def fail(plan):
        if next(left, None) is None:
            raise RuntimeError("of the device")
        execute(plan)

    decoder.worker.execute = fail
    engine = Engine(decoder)
    with decoder.lock:  # nothing fails before all are submitted
        handles = [engine.submit(Request([4, 2], SETTINGS)) for _ in range(5)]
    for handle in handles:
        with pytest.raises((RuntimeError, InvariantBroken), match="of the device"):
            handle.result(60)
    assert not engine.is_alive and engine.num_running == engine.num_waiting == 0
    with pytest.raises(InvariantBroken, match="of the device"):
        engine.submit(Request([4, 2], SETTINGS))
    with pytest.raises(InvariantBroken, match="of the device"):
        engine.call(list)
    if place == "step":
        assert all(each.output.tokens for each in handles[:3])
    engine.close()


def test_an_engine_whose_thread_ends_by_an_error_ends_all_handles():
    decoder = batch(1)
    decoder.release = lambda row, keep: {}[row]
    engine = Engine(decoder)
    with decoder.lock:
        handles = [engine.submit(Request([4, 2], SETTINGS)) for _ in range(3)]
    for handle in handles:
        with pytest.raises(KeyError):
            handle.result(60)
    assert not engine.is_alive
    with pytest.raises(InvariantBroken, match="0"):
        engine.submit(Request([4, 2], SETTINGS))
    engine.close()


def test_an_answer_that_cannot_be_saved_ends_as_any_other():
    decoder = batch(3, num_prefixes=2)
    wanted = Decoder(decoder.target, max_length=64).generate([4, 2], SETTINGS).tokens
    save, left = decoder.worker._save, iter([True])

    def fail(*arguments):
        if len(arguments) == 1 and next(left, False):  # at a release
            raise RuntimeError("of the save")
        return save(*arguments)

    decoder.worker._save = fail
    asked = [
        Request([4, 2], replace(SETTINGS, max_new_tokens=count), keep_prompt=True)
        for count in (2, 9, 9, 9)
    ]
    warned = pytest.warns(UserWarning, match=r"no prefix is kept.*of the save")
    with warned, Engine(decoder) as engine:
        handles = [engine.submit(each) for each in asked]
        answers = [each.result(60) for each in handles]
    assert [each.tokens for each in answers] == [wanted[:2], *[wanted] * 3]
    assert next(left, None) is None and {each.finish_reason for each in answers} == {"length"}


class Letters:
    """Tokenizer of a letter a token, which fails at some of them."""

    eos_token_id, all_special_ids, added_tokens_decoder = None, (), {}

    def __init__(self, error: BaseException, bad: int) -> None:
        self.error, self.bad = error, bad

    def decode(self, ids, skip_special_tokens=False) -> str:
        if self.bad in ids:
            raise self.error
        return "".join(chr(97 + token % 26) for token in ids)

    def convert_ids_to_tokens(self, token: int) -> str:
        return chr(97 + token % 26)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("error", [OverflowError("of the tokenizer"), SystemExit(3)])
def test_a_tokenizer_that_fails_ends_the_answer_with_stop_strings_alone(error, first):
    target = tiny_model(1)
    wanted = Decoder(target, max_length=64).generate([4, 2], SETTINGS).tokens
    bad = wanted[0] if first else next(each for each in wanted if each != wanted[0])
    decoder = BatchDecoder(
        target, right_now_and_then(target), TokenTree.paper(), num_rows=3, max_length=64,
        tokenizer=Letters(error, bad),
    )
    with Engine(decoder) as engine:
        stops = replace(SETTINGS, stop_strings=("none",))
        handles = [engine.submit(Request([4, 2], each)) for each in (SETTINGS, stops, SETTINGS)]
        wrapped = type(error) if isinstance(error, Exception) else UsageError
        with pytest.raises(wrapped, match=r"of the tokenizer|SystemExit"):
            handles[1].result(60)
        assert handles[1].output.finish_reason == "error"
        told = [token for report in reports_of(handles[1]) for token in report.tokens]
        assert told == handles[1].output.tokens == wanted[: len(told)]
        assert [handles[at].result(60).tokens for at in (0, 2)] == [wanted] * 2
        assert engine.submit(Request([4, 2], SETTINGS)).result(60).tokens == wanted


def reports_of(handle: Handle) -> list[StepOutput]:
    """Return the reports of a handle before its error."""
    reports = []
    with contextlib.suppress(Exception):
        reports.extend(handle)
    return reports


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_no_exception_of_a_callers_code_ends_the_thread(error):
    def fail(*_):
        raise error

    decoder = batch(2)
    wanted = Decoder(decoder.target, max_length=64).generate([4, 2], SETTINGS).tokens
    with Engine(decoder, listener=fail) as engine:
        bad = engine.submit(Request([4, 2], replace(SETTINGS, logits_processor=fail)))
        good = engine.submit(Request([4, 2], SETTINGS))
        with pytest.raises(UsageError, match=type(error).__name__):
            bad.result(60)
        assert good.result(60).tokens == wanted
        with pytest.raises(type(error)):
            engine.call(fail).result(60)
        decoder.worker.runner.launch, launch = fail, decoder.worker.runner.launch  # by the drafter
        with pytest.raises(UsageError, match=type(error).__name__):
            engine.submit(Request([4, 2], SETTINGS)).result(60)
        decoder.worker.runner.launch = launch
        assert engine.submit(Request([4, 2], SETTINGS)).result(60).tokens == wanted


def test_a_model_that_is_not_finite_ends_one_answer():
    target = tiny_model(1, tie_embeddings=False)
    target.model.embed_tokens.weight.data[60] = torch.nan
    decoder = BatchDecoder(target, num_rows=2, max_length=64)
    with Engine(decoder) as engine:
        bad, good = (engine.submit(Request(each, SETTINGS)) for each in ([5, 60, 7], [4, 2]))
        with pytest.raises(InvariantBroken, match="not finite"):
            bad.result()
        assert len(good.result().tokens) == 9


def test_requests_that_cannot_be_served_are_refused_at_once():
    with Engine(batch(1)) as engine:
        with pytest.raises(UsageError, match="max_length"):
            engine.submit(Request([1] * 60, SETTINGS))
        with pytest.raises(UsageError, match="empty"):
            engine.submit(Request([], SETTINGS))
        assert engine.num_waiting == engine.num_running == 0
    with pytest.raises(UsageError, match="closed"):
        engine.submit(Request([1], SETTINGS))


def test_a_full_queue_refuses_and_a_cancelled_request_makes_room():
    gate = threading.Event()

    def waits(ids, scores):
        gate.wait(60)
        return scores

    with Engine(batch(1), max_waiting=1) as engine:
        first = engine.submit(Request([1], replace(SETTINGS, logits_processor=waits)))
        while not engine.num_running:
            time.sleep(0.001)
        second = engine.submit(Request([2], SETTINGS))
        with pytest.raises(QueueFull, match="1 requests wait"):
            engine.submit(Request([3], SETTINGS))
        engine.cancel(second)
        third = engine.submit(Request([3], SETTINGS))  # has its place at once
        gate.set()
        assert second.result(60).finish_reason == "released" and second.output.tokens == []
        assert len(first.result(60).tokens) == 9
        assert len(third.result(60).tokens) == 9


def test_closing_waits_for_answers_or_ends_them():
    long = Request([1], GenerationConfig(50, ignore_eos=True))
    engine = Engine(batch(1))
    handles = [engine.submit(long) for _ in range(2)]
    engine.close()
    assert [len(each.output.tokens) for each in handles] == [50, 50]
    decoder = batch(1)
    engine = Engine(decoder)
    handles = [engine.submit(long) for _ in range(3)]
    engine.close(drain=False)
    assert {each.output.finish_reason for each in handles} == {"released"}
    assert decoder.num_free_rows == 1


def test_a_listener_hears_all_reports_of_a_step_at_once_and_its_error_is_its_own():
    heard = []

    def listen(reports):
        heard.append([(handle.tag, list(each.tokens), each.finish_reason)
                      for handle, each in reports])
        raise ValueError("of the listener")

    with Engine(batch(2), listener=listen) as engine:
        handles = [engine.submit(Request([4, 2], SETTINGS), tag) for tag in "ab"]
        wanted = [each.result().tokens for each in handles]
    for tag, tokens in zip("ab", wanted, strict=True):
        told = [each for step in heard for each in step if each[0] == tag]
        assert [token for _, some, _ in told for token in some] == tokens
        assert [reason for *_, reason in told] == [""] * (len(told) - 1) + ["length"]
    assert max(map(len, heard)) > 1
    with pytest.raises(UsageError, match="listener"):
        next(iter(handles[0]))


def test_an_idle_engine_uses_no_processor():
    with Engine(batch(1)) as engine:
        engine.submit(Request([1], SETTINGS)).result()
        before = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - before < 0.1


def test_a_step_looks_at_no_request_that_waits():
    looked = []

    class Watched(deque):
        def __iter__(self):
            looked.append(len(self))
            return super().__iter__()

    engine = Engine(batch(1))
    engine._waiting = Watched()
    handles = [engine.submit(Request([1], SETTINGS)) for _ in range(6)]
    assert [len(each.result(60).tokens) for each in handles] == [9] * 6
    assert looked == []
    handles = [engine.submit(Request([1], SETTINGS)) for _ in range(2)]
    engine.cancel(handles[1])
    engine.close()
    assert handles[1].output.finish_reason == "released" and looked
