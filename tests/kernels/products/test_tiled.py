"""Products of some dozens of rows, as tiles, against fp64: gate, up, silu and their product are
rounded; the interpreter cuts off, twice as far."""

import pytest
import torch
from kernel_cases import DEVICE, normal, relative_error

from stree_kernels import naive
from stree_kernels.products import linear as products
from stree_kernels.products import short as short_products
from stree_kernels.products import tiled as tiled_products

_, SHARED_BYTES = products.device_of(torch.empty(0, device=DEVICE))
pytestmark = pytest.mark.skipif(
    SHARED_BYTES < products.SHARED_BYTES, reason="needs an H100, or what has as much shared memory"
)
TOLERANCE = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.fixture
def enough_tiles(monkeypatch):
    """Let a few tiles do for a GPU's multiprocessors."""
    monkeypatch.setattr(tiled_products, "MIN_SHARE_BUSY", 0.0)


def inputs_of(rows, inputs, width, dtype):
    weight = normal(2 * width, inputs, seed=1, dtype=dtype) / inputs**0.5
    return normal(*rows, inputs, dtype=dtype), weight


@pytest.mark.quick(9)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("inputs", "width"), [(64, 384), (200, 500), (136, 390)])
@pytest.mark.parametrize("rows", [(65,), (8, 13), (1, 128)], ids=str)
def test_linear_swiglu(rows, inputs, width, dtype, enough_tiles):
    x, weight = inputs_of(rows, inputs, width, dtype)
    assert tiled_products.fits(x, weight)
    got = short_products.linear_swiglu(x, weight)
    assert got.shape == (*rows, width) and got.dtype == dtype
    wanted = naive.linear_swiglu(x.double(), weight.double())
    roundings = 3 if DEVICE == "cuda" else 6
    assert relative_error(got, wanted) < roundings * TOLERANCE[dtype]
    assert torch.equal(got, tiled_products.linear_swiglu(x, weight))


def test_what_lies_around_the_inputs_is_not_read(enough_tiles):
    around = torch.full((200, 136), torch.nan, device=DEVICE, dtype=torch.bfloat16)
    x, weight = inputs_of((70,), 136, 390, torch.bfloat16)
    around[:70] = x
    got = tiled_products.linear_swiglu(around[:70], weight)
    assert torch.equal(got, tiled_products.linear_swiglu(x, weight))


def test_a_row_does_not_depend_on_the_others(enough_tiles):
    x, weight = inputs_of((128,), 200, 500, torch.bfloat16)
    together = tiled_products.linear_swiglu(x, weight)
    for rows in (65, 104):
        assert torch.equal(tiled_products.linear_swiglu(x[:rows], weight), together[:rows])


@pytest.mark.quick(3)
@pytest.mark.parametrize("change", ["rows", "more rows", "width", "dtype", "places", "narrow"])
def test_the_others_are_left_alone(change, enough_tiles):
    rows = {"rows": 64, "more rows": 129}.get(change, 100)
    dtype = torch.float32 if change == "dtype" else torch.bfloat16
    x, weight = inputs_of((rows,), 204 if change == "width" else 200, 384, dtype)
    if change == "places":
        x = inputs_of((rows,), 400, 384, dtype)[0][:, :200]
    if change == "narrow":
        weight = weight[:, :199].contiguous()
        x = x[:, :199].contiguous()
    assert not tiled_products.fits(x, weight)
    got, wanted = (
        module.linear_swiglu(each, by)
        for module, each, by in (
            (short_products, x, weight), (naive, x.double(), weight.double())
        )
    )
    assert relative_error(got, wanted) < (1e-5 if dtype == torch.float32 else 6 * 2**-8)


def test_where_tiles_are_too_few_or_one_is_left_over():
    x = normal(100, 64, dtype=torch.bfloat16)
    multiprocessors, _ = products.device_of(x)
    for tiles, serves in ((multiprocessors // 2, False), (multiprocessors, True),
                          (multiprocessors + 1, False), (2 * multiprocessors, True)):
        weight = normal(2 * 128 * tiles, 64, dtype=torch.bfloat16)
        assert tiled_products.fits(x, weight) == serves
