"""Costs of steps are saved as plain data, whole, and used for the steps that they are of."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
import torch

from stree import AdaptiveTrees, StepTimes
from stree.common.errors import BadData, CannotWrite, NotFound
from stree.common.words import device_name
from stree.tree_policy.adaptive import PLAIN
from stree.tree_policy.policy import TreePolicy
from stree.tree_policy.step_times import MIN_STEPS_SEEN, STEPS_VALID, Speeds
from stree.trees.token_tree import TokenTree, as_tree

OWN = TokenTree((-1, 0, 0, 1), "own")
BEAM = as_tree("beam-2-2-4")
TREES = (PLAIN, OWN, BEAM)
HERE = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)


def costs(**changes) -> StepTimes:
    seconds = {
        (rows, tree): 0.1 * rows + number / 3
        for rows in (1, 2, 4)
        for number, tree in enumerate(TREES, 1)
    }
    place = dict(device=device_name(HERE.device), dtype="float32", temperature=0.7)
    return StepTimes(seconds, 1 / 7, **{**place, **changes})


def test_what_is_saved_comes_back(tmp_path):
    saved = costs(took_s=3.0)
    path = tmp_path / "new" / "costs.json"
    saved.save(path)
    again = StepTimes.load(path)
    assert again == saved and again.took_s == 0.0  # nothing was measured here
    content = json.loads(path.read_text())
    assert content["trees"][1]["tree"] == {"name": "own", "parents": [-1, 0, 0, 1]}
    assert AdaptiveTrees([OWN, BEAM], again).choose(2) in TREES
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite):
        saved.save(tmp_path / "file" / "costs.json")


def spoiled(**changes) -> str:
    return json.dumps({**costs().record().model_dump(), **changes})


TIMES = {"tree": {"name": "own", "parents": [-1, 0]}, "seconds": {"1": 0.5}}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Invalid JSON"),
        ("[]", "valid dictionary|object"),
        ("{}", "device: Field required"),
        (spoiled(more=1), "more: Extra"),
        (spoiled(catch_up_s=-1.0), "catch_up_s: "),
        (spoiled(trees=[{**TIMES, "seconds": {"1": 0.0}}]), "seconds.1: "),
        (spoiled(trees=[{**TIMES, "seconds": {"0": 0.5}}]), "seconds.0"),
        (spoiled(trees=[{**TIMES, "seconds": {"1": float("nan")}}]), "seconds.1: "),
        (spoiled(trees=[{**TIMES, "tree": {"name": "own", "parents": [-1, 2, 1]}}]), "parent"),
        (spoiled(trees=[{**TIMES, "tree": {"name": "beam-1-1-9", "parents": [-1]}}]), "beam-1-1-9"),
    ],
)
def test_a_file_of_something_else_is_one_clear_line(tmp_path, text, reason):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(BadData, match=reason) as refused:
        StepTimes.load(path)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


def test_without_a_file_it_says_so(tmp_path):
    with pytest.raises(NotFound, match=r"no costs at .*costs\.json"):
        StepTimes.load(tmp_path / "costs.json")
    with pytest.raises(BadData, match="no regular file"):
        StepTimes.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "trees", "temperature", "num_rows", "reason"),
    [
        ({}, TREES, 0.7, 1, ""),
        ({}, TREES, 1.0, 3, ""),
        ({"device": "", "dtype": ""}, TREES, 0.0, 1, ""),  # made by hand
        ({}, TREES, 0.0, 1, "float32, sampled, and here it is .*, float32, greedy"),
        ({"temperature": 0.0}, TREES, 0.7, 1, "greedy, and here .* sampled"),
        ({"dtype": "bfloat16"}, TREES, 0.7, 1, "bfloat16, sampled, and here .*, float32, sampled"),
        ({"device": "NVIDIA H200"}, TREES, 0.7, 1, "of NVIDIA H200, .* here it is CPU: "),
        ({}, TREES, 0.7, 5, "none of 5 rows with plain"),
        ({}, (*TREES, TokenTree.paper()), 0.7, 1, "none of 1 row with paper"),
        ({}, (PLAIN, TokenTree((-1, 0), "own")), 0.7, 1, "none of 1 row with own"),
        ({"seconds": {}}, TREES, 0.7, 1, "none of 1 row with plain"),
    ],
)
def test_they_say_which_steps_they_are_not_of(changes, trees, temperature, num_rows, reason):
    table = StepTimes(**{**vars(costs()), **changes})
    misfit = table.misfit(HERE, trees, temperature, num_rows)
    assert re.search(reason, misfit) and bool(misfit) == bool(reason)


def test_a_policy_of_one_s_own_that_needs_no_step_times_has_no_misfit():
    class Widest(TreePolicy):
        needs_step_times = False

    policy = Widest(["chain-1", "paper"])
    assert policy.misfit(HERE, temperature=0.0, num_rows=1) == ""
    assert repr(policy) == "Widest(chain-1 or paper)"


def test_a_choice_by_step_times_says_whether_they_were_measured():
    policy = AdaptiveTrees(["chain-1"])
    assert repr(policy) == "AdaptiveTrees(chain-1, no costs measured)"
    policy.costs = StepTimes({(1, PLAIN): 0.1, (4, PLAIN): 0.2})
    assert repr(policy) == "AdaptiveTrees(chain-1, costs of up to 4 rows)"


@pytest.mark.parametrize(
    ("later", "seconds"), [(1, 9.0), (STEPS_VALID, 9.0), (STEPS_VALID + 1, 2.0)]
)
def test_slow_steps_of_a_tree_are_forgotten_when_others_have_gone_on(later, seconds):
    """Else a tree whose first steps waited for the host is not tried again (0.94 of the best)."""
    table = StepTimes({(1, PLAIN): 1.0, (1, OWN): 2.0, (1, BEAM): 3.0})
    speeds = Speeds(table, dict.fromkeys(TREES, 1.0))
    for _ in range(MIN_STEPS_SEEN):
        speeds.learn_step(1, OWN, 9.0)
    for _ in range(later):
        speeds.learn_step(1, BEAM, 3.0)
    speeds.expect(dict.fromkeys(TREES, 1.0))
    assert speeds.step_s(1, OWN) == seconds
