"""Run DeepSpeed's ZeRO stages 2 and 3 with this program's own checkpoints.

DeepSpeed writes a shard per process, tied to their number, in a format that runs code when it is
read. Here weights and AdamW's state are gathered and written in the format of all runs, so a run
may go on under another strategy, and one of another strategy here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    ParallelStrategy,
    StrategyRegistry,
)
from torch import Tensor, nn
from torch.optim import Optimizer

STAGES = {"deepspeed_stage_2": 2, "deepspeed_stage_3": 3}
MOMENTS = ("exp_avg", "exp_avg_sq")


class WholeCheckpoints(ParallelStrategy):
    """Mixin before a strategy with checkpoints of its own: leaves them to the trainer's
    CheckpointIO."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        ParallelStrategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return ParallelStrategy.load_checkpoint(self, checkpoint_path, weights_only)


class ZeroStrategy(WholeCheckpoints, DeepSpeedStrategy):
    """`--trainer.strategy deepspeed_stage_2` or `deepspeed_stage_3`.

    Stage 2 shares gradients and optimizer state among all processes, stage 3 weights, too.
    """

    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)  # Lightning's own demands CUDA, DeepSpeed does not

    def setup_distributed(self) -> None:
        if self.root_device.type == "cuda":
            super().setup_distributed()
        else:
            reset_seed()
            self.set_world_ranks()
            self._init_deepspeed_distributed()

    def _setup_model_and_optimizer(
        self, model: Any, optimizer: Any, lr_scheduler: Any = None
    ) -> Any:
        import deepspeed

        index = self.root_device.index  # a CPU has none; Lightning's own would pass None on
        engine, shared, _, _ = deepspeed.initialize(
            args=argparse.Namespace(device_rank=self.local_rank if index is None else index),
            config=self.config,
            model=model,
            model_parameters=[each for each in model.parameters() if each.requires_grad],
            optimizer=optimizer,
            dist_init_required=False,
        )
        return engine, shared

    def _init_optimizers(self) -> tuple[Optimizer, Any]:
        optimizer, scheduler = super()._init_optimizers()
        # Kept from before DeepSpeed puts flat parts in their place.
        self._state_groups = optimizer.state_dict()["param_groups"]
        self._parameters = [each for group in optimizer.param_groups for each in group["params"]]
        return optimizer, scheduler

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # The trainer has divided by the number of micro-batches already.
        return super().backward(closure_loss, *args, scale_wrt_gas=False, **kwargs)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        norm = self.deepspeed_engine.get_global_grad_norm()  # clipped there; known afterwards
        if norm is not None:
            module: Any = self.lightning_module
            module.note_grad_norm(torch.as_tensor(norm, device=self.root_device).float())
        return output

    # Checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return False  # weights go in before they are shared

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        from deepspeed.utils import safe_get_full_fp32_param

        assert self.lightning_module is not None
        module = self.lightning_module
        weights = {
            name: self._kept(safe_get_full_fp32_param(parameter))
            for name, parameter in module.named_parameters()
        }
        buffers = {name: each for name, each in module.state_dict().items() if name not in weights}
        return weights | {name: self._kept(each) for name, each in buffers.items()}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        from deepspeed.utils import safe_get_full_optimizer_state

        self._link_state()
        inner = self._optimizer
        step = next(state["step"] for state in inner.state.values())
        state = {
            index: {
                "step": torch.as_tensor(step).cpu().clone(),
                **{name: self._kept(safe_get_full_optimizer_state(each, name)) for name in MOMENTS},
            }
            for index, each in enumerate(self._parameters)
        }
        groups = [
            {**group, "lr": now["lr"]}
            for group, now in zip(self._state_groups, inner.param_groups, strict=True)
        ]
        return {"state": state, "param_groups": groups}

    def _kept(self, gathered: Tensor) -> Tensor | None:
        """Return the gathered tensor on the main process's CPU; None on the others, to save host
        memory."""
        return gathered.cpu() if self.is_global_zero else None

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        ParallelStrategy.load_model_state_dict(self, checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        (state,) = checkpoint["optimizer_states"]
        self._create_state(state["state"][0]["step"])
        assert self.lightning_module is not None
        for name, parameter in self.lightning_module.named_parameters():
            # Under mixed precision the weights loaded before are rounded by now.
            self._put(parameter, checkpoint["state_dict"][name], None)
        for index, parameter in enumerate(self._parameters):
            for name in MOMENTS:
                self._put(parameter, state["state"][index][name], name)

    @property
    def _optimizer(self) -> Optimizer:
        """AdamW of the parts that this process holds."""
        return self.deepspeed_engine.optimizer.optimizer

    def _create_state(self, step: Tensor) -> None:
        """Make AdamW's state now; usually its first step does."""
        zero = self.deepspeed_engine.optimizer
        stage_3 = self.zero_stage_3
        name = "fp32_partitioned_groups_flat" if stage_3 else "single_partition_of_fp32_groups"
        for part in getattr(zero, name):
            moments = {name: torch.zeros_like(part) for name in MOMENTS}
            fused = self._optimizer.defaults["fused"]
            self._optimizer.state[part] = {
                "step": step.to(part.device if fused else "cpu", copy=True), **moments
            }
        self._link_state()

    def _link_state(self) -> None:
        """Let stage 2 find the optimizer state of all parameters.

        DeepSpeed looks once, after the first group of parameters has been updated, and misses the
        others.
        """
        zero = self.deepspeed_engine.optimizer
        if not self.zero_stage_3:
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()

    def _put(self, parameter: nn.Parameter, value: Tensor, name: str | None) -> None:
        """Write this process's part of a weight, or of its state `name`."""
        value = value.to(self.root_device)
        if not self.zero_stage_3:
            parameter.set_full_hp_param(value, name)  # type: ignore[attr-defined]
            return
        size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
        flat = F.pad(value.flatten(), (0, size * self.world_size - value.numel()))
        part = flat.narrow(0, size * self.global_rank, size)
        parameter._z3_optimizer.set_local_hp_param(part, parameter, name)  # type: ignore[attr-defined]


for _name, _stage in STAGES.items():
    StrategyRegistry.register(
        _name, ZeroStrategy, description=f"ZeRO stage {_stage}", override=True, stage=_stage
    )
