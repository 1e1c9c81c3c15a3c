"""Which tree a step has: the best by expected tokens and cost, plain decoding when none pays."""

import itertools
import random
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from lanes import quick_first
from toys import TableDrafter, TableTarget, reading, right_now_and_then, tiny_model

from stree import BatchDecoder, Decoder, GenerationConfig, Request, TokenTree
from stree.batching import batch_decoder as batch
from stree.batching.sequences import StepInputs
from stree.common.errors import UsageError
from stree.tree_policy.acceptance import AcceptanceRates, DynamicAcceptanceRates
from stree.tree_policy.adaptive import PLAIN, PROBE_SHARE, TRY_SHARE, AdaptiveTrees, telling
from stree.tree_policy.bandit import BanditTrees
from stree.tree_policy.step_times import StepTimes
from stree.trees.token_tree import BeamTree, as_tree, balanced

CHAIN, WIDE = TokenTree.chain(2), balanced([3, 2])


def simulated(
    adaptive_trees: AdaptiveTrees, num_rows: int, steps: int, rates: list[float], seed: int = 0
):
    """Steps whose children of rank r are accepted with rates[r]; what each was, and all tokens."""
    rng, used, tokens = random.Random(seed), [], 0
    for _ in range(steps):
        tree = adaptive_trees.choose(num_rows)
        used.append(tree)
        for _ in range(num_rows):
            node, wanted = 0, None
            while tree.children[node]:
                draw = rng.random()
                wanted = None
                for rank, child in enumerate(tree.children[node]):
                    draw -= rates[rank]
                    if draw < 0:
                        wanted = child
                        break
                if wanted is None:
                    break
                node = wanted
            adaptive_trees.learn(tree, node)
            tokens += tree.depths[node] + 1
    return used, tokens


def costs(plain: float, chain: float, wide: float, rows: int = 1) -> StepTimes:
    seconds = {(rows, PLAIN): plain, (rows, CHAIN): chain, (rows, WIDE): wide}
    return StepTimes(seconds, catch_up=plain / 2)


def test_expected_tokens_of_known_rates():
    """Exactly Σ over nodes of the product of the rates above, once the rates are known."""
    rates, rng = AcceptanceRates(), random.Random(1)
    for _ in range(4000):
        first = rng.random()
        node = 0 if first < 0.3 else 1 if first < 0.8 else 2
        rates.learn(TokenTree((-1, 0, 0)), node)
    assert rates.rate(0, 0) == pytest.approx(0.5, abs=0.15)
    assert rates.rate(0, 1) == pytest.approx(0.2, abs=0.12)
    one, two = rates.rate(0, 0), rates.rate(0, 1)
    assert rates.expected_tokens(TokenTree((-1, 0, 0, 1))) == pytest.approx(
        1 + one + two + one * rates.rate(1, 0)
    )
    assert rates.rate(1, 0) == rates.rate(0, 0)  # nothing was seen there yet
    assert rates.expected_tokens(PLAIN) == 1


def test_what_was_seen_long_ago_gives_way_to_what_is_seen_above():
    """Of a depth that the trees of late do not reach; without end, and counts stay finite."""
    rates = AcceptanceRates()
    for _ in range(100):
        rates.learn(TokenTree.chain(3), 1)  # nothing but the first draft
    assert rates.rate(1, 0) < 0.05
    before = rates.rate(1, 0)
    for _ in range(1000):
        rates.learn(PLAIN, 0)
    assert rates.rate(1, 0) == before
    for _ in range(60_000):
        rates.learn(TokenTree.chain(1), 1)
    assert rates.rate(1, 0) == pytest.approx(rates.rate(0, 0), rel=1e-6)
    assert rates.rate(0, 0) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(
    ("table", "rates", "best"),
    [
        (costs(1.0, 1.1, 1.2), [0.6, 0.2, 0.1], WIDE),
        (costs(1.0, 1.1, 2.5), [0.6, 0.2, 0.1], CHAIN),
        (costs(1.0, 1.6, 2.5), [0.3, 0.05, 0.0], PLAIN),
    ],
)
def test_the_best_is_found_and_kept(table, rates, best):
    used, _ = simulated(AdaptiveTrees([CHAIN, WIDE], table), 1, 3000, rates)
    late = used[1000:]
    assert late.count(best) > 0.93 * len(late)
    changes = sum(a != b for a, b in itertools.pairwise(late))
    assert changes < 0.06 * len(late)


def test_plain_decoding_is_probed_for_a_hundredth_of_its_time():
    table = costs(1.0, 1.6, 2.5)
    adaptive_trees = AdaptiveTrees([CHAIN, WIDE], table)
    used, tokens = simulated(adaptive_trees, 1, 20_000, [0.05, 0.0, 0.0])
    late = used[2000:]
    probing = sum(table.seconds[1, tree] for tree in late if tree != PLAIN)
    assert 0 < probing < 1.2 * PROBE_SHARE * len(late)
    spent = sum(table.seconds[1, tree] for tree in used)
    assert tokens / spent > 0.97  # of plain decoding's, its beginning included


@pytest.mark.parametrize("make", [AdaptiveTrees, BanditTrees])
def test_what_a_warm_up_shows_is_forgotten(make):
    """However little of it was accepted, and however short its answers were."""
    table = costs(1.0, 1.1, 1.2)
    adaptive_trees, other = make([CHAIN, WIDE], table), make([CHAIN, WIDE], table)
    for each in (adaptive_trees, other):
        simulated(each, 1, 20, [0.6, 0.2, 0.1])
        each.learn_tokens(90)
        each.learn_answer(0.1)
    with adaptive_trees.forgetting():
        simulated(adaptive_trees, 1, 100, [0.0, 0.0, 0.0], seed=1)
        adaptive_trees.learn_tokens(1)
        adaptive_trees.learn_answer(50.0)
        assert adaptive_trees.expected_tokens(WIDE) < 1.5 or make is BanditTrees
    assert adaptive_trees.costs is table
    rates = [0.4, 0.2, 0.1]
    assert simulated(adaptive_trees, 1, 200, rates, 2) == simulated(other, 1, 200, rates, 2)
    with adaptive_trees.forgetting():
        adaptive_trees.costs = costs(1.0, 2.0, 9.0)
    assert adaptive_trees.costs.of(1, CHAIN) == 2.0
    adaptive_trees.forget()
    new = make([CHAIN, WIDE], adaptive_trees.costs)
    assert simulated(adaptive_trees, 1, 200, rates, 2) == simulated(new, 1, 200, rates, 2)


class Counting(AdaptiveTrees):
    """Keeps how many tokens counted for each answer."""

    def forget(self) -> None:
        super().forget()
        self.counted: list[int] = []

    def learn_answer(self, *read_s: float | None) -> None:
        self.counted.append(self._num_tokens)
        super().learn_answer(*read_s)


def test_answers_that_have_not_ended_count():
    """Of some that begin together the first that end are the short ones."""
    model = tiny_model(seed=1)
    adaptive_trees = Counting([CHAIN], StepTimes({(4, PLAIN): 1.0, (4, CHAIN): 1.1}))
    decoder = BatchDecoder(model, model, adaptive_trees, num_rows=4, max_length=128)
    lengths = [12, 40, 40, 41]
    asked = [GenerationConfig(each, ignore_eos=True) for each in lengths]
    decoder.generate([Request([3, 5, 7], each) for each in asked])
    assert sum(adaptive_trees.counted) == sum(lengths)
    assert (
        adaptive_trees.counted[0] > 2 * 12
    )  # when the first ends the others have got about as many


def test_drafts_that_become_better_are_found():
    adaptive_trees = AdaptiveTrees([CHAIN, WIDE], costs(1.0, 1.5, 2.5))
    simulated(adaptive_trees, 1, 2000, [0.05, 0.0, 0.0])
    assert adaptive_trees.current == PLAIN
    used, _ = simulated(adaptive_trees, 1, 3000, [0.9, 0.05, 0.0], seed=1)
    assert used[-1] == CHAIN


@pytest.mark.parametrize("seed", [1, 2])
def test_a_tree_that_looked_worst_is_found_when_it_becomes_better(seed):
    """A chain does not show what a wide tree's later children are worth, however often it is tried
    while plain decoding is best."""
    adaptive_trees = AdaptiveTrees([CHAIN, WIDE], costs(1.0, 1.6, 1.7))
    simulated(adaptive_trees, 1, 2000, [0.0, 0.0, 0.0], seed)
    assert adaptive_trees.current == PLAIN
    used, _ = simulated(adaptive_trees, 1, 5000, [0.3, 0.3, 0.3], seed=seed + 9)
    assert used[-1] == WIDE  # it promises 2.4 tokens a step, the chain 1.4


def test_costs_of_other_numbers_of_rows():
    table = StepTimes({(1, CHAIN): 1.0, (4, CHAIN): 3.0})
    assert [table.of(rows, CHAIN) for rows in (1, 2, 4, 9)] == [1.0, 3.0, 3.0, 3.0]
    with pytest.raises(UsageError, match="no cost of"):
        table.of(1, WIDE)


DRAFTS = [balanced([count, 1, 1, 1], f"{count} drafts") for count in (1, 2, 4, 8)]


def staircase(num_rows: int, tree: TokenTree, free: int = 36) -> float:
    """Products of up to `free` rows take what one takes, those of more as many times longer."""
    return max(1.0, num_rows * tree.num_nodes / free) + 0.004 * tree.num_nodes


def apportioning() -> AdaptiveTrees:
    """Among 1, 2, 4 and 8 drafts of four tokens for each sequence, which accept now and then."""
    counts = (1, 2, 4, 8, 16, 32, 64)
    table = {(rows, tree): staircase(rows, tree) for rows in counts for tree in (PLAIN, *DRAFTS)}
    adaptive_trees = AdaptiveTrees(DRAFTS, StepTimes(table))
    simulated(adaptive_trees, 1, 2000, [0.5, 0.15, 0.1, 0.08, 0.04, 0.03, 0.02, 0.02])
    return adaptive_trees


def served(
    adaptive_trees: AdaptiveTrees | None,
    table: StepTimes,
    rows: int,
    length: int,
    reading_s: float,
    steps: int,
):
    """Tokens a second of rows that get another request as soon as one has its `length` tokens; a
    drafter takes `reading_s` for a request when it first drafts for it. Without modes: plain."""
    rng = random.Random(0)
    seconds, tokens, left, read = 0.0, 0, [0] * rows, [-1.0] * rows
    for _ in range(steps):
        tree = PLAIN if adaptive_trees is None else adaptive_trees.choose(rows)
        for row in range(rows):
            if left[row] <= 0:
                if read[row] >= 0 and adaptive_trees is not None:
                    adaptive_trees.learn_answer(read[row] or None)
                left[row], read[row] = length, 0.0
                if adaptive_trees is not None and adaptive_trees.drafts:
                    read[row] = reading_s
            if tree != PLAIN and not read[row]:
                read[row] = reading_s
                seconds += reading_s
            elif left[row] == length and read[row]:
                seconds += reading_s
            end = 0
            while end < tree.max_depth and rng.random() < 0.7:
                end += 1
            if adaptive_trees is not None and tree != PLAIN:
                adaptive_trees.learn(tree, end)
            left[row] -= end + 1
            tokens += end + 1
            if adaptive_trees is not None:
                adaptive_trees.learn_tokens(end + 1)
        seconds += table.of(rows, tree)
    return tokens / seconds


@pytest.mark.parametrize(
    ("rows", "length", "reading_s", "measured"),
    quick_first(
        [*itertools.product([1, 16], [8, 64], [0.1, 5.0], [1.0]), (16, 512, 1.0, 0.05),
         (16, 64, 1.0, 20.0), (1, 8, 5.0, 0.05)],
        [*itertools.product([1, 16], [8, 64, 512], [0.1, 1.0, 5.0], [0.05, 1.0, 20.0])],
    ),
)  # fmt: skip
def test_what_drafters_read_counts(rows, length, reading_s, measured):
    """A chain of 2 that yields 2.2 tokens in 1.4 times a plain step's time is taken where it pays
    for reading prompts, too, whatever was measured of that beforehand."""
    table = costs(1.0, 1.4, 9.0, rows)
    table.catch_up = reading_s * measured
    steps = 40 * length + 4000
    plain = served(None, table, rows, length, reading_s, steps)
    chosen = served(AdaptiveTrees([CHAIN], table), table, rows, length, reading_s, steps)
    yields = 1 + 0.7 + 0.7**2
    drafting = yields / (1.4 + rows * reading_s * yields / length) * rows
    assert chosen > 0.975 * max(plain, drafting)


def test_few_rows_get_more_drafts():
    """Apportioned speculation: what many sequences leave free goes to more drafts of few."""
    adaptive_trees = apportioning()
    for rows, tree in ((64, PLAIN), (16, PLAIN), (8, DRAFTS[0]), (4, DRAFTS[1]), (2, DRAFTS[2])):
        assert adaptive_trees.choose(rows) == tree
    assert adaptive_trees.choose(1) in DRAFTS[2:]  # these two are nearly as good
    assert adaptive_trees.choose(4) == DRAFTS[1] and adaptive_trees.choose(64) == PLAIN  # and back


def test_trees_widen_as_rows_come_free():
    target, adaptive_trees, asked = tiny_model(2), apportioning(), {}
    choose = adaptive_trees.choose

    def listening(num_rows):
        asked.setdefault(num_rows, []).append(choose(num_rows).num_nodes)
        return adaptive_trees.current

    adaptive_trees.choose, adaptive_trees.learn = listening, lambda tree, end: None
    decoder = BatchDecoder(
        target, right_now_and_then(target), adaptive_trees, num_rows=8, max_length=128, max_nodes=33
    )
    lengths = [40, 40, 20, 20, 4, 4, 4, 4]  # rows come free from the last on
    served = [Request([1, 2, n], GenerationConfig(length)) for n, length in enumerate(lengths)]
    outputs = decoder.generate(served)
    assert [len(each.tokens) for each in outputs] == lengths
    assert set(asked[8]) == {5} and set(asked[4]) == {9} and set(asked[2]) == {17}


def test_idle_rows_in_between_count(monkeypatch):
    """A step has all rows up to the last that is taken, and takes as long."""
    target, asked = tiny_model(2), []
    adaptive_trees = apportioning()
    monkeypatch.setattr(
        adaptive_trees, "choose", lambda num_rows: asked.append(num_rows) or DRAFTS[0]
    )
    decoder = BatchDecoder(
        target, right_now_and_then(target), adaptive_trees, num_rows=8, max_length=64, max_nodes=33
    )
    rows = [decoder.admit(Request([1, n], GenerationConfig(20))) for n in range(8)]
    decoder.step()  # which reads the prompts
    decoder.step()
    for row in rows[:7]:
        decoder.release(row)
    decoder.step()
    assert asked == [8, 8, 8]


class Alternating(AdaptiveTrees):
    """A tree, then plain decoding, then another tree, each for some steps."""

    def choose(self, num_rows):
        self.turn = getattr(self, "turn", -1) + 1
        self.current = self.trees[self.turn // 3 % len(self.trees)]
        return self.current


@pytest.mark.parametrize(
    ("graphs", "penalty"),
    quick_first([(False, 1.0), (True, 1.7)], [(False, 1.0), (True, 1.0), (True, 1.7)]),
)
def test_switching_changes_nothing_of_what_comes_out(graphs, penalty, request):
    """Nor of the drafts: after plain steps the drafter catches up. A penalty knows of the tokens
    of all steps, whatever tree they had."""
    if graphs:
        request.getfixturevalue("captured_on_cpu")
    target = tiny_model(1)
    drafter = right_now_and_then(target)
    served = [
        Request([7 * i % 61, 2, i], GenerationConfig(
            20 + i, temperature=i % 2, seed=i, repetition_penalty=1.0 if i % 3 else penalty,
        ))
        for i in range(9)
    ]  # fmt: skip
    adaptive_trees = Alternating([CHAIN, WIDE, TokenTree.paper()])
    decoder = BatchDecoder(target, drafter, adaptive_trees, num_rows=3, max_length=96)
    plain = Decoder(target, max_length=96)
    accepted = []
    for each, out in zip(served, decoder.generate(served), strict=True):
        assert out.tokens == plain.generate(each.prompt_ids, each.generation).tokens
        accepted += out.stats.accepted_per_call
    assert sum(accepted) > 0.5 * len(accepted)  # the drafter follows


@pytest.mark.parametrize(
    "trees",
    [[CHAIN, WIDE, TokenTree.paper()], [CHAIN, BeamTree.of(3, 2, 10), BeamTree.of(2, 4, 9)]],
    ids=["the largest is the deepest", "the largest is not"],
)
def test_nothing_is_made_ready_while_an_answer_is_timed(captured_on_cpu, trees, monkeypatch):
    """In any order of choices: two step graphs a tree, made before the first step, and the inputs
    of a tree's steps."""
    target = tiny_model(1)
    adaptive_trees = Alternating(trees)
    decoder = Decoder(target, right_now_and_then(target), adaptive_trees, max_length=96)
    step_graphs = decoder.batch.runner.step_graphs
    made, tree_batches = [], []
    prepare = decoder.batch.prepare

    def prepared():
        prepare()
        made.append((set(step_graphs), len(tree_batches)))

    def prepared_step(*arguments):
        tree_batches.append(arguments)
        return StepInputs(*arguments)

    decoder.batch.prepare = prepared
    monkeypatch.setattr(batch, "StepInputs", prepared_step)
    out = decoder.generate([1, 2, 3], GenerationConfig(60))
    assert len(step_graphs) == 2 * len(adaptive_trees.trees) - 1
    assert len(tree_batches) == len(adaptive_trees.trees)
    assert made == [(set(step_graphs), len(tree_batches))]
    assert out.stats.num_calls > 3 * len(adaptive_trees.trees)


def test_costs_are_of_steps_such_as_are_asked_for(captured_on_cpu):
    """Sampling and what goes with it takes time for each node, so that a large tree loses by it."""
    target, generation = tiny_model(1), GenerationConfig(20)
    sampled = replace(generation, temperature=1.0, seed=0, top_p=0.9, repetition_penalty=1.3)
    asked = Request([1, 2, 3], sampled)
    plain = Decoder(target).generate(asked.prompt_ids, sampled)
    for measured, is_so in ((sampled, True), (generation, False)):
        decoder = BatchDecoder(
            target,
            right_now_and_then(target),
            AdaptiveTrees([CHAIN, WIDE]),
            num_rows=1,
            max_length=96,
        )
        decoder.measure_step_times(num_steps=1, generation=measured)
        # sampled, leaving tokens out, putting them in order, penalised
        assert {key[3:7] for key in decoder.runner.step_graphs} == {(is_so,) * 4}
        assert decoder.generate([asked])[0].tokens == plain.tokens


def test_what_disturbs_one_timing_decides_about_no_tree(monkeypatch):
    target = tiny_model(1)
    adaptive_trees = AdaptiveTrees([CHAIN, WIDE])
    decoder = BatchDecoder(
        target, right_now_and_then(target), adaptive_trees, max_length=128, num_rows=1
    )
    clock = {"now": 0.0, "asked": 0}

    def now():
        clock["asked"] += 1
        clock["now"] += 100.0 if clock["asked"] % 6 == 2 else 1.0  # the first timing of each tree
        return clock["now"]

    monkeypatch.setattr(decoder, "now", now)
    monkeypatch.setattr("stree.batching.step_timing._begin_after", lambda *_: 0.0)
    costs = decoder.measure_step_times(num_steps=4)
    assert set(costs.seconds.values()) == {0.25}


def test_the_drafter_reads_each_token_once():
    torch.manual_seed(0)
    target = TableTarget(2 * torch.randn(7, 7, 7, dtype=torch.float64))
    drafter = TableDrafter(target.table)
    adaptive_trees = Alternating([CHAIN])
    decoder = BatchDecoder(target, drafter, adaptive_trees, num_rows=1, max_length=64)
    row = decoder.admit(Request([1, 2, 3], GenerationConfig(30)))
    wanted = Decoder(target, max_length=64).generate([1, 2, 3], GenerationConfig(30)).tokens
    while not any(report.finish_reason for report in decoder.step()):
        read = drafter.sequences[row]
        assert read == [1, 2, 3, *wanted][: len(read)]
    assert len(drafter.sequences[row]) > 20
    decoder.release(row)


def test_drafters_read_no_prompts_while_plain_decoding_is_best():
    """And they do for requests with a tree of their own."""
    torch.manual_seed(0)
    target = TableTarget(2 * torch.randn(7, 7, 7, dtype=torch.float64))
    drafter, tree = TableDrafter(target.table), TokenTree.chain(2)
    costs = StepTimes({(2, PLAIN): 1.0, (2, CHAIN): 9.0, (1, PLAIN): 1.0, (1, CHAIN): 9.0})
    decoder = BatchDecoder(
        target, drafter, AdaptiveTrees([CHAIN], costs), num_rows=2, max_length=64
    )
    decoder.generate([Request([1, 2, 3], GenerationConfig(30))])
    assert not decoder.adaptive_trees.drafts
    left = decoder.admit(Request([4, 5, 6, 1], GenerationConfig(9)))
    own = decoder.admit(Request([4, 5, 6, 2], GenerationConfig(9), tree))
    decoder.step()
    assert not drafter.sequences[left] and drafter.sequences[own][:4] == [4, 5, 6, 2]


@pytest.mark.parametrize("own", [None, TokenTree.chain(4)], ids=str)
def test_the_drafter_misses_nothing_of_a_row_that_others_draft_beside(own):
    """A perfect drafter's greedy drafts are all accepted, though plain steps left it behind before
    and another row has a tree of its own."""
    target, tree = tiny_model(1), TokenTree.chain(4)
    costs = StepTimes({(2, PLAIN): 1.0, (2, tree): 9.0, (1, PLAIN): 1.0, (1, tree): 9.0})
    decoder = BatchDecoder(target, target, AdaptiveTrees([tree], costs), num_rows=2, max_length=120)
    decoder.adaptive_trees.current = PLAIN
    row = decoder.admit(Request([5, 3, 9, 8], GenerationConfig(60, ignore_eos=True)))
    decoder.admit(Request([7, 3, 4], GenerationConfig(40, ignore_eos=True), own))
    for _ in range(8):
        decoder.step()
    decoder.adaptive_trees.costs = StepTimes(
        {(2, PLAIN): 9.0, (2, tree): 1.0, (1, PLAIN): 9.0, (1, tree): 1.0}
    )
    decoder.adaptive_trees.current = tree
    while not any(each.row == row and each.finish_reason for each in decoder.step()):
        pass
    accepted = decoder.release(row).stats.accepted_per_call
    assert set(accepted[:8]) == {0} and set(accepted[9:-1]) == {4}


def test_reading_a_prompt_and_catching_up_are_told_apart():
    """What is missed takes long to read: that is given before drafting begins again, and counts
    for no tree while prompts are read beside the target."""
    adaptive_trees = AdaptiveTrees([CHAIN], costs(1.0, 1.4, 9.0))
    for _ in range(50):
        adaptive_trees.learn_tokens(10)
        adaptive_trees.learn_answer(prefill_s=0.1, catch_up_s=9.0)
    used, _ = simulated(adaptive_trees, 1, 200, [0.7])
    assert used[100:].count(CHAIN) > 90
    for _ in range(50):
        adaptive_trees.learn_tokens(10)
        adaptive_trees.learn_answer(prefill_s=9.0)
    used, _ = simulated(adaptive_trees, 1, 200, [0.7], seed=1)
    assert used[100:].count(PLAIN) > 90


@pytest.mark.parametrize("measured", [False, True])
def test_whatever_a_drafter_missed_its_graphs_are_there(measured, captured_on_cpu):
    """Of reading that, made ready with those of steps, or when costs are measured."""
    target = tiny_model(0)
    adaptive_trees = Alternating([CHAIN], StepTimes({(2, PLAIN): 1.0, (2, CHAIN): 1.0}))
    decoder = BatchDecoder(target, reading(target), adaptive_trees, num_rows=2, max_length=150)
    requests = [Request([5] * n, GenerationConfig(9, ignore_eos=True)) for n in (20, 30)]
    if measured:
        decoder.measure_step_times(num_steps=1)
    rows = [decoder.admit(each) for each in requests]
    decoder.prepare_prefill(rows[0]) if measured else decoder.prepare()
    for row in rows:
        decoder.release(row)
    ready = set(decoder.runner.prefiller.graphs)
    sizes = {size for model, _, size, *_ in ready if model != id(target)}
    assert sizes >= {2, 4, 8, 16, 32, 64, 128, 256}
    adaptive_trees.current = PLAIN
    outputs = decoder.generate(requests)
    for request, out in zip(requests, outputs, strict=True):
        plain = Decoder(target, max_length=64).generate(request.prompt_ids, request.generation)
        assert out.tokens == plain.tokens and out.stats.acceptance_length > 1
    assert set(decoder.runner.prefiller.graphs) == ready


def test_no_features_are_kept_where_none_are_read(captured_on_cpu):
    """Of prompts and in steps, while plain decoding is best."""
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
        graphs = decoder.runner.prefiller.graphs
        layers.append({asked for model, _, _, _, asked, *_ in graphs if model == id(target)})
        graphs.clear()
        if not layers[1:]:
            taken.clear()
    assert layers == [{drafter.config.feature_layers}, {()}] and not taken


def test_costs_are_measured_while_no_row_is_taken():
    target = tiny_model(1)
    adaptive_trees = AdaptiveTrees([CHAIN, WIDE])
    decoder = BatchDecoder(
        target, right_now_and_then(target), adaptive_trees, num_rows=3, max_length=128
    )
    with pytest.raises(UsageError, match="call measure_step_times first"):
        decoder.generate([Request([1], GenerationConfig(4))])
    costs = decoder.measure_step_times(num_steps=3)
    assert {rows for rows, _ in costs.seconds} == {1, 2, 3}
    assert {tree for _, tree in costs.seconds} == {PLAIN, CHAIN, WIDE}
    assert all(seconds > 0 for seconds in costs.seconds.values()) and costs.catch_up > 0
    request = Request([1, 2], GenerationConfig(20))
    out = decoder.generate([request])[0]
    assert out.tokens == Decoder(target).generate([1, 2], GenerationConfig(20)).tokens
    decoder.admit(request)
    with pytest.raises(UsageError, match="while no row is taken"):
        decoder.measure_step_times()
    with pytest.raises(UsageError, match="give at least one"):
        AdaptiveTrees([])


def test_old_steps_of_trees_that_grow_fade_for_any_number_of_steps():
    """Weights grow from one observation to the next, and are brought back before they overflow."""
    rates, small, tree = DynamicAcceptanceRates(2, 8), BeamTree.of(4, 2, 3), BeamTree.of(4, 2, 8)
    for _ in range(23_000):  # 0.99⁻²³⁰⁰⁰ is beyond 1e100
        rates.learn(tree, [0, 1, 3])
    rates.revise()
    assert rates.expected_tokens(small) == pytest.approx(2, abs=0.1)
    assert rates.expected_tokens(tree) == pytest.approx(3, abs=0.1)
    for _ in range(1000):
        rates.learn(tree, [0])
    rates.revise()
    assert rates.expected_tokens(tree) == pytest.approx(1, abs=0.05)


def test_costs_that_are_measured_again_count_at_once():
    adaptive_trees = AdaptiveTrees([CHAIN, WIDE], costs(1.0, 1.1, 5.0))
    simulated(adaptive_trees, 1, 40, [0.6, 0.2, 0.1])
    assert adaptive_trees.choose(1) == CHAIN
    adaptive_trees.costs = costs(1.0, 5.0, 1.1)
    assert adaptive_trees.choose(1) == WIDE


@pytest.mark.parametrize("trees", [[], ["chain-0"], ["chain-0", "chain-0"], "chain-2"])
def test_a_choice_among_no_drafts_is_refused(trees):
    with pytest.raises(UsageError, match=r"without a tree|wanted a list of trees"):
        AdaptiveTrees(trees)


@pytest.mark.parametrize(
    ("trees", "told_by"),
    [
        (["chain-2", "chain-4", "paper"], ["paper"]),
        (["paper", "chain-6"], ["paper", "chain-6"]),
        (["expand-2-2", "expand-2-2"], ["expand-2-2"]),
        (["beam-4-2-16", "chain-1", "beam-4-5-32", "beam-4-5-8"], ["chain-1", "beam-4-5-32"]),
        (["beam-4-2-21", "beam-4-5-16"], ["beam-4-2-21", "beam-4-5-16"]),
        (["beam-4-5-16", "beam-3-4-16", "dyspec-4-4-16"],) * 2,
    ],
    ids=lambda trees: " ".join(trees),
)
def test_which_trees_show_what_no_other_does(trees, told_by):
    assert [tree.name for tree in telling([as_tree(each) for each in trees])] == told_by


DEPTHS = [BeamTree.of(4, depth, 21) for depth in (2, 3, 4, 5)]


def deep_steps(adaptive_trees, goes_on: float, num_steps: int, seed: int = 0):
    """Steps whose path goes on from each depth to the next with one probability, whatever the tree;
    what each was, all tokens and seconds."""
    rng, used, tokens, seconds = random.Random(seed), [], 0, 0.0
    for _ in range(num_steps):
        tree = adaptive_trees.choose(1)
        path = [0]
        while len(path) <= tree.max_depth and rng.random() < goes_on:
            path.append(path[-1] + 1)
        adaptive_trees.learn_path(tree, path)
        used.append(tree)
        tokens, seconds = tokens + len(path), seconds + adaptive_trees.costs.of(1, tree)
    return used, tokens, seconds


@pytest.mark.parametrize("goes_on", [0.35, 0.6, 0.8, 0.95])
def test_trees_that_grow_are_as_deep_as_pays(goes_on):
    """Levels that cost a quarter of a plain step, as on a small target: nearly as fast as the best
    depth, what choosing costs included."""
    table = {(1, tree): 1.0 + 0.25 * tree.max_depth for tree in (PLAIN, *DEPTHS)}
    adaptive_trees = AdaptiveTrees(DEPTHS, StepTimes(table))
    used, tokens, seconds = deep_steps(adaptive_trees, goes_on, 1500)
    speeds = {
        tree: sum(goes_on**depth for depth in range(tree.max_depth + 1)) / table[1, tree]
        for tree in (PLAIN, *DEPTHS)
    }
    best = max(speeds.values())
    assert tokens / seconds > 0.96 * best
    near = {tree for tree in speeds if speeds[tree] > 0.95 * best}
    assert sum(tree in near for tree in used[200:]) > 0.9 * len(used[200:])


def test_each_kind_of_tree_is_tried_before_any_is_judged():
    """A fixed tree beside one that grows: nothing shows of one what the other accepts."""
    paper, beam = TokenTree.paper(), BeamTree.of(4, 5, 32)
    adaptive_trees = AdaptiveTrees(
        [paper, beam], StepTimes({(1, PLAIN): 1.0, (1, paper): 1.5, (1, beam): 1.5})
    )
    rng, used = random.Random(0), []
    for _ in range(600):
        tree = adaptive_trees.choose(1)
        used.append(tree)
        depth = 0
        while depth < tree.max_depth and rng.random() < (0.8 if tree == paper else 0.5):
            depth += 1
        adaptive_trees.learn_path(tree, tree.path_to(tree.levels[depth][0]))
    assert used.count(paper) > 0.9 * len(used) and used[:40].count(beam) >= 8


def test_the_next_tree_is_chosen_while_a_step_runs(monkeypatch):
    """Not when a step is launched, for which the device may wait; but for an answer's first two."""
    target, order = tiny_model(2), []
    adaptive_trees = apportioning()
    decoder = Decoder(target, right_now_and_then(target), adaptive_trees, max_length=96)
    runner = decoder.batch.runner
    for who, name in ((adaptive_trees, "choose"), (runner, "launch"), (runner, "collect")):
        told = partial(lambda call, name, *given: (order.append(name), call(*given))[1],
                       getattr(who, name), name)  # fmt: skip
        monkeypatch.setattr(who, name, told)
    decoder.generate([1, 2, 3], GenerationConfig(30))
    assert order[:3] == ["choose", "launch", "choose"]
    again = order[3:]
    assert len(again) > 15 and again == (["collect", "launch", "choose"] * len(again))[: len(again)]
    del order[:]
    decoder.generate([1, 2, 3], GenerationConfig(30))
    assert order[0] == "launch"  # chosen while the last answer's last step ran


class NowAndThen(AdaptiveTrees):
    """Eight plain steps, four drafts, and so on; counts what was chosen."""

    num_chosen = 0

    def choose(self, num_rows):
        self.num_chosen += 1
        self.current = PLAIN if (self.num_chosen - 1) % 12 < 8 else CHAIN
        return self.current


@pytest.mark.parametrize("rows", [1, 3])
def test_each_choice_is_a_step(rows, captured_on_cpu):
    """Also where the drafter has to catch up first, for which the step on its way is waited for."""
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
    adaptive_trees = Counting([CHAIN], StepTimes({(2, PLAIN): 1.0, (2, CHAIN): 1.1}))
    decoder = BatchDecoder(target, target, adaptive_trees, num_rows=2, max_length=128)
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
    assert adaptive_trees.counted[-1] == 9


@pytest.mark.parametrize("warm_up", [False, True])
def test_nothing_that_was_chosen_before_is_left_once_it_is_forgotten(warm_up):
    target = tiny_model(2)
    adaptive_trees = AdaptiveTrees([CHAIN], StepTimes({(1, PLAIN): 1.0, (1, CHAIN): 1.1}))
    decoder = BatchDecoder(target, tiny_model(3), adaptive_trees, num_rows=1, max_length=128)
    request = Request([1, 2, 3], GenerationConfig(60, ignore_eos=True))
    with decoder.forgetting() if warm_up else nullcontext():
        decoder.generate([request])
        assert adaptive_trees.current == PLAIN  # another model's drafts are hardly ever right
    if not warm_up:
        decoder.forget()
    row = decoder.admit(request)
    for _ in range(2):  # the prompt, and a step
        decoder.step()
    assert decoder.release(row).stats.calls_by_tree == {CHAIN.name: 1}


def test_costs_that_are_measured_anew_count_from_the_next_step_on(monkeypatch):
    target = tiny_model(2)
    decoder = BatchDecoder(
        target, right_now_and_then(target), apportioning(), num_rows=8, max_length=64, max_nodes=33
    )
    decoder.generate([Request([1, 2], GenerationConfig(10))])
    asked = []
    choose = decoder.adaptive_trees.choose
    monkeypatch.setattr(
        decoder.adaptive_trees, "choose", lambda rows: (asked.append(rows), choose(rows))[1]
    )
    decoder.measure_step_times(num_steps=1, counts=[1])
    assert decoder.admit(Request([1, 2], GenerationConfig(10))) == 0
    decoder.step()
    assert not asked  # the prompt is read
    decoder.step()
    assert asked == [1, 1]  # this step's, and the next one's


def test_what_is_expected_is_worked_out_every_eighth_step(monkeypatch):
    adaptive_trees = AdaptiveTrees(DEPTHS, StepTimes({(1, tree): 1.0 for tree in (PLAIN, *DEPTHS)}))
    revised = []
    revise = adaptive_trees._revise
    monkeypatch.setattr(adaptive_trees, "_revise", lambda: (revised.append(1), revise()))
    for steps in range(1, 65):
        tree = adaptive_trees.choose(1)
        assert len(revised) == (steps - 1) // 8
        adaptive_trees.learn_path(tree, [0, 1])


@pytest.mark.parametrize("grows", [False, True])
def test_many_rows_that_accept_alike_are_no_reason_to_change(grows):
    """64 rows whose drafts are accepted in every other step: one step tells little more than one
    row does, and what pays by 7 % on the mean is kept."""
    tree = BeamTree.of(2, 1, 3) if grows else TokenTree.chain(1)
    adaptive_trees = AdaptiveTrees([tree], StepTimes({(64, PLAIN): 1.0, (64, tree): 1.4}))
    used = []
    for step in range(200):
        used.append(adaptive_trees.choose(64))
        for _ in range(64):
            adaptive_trees.learn_path(used[-1], [0, 1][: 1 + step % 2])
    assert set(used) == {tree}


def test_a_tree_is_seen_the_more_often_the_less_it_loses():
    """Beside the best, one that seems to cost 6 % more and one that costs four times as much; all
    tries together lose as much as they may."""
    best, near, far = balanced([3, 2]), BeamTree.of(2, 2, 6), BeamTree.of(3, 2, 6)
    seconds = {PLAIN: 1.0, best: 1.0, near: 1.06, far: 4.0}
    adaptive_trees = AdaptiveTrees(
        [best, near, far], StepTimes({(1, tree): each for tree, each in seconds.items()})
    )
    used = []
    for _ in range(8000):
        used.append(adaptive_trees.choose(1))
        adaptive_trees.learn_path(used[-1], [0, 1][: 1 + used[-1].max_depth])
    late = used[500:]
    assert late.count(near) > 4 * late.count(far) > 0
    lost = sum(seconds[tree] - 1.0 for tree in late)
    assert lost < TRY_SHARE * len(late)


def test_what_cannot_pay_is_not_tried_first():
    """A chain of two that takes as long as three plain steps, were all of it accepted."""
    adaptive_trees = AdaptiveTrees([CHAIN, WIDE], costs(plain=1.0, chain=3.0, wide=3.1))
    used, _ = simulated(adaptive_trees, 1, 40, rates=[0.9])
    assert set(used) == {PLAIN}


class Told(AdaptiveTrees):
    """Keeps what it is told of requests."""

    def forget(self) -> None:
        super().forget()
        self.told: list[str] = []

    def learn_tokens(self, num_tokens: int) -> None:
        self.told.append("tokens")
        super().learn_tokens(num_tokens)

    def learn_answer(self, *read_s: float | None) -> None:
        self.told.append("answer")
        super().learn_answer(*read_s)


@pytest.mark.parametrize(
    ("tree", "num_steps", "told"),
    [(None, 0, []), (None, 1, ["tokens", "answer"]), (CHAIN, 1, []), (CHAIN, 9, [])],
    ids=["unread", "cut-short", "own-tree-cut-short", "own-tree"],
)
def test_which_requests_teach_how_long_answers_are(tree, num_steps, told):
    target = tiny_model(1)
    adaptive_trees = Told([CHAIN], costs(1.0, 1.1, 9.0))
    decoder = BatchDecoder(
        target, right_now_and_then(target), adaptive_trees, num_rows=1, max_length=64
    )
    row = decoder.admit(Request([1, 2], GenerationConfig(5), tree))
    for _ in range(num_steps):
        decoder.step()
    decoder.release(row)
    assert adaptive_trees.told == told


def test_all_rows_pay_for_their_prompts():
    adaptive_trees = AdaptiveTrees([CHAIN], costs(1.0, 1.5, 9.0))
    adaptive_trees.learn_tokens(10)
    adaptive_trees.learn_answer(prefill_s=2.0)
    assert adaptive_trees._speed_of(4, CHAIN, 2.0) == pytest.approx(
        2.0 / (1.5 + 4 * 2.0 * 2.0 / 10)
    )


def test_observations_of_many_rows_fade_as_one_step():
    adaptive_trees = AdaptiveTrees([CHAIN], costs(1.0, 1.1, 9.0, rows=4))
    adaptive_trees.choose(4)
    for _ in range(4):
        adaptive_trees.learn(CHAIN, 1)
    assert adaptive_trees.rates._weight == pytest.approx(1 / 0.99)


def test_a_tree_that_was_chosen_for_other_rows_is_chosen_again():
    target = tiny_model(1)
    adaptive_trees = AdaptiveTrees([CHAIN], costs(1.0, 1.1, 9.0))
    decoder = BatchDecoder(
        target, right_now_and_then(target), adaptive_trees, num_rows=2, max_length=64
    )
    chosen, choose, launch = [], adaptive_trees.choose, decoder.runner.launch
    adaptive_trees.choose = lambda num_rows: chosen.append(num_rows) or choose(num_rows)
    decoder.runner.launch = lambda inputs, mark: (
        launched.append((chosen[-1], len(inputs.rows.active))) or launch(inputs, mark)
    )
    launched: list = []
    for each in range(2):
        decoder.admit(Request([1 + each], GenerationConfig(20)))
        for _ in range(3):
            decoder.step()
    assert {took for _, took in launched} == {1, 2}
    assert all(told == took for told, took in launched)
