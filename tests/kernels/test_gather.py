"""Rows picked on the device: exactly the twin's. What may not be read is NaN or points far away.

They are normed as elsewhere, but the compiler may contract another product and sum: the tolerance
is two units in the last place.
"""

import pytest
import torch
from kernel_cases import DEVICE, normal, relative_error

from stree_kernels import gather, naive, pointwise

TOLERANCE = {torch.float32: 2**-22, torch.bfloat16: 2**-8}
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
each_width = pytest.mark.parametrize("width", [7, 1024, 1500])


@each_dtype
@each_width
@pytest.mark.parametrize("batch", [1, 3])
def test_embed_norm(batch, width, dtype):
    weight, scale = normal(11, width + 5, dtype=dtype), normal(width, seed=1, dtype=dtype)
    weight[:, width:] = torch.nan
    tokens = torch.randint(11, (batch, 9), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    tokens[:, 0] = tokens[:, 8] = 10**6  # outside the nodes below
    some, one = torch.tensor([3, 1, 1, 7], device=DEVICE), torch.tensor([2], device=DEVICE)
    for given, nodes in ((tokens, some), (tokens, one), (tokens[:, 1:8], None)):
        x, normed = gather.embed_norm(weight[:, :width], given, nodes, scale, 1e-5)
        wanted, _ = naive.embed_norm(weight[:, :width], given, nodes, scale, 1e-5)
        assert torch.equal(x, wanted) and x.is_contiguous()
        elsewhere = pointwise.add_rms_norm(x, None, scale, 1e-5)[1]
        assert relative_error(normed, elsewhere.double()) < TOLERANCE[dtype]


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
