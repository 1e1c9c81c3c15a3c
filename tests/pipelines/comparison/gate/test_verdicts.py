"""Judge samples that are written by hand: which loss is a regression, and which is noise."""

from __future__ import annotations

import numpy as np
import pytest
from small_rows import UNFILTERED

from stree import metrics
from stree.common.errors import BadData
from stree_pipelines.comparison.answers import repeats
from stree_pipelines.comparison.gate import gate
from stree_pipelines.comparison.gate import summary as gate_summary
from stree_pipelines.evaluation.answering import stalls
from stree_pipelines.evaluation.records import BaselineTiming, SampleRow, Turn
from stree_pipelines.reports.tables import answer_notes

TAU = "acceptance_length=-3%"
pytestmark = pytest.mark.usefixtures("one_thread", "calm")


def sample(prompt: int, accepted: tuple[int, ...], decode_s: float = 1.0, **changes) -> SampleRow:
    values = dict(
        checkpoint_sha256="c", step=1, method="stree", tree="paper", benchmark="sums",
        prompt_id=str(prompt), category="", temperature=0.0, seed=0, decoding_hash="d", turns=(),
        num_new_tokens=sum(accepted) + len(accepted), num_calls=len(accepted), num_nodes=16,
        accepted_per_call=accepted, depth_per_call=(4,) * len(accepted), prefill_s=0.5,
        decode_s=decode_s, time_ms={},
        baseline=BaselineTiming(num_new_tokens=10, prefill_s=0.5, decode_s=2.0),
    )
    return SampleRow(**(UNFILTERED | values | changes))


def judge(text: str, mine: list[SampleRow], theirs: list[SampleRow]) -> gate.Finding:
    pairs = {("stree", 0.0, "sums"): (mine, theirs)}
    (finding,) = gate.judge([gate.Threshold.parse(text)], pairs)
    return finding


@pytest.mark.parametrize("metric", gate.METRICS)
def test_figures_are_those_of_stree_metrics(metric):
    rng = np.random.default_rng(0)
    mine, theirs = (
        [sample(q, tuple(rng.integers(0, 5, size=rng.integers(1, 7))), rng.uniform(0.5, 2))
         for q in range(9)]
        for _ in range(2)
    )
    name = metric + "[2]" * (metric == gate.DEPTH_RATES)
    finding = judge(f"{name}=-3%", mine, theirs)
    for got, samples in ((finding.checkpoint, mine), (finding.baseline, theirs)):
        wanted = metrics.summarise(samples, [s.baseline for s in samples])[metric]
        assert got == pytest.approx(wanted[2] if metric == gate.DEPTH_RATES else wanted)
    assert finding.change == pytest.approx(finding.checkpoint / finding.baseline - 1)
    low, high = finding.interval
    assert low < finding.change < high


def test_only_an_interval_below_the_threshold_is_a_regression():
    """τ from 3 to 2.7: −10 % for every prompt, so the interval is a point."""
    old = [sample(q, (2,) * 10) for q in range(8)]
    new = [sample(q, (2,) * 7 + (1,) * 3) for q in range(8)]
    assert judge("acceptance_length=-9%", new, old).verdict == gate.REGRESSION
    assert judge("acceptance_length=-11%", new, old).verdict == gate.PASS
    assert judge("acceptance_length=-0.29", new, old).verdict == gate.REGRESSION
    assert judge("acceptance_length=-0.31", new, old).verdict == gate.PASS
    assert judge("acceptance_length=+2%", old, old).verdict == gate.REGRESSION
    few = judge("acceptance_length=-9%", new[:5], old[:5])
    assert few.verdict == gate.INCONCLUSIVE and "6 the least" in few.reason


def test_a_change_weighs_prompts_by_their_calls():
    """Half of the prompts have one call and got worse, which is nothing among the others' calls."""
    old = [sample(q, (2,) * (100 if q % 2 else 1)) for q in range(20)]
    new = [sample(q, (2,) * 100 if q % 2 else (0,)) for q in range(20)]
    finding = judge("acceptance_length=-3%", new, old)
    low, high = finding.interval
    assert finding.verdict == gate.PASS and -0.03 < low < finding.change < high < 0


def test_noise_is_inconclusive_and_says_how_many_prompts_would_tell():
    old = [sample(q, (2,) * 10) for q in range(8)]
    new = [sample(q, ((3,) if q % 2 else (1,)) * 10) for q in range(8)]
    finding = judge("acceptance_length=-3%", new, old)
    assert finding.verdict == gate.INCONCLUSIVE and finding.change == pytest.approx(0)
    needed = int(finding.reason.split()[1])
    new, old = (
        [each.model_copy(update={"prompt_id": f"{each.prompt_id}, {copy}"})
         for copy in range(2 * needed // 8) for each in samples]
        for samples in (new, old)
    )
    assert judge("acceptance_length=-3%", new, old).verdict == gate.PASS


def test_more_thresholds_want_more_prompts():
    """Six of six prompts got worse: by chance that is 1 in 64, of two thresholds 1 in 32."""
    old = [sample(q, (2,) * 10) for q in range(6)]
    new = [sample(q, (1,) * 10) for q in range(6)]
    pairs = {("stree", 0.0, "sums"): (new, old)}
    assert judge("acceptance_length=0", new, old).verdict == gate.REGRESSION
    threshold = gate.Threshold.parse("acceptance_length=0")
    findings = gate.judge([threshold] * 2, pairs)
    assert {finding.reason for finding in findings} == {"too few prompts: 6, 7 the least"}
    pairs = {(method, temperature, benchmark): (new, old) for method in ("stree", "vanilla_sd")
             for temperature in (0.0, 1.0) for benchmark in ("sums", "more")}
    findings = gate.judge([gate.Threshold.parse("sums.acceptance_length=0")] * 2, pairs)
    assert [finding.reason for finding in findings] == ["too few prompts: 6, 9 the least"] * 8
    assert [gate.least_prompts(gate.level_of(count)) for count in (1, 2, 4, 8)] == [6, 7, 8, 9]


@pytest.mark.costly
def test_a_false_alarm_is_as_rare_as_it_says_over_all_thresholds_together():
    """Checkpoint and baseline draw calls alike, on four benchmarks of 10 prompts: one of four
    thresholds at 0 is to be called a regression in 2.5 % of 200 gates, which is 5. Intervals of 10
    prompts make it 8 here; 95 % for each threshold by itself makes it 20."""
    rng = np.random.default_rng(0)
    thresholds = [gate.Threshold.parse(f"b{number}.acceptance_length=0") for number in range(4)]

    def drawn(benchmark: str) -> list[SampleRow]:
        rates = rng.uniform(0.3, 0.8, size=10)
        return [
            sample(q, tuple(map(int, rng.binomial(4, rate, size=8))), benchmark=benchmark)
            for q, rate in enumerate(rates)
        ]

    alarms = 0
    for _ in range(200):
        pairs = {("stree", 0.0, f"b{n}"): (drawn(f"b{n}"), drawn(f"b{n}")) for n in range(4)}
        alarms += gate.overall(gate.judge(thresholds, pairs)) == gate.REGRESSION
    assert 0 < alarms <= 12


def turn(tokens: tuple[int, ...]) -> Turn:
    return Turn(user="", num_prompt_tokens=1, tokens=tokens, text="", finish_reason="length")


def test_answers_that_go_in_circles_are_left_out():
    """Two of ten prompts end in a loop, whose drafts are all accepted; without them τ is worse."""
    circle, line = turn((*range(12), *(1, 2, 3) * 10)), turn(tuple(range(42)))
    old = [sample(q, (2,) * 10, turns=(line,)) for q in range(10)]
    new = [
        sample(q, (4,) * 40, turns=(line, circle)) if q < 2 else sample(q, (1,) * 10, turns=(line,))
        for q in range(10)
    ]
    finding = judge(TAU, new, old)
    assert finding.verdict == gate.REGRESSION and finding.checkpoint == pytest.approx(2)
    assert (finding.num_prompts, finding.num_repeating) == (8, 2)
    swapped = judge(TAU, old, new)  # now only the baseline's answers go in circles
    assert swapped.verdict == gate.PASS and swapped.baseline == pytest.approx(2)
    assert (swapped.num_prompts, swapped.num_repeating) == (8, 2)
    told = "\n".join(gate_summary._repeating([finding, finding]))
    assert told.count("2 of 10 prompts") == 1
    assert not repeats(sample(0, (1,), turns=(turn((1, 2, 3) * 9),))), "too short to say"


def test_speeds_of_marked_rows_are_refused_and_other_figures_are_not(monkeypatch):
    monkeypatch.setattr(stalls, "MIN_ANSWERS", 5)
    old = [sample(q, (1, 2)) for q in range(12)]
    waited = BaselineTiming(num_new_tokens=10, prefill_s=0.5, decode_s=9.0)
    held_up = [*old[:-1], sample(11, (1, 2), baseline=waited)]
    for text in ("speedup=-3%", "speedup_per_tau=-3%", "tokens_per_second=-3%"):
        for pair in ((held_up, old), (old, held_up)):
            with pytest.raises(BadData, match=r"held up answers to 1 of 12 prompts \(11\)"):
                judge(text, *pair)
        judge(text, old, old)
    assert judge(TAU, held_up, old).verdict == gate.PASS


def test_speeds_over_plain_decoding_that_waits_are_refused(monkeypatch):
    monkeypatch.setattr(answer_notes, "MAX_WAITING_SHARE", 0.2)
    times = {"verify": 1500.0, "accept": 0.0, "host": 500.0}
    waited = BaselineTiming(num_new_tokens=10, prefill_s=0.5, decode_s=2.0, time_ms=times)
    rows = [sample(q, (1, 2), baseline=waited) for q in range(12)]
    with pytest.raises(BadData, match="waited between its steps, for 25 % of its time"):
        judge("speedup=-3%", rows, rows)


def test_a_depth_is_judged_by_the_calls_whose_tree_has_it():
    chosen = {"calls_by_tree": {"plain": 2, "chain-2": 2}}
    deep = [sample(q, (2, 1, 2, 2)) for q in range(8)]
    mixed = [sample(q, (0, 2, 0, 2), depth_per_call=(0, 2, 0, 2), **chosen) for q in range(8)]
    finding = judge("depth_accept_rates[1]=-5%", mixed, deep)
    assert finding.checkpoint == 1 and finding.verdict == gate.PASS
    unknown = [sample(q, (0, 2, 0, 2), depth_per_call=None) for q in range(8)]
    with pytest.raises(BadData, match="how deep"):
        judge("depth_accept_rates[1]=-5%", unknown, deep)


def test_small_losses_within_the_threshold_pass_but_do_not_become_the_baseline():
    old = [sample(q, (2,) * 10) for q in range(8)]
    slower = [sample(q, (3,) + (2,) * 9, decode_s=1.1) for q in range(8)]
    pairs = {("stree", 0.0, "sums"): (slower, old)}
    thresholds = [gate.Threshold.parse(t) for t in (TAU, "speedup=-20%")]
    findings = gate.judge(thresholds, pairs)
    assert gate.overall(findings) == gate.PASS and not gate.is_better(findings)
    assert gate.is_better(findings[:1])


def test_undefined_figures_and_foreign_samples():
    old = [sample(q, (0, 0)) for q in range(8)]
    plain, few = ([sample(q, (0, 0), calls_by_tree=calls) for q in range(8)]
                  for calls in ({"plain": 2}, {"chain-2": 2}))
    assert "every step of both" in judge(TAU, plain, plain).reason
    assert judge(TAU, plain, few).verdict == judge(TAU, few, plain).verdict == gate.PASS
    assert "undefined" in judge("depth_accept_rates[2]=-3%", old, old).reason
    with pytest.raises(BadData, match="other prompts"):
        judge(TAU, old, old[::-1])
    alone = [sample(q, (1,), baseline=None) for q in range(8)]
    with pytest.raises(BadData, match="plain decoding"):
        judge("speedup=-3%", alone, old)
