"""Products whose inputs are rounded to 8 bits, too, are those of the rounded numbers."""

import math

import pytest
import torch

from stree_kernels import naive
from stree_kernels.contracts import Scaled
from stree_kernels.naive.products import rounded

needs_products = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
        reason="needs a GPU that multiplies 8 bits",
    ),
]
DEVICES = ["cpu", pytest.param("cuda", marks=needs_products)]


def test_rows_are_rounded_to_three_digits_of_their_own_range():
    torch.manual_seed(0)
    x = torch.randn(7, 96) * torch.logspace(-6, 6, 7)[:, None]
    x[3] = 0.0
    values, scale = rounded(x)
    assert values.dtype == torch.float8_e4m3fn and scale.shape == (7, 1)
    error = (values.double() * scale.double() - x.double()).abs()
    largest = x.double().abs().amax(1, keepdim=True)
    # Half of a step: 2⁻⁴ of a number, but not below half of the least one that e4m3 has, 2⁻⁹
    assert (error <= torch.maximum(x.double().abs() / 16, largest / 448 * 2**-10) * 1.0001).all()
    assert error.max() > 0 and error[3].max() == 0


def test_a_weight_that_is_not_finite_shows_in_its_scale():
    weight = torch.randn(32, 16)
    weight[5, 3], weight[9, 0] = math.nan, math.inf
    finite = naive.in_8_bits(weight).scale.isfinite()
    assert finite.sum() == 30 and not finite[5] and not finite[9]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_a_product_is_that_of_the_rounded_numbers(device, dtype):
    torch.manual_seed(0)
    x = torch.randn(2, 67, 160, device=device).to(dtype)
    weight = naive.in_8_bits(torch.randn(48, 160, device=device))
    values, scale = rounded(x.flatten(0, 1))
    exact = (values.double() * scale) @ (weight.values.double() * weight.scale).T
    y = naive.linear_rounded(x, weight)
    assert y.dtype == dtype and y.shape == (2, 67, 48)
    # A GPU gives bf16; its 8-bit sums have some 14 digits, of terms of up to 100
    tolerance = 2**-8 if device == "cuda" or dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(
        y.double().flatten(0, 1), exact, rtol=tolerance, atol=40 * tolerance
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("largest", "bound"), [(1.0, 0.03), (100.0, 0.03)], ids=str)
def test_it_is_as_near_to_the_product_of_unrounded_inputs_as_rounding_is(largest, bound, device):
    """Also with one input 100 times as large as the others, as models have them.

    The bound is e4m3's own: numbers spread evenly between two steps are 2⁻⁴ / √3 of themselves
    away at the least mantissa, and half of that at the largest.
    """
    torch.manual_seed(0)
    x = torch.randn(256, 512, device=device)
    x[:, 7] *= largest
    weight = naive.in_8_bits(torch.randn(96, 512, device=device))
    exact = x.double() @ (weight.values.double() * weight.scale).T
    error = (naive.linear_rounded(x.bfloat16(), weight).double() - exact).norm() / exact.norm()
    assert 1e-3 < error < bound


@pytest.mark.parametrize(
    ("rows", "size", "groups", "fits"),
    [
        (128, (48, 160), 1, True), (127, (48, 160), 1, False), (128, (40, 160), 1, False),
        (128, (48, 152), 1, False), (128, (48, 160), 2, False),
    ],
)
def test_few_rows_blocks_and_odd_sizes_are_not_rounded(rows, size, groups, fits):
    weight = Scaled(torch.ones(size).to(torch.float8_e4m3fn), torch.ones(size[0], groups))
    assert naive.fits_rounded(torch.ones(rows, size[1]), weight) == fits
