"""At a training's end the drafter is measured on the data and on what its target writes itself.

Tolerance: a mean over 8 × 24 tokens is known to about 0.03 of acceptance; of −log p less entropy,
whose deviation is near one nat a token, to 0.1. Four times that is allowed.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_run import VOCAB_SIZE, distill_arguments

from stree_pipelines.commands import distill
from stree_pipelines.data.packing import TokenTable
from stree_pipelines.training.distillation import Distillation
from stree_pipelines.training.teachers import on_policy_check
from stree_pipelines.training.teachers.on_policy_check import OnPolicyResult, first_answers, measure

NUM_ROWS, NEW_TOKENS = on_policy_check.NUM_ROWS, on_policy_check.NEW_TOKENS


@pytest.fixture(autouse=True)
def whole_on_policy_check(monkeypatch):
    monkeypatch.setattr(on_policy_check, "NUM_ROWS", NUM_ROWS)
    monkeypatch.setattr(on_policy_check, "NEW_TOKENS", NEW_TOKENS)


@pytest.fixture(scope="module")
def module(workspace) -> Distillation:
    """Make a distillation whose target is sure enough of itself to be told from chance."""
    module = Distillation(str(workspace / "target"))
    with torch.no_grad():
        module.frozen.model.model.norm.weight.mul_(8)
        module.exported.model.norm.weight.mul_(8)
    return module


def table_of(rows: list[tuple[list[int], list[int]]]) -> TokenTable:
    """Make a table of (prompt, answer) pairs."""
    lengths = [len(prompt) + len(answer) for prompt, answer in rows]
    return TokenTable(
        np.array([token for row in rows for part in row for token in part], np.int32),
        np.array([flag for p, a in rows for flag in [False] * len(p) + [True] * len(a)], bool),
        np.cumsum([0, *lengths]),
    )


def test_prompts_and_answers_meet_where_the_assistant_begins(monkeypatch):
    monkeypatch.setattr(on_policy_check, "PROMPT_TOKENS", 3)
    monkeypatch.setattr(on_policy_check, "NEW_TOKENS", 4)
    rows = [([1, 2], [3]), ([], [4, 5]), ([6], []), ([1, 2, 3, 4], [5, 6, 7, 8, 9])]
    assert first_answers(table_of(rows)) == [([1, 2], [3]), ([2, 3, 4], [5, 6, 7, 8])]
    several_turns = TokenTable(
        np.arange(6, dtype=np.int32), np.array([0, 1, 1, 0, 1, 1], bool), np.array([0, 6])
    )
    assert first_answers(several_turns) == [([0], [1, 2])]


def test_only_text_of_the_target_is_as_likely_as_it_expects(module):
    random = np.random.default_rng(0)
    prompts = [random.integers(9, VOCAB_SIZE, 20).tolist() for _ in range(8)]
    foreign = table_of([(p, random.integers(9, VOCAB_SIZE, 24).tolist()) for p in prompts])
    before = torch.get_rng_state()
    with torch.no_grad():
        written = on_policy_check._continued(module, [(prompt, []) for prompt in prompts])
        on_own = measure(module, table_of(_rows_of(written, prompts)))
        on_foreign = measure(module, foreign)
    assert torch.equal(torch.get_rng_state(), before)
    assert on_own.nll == pytest.approx(on_own.entropy, abs=0.4)
    assert on_own.on_data == on_own.on_own == on_foreign.on_own  # the very same text
    assert "warning" not in str(on_own)
    assert on_foreign.nll > on_foreign.entropy + on_policy_check.MORE_THAN_EXPECTED
    assert "warning: the data is not what the target writes" in str(on_foreign)


def _rows_of(batch, prompts) -> list[tuple[list[int], list[int]]]:
    return [
        (prompt, batch["tokens"][row][batch["loss_mask"][row]].tolist())
        for row, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ((2.0, 2.9, 0.40, 0.35), None),
        ((4.0, 2.9, 0.40, 0.35), "the data is not what the target writes: loss"),
        ((2.0, 2.9, 0.72, 0.10), "the drafter does worse on the target's own text than on"),
    ],
)
def test_a_warning_says_which_of_the_two_is_far_off(figures, said):
    text = str(OnPolicyResult(*figures))
    assert f"{figures[2]:.3f} on them, {figures[3]:.3f} on what the target writes" in text
    assert ("warning" in text) == (said is not None) and (said or "") in text


def test_the_last_lines_of_a_training_say_it(workspace, tmp_path, capfd, monkeypatch):
    wanted = OnPolicyResult(5.0, 2.0, 0.7, 0.1)
    monkeypatch.setattr(on_policy_check, "measure", lambda *arguments: wanted)
    distill.main(distill_arguments(workspace, tmp_path / "run", steps=1))
    assert capfd.readouterr().out.endswith(f"/latest\n{wanted}\n")
    monkeypatch.undo()
    distill.main(distill_arguments(workspace, tmp_path / "other", steps=1))
    last = capfd.readouterr().out.splitlines()[-1]
    assert "nats per token under the target" in last and "writes itself" in last
