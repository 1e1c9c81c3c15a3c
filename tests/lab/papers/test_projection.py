"""Recorded acceptance at other step times: by hand, and of committed rows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from stree.common.errors import UsageError
from stree.tree_policy.adaptive import PLAIN
from stree.trees.token_tree import BeamTree, TokenTree
from stree_lab.papers.projection import (
    PairTimes,
    Place,
    chosen_speed,
    read_places,
    speed_of,
)
from stree_lab.project_speed import main

RESULTS = Path(__file__).parents[3] / "docs/results"
CHAIN, PAPER, BEAM = TokenTree.chain(2), TokenTree.paper(), BeamTree.of(4, 4, 32)
SHALLOW = BeamTree.of(4, 2, 21)


def timed(us):
    return {"median": us}


def call(num_nodes, us):
    return dict(what="target call", num_nodes=num_nodes, us_tree=timed(us))


def draft(us, us_sampled, **more):
    return dict(what="draft", us_draft=timed(us), us_draft_sampled=timed(us_sampled), **more)


TIMES = PairTimes([
    call(1, 1000.0), call(33, 1320.0), draft(400.0, 480.0), draft(9.0, 9.0, drafter="head=8"),
    draft(600.0, 800.0, tree="beam-4-4-32"),
])
# Paths of 4, 3, 1 and 0 drafts; the call that ends the answer gave a token less than it accepted
ENDS = [BEAM.shape.levels[depth][0] for depth in (4, 3, 1, 0)]
PLACE = Place("b", 0.0, {CHAIN: [2, 0], PAPER: [12, 1], BEAM: ENDS},
              {CHAIN: 2.0, PAPER: 3.5, BEAM: 2.75}, 500)


def test_times_of_steps():
    assert TIMES.step_us(PLAIN, True) == 1000
    assert TIMES.step_us(PAPER, False) == pytest.approx(1120 + 400)
    assert TIMES.step_us(CHAIN, True) == pytest.approx(1020 + 480 / 2)
    assert TIMES.step_us(BEAM, True) == pytest.approx(1310 + 800)
    assert TIMES.step_us(SHALLOW, False) == pytest.approx(1200 + 600 / 2)
    with pytest.raises(UsageError, match="1 to 33 nodes were timed, none of 64"):
        TIMES.step_us(TokenTree.chain(63), False)
    with pytest.raises(UsageError, match="no draft like that of chain-2"):
        PairTimes(TIMES.rows[:2]).step_us(CHAIN, False)


def test_a_beam_of_fewer_levels_accepts_what_the_deeper_one_shows():
    assert [SHALLOW.shape.depths[end] for end in PLACE.ends_of(SHALLOW)] == [2, 2, 1, 0]
    assert PLACE.tau(SHALLOW) == pytest.approx((1 + 5 / 4) * 2.75 / 3)
    assert speed_of(SHALLOW, PLACE, TIMES) == pytest.approx(PLACE.tau(SHALLOW) * 1000 / 1500)
    for other in (BeamTree.of(4, 2, 8), BeamTree.of(4, 5, 32), BeamTree.of(3, 2, 13)):
        with pytest.raises(UsageError, match=f"what {other.name} accepts was not recorded"):
            PLACE.ends_of(other)


def test_a_choice_is_between_the_worst_and_the_best_of_its_trees():
    ((speed, shares),) = chosen_speed("chain-2 or paper or beam-4-4-32", [PLACE], TIMES)
    speeds = {tree: speed_of(tree, PLACE, TIMES) for tree in (CHAIN, PAPER, BEAM)}
    best = max(speeds, key=speeds.__getitem__)
    assert best == PAPER and shares["paper"] > 0.85
    assert 0.93 * speeds[best] < speed < speeds[best]
    assert sum(shares.values()) == pytest.approx(1)


def test_the_committed_table_is_made_by_its_command(tmp_path, capsys):
    out = tmp_path / "table.md"
    main([
        str(RESULTS / "h200-policies/features"), "--times",
        str(RESULTS / "h200-policies/features/8b-calls.jsonl"),
        str(RESULTS / "h200-step/5237370/8b-large.jsonl"), "--out", str(out),
    ])
    said = capsys.readouterr().out
    assert said.strip() == out.read_text().strip() and "Computed, not measured" in said
    page = (RESULTS / "h200-policies/README.md").read_text(encoding="utf-8")
    names = (
        "the best chain of each place", "the tree of 13 |", "two levels |", "three levels |",
        "four levels, ", "five levels, ", "the beam of 5 levels |", "chosen by cost among a chain",
    )
    given = {
        name: re.findall(r"\| ([0-9]\.[0-9]+)(?= \|)", line)
        for name in names for line in page.splitlines() if line.startswith(f"| {name}")
    }
    assert len(given) == len(names)
    means = [re.findall(r"([0-9.]+)×", line) for line in said.splitlines()
             if line.startswith("| T = ")]
    assert [list(each) for each in zip(*means, strict=True)] == list(given.values())


def test_a_folder_without_a_comparison_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no rows of a comparison"):
        read_places(tmp_path)
    row = {"environment": {"git_sha": "a"}, "what": "step"}
    (tmp_path / "times.jsonl").write_text(json.dumps(row))
    with pytest.raises(UsageError, match="no rows of a comparison"):
        main([str(tmp_path), "--times", str(tmp_path / "times.jsonl")])


def test_rows_with_and_without_ignore_eos_are_no_places_together(tmp_path):
    lines = (RESULTS / "h200-policies/features/results.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    rows[1]["ignore_eos"] = not rows[1]["ignore_eos"]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UsageError, match="1 row with ignore_eos and"):
        read_places(tmp_path)
