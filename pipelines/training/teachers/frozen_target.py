"""Hold the frozen target of a distillation, on whichever devices have room for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from stree.common.errors import UsageError
from stree.models.hidden_states import HiddenStateTap
from stree.models.model import HybridModel
from stree_pipelines.training.parallel.float8 import FLOAT8, require_float8, round_products
from stree_pipelines.training.parallel.sharding import shard

Placement = Literal["replicated", "sharded", "beside"]
TargetDtype = Literal["float32", "bfloat16", "float8"]


def held_dtype(dtype: TargetDtype) -> torch.dtype:
    """Return the dtype in which the target's projections are held."""
    return FLOAT8 if dtype == "float8" else getattr(torch, dtype)


def loaded_dtype(dtype: TargetDtype) -> torch.dtype:
    """Return the dtype in which a target is loaded (bf16 for float8, which is rounded later)."""
    return torch.float32 if dtype == "float32" else torch.bfloat16


def require_placeable(dtype: TargetDtype, placement: Placement) -> None:
    """Raise UsageError where a target of that dtype cannot lie there."""
    if dtype == "float8" and placement == "sharded":
        raise UsageError(
            "model.target_dtype float8 does not go with model.target_placement sharded: take "
            "bfloat16, or replicated"
        )


@dataclass(frozen=True)
class TargetInputs:
    """Inputs of a batch on the target's own device.

    Not tensors of the batch itself: DDP would move them to the drafter's device.
    """

    tokens: Tensor
    segment_ids: Tensor


class FrozenTarget:
    """Target whose outputs come to the drafter's device, from wherever its weights are."""

    def __init__(
        self, model: HybridModel, placement: Placement, dtype: TargetDtype = "float32"
    ) -> None:
        """Freeze `model`; dtype "float8" rounds its bf16 weights in place."""
        self.model = model.eval().requires_grad_(False)
        self.placement = placement
        self.in_float8 = dtype == "float8"
        require_placeable(dtype, placement)
        if self.in_float8:
            round_products(self.model)
        self._head: Tensor | None = None  # where the losses are, when the target is not

    def place(self, device: torch.device, device_ids: Sequence[int], num_ranks: int) -> None:
        """Move the target to its device or devices.

        Args:
            device: the drafter's device, in this process.
            device_ids: ids of the devices of all processes of this host.
            num_ranks: number of processes on all hosts.
        """
        if self.in_float8:
            require_float8(device)
        if self.placement == "sharded" and num_ranks > 1:
            shard(self.model, init_device_mesh(device.type, (num_ranks,)))
        elif self.placement == "beside":
            self.model.to(device_beside(device, device_ids))
            self._head = self.model.head_weight.to(device)
        else:
            self.model.to(device)

    def inputs_of(self, batch: dict[str, Any]) -> TargetInputs | None:
        """Copy the host's batch to the target's device; None when that is the drafter's.

        A copy from the drafter's device would wait for the step that runs there.
        """
        if self._head is None:
            return None
        tensors = (batch[name] for name in ("tokens", "segment_ids"))
        return TargetInputs(*(each.to(self.model.device, non_blocking=True) for each in tensors))

    @torch.no_grad()
    def hidden_states(
        self, inputs: TargetInputs, device: torch.device, features: HiddenStateTap | None = None
    ) -> Tensor:
        """Return hidden states (B, T, D) on `device`; `features` taps the layers that the drafter
        reads."""
        hidden = self.model.hidden_states(inputs.tokens, inputs.segment_ids, features=features)
        return hidden.to(device)

    @property
    def head_weight(self) -> Tensor:
        """The head's weight (V, D), on the drafter's device."""
        return self.model.head_weight if self._head is None else self._head


def device_beside(device: torch.device, device_ids: Sequence[int]) -> torch.device:
    """Choose a GPU for the target of the process on `device`: one that no process of the host uses.

    device_ids: the GPUs of the host's processes. A CPU is its own. Raises UsageError with too few
    GPUs.
    """
    if device.type != "cuda":
        return device
    there = torch.cuda.device_count()
    free = [each for each in range(there) if each not in device_ids]
    if len(free) < len(device_ids):
        raise UsageError(
            f"model.target_placement beside needs a second GPU for each of {len(device_ids)} "
            f"processes, and each process to see all of its host's: {there} are seen; lower "
            "trainer.devices, or use sharded"
        )
    return torch.device("cuda", free[list(device_ids).index(device.index or 0)])
