"""Coverage of bootstrap intervals over few prompts, by simulation.

Prompts are drawn from a population whose answers differ as ours do: the number of a prompt's calls
is log-normal (σ = 0.7), its acceptance length normal, and a baseline of its own shares nine tenths
of that. The population is known, so an interval either holds its figure or does not. The table of
docs/compare-runs.md has the coverage of 10,000 draws; each is tried again here with fewer.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from stree import metrics

PAGE = Path(__file__).parents[2] / "docs/compare-runs.md"
POPULATION = 100_000
NUM_DRAWS = 1000


def population() -> np.ndarray:
    """Return tokens, calls, and tokens of the baseline, [3, prompts]."""
    rng = np.random.default_rng(0)
    calls = np.ceil(40 * rng.lognormal(0, 0.7, POPULATION))
    shared, own, other = rng.normal(0, 0.5, (3, POPULATION))
    mine, theirs = (3 + 0.9 * shared + 0.44 * each for each in (own, other))
    return np.stack([calls * mine, calls, calls * theirs])


def gain(counts: np.ndarray, i_RQ: np.ndarray) -> np.ndarray:
    tokens, calls, others = (each[i_RQ].sum(1) for each in counts)
    return (tokens - others) / calls


def length(counts: np.ndarray, i_RQ: np.ndarray) -> np.ndarray:
    return counts[0][i_RQ].sum(1) / counts[1][i_RQ].sum(1)


def covered(figure, num_prompts: int, num_draws: int, **options) -> float:
    """Return the share of intervals over `num_prompts` drawn prompts that hold the truth."""
    everyone, rng = population(), np.random.default_rng(1)
    (truth,) = figure(everyone, np.arange(POPULATION)[None])
    held = 0
    for seed in range(num_draws):
        drawn = everyone[:, rng.integers(POPULATION, size=num_prompts)]
        interval = metrics.bootstrap_interval(
            lambda i_RQ, drawn=drawn: figure(drawn, i_RQ), num_prompts, seed, **options
        )
        held += interval[0] <= truth <= interval[1]
    return held / num_draws


def stated() -> dict[int, list[float]]:
    """Return the page's table: {prompts: [coverage of τ, of a paired difference]}, in percent."""
    table = PAGE.read_text().partition("| τ, widened | difference, widened |")[2].split("\n\n")[0]
    lines = re.findall(r"^\| (\d+) \|.*\| ([\d.]+) % \| ([\d.]+) % \|$", table, re.M)
    return {int(count): [float(each) for each in shares] for count, *shares in lines}


@pytest.mark.quick(1)
@pytest.mark.parametrize("column", [0, 1], ids=["length", "gain"])
@pytest.mark.parametrize(
    "num_prompts", [6, 20, *(pytest.param(each, marks=pytest.mark.long) for each in (10, 40))]
)
def test_intervals_hold_the_truth_as_often_as_the_page_says(num_prompts, column):
    share = covered((length, gain)[column], num_prompts, NUM_DRAWS)
    said = stated()[num_prompts][column] / 100
    assert share == pytest.approx(said, abs=3 * math.sqrt(said * (1 - said) / NUM_DRAWS))
    assert share > 0.9  # by plain percentiles 0.85 of 6 prompts, 0.89 of 10


@pytest.mark.parametrize(
    ("freedom", "t"), [(1, 12.706), (2, 4.303), (5, 2.571), (9, 2.262), (30, 2.042), (999, 1.962)]
)
def test_quantiles_of_student_are_those_of_the_tables(freedom, t):
    assert metrics._student_quantile(0.975, freedom) == pytest.approx(t, abs=5e-4)


def test_quantiles_are_the_normal_ones_for_many_prompts_and_all_resamples_for_two():
    assert metrics.quantiles_of(10**6) == pytest.approx((0.025, 0.975), abs=1e-5)
    assert metrics.quantiles_of(2) == (0.0, 1.0)
