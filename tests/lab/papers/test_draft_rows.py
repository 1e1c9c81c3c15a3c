"""Drafts as rows of a batch give plain decoding's text, and prompts read together their states."""

from __future__ import annotations

import pytest
import torch
from toys import right_now_and_then, tiny_model

from stree import BatchDecoder, GenerationConfig, Request, TokenTree
from stree.common.errors import UsageError
from stree_lab.papers import draft_rows
from stree_lab.papers.draft_rows import JointRows, NoOpPass, ReplayRows, read_together

WAYS = [
    (ReplayRows, (), "paper"), (ReplayRows, (1,), "png-3-2"), (ReplayRows, (1,), "beam-2-3"),
    (JointRows, (), "png-3-2"), (JointRows, (), "beam-2-3"), (JointRows, (), "chain-4"),
]


@pytest.mark.parametrize(("kind", "layers", "tree"), WAYS)
def test_what_comes_out_is_plain_decodings(kind, layers, tree):
    """So it is for several sequences at once, greedy and sampled, and the engine's trees accept
    as many drafts."""
    model = tiny_model(1, num_layers=2, attn_layers=layers)
    drafter = right_now_and_then(model)
    served = [
        Request([3, 1, 4, 1, 5], GenerationConfig(14, temperature=temperature, seed=seed))
        for seed, temperature in enumerate((0.0, 1.1))
    ]
    plain, packed, unrolled = (
        BatchDecoder(target, *given, num_rows=2, max_length=64).generate(served)
        for target, *given in ((model,), (model, drafter, tree), (kind(model, 8), drafter, tree))
    )
    assert [each.tokens for each in unrolled] == [each.tokens for each in plain]
    accepted = [each.stats.accepted_per_call for each in unrolled]
    assert accepted == [each.stats.accepted_per_call for each in packed]
    assert sum(map(sum, accepted)) > 4


@pytest.mark.parametrize("layers", [(), (1,)])
def test_prompts_of_several_lengths_are_read_together(layers):
    """States and logits are those of each prompt alone, whatever stands for no-op tokens."""
    model = tiny_model(2, num_layers=2, attn_layers=layers)
    prompts = [[5], [3, 1, 4, 1, 5, 9, 2], [2, 6, 5]]
    cache = model.new_cache(16, 3, len(prompts))
    logits = read_together(model, prompts, cache)
    assert cache.length.tolist() == [len(prompt) for prompt in prompts]
    following = []
    for row, prompt in enumerate(prompts):
        alone = model.new_cache(16, 3)
        wanted = model.prefill(torch.tensor([prompt]), alone)
        torch.testing.assert_close(logits[row : row + 1], wanted)
        saved, own = cache.save(row), alone.save(0)
        for mine, theirs in zip(saved.parts, own.parts, strict=True):
            for each, other in zip(mine, theirs, strict=True):
                torch.testing.assert_close(each, other)
        following.append(model.tree_forward(torch.tensor([[7]]), TokenTree.chain(0), alone, 16))
    together = model.tree_forward(torch.tensor([[7]] * 3), TokenTree.chain(0), cache, 16)
    torch.testing.assert_close(together, torch.cat(following))


@pytest.mark.parametrize("mistake", ["scan", "last_inputs", "copy_rows"])
def test_a_row_that_does_not_stand_still_is_seen(mistake, monkeypatch):
    """Each part of a no-op, and the copy of the accepted state, is needed."""
    if mistake == "copy_rows":
        monkeypatch.setattr(draft_rows, mistake, lambda cache, source: None)
    else:
        monkeypatch.setattr(NoOpPass, mistake, getattr(NoOpPass.__base__, mistake))
    with pytest.raises(AssertionError):
        test_what_comes_out_is_plain_decodings(JointRows, (), "png-3-2")


def test_what_rows_cannot_do_is_refused():
    with pytest.raises(UsageError, match="without attention layers"):
        JointRows(tiny_model(1, attn_layers=(1,), num_layers=2), 2)
    few = ReplayRows(tiny_model(1), 2)
    with pytest.raises(UsageError, match="3 leaves, wanted at most 2"):
        decoder = BatchDecoder(few, right_now_and_then(few.model), "png-1-3", num_rows=1)
        decoder.generate([Request([1, 2], GenerationConfig(2))])
