"""Muon and AdamW update their own weights by PyTorch's maths, and runs are resumed."""

from __future__ import annotations

import shutil
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from run_checks import assert_same_run
from tiny_run import ARCHITECTURE, distill_arguments

from stree.checkpoints.load_save import load_model
from stree.common.errors import UsageError
from stree.models.config import HybridConfig
from stree.models.model import HybridModel
from stree_pipelines.commands import distill
from stree_pipelines.resources.estimates import checkpoint_bytes
from stree_pipelines.training.checkpoints.saving import SafeCheckpointIO
from stree_pipelines.training.distillation import Distillation
from stree_pipelines.training.drafter_head import HeadConfig
from stree_pipelines.training.hidden_states import FeatureConfig
from stree_pipelines.training.optimization import OptimizerConfig, make_optimizer
from stree_pipelines.training.parallel import sharding

MUON = ("--model.optimizer.kind", "muon", "--model.optimizer.lr", "0.01")
WSD = ("--model.optimizer.schedule", "wsd", "--model.optimizer.decay_share", "0.4")


def with_gradients(model: HybridModel, seed: int) -> HybridModel:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return model


def test_muon_updates_the_matrices_of_layers_and_features(workspace):
    """A head of low rank is two matrices, and AdamW's as any other head."""
    module = Distillation(
        str(workspace / "target"), features=FeatureConfig([1, 3]), head=HeadConfig(rank=8),
        optimizer=OptimizerConfig(kind="muon"),
    )
    names = {id(each): name for name, each in module.named_parameters()}
    matrices, decayed, kept = module.configure_optimizers().param_groups
    of = [{names[id(each)] for each in group["params"]} for group in (matrices, decayed, kept)]
    mixers = ("mamba.in_proj", "mamba.out_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    layers = range(module.exported.config.num_layers)
    wanted = {f"exported.model.layers.{i}.{name}.weight" for i in layers for name in mixers}
    assert of[0] == wanted | {"exported.model.features.proj.weight"}
    assert of[1] == {"exported.head_down.weight", "exported.lm_head.weight"}
    assert set.union(*of) == set(names.values()) and sum(map(len, of)) == len(names)
    assert [group["weight_decay"] for group in (matrices, decayed, kept)] == [0.1, 0.1, 0.0]


def test_updates_are_pytorch_s_own():
    """Each part alone on a copy gives the same bits, also when the learning rate changes."""
    torch.manual_seed(0)
    model = HybridModel(HybridConfig(**ARCHITECTURE))
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    config = OptimizerConfig(kind="muon", momentum=0.9, weight_decay=0.2)
    together = make_optimizer(model.named_parameters(), config, fused=False)
    matrices = {id(each) for each in together.param_groups[0]["params"]}
    rates = (0.01, 0.003)
    gradients = []
    for step, rate in enumerate(rates):
        for group in together.param_groups:
            group["lr"] = rate
        with_gradients(model, step)
        gradients.append({name: each.grad for name, each in model.named_parameters()})
        together.step()
    for name, updated in model.named_parameters():
        alone = torch.nn.Parameter(before[name])
        if id(updated) in matrices:
            own = torch.optim.Muon(
                [alone], momentum=0.9, weight_decay=0.2, adjust_lr_fn="match_rms_adamw"
            )
        else:
            own = torch.optim.AdamW([alone], betas=config.betas, eps=config.eps, weight_decay=0.0)
        for rate, gradient in zip(rates, gradients, strict=True):
            own.param_groups[0]["lr"], alone.grad = rate, gradient[name]
            own.step()
        assert torch.equal(updated, alone), name


def test_state_that_is_read_back_is_gone_on_with():
    """Another model's optimiser takes the state, and both go on alike."""
    torch.manual_seed(0)
    models = [HybridModel(HybridConfig(**ARCHITECTURE)) for _ in range(2)]
    config = OptimizerConfig(kind="muon")
    first, second = (make_optimizer(each.named_parameters(), config, False) for each in models)
    with_gradients(models[0], 0)
    first.step()
    models[1].load_state_dict(models[0].state_dict())
    second.load_state_dict(deepcopy(first.state_dict()))
    for model, optimizer in zip(models, (first, second), strict=True):
        with_gradients(model, 1)
        for group in optimizer.param_groups:
            group["lr"] = 0.5
        optimizer.step()
    for mine, theirs in zip(*(each.parameters() for each in models), strict=True):
        assert torch.equal(mine, theirs)


def test_moments_are_as_many_as_estimated():
    model = with_gradients(HybridModel(config := HybridConfig(**ARCHITECTURE)), 0)
    for kind in ("adamw", "muon"):
        optimizer = make_optimizer(model.named_parameters(), OptimizerConfig(kind=kind), False)
        optimizer.step()
        states = optimizer.state.values()
        held = [each for state in states for name, each in state.items() if name != "step"]
        taken = sum(each.nbytes for each in [*held, *model.parameters()])
        assert checkpoint_bytes(config, kind) == taken


@pytest.mark.costly
def test_a_run_with_decays_is_resumed_bit_for_bit(workspace, tmp_path):
    """Runs go on from before a decay and from behind it, and exports equal a shorter training's."""

    def run(name: str, *more: str, steps: int) -> Path:
        options = (*MUON, *WSD, "--trainer.limit_val_batches", "0", *more)
        distill.main(distill_arguments(workspace, tmp_path / name, *options, steps=steps))
        return tmp_path / name

    exports = ("--export.steps", "[1,4]")
    whole = run("whole", *exports, steps=6)
    for stopped in (2, 4):
        shutil.copytree(whole, tmp_path / f"cut-{stopped}", symlinks=True)
        for step in range(stopped + 1, 7):
            shutil.rmtree(tmp_path / f"cut-{stopped}/checkpoints/step-{step:08d}")
        for step in {2: (4, 6), 4: (6,)}[stopped]:
            shutil.rmtree(tmp_path / f"cut-{stopped}/drafter/step-{step:08d}")
        assert_same_run(run(f"cut-{stopped}", *exports, steps=6), whole)
    shorter = load_model(run("short", steps=4) / "drafter/latest")
    early = load_model(whole / "drafter/step-00000004")
    for mine, theirs in zip(early.parameters(), shorter.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    saved = SafeCheckpointIO().load_checkpoint(whole / "checkpoints/step-00000006")
    moments = saved["optimizer_states"][0]["state"].values()
    assert {"momentum_buffer", "exp_avg"} <= {name for each in moments for name in each}


@pytest.mark.parametrize("options, said", [
    (dict(momentum=0.9), "momentum is an option of muon, model.optimizer.kind is adamw"),
    (dict(kind="muon", momentum=1.0), "momentum is 1.0, wanted at least 0 and below 1"),
])
def test_a_momentum_without_meaning_is_refused(options, said):
    with pytest.raises(UsageError, match=said):
        OptimizerConfig(**options)


@pytest.mark.parametrize("strategy", sharding.SHARDED)
@pytest.mark.parametrize(("options", "name"), [(MUON, "kind muon"), (WSD, "schedule wsd")])
def test_weights_that_are_shared_among_processes_are_refused(
    options, name, strategy, workspace, tmp_path, monkeypatch
):
    monkeypatch.setattr(sharding, "find_spec", lambda name: name)  # as where DeepSpeed is
    more = (*options, "--trainer.strategy", strategy)
    said = f"model.optimizer.{name} needs the whole weights .* {strategy} shares them: use ddp"
    with pytest.raises(UsageError, match=said):
        distill.main(distill_arguments(workspace, tmp_path / "run", *more))
