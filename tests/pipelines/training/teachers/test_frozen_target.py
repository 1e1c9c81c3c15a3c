"""A frozen target's products in 8 bits are as exact as e4m3, and a drafter learns from them."""

from __future__ import annotations

import pytest
import torch
from tiny_run import distill_arguments, metric_rows
from toys import tiny_model

from stree.common.errors import UsageError
from stree.models.in_8_bits import projections, put_in_8_bits
from stree.models.layers.packed_linear import ScaledLinear
from stree.models.model import HybridModel
from stree_pipelines.commands import distill
from stree_pipelines.resources.estimates import (
    ModelPlan,
    held_bytes,
    num_parameters,
    training_memory,
)
from stree_pipelines.training.teachers.frozen_target import FrozenTarget, held_dtype


@torch.no_grad()
def test_a_target_says_almost_the_same_with_products_in_8_bits():
    target, tokens = tiny_model(dtype=torch.float32), torch.arange(144)[None] % 11
    before = target(tokens).log_softmax(-1)
    tables = {name: each for name, each in target.named_parameters() if "embed" in name}
    FrozenTarget(target, "replicated", "float8")
    after = target(tokens).log_softmax(-1)
    replaced = {name for name, each in target.named_modules() if isinstance(each, ScaledLinear)}
    assert replaced == projections(target).keys() - {"lm_head"}
    assert target.head_in_8_bits is None
    few = target(tokens[:, :100]).log_softmax(-1)  # whose inputs are not rounded
    assert (few - after[:, :100]).abs().max() > 1e-4
    for name, each in tables.items():
        assert target.get_parameter(name) is each
    divergence = (before.exp() * (before - after)).sum(-1)
    assert 0 < divergence.max() < 0.05


@torch.no_grad()
def test_inputs_are_rounded_for_weights_that_were_in_8_bits_before():
    """Weights that were stored in 8 bits have their inputs rounded, too; a head has not."""
    before, stored = tiny_model(dtype=torch.float32), tiny_model(dtype=torch.float32)
    put_in_8_bits(stored)
    tokens = torch.arange(144)[None] % 11
    exact = stored.hidden_states(tokens)
    for target in (before, stored):
        FrozenTarget(target, "replicated", "float8")
    rounded = stored.hidden_states(tokens)
    assert torch.equal(rounded, before.hidden_states(tokens))
    assert (rounded - exact).abs().max() > 1e-4
    assert not stored.lm_head.rounds_inputs
    put_in_8_bits(stored)
    assert torch.equal(stored.hidden_states(tokens), exact)


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
    frozen = FrozenTarget(tiny_model(), "replicated", "float8")
    with pytest.raises(UsageError, match=r"8\.9 or more, NVIDIA A100 is older: take model"):
        frozen.place(torch.device("cuda"), 1)


@pytest.mark.parametrize("mlp", ["gated", "experts"])
def test_memory_counts_a_byte_for_what_is_rounded_and_two_for_what_is_not(mlp):
    experts = dict(num_experts=6, experts_per_token=2, expert_intermediate_size=32)
    more = {"gated": {}, "experts": experts}
    config = tiny_model().config.replace(**more[mlp])
    model = HybridModel(config).bfloat16()
    held = sum(each.nbytes for each in [*model.parameters(), *model.buffers()])
    assert held_bytes(config, torch.bfloat16) == held == 2 * num_parameters(config)
    FrozenTarget(model, "replicated", "float8")
    held = sum(each.nbytes for each in [*model.parameters(), *model.buffers()])
    plan = ModelPlan(config, config, held_dtype("float8"))
    counted = training_memory(plan, (2, 48), "32-true", on_cuda=False)["target"]
    assert counted == held < held_bytes(config, torch.bfloat16)
