"""Hold the frozen target of a distillation, whole on each device or shared among them."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from stree.common.errors import UsageError
from stree.models.hidden_states import HiddenStateTap
from stree.models.in_8_bits import put_in_8_bits
from stree.models.layers.part import require_products_in_8_bits
from stree.models.model import HybridModel
from stree_pipelines.training.parallel.sharding import shard

Placement = Literal["replicated", "sharded"]
TargetDtype = Literal["float32", "bfloat16", "float8"]


def held_dtype(dtype: TargetDtype) -> torch.dtype:
    """Return the dtype in which the target's projections are held."""
    return torch.float8_e4m3fn if dtype == "float8" else getattr(torch, dtype)


def loaded_dtype(dtype: TargetDtype) -> torch.dtype:
    """Return the dtype in which a target is loaded (bf16 for float8, which is rounded later)."""
    return torch.float32 if dtype == "float32" else torch.bfloat16


class FrozenTarget:
    """Target that is not trained.

    No nn.Module, so that it stays out of checkpoints, the optimiser, DDP's buckets and .train().
    """

    def __init__(
        self, model: HybridModel, placement: Placement, dtype: TargetDtype = "float32"
    ) -> None:
        """Freeze `model`; dtype "float8" rounds its bf16 weights in place."""
        if dtype == "float8" and placement == "sharded":
            raise UsageError(
                "model.target_dtype float8 does not go with model.target_placement sharded: take "
                "bfloat16, or replicated"
            )
        self.model = model.eval().requires_grad_(False)
        self.placement = placement
        self.in_float8 = dtype == "float8"
        if self.in_float8:
            put_in_8_bits(self.model, head=False, rounds_inputs=True)

    def place(self, device: torch.device, num_ranks: int) -> None:
        """Move the target to this process's device, or its part where `num_ranks` share it."""
        if self.in_float8:
            require_products_in_8_bits(device, "take model.target_dtype bfloat16")
        if self.placement == "sharded" and num_ranks > 1:
            shard(self.model, init_device_mesh(device.type, (num_ranks,)))
        else:
            self.model.to(device)

    @torch.no_grad()
    def hidden_states(
        self, tokens: Tensor, segment_ids: Tensor, features: HiddenStateTap | None = None,
        bounds: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states (B, T, D) of tokens and segment ids (B, T) int64.

        `features` taps the layers that the drafter reads; `bounds` as in
        `HybridModel.hidden_states`.
        """
        return self.model.hidden_states(tokens, segment_ids, features=features, bounds=bounds)
