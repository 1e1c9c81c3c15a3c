"""Experts' products against the naive twin in fp64; weights that nobody chose are NaN."""

from dataclasses import replace

import pytest
import torch
from kernel_cases import DEVICE, normal, relative_error
from lanes import quick_first

from stree_kernels import naive
from stree_kernels.contracts import Router, Scaled
from stree_kernels.products import experts

# Five roundings to bf16; the interpreter's are towards zero, by 2⁻⁸ each on average
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4 * 2**-9 if DEVICE == "cuda" else 6 * 2**-8}


def case(num_rows, num_experts, top, kind, dtype, width=40, inner=24):
    torch.manual_seed(num_rows)
    scores = torch.rand(num_rows, num_experts)
    scores[:, num_experts // 2 :] = 0  # half of the experts nobody chooses
    chosen = scores.topk(top).indices.to(DEVICE)
    above = 1 if kind == "relu2" else 2
    up = normal(num_experts, above * inner, width, seed=1, dtype=dtype)
    down = normal(num_experts, width, inner, seed=2, dtype=dtype)
    unchosen = torch.ones(num_experts, dtype=torch.bool)
    unchosen[chosen.flatten().cpu()] = False
    for each in (up, down):
        each[unchosen.to(DEVICE)] = torch.nan
    weights = normal(num_rows, top, seed=3).softmax(-1)
    return normal(num_rows, width, seed=4, dtype=dtype), weights, chosen, up, down, kind


@pytest.mark.parametrize(
    "num_rows, num_experts, top, kind, dtype",
    quick_first(
        [(1, 8, 2, "swiglu", torch.float32), (17, 40, 3, "relu2", torch.bfloat16)],
        [
            (rows, *sizes, kind, dtype)
            for rows in (1, 5, 17, 64) for sizes in ((8, 2), (40, 3), (3, 1))
            for kind in experts.KINDS for dtype in TOLERANCE
        ],
    ),
)
def test_experts(num_rows, num_experts, top, kind, dtype):
    rows, weights, chosen, up, down, _ = given = case(num_rows, num_experts, top, kind, dtype)
    exact = (each.double().nan_to_num() for each in (rows, weights.to(dtype), up, down))
    wide_rows, wide_weights, wide_up, wide_down = exact
    wanted = naive.experts(wide_rows, wide_weights, chosen, wide_up, wide_down, kind)
    got = experts.experts(*given).sum(0)
    assert got.shape == (num_rows, 40)
    assert relative_error(got, wanted[0]) < TOLERANCE[dtype]


def scaled_case(num_rows, groups, kind, dtype, width=192, inner=96):
    """Make a case with weights in 8 bits; each group of inputs has a scale."""
    *given, up, down, _ = case(num_rows, 20, 3, kind, dtype, width, inner)
    stacks = []
    for weight in (up, down):
        grouped = naive.in_8_bits(weight.float().unflatten(-1, (groups, -1)).flatten(0, 2))
        assert not grouped.scale.isfinite().all()
        scale = grouped.scale.view(*weight.shape[:2], groups)
        stacks.append(Scaled(grouped.values.view(weight.shape), scale))
    return *given, *stacks, kind


def finite(weight: Scaled) -> Scaled:
    numbers = weight.values.float().nan_to_num().to(weight.values.dtype)
    return Scaled(numbers, weight.scale.nan_to_num())


@pytest.mark.parametrize(
    "num_rows, groups, kind, dtype",
    quick_first(
        [(5, 3, "swiglu", torch.bfloat16), (70, 1, "relu2", torch.float32)],
        [
            (rows, groups, kind, dtype) for rows in (1, 5, 33, 70) for groups in (1, 3)
            for kind in experts.KINDS for dtype in (*TOLERANCE, torch.float16)
        ],
    ),
)
def test_experts_in_8_bits(num_rows, groups, kind, dtype):
    """70 rows go in two pieces; 96 inputs in 3 groups are 32 in each, the fewest of a step."""
    rows, weights, chosen, *stacks, _ = given = scaled_case(num_rows, groups, kind, dtype)
    known = [finite(each) for each in stacks]
    wide = [naive.dequantised(replace(each, scale=each.scale.double()), torch.double)
            for each in known]
    share = weights.to(dtype).double()
    wanted = naive.experts(rows.double(), share, chosen, *wide, kind)[0]
    tolerance = TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16] / 8)
    for got in (experts.experts(*given), naive.experts(rows, weights, chosen, *known, kind)):
        assert got.shape[1:] == wanted.shape and relative_error(got.sum(0), wanted) < tolerance


@pytest.mark.parametrize("sign", [1, -1])
def test_each_number_of_e4m3_is_converted_exactly(sign):
    """Inputs and outputs are one hot; squares of four binary digits have eight, as bf16 has."""
    numbers = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    up = finite(Scaled(numbers.repeat(256, 1).t()[None].contiguous(), torch.ones(1, 256, 1)))
    up, down = (
        Scaled(each.to(numbers.dtype), torch.ones(1, 256, 1, device=DEVICE))
        for each in (up.values, torch.eye(256, device=DEVICE)[None])
    )
    rows = sign * torch.eye(256, device=DEVICE)[:1].bfloat16()
    weights, chosen = torch.ones(1, 1, device=DEVICE), torch.zeros(1, 1, device=DEVICE).long()
    got = experts.experts(rows, weights, chosen, up, down, "relu2").sum(0)[0]
    assert torch.equal(got, (sign * up.values[0, :, 0].float()).relu().square())


@pytest.mark.parametrize("groups", [6, 24])
def test_groups_that_are_too_small_for_a_step_go_to_the_twin(groups):
    given = scaled_case(2, groups, "swiglu", torch.float32)
    given = (*given[:3], *(finite(each) for each in given[3:5]), given[5])
    assert torch.equal(experts.experts(*given), naive.experts(*given))


def test_what_nobody_asked_for_may_overflow():
    """A row's values in another row's expert count for nothing, infinite or not."""
    rows, weights, chosen, up, down, kind = case(2, 4, 1, "swiglu", torch.float32)
    chosen[:] = torch.tensor([[0], [1]])
    up[:2], down[:2] = 1.0, 1.0
    rows[0, 0] = 1e30  # overflows in any expert
    got = experts.experts(rows, weights, chosen, up, down, kind).sum(0)
    wanted = naive.experts(rows, weights, chosen, up.nan_to_num(), down.nan_to_num(), kind)
    assert not got[0].isfinite().all()
    assert relative_error(got[1], wanted[0, 1]) < 1e-5


def test_what_the_kernels_have_no_words_for_goes_to_the_twin():
    given = case(65, 8, 2, "swiglu", torch.float32)
    given = (*given[:3], *(each.nan_to_num() for each in given[3:5]), given[5])
    assert torch.equal(experts.experts(*given), naive.experts(*given))


@pytest.mark.parametrize(
    "router",
    [
        Router(2), Router(3, normalised=False, scale=2.5), Router(1),
        Router(3, softmax=False, scale=1.7), Router(5, softmax=False, normalised=False),
        Router(2, softmax=False, floor=0.5),
        Router(2, softmax=False, groups=4, top_groups=2),  # left to the twin
    ],
    ids=str,
)
@pytest.mark.parametrize("num_experts", [8, 20])
def test_choice(router, num_experts):
    logits, correction = normal(5, num_experts, seed=1), normal(num_experts, seed=2)
    correction = None if router.softmax else correction
    weights, chosen = experts.choose_experts(logits, correction, router)
    wide = None if correction is None else correction.double()
    wanted, wanted_chosen = naive.choose_experts(logits.double(), wide, router)
    assert torch.equal(chosen, wanted_chosen) and chosen.dtype == torch.long
    assert relative_error(weights, wanted) < 1e-6


def test_logits_that_are_not_numbers_choose_experts_that_there_are():
    logits = torch.full((2, 20), torch.nan, device=DEVICE)
    weights, chosen = experts.choose_experts(logits, None, Router(3))
    assert weights.isnan().all() and chosen.min() >= 0 and chosen.max() < 20
