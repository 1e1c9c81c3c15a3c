import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from stree.errors import UsageError
from stree.sampling import RandomChooser, sample_siblings, sampling_law, without


@pytest.mark.parametrize(
    "temperature, top_k, top_p",
    [(1, 0, 1), (0.7, 5, 1), (1.3, 0, 0.6), (0.9, 8, 0.8), (1, 1, 1), (1, 0, 1e-6)],
)
def test_law_is_transformers(temperature, top_k, top_p):
    logits = torch.randn(7, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    scores = TemperatureLogitsWarper(float(temperature))(None, logits)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(float(top_p))(None, scores)
    law = sampling_law(logits, temperature, top_k, top_p)
    torch.testing.assert_close(law, scores.softmax(-1), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("kept", range(1, 9))
def test_top_p_keeps_no_token_more_than_reach_it(kept):
    """Eight tokens of ⅛ each, so that sums are exact."""
    logits = torch.zeros(1, 8, dtype=torch.float64)
    law = sampling_law(logits, 1.0, top_p=kept / 8)
    assert law.sort().values[0].tolist() == [0.0] * (8 - kept) + [1 / kept] * kept
    if kept < 8:  # transformers takes 1 for "off"
        theirs = TopPLogitsWarper(kept / 8)(None, logits)
        assert int(theirs.isfinite().sum()) == kept


def test_chooser_follows_the_law_and_the_seed():
    law = torch.tensor([0.1, 0.0, 0.6, 0.3], dtype=torch.float64)
    drawn = RandomChooser(3)(law.expand(20_000, 4))
    counts = torch.bincount(drawn, minlength=4) / 20_000
    assert counts[1] == 0
    assert (counts - law).abs().max() < 5 * (0.25 / 20_000) ** 0.5
    assert torch.equal(drawn, RandomChooser(3)(law.expand(20_000, 4)))


def test_without_renormalises_and_falls_back():
    law = torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]])
    left = without(law, torch.tensor([[True, False, False]] * 2))
    torch.testing.assert_close(left, torch.tensor([[0, 0.6, 0.4], [0, 0.5, 0.5]]))


def test_siblings_differ():
    laws = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)).softmax(-1)
    drawn = sample_siblings(laws, [3, 1, 6, 2], RandomChooser(0))
    for row, count in enumerate([3, 1, 6, 2]):
        assert len(set(drawn[row, :count].tolist())) == count
    with pytest.raises(UsageError, match="7 siblings"):
        sample_siblings(laws, [7, 1, 1, 1], RandomChooser(0))
