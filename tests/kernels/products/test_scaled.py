"""Products with a weight in 8 bits against fp64: fp32 sums, and one rounding to the stored type.

What e4m3 holds is exact in every type of the inputs, and two numbers in e4m3 add up to one in bf16,
so the tolerances are those of products of the inputs' own type (`test_linear.py`).
"""

import math

import pytest
import torch
from kernel_cases import DEVICE, normal, relative_error
from lanes import costly

from stree_kernels import naive, ops, pointwise
from stree_kernels.contracts import Sampling, Scaled, Stream
from stree_kernels.products import blocks
from stree_kernels.products import scaled as scaled_products
from stree_kernels.products import split as split_rows

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}
OTHERS = torch.float32, torch.float16  # by which the weight is written out
ROUNDINGS = 1 if DEVICE == "cuda" else 2  # the interpreter cuts off


def poisoned(weight: Scaled) -> Scaled:
    """Return the weight between what is not a number."""
    before = torch.full((3, weight.values.shape[1]), math.nan, device=DEVICE)
    around = torch.cat([before, weight.values.float(), before]).to(torch.float8_e4m3fn)
    before = torch.full((3, weight.scale.shape[1]), math.nan, device=DEVICE)
    scale = torch.cat([before, weight.scale, before])
    return Scaled(around[3:-3], scale[3:-3])


def in_groups(weight: torch.Tensor, groups: int) -> Scaled:
    """Return a weight in 8 bits with a scale for each of several groups of inputs."""
    scaled = naive.in_8_bits(weight.unflatten(1, (groups, -1)).flatten(0, 1))
    return Scaled(scaled.values.view(weight.shape), scaled.scale.view(-1, groups))


@pytest.mark.quick(7)
@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(each, marks=pytest.mark.long) for each in OTHERS)],
    ids=str,
)
@pytest.mark.parametrize(
    ("outputs", "inputs", "groups"),
    [
        (1007, 60, 1), (300, 200, 1), (5, 16, 1), (1600, 256, 1),
        (1007, 96, 3), (300, 384, 3), (50, 120, 10),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "rows",
    [(2, 8), (1, 70), *(pytest.param(rows, marks=pytest.mark.long) for rows in [(33,), (260,)])],
    ids=str,
)
def test_linear(rows, outputs, inputs, groups, dtype):
    """Sizes are odd and even, outputs fewer than a tile, and shares several tiles.

    The last groups are too small for the kernels.
    """
    weight = poisoned(in_groups(normal(outputs, inputs, seed=1), groups))
    around = torch.full((*rows[:-1], rows[-1] + 2, inputs), math.nan, device=DEVICE, dtype=dtype)
    around[..., 1:-1, :] = normal(*rows, inputs, dtype=dtype)
    x = around[..., 1:-1, :]
    got = scaled_products.linear(x, weight)
    assert got.shape == (*rows, outputs) and got.dtype == dtype and got.is_contiguous()
    wanted = naive.linear(x.double(), weight)
    assert relative_error(got, wanted) < ROUNDINGS * TOLERANCE[dtype]
    if dtype != torch.float32:
        assert relative_error(naive.linear(x, weight), wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("width", [48, 1000])
def test_rows_are_sums_of_two_in_e4m3(width):
    """Exactly, but for numbers far below the row's largest, also beside a norm in one launch."""
    x = normal(3, 5, width, dtype=torch.bfloat16)
    x *= 10.0 ** torch.linspace(-30, 30, 5, device=DEVICE).to(x.dtype)[:, None]
    x[1, 2] = 0
    scale = normal(width, seed=2, dtype=torch.bfloat16)
    made = split_rows.new_split(x.shape, x.device)
    _, y = pointwise.add_rms_norm(x, None, scale, 1e-5, split=made)
    for rows, halves in ((x, split_rows.split(x)), (y, made)):
        got = (halves.pieces.double() * halves.unit.double()[..., None]).sum(0)
        largest = rows.double().abs().amax(-1, keepdim=True)
        assert ((got - rows.double()).abs() <= largest * 2**-17).all()
        large = rows.double().abs() >= largest * 2**-8
        assert torch.equal(got[large], rows.double()[large])


@pytest.mark.parametrize("groups", [1, 6])
def test_a_weight_is_written_out_exactly(groups):
    """Also one of several whose inputs lie next to each other."""
    whole = in_groups(normal(37, 1200, seed=1), 2 * groups)
    weight = Scaled(whole.values[:, 600:], whole.scale[:, groups:])
    got = scaled_products.written_out(weight, torch.float32)
    assert torch.equal(got, naive.dequantised(weight, torch.float32))


@pytest.mark.parametrize(
    ("rows", "groups"),
    [((3,), 1), costly((257,), 4), costly((3,), 4), costly((257,), 1),
     *(costly(rows, groups) for rows in ((17,), (2, 44)) for groups in (1, 4))],
)
def test_parts_and_swiglu(rows, groups):
    """Parts of a sum begin with their own scales; gate and up have scales of their own."""
    inputs, dtype = 4096, torch.bfloat16
    x = normal(*rows, inputs, dtype=dtype)
    weight = poisoned(in_groups(normal(200, inputs, seed=1), groups * 8))
    parts = scaled_products.linear_parts(x, weight)
    assert (len(parts) > 1) == (math.prod(rows) <= 256)
    wanted = naive.linear(x.double(), weight)
    assert relative_error(parts.sum(0), wanted) < ROUNDINGS * TOLERANCE[dtype]
    got = scaled_products.linear_swiglu(x, weight)
    wanted = naive.linear_swiglu(x.double(), weight)
    assert got.shape == (*rows, 100)
    assert relative_error(got, wanted) < 4 * ROUNDINGS * TOLERANCE[dtype]


@pytest.mark.parametrize(("rows", "inputs"), [(140, 48), costly(65, 1024)])
def test_many_rows(rows, inputs):
    """On a GPU, PyTorch returns a product for each half of the rows; one launch adds them up."""
    x = normal(2, rows, inputs, dtype=torch.bfloat16)
    weight = naive.in_8_bits(normal(160, inputs, seed=1))
    wanted, tolerance = naive.linear(x.double(), weight), ROUNDINGS * 1.5 * 2**-8
    for held in (weight, poisoned(weight)):  # whose scales are not aligned
        parts = scaled_products.linear_parts(x, held)
        if DEVICE == "cuda" and held is weight:
            assert len(parts) == 1 and parts.dtype == x.dtype
        assert relative_error(parts.double().sum(0), wanted) < tolerance
        assert relative_error(scaled_products.linear(x, held), wanted) < tolerance
        gated = scaled_products.linear_swiglu(x, held)
        assert relative_error(gated, naive.activated(wanted, "swiglu")) < 3 * tolerance


@pytest.mark.parametrize(("rows", "padded"), [(3, 6), costly(150, 384)])
def test_what_lies_behind_many_rows_does_not_matter(rows, padded):
    x, weight = normal(rows, 48, dtype=torch.bfloat16), naive.in_8_bits(normal(160, 48, seed=1))
    wanted, tolerance = naive.linear(x.double(), weight), ROUNDINGS * 1.5 * 2**-8
    halves = split_rows.split(x)
    assert len(halves.padded) == padded
    halves.padded[2 * rows :] = math.nan
    got = scaled_products.by_library(x, weight, None, halves)
    assert relative_error(got, wanted) < tolerance
    got = scaled_products.by_library(x, weight, "swiglu", halves)
    assert relative_error(got, naive.activated(wanted, "swiglu")) < 3 * tolerance


@pytest.mark.parametrize(
    ("inputs", "outputs", "groups"), [(512, 130, 2), costly(128, 200, 1), costly(1536, 264, 12)]
)
def test_many_rows_by_blocks(inputs, outputs, groups):
    """Rows and outputs end within a tile; a scale is for 128 or 256 inputs."""
    x = normal(2, 140, inputs, dtype=torch.bfloat16)
    weight = poisoned(in_groups(normal(outputs, inputs, seed=1), groups))
    assert blocks.fits(x, weight)
    wanted, tolerance = naive.linear(x.double(), weight), ROUNDINGS * TOLERANCE[x.dtype]
    got = scaled_products.linear(x, weight)
    assert got.shape == wanted.shape and relative_error(got, wanted) < tolerance
    got = scaled_products.linear_swiglu(x, weight)
    assert relative_error(got, naive.activated(wanted, "swiglu")) < 4 * tolerance


@pytest.mark.parametrize("kind", [None, "swiglu", "relu2", "gelu"])
def test_products_of_both_halves_are_added_up_and_scaled(kind):
    halves = normal(2, 3, 2, 1500, dtype=torch.bfloat16)
    unit, scale = normal(3, 2, seed=1).exp(), normal(1500, seed=2).exp()
    product = halves.double().sum(0) * unit[..., None] * scale
    wanted = product if kind is None else naive.activated(product, kind)
    got = pointwise.activated_product(halves, unit, scale, kind)
    assert got.shape == wanted.shape and relative_error(got, wanted) < ROUNDINGS * 3 * 2**-8


def test_parts_in_bf16_are_added_up():
    parts, x = (normal(*shape, 3, 2, 1500, dtype=torch.bfloat16) for shape in ((2,), ()))
    scale = normal(1500, seed=3)
    got = pointwise.add_rms_norm(x, parts, scale, 1e-5)
    wanted = naive.add_rms_norm(x.double(), parts.double().sum(0)[None], scale.double(), 1e-5)
    for each, other in zip(got, wanted, strict=True):
        assert relative_error(each, other) < ROUNDINGS * 3 * 2**-8


@pytest.mark.quick(1)
@pytest.mark.parametrize(("inputs", "outputs"), [(60, 700), (256, 700), (256, 300)])
def test_a_row_does_not_depend_on_how_many_others_there_are(inputs, outputs):
    weight = naive.in_8_bits(normal(outputs, inputs, seed=1))
    x = normal(16, inputs, dtype=torch.bfloat16)
    among = scaled_products.linear(x, weight)
    for count in (1, 3, 8, 9):
        assert torch.equal(scaled_products.linear(x[:count], weight), among[:count])


def test_numbers_of_all_sizes_that_8_bits_have_come_through():
    """Each of e4m3 by one, its smallest, which are no normal numbers, too."""
    every = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    every = torch.where(every.float().isfinite(), every.float(), 0.0).to(torch.float8_e4m3fn)
    values = every[:, None].expand(-1, 16).contiguous()
    for dtype in TOLERANCE:
        x = torch.zeros(1, 16, dtype=dtype, device=DEVICE)
        x[0, 3] = 1.0
        got = scaled_products.linear(x, Scaled(values, torch.ones(256, 1, device=DEVICE)))
        assert torch.equal(got[0], every.to(dtype))


def test_in_8_bits_keeps_what_8_bits_can():
    weight = normal(9000, 40, seed=1, dtype=torch.bfloat16)  # in two pieces
    weight *= 10.0 ** torch.linspace(-30, 30, 9000, device=DEVICE)[:, None]
    weight[4] = 0
    held = naive.in_8_bits(weight)
    assert held.values.shape == weight.shape and held.values.dtype == torch.float8_e4m3fn
    back = naive.dequantised(held, torch.double)
    assert not back[4].any() and back.isfinite().all()
    largest = weight.double().abs().amax(1, keepdim=True)
    # Half a step: of 3 bits behind the first one, or of the smallest number, 2⁻⁹ of 448
    most = torch.maximum(weight.double().abs() * 2**-4, largest / 448 * 2**-10)
    assert ((back - weight.double()).abs() <= most * (1 + 1e-6)).all()
    top = back.abs().amax(1, keepdim=True)
    torch.testing.assert_close(top, largest, rtol=1e-6, atol=0)  # which is 448 itself


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
def test_what_is_not_finite_shows(bad):
    weight = normal(300, 64, seed=1)
    weight[7, 3] = bad
    head = naive.in_8_bits(weight)
    for got in (
        scaled_products.linear(normal(2, 64, dtype=torch.bfloat16), head),
        naive.linear(normal(2, 64), head),
    ):
        finite = got.isfinite().all(0)
        assert not finite[7] and finite.sum() == 299
    head, x = naive.in_8_bits(normal(300, 64, seed=1)), normal(2, 64, dtype=torch.bfloat16)
    x[1, 5] = bad
    finite = scaled_products.linear(x, head).isfinite()
    assert finite[0].all() and not finite[1].any()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_children_are_drawn_by_it(temperature):
    """Children are the best of the returned logits, after rows and after a stream's norm."""
    head = naive.in_8_bits(normal(333, 64, seed=3))
    x, scale = normal(1, 2, 64, dtype=torch.bfloat16), normal(64, seed=2)
    one = torch.ones(1, dtype=torch.long, device=DEVICE)
    sampling = Sampling(torch.full((1,), temperature, dtype=torch.double, device=DEVICE), one, one)
    depths = torch.tensor([[0, 1]], dtype=torch.int32, device=DEVICE)
    places = torch.arange(1, 7, device=DEVICE).view(1, 2, 3)
    tokens = [torch.zeros(1, 7, dtype=torch.long, device=DEVICE) for _ in range(2)]
    finite = torch.zeros(1, 2, dtype=torch.bool, device=DEVICE)
    for given in (x, Stream(x, scale, 1e-5)):
        logits = ops.draw_children(given, head, depths, sampling, places, tokens[0], finite)
        rows = given if given is x else naive.norm(Stream(x, scale, 1e-5))
        assert relative_error(logits, naive.linear(rows.double(), head)) < 2 * 2**-8
        naive.choose_children(logits, depths, sampling, places, tokens[1], finite)
        assert torch.equal(*tokens) and finite.all()
