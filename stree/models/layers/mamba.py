"""Mamba-2's mixer: over sequences, on from a state, over trees.

project → conv → scan → gate, norm, out; the three ways to run it (`forward`, `extend`, `tree`)
differ in the two ops in the middle.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stree.models.config import HybridConfig
from stree.models.layer_caches import MambaCache
from stree.models.layers.norm import RMSNorm
from stree.models.layers.packed_linear import lay_channels_together
from stree.models.layers.part import Mixer, Nodes, PrefillPass, TrainingPass, put
from stree.models.multi_step import MultiStepPass, Scanned, convolved, scanned_ahead
from stree_kernels import naive, ops
from stree_kernels.contracts import Gated, MixerWeights
from stree_kernels.mamba.chunk_scan import chunk_scan


class Mamba2(Mixer):
    """Mamba-2's mixer with its own number of groups for x, B and C."""

    cache_class = MambaCache

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.chunk_size = config.chunk_size
        self.shape = config.mixer_shape
        heads = config.num_ssm_heads
        self.in_proj = nn.Linear(config.d_model, config.in_proj_dim, bias=config.mamba_in_bias)
        self.conv1d = nn.Conv1d(
            config.conv_dim, config.conv_dim, config.d_conv,
            groups=config.conv_dim, bias=config.conv_bias,
        )
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.ones(heads))
        self.gated_norm = config.gated_norm
        self.gates_after = self.gated_norm != "gate"  # else the scan gates: see `MixerShape`
        if self.gates_after:
            self.norm = RMSNorm(config.d_inner, config.gated_norm_eps, config.gated_norm_groups)
        self.out_proj = nn.Linear(config.d_inner, config.d_model, bias=config.mamba_out_bias)

    def products(self) -> list[tuple[nn.Linear, ...]]:
        return [(self.in_proj,), (self.out_proj,)]

    def pack_own(self) -> None:
        lay_channels_together(self.conv1d)

    @property
    def A(self) -> Tensor:
        """Decay rates A (H,), negative, in fp32 or wider."""
        return -self.A_log.to(naive.accumulation_dtype(self.A_log.dtype)).exp()

    @property
    def weights(self) -> MixerWeights:
        """Weights that conv and scan read."""
        return MixerWeights(
            self.conv1d.weight[:, 0], self.conv1d.bias, self.dt_bias, self.A_log, self.D
        )

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return z (…, H·P), raw conv inputs (…, C) and dt (…, H) after softplus."""
        shape = self.shape
        z, inputs, dt = self.in_proj(x).split(
            [shape.d_inner, shape.num_channels, shape.num_heads], dim=-1
        )
        return z, inputs, naive.positive_dt(dt, self.weights, shape)

    def _convolve(
        self, inputs: Tensor, segment_ids: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return x (…, Gx, P), B (…, Gb, S) and C (…, Gc, S) of raw conv inputs (…, C)."""
        weights = self.weights
        inputs = naive.conv_channels(inputs, self.shape)
        y = ops.segment_conv(inputs, weights.conv, weights.conv_bias, segment_ids, True)
        return naive.split_channels(y, self.shape)

    def _gate(self, y: Tensor, z: Tensor) -> Tensor:
        if self.gated_norm == "gate":
            return naive.gated(y, z)
        return self.norm(y, gate=z) if self._gates_first else naive.gated(self.norm(y), z)

    @property
    def _gates_first(self) -> bool:
        return self.gated_norm == "gate, norm"

    def _finish(self, y: Tensor, z: Tensor) -> Tensor:
        return self.out_proj(self._gate(y.flatten(-2), z))

    def forward(self, x: Tensor, context: TrainingPass) -> Tensor:
        z, inputs, dt = self._project(x)
        values, B, C = self._convolve(inputs, context.segment_ids)
        y, _ = chunk_scan(
            values, dt, self.A, B, C, self.D,
            chunk_size=self.chunk_size, segment_ids=context.segment_ids,
        )
        return self._finish(y, z)

    def ahead(self, x: Tensor, cache_index: int, context: MultiStepPass) -> Tensor:
        """Run one of the passes of `stree.models.multi_step`."""
        z, inputs, dt = self._project(x)
        inputs = naive.conv_channels(inputs, self.shape)
        passes = context.scanned.get(cache_index, [])
        weights = self.weights
        y = convolved(
            weights.conv, weights.conv_bias, [*(each.inputs for each in passes), inputs],
            context.segment_ids,
        )
        values, B, C = naive.split_channels(F.silu(y), self.shape)
        passes = [*passes, Scanned(inputs, values, dt, B)]
        context.scanned[cache_index] = passes
        y = scanned_ahead(passes, self.A, C, self.D, self.chunk_size, context.segment_ids)
        return self._finish(y, z)

    def extend(self, x: Tensor, cache: MambaCache, context: PrefillPass) -> Tensor:
        z, inputs, dt = self._project(x)
        seen = torch.cat([cache.conv_state, inputs], dim=1)
        values, B, C = (part[:, self.shape.tail :] for part in self._convolve(seen, None))
        y = context.scan(self, values, dt, B, C, cache.state)
        cache.conv_state = context.last_inputs(seen, self.shape.tail)
        return self._finish(y, z)

    def mix(
        self, advanced: Tensor, cache: MambaCache, nodes: Nodes, out: Tensor | None
    ) -> Tensor:
        return ops.mamba_tree(
            advanced, cache.history, cache.derived, cache.state, self.weights, self.shape,
            nodes.topology, nodes.cache_state, nodes.num_read, out,
        )

    def gate(self, y: Tensor, projected: Tensor, out: Tensor | None) -> Tensor | Gated:
        z, norm = projected[..., : self.shape.d_inner], self.norm
        if self._gates_first:
            gated = Gated(y, z, norm.weight, norm.eps, norm.groups)
            return gated if out is None else put(gated.norm_by(ops.gated_rms_norm), out)
        return put(ops.gated(norm(y), z), out)
