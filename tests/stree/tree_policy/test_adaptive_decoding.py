"""Decode with a tree that is chosen step by step: same tokens, no step disturbed by a choice."""

import itertools
from dataclasses import replace

import pytest
import torch
from lanes import quick_first
from simulated_trees import CHAIN, WIDE, costs, decoder_of
from toys import TableDrafter, TableTarget, reading, right_now_and_then, tiny_model

from stree import BatchDecoder, Decoder, GenerationConfig, Request, TokenTree
from stree.batching import step
from stree.batching.sequences import samples_of
from stree.batching.step import StepInputs
from stree.common.errors import UsageError
from stree.tree_policy.adaptive import PLAIN, AdaptiveTrees
from stree.tree_policy.step_times import StepTimes
from stree.trees.token_tree import BeamTree


@pytest.fixture(autouse=True)
def only_measured_times(monkeypatch):
    """The times given here are no machine's: what steps take would replace them."""
    monkeypatch.setattr(AdaptiveTrees, "learn_step", lambda *_: None)


class Counting(AdaptiveTrees):
    """Keeps how many tokens counted for each answer, and what it is told of requests."""

    def forget(self) -> None:
        super().forget()
        self.counted: list[int] = []
        self.told: list[str] = []

    def learn_tokens(self, num_tokens: int) -> None:
        self.told.append("tokens")
        super().learn_tokens(num_tokens)

    def learn_answer(self, *read_s: float | None) -> None:
        self.told.append("answer")
        self.counted.append(self.state.speeds.num_tokens)
        super().learn_answer(*read_s)


def test_answers_that_have_not_ended_count():
    """The first answers that end are the short ones, if all begin together."""
    model = tiny_model(seed=1)
    policy = Counting([CHAIN], StepTimes({(4, PLAIN): 1.0, (4, CHAIN): 1.1}))
    decoder = BatchDecoder(model, model, policy, num_rows=4, max_length=128)
    lengths = [12, 40, 40, 41]
    asked = [GenerationConfig(each, ignore_eos=True) for each in lengths]
    decoder.generate([Request([3, 5, 7], each) for each in asked])
    assert sum(policy.counted) == sum(lengths)
    assert policy.counted[0] > 2 * 12  # when the first ends the others have got about as many


def test_a_policy_learns_of_all_rows_of_a_step_at_once():
    """The host's time counts: 16 rows make a small model's step hardly longer than one."""
    told: list[str | int] = []

    class Told(Counting):
        def choose(self, num_rows):
            return self.trees[1]

        def learn_paths(self, tree, paths):
            told.append(len(paths))

        def learn_tokens(self, num_tokens):
            told.append("tokens")

        def learn_answer(self, *read_s):
            told.append("answer")

    model = tiny_model(seed=1)
    decoder = BatchDecoder(model, model, Told([CHAIN]), num_rows=4, max_length=128)
    decoder.generate([Request([3, 5, n], GenerationConfig(6, ignore_eos=True)) for n in range(4)])
    assert told[:4] == ["tokens", 4, "tokens", 1]  # first tokens, whole steps, the last one
    assert told.count("answer") == told.count(1) == 4  # each row is told before its answer ends


class Alternating(AdaptiveTrees):
    """Chooses each tree, and plain decoding, for some steps in turn."""

    def choose(self, num_rows):
        self.turn = getattr(self, "turn", -1) + 1
        self.state.current = self.trees[self.turn // 3 % len(self.trees)]
        return self.state.current


@pytest.mark.parametrize(
    ("graphs", "penalty"),
    quick_first([(True, 1.7)], [(True, 1.0)], [(False, 1.0)]),
)
def test_switching_changes_nothing_of_what_comes_out(graphs, penalty, request):
    """After plain steps the drafter catches up; a penalty knows the tokens of all steps."""
    if graphs:
        request.getfixturevalue("captured_on_cpu")
    target = tiny_model(1)
    drafter = right_now_and_then(target)
    served = [
        Request([7 * i % 61, 2, i], GenerationConfig(
            20 + i, temperature=i % 2, seed=i, repetition_penalty=1.0 if i % 3 else penalty,
        ))
        for i in range(9)
    ]
    policy = Alternating([CHAIN, WIDE, TokenTree.paper()])
    decoder = BatchDecoder(target, drafter, policy, num_rows=3, max_length=96)
    plain = Decoder(target, max_length=96)
    accepted = []
    for each, out in zip(served, decoder.generate(served), strict=True):
        assert out.tokens == plain.generate(each.prompt_ids, each.generation).tokens
        accepted += out.stats.accepted_per_call
    assert sum(accepted) > 0.5 * len(accepted)  # the drafter follows


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "trees",
    [[CHAIN, WIDE, TokenTree.paper()], [CHAIN, BeamTree.of(3, 2, 10), BeamTree.of(2, 4, 9)]],
    ids=["the largest is the deepest", "the largest is not"],
)
def test_nothing_is_made_ready_while_an_answer_is_timed(captured_on_cpu, trees, monkeypatch):
    """Each tree has two step graphs and its steps' inputs before the first step."""
    target = tiny_model(1)
    policy = Alternating(trees)
    decoder = Decoder(target, right_now_and_then(target), policy, max_length=96)
    step_graphs = decoder.batch.worker.runner.step_graphs
    made, tree_batches = [], []
    prepare = decoder.batch.prepare

    def prepared():
        prepare()
        made.append((set(step_graphs), len(tree_batches)))

    def prepared_step(*arguments):
        tree_batches.append(arguments)
        return StepInputs(*arguments)

    decoder.batch.prepare = prepared
    monkeypatch.setattr(step, "StepInputs", prepared_step)
    out = decoder.generate([1, 2, 3], GenerationConfig(60))
    assert len(step_graphs) == 2 * len(policy.trees) - 1
    assert len(tree_batches) == len(policy.trees)
    assert made == [(set(step_graphs), len(tree_batches))]
    assert out.stats.num_calls > 3 * len(policy.trees)


@pytest.mark.costly
def test_costs_are_of_steps_such_as_are_asked_for(captured_on_cpu):
    """Sampling takes time for each node, so that a large tree loses by it."""
    generation = GenerationConfig(20)
    sampled = replace(generation, temperature=1.0, seed=0, top_p=0.9, repetition_penalty=1.3)
    asked = Request([1, 2, 3], sampled)
    plain = Decoder(tiny_model(1)).generate(asked.prompt_ids, sampled)
    for measured, is_so in ((sampled, True), (generation, False)):
        decoder = decoder_of(AdaptiveTrees([CHAIN, WIDE]), max_length=96)
        decoder.measure_step_times(num_steps=1, generation=measured)
        # sampled, leaving tokens out, putting them in order, penalised
        assert {key[3][:4] for key in decoder.worker.runner.step_graphs} == {(is_so,) * 4}
        assert decoder.generate([asked])[0].tokens == plain.tokens


def test_what_disturbs_one_timing_decides_about_no_tree(monkeypatch):
    decoder, asked = decoder_of(AdaptiveTrees([CHAIN, WIDE]), max_length=128), itertools.count()

    def clock():
        """Return a second more each time, and 100 more within the second turn of the trees."""
        before, number = divmod(next(asked) - 1, 2)  # timings before, each asks twice
        return before * 2.0 + number + 100.0 * max(0, min(before - 3 + number, 3))

    monkeypatch.setattr("stree.batching.step_timing.perf_counter", clock)
    monkeypatch.setattr("stree.batching.step_timing.NUM_TIMINGS", 2)
    costs = decoder.measure_step_times(num_steps=4)
    assert set(costs.seconds.values()) == {0.25}
    monkeypatch.setattr("stree.batching.step_timing.NUM_TIMINGS", 1)
    asked = itertools.count()
    assert set(decoder.measure_step_times(num_steps=4).seconds.values()) == {25.25}


def test_the_drafter_reads_each_token_once():
    torch.manual_seed(0)
    target = TableTarget(2 * torch.randn(7, 7, 7, dtype=torch.float64))
    drafter = TableDrafter(target.table)
    policy = Alternating([CHAIN])
    decoder = BatchDecoder(target, drafter, policy, num_rows=1, max_length=64)
    row = decoder.admit(Request([1, 2, 3], GenerationConfig(30)))
    wanted = Decoder(target, max_length=64).generate([1, 2, 3], GenerationConfig(30)).tokens
    while not any(report.finish_reason for report in decoder.step()):
        read = drafter.sequences[row]
        assert read == [1, 2, 3, *wanted][: len(read)]
    assert len(drafter.sequences[row]) > 20
    decoder.release(row)


def test_drafters_read_no_prompts_while_plain_decoding_is_best():
    """They read the prompts of requests with trees of their own."""
    torch.manual_seed(0)
    target = TableTarget(2 * torch.randn(7, 7, 7, dtype=torch.float64))
    drafter, tree = TableDrafter(target.table), TokenTree.chain(2)
    costs = StepTimes({(2, PLAIN): 1.0, (2, CHAIN): 9.0, (1, PLAIN): 1.0, (1, CHAIN): 9.0})
    decoder = BatchDecoder(
        target, drafter, AdaptiveTrees([CHAIN], costs), num_rows=2, max_length=64
    )
    decoder.generate([Request([1, 2, 3], GenerationConfig(30))])
    assert not decoder.tree_policy.drafts
    left = decoder.admit(Request([4, 5, 6, 1], GenerationConfig(9)))
    own = decoder.admit(Request([4, 5, 6, 2], GenerationConfig(9), tree))
    decoder.step()
    assert not drafter.sequences[left] and drafter.sequences[own][:4] == [4, 5, 6, 2]


@pytest.mark.parametrize("own", [None, TokenTree.chain(4)], ids=str)
def test_the_drafter_misses_nothing_of_a_row_that_others_draft_beside(own):
    """A perfect drafter's greedy drafts are all accepted after plain steps left it behind."""
    target, tree = tiny_model(1), TokenTree.chain(4)
    costs = StepTimes({(2, PLAIN): 1.0, (2, tree): 9.0, (1, PLAIN): 1.0, (1, tree): 9.0})
    decoder = BatchDecoder(target, target, AdaptiveTrees([tree], costs), num_rows=2, max_length=120)
    decoder.tree_policy.state.current = PLAIN
    row = decoder.admit(Request([5, 3, 9, 8], GenerationConfig(60, ignore_eos=True)))
    decoder.admit(Request([7, 3, 4], GenerationConfig(40, ignore_eos=True), own))
    for _ in range(8):
        decoder.step()
    decoder.tree_policy.costs = StepTimes(
        {(2, PLAIN): 9.0, (2, tree): 1.0, (1, PLAIN): 9.0, (1, tree): 1.0}
    )
    decoder.tree_policy.state.current = tree
    while not any(each.row == row and each.finish_reason for each in decoder.step()):
        pass
    accepted = decoder.release(row).stats.accepted_per_call
    assert set(accepted[:8]) == {0} and set(accepted[9:-1]) == {4}


def test_a_prompt_that_only_the_target_has_read_is_read_by_the_drafter_of_the_next_answer():
    """Answers share their prompt; the first decodes plainly, so that no drafter has read it.

    A perfect drafter's drafts for the second are all accepted.
    """
    target, tree = tiny_model(1), TokenTree.chain(4)
    policy = AdaptiveTrees([tree], StepTimes({(1, PLAIN): 1.0, (1, tree): 9.0}))
    decoder = BatchDecoder(target, target, policy, num_rows=1, max_length=64)
    generation = GenerationConfig(21, 1.0, seed=3, ignore_eos=True, num_return_sequences=2)
    first, second = samples_of(Request([5, 3, 9, 8, 2, 7], generation))
    policy.state.current = PLAIN
    row = decoder.admit(first)
    decoder.step()
    assert not decoder.scheduler.sequences[row].num_drafted_from
    decoder.release(row)
    policy.costs = StepTimes({(1, PLAIN): 9.0, (1, tree): 1.0})
    policy.state.current = tree
    (out,) = decoder.generate([second])
    assert out.stats.num_reused_tokens == 6 and out.stats.accepted_per_call == [4] * 4


@pytest.mark.quick(1)
@pytest.mark.parametrize("measured", [False, True])
def test_whatever_a_drafter_missed_its_graphs_are_there(measured, captured_on_cpu):
    """Graphs for catching up are captured with a step's, or when step times are measured."""
    target = tiny_model(0)
    policy = Alternating([CHAIN], StepTimes({(2, PLAIN): 1.0, (2, CHAIN): 1.0}))
    decoder = BatchDecoder(target, reading(target), policy, num_rows=2, max_length=150)
    requests = [Request([5] * n, GenerationConfig(9, ignore_eos=True)) for n in (20, 30)]
    if measured:
        decoder.measure_step_times(num_steps=1)
    rows = [decoder.admit(each) for each in requests]
    decoder.prepare_prefill(rows[0]) if measured else decoder.prepare()
    for row in rows:
        decoder.release(row)
    ready = set(decoder.worker.runner.prefiller.graphs)
    sizes = {size for model, _, size, *_ in ready if model != id(target)}
    assert sizes >= {2, 4, 8, 16, 32, 64, 128, 256}
    policy.state.current = PLAIN
    outputs = decoder.generate(requests)
    for request, out in zip(requests, outputs, strict=True):
        plain = Decoder(target, max_length=64).generate(request.prompt_ids, request.generation)
        assert out.tokens == plain.tokens and out.stats.acceptance_length > 1
    assert set(decoder.worker.runner.prefiller.graphs) == ready


def test_no_features_are_kept_where_none_are_read(captured_on_cpu):
    """No step or prompt keeps features while plain decoding is best."""
    target = tiny_model(1)
    drafter = reading(target)
    costs = StepTimes({(1, PLAIN): 1.0, (1, CHAIN): 9.0})
    decoder = BatchDecoder(
        target, drafter, AdaptiveTrees([CHAIN], costs), num_rows=1, max_length=64
    )
    taken, take = [], decoder.drafter.take_features
    decoder.drafter.take_features = lambda *told: taken.append(told) or take(*told)
    layers = []
    for _ in range(2):
        decoder.generate([Request([5] * 9, GenerationConfig(30, ignore_eos=True))])
        graphs = decoder.worker.runner.prefiller.graphs
        layers.append({asked for model, _, _, _, asked, *_ in graphs if model == id(target)})
        graphs.clear()
        if not layers[1:]:
            taken.clear()
    assert layers == [{drafter.config.feature_layers}, {()}] and not taken


def test_costs_are_measured_while_no_row_is_taken():
    decoder = decoder_of(AdaptiveTrees([CHAIN, WIDE]), 3, max_length=128)
    with pytest.raises(UsageError, match="call measure_step_times first"):
        decoder.generate([Request([1], GenerationConfig(4))])
    num_answers = decoder.tree_policy.state.num_answers
    costs = decoder.measure_step_times(num_steps=3)
    assert {rows for rows, _ in costs.seconds} == {1, 2, 3}
    assert {tree for _, tree in costs.seconds} == {PLAIN, CHAIN, WIDE}
    assert all(seconds > 0 for seconds in costs.seconds.values()) and costs.catch_up > 0
    assert decoder.tree_policy.state.num_answers == num_answers and decoder.num_free_rows == 3
    assert decoder.scheduler.tree_policy is decoder.scheduler.prompts.tree_policy
    assert decoder.scheduler.tree_policy is decoder.tree_policy
    request = Request([1, 2], GenerationConfig(20))
    out = decoder.generate([request])[0]
    assert out.tokens == Decoder(tiny_model(1)).generate([1, 2], GenerationConfig(20)).tokens
    decoder.admit(request)
    with pytest.raises(UsageError, match="while no row is taken"):
        decoder.measure_step_times()
    with pytest.raises(UsageError, match="give at least one"):
        AdaptiveTrees([])


@pytest.mark.parametrize("max_length", [48, 512])
def test_timed_steps_are_of_one_tree_and_all_rows(max_length, monkeypatch):
    """With little room the rows begin again before some timings."""
    decoder = decoder_of(AdaptiveTrees([CHAIN, WIDE]), 3, max_length=max_length)
    plans, execute = [], decoder.worker.execute
    monkeypatch.setattr(
        decoder.worker, "execute", lambda plan: plans.append(plan) or execute(plan)
    )
    before = decoder.tree_policy.state
    learned = repr((before.speeds.__dict__, before.acceptance.rates.__dict__))
    decoder.measure_step_times(num_steps=4, counts=[2])
    steps = [plan.trees for plan in plans if plan.trees]
    assert all(list(each) == [0, 1] and len(set(each.values())) == 1 for each in steps)
    assert {each[0] for each in steps} == {PLAIN, CHAIN, WIDE}
    assert (sum(len(plan.admits) for plan in plans) > 2) == (max_length < 512)
    assert repr((before.speeds.__dict__, before.acceptance.rates.__dict__)) == learned


@pytest.mark.parametrize("max_length", [122, 145, 275])
@pytest.mark.parametrize("depths", [(2, 8), (8, 2)])
def test_no_row_ends_while_its_steps_are_timed(depths, max_length, captured_on_cpu, monkeypatch):
    """Not even if all drafts are accepted, and a step in flight is of a deeper tree."""
    monkeypatch.setattr("stree.batching.step_timing.NUM_TIMINGS", 5)
    target, trees = tiny_model(1), list(map(TokenTree.chain, depths))
    decoder = BatchDecoder(target, target, AdaptiveTrees(trees), num_rows=1, max_length=max_length)
    outputs, step = [], decoder.step
    monkeypatch.setattr(decoder, "step", lambda: outputs.append(step()) or outputs[-1])
    decoder.measure_step_times()
    assert all(outputs) and not any(each.finish_reason for (each,) in outputs)
    # Serving has the same graphs: a step after another tree is captured for the longest block
    graphs = decoder.worker.runner.step_graphs
    assert all(block in (len(shape), 9) for _, shape, block, *_ in graphs)


@pytest.mark.parametrize("is_late", [False, True])
def test_the_error_of_a_timed_step_is_raised(is_late, monkeypatch):
    decoder = decoder_of(AdaptiveTrees([CHAIN, WIDE]), 2, max_length=128)
    runner, launched = decoder.worker.runner, itertools.count()
    launch = runner.launch

    def failing(*given):
        if next(launched) == 9 * is_late:
            raise MemoryError("no room for a graph")
        return launch(*given)

    monkeypatch.setattr(runner, "launch", failing)
    with pytest.raises(MemoryError, match="no room"):
        decoder.measure_step_times()
    assert decoder.num_free_rows == 2 and not decoder.tree_policy.costs.seconds
    assert decoder.measure_step_times().seconds


class NowAndThen(AdaptiveTrees):
    """Chooses eight plain steps, four drafts, and so on; counts its choices."""

    num_chosen = 0

    def choose(self, num_rows):
        self.num_chosen += 1
        self.state.current = PLAIN if (self.num_chosen - 1) % 12 < 8 else CHAIN
        return self.state.current


@pytest.mark.quick(1)
@pytest.mark.parametrize("rows", [1, 3])
def test_each_choice_is_a_step(rows, captured_on_cpu):
    """It is one also where the drafter must catch up first, and waits for the step in flight."""
    target = tiny_model(2)
    decoder = BatchDecoder(target, target, NowAndThen([CHAIN]), num_rows=rows, max_length=256)
    request = Request([1, 2, 3], GenerationConfig(100, ignore_eos=True))
    for output in decoder.generate([request] * rows):
        calls = output.stats.calls_by_tree
        full, rest = divmod(sum(calls.values()), 12)
        assert full >= 3
        assert calls[CHAIN.name] == 4 * full + max(0, rest - 8)
        depths = output.stats.depth_per_call
        assert depths.count(0) == calls["plain"] and len(depths) == output.stats.num_calls
        assert depths.count(CHAIN.max_depth) == calls[CHAIN.name]


def test_released_and_forgotten_rows_leave_no_tokens():
    target = tiny_model(2)
    policy = Counting([CHAIN], StepTimes({(2, PLAIN): 1.0, (2, CHAIN): 1.1}))
    decoder = BatchDecoder(target, target, policy, num_rows=2, max_length=128)
    asked = [Request([1, 2, 3], GenerationConfig(most, ignore_eos=True)) for most in (60, 9)]

    def some_steps():
        row = decoder.admit(asked[0])
        for _ in range(5):
            decoder.step()
        return row

    some_steps()
    decoder.forget()
    with pytest.raises(KeyError), decoder.forgetting():
        decoder.release(0)
        some_steps()
        raise KeyError
    decoder.release(0)
    decoder.generate([asked[1]])
    assert policy.counted[-1] == 9


@pytest.mark.parametrize(
    ("tree", "num_steps", "told"),
    [(None, 0, []), (None, 1, ["tokens", "answer"]), (CHAIN, 1, []), (CHAIN, 9, [])],
    ids=["unread", "cut-short", "own-tree-cut-short", "own-tree"],
)
def test_which_requests_teach_how_long_answers_are(tree, num_steps, told):
    policy = Counting([CHAIN], costs(1.0, 1.1, 9.0))
    decoder = decoder_of(policy)
    row = decoder.admit(Request([1, 2], GenerationConfig(5), tree))
    for _ in range(num_steps):
        decoder.step()
    decoder.release(row)
    assert policy.told == told
