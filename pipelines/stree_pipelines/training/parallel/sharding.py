"""Share a model's weights among processes (PyTorch's FSDP2) and gather them for the disk.

A sharded run's checkpoints have the format of all runs: each tensor is gathered before it is
written and cut again when it is read, so a run may go on under another strategy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from lightning.pytorch.strategies import (
    DDPStrategy,
    ModelParallelStrategy,
    ParallelStrategy,
    StrategyRegistry,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map

from stree.common.errors import UsageError
from stree.models.model import HybridModel
from stree_pipelines.training.parallel.zero import STAGES, WholeCheckpoints, ZeroStrategy

FSDP2 = "fsdp2"
SHARDED = (FSDP2, *STAGES)
STRATEGIES = ("auto", "ddp", *SHARDED)


def shard(model: HybridModel, mesh: DeviceMesh) -> None:
    """Share the model's weights among the mesh, in place, and move them to its device.

    A layer's weights are gathered while it runs. Embedding, last norm and head stay gathered after
    the forward pass, because the losses read the head.
    """
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    register_fsdp_forward_method(model, "hidden_states")


def whole(values: Any, keep: bool = True) -> Any:
    """Gather each sharded tensor of nested values; all processes must call it.

    Gathered tensors are on the CPU (scalars where they were). keep False gives None in their place:
    all processes of a host share its memory.
    """

    def gather(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        gathered = value.full_tensor()
        if not value.ndim:
            return gathered
        return gathered.cpu() if keep else None

    return tree_map(gather, values)


def whole_model(model: HybridModel, strategy: Any) -> HybridModel:
    """Return the model itself, or on the main process a copy on the CPU with gathered weights.

    Gathers by the strategy's own means; all processes must call it.
    """
    if not isinstance(strategy, ShardedStrategy | ZeroStrategy):
        return model
    weights = strategy.lightning_module_state_dict()
    if not strategy.is_global_zero:
        return model
    with torch.device("meta"):
        gathered = HybridModel(model.config)
    names = {name: f"exported.{name}" for name in gathered.state_dict()}
    gathered.load_state_dict({name: weights[names[name]] for name in names}, assign=True)
    return gathered


def own_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor: all of it, unless it is sharded."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return getattr(tensor, "ds_tensor", tensor)  # ZeRO stage 3


@torch.no_grad()
def clip_norm(gradients: Sequence[Tensor], max_norm: float) -> Tensor:
    """Scale gradients in place so that their norm is at most max_norm; return the norm before.

    Each process takes the norm of its own parts; one exchange adds them up. PyTorch's
    `clip_grad_norm_` exchanges the norm of each sharded gradient.
    """
    parts = [own_part(each) for each in gradients]
    norm = torch.nn.utils.get_total_norm(parts)
    sharded = next((each for each in gradients if isinstance(each, DTensor)), None)
    if sharded is not None:
        squared = norm.square()
        torch.distributed.all_reduce(squared, group=sharded.device_mesh.get_group())
        norm = squared.sqrt()
    if parts:  # ZeRO keeps the gradients to itself, and clips them
        torch._foreach_mul_(parts, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


class ShardedStrategy(WholeCheckpoints, ModelParallelStrategy):
    """`--trainer.strategy fsdp2`: weights, gradients and optimizer state shared by all processes.

    The module's `configure_model` shards the trained model. Unlike Lightning's own strategy, this
    one runs on CPUs, too, and leaves checkpoints to the trainer's CheckpointIO.
    """

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        self._tensor_parallel_size = 1
        super().setup_environment()

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return whole(self.lightning_module.state_dict(), keep=self.is_global_zero)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return whole(ParallelStrategy.optimizer_state(self, optimizer), keep=self.is_global_zero)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.lightning_module
        assert module is not None
        parameters = module.state_dict()
        cut = {
            name: _cut_like(parameters[name], tensor) if name in parameters else tensor
            for name, tensor in checkpoint["state_dict"].items()
        }
        module.load_state_dict(cut, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            cut = {
                index: {name: _cut_like(parameters[index], value) for name, value in each.items()}
                for index, each in state["state"].items()
            }
            optimizer.load_state_dict({**state, "state": cut})


def _cut_like(parameter: Tensor | nn.Parameter, value: Tensor) -> Tensor:
    """Cut this process's part out of `value`, in the way that `parameter` is cut."""
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value  # a step count
    value = value.to(parameter.device)
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(value, mesh, placements, src_data_rank=None)


StrategyRegistry.register(FSDP2, ShardedStrategy, description=ShardedStrategy.__doc__)
# Gradients lie in the buckets that are exchanged; the buffers of our models are constants.
StrategyRegistry.register(
    "ddp", DDPStrategy, override=True, start_method="popen", gradient_as_bucket_view=True,
    broadcast_buffers=False,
)


def require_supported(strategy: Any) -> None:
    """Raise UsageError for a strategy with checkpoints of another format, or without DeepSpeed."""
    if not isinstance(strategy, str):
        return
    if strategy not in STRATEGIES and not strategy.startswith("ddp_"):
        raise UsageError(
            f"trainer.strategy {strategy} is not supported: use one of {', '.join(STRATEGIES)}"
        )
    if strategy in STAGES and find_spec("deepspeed") is None:
        raise UsageError(
            f"trainer.strategy {strategy} needs DeepSpeed: DS_BUILD_OPS=0 pip install -e "
            "'.[deepspeed]', or use fsdp2, which shares as much"
        )
