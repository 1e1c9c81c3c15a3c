"""Simulated acceptance against measured τ: where the two part ways is said, and nowhere else."""

from __future__ import annotations

import html

import pytest
from hand_made_run import CALLS, STEPS, make_run

from stree_pipelines.commands.report import main
from stree_pipelines.reports.run_data import load_run
from stree_pipelines.reports.simulation import (
    Checkpoint,
    compared,
    find_parting,
    num_drafts_of,
    parting_sentence,
)


def checkpoints(*points, width=0.1):
    """Make checkpoints of steps 1, 2, … and a chain of four, given (simulated acceptance, τ)."""
    return [
        Checkpoint(step, acceptance, 4, tau, (tau - width, tau + width))
        for step, (acceptance, tau) in enumerate(points, start=1)
    ]


@pytest.mark.parametrize(
    ("points", "since"),
    [
        # Promised are 1.43, 1.94 and 2.77: the last measured one is worse than the first.
        ([(0.3, 1.4), (0.5, 1.8), (0.7, 1.1)], 3),
        # Not below the best beyond noise, and above half of the promise.
        ([(0.3, 1.4), (0.5, 2.0), (0.7, 1.95)], None),
        # It fell while it was still above half of what is promised.
        ([(0.3, 2.5), (0.5, 2.0)], 2),
        # Both fell: the simulation said so.
        ([(0.5, 2.5), (0.3, 2.0)], None),
        # Never near the promise, from the first checkpoint on.
        ([(0.5, 1.1), (0.6, 1.2), (0.7, 1.3)], 1),
        # Apart for a while, and together again.
        ([(0.3, 1.4), (0.5, 1.1), (0.7, 2.5)], None),
        ([], None),
    ],
)
def test_they_part_where_tau_falls_or_stays_behind_while_the_simulation_rises(points, since):
    parting = find_parting(checkpoints(*points))
    assert (parting and parting.step) == since


def run_of_foreign_chats(folder, monkeypatch):
    """Make a run whose loss improves from step to step while every call keeps fewer drafts."""
    monkeypatch.setitem(CALLS, "vanilla_sd", (30, 40, 56))
    monkeypatch.setitem(CALLS, "stree", (20, 30, 50))
    make_run(folder, ("gsm8k",), (0.0, 1.0))
    curve = zip((90, 990, 9990), (0.45, 0.6, 0.72), strict=True)
    lines = [f"{step},{acceptance}" for step, acceptance in curve]
    (folder / "metrics.csv").write_text("step,val_simulated_acceptance\n" + "\n".join(lines) + "\n")


def test_a_run_whose_tau_falls_says_so_in_the_table_the_page_and_the_output(
    tmp_path, monkeypatch, capsys
):
    run_of_foreign_chats(tmp_path, monkeypatch)
    main([str(tmp_path)])
    sentence = parting_sentence(load_run(tmp_path))
    assert "part ways from step 1000 on" in sentence
    assert "acceptance of 0.72, which promises 4 drafts in a row τ 2.88" in sentence
    assert "measured is 1.07, down from 2.00 at step 100" in sentence
    assert "the target would not write the data" in sentence and "Go by τ" in sentence
    assert sentence in " ".join(capsys.readouterr().out.split())  # lines are wrapped
    assert sentence in (tmp_path / "table6.md").read_text(encoding="utf-8")
    page = html.unescape((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert sentence in page


def test_a_run_whose_tau_follows_says_nothing(tmp_path):
    make_run(tmp_path, ("gsm8k",), (0.0,))
    assert [each.step for each in compared(load_run(tmp_path))] == list(STEPS)
    main([str(tmp_path)])
    for name in ("table6.md", "report.html"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert "part ways" not in text


def test_it_is_compared_with_the_chain_that_was_measured_at_the_temperature_next_to_one(tmp_path):
    make_run(tmp_path, ("gsm8k",), (0.0, 0.7))
    data = load_run(tmp_path)
    assert num_drafts_of(data) == 4
    cells = {key: cell for key, cell in data.cells.items() if key[3] == 0.7}
    assert [each.measured for each in compared(data)] == [
        cells[f"step-{step:08d}", "vanilla_sd", "gsm8k", 0.7]["acceptance_length"] for step in STEPS
    ]
    # What was logged at a step or before it, and nothing of later ones.
    assert compared(data)[0].acceptance == pytest.approx(float(f"0.{100 % 7}"))


def test_without_a_training_log_nothing_is_compared(tmp_path):
    make_run(tmp_path, ("gsm8k",), (0.0,))
    (tmp_path / "metrics.csv").unlink()
    assert parting_sentence(load_run(tmp_path)) == ""
