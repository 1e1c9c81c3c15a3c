"""Rows picked on the device: exactly the twin's. What may not be read is NaN or points far away."""

import pytest
import torch
from kernel_cases import DEVICE, normal

from stree_kernels import gather, naive

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
each_width = pytest.mark.parametrize("width", [7, 1024, 1500])


@each_dtype
@each_width
@pytest.mark.parametrize("batch", [1, 3])
def test_embed(batch, width, dtype):
    weight = normal(11, width + 5, dtype=dtype)
    weight[:, width:] = torch.nan
    tokens = torch.randint(11, (batch, 9), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    tokens[:, 0] = tokens[:, 8] = 10**6  # outside the nodes below
    for nodes in ([3, 1, 1, 7], [2]):
        nodes = torch.tensor(nodes, device=DEVICE)
        got = gather.embed(weight[:, :width], tokens, nodes)
        assert torch.equal(got, naive.embed(weight[:, :width], tokens, nodes))
    inner = tokens[:, 1:8]
    got = gather.embed(weight[:, :width], inner, None)
    assert torch.equal(got, naive.embed(weight[:, :width], inner, None))
    assert got.is_contiguous() and not got.isnan().any()


@each_dtype
@each_width
@pytest.mark.parametrize("length", [1, 3, 5])
def test_take_root(length, width, dtype):
    hidden = torch.full((5, width + 2), torch.nan, device=DEVICE, dtype=dtype)
    hidden[length - 1, :width] = normal(width, dtype=dtype)
    block = torch.tensor([length, 20, 21, 22, 23, 24], device=DEVICE)
    for module in (naive, gather):
        tokens, path_length = torch.full((4,), -7, device=DEVICE), torch.zeros(1).long().to(DEVICE)
        got = module.take_root(hidden[:, :width], block, tokens, path_length)
        assert torch.equal(got, hidden[length - 1 : length, :width])
        assert tokens.tolist() == [19 + length, -7, -7, -7]
        assert path_length.tolist() == [length]
