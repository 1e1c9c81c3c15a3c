"""A tree drafted as batch generation, with copied states, has the tokens of a tree call."""

from __future__ import annotations

import pytest
from toys import right_now_and_then, tiny_model

from stree import BatchDecoder, GenerationConfig, Request
from stree_lab.papers import copied_states
from stree_lab.papers.copied_states import CopiedStates


@pytest.mark.parametrize(
    ("layers", "tree", "verifier"),
    [((), "expand-3-2-2-1-1", "multi_step"), ((1,), "expand-2-2-2", "coupled"),
     ((), "chain-4", "multi_step"), ((), "beam-3-3-7", "coupled")],
)
def test_drafts_are_those_of_a_tree_call(layers, tree, verifier):
    """So steps accept as many of them, and yield the same tokens, greedy and sampled."""
    target = tiny_model(1, num_layers=2, attn_layers=layers)
    drafter = right_now_and_then(target)
    served = [
        Request([3, 1, 4, 1, 5], GenerationConfig(16, temperature=temperature, seed=seed))
        for seed, temperature in enumerate((0.0, 1.1))
    ]
    by_tree_call, copied = (
        BatchDecoder(
            target, each, tree, num_rows=2, max_length=64, verifier=verifier
        ).generate(served)
        for each in (drafter, CopiedStates(drafter, 12))
    )
    assert [each.tokens for each in copied] == [each.tokens for each in by_tree_call]
    accepted = [each.stats.accepted_per_call for each in copied]
    assert accepted == [each.stats.accepted_per_call for each in by_tree_call]
    assert sum(map(sum, accepted)) > 4


def test_states_that_are_not_copied_are_seen(monkeypatch):
    monkeypatch.setattr(copied_states, "copy_rows", lambda cache, source, other: None)
    with pytest.raises(AssertionError):
        test_drafts_are_those_of_a_tree_call((), "expand-3-2-2-1-1", "multi_step")
