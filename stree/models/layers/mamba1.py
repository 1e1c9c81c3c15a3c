"""Mamba-1's mixer: over sequences, on from a state, over trees.

[x, z] → conv, SiLU over x → products for dt, B and C → selective scan → gate by SiLU, out. A decay
belongs to a channel and a number of its state, so the scan has no form of matrix products
(`stree_kernels.naive.mamba1`).

For the replay a layer keeps of each node its conv input, dt and B, not x after the conv, which the
replay computes again: 2·E + S numbers of the model's dtype. In bf16 with S = 16 that is 6.3 % of
the node's state in fp32.

Shapes: B batch, T tokens, Q nodes, D model width, E channels, S state, R rank of dt.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stree.models.config import HybridConfig
from stree.models.layer_caches import Mamba1Cache
from stree.models.layers.packed_linear import lay_channels_together, lay_for_products
from stree.models.layers.part import Mixer, Nodes, PrefillPass, TrainingPass
from stree_kernels import naive, ops
from stree_kernels.contracts import Mamba1Weights
from stree_kernels.mamba.chunk_scan import uncompiled


class Mamba1(Mixer):
    """Mamba-1's mixer, or FalconMamba's and Jamba's, which norm dt, B and C."""

    cache_class = Mamba1Cache

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.shape = shape = config.mamba1_shape
        d_model, channels = config.d_model, shape.d_inner
        self.in_proj = nn.Linear(d_model, 2 * channels, bias=config.mamba_in_bias)
        self.conv1d = nn.Conv1d(
            channels, channels, shape.width, groups=channels, bias=config.conv_bias
        )
        self.x_proj = nn.Linear(channels, sum(shape.selected_dims), bias=False)
        self.dt_proj = nn.Linear(shape.dt_rank, channels)
        self.A_log = nn.Parameter(torch.empty(channels, shape.d_state))
        self.D = nn.Parameter(torch.ones(channels))
        # dt's scale is a part of dt_proj, and B's of this one: y is linear in each product B·C
        self.c_scale = nn.Parameter(torch.ones(shape.d_state)) if config.selection_scaled else None
        self.out_proj = nn.Linear(channels, d_model, bias=config.mamba_out_bias)

    def products(self) -> list[tuple[nn.Linear, ...]]:
        return [(self.in_proj,), (self.out_proj,)]

    def inner_products(self) -> list[nn.Linear]:
        return [self.x_proj, self.dt_proj]

    def pack_own(self) -> None:
        lay_channels_together(self.conv1d)
        for inner in self.inner_products():
            lay_for_products(inner.weight)

    @property
    def weights(self) -> Mamba1Weights:
        """Weights that conv and scan read."""
        return Mamba1Weights(
            self.conv1d.weight[:, 0], self.conv1d.bias, self.dt_proj.bias, self.A_log, self.D,
            self.c_scale,
        )

    def _select(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return dt (B, T, E) after softplus, B and C (B, T, S) of the conv's output."""
        low, B, C = self.x_proj(x).split(self.shape.selected_dims, dim=-1)
        if (eps := self.shape.norm_eps) is not None:
            low, B, C = (
                (part / naive.root_mean_square(part, eps)).to(part.dtype) for part in (low, B, C)
            )
        if self.c_scale is not None:
            C = C * self.c_scale
        dt = torch.nn.functional.linear(low, self.dt_proj.weight)
        return naive.mamba1_dt(dt, self.weights), B, C

    def _convolve(self, inputs: Tensor, segment_ids: Tensor | None) -> Tensor:
        weights = self.weights
        return ops.segment_conv(inputs, weights.conv, weights.conv_bias, segment_ids, True)

    def _scan(self, x: Tensor, z: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """Return the output (B, T, D) and the last state for the conv's output x (B, T, E)."""
        dt, B, C = self._select(x)
        A = -self.A_log.to(naive.accumulation_dtype(self.A_log.dtype)).exp()
        y, state = _selective_scan(x, dt, A, B, C, **options)
        return self.out_proj(naive.gated((y + self.D * x).to(y.dtype), z)), state

    def forward(self, x: Tensor, context: TrainingPass) -> Tensor:
        inputs, z = self.in_proj(x).chunk(2, dim=-1)
        x = self._convolve(inputs, context.segment_ids)
        return self._scan(x, z, segment_ids=context.segment_ids)[0]

    def extend(self, x: Tensor, cache: Mamba1Cache, context: PrefillPass) -> Tensor:
        inputs, z = self.in_proj(x).chunk(2, dim=-1)
        seen = torch.cat([cache.conv_state, inputs], dim=1)
        x = self._convolve(seen, None)[:, self.shape.tail :]
        y, state = self._scan(x, z, initial_state=cache.state)
        cache.state.copy_(state)
        cache.conv_state.copy_(seen[:, -self.shape.tail :])
        return y

    def advance(self, projected: Tensor, cache: Mamba1Cache, nodes: Nodes) -> tuple[Tensor, Tensor]:
        """Return the conv's output x and the gate, (B, Q, E) each."""
        inputs, gate = projected.chunk(2, dim=-1)
        x = ops.mamba1_advance(
            inputs, cache.held, self.weights, self.shape,
            nodes.topology, nodes.cache_state, nodes.num_read,
        )
        return x, gate

    def mix(
        self, advanced: tuple[Tensor, Tensor], cache: Mamba1Cache, nodes: Nodes, out: Tensor | None
    ) -> Tensor:
        x, gate = advanced
        selected = ops.linear(x, self.x_proj.weight)
        dt = ops.linear(selected[..., : self.shape.dt_rank], self.dt_proj.weight)
        return ops.mamba1_scan(
            x, selected, dt, gate, cache.held, self.weights, self.shape,
            nodes.topology, nodes.cache_state, nodes.num_read, out,
        )


@uncompiled  # The compiler would unroll the tokens.
def _selective_scan(*given: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return ops.selective_scan(*given, **options)
