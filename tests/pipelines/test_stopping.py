"""Stopping a tree in its step, worked out: by hand where it must win, lose or not matter, and from
steps of a real decoder."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tiny_evaluation import export, make_world

from stree.errors import UsageError
from stree_pipelines.project_stopping import main
from stree_pipelines.reports.stopping import Drafted, Fixed, Recorder, Stopping, Times, table

WIDTH, LEVELS = 2, 4
EASY, HARD = -0.01, -3.0  # of each level, by the drafter


def step(level: float, accepted: int, prompt: int = 0) -> Drafted:
    """A tree all of whose second children are hopeless; so many levels of it are accepted."""
    depths = [0, *[1] * 2, *[each for each in range(2, LEVELS + 1) for _ in range(4)]]
    logs, hit, seen = [0.0], [True], set()
    for depth in depths[1:]:
        first = depth not in seen
        seen.add(depth)
        logs.append(level * depth if first else -50.0)
        hit.append(first and depth <= accepted)
    order = np.argsort(-np.array(logs), kind="stable")
    return Drafted(np.array(logs)[order], np.array(depths)[order], np.array(hit)[order], prompt)


# Every other prompt's answers are easy: all is accepted, of the others nothing
MIXED = [step(EASY, LEVELS, n) if n % 4 < 2 else step(HARD, 0, n) for n in range(16)] * 4
ALIKE = [step(EASY, LEVELS, n) for n in range(16)] * 4


def test_times_are_read_and_refused():
    assert Times.named("an H200=4,0.5,0.01") == Times("an H200", 4.0, 0.5, 0.01)
    for text in ("4,0.5,0.01", "x=4,0.5", "x=4,0.5,0.01,0.02", "x=4,a,0", "x=0,1,1", "x=1,-1,1"):
        with pytest.raises(UsageError, match="wanted NAME=PLAIN,LEVEL,NODE"):
            Times.named(text)


def test_a_fixed_tree_by_hand():
    times = Times("x", plain=10.0, level=1.0, node=0.5)
    outcome = Fixed(2, 3).outcome([step(EASY, 4), step(HARD, 0)], times)
    assert outcome.tokens.tolist() == [3.0, 1.0]
    assert outcome.ms.tolist() == [10 + 2 * 0.5 + 2 * 1.0] * 2
    assert outcome.speed == pytest.approx(4 / 26)
    assert Fixed.best([step(HARD, 0)], times, WIDTH) == Fixed(0, 1)
    assert Fixed.best([step(EASY, 4)], times, WIDTH) == Fixed(4, 6)


def test_where_the_drafter_knows_which_steps_are_hard_stopping_wins_by_what_it_saves():
    times = Times("x", plain=10.0, level=4.0, node=0.0)
    fixed = Fixed.best(MIXED, times, WIDTH).outcome(MIXED, times)
    assert fixed.speed == pytest.approx((5 + 1) / (2 * (10 + 4 * 4)))
    stopped = Stopping(MIXED, times, WIDTH).outcome(MIXED)
    # It has to draft a level before it knows
    assert stopped.speed == pytest.approx((5 + 1) / (10 + 4 * 4 + 10 + 4))
    assert sorted(set(stopped.levels.tolist())) == [1.0, 4.0]


def test_where_all_steps_are_alike_it_gains_nothing():
    times = Times("x", plain=10.0, level=1.0, node=0.0)
    fixed = Fixed.best(ALIKE, times, WIDTH).outcome(ALIKE, times)
    assert Stopping(ALIKE, times, WIDTH).outcome(ALIKE).speed == pytest.approx(fixed.speed)


def test_the_table_judges_each_half_by_the_other():
    times = [Times("dear levels", 10.0, 4.0, 0.0)]
    made = table(MIXED, times, WIDTH, "title")
    # 6 tokens take 40 ms, with a fixed tree 52. Nodes cost nothing: 12 of 15 are taken, or all 3
    assert made.rows[1][1:5] == ("1.15×", "4.0, 6.0", "1.50×", "2.5, 7.5")
    assert made.rows[1][5].startswith("+30.0 [")
    assert table(ALIKE, times, WIDTH, "title").rows[1][5] == "+0.0 [+0.0, +0.0] %"
    assert "64 steps after 16 prompts" in made.note
    with pytest.raises(UsageError, match="of 3 prompts"):
        table([each for each in MIXED if each.prompt < 3], times, WIDTH, "title")


def test_the_command_records_what_a_decoder_accepts(tmp_path, capsys, monkeypatch):
    recorders: list[Recorder] = []
    made = Recorder.__init__

    def noted(self: Recorder) -> None:
        made(self)
        recorders.append(self)

    monkeypatch.setattr(Recorder, "__init__", noted)
    world = make_world(tmp_path)
    (tmp_path / "asked.jsonl").write_text("".join(
        json.dumps({"id": str(n), "turns": [f"Say {n}."]}) + "\n" for n in range(4)
    ))  # fmt: skip
    main([
        str(world / "target"), str(export(world, 10)), "--times", "x=10,1,0.1",
        "--benchmark", str(tmp_path / "asked.jsonl"), "--max_new_tokens", "24",
        "--width", "2", "--levels", "3", "--out", str(tmp_path / "table.md"),
    ])  # fmt: skip
    printed = capsys.readouterr().out
    assert (tmp_path / "table.md").read_text() in printed
    (recorder,) = recorders
    assert f"{len(recorder.steps)} steps after 4 prompts" in printed
    accepted = [int(each.accepted.sum()) for each in recorder.steps]
    assert max(accepted) > 1
    for each in recorder.steps:
        assert len(each.logs) == 1 + 2 + 2 * 4  # all that was drawn
        assert each.accepted[0] and each.logs[0] == 0 and (np.diff(each.logs) <= 0).all()
        # A path: one node of each depth down to where it ends
        assert sorted(each.depths[each.accepted]) == list(range(each.accepted.sum()))
