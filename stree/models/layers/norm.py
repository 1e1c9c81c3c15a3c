"""The root-mean-square norm of layers and of hidden states."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stree_kernels import ops


class RMSNorm(nn.Module):
    """Root-mean-square norm of x (…, width) over groups of channels, in fp32 or wider.

    With a gate (…, width), x·silu(gate) is normed.
    """

    def __init__(self, width: int, eps: float, groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps
        self.groups = groups

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps, self.groups, gate)
