"""Figures of answers and their differences, paired by prompt."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from stree_pipelines.comparison.answers import (
    COUNTS,
    Answers,
    acceptance_length,
    ratio,
    speedup,
    speedup_per_tau,
    tokens_per_second,
)


def answer(prompt: int, tokens: int, calls: int, seconds: float = 1.0, plain: float | None = None):
    baseline = None
    if plain is not None:
        baseline = SimpleNamespace(num_new_tokens=100, decode_s=plain)
    return SimpleNamespace(
        benchmark="b", prompt_id=f"{prompt}", num_new_tokens=tokens, num_calls=calls,
        decode_s=seconds, baseline=baseline,
    )


def test_a_gain_is_paired():
    """τ of the prompts spreads from 1 to 3, the tree always keeps 0.5 token more."""
    chain = Answers.of([[answer(n, 10 * n, 10) for n in (1, 2, 3)]])
    tree = Answers.of([[answer(n, 10 * n + 5, 10) for n in (3, 1, 2)]])
    gain = tree.over(chain, acceptance_length, np.subtract)
    assert gain.value == pytest.approx(0.5) and gain.interval == pytest.approx((0.5, 0.5))
    low, high = chain.figure(acceptance_length).interval
    assert high > low + 1


def test_the_ratio_of_two_speedups_takes_each_relative_to_its_own_baseline():
    """The other was measured in an hour when everything took twice as long."""
    tree = Answers.of([[answer(q, 100, 50, (1 + q) / 1.5, 1.0 + q) for q in range(4)]])
    chain = Answers.of([[answer(q, 100, 50, 2 * (1 + q) / 1.2, 2.0 + 2 * q) for q in range(4)]])
    gain = tree.over(chain, speedup, np.divide)
    assert gain.value == pytest.approx(1.25) and gain.interval == pytest.approx((1.25, 1.25))
    assert tree.value(speedup_per_tau) == pytest.approx(0.75)


def test_only_prompts_of_both_sides_and_of_every_seed_are_compared():
    seeds = [[answer(0, 10, 10), answer(1, 30, 10)], [answer(1, 20, 10), answer(2, 90, 10)]]
    mine = Answers.of(seeds)
    assert mine.prompts == (("b", "1"),) and mine.value(acceptance_length) == pytest.approx(2.5)
    other = Answers.of([[answer(1, 10, 10), answer(5, 70, 10)]])
    assert mine.over(other, acceptance_length, np.divide).value == pytest.approx(2.5)
    nobody = Answers.of([[answer(7, 10, 10)]])
    assert mine.over(nobody, acceptance_length, np.divide) == (None, None)
    assert mine.without(lambda prompt: prompt == ("b", "1")).value(acceptance_length) is None


def test_a_figure_is_undefined_where_a_row_lacks_a_count():
    answers = Answers.of([[answer(0, 10, 5, 2.0, 4.0), answer(1, 10, 5, 2.0)]])
    assert answers.value(tokens_per_second) == pytest.approx(5)
    assert answers.figure(speedup) == (None, None)


def test_a_difference_weighs_prompts_by_their_calls():
    """20 prompts of 100 calls at τ 3 and 20 of a single call at τ 1: pooled the gain over plain
    decoding is 1.98, by the mean of the prompts' own 1."""
    rows = [answer(q, *((300, 100) if q % 2 else (1, 1))) for q in range(40)]
    plain = [answer(q, *((300, 300) if q % 2 else (1, 1))) for q in range(40)]
    gain = Answers.of([rows]).over(Answers.of([plain]), acceptance_length, np.subtract)
    low, high = gain.interval
    assert 1.94 < low < gain.value < high < 2.0


def test_intervals_are_seeded_and_wider_at_a_higher_level():
    answers = Answers.of([[answer(q, 5 + q, 5) for q in range(12)]])
    first, again, other = (answers.figure(acceptance_length, seed=s).interval for s in (3, 3, 4))
    assert first == again != other
    low, high = answers.figure(acceptance_length, seed=3, level=0.99).interval
    assert low < first[0] and first[1] < high


def test_other_counts_and_keys_pair_other_rows():
    rows = [SimpleNamespace(question=q, overlap=0.5 * q, n=q) for q in (1, 2)]
    counted = {"sums": lambda row: row.overlap, "tokens": lambda row: row.n}
    answers = Answers.of([rows], counted, key=lambda row: (row.question,))
    assert answers.value(ratio("sums", "tokens")) == pytest.approx(0.5)
    assert answers.prompts == ((1,), (2,)) and "sums" not in COUNTS
