"""The gated delta rule as a mixer: over sequences, on from a state, over trees.

Shapes: B batch, T tokens, D model width, G key heads, H value heads, K and V their head dims,
C conv channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stree.models.config import HybridConfig
from stree.models.layer_caches import GatedDeltaCache
from stree.models.layers.norm import RMSNorm
from stree.models.layers.packed_linear import lay_channels_together
from stree.models.layers.part import Mixer, Nodes, PrefillPass, TrainingPass, put
from stree_kernels import naive, ops
from stree_kernels.contracts import GatedDeltaWeights
from stree_kernels.gated_delta.scan import gated_delta_scan


class GatedDeltaNet(Mixer):
    """Gated delta mixer: q, k, v → conv, SiLU → delta rule → norm of heads, silu(z) → out."""

    cache_class = GatedDeltaCache
    gates_after = True

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.chunk_size = config.chunk_size
        self.shape = shape = config.gated_delta_shape
        d_model, heads, channels = config.d_model, shape.num_heads, shape.num_channels
        self.in_proj_z = nn.Linear(d_model, shape.d_inner, bias=False)
        self.in_proj_qkv = nn.Linear(d_model, channels, bias=False)
        self.in_proj_a = nn.Linear(d_model, heads, bias=False)
        self.in_proj_b = nn.Linear(d_model, heads, bias=False)
        self.conv1d = nn.Conv1d(
            channels, channels, shape.width, groups=channels, bias=config.conv_bias
        )
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.norm = RMSNorm(shape.value_dim, config.gated_norm_eps)
        self.out_proj = nn.Linear(shape.d_inner, d_model, bias=False)

    def products(self) -> list[tuple[nn.Linear, ...]]:
        return [
            (self.in_proj_z, self.in_proj_qkv, self.in_proj_a, self.in_proj_b), (self.out_proj,)
        ]

    def pack_own(self) -> None:
        lay_channels_together(self.conv1d)

    @property
    def weights(self) -> GatedDeltaWeights:
        """Weights that conv and delta rule read."""
        return GatedDeltaWeights(
            self.conv1d.weight[:, 0], self.conv1d.bias, self.dt_bias, self.A_log
        )

    def forward(self, x: Tensor, context: TrainingPass) -> Tensor:
        inputs = self.in_proj_qkv(x)
        q, k, v = self._convolve(inputs, context.segment_ids)
        y, _ = gated_delta_scan(
            q, k, v, *self._decay_and_strength(x),
            chunk_size=self.chunk_size, segment_ids=context.segment_ids, bounds=context.bounds,
        )
        return self._finish(y, x)

    def extend(self, x: Tensor, cache: GatedDeltaCache, context: PrefillPass) -> Tensor:
        seen = torch.cat([cache.conv_state, self.in_proj_qkv(x)], dim=1)
        q, k, v = (part[:, self.shape.tail :] for part in self._convolve(seen, None))
        y, state = gated_delta_scan(
            q, k, v, *self._decay_and_strength(x),
            chunk_size=self.chunk_size, initial_state=cache.state,
        )
        cache.state.copy_(state)
        cache.conv_state = seen[:, seen.shape[1] - self.shape.tail :]
        return self._finish(y, x)

    def mix(
        self, advanced: Tensor, cache: GatedDeltaCache, nodes: Nodes, out: Tensor | None
    ) -> Tensor:
        return ops.gated_delta_tree(
            advanced, cache.history, cache.derived, cache.updates, cache.state, self.weights,
            self.shape, nodes.topology, nodes.cache_state, nodes.num_read,
        )

    def gate(self, y: Tensor, projected: Tensor, out: Tensor | None) -> Tensor:
        z = projected[..., : self.shape.d_inner]
        return put(ops.gate_normed(y, z, self.norm.weight, self.norm.eps), out)

    def _convolve(
        self, inputs: Tensor, segment_ids: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q and k (B, T, G, K) and v (B, T, H, V) of raw conv inputs (B, T, C)."""
        weights = self.weights
        y = ops.segment_conv(inputs, weights.conv, weights.conv_bias, segment_ids, True)
        return naive.split_heads(y, self.shape)

    def _decay_and_strength(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log decay g and the strength β, (B, T, H) each."""
        log_decay = naive.log_decays(self.in_proj_a(x), self.weights)
        return log_decay, naive.strengths(self.in_proj_b(x), self.shape)

    def _finish(self, y: Tensor, x: Tensor) -> Tensor:
        y = naive.gate_normed(y.flatten(-2), self.in_proj_z(x), self.norm.weight, self.norm.eps)
        return self.out_proj(y)
