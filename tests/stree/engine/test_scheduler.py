"""Plans follow from requests and reports alone, and the tokens follow from the plans."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest
from toys import mixed_requests, right_now_and_then, tiny_model

from stree import AdaptiveTrees, BatchDecoder, GenerationConfig, Request, TokenTree
from stree.batching.sequences import samples_of
from stree.common.errors import BadData, CannotWrite
from stree.engine.plan import Limits, Report
from stree.engine.plan_log import (
    Event,
    LoggedScheduler,
    read_plan_log,
    replay_by_scheduler,
    replay_by_worker,
)
from stree.engine.scheduler import Scheduler
from stree.engine.sequence import RunningSequence
from stree.engine.stop_rule import StopRule
from stree.generation import DecodingStats
from stree.tree_policy.policy import FixedTree
from stree.tree_policy.step_times import StepTimes
from stree.trees.token_tree import PLAIN, balanced

TREES = [TokenTree.chain(0), TokenTree.chain(3), TokenTree.paper(), balanced([3, 2])]


def test_a_scheduler_knows_no_torch():
    code = "import sys, stree.engine.plan_log; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True)


def strict_events(path: Path) -> list[Event]:
    """Return the events of a plan log, which other readers of JSON take, too."""
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    return list(read_plan_log(path))


def decode_at_random(decoder: BatchDecoder, requests: list[Request], seed: int) -> None:
    """Admit, step and release in any order; some requests are released before their ends.

    Answers that are kept are gone on with, as a conversation's next turn is.
    """
    draw, waiting, under_way = random.Random(seed), deque(requests), []
    while waiting or under_way:
        if waiting and decoder.num_free_rows and draw.random() < 0.5:
            under_way.append(decoder.admit(waiting.popleft()))
            continue
        ended = {report.row for report in decoder.step() if report.finish_reason}
        leaving = [row for row in under_way if row in ended or draw.random() < 0.02]
        for row in leaving:
            tokens, keep = decoder.scheduler.sequences[row].tokens, draw.random() < 0.5
            decoder.release(row, keep)
            under_way.remove(row)
            if keep and len(tokens) < 20:
                waiting.appendleft(Request([*tokens, 4], GenerationConfig(9, ignore_eos=True)))


@pytest.mark.quick(1)
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("adaptive", [False, True], ids=["own", "chosen"])
def test_the_same_requests_and_reports_give_the_same_plans(
    graphs, adaptive, request, monkeypatch, tmp_path
):
    if graphs:
        request.getfixturevalue("captured_on_cpu")
    monkeypatch.setattr("stree.batching.batch_decoder.LONGEST_CHUNK", 5)
    target = tiny_model(1)
    costs = StepTimes(seconds={
        (rows, tree): (1 + 0.25 * tree.num_nodes) / 1e3 for rows in (1, 2, 4)
        for tree in (PLAIN, TREES[1])
    }, catch_up=1e-3)
    tree = AdaptiveTrees([TREES[1]], costs=costs) if adaptive else TREES[2]
    requests = mixed_requests(9, [None] if adaptive else TREES, seed=3)

    def decoder():
        return BatchDecoder(
            target, right_now_and_then(target), tree, num_rows=3, max_length=64, max_nodes=13,
            num_prefixes=6, prompt_tokens_per_step=6,
        )

    played = decoder()
    played.log_plans(tmp_path / "plans.jsonl")
    decode_at_random(played, requests, seed=7)
    played.log_plans(None)
    events = strict_events(tmp_path / "plans.jsonl")
    fresh = AdaptiveTrees([TREES[1]], costs=costs) if adaptive else FixedTree(TREES[2])
    pairs = list(replay_by_scheduler(events, fresh))
    assert [plan for plan, _ in pairs] == [logged for _, logged in pairs]
    with pytest.raises(BadData, match="another plan than the log has"):
        list(replay_by_scheduler([each for each in events if each.call != "admit"], fresh))
    again = [plan for plan, _ in pairs if plan is not None]
    assert adaptive or any(plan.catch_ups for plan in again)
    assert len({tree for plan in again for tree in plan.trees.values()}) > 1
    assert any(read.load for plan in again for read in plan.reads)
    assert any(event.call == "release" for event in events)

    # The same plans give the same tokens: a worker needs to know nothing of requests
    reports = list(replay_by_worker(events, decoder().worker))
    assert len(reports) > 9
    for got, wanted in reports:
        assert (got.rows, got.firsts, got.saved) == (wanted.rows, wanted.firsts, wanted.saved)


def test_a_log_tells_of_failures_shared_prompts_and_settings(tmp_path, monkeypatch):
    target = tiny_model(1)
    decoder = BatchDecoder(target, num_rows=2, max_length=64, num_prefixes=2)
    decoder.limit_prefixes(10**9)
    decoder.log_plans(tmp_path / "plans.jsonl")
    settings = GenerationConfig(
        5, temperature=1.0, seed=0, num_return_sequences=3, logit_bias={4: -math.inf}, logprobs=1,
        logits_processor=lambda ids, scores: scores,
    )
    decoder.generate([Request([1, 2], settings, keep_prompt=True)])
    launch = decoder.worker.runner.launch
    monkeypatch.setattr(decoder.worker.runner, "launch", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        decoder.generate([[1, 2, 3]], max_new_tokens=3)
    monkeypatch.setattr(decoder.worker.runner, "launch", launch)
    decoder.generate([[1, 2, 3]], max_new_tokens=3)
    decoder.log_plans(None)
    decoder.generate([[5]], max_new_tokens=1)
    events = strict_events(tmp_path / "plans.jsonl")
    calls = {event.call for event in events}
    assert calls >= {"begin", "limit_prefixes", "abandon", "drop_shared"}
    pairs = list(replay_by_scheduler(events, FixedTree(PLAIN)))
    assert [plan for plan, _ in pairs] == [logged for _, logged in pairs]
    assert [event.sequence.prompt for event in events if event.sequence] == [[1, 2]] * 3 + [
        [1, 2, 3]
    ] * 2
    biases = [event.sequence.generation.logit_bias for event in events if event.sequence]
    assert biases[0] == ((4, -math.inf),)


@pytest.mark.parametrize("line", [b"no JSON", b'{"call": "begin", "fixed": 1}'])
def test_another_file_is_no_plan_log(line, tmp_path):
    (tmp_path / "plans.jsonl").write_bytes(line)
    with pytest.raises(BadData, match="no plan log: line 1"):
        list(read_plan_log(tmp_path / "plans.jsonl"))
    with pytest.raises(CannotWrite):
        LoggedScheduler(tmp_path / "none" / "plans.jsonl", Limits(1), FixedTree(PLAIN), PLAIN)


def sequence(prompt: list[int], **settings) -> RunningSequence:
    generation = GenerationConfig(**{"max_new_tokens": 4, **settings})
    return RunningSequence(
        prompt, generation, None, 0, StopRule(generation, (), None), DecodingStats()
    )


def test_prompts_are_read_in_chunks_beside_rows_that_decode():
    scheduler = Scheduler(Limits(2, chunk=4), FixedTree(PLAIN), PLAIN)
    scheduler.admit(sequence([1, 2, 3, 4, 5]))
    alone = scheduler.plan()
    assert [(read.start, read.stop, read.begins) for read in alone.reads] == [(0, 5, True)]
    scheduler.take(Report(alone.number, 1.0, firsts={0: (9, True, [])}))
    scheduler.admit(sequence(list(range(10))))
    reads = []
    for _ in range(3):
        plan = scheduler.plan()
        assert list(plan.trees) == [0]
        reads += [(read.row, read.start, read.stop) for read in plan.reads]
        scheduler.drop_useless()
    assert reads == [(1, 0, 4), (1, 4, 8), (1, 8, 10)]
    assert list(scheduler.plan().trees) == [0, 1]  # before the first token is reported


@pytest.mark.parametrize(("trees", "starts"), [
    ([PLAIN, PLAIN], [None, None]), ([PLAIN, TREES[1]], [0, 0]), ([TREES[1]], [0]),
], ids=["plain", "mixed", "drafted"])
def test_the_drafter_reads_no_prompt_while_no_request_wants_drafts(trees, starts):
    scheduler = Scheduler(Limits(2, has_drafter=True), FixedTree(TREES[1]), TREES[1])
    for tree in trees:
        scheduler.admit(each := sequence([1, 2, 3]))
        each.tree = tree
    assert [read.drafter_start for read in scheduler.plan().reads] == starts


def test_prompts_of_the_first_answers_are_timed_and_later_those_of_every_eighth():
    policy = AdaptiveTrees([TREES[1]], StepTimes({(1, PLAIN): 2.0, (1, TREES[1]): 1.0}))
    scheduler = Scheduler(Limits(1, chunk=2, has_drafter=True), policy, TREES[1])
    timed = []
    for _ in range(33):
        row = scheduler.admit(sequence([1, 2, 3]))
        reads = scheduler.plan().reads
        timed.append({read.is_timed for read in reads})
        scheduler.abandon()
        scheduler.release(row)
        policy.learn_answer()
    assert all(len(each) == 1 for each in timed)
    assert [number for number, each in enumerate(timed) if True in each] == [*range(16), 16, 24, 32]


def test_a_shared_prompt_is_saved_until_its_last_request_has_it_or_is_gone():
    scheduler = Scheduler(Limits(2), FixedTree(PLAIN), PLAIN)
    asked = GenerationConfig(2, temperature=1.0, seed=0, num_return_sequences=4)
    shared = next(each.shared for each in samples_of(Request([1, 2], asked)))
    for _ in range(2):
        each = sequence([1, 2])
        each.shared = shared
        scheduler.admit(each)
    first, second = scheduler.plan().reads
    assert first.save.prefix == second.load and first.stop == second.start == 2
    assert not scheduler.prefixes.drops
    for row in (0, 1):
        scheduler.release(row)
    scheduler.drop_useless()
    del each, shared  # two requests are never admitted
    assert scheduler.prefixes.drops == [second.load]


def test_nothing_is_kept_of_a_plan_that_failed():
    """Its copies may not have been made: another row of the prompt reads it."""
    scheduler = Scheduler(Limits(3, num_prefixes=2), FixedTree(PLAIN), PLAIN)
    asked = GenerationConfig(2, temperature=1.0, seed=0, num_return_sequences=3)
    shared = next(each.shared for each in samples_of(Request([1, 2], asked)))
    for _ in range(2):
        each = sequence([1, 2])
        each.shared, each.num_to_keep = shared, 2
        scheduler.admit(each)
    failed = scheduler.plan()
    scheduler.abandon(failed)
    assert {each.finish_reason for each in scheduler.sequences.values()} == {"error"}
    each = sequence([1, 2, 3])
    each.shared = shared
    scheduler.admit(each)
    (read,) = scheduler.plan().reads
    assert (read.load, read.start, read.stop) == (None, 0, 3)


def test_the_next_plan_stops_and_drops_in_place_of_one_that_failed():
    scheduler = Scheduler(Limits(2), FixedTree(PLAIN), PLAIN)
    scheduler.release(scheduler.admit(sequence([1, 2])))
    scheduler.prefixes.drops.append(7)
    failed = scheduler.plan_changes()
    scheduler.abandon(failed)
    again = scheduler.plan_changes()
    assert (again.stops, again.drops) == (failed.stops, failed.drops) == ((0,), (7,))
