"""Plans follow from requests and reports alone, and the tokens follow from the plans."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import deque

import pytest
from toys import mixed_requests, right_now_and_then, tiny_model

from stree import AdaptiveTrees, BatchDecoder, GenerationConfig, Request, TokenTree
from stree.batching.sequences import samples_of
from stree.engine.plan import Limits, Report, StepPlan
from stree.engine.scheduler import Scheduler
from stree.engine.sequence import RunningSequence
from stree.engine.stop_rule import StopRule
from stree.generation import DecodingStats
from stree.tree_policy.policy import FixedTree
from stree.tree_policy.step_times import StepTimes
from stree.trees.token_tree import PLAIN, balanced

TREES = [TokenTree.chain(0), TokenTree.chain(3), TokenTree.paper(), balanced([3, 2])]


def test_a_scheduler_knows_no_torch():
    code = "import sys, stree.engine.scheduler; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True)


class Journal:
    """What a decoder's scheduler was told, and what it and the worker answered."""

    def __init__(self, decoder: BatchDecoder) -> None:
        self.told: list[tuple] = []
        self.work: list[tuple] = []  # the worker's calls: method, argument, result
        scheduler, worker = decoder.scheduler, decoder.worker
        for name in ("execute", "report", "drop"):
            setattr(worker, name, self._working(name, getattr(worker, name)))
        for name in ("admit", "release", "drop_useless", "plan", "plan_changes", "take"):
            setattr(scheduler, name, self._noting(name, getattr(scheduler, name)))

    @property
    def plans(self) -> list[StepPlan]:
        return [arguments[0] for name, arguments, _ in self.work if name == "execute"]

    def _working(self, name, method):
        def noted(*arguments):
            result = method(*arguments)
            self.work.append((name, arguments, result))
            return result

        return noted

    def _noting(self, name, method):
        def noted(*arguments):
            if name == "admit":
                arguments[0].since = float(len(self.told))
                self.told.append((name, copy_of(arguments[0])))
            else:
                self.told.append((name, *arguments))
            return method(*arguments)

        return noted

    def replay(self, scheduler: Scheduler) -> list[StepPlan]:
        """Tell another scheduler the same, reports as JSON has them; return its plans."""
        plans = []
        for name, *arguments in self.told:
            if name == "take":
                (report,) = arguments
                arguments = [Report.from_dict(json.loads(json.dumps(report.to_dict())))]
            elif name == "admit":
                arguments = [copy_of(arguments[0])]
            given = getattr(scheduler, name)(*arguments)
            plans += [given] if isinstance(given, StepPlan) else []
        return plans


def copy_of(sequence: RunningSequence) -> RunningSequence:
    stop = StopRule(sequence.generation, (), None)
    stop.eos_ids = sequence.stop.eos_ids
    stats = DecodingStats(tree_max_depth=sequence.stats.tree_max_depth)
    return RunningSequence(
        sequence.prompt, sequence.generation, sequence.tree, sequence.num_to_keep, stop, stats,
        since=sequence.since,
    )


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


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("adaptive", [False, True], ids=["own", "chosen"])
def test_the_same_requests_and_reports_give_the_same_plans(graphs, adaptive, request, monkeypatch):
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
    journal = Journal(played)
    decode_at_random(played, requests, seed=7)
    scheduler = played.scheduler
    fresh = AdaptiveTrees([TREES[1]], costs=costs) if adaptive else FixedTree(TREES[2])
    again = journal.replay(Scheduler(scheduler.limits, fresh, scheduler.tree))
    assert [each.to_dict() for each in again] == [each.to_dict() for each in journal.plans]
    assert adaptive or any(plan.catch_ups for plan in again)
    assert len({tree for plan in again for tree in plan.trees.values()}) > 1
    assert any(read.load for plan in again for read in plan.reads)
    json.dumps([each.to_dict() for each in again])

    # The same plans give the same tokens: a worker needs to know nothing of requests
    other = decoder().worker
    for name, arguments, wanted in journal.work:
        got = getattr(other, name)(*arguments)
        if name == "report":
            assert (got.rows, got.firsts, got.saved) == (wanted.rows, wanted.firsts, wanted.saved)


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
