"""Choose a step's tree: the best by expected tokens and cost, plain decoding when none pays."""

import itertools
import random
from collections import deque
from contextlib import nullcontext
from dataclasses import replace

import pytest
from simulated_trees import CHAIN, WIDE, costs, decoder_of, simulated
from toys import tiny_model

from stree import BatchDecoder, GenerationConfig, Request, TokenTree
from stree.common.errors import UsageError
from stree.tree_policy.acceptance import AcceptanceRates, DynamicAcceptanceRates
from stree.tree_policy.adaptive import PLAIN, REVISED_AFTER, AdaptiveTrees
from stree.tree_policy.bandit import BanditTrees
from stree.tree_policy.explorer import PROBE_SHARE, PROBE_STEPS, TRY_SHARE, telling
from stree.tree_policy.step_times import StepTimes
from stree.trees.token_tree import BeamTree, as_tree, balanced


def test_expected_tokens_of_known_rates():
    """The expectation is Σ over nodes of the product of the rates above."""
    rates, rng = AcceptanceRates(), random.Random(1)
    for _ in range(4000):
        first = rng.random()
        node = 0 if first < 0.3 else 1 if first < 0.8 else 2
        rates.learn(TokenTree((-1, 0, 0)), [node])
    assert rates.rate(0, 0) == pytest.approx(0.5, abs=0.15)
    assert rates.rate(0, 1) == pytest.approx(0.2, abs=0.12)
    one, two = rates.rate(0, 0), rates.rate(0, 1)
    tree = TokenTree((-1, 0, 0, 1))
    expected = pytest.approx(1 + one + two + one * rates.rate(1, 0))
    assert rates.expected_tokens((tree, PLAIN, tree)) == [expected, 1, expected]
    assert rates.rate(1, 0) == rates.rate(0, 0)  # nothing was seen there yet


def test_what_was_seen_long_ago_gives_way_to_what_is_seen_above():
    """The rate of a depth that no recent tree reaches follows that above; counts stay finite."""
    rates = AcceptanceRates()
    for _ in range(100):
        rates.learn(TokenTree.chain(3), [1])  # nothing but the first draft
    assert rates.rate(1, 0) < 0.05
    for _ in range(60_000):
        rates.learn(TokenTree.chain(1), [1])
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
    policy = AdaptiveTrees([CHAIN, WIDE], table)
    used, tokens = simulated(policy, 1, 20_000, [0.05, 0.0, 0.0])
    late = used[2000:]
    probing = sum(table.seconds[1, tree] for tree in late if tree != PLAIN)
    assert 0 < probing < 1.2 * PROBE_SHARE * len(late)
    spent = sum(table.seconds[1, tree] for tree in used)
    assert tokens / spent > 0.97  # of plain decoding's, its beginning included


def test_drafting_goes_on_soon_after_a_hard_text():
    """Probes come often at first: a hundredth of plain decoding's time is 400 steps without any."""
    policy = AdaptiveTrees([CHAIN, WIDE], costs(1.0, 1.3, 1.6))
    for seed in range(5):
        easy, _ = simulated(policy, 1, 300, [0.8, 0.1, 0.05], seed)
        hard, _ = simulated(policy, 1, 300, [0.0, 0.0, 0.0], seed)
        again, _ = simulated(policy, 1, 200, [0.8, 0.1, 0.05], seed)
        assert easy[-1] != PLAIN and hard[-1] == PLAIN
        assert again.count(PLAIN) < 150


def test_probes_try_each_tree_in_turn():
    """If the best were probed alone, no other could show that it has become better."""
    trees = [TokenTree.paper(), BeamTree.of(4, 2, 8), BeamTree.of(3, 2, 6)]
    table = StepTimes({(1, PLAIN): 1.0, **{(1, tree): 1.5 for tree in trees}}, catch_up=0.5)
    policy = AdaptiveTrees(trees, table)
    used, _, _ = deep_steps(policy, 0.02, 12_000)
    probes = [tree for tree, _ in itertools.groupby(used[2000:]) if tree != PLAIN]
    counts = [probes.count(tree) for tree in trees]
    assert min(counts) > 3 and max(counts) - min(counts) <= 1


@pytest.mark.parametrize("make", [AdaptiveTrees, BanditTrees])
def test_what_a_warm_up_shows_is_forgotten(make):
    """A policy chooses after `forgetting` as one that had no such block."""
    table = costs(1.0, 1.1, 1.2)
    policy, other = make([CHAIN, WIDE], table), make([CHAIN, WIDE], table)
    for each in (policy, other):
        simulated(each, 1, 20, [0.6, 0.2, 0.1])
        each.learn_tokens(90)
        each.learn_answer(0.1)
    with policy.forgetting():
        simulated(policy, 1, 100, [0.0, 0.0, 0.0], seed=1)
        policy.learn_tokens(1)
        policy.learn_answer(50.0)
        if make is AdaptiveTrees:
            assert policy.state.acceptance.revise()[WIDE] < 1.5
    assert policy.costs is table
    rates = [0.4, 0.2, 0.1]
    assert simulated(policy, 1, 200, rates, 2) == simulated(other, 1, 200, rates, 2)
    with policy.forgetting():
        policy.costs = costs(1.0, 2.0, 9.0)
    assert policy.costs.of(1, CHAIN) == 2.0
    policy.forget()
    new = make([CHAIN, WIDE], policy.costs)
    assert simulated(policy, 1, 200, rates, 2) == simulated(new, 1, 200, rates, 2)


@pytest.mark.parametrize(
    ("step_times", "before", "after", "found"),
    [((1.0, 1.5, 2.5), [0.05, 0.0, 0.0], [0.9, 0.05, 0.0], CHAIN),
     # A chain does not show what a wide tree's later children are worth: 2.4 tokens, its own 1.4
     ((1.0, 1.6, 1.7), [0.0, 0.0, 0.0], [0.3, 0.3, 0.3], WIDE)],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_tree_that_becomes_better_is_found(step_times, before, after, found, seed):
    policy = AdaptiveTrees([CHAIN, WIDE], costs(*step_times))
    simulated(policy, 1, 2000, before, seed)
    assert policy.state.current == PLAIN
    used, _ = simulated(policy, 1, 5000, after, seed=seed + 9)
    assert used[-1] == found


@pytest.mark.parametrize(
    ("host_s", "rates", "best"),
    [(0.0, [0.6, 0.2, 0.1], CHAIN), (1.5, [0.6, 0.2, 0.1], WIDE), (0.0, [0.05, 0, 0], PLAIN)],
)
def test_what_steps_take_while_it_decodes_replaces_what_was_measured(host_s, rates, best):
    """A host that takes as long for each step makes large trees worth more."""
    measured = costs(1.0, 1.1, 1.6)
    takes = costs(1.0 + host_s, 1.1 + host_s, 1.6 + host_s)
    count = 0
    for seed in range(4):
        policy = AdaptiveTrees([CHAIN, WIDE], measured)
        used, _ = simulated(policy, 1, 3000, rates, seed=seed, takes=takes)
        count += used[1000:].count(best)
    assert count > 0.93 * 4 * 2000
    slow = costs(1.0, 9.0, 9.0)  # what is measured again counts until steps say otherwise
    policy.costs = slow
    assert policy.speeds.step_s(1, CHAIN) == 9.0


def considered_by(policy, monkeypatch) -> list[int]:
    """Return a list that gets the number of rows whenever the policy considers its choice."""
    considered, consider = [], policy._consider
    monkeypatch.setattr(policy, "_consider", lambda rows: considered.append(rows) or consider(rows))
    return considered


def test_the_choice_is_considered_once_in_eight_steps(monkeypatch):
    """The host's time for it is a share of a small model's step."""
    policy = AdaptiveTrees([CHAIN, WIDE], costs(1.0, 1.1, 1.6))
    considered = considered_by(policy, monkeypatch)
    simulated(policy, 1, 4000, [0.6, 0.2, 0.1], takes=policy.costs)
    assert 4000 / REVISED_AFTER <= len(considered) < 1.5 * 4000 / REVISED_AFTER


def test_plain_decoding_is_considered_no_more_often_than_drafting(monkeypatch):
    """It may turn out to be best while it is probed, before all steps of that probe are done."""
    takes = costs(1.0, 1.1, 9.0)
    policy = AdaptiveTrees([CHAIN], takes)
    used, _ = simulated(policy, 1, 9, [0.5, 0.0, 0.0], takes=takes)
    assert used[:8] == 8 * [CHAIN] and used[-1] == PLAIN  # the first step of a probe
    policy.learn_tokens(2)
    policy.learn_answer(prefill_s=100.0)
    considered = considered_by(policy, monkeypatch)
    used, _ = simulated(policy, 1, 800, [0.5, 0.0, 0.0])
    assert used == 800 * [PLAIN]
    assert len(considered) < 1.1 * len(used) / REVISED_AFTER


def test_all_steps_of_a_probe_have_drafts():
    """A plain step among them would leave the drafter behind, and tell nothing of the tree."""
    policy = AdaptiveTrees([CHAIN], costs(1.0, 1.5, 1.6))
    used, _ = simulated(policy, 1, 20_000, [0.2, 0.0, 0.0], takes=costs(1.0, 1.5, 1.6))
    runs = [len(list(run)) for tree, run in itertools.groupby(used) if tree != PLAIN]
    assert len(runs) > 4 and set(runs[1:]) == {PROBE_STEPS}


@pytest.mark.parametrize(
    ("table", "rates", "prefill_s"),
    [
        (costs(1.0, 1.1, 9.0), [0.6, 0.0, 0.0], 0.0),
        (costs(1.0, 1.6, 9.0), [0.1, 0.0, 0.0], 0.0),
        (costs(1.0, 1.1, 1.6), [0.6, 0.0, 0.0], 100.0),
    ],
    ids=["while another is drafted", "while decoding is plain", "as reading prompts costs much"],
)
def test_a_tree_that_cannot_pay_is_not_considered_before_each_step(
    monkeypatch, table, rates, prefill_s
):
    """A probe may show it once or twice, which is less than each tree has at first."""
    policy = AdaptiveTrees([CHAIN, WIDE], table)
    policy.learn_tokens(2)
    policy.learn_answer(prefill_s=prefill_s)
    considered = considered_by(policy, monkeypatch)
    used, _ = simulated(policy, 1, 4000, rates)
    assert WIDE in policy.state.explorer.untried
    assert len(considered) < 1.2 * len(used) / REVISED_AFTER


def test_plain_decoding_is_not_probed_again_after_it_was_timed_for_long():
    """Otherwise the drafter would have to catch up twice when drafting begins."""
    takes = costs(1.0, 1.3, 9.0)
    policy = AdaptiveTrees([CHAIN], takes)
    simulated(policy, 1, 600, [0.0, 0.0, 0.0], takes=takes)
    used, _ = simulated(policy, 1, 800, [0.9, 0.0, 0.0], takes=takes)
    begun = used.index(CHAIN)
    assert used[begun : begun + 200] == 200 * [CHAIN]


def test_steps_that_stall_change_nothing():
    """Three of five steps may wait for a busy host."""
    policy = AdaptiveTrees([CHAIN, WIDE], costs(1.0, 1.1, 1.6))
    for number in range(100):
        policy.learn_step(1, CHAIN, 50.0 if number % 5 < 3 else 1.2)
    assert policy.speeds.step_s(1, CHAIN) == 1.2
    assert policy.speeds.step_s(1, WIDE) == pytest.approx(1.7)  # the host's tenth is added


def test_step_times_are_renewed_when_an_answer_ends():
    """Plain steps show no acceptance, so that nothing else renews them while decoding is plain."""
    policy = AdaptiveTrees([CHAIN], costs(1.0, 1.4, 9.0))
    for seconds in (1.0, 3.0):
        for _ in range(25):
            policy.learn_step(1, PLAIN, seconds)
        policy.learn_answer()
        assert policy.speeds.step_s(1, PLAIN) == seconds


def test_reading_a_prompt_and_catching_up_are_told_apart():
    """Time to catch up delays drafting once; time to read prompts counts against every tree."""
    policy = AdaptiveTrees([CHAIN], costs(1.0, 1.4, 9.0))
    for _ in range(50):
        policy.learn_tokens(10)
        policy.learn_answer(prefill_s=0.1, catch_up_s=9.0)
    used, _ = simulated(policy, 1, 200, [0.7])
    assert used[100:].count(CHAIN) > 90
    for _ in range(50):
        policy.learn_tokens(10)
        policy.learn_answer(prefill_s=9.0)
    used, _ = simulated(policy, 1, 200, [0.7], seed=1)
    assert used[100:].count(PLAIN) > 90


def test_old_steps_of_trees_that_grow_fade_for_any_number_of_steps():
    """Weights grow with each observation, and are brought back before they overflow."""
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
    policy = AdaptiveTrees([CHAIN, WIDE], costs(1.0, 1.1, 5.0))
    simulated(policy, 1, 40, [0.6, 0.2, 0.1])
    assert policy.choose(1) == CHAIN
    policy.costs = costs(1.0, 5.0, 1.1)
    assert policy.choose(1) == WIDE


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
        (["beam-4-2", "beam-4-5"], ["beam-4-2", "beam-4-5"]),
        (["beam-4-5-16", "beam-3-4-16", "dyspec-4-4-16"],) * 2,
    ],
    ids=lambda trees: " ".join(trees),
)
def test_which_trees_show_what_no_other_does(trees, told_by):
    assert [tree.name for tree in telling([as_tree(each) for each in trees])] == told_by


DEPTHS = [BeamTree.of(4, depth, 21) for depth in (2, 3, 4, 5)]


def deep_steps(policy, goes_on: float, num_steps: int, seed: int = 0):
    """Simulate steps whose path goes on from each depth with one probability.

    Returns the tree of each, all tokens and seconds.
    """
    rng, used, tokens, seconds = random.Random(seed), [], 0, 0.0
    for _ in range(num_steps):
        tree = policy.choose(1)
        path = [0]
        while len(path) <= tree.max_depth and rng.random() < goes_on:
            path.append(path[-1] + 1)
        policy.learn_paths(tree, [path])
        used.append(tree)
        tokens, seconds = tokens + len(path), seconds + policy.costs.of(1, tree)
    return used, tokens, seconds


@pytest.mark.parametrize("goes_on", [0.35, 0.6, 0.8, 0.95])
def test_trees_that_grow_are_as_deep_as_pays(goes_on):
    """Choosing is nearly as fast as the best depth where a level costs a quarter of a step."""
    table = {(1, tree): 1.0 + 0.25 * tree.max_depth for tree in (PLAIN, *DEPTHS)}
    policy = AdaptiveTrees(DEPTHS, StepTimes(table))
    used, tokens, seconds = deep_steps(policy, goes_on, 1500)
    speeds = {
        tree: sum(goes_on**depth for depth in range(tree.max_depth + 1)) / table[1, tree]
        for tree in (PLAIN, *DEPTHS)
    }
    best = max(speeds.values())
    assert tokens / seconds > 0.96 * best
    near = {tree for tree in speeds if speeds[tree] > 0.95 * best}
    assert sum(tree in near for tree in used[200:]) > 0.9 * len(used[200:])


def test_each_kind_of_tree_is_tried_before_any_is_judged():
    """A fixed tree shows nothing of what a dynamic one accepts."""
    paper, beam = TokenTree.paper(), BeamTree.of(4, 5, 32)
    policy = AdaptiveTrees(
        [paper, beam], StepTimes({(1, PLAIN): 1.0, (1, paper): 1.5, (1, beam): 1.5})
    )
    rng, used = random.Random(0), []
    for _ in range(600):
        tree = policy.choose(1)
        used.append(tree)
        depth = 0
        while depth < tree.max_depth and rng.random() < (0.8 if tree == paper else 0.5):
            depth += 1
        policy.learn_paths(tree, [tree.shape.path_to(tree.shape.levels[depth][0])])
    assert used.count(paper) > 0.9 * len(used) and used[:40].count(beam) >= 8


@pytest.mark.parametrize("warm_up", [False, True])
def test_nothing_that_was_chosen_before_is_left_once_it_is_forgotten(warm_up):
    target = tiny_model(2)
    policy = AdaptiveTrees([CHAIN], StepTimes({(1, PLAIN): 1.0, (1, CHAIN): 1.1}))
    decoder = BatchDecoder(target, tiny_model(3), policy, num_rows=1, max_length=128)
    request = Request([1, 2, 3], GenerationConfig(60, ignore_eos=True))
    with decoder.forgetting() if warm_up else nullcontext():
        decoder.generate([request])
        assert policy.state.current == PLAIN  # another model's drafts are hardly ever right
    if not warm_up:
        decoder.forget()
    row = decoder.admit(request)
    for _ in range(2):  # the prompt, and a step
        decoder.step()
    assert decoder.release(row).stats.calls_by_tree == {CHAIN.name: 1}


def test_only_the_first_answers_hasten_the_next_choice(monkeypatch):
    """In a batch an answer ends every few steps, and choosing takes the host's time."""
    policy = AdaptiveTrees([CHAIN], costs(1.0, 1.4, 9.0))
    considered = considered_by(policy, monkeypatch)
    for end in (16, 160):
        considered.clear()
        for _ in range(end):
            policy.learn_paths(policy.choose(1), [[0, 1, 2]])
            policy.learn_answer()
        assert len(considered) in ((16,) if end == 16 else (20, 21))


def test_what_is_expected_is_worked_out_every_eighth_step(monkeypatch):
    policy = AdaptiveTrees(DEPTHS, StepTimes({(1, tree): 1.0 for tree in (PLAIN, *DEPTHS)}))
    revised = []
    revise = policy.state.acceptance.revise
    monkeypatch.setattr(
        policy.state.acceptance, "revise", lambda: revised.append(1) or revise()
    )
    for steps in range(1, 65):
        tree = policy.choose(1)
        assert len(revised) == (steps - 1) // 8
        policy.learn_paths(tree, [[0, 1]])


def test_a_tree_is_seen_the_more_often_the_less_it_loses():
    """A tree that costs 6 % more is tried more often than one that costs four times as much."""
    best, near, far = balanced([3, 2]), BeamTree.of(2, 2, 6), BeamTree.of(3, 2, 6)
    seconds = {PLAIN: 1.0, best: 1.0, near: 1.06, far: 4.0}
    policy = AdaptiveTrees(
        [best, near, far], StepTimes({(1, tree): each for tree, each in seconds.items()})
    )
    used = []
    for _ in range(8000):
        used.append(policy.choose(1))
        policy.learn_paths(used[-1], [[0, 1][: 1 + used[-1].max_depth]])
    late = used[500:]
    assert late.count(near) > 4 * late.count(far) > 0
    lost = sum(seconds[tree] - 1.0 for tree in late)
    assert lost < TRY_SHARE * len(late)


def test_what_cannot_pay_is_not_tried_first():
    """A chain of two that takes as long as three plain steps is never tried."""
    policy = AdaptiveTrees([CHAIN, WIDE], costs(plain=1.0, chain=3.0, wide=3.1))
    used, _ = simulated(policy, 1, 40, rates=[0.9])
    assert set(used) == {PLAIN}


@pytest.mark.parametrize(("plain_s", "best"), [(1.0, PLAIN), (2.0, CHAIN)])
def test_plain_decoding_is_timed_while_drafts_are_made(plain_s, best):
    """Where it has become faster than it was measured, it is never missed by more than 2 %."""
    policy = AdaptiveTrees([CHAIN], costs(2.0, 3.0, 3.0))
    used, tokens = simulated(policy, 1, 4000, [0.7, 0, 0], takes=costs(plain_s, 3.0, 3.0))
    seconds = sum({PLAIN: plain_s, CHAIN: 3.0}[each] for each in used)
    assert used[100:].count(best) > 0.97 * 3900
    assert seconds < 1.02 * plain_s * tokens


def test_probes_of_plain_decoding_cost_a_fivehundredth():
    takes = costs(1.0, 1.2, 1.2)
    policy = AdaptiveTrees([CHAIN], takes)
    used, _ = simulated(policy, 1, 20000, [0.9, 0, 0], takes=takes)
    plain = used[1000:].count(PLAIN)
    speed = {PLAIN: 1.0, CHAIN: (1 + 0.9 + 0.81) / 1.2}
    lost = plain * takes.of(1, PLAIN) * (1 - speed[PLAIN] / speed[CHAIN])
    assert 0.0005 < lost / sum(takes.of(1, each) for each in used[1000:]) < 0.0025


@pytest.mark.costly
def test_steps_whose_reported_times_say_so_fall_back_to_plain_decoding():
    """The worker's clock is set: what was measured apart has plain decoding half as fast."""
    policy = AdaptiveTrees([CHAIN], costs(2.0, 3.0, 3.0))
    decoder = decoder_of(policy, max_length=1600)
    takes, clock = {PLAIN: 1.0, CHAIN: 3.0}, [0.0]
    execute, report, trees = decoder.worker.execute, decoder.worker.report, deque()

    def executed(plan):
        execute(plan)
        if plan.is_reported:
            trees.append(plan.trees.get(0))

    def reported():
        given = report()
        clock[0] += takes.get(trees.popleft(), 0.0)
        return replace(given, ended=clock[0])

    decoder.worker.execute, decoder.worker.report = executed, reported
    [output] = decoder.generate([[1, 2, 3]], GenerationConfig(1500, ignore_eos=True))
    assert output.stats.calls_by_tree[CHAIN.name] > 8  # it drafts at first
    assert clock[0] < 1.02 * takes[PLAIN] * len(output.tokens)
