"""Each of many sequences gets what it would get alone, whatever shares the batch."""

import random
from dataclasses import replace

import pytest
import torch
from eager import assert_same
from lanes import quick_first
from toys import right_now_and_then, tiny_model

from stree import Decoder, GenerationConfig, TokenTree
from stree.batching.batch_decoder import BatchDecoder
from stree.batching.sequences import Request, samples_of
from stree.common.errors import InvariantBroken, UsageError
from stree.drafters.ngram import NGram
from stree.tree_policy.adaptive import AdaptiveTrees
from stree.trees.token_tree import balanced

TREES = [TokenTree.chain(0), TokenTree.chain(3), TokenTree.paper(), TokenTree((-1, 0, 0)),
         balanced([3, 2]), TokenTree((-1, 0, 1, 0, 2, 3, 3, 4, 0, 7))]


class Letters:
    """Decodes token ids to letters, so that stop strings can be met."""

    def decode(self, tokens, skip_special_tokens=False):
        return "".join(chr(ord("a") + token % 26) for token in tokens)

    def convert_ids_to_tokens(self, token):
        return self.decode([token])


def random_requests(count: int, seed: int, sampled: bool) -> list[Request]:
    rng = random.Random(seed)
    requests = []
    for _ in range(count):
        temperature = rng.choice([0.3, 0.7, 1.0, 1.5]) if sampled and rng.random() < 0.7 else 0.0
        generation = GenerationConfig(
            max_new_tokens=rng.randint(1, 24), temperature=temperature,
            top_k=rng.choice([0, 0, 5, 20]), top_p=rng.choice([1.0, 1.0, 0.8]),
            seed=rng.randrange(2**40), stop_strings=rng.choice([(), (), ("ab", "q")]),
        )
        prompt = [rng.randrange(61) for _ in range(rng.randint(1, 30))]
        requests.append(Request(prompt, generation, rng.choice(TREES)))
    return requests


def serve(decoder: BatchDecoder, requests: list[Request], seed: int) -> list:
    """Serve requests that arrive at random times; return what their releases return."""
    rng = random.Random(seed)
    outputs, waiting, served = {}, list(range(len(requests)))[::-1], {}
    while waiting or served:
        while waiting and decoder.num_free_rows and rng.random() < 0.6:
            index = waiting.pop()
            served[decoder.admit(requests[index])] = index
        for report in decoder.step():
            assert report.error is None
            if report.finish_reason:
                outputs[served.pop(report.row)] = decoder.release(report.row)
    return [outputs[index] for index in range(len(requests))]


@pytest.mark.parametrize("count", [8, pytest.param(24, marks=pytest.mark.costly)])
def test_a_request_gets_the_same_tokens_alone_and_in_any_company(count):
    target = tiny_model(1)
    requests = random_requests(count, 2, sampled=True)

    def make(num_rows):
        return BatchDecoder(target, right_now_and_then(target), num_rows=num_rows, max_length=128,
                            tokenizer=Letters())

    alone = make(1).generate(requests)
    for num_rows, order in ((3, 5), (9, 6)):
        assert_same(serve(make(num_rows), requests, seed=order), alone)


class AnyTree(AdaptiveTrees):
    """Chooses another tree each step."""

    def choose(self, num_rows):
        self.random = getattr(self, "random", random.Random(3))
        return self.random.choice(self.trees)


@pytest.mark.parametrize(
    ("count", "num_rows"),
    quick_first([(10, 4)], [(200, 32)], [(24, 9)]),
)
def test_mixed_requests_with_another_tree_each_row_and_step(count, num_rows):
    """Requests of all settings and arrival times get the tokens of plain decoding."""
    target = tiny_model(1)
    requests = random_requests(count, 4, sampled=True)
    for at in range(0, count, 2):  # every other one leaves its trees to the decoder
        requests[at] = replace(requests[at], tree=None)
    decoder = BatchDecoder(
        target, right_now_and_then(target), AnyTree(TREES[1:]),
        num_rows=num_rows, max_length=128, max_nodes=16, tokenizer=Letters(),
    )
    plain = Decoder(target, max_length=128, tokenizer=Letters())
    accepted = 0
    for request, output in zip(requests, serve(decoder, requests, seed=7), strict=True):
        wanted = plain.generate(request.prompt_ids, request.generation)
        assert (output.tokens, output.finish_reason) == (wanted.tokens, wanted.finish_reason)
        accepted += sum(output.stats.accepted_per_call)
    assert accepted > count


def test_rows_are_clean_when_they_change_hands():
    """A sequence does not see what its row held before, NaN included."""
    target = tiny_model(1)
    decoder = BatchDecoder(target, right_now_and_then(target), num_rows=2, max_length=64)
    request = Request([3, 1, 4], GenerationConfig(12))
    wanted = decoder.generate([request, request])
    for cache in (decoder.cache, decoder.drafter.cache):
        for layer in cache.layers:
            for name in ("keys", "values", "state", "history"):
                if hasattr(layer, name):
                    getattr(layer, name).fill_(torch.nan)
    again = decoder.generate([request, request])
    assert [each.tokens for each in again] == [each.tokens for each in wanted]


def test_a_row_with_bad_logits_ends_alone():
    target = tiny_model(1)
    with torch.no_grad():
        target.model.embed_tokens.weight[60] = torch.nan
        target.lm_head.weight[60] = 0  # which no other row chooses then
    generation = GenerationConfig(20)
    good, bad = Request([1, 2, 3], generation), Request([60, 2], generation)
    alone = BatchDecoder(target, num_rows=1, max_length=64).generate([good])[0]
    decoder = BatchDecoder(target, num_rows=3, max_length=64)
    rows = [decoder.admit(each) for each in (good, bad, good)]
    errors, done = {}, set()
    while len(done) < 3:
        for report in decoder.step():
            if report.error is not None:
                errors[report.row] = report.error
            if report.finish_reason:
                done.add(report.row)
    assert list(errors) == [rows[1]] and isinstance(errors[rows[1]], InvariantBroken)
    assert decoder.release(rows[1]).finish_reason == "error"
    for row in (rows[0], rows[2]):
        assert decoder.release(row).tokens == alone.tokens


@pytest.mark.costly
def test_the_forest_stays_while_requests_of_one_tree_come_and_go(captured_on_cpu, monkeypatch):
    """Building one takes the host longer than a step of a small model takes the device."""
    target, tree, launched = tiny_model(1), TREES[-1], []
    decoder = BatchDecoder(
        target, right_now_and_then(target), tree, num_rows=4, max_length=128, tokenizer=Letters()
    )
    launch = decoder.worker.runner.launch
    monkeypatch.setattr(
        decoder.worker.runner, "launch",
        lambda inputs, mark: (launched.append(inputs.tree_batch), launch(inputs, mark)),
    )
    requests = [replace(each, tree=None) for each in random_requests(9, 4, sampled=False)]
    served = serve(decoder, requests, seed=5)
    plain = BatchDecoder(target, num_rows=1, max_length=128, tokenizer=Letters()).generate(requests)
    assert [each.tokens for each in served] == [each.tokens for each in plain]
    assert {tree_batch.trees for tree_batch in launched} <= {(tree,), (tree,) * 2, (tree,) * 4}
    assert len(set(map(id, launched))) <= 3


def test_long_prompts_are_read_in_pieces_between_the_steps_of_others(monkeypatch):
    monkeypatch.setattr("stree.batching.batch_decoder.LONGEST_CHUNK", 8)
    target = tiny_model(1)
    decoder = BatchDecoder(target, right_now_and_then(target), num_rows=2, max_length=128)
    prompt = [(7 * i) % 61 for i in range(40)]
    short = decoder.admit(Request([5], GenerationConfig(30)))
    decoder.step()
    long = decoder.admit(Request(prompt, GenerationConfig(6)))
    seen = [{report.row for report in decoder.step()} for _ in range(5)]
    assert seen[:4] == [{short}] * 4 and seen[4] == {short, long}
    while not all(sequence.finish_reason for sequence in decoder.scheduler.sequences.values()):
        decoder.step()
    wanted = Decoder(target, max_length=128).generate(prompt, GenerationConfig(6))
    assert decoder.release(long).tokens == wanted.tokens


def test_an_unfinished_request_can_be_released():
    decoder = BatchDecoder(tiny_model(1), num_rows=1, max_length=64)
    row = decoder.admit(Request([1, 2], GenerationConfig(30)))
    for _ in range(3):
        decoder.step()
    output = decoder.release(row)
    assert output.finish_reason == "released" and len(output.tokens) == 3
    assert decoder.num_free_rows == 1


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([]), "prompt is empty"),
        (Request([1], GenerationConfig(200)), "max_length"),
        (Request([1], tree=TokenTree.chain(9)), "made for 4"),
        (Request([99]), "the prompt has the token 99, wanted 0 to 60"),
    ],
)
def test_what_cannot_be_served_is_refused_at_admission(request_, message):
    target = tiny_model(1)
    decoder = BatchDecoder(target, right_now_and_then(target), TokenTree.chain(3), num_rows=1,
                           max_length=300 if not message.startswith("max") else 64)
    with pytest.raises(UsageError, match=message):
        decoder.admit(request_)
    decoder.admit(Request([1], GenerationConfig(2)))
    with pytest.raises(UsageError, match=r"all rows .1. are taken"):
        decoder.admit(Request([1], GenerationConfig(2)))


def test_a_refused_request_leaves_the_others_nothing_behind():
    decoder = BatchDecoder(tiny_model(1), num_rows=2, max_length=64)
    good = Request([1, 2], GenerationConfig(3))
    for bad in (Request([], GenerationConfig(3)), [1, 2]):
        with pytest.raises(UsageError, match=r"prompt is empty|wanted stree\.Request"):
            decoder.generate([good, bad])
        assert decoder.num_free_rows == 2
    outputs = decoder.generate([good] * 3)
    assert len({tuple(each.tokens) for each in outputs}) == 1
    decoder.admit(good)
    with pytest.raises(UsageError, match=r"rows are taken .1."):
        decoder.generate([good])


@pytest.mark.parametrize("num_rows", [0, 2.5, "2"])
def test_rows_are_a_whole_number(num_rows):
    with pytest.raises(UsageError, match="num_rows is"):
        BatchDecoder(tiny_model(1), num_rows=num_rows)


def test_trees_go_by_their_names_and_what_cannot_be_is_refused_when_the_decoder_is_made():
    target, drafter = tiny_model(1, torch.float32), tiny_model(1, torch.float32, attn_layers=())
    request = Request([1, 2, 3], GenerationConfig(8), tree="chain-2")
    decoder = BatchDecoder(target, drafter, "paper", num_rows=1, max_length=64)
    assert Decoder(target, drafter, "paper", max_length=64).tree == TokenTree.paper()
    wanted = BatchDecoder(target, num_rows=1, max_length=64).generate(
        [Request([1, 2, 3], GenerationConfig(8))]
    )
    assert decoder.generate([request])[0].tokens == wanted[0].tokens
    assert AdaptiveTrees(["chain-2"]).trees[1] == TokenTree.chain(2)
    for wrong, message in (
        (dict(tree=AdaptiveTrees(["chain-2"])), "chain-2.* needs a drafter"),
        (dict(tree=3), "a tree is 3, wanted a TokenTree"),
        (dict(verifier=3), "verifier is 3, wanted one of coupled"),
        (dict(drafter="x"), "a drafter is 'x', wanted a model"),
    ):
        with pytest.raises(UsageError, match=message):
            BatchDecoder(target, **wrong, max_length=64)
    with pytest.raises(UsageError, match="a tree is 3"):
        decoder.admit(Request([1], tree=3))


def test_buffers_are_no_longer_than_the_target_s_positions():
    target = tiny_model(1, torch.float32)
    decoder = BatchDecoder(target, num_rows=1, max_length=10**9)
    assert decoder.max_length == target.config.num_positions + 2


def test_what_is_there_is_not_made_ready_again(captured_on_cpu, monkeypatch):
    """A request makes ready what reading its own prompt needs, and how a row begins once."""
    target = tiny_model(1)
    decoder = BatchDecoder(target, num_rows=4, max_length=64)
    prepared, begun = [], []
    worker = decoder.worker
    prepare, begin = worker.prepare_reads, worker.begin
    monkeypatch.setattr(
        worker, "prepare_reads",
        lambda row, *other, **more: prepared.append(row) or prepare(row, *other, **more),
    )
    monkeypatch.setattr(
        worker, "begin", lambda row, *other: begun.append(row) or begin(row, *other)
    )
    generations = [GenerationConfig(5, temperature=t) for t in (0.0, 0.0, 1.0, 1.0)]
    for number, generation in enumerate(generations):
        decoder.prepare_prefill(decoder.admit(Request([1, 2, number], generation)))
    assert prepared == [0, 1, 2, 3]
    assert begun == [0, 2]  # with and without sampling


def test_a_row_that_is_free_is_named():
    decoder = BatchDecoder(tiny_model(1), num_rows=2, max_length=32)
    row = decoder.admit(Request([1, 2], GenerationConfig(4)))
    decoder.release(row)
    for door in (decoder.release, decoder.tokens_of):
        for free in (row, 1, 7):
            with pytest.raises(UsageError, match=f"row {free} is free, wanted one that is taken"):
                door(free)
    assert decoder.num_free_rows == 2


DRAFTERS = {
    "plain": lambda target: None,
    "model": right_now_and_then,
    "n-grams": lambda target: NGram(4, model=right_now_and_then(target)),
}


@pytest.mark.costly
@pytest.mark.parametrize(
    ("kind", "prefixes"),
    quick_first(
        [("plain", 0), ("model", 2), ("n-grams", 0)],
        [(kind, prefixes) for kind in DRAFTERS for prefixes in (0, 2)],
    ),
)
def test_several_answers_to_a_prompt_are_those_of_separate_requests(kind, prefixes, monkeypatch):
    """The target reads each prompt once, whichever decoder serves its answers."""
    target = tiny_model(1)
    drafter = DRAFTERS[kind](target)
    tree = None if drafter is None else balanced([2, 1])
    options = dict(max_length=96, num_prefixes=prefixes)
    asked = GenerationConfig(12, temperature=1.0, seed=5, num_return_sequences=4)
    prompts = [[1, 2, 3, 4, 5], [7, 8]]
    wanted = [
        Decoder(target, drafter, tree, **options).generate(prompt, each)
        for prompt in prompts
        for each in asked.samples()
    ]
    assert len({tuple(each.tokens) for each in wanted[:4]}) == 4
    alone = Decoder(target, drafter, tree, **options)
    assert wanted[0].tokens == (
        alone.generate(prompts[0], replace(asked, num_return_sequences=1)).tokens
    )
    for rows in (1, 2, 3, 8):
        decoder = BatchDecoder(target, drafter, tree, num_rows=rows, **options)
        read, of = [], decoder.worker.read
        monkeypatch.setattr(
            decoder.worker, "read",
            lambda each, read=read, of=of: read.append(each.stop - each.start) or of(each),
        )
        got = decoder.generate([Request(prompt, asked) for prompt in prompts])
        assert [each.tokens for each in got] == [each.tokens for each in wanted]
        assert [each.seed for each in got] == [each.seed for each in wanted]
        assert sorted(filter(None, read)) == [2, 5]
        assert [each.stats.num_reused_tokens for each in got].count(0) == 2
    door = Decoder(target, drafter, tree, **options)
    got = door.generate(prompts, asked)
    assert [each.tokens for each in got] == [each.tokens for each in wanted]
    got = door.generate(prompts[0], asked, num_return_sequences=2)
    assert [each.tokens for each in got] == [each.tokens for each in wanted[:2]]


def test_a_prompt_of_several_answers_is_read_although_its_reader_leaves(monkeypatch):
    monkeypatch.setattr("stree.batching.batch_decoder.LONGEST_CHUNK", 4)
    target = tiny_model(1)
    decoder = BatchDecoder(target, num_rows=4, max_length=96)
    prompt = list(range(1, 20))
    asked = GenerationConfig(12, temperature=1.0, seed=5, num_return_sequences=3)
    busy = decoder.admit(Request([1], GenerationConfig(60, ignore_eos=True)))
    decoder.step()  # from now on prompts are read in chunks
    first, *others = samples_of(Request(prompt, asked))
    left = decoder.admit(first)
    rows = [decoder.admit(each) for each in others]
    decoder.step()
    assert decoder.release(left).tokens == []
    done = {}
    while len(done) < 2:
        done |= {each.row: each for each in decoder.step() if each.finish_reason}
    decoder.release(busy)
    for row, each in zip(rows, asked.samples()[1:], strict=True):
        wanted = Decoder(target, max_length=96).generate(prompt, each)
        assert decoder.release(row).tokens == wanted.tokens


def test_several_answers_are_refused_where_there_is_one():
    with pytest.raises(UsageError, match="num_return_sequences is 3 and temperature 0"):
        GenerationConfig(num_return_sequences=3)
    several = GenerationConfig(4, temperature=1.0, num_return_sequences=2)
    with pytest.raises(UsageError, match="num_return_sequences is 2, and a row has one answer"):
        BatchDecoder(tiny_model(1), max_length=32).admit(Request([1], several))
    with pytest.raises(UsageError, match="asked for 2 answers: a streamer shows one"):
        Decoder(tiny_model(1)).generate([1], several, streamer=Quiet())


class Quiet:
    def put(self, tokens) -> None: ...

    def end(self) -> None: ...


def test_a_step_reads_no_more_prompt_tokens_than_it_may(monkeypatch):
    monkeypatch.setattr("stree.batching.batch_decoder.LONGEST_CHUNK", 4)
    target = tiny_model(1)
    prompts = [[each] * 9 for each in range(1, 6)]
    wanted = [
        Decoder(target, max_length=96).generate(each, GenerationConfig(4)) for each in prompts
    ]
    for limit, most in ((None, 20), (8, 11), (1, 4)):
        decoder = BatchDecoder(target, num_rows=6, max_length=96, prompt_tokens_per_step=limit)
        decoder.admit(Request([1], GenerationConfig(60, ignore_eos=True)))
        decoder.step()
        rows = [decoder.admit(Request(each, GenerationConfig(4))) for each in prompts]
        read, done = [], set()
        while len(done) < len(rows):
            sequences = decoder.scheduler.sequences.values()
            before = sum(each.num_read for each in sequences)
            reports = decoder.step()
            read.append(sum(each.num_read for each in sequences) - before)
            done |= {each.row for each in reports if each.finish_reason}
        assert 4 <= max(read) <= most
        assert [decoder.release(row).tokens for row in rows] == [each.tokens for each in wanted]


def test_rows_that_wait_for_a_shared_prompt_use_none_of_the_budget(monkeypatch):
    monkeypatch.setattr("stree.batching.batch_decoder.LONGEST_CHUNK", 4)
    decoder = BatchDecoder(tiny_model(1), num_rows=6, max_length=96, prompt_tokens_per_step=8)
    decoder.admit(Request([1], GenerationConfig(60, ignore_eos=True)))
    decoder.step()
    for each in samples_of(Request([2] * 12, GenerationConfig(4, 1.0, num_return_sequences=4))):
        decoder.admit(each)
    last = decoder.admit(Request([3] * 12, GenerationConfig(4)))
    decoder.step()
    assert decoder.scheduler.sequences[last].num_read == 4


def test_a_warm_up_leaves_rows_and_prefixes_free():
    decoder = BatchDecoder(tiny_model(1), num_rows=3, max_length=64, num_prefixes=2)
    decoder.warm_up(Request([1, 2, 3], GenerationConfig(4), keep_prompt=True))
    assert decoder.num_free_rows == 3 and decoder.num_reusable([1, 2, 3, 4, 5, 6, 7, 8]) == 0
