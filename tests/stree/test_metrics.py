"""Every figure against a value worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from stree import metrics
from stree.common.errors import InvariantBroken
from stree.generation import DecodingStats


@dataclass
class Counts:
    num_new_tokens: int
    num_calls: int
    accepted_per_call: list[int]
    num_nodes: int = 0
    prefill_s: float = 0.0
    decode_s: float = 1.0
    time_ms: dict[str, float] = field(default_factory=dict)
    end_node_per_call: list[int] | None = None
    depth_per_call: list[int] | None = None
    call_share: float | None = None
    calls_by_tree: dict[str, int] = field(default_factory=dict)


# Chain of four drafts. The first prompt: 3 calls keep 2, 0 and 4 drafts and a bonus each = 9 new
# tokens. The second: one call keeps 4 drafts but stops at EOS, so that its bonus is cut: 4.
LONG = Counts(
    9, 3, [2, 0, 4], num_nodes=15, decode_s=0.3, prefill_s=0.1, depth_per_call=[4, 4, 4]
)
SHORT = Counts(4, 1, [4], num_nodes=5, decode_s=0.1, prefill_s=0.1, depth_per_call=[4])


def tau_interval(prompts, seed=0):
    return metrics.confidence_intervals(prompts, seed=seed)["acceptance_length"]


def test_acceptance_length_pools_calls_and_the_mean_weighs_prompts_alike():
    assert metrics.acceptance_length([LONG, SHORT]) == 13 / 4
    assert metrics.acceptance_length_prompt_mean([LONG, SHORT]) == (3 + 4) / 2


def test_tau_without_a_call_is_nan_and_none_in_results():
    assert np.isnan(metrics.tau(0, 0)) and metrics.tau(13, 4) == 13 / 4
    np.testing.assert_array_equal(metrics.tau(np.array([3, 0]), np.array([2, 0])), [1.5, np.nan])
    assert metrics.acceptance_length([]) is None
    assert np.isnan(DecodingStats().acceptance_length)


def test_the_shares_of_trees_are_of_all_steps():
    prompts = [
        Counts(9, 3, [2, 0, 4], calls_by_tree={"a": 1, "b": 2}),
        Counts(4, 1, [4], calls_by_tree={"b": 1}),
    ]
    assert metrics.tree_shares(prompts) == {"b": 0.75, "a": 0.25}
    assert metrics.tree_shares([LONG, SHORT]) == {}


def test_a_batch_s_seconds_count_once_and_its_rows_are_the_mean_over_calls():
    """Two prompts of 4 and 2 calls share calls of 0.1 s, until the longer one is alone."""
    long = Counts(4, 4, [0] * 4, decode_s=2 * 0.05 + 2 * 0.1, call_share=2 * 0.5 + 2)
    short = Counts(2, 2, [0] * 2, decode_s=2 * 0.05, call_share=2 * 0.5)
    assert metrics.tokens_per_second([long, short]) == pytest.approx(6 / 0.4)
    assert metrics.rows_per_call([long, short]) == 6 / 4
    assert metrics.rows_per_call([LONG, SHORT]) == 1
    assert metrics.rows_per_call([]) is None


def test_end_nodes_are_counted_over_prompts_that_all_say_them():
    first = Counts(9, 3, [2, 0, 2], end_node_per_call=[4, 0, 4], depth_per_call=[3, 3, 2])
    second = Counts(1, 1, [0], end_node_per_call=[0], depth_per_call=[3])
    assert metrics.end_nodes([first, second]) == {0: 2, 4: 2}
    assert metrics.open_ends([first, second]) == {4: 1}
    assert metrics.end_nodes([first, SHORT]) == {} == metrics.end_nodes([])
    assert metrics.open_ends([first, SHORT]) == {}


def test_a_prompt_without_calls_changes_nothing_and_nothing_measured_is_none():
    empty = Counts(0, 0, [], decode_s=0.0)
    assert metrics.acceptance_length([LONG, empty]) == 3
    assert metrics.acceptance_length_prompt_mean([LONG, empty]) == 3
    assert metrics.acceptance_length([empty]) is None
    assert metrics.tokens_per_second([empty]) is None
    assert metrics.time_ms([empty]) == {}


def test_histogram_counts_drafts_without_the_bonus():
    assert metrics.acceptance_histogram([LONG, SHORT]) == {0: 1, 2: 1, 4: 2}


def test_depth_rates_condition_on_having_reached_the_depth_before():
    # Calls keep 2, 0, 4, 4. Depth 1: 3 of 4. Depth 2: 3 of the 3 that got there. Depth 3: 2 of 3.
    rates = metrics.depth_accept_rates([LONG, SHORT])
    assert rates == {1: 3 / 4, 2: 1.0, 3: 2 / 3, 4: 1.0}


def test_depth_rates_leave_out_calls_whose_tree_ends_above():
    shallow = Counts(4, 2, [1, 1], depth_per_call=[1, 1])
    deep = Counts(4, 2, [1, 1], depth_per_call=[2, 2])
    assert metrics.depth_accept_rates([shallow, deep]) == {1: 1.0, 2: 0.0}


def test_depth_rates_count_no_plain_step_as_a_rejection():
    calls = {"calls_by_tree": {"plain": 2, "chain-2": 1}}
    chosen = Counts(5, 3, [0, 2, 0], depth_per_call=[0, 2, 0], **calls)
    assert metrics.depth_accept_rates([chosen]) == {1: 1.0, 2: 1.0}
    unknown = Counts(5, 3, [0, 2, 0], **calls)
    assert metrics.depth_accept_rates([chosen, unknown]) == {}


def test_a_chains_expected_length_is_the_geometric_sum():
    assert metrics.expected_acceptance_length(0.0, 4) == 1
    assert metrics.expected_acceptance_length(1.0, 4) == 5
    assert metrics.expected_acceptance_length(0.5, 4) == 1.9375
    assert metrics.expected_acceptance_length(0.5, 1) == 1.5


def test_nodes_per_call_and_speeds():
    assert metrics.nodes_per_call([LONG, SHORT]) == 5
    assert metrics.tokens_per_second([LONG, SHORT]) == pytest.approx(13 / 0.4)
    assert metrics.tokens_per_second_e2e([LONG, SHORT]) == pytest.approx(13 / 0.6)


def test_speedup_is_relative_to_the_same_prompts():
    baseline = [Counts(9, 9, [0] * 9, decode_s=0.9), Counts(4, 4, [0] * 4, decode_s=0.4)]
    assert metrics.speedup([LONG, SHORT], baseline) == pytest.approx(3.25)
    assert metrics.speedup_per_tau([LONG, SHORT], baseline) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="same prompts"):
        metrics.speedup([LONG], baseline)


def test_parts_of_a_step_add_up_to_it():
    # 4 calls in 400 ms: a step is 100 ms; draft 10, verify 60, accept 5 leave 25. Records from
    # before a commit was part of accepting have it too, and it is 0.
    counts = Counts(
        8, 4, [1] * 4, decode_s=0.4,
        time_ms={"draft": 40, "verify": 240, "accept": 20, "commit": 0, "host": 1},
    )
    parts = metrics.time_ms([counts])
    assert parts == pytest.approx({"draft": 10, "verify": 60, "accept": 5, "host": 25})
    assert sum(parts.values()) == pytest.approx(100)


def test_parts_longer_than_the_step_are_refused():
    with pytest.raises(InvariantBroken, match="timed twice"):
        metrics.time_ms([Counts(1, 1, [0], decode_s=0.1, time_ms={"verify": 120.0})])


@pytest.mark.parametrize(
    ("mine", "theirs", "position"),
    [
        ([1, 2], [1, 2], None),
        ([1, 2], [1, 3], 1),
        ([1], [1, 2], 1),
        ([1, 2], [1], 1),
        ([], [], None),
    ],
)
def test_first_difference(mine, theirs, position):
    assert metrics.first_difference(mine, theirs) == position


def test_interval_of_identical_prompts_has_no_width_and_of_one_prompt_is_unknown():
    assert tau_interval([LONG] * 5) == (3.0, 3.0)
    assert tau_interval([LONG]) is None


def test_an_interval_is_what_lies_between_the_quantiles():
    evenly = metrics.bootstrap_interval(lambda i_RQ: np.linspace(0, 1, len(i_RQ)), num_prompts=20)
    low, high = metrics.quantiles_of(20)
    assert evenly == pytest.approx((low, high)) and (low, high) == pytest.approx(
        (0.0159, 0.9841), 1e-2
    )


def test_intervals_weigh_prompts_by_their_calls_as_the_figures_do():
    """Pooled over prompts of 100 calls at τ 3 and of one call at τ 1, τ is 2.98; the mean is 2."""
    long = Counts(300, 100, [2] * 100, decode_s=10.0)
    short = Counts(1, 1, [0], decode_s=0.1)
    plain = [Counts(300, 300, [], decode_s=30.0), Counts(1, 1, [], decode_s=0.025)]
    prompts, baseline = [long, short] * 20, plain * 20
    summary = metrics.summarise(prompts, baseline)
    assert summary["confidence_intervals"].keys() == {
        "acceptance_length", "tokens_per_second", "speedup", "speedup_per_tau"
    }
    for name, (low, high) in summary["confidence_intervals"].items():
        assert 0.98 * summary[name] < low < summary[name] < high < 1.02 * summary[name]


def test_pairing_cancels_what_prompts_share():
    """Prompts differ tenfold in speed but the method is always 1.5 times as fast as the baseline:
    unpaired, the interval would be wide; paired it is a point."""
    baseline = [Counts(100, 100, [0] * 100, decode_s=0.1 * (1 + q)) for q in range(10)]
    faster = [Counts(100, 50, [1] * 50, decode_s=b.decode_s / 1.5) for b in baseline]
    intervals = metrics.confidence_intervals(faster, baseline)
    assert intervals["speedup"] == pytest.approx((1.5, 1.5))
    assert intervals["speedup_per_tau"] == pytest.approx((0.75, 0.75))
    low, high = intervals["tokens_per_second"]
    assert high > 1.2 * low


def test_summary_has_the_published_names():
    summary = metrics.summarise([LONG, SHORT], [LONG, SHORT])
    assert set(summary) == {
        "acceptance_length", "acceptance_length_prompt_mean", "acceptance_histogram",
        "depth_accept_rates", "end_nodes", "open_ends", "nodes_per_call", "rows_per_call",
        "tree_shares", "tokens_per_second", "tokens_per_second_e2e", "speedup",
        "speedup_prompt_median", "speedup_per_tau", "time_ms", "baseline_time_ms",
        "confidence_intervals",
    }
    assert summary["speedup"] == 1
    assert metrics.summarise([LONG])["speedup"] is None
    assert metrics.summarise([LONG])["speedup_prompt_median"] is None


def test_the_median_of_prompts_speedups_does_not_move_with_one_that_stalled():
    baseline = [Counts(100, 100, [0] * 100, decode_s=1.0 + 8.0 * (q == 2)) for q in range(5)]
    drafted = [Counts(100, 50, [1] * 50, decode_s=0.8) for _ in baseline]
    assert metrics.speedup(drafted, baseline) == pytest.approx(13 / 4)
    assert metrics.speedup_prompt_median(drafted, baseline) == pytest.approx(1.25)
    assert metrics.speedup_prompt_median([], []) is None
