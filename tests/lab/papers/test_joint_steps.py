"""Joint steps by rows give plain decoding's text with each part, and each part is needed."""

from __future__ import annotations

import pytest
import torch
from toys import tiny_model

from stree import Decoder, GenerationConfig
from stree_kernels.naive.mamba import chunk_scan
from stree_lab.papers import joint_steps
from stree_lab.papers.joint_steps import JointSteps, parts_of_steps
from stree_lab.papers.multi_step_update import launched_update, naive_update

PROMPT = [3, 1, 4, 1, 5]


def inputs_of_updates(dtype, head_dim, d_state):
    torch.manual_seed(0)
    rows, tokens, heads = 3, 5, 4
    x, B, C = (
        torch.randn(rows, tokens, groups, size, dtype=dtype)
        for groups, size in ((2, head_dim), (1, d_state), (4, d_state))
    )
    dt, A = torch.rand(rows, tokens, heads, dtype=dtype), -torch.rand(heads, dtype=dtype)
    dt[1, 3:] = 0
    state = torch.randn(rows, heads, head_dim, d_state, dtype=dtype)
    return (x, dt, A, B, C, torch.randn(heads, dtype=dtype)), state


@pytest.mark.parametrize(
    ("update", "dtype", "tolerance"),
    [(naive_update, torch.float64, 1e-12), (launched_update, torch.float32, 1e-5)],
)
@pytest.mark.parametrize(("head_dim", "d_state"), [(32, 16), (20, 12)])
def test_updates_are_the_recurrence_and_write_its_last_state(
    update, dtype, tolerance, head_dim, d_state
):
    """The oracle is the chunk scan in fp64."""
    given, state = inputs_of_updates(dtype, head_dim, d_state)
    x, dt, A, B, C, D = (each.double() for each in given)
    wanted, after = chunk_scan(x, dt, A, B, C, D, initial_state=state.double())
    y = update(*given, state)
    torch.testing.assert_close(y.double(), wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(state.double(), after, rtol=tolerance, atol=tolerance)


def decoded(model, text, **parts):
    """Decode with a draft of 0, 1, 2, 3 right tokens in turn after one that is wrong."""
    steps = JointSteps(model, 2, 3, 64, **parts)

    def drafts_of(tokens):
        right = len(calls) % 4
        calls.append(right)
        coming = text[len(tokens) : len(tokens) + right]
        wrong = [(text[len(tokens) + right] + 1) % 30] * (3 - right)
        return [[29, 29, 29], coming + wrong]

    calls = []
    tokens, ms = steps.generate(PROMPT, 14, drafts_of)
    assert {len(each) for each in ms.values()} == {len(calls)} and set(ms) == set(
        joint_steps.PHASES
    )
    return tokens, calls


PARTS = [
    dict.fromkeys(names, True)
    for names in ((), ("multi_step",), ("just_in_time",), ("multi_step", "just_in_time"))
]


@pytest.mark.parametrize("parts", PARTS, ids=[" ".join(each) or "neither" for each in PARTS])
def test_each_part_gives_plain_decodings_text(parts):
    model = tiny_model(1, num_layers=2, attn_layers=())
    text = Decoder(model).generate(PROMPT, GenerationConfig(24)).tokens
    tokens, calls = decoded(model, text, **parts)
    assert tokens == text[: len(tokens)] and len(tokens) >= 14
    assert len(tokens) == sum(right + 1 for right in calls)  # all right tokens were accepted


def test_a_state_that_is_not_copied_is_seen(monkeypatch):
    monkeypatch.setattr(JointSteps, "copy_state", lambda steps: None)
    with pytest.raises(AssertionError):
        test_each_part_gives_plain_decodings_text({})


def test_rows_have_the_phases_of_each_combination():
    model = tiny_model(1, num_layers=1, attn_layers=())
    rows = list(parts_of_steps(model, 5, 2, 3, 10, graphs=[False]))
    assert [(row["scan"], row["state_copy"]) for row in rows] == [
        (scan, copy) for scan in ("chunk scan", "multi-step") for copy in ("eager", "just in time")
    ]
    for row in rows:
        assert (row["num_tokens"], row["num_steps"]) == (10, 4)  # 1, 2, 3 and 4 tokens
        phases = sum(row[f"ms_{phase}"] for phase in joint_steps.PHASES)
        assert row["ms_step"] == pytest.approx(phases) and row["ms_forward"] > 0
