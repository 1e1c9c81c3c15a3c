"""The root-mean-square norm of layers and of hidden states."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stree_kernels import ops
from stree_kernels.contracts import Stream


class RMSNorm(nn.Module):
    """Root-mean-square norm of x (…, width) over groups of channels, in fp32 or wider.

    With a gate (…, width), x·silu(gate) is normed. A bias is added to the norm where `forward` or
    `add_bias` computes it; a `Stream` alone has none.
    """

    def __init__(self, width: int, eps: float, groups: int = 1, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None
        self.eps = eps
        self.groups = groups

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        y = ops.rms_norm(x, self.weight, self.eps, self.groups, gate)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def add_bias(self, stream: Stream) -> None:
        """Add the bias, if there is one, to the norm of a stream that is read after this."""
        if self.bias is not None:
            stream.normed = ops.norm(stream) + self.bias.to(stream.source.dtype)
