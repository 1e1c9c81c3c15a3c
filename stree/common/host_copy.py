"""Copies of a device's values to the host, which may do other work until they are there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """Values for the host, copied when they are asked for."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def tolist(self) -> list[Any]:
        return self.values.tolist()


class AsyncHostCopy(HostCopy):
    """Values that a GPU copies to the host after all work that was started before."""

    def __init__(self, values: Tensor) -> None:
        pinned = torch.zeros(values.shape, dtype=values.dtype, pin_memory=True)
        super().__init__(pinned.copy_(values, non_blocking=True))
        self.event = torch.cuda.Event()
        self.event.record()

    def tolist(self) -> list[Any]:
        self.event.synchronize()
        return super().tolist()
