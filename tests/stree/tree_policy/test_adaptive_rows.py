"""Choose a tree for many rows: the best depends on how many there are and what they pay."""

import itertools
import random
from functools import partial

import pytest
from lanes import quick_first
from simulated_trees import CHAIN, WIDE, costs, decoder_of, scheduled, simulated
from toys import right_now_and_then, tiny_model

from stree import Decoder, GenerationConfig, Request, TokenTree
from stree.common.errors import UsageError
from stree.tree_policy.adaptive import PLAIN, AdaptiveTrees
from stree.tree_policy.step_times import StepTimes
from stree.trees.token_tree import BeamTree, balanced


def test_costs_of_other_numbers_of_rows():
    table = StepTimes({(1, CHAIN): 1.0, (4, CHAIN): 3.0})
    assert [table.of(rows, CHAIN) for rows in (1, 2, 4, 9)] == [1.0, 3.0, 3.0, 3.0]
    with pytest.raises(UsageError, match="no cost of"):
        table.of(1, WIDE)


DRAFTS = [balanced([count, 1, 1, 1], f"{count} drafts") for count in (1, 2, 4, 8)]


def staircase(num_rows: int, tree: TokenTree, free: int = 36) -> float:
    """Return a step's time: up to `free` rows of a product take what one takes."""
    return max(1.0, num_rows * tree.num_nodes / free) + 0.004 * tree.num_nodes


def apportioning() -> AdaptiveTrees:
    """Return a policy that knows the acceptance of 1, 2, 4 and 8 drafts of four tokens."""
    counts = (1, 2, 4, 8, 16, 32, 64)
    table = {(rows, tree): staircase(rows, tree) for rows in counts for tree in (PLAIN, *DRAFTS)}
    policy = AdaptiveTrees(DRAFTS, StepTimes(table))
    simulated(policy, 1, 2000, [0.5, 0.15, 0.1, 0.08, 0.04, 0.03, 0.02, 0.02])
    return policy


def served(
    policy: AdaptiveTrees | None, table: StepTimes, rows: int, length: int,
    reading_s: float, steps: int,
):
    """Return tokens a second of rows that get another request after `length` tokens.

    A drafter reads for `reading_s` when it first drafts for a request. None decodes plainly.
    """
    rng = random.Random(0)
    seconds, tokens, left, read = 0.0, 0, [0] * rows, [-1.0] * rows
    for _ in range(steps):
        tree = PLAIN if policy is None else policy.choose(rows)
        is_observed, paths = policy is not None and policy.observes(rows), []
        for row in range(rows):
            if left[row] <= 0:
                if read[row] >= 0 and policy is not None:
                    policy.learn_answer(read[row] or None)
                left[row], read[row] = length, 0.0
                if policy is not None and policy.drafts:
                    read[row] = reading_s
            if tree != PLAIN and not read[row]:
                read[row] = reading_s
                seconds += reading_s
            elif left[row] == length and read[row]:
                seconds += reading_s
            end = 0
            while end < tree.max_depth and rng.random() < 0.7:
                end += 1
            paths.append(range(end + 1))
            left[row] -= end + 1
            tokens += end + 1
            if policy is not None:
                policy.learn_tokens(end + 1)
        if is_observed and tree != PLAIN:
            policy.learn_paths(tree, paths)
        seconds += table.of(rows, tree)
    return tokens / seconds


@pytest.mark.parametrize(
    ("rows", "length", "reading_s", "measured"),
    quick_first(
        [*itertools.product([1, 16], [8, 64], [0.1, 5.0], [1.0]), (16, 512, 1.0, 0.05),
         (16, 64, 1.0, 20.0), (1, 8, 5.0, 0.05)],
        [*itertools.product([1, 16], [8, 64, 512], [0.1, 1.0, 5.0], [0.05, 1.0, 20.0])],
    ),
)
def test_what_drafters_read_counts(rows, length, reading_s, measured):
    """A chain is taken where it pays for reading prompts, too, whatever was measured before."""
    table = costs(1.0, 1.4, 9.0, rows)
    table.catch_up = reading_s * measured
    steps = 40 * length + 4000
    plain = served(None, table, rows, length, reading_s, steps)
    chosen = served(AdaptiveTrees([CHAIN], table), table, rows, length, reading_s, steps)
    yields = 1 + 0.7 + 0.7**2
    drafting = yields / (1.4 + rows * reading_s * yields / length) * rows
    assert chosen > 0.975 * max(plain, drafting)


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_drafting_begins_when_it_has_paid_for_every_row_to_catch_up(rows):
    """Plain steps that lose half a second each pay for catch-ups of three seconds a row."""
    table = costs(1.0, 1.0, 9.0, rows)
    policy = AdaptiveTrees([CHAIN], table)
    for _ in range(100):
        policy.learn_paths(CHAIN, [[0, 1]])  # two tokens a step, as fast as one
    assert policy.choose(rows) == CHAIN
    table.catch_up, policy.state.current, policy.state.is_settled = 3.0, PLAIN, False
    policy.state.speeds.rest_on(table)
    num_plain = 0
    while policy.choose(rows) == PLAIN:
        num_plain += 1
    assert num_plain + 1 == pytest.approx(rows * 3.0 / 0.5, rel=0.05)


def test_few_rows_get_more_drafts():
    """Few sequences get the drafts that many would not leave room for."""
    policy = apportioning()
    for rows, tree in ((64, PLAIN), (16, PLAIN), (8, DRAFTS[0]), (4, DRAFTS[1]), (2, DRAFTS[2])):
        assert policy.choose(rows) == tree
    assert policy.choose(1) in DRAFTS[2:]  # these two are nearly as good
    assert policy.choose(4) == DRAFTS[1] and policy.choose(64) == PLAIN  # and back


def test_trees_widen_as_rows_come_free():
    policy, asked = apportioning(), {}
    choose = policy.choose

    def listening(num_rows):
        tree = choose(num_rows)
        asked.setdefault(num_rows, []).append(tree.num_nodes)
        return tree

    policy.choose, policy.learn_paths = listening, lambda tree, paths: None
    decoder = decoder_of(policy, 8, seed=2, max_length=128, max_nodes=33)
    lengths = [40, 40, 20, 20, 4, 4, 4, 4]  # rows come free from the last on
    served = [Request([1, 2, n], GenerationConfig(length)) for n, length in enumerate(lengths)]
    outputs = decoder.generate(served)
    assert [len(each.tokens) for each in outputs] == lengths
    assert set(asked[8]) == {5} and set(asked[4]) == {9} and set(asked[2]) == {17}


def test_idle_rows_in_between_count(monkeypatch):
    """A step has all rows up to the last that is taken, and takes as long."""
    asked, policy = [], apportioning()
    monkeypatch.setattr(
        policy, "choose", lambda num_rows: asked.append(num_rows) or DRAFTS[0]
    )
    decoder = decoder_of(policy, 8, seed=2, max_nodes=33)
    rows = [decoder.admit(Request([1, n], GenerationConfig(20))) for n in range(8)]
    decoder.step()  # which reads the prompts
    decoder.step()
    for row in rows[:7]:
        decoder.release(row)
    decoder.step()
    assert asked == [8, 8, 8]


def test_the_next_tree_is_chosen_while_a_step_runs(monkeypatch):
    """Only an answer's first two steps are chosen when they are launched."""
    target, order = tiny_model(2), []
    policy = apportioning()
    decoder = Decoder(target, right_now_and_then(target), policy, max_length=96)
    runner = decoder.batch.worker.runner
    for who, name in ((policy, "choose"), (runner, "launch"), (runner, "collect")):
        told = partial(lambda call, name, *given: (order.append(name), call(*given))[1],
                       getattr(who, name), name)
        monkeypatch.setattr(who, name, told)
    decoder.generate([1, 2, 3], GenerationConfig(30))
    assert order[:3] == ["choose", "launch", "choose"]
    again = order[3:]
    assert len(again) > 15 and again == (["collect", "launch", "choose"] * len(again))[: len(again)]
    del order[:]
    decoder.generate([1, 2, 3], GenerationConfig(30))
    assert order[0] == "launch"  # chosen while the last answer's last step ran


def test_costs_that_are_measured_anew_count_from_the_next_step_on(monkeypatch):
    decoder = decoder_of(apportioning(), 8, seed=2, max_nodes=33)
    decoder.generate([Request([1, 2], GenerationConfig(10))])
    asked = []
    choose = decoder.tree_policy.choose
    monkeypatch.setattr(
        decoder.tree_policy, "choose", lambda rows: (asked.append(rows), choose(rows))[1]
    )
    decoder.measure_step_times(num_steps=1, counts=[1])
    assert decoder.admit(Request([1, 2], GenerationConfig(10))) == 0
    decoder.step()
    assert not asked  # the prompt is read
    decoder.step()
    assert asked == [1, 1]  # this step's, and the next one's


@pytest.mark.parametrize("grows", [False, True])
def test_many_rows_that_accept_alike_are_no_reason_to_change(grows):
    """A tree that pays by 7 % is kept though all 64 rows accept it in every other step only."""
    tree = BeamTree.of(2, 1, 3) if grows else TokenTree.chain(1)
    policy = AdaptiveTrees([tree], StepTimes({(64, PLAIN): 1.0, (64, tree): 1.4}))
    used = []
    for step in range(200):
        used.append(policy.choose(64))
        policy.observes(64)
        policy.learn_paths(used[-1], [[0, 1][: 1 + step % 2]] * 64)
    assert set(used) == {tree}


def test_all_rows_pay_for_their_prompts():
    policy = AdaptiveTrees([CHAIN], costs(1.0, 1.5, 9.0))
    policy.learn_tokens(10)
    policy.learn_answer(prefill_s=2.0)
    assert policy.speeds.with_tokens(4, CHAIN, 2.0) == pytest.approx(
        2.0 / (1.5 + 4 * 2.0 * 2.0 / 10)
    )


def test_observations_of_many_rows_fade_as_one_step():
    policy = AdaptiveTrees([CHAIN], costs(1.0, 1.1, 9.0, rows=4))
    policy.choose(4)
    for _ in range(4):
        policy.learn_paths(CHAIN, [[0, 1]])
    assert policy.state.acceptance.rates._weight == pytest.approx(1 / 0.99)


def test_a_tree_that_was_chosen_for_other_rows_is_chosen_again():
    policy = AdaptiveTrees([CHAIN], costs(1.0, 1.1, 9.0))
    decoder = decoder_of(policy, 2)
    chosen, choose, launch = [], policy.choose, decoder.worker.runner.launch
    policy.choose = lambda num_rows: chosen.append(num_rows) or choose(num_rows)
    decoder.worker.runner.launch = lambda inputs, mark: (
        launched.append((chosen[-1], len(inputs.rows.active))) or launch(inputs, mark)
    )
    launched: list = []
    for each in range(2):
        decoder.admit(Request([1 + each], GenerationConfig(20)))
        for _ in range(3):
            decoder.step()
    assert {took for _, took in launched} == {1, 2}
    assert all(told == took for told, took in launched)


@pytest.mark.parametrize(("rows", "every"), [(1, 1), (7, 1), (8, 2), (16, 4), (64, 4)])
def test_of_many_rows_one_step_of_several_is_observed(rows, every):
    policy = AdaptiveTrees([CHAIN], costs(1.0, 1.4, 9.0, rows))
    assert policy.observes(rows) and policy.observes(rows)  # while nothing is known
    takes = StepTimes({(rows, PLAIN): 1.0, (rows, CHAIN): 1.4})
    simulated(policy, rows, 400, [0.7], takes=takes)
    assert policy.state.current == CHAIN
    seen = []
    for _ in range(320):
        policy.choose(rows)
        if policy.state.is_settled:
            seen.append(policy.observes(rows))
    assert len(seen) > 300 and abs(sum(seen) - len(seen) / every) <= 1


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize(("rows", "share"), [(3, 1.0), (8, 0.5), (16, 0.25)])
def test_the_steps_that_try_a_tree_are_all_observed(rows, share, in_flight):
    """Neither tree shows what the other one's drafts are worth."""
    deep, wide, learned = TokenTree.chain(5), balanced([3, 3]), []
    table = StepTimes({(rows, PLAIN): 1.0, (rows, deep): 1.2, (rows, wide): 1.1})

    class Listening(AdaptiveTrees):
        def learn_paths(self, tree, paths):
            learned.append(tree)
            super().learn_paths(tree, paths)

    policy = Listening([deep, wide], table)
    used = list(scheduled(policy, rows, 4000, in_flight))
    best, tried = sorted([deep, wide], key=used.count, reverse=True)
    assert 10 < used.count(tried) < 200
    assert used.count(tried) - learned.count(tried) <= in_flight  # the last ones are under way
    assert learned.count(best) == pytest.approx(share * used.count(best), rel=0.1)
