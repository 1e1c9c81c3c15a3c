"""A frozen target's products in 8 bits are as exact as e4m3, and a drafter learns from them."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_run import distill_arguments, metric_rows
from torch import nn
from toys import tiny_model

from stree.common.errors import UsageError
from stree.models.model import HybridModel
from stree_pipelines.commands import distill
from stree_pipelines.resources.estimates import held_bytes, num_parameters
from stree_pipelines.training.parallel.float8 import (
    FLOAT8,
    Float8Linear,
    product,
    require_float8,
    round_products,
    rounded,
)

CUDA = torch.device("cuda")
needs_products = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
        reason="needs a GPU that multiplies 8 bits",
    ),
]


def test_rows_are_rounded_to_three_digits_of_their_own_range():
    torch.manual_seed(0)
    x = torch.randn(7, 96) * torch.logspace(-6, 6, 7)[:, None]
    x[3] = 0.0
    values, scale = rounded(x)
    assert values.dtype == FLOAT8 and scale.shape == (7, 1)
    error = (values.double() * scale.double() - x.double()).abs()
    largest = x.double().abs().amax(1, keepdim=True)
    # Half of a step: 2⁻⁴ of a number, but not below half of the least one that e4m3 has, 2⁻⁹
    assert (error <= torch.maximum(x.double().abs() / 16, largest / 448 * 2**-10) * 1.0001).all()
    assert error.max() > 0 and error[3].max() == 0


def test_a_weight_that_is_not_finite_shows_in_its_scale():
    linear = nn.Linear(16, 32, bias=False)
    linear.weight.data[5, 3], linear.weight.data[9, 0] = math.nan, math.inf
    finite = Float8Linear(linear).scale.isfinite()
    assert finite.sum() == 30 and not finite[5] and not finite[9]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_products)])
def test_a_product_is_that_of_the_rounded_numbers(device, dtype):
    torch.manual_seed(0)
    x, scale_x = rounded(torch.randn(37, 160, device=device))
    weight, scale = rounded(torch.randn(48, 160, device=device))
    bias = torch.randn(48, device=device).to(dtype)
    exact = (x.double() * scale_x) @ (weight.double() * scale).T + bias.double()
    y = product(x, scale_x, weight, scale, bias, dtype)
    assert y.dtype == dtype
    # A GPU gives bf16; its 8-bit sums have some 14 digits, of terms of up to 100
    tolerance = 2**-8 if device == "cuda" or dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(y.double(), exact, rtol=tolerance, atol=40 * tolerance)


@torch.no_grad()
def test_a_target_says_almost_the_same_with_products_in_8_bits():
    target, tokens = tiny_model(dtype=torch.float32), torch.arange(24)[None] % 11
    before = target(tokens).log_softmax(-1)
    tables = {name: each for name, each in target.named_parameters() if "embed" in name}
    round_products(target)
    after = target(tokens).log_softmax(-1)
    replaced = [each for each in target.modules() if isinstance(each, Float8Linear)]
    left = [each for each in target.model.modules() if type(each) is nn.Linear]
    assert replaced and all(each.in_features % 16 or each.out_features % 16 for each in left)
    for name, each in tables.items():
        assert target.get_parameter(name) is each
    divergence = (before.exp() * (before - after)).sum(-1)
    assert 0 < divergence.max() < 0.05


def test_a_drafter_learns_from_a_target_in_8_bits(workspace, tmp_path, capsys):
    losses = {}
    for dtype in ("float32", "float8"):
        run_dir = tmp_path / dtype
        distill.main(distill_arguments(workspace, run_dir, "--model.target_dtype", dtype))
        losses[dtype] = [float(row["loss"]) for row in metric_rows(run_dir) if row["loss"]]
    assert losses["float8"][-1] < losses["float8"][0]
    assert losses["float8"] != losses["float32"]
    assert losses["float8"] == pytest.approx(losses["float32"], rel=0.1)


def test_what_8_bits_do_not_go_with_is_refused(workspace, tmp_path, monkeypatch):
    options = ("--model.target_dtype", "float8", "--model.target_placement", "sharded")
    for dry in ((), ("--dry_run",)):
        with pytest.raises(UsageError, match=r"float8 does not go with model\.target_placement"):
            distill.main(distill_arguments(workspace, tmp_path / "run", *options, *dry))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(UsageError, match=r"capability 8\.9 or later, NVIDIA A100 is older"):
        require_float8(CUDA)


@pytest.mark.parametrize("mlp", ["gated", "experts", "odd"])
def test_memory_counts_a_byte_for_what_is_rounded_and_two_for_what_is_not(mlp):
    """Experts stay in bf16, and so do projections of sizes that 8 bits do not serve."""
    experts = dict(num_experts=6, experts_per_token=2, expert_intermediate_size=32)
    more = {"gated": {}, "experts": experts, "odd": dict(intermediate_size=40)}
    config = tiny_model().config.replace(**more[mlp])
    model = HybridModel(config).bfloat16()
    held = sum(each.nbytes for each in [*model.parameters(), *model.buffers()])
    assert held_bytes(config, torch.bfloat16) == held == 2 * num_parameters(config)
    round_products(model)
    held = sum(each.nbytes for each in [*model.parameters(), *model.buffers()])
    assert held_bytes(config, FLOAT8) == held < held_bytes(config, torch.bfloat16)
