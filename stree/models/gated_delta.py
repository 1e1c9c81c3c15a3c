"""The gated delta rule as a layer's mixer, as Qwen3-Next and Qwen3.5 have it, and its cache.

Shapes: B batch, T tokens, N tree nodes, D model width, G key heads, H value heads, K and V their
head dims, C conv channels, W conv width. Parameters carry Qwen3.5's names; Qwen3-Next's two
projections are the same rows, interleaved by key head (`split_by_key_head`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stree.models.hybrid import (
    Context,
    RMSNorm,
    TreeCall,
    lay_channels_together,
    project_together,
)
from stree_kernels import naive, naive_gated_delta, ops
from stree_kernels.gated_delta_scan import gated_delta_scan
from stree_kernels.shapes import Derived, GatedDeltaShape, GatedDeltaWeights, Steering


@dataclass
class GatedDeltaCache:
    """A state (B, H, K, V), and of the last tree raw conv inputs and a, behind those of the
    committed tail, twice, and the updates.

    A call writes the new tree into the half that does not hold the last one (`Steering.parity`).
    """

    state: Tensor
    rows: Tensor  # (2, B, W − 1 + N, C + H)
    updates: Tensor  # (B, N, H, V)
    derived: Derived | None  # for the fused kernels
    shape: GatedDeltaShape
    parity: Tensor  # (1,), shared by all layers

    @classmethod
    def empty(
        cls,
        shape: GatedDeltaShape,
        batch: int,
        max_nodes: int,
        parity: Tensor,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        fused: bool,
    ) -> GatedDeltaCache:
        """For sequences that have not begun. State and updates are fp32, or fp64 with fp64."""
        wide = naive.accumulation_dtype(dtype)

        def zeros(*dims: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(dims, device=device, dtype=dtype)

        heads = shape.num_heads
        derived = None
        if fused:
            queries_and_keys = shape.conv_dims[0] + shape.conv_dims[1]
            derived = Derived(
                zeros(2, batch, max_nodes, queries_and_keys),
                zeros(2, batch, 2, max_nodes, heads, dtype=torch.float32),
            )
        return cls(
            zeros(batch, heads, shape.key_dim, shape.value_dim, dtype=wide),
            zeros(2, batch, shape.tail + max_nodes, shape.num_kept),
            zeros(batch, max_nodes, heads, shape.value_dim, dtype=wide),
            derived, shape, parity,
        )  # fmt: skip

    def narrow(self, first: int, count: int) -> GatedDeltaCache:
        """The same buffers, of some of the sequences only."""
        derived = self.derived
        if derived is not None:
            xb, steps = (each.narrow(1, first, count) for each in (derived.xb, derived.steps))
            derived = Derived(xb, steps)
        state, updates = (each.narrow(0, first, count) for each in (self.state, self.updates))
        rows = self.rows.narrow(1, first, count)
        return GatedDeltaCache(state, rows, updates, derived, self.shape, self.parity)

    @property
    def tail(self) -> Tensor:
        """The last committed conv inputs, (B, W − 1, C)."""
        current = self.rows.index_select(0, self.parity)[0]
        return current[:, : self.shape.tail, : self.shape.num_channels]

    @tail.setter
    def tail(self, tail: Tensor) -> None:
        self.rows[self.parity, :, : self.shape.tail, : self.shape.num_channels] = tail[None]

    def settle(self, weights: GatedDeltaWeights, steering: Steering) -> None:
        """Advance state and tail along the accepted path."""
        tail = naive_gated_delta.gated_delta_replay(
            self.rows, self.updates, self.state, weights, self.shape, steering
        )
        self.tail = tail[..., : self.shape.num_channels]

    def clear(self) -> None:
        """Forget everything, so that the buffers serve another sequence."""
        self.state.zero_()
        self.rows[:, :, : self.shape.tail].zero_()


class GatedDeltaNet(nn.Module):
    """q, k, v → conv, SiLU → gated delta rule → norm of each head, then silu(z) → out."""

    def __init__(
        self,
        d_model: int,
        shape: GatedDeltaShape,
        eps: float,
        *,
        conv_bias: bool = False,
        chunk_size: int = 64,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.chunk_size = chunk_size
        heads, channels = shape.num_heads, shape.num_channels
        self.in_proj_z = nn.Linear(d_model, shape.d_inner, bias=False)
        self.in_proj_qkv = nn.Linear(d_model, channels, bias=False)
        self.in_proj_a = nn.Linear(d_model, heads, bias=False)
        self.in_proj_b = nn.Linear(d_model, heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, shape.width, groups=channels, bias=conv_bias)
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.norm = RMSNorm(shape.value_dim, eps)
        self.out_proj = nn.Linear(shape.d_inner, d_model, bias=False)

    @property
    def weights(self) -> GatedDeltaWeights:
        """What conv and rule read."""
        return GatedDeltaWeights(
            self.conv1d.weight[:, 0], self.conv1d.bias, self.dt_bias, self.A_log
        )

    def forward(self, x: Tensor, context: Context) -> Tensor:
        inputs = self.in_proj_qkv(x)
        q, k, v = self._convolve(inputs, context.segment_ids)
        y, _ = gated_delta_scan(
            q, k, v, *self._decay_and_strength(x),
            chunk_size=self.chunk_size, segment_ids=context.segment_ids,
        )  # fmt: skip
        return self._finish(y, x)

    def extend(self, x: Tensor, cache: GatedDeltaCache, context: Context) -> Tensor:
        seen = torch.cat([cache.tail, self.in_proj_qkv(x)], dim=1)
        q, k, v = (part[:, self.shape.tail :] for part in self._convolve(seen, None))
        y, state = gated_delta_scan(
            q, k, v, *self._decay_and_strength(x),
            chunk_size=self.chunk_size, initial_state=cache.state,
        )  # fmt: skip
        cache.state.copy_(state)
        cache.tail = seen[:, seen.shape[1] - self.shape.tail :]
        return self._finish(y, x)

    def tree(self, x: Tensor, cache: GatedDeltaCache, call: TreeCall) -> Tensor:
        if cache.derived is not None:
            lay_channels_together(self.conv1d.weight)
        projections = (self.in_proj_z, self.in_proj_qkv, self.in_proj_a, self.in_proj_b)
        projected = project_together(x, projections)
        y = ops.gated_delta_tree(
            projected, cache.rows, cache.derived, cache.updates, cache.state, self.weights,
            self.shape, call.topology, call.steering, call.first,
        )  # fmt: skip
        z = projected[..., : self.shape.d_inner]
        y = ops.gate_normed(y, z, self.norm.weight, self.norm.eps)
        return ops.linear_parts(y, self.out_proj.weight)

    def _convolve(
        self, inputs: Tensor, segment_ids: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q and k (B, T, G, K) and v (B, T, H, V) of raw conv inputs (B, T, C)."""
        weights = self.weights
        y = naive.segment_conv(inputs, weights.conv, weights.conv_bias, segment_ids)
        return naive_gated_delta.split_heads(F.silu(y), self.shape)

    def _decay_and_strength(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """g and β, (B, T, H)."""
        log_decay = naive_gated_delta.log_decays(self.in_proj_a(x), self.weights)
        return log_decay, self.in_proj_b(x).to(log_decay.dtype).sigmoid()

    def _finish(self, y: Tensor, x: Tensor) -> Tensor:
        y = naive.gate_normed(y.flatten(-2), self.in_proj_z(x), self.norm.weight, self.norm.eps)
        return self.out_proj(y)


def split_by_key_head(qkvz: Tensor, ba: Tensor, shape: GatedDeltaShape) -> dict[str, Tensor]:
    """Qwen3-Next's `in_proj_qkvz` and `in_proj_ba` as this mixer's four weights, by their names.

    There the rows of q, k, v and z, and of b and a, lie side by side for each key head.
    """
    heads_a_key = shape.num_heads // shape.num_key_heads
    values = heads_a_key * shape.value_dim
    q, k, v, z = qkvz.unflatten(0, (shape.num_key_heads, -1)).split(
        [shape.key_dim, shape.key_dim, values, values], dim=1
    )
    b, a = ba.unflatten(0, (shape.num_key_heads, -1)).split(heads_a_key, dim=1)
    q, k, v, z, a, b = (part.flatten(0, 1) for part in (q, k, v, z, a, b))
    return {
        "in_proj_z.weight": z, "in_proj_qkv.weight": torch.cat([q, k, v]),
        "in_proj_a.weight": a, "in_proj_b.weight": b,
    }  # fmt: skip
