"""The top tokens of a row against `topk`: exact, ties to the lowest id, NaN reported."""

import pytest
import torch
from kernel_cases import normal

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
