"""Plain decoding's spread between checkpoints: it is said, and noise advises no method."""

from __future__ import annotations

import numpy as np
import pytest
from hand_made_run import make_run, slow_down

from stree_pipelines.commands.report import write_report
from stree_pipelines.reports import plots
from stree_pipelines.reports.run_data import load_run
from stree_pipelines.reports.tables.tables import advise, plain_spread

LOADED = {100: 1.0, 1000: 2.5, 10000: 2.0}
QUIET = {1000: 1.15}


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path, temperatures=(0.0,))


def test_a_machine_that_had_other_work_advises_no_method(run):
    slow_down(run, LOADED)
    data = load_run(run)
    advice, spread = advise(data, 0.0), plain_spread(data.rows, 0.0)
    assert spread.ratio == pytest.approx(2.5) and advice.headline == advice.method == ""
    assert f"made {spread.slowest:,.0f} to {spread.fastest:,.0f} tokens/s" in advice.reason
    assert "(2.50×): the machine had other work" in advice.reason
    write_report(data)
    assert "No advice" in (run / "report.html").read_text(encoding="utf-8")


def test_a_quiet_machine_s_spread_is_said_beside_the_advice(run):
    before = advise(load_run(run), 0.0)
    assert "beside the checkpoints" not in before.reason
    slow_down(run, QUIET)
    advice = advise(load_run(run), 0.0)
    assert advice.headline == before.headline and advice.method == before.method
    assert advice.reason.endswith("tokens/s beside the checkpoints (1.15×).")


def test_speeds_of_other_prompts_and_machines_are_not_compared(run):
    rows = load_run(run).rows
    slow = [
        row.model_copy(update={"tokens_per_second": 0.5 * row.tokens_per_second, **change})
        for row in rows
        for change in (
            {"benchmark": "other"}, {"prompts_hash": "other"}, {"batch_size": 4},
            {"environment": row.environment.model_copy(update={"device": "other"})},
            {"temperature": 0.7},
        )
    ]
    assert plain_spread([*rows, *slow], 0.0) is None
    half = [r.model_copy(update={"tokens_per_second": 0.5 * r.tokens_per_second}) for r in rows]
    assert plain_spread([*rows, *half], 0.0).ratio == pytest.approx(2)


def test_the_figure_of_speed_divides_the_noise_out(run):
    def lines():
        (axes,) = plots.speed_vs_step(load_run(run)).axes
        return {line.get_label(): line.get_ydata() for line in axes.lines}

    before = lines()
    slow_down(run, LOADED)
    after = lines()
    assert before.keys() == after.keys() > {"plain decoding"}
    for label, values in before.items():
        np.testing.assert_allclose(after[label], values)
