"""Rows picked on the device: exactly the twin's. What may not be read is NaN or points far away.

They are normed as elsewhere, but the compiler may contract another product and sum: the tolerance
is two units in the last place.
"""

import pytest
import torch
from kernel_cases import DEVICE, cache_state_of, normal, relative_error

from stree_kernels import gather, naive, pointwise
from stree_kernels.contracts import Stream

TOLERANCE = {torch.float32: 2**-22, torch.bfloat16: 2**-8}
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
each_width = pytest.mark.parametrize("width", [7, 1024, 1500])


@pytest.mark.quick(6)
@each_dtype
@each_width
@pytest.mark.parametrize("batch", [1, 3])
def test_embed_norm(batch, width, dtype):
    weight, scale = normal(11, width + 5, dtype=dtype), normal(width, seed=1, dtype=dtype)
    weight[:, width:] = torch.nan
    tokens = torch.randint(11, (batch, 9), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    tokens[:, 0] = tokens[:, 8] = 10**6  # outside the nodes below
    some = torch.tensor([[3, 1, 1, 7]] * batch, device=DEVICE)
    some[-1, 0] = 5
    one = torch.full((batch, 1), 2, device=DEVICE)
    for given, nodes in ((tokens, some), (tokens, one), (tokens[:, 1:8], None)):
        x, normed = gather.embed_norm(weight[:, :width], given, nodes, scale, 1e-5)
        wanted, _ = naive.embed_norm(weight[:, :width], given, nodes, scale, 1e-5)
        assert torch.equal(x, wanted) and x.is_contiguous()
        elsewhere = pointwise.add_rms_norm(x, None, scale, 1e-5)[1]
        assert relative_error(normed, elsewhere.double()) < TOLERANCE[dtype]


@pytest.mark.quick(6)
@each_dtype
@each_width
@pytest.mark.parametrize("same", [False, True])
def test_embed_norm_with_something_added(same, width, dtype):
    """Rows of a larger buffer are added, or one vector to all nodes."""
    weight, scale = normal(11, width, dtype=dtype), normal(width, seed=1, dtype=dtype)
    added = torch.full((3, 7, width + 3), torch.nan, device=DEVICE, dtype=dtype)[:2, :4, :width]
    added.copy_(normal(2, 4, width, seed=2, dtype=dtype))
    if same:
        added = normal(width, seed=3, dtype=dtype).expand(2, 4, -1)
    tokens = torch.randint(11, (2, 9), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    nodes = torch.tensor([[3, 1, -1, 7], [0, 2, 8, 5]], device=DEVICE)
    for given, some in ((tokens, nodes), (tokens[:, :4], None)):
        x, normed = gather.embed_norm(weight, given, some, scale, 1e-5, added=added)
        wanted, _ = naive.embed_norm(weight, given, some, scale, 1e-5, added=added)
        # Triton's interpreter rounds sums towards zero, which is up to one unit more
        assert relative_error(x, wanted.double()) < 2 * TOLERANCE[dtype]
        elsewhere = pointwise.add_rms_norm(x, None, scale, 1e-5)[1]
        assert relative_error(normed, elsewhere.double()) < TOLERANCE[dtype]


@each_dtype
@each_width
@pytest.mark.parametrize("groups", [1, 3])
def test_norm_at(groups, width, dtype):
    """Nodes beyond the last are those of other trees."""
    channels = groups * width
    x = torch.full((2, 6, channels + 3), torch.nan, device=DEVICE, dtype=dtype)[:, :5, :channels]
    x.copy_(normal(2, 5, channels, dtype=dtype))
    scale = normal(channels, seed=1, dtype=dtype)
    nodes = torch.tensor([[0, 3, 3, 9, -7], [4, 0, 77, 1, -7]], device=DEVICE)[:, :4]
    got = gather.norm_at(x, nodes, scale, 1e-5, groups)
    picked = torch.stack([x[0, [0, 3, 3, 4]], x[1, [4, 0, 4, 1]]])
    wanted = naive.rms_norm(picked.double(), scale.double(), 1e-5, groups)
    assert got.is_contiguous() and relative_error(got, wanted) < 2 * TOLERANCE[dtype]
    twin = naive.norm_at(x, nodes, scale, 1e-5, groups)
    assert relative_error(twin, wanted) < 2 * TOLERANCE[dtype]


def test_a_node_that_is_none_stands_for_the_first():
    weight, scale = normal(11, 16), normal(16, seed=1)
    tokens = torch.tensor([[4, 5, 6]], device=DEVICE)
    for module in (naive, gather):
        x, _ = module.embed_norm(
            weight, tokens, torch.tensor([[2, -1]], device=DEVICE), scale, 1e-5
        )
        assert torch.equal(x[0], weight[[6, 4]])


@each_dtype
@each_width
def test_take_roots(width, dtype):
    """Rows have 1, 3 and 5 certain tokens, and an idle one claims more than there are."""
    lengths = [1, 3, 5, 9]
    x = torch.full((4, 5, width), torch.nan, device=DEVICE, dtype=dtype)
    for row, length in enumerate(lengths[:3]):
        x[row, length - 1] = normal(width, seed=row, dtype=dtype)
    x[3, 0] = normal(width, seed=3, dtype=dtype)
    parts = torch.where(x.isnan(), x, normal(2, 4, 5, width, seed=5).to(dtype)).float()
    scale = normal(width, seed=6, dtype=dtype)
    block = torch.tensor([[length, 20, 21, 22, 23, 24] for length in lengths], device=DEVICE)
    active = torch.tensor([True, True, True, False], device=DEVICE)
    one = parts[:1].to(dtype)
    for added, biased in ((None, False), (None, True), (parts, False), (one, False),
                          ((parts, one), False)):
        wanted = naive.norm(Stream(x, scale, 1e-5, added)) + biased
        for module in (naive, gather):
            tokens = torch.full((4, 6), -7, device=DEVICE)[:, :4]
            cache_state = cache_state_of([5, 6, 7, 8], [[0], [0, 1], [], [2, 3, 4]], 1, 5)
            stream = Stream(x, scale, 1e-5, added)
            stream.normed = wanted.clone() if biased else None
            got = module.take_roots(stream, block, active, tokens, cache_state)
            for row, length in enumerate((1, 3, 5, 1)):
                exact = wanted[row, length - 1].double()
                assert relative_error(got[row, 0], exact) < 4 * TOLERANCE[dtype]
                assert tokens[row].tolist() == [19 + length, -7, -7, -7]
            assert cache_state.length.tolist() == [6, 8, 7, 11]
            assert cache_state.path_length.tolist() == [1, 3, 5, 0]
            assert cache_state.parity.tolist() == [0]
