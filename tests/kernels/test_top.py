"""The top tokens of a row against `topk`: exact, ties to the lowest id, NaN reported."""

import pytest
import torch
from kernel_cases import DEVICE, normal

from stree_kernels import naive, top


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [5, 4096, 9001])
def test_top_tokens(vocabulary, dtype):
    wide = normal(3, vocabulary + 2, dtype=dtype)
    logits = wide[:, :vocabulary]
    logits[1] = logits[1].round()  # ties
    for count in (1, 4):
        tokens, highest = top.top_tokens(logits, count)
        wanted = logits.float().topk(count, dim=-1).values
        assert torch.equal(logits.float().gather(1, tokens), wanted)
        assert torch.equal(highest, wanted[:, 0])
        assert all(len(set(row)) == count for row in tokens.tolist())
    first = (logits[1] == logits[1].max()).nonzero()[0]
    assert top.top_tokens(logits, 1)[0][1] == first
    logits[2, vocabulary // 2] = torch.nan
    finite = top.top_tokens(logits, 2)[1].isfinite().tolist()
    assert finite == naive.top_tokens(logits, 2)[1].isfinite().tolist() == [True, True, False]
    logits[0] = -torch.inf
    tokens, highest = top.top_tokens(logits, 3)
    assert tokens[0].tolist() == [0, 1, 2] and not highest[0].isfinite()


@pytest.mark.parametrize("count", [8, 9, 70, 255])
def test_top_tokens_of_wide_trees(count):
    logits = torch.randperm(5001, generator=torch.Generator().manual_seed(count)).float()
    wanted = logits.topk(count)
    tokens, highest = top.top_tokens(logits[None].to(DEVICE), count)
    assert tokens[0].tolist() == wanted.indices.tolist() and highest == 5000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [5, 4096, 9001])
def test_choose_children(vocabulary, dtype):
    """Rows with fewer children than the widest, in no order; other nodes keep their tokens."""
    logits = torch.stack([
        torch.randperm(vocabulary, generator=torch.Generator().manual_seed(row)) for row in range(4)
    ]).to(DEVICE, torch.float32)  # fmt: skip
    logits = torch.linspace(-3, 3, vocabulary, device=DEVICE)[logits.long()].to(dtype)
    wide = torch.full((4, vocabulary + 3), torch.nan, device=DEVICE, dtype=dtype)
    wide[:, :vocabulary] = logits
    logits = wide[:, :vocabulary]
    logits[2, vocabulary // 2] = torch.nan
    logits[3, 1] = torch.inf
    places = torch.tensor([[8, 2, -1], [3, -1, -1], [-1, -1, -1], [1, 5, 6]], device=DEVICE)
    results = []
    for module in (naive, top):
        tokens = torch.full((11,), -7, device=DEVICE)
        finite = torch.tensor([False, False, True, True, False, True], device=DEVICE)
        module.choose_children(logits, places, tokens[1:10], finite[1:5])
        assert finite.tolist() == [False, True, True, False, False, True]
        assert (tokens[[0, 1, 5, 8, 10]] == -7).all()  # what no row has
        results.append(tokens)
    best, _ = top.top_tokens(logits, 3)
    assert results[1][[9, 3, 4, 2, 6, 7]].equal(best[[0, 0, 1, 3, 3, 3], [0, 1, 0, 0, 1, 2]])
    if dtype == torch.float32:  # no ties, whose order is the twin's own
        assert torch.equal(*results)
