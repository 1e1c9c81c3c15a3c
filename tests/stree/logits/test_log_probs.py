"""Log-probabilities of tokens and of the best ones against a softmax in fp64."""

import pytest
import torch
from kernel_cases import DEVICE

from stree.logits.log_probs import log_probs_of
from stree_kernels import naive, ops
from stree_kernels.sampling import top

WITHIN = dict(rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "choose_children", [naive.choose_children, top.choose_children],
    ids=["twin", "kernel"],
)
@pytest.mark.parametrize("num_top", [0, 5, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_they_are_those_of_a_softmax(dtype, num_top, choose_children, monkeypatch):
    monkeypatch.setattr(ops, "choose_children", choose_children)
    torch.manual_seed(0)
    order = torch.stack([torch.randperm(321) for _ in range(6)]).view(2, 3, 321)
    logits = (order / 64).to(DEVICE, dtype)
    filtered = logits.masked_fill(logits < logits.amax(-1, keepdim=True) - 0.5, -torch.inf)
    tokens = filtered.topk(9).indices[..., 8]
    temperature = torch.tensor([0.0, 0.7], dtype=torch.float64, device=DEVICE)
    for processed, scale in ((logits, None), (logits, temperature), (filtered, temperature)):
        found = log_probs_of(logits, processed, tokens, scale, num_top)
        assert found.shape == (2, 3, 2, 1 + 2 * num_top)
        divisor = 1.0 if scale is None else torch.tensor([1.0, 0.7], device=DEVICE)[:, None, None]
        for half, given in enumerate((logits.double(), processed.double() / divisor)):
            wanted = given.log_softmax(-1)
            chosen, best, ids = found[:, :, half].split([1, num_top, num_top], -1)
            torch.testing.assert_close(chosen, wanted.gather(-1, tokens[..., None]), **WITHIN)
            torch.testing.assert_close(best, wanted.topk(num_top).values, **WITHIN)
            at_ids = wanted.gather(-1, ids.long())
            torch.testing.assert_close(best, at_ids, **WITHIN)
            assert all(len(row.unique()) == num_top for row in ids.flatten(0, 1))
