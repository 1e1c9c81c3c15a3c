"""Grouped-query attention with rotary positions: over sequences, over a cache, over trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stree.models.config import HybridConfig
from stree.models.layer_caches import AttentionCache
from stree.models.layers.norm import RMSNorm
from stree.models.layers.part import Mixer, Nodes, PrefillPass, TrainingPass, TreePass, put
from stree.models.multi_step import MultiStepPass, attended_ahead
from stree_kernels import naive, ops
from stree_kernels.contracts import Stream

Adapters = Sequence[nn.Module] | None  # terms added to q, k and v


class Attention(Mixer):
    """Attention of `num_heads` heads to `num_kv_heads` keys and values, as in Llama.

    d_input is the width of its input, d_model unless given; its output is d_model wide.
    """

    cache_class = AttentionCache

    def __init__(self, config: HybridConfig, d_input: int | None = None) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.scale = config.attention_scale
        self.window = config.sliding_window
        width, kv_width = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        self.width = width + 2 * kv_width  # of q, k and v side by side
        d_input, bias = d_input or config.d_model, config.attention_bias or config.qkv_bias
        self.q_proj = nn.Linear(d_input, width, bias=bias)
        self.k_proj = nn.Linear(d_input, kv_width, bias=bias)
        self.v_proj = nn.Linear(d_input, kv_width, bias=bias)
        self.o_proj = nn.Linear(width, config.d_model, bias=config.attention_bias)
        self.gated = config.attention_gate
        if self.gated:
            self.gate_proj = nn.Linear(d_input, width, bias=bias)
        self.normed = config.qk_norm
        self.normed_whole = config.qk_norm and config.qk_norm_whole
        if self.normed:
            normed = (width, kv_width) if config.qk_norm_whole else (self.head_dim,) * 2
            self.q_norm, self.k_norm = (RMSNorm(each, config.rms_norm_eps) for each in normed)

    def products(self) -> list[tuple[nn.Linear, ...]]:
        read = (self.q_proj, self.k_proj, self.v_proj)
        return [(*read, self.gate_proj) if self.gated else read, (self.o_proj,)]

    def _project(
        self, x: Tensor, context: TrainingPass, adapters: Adapters
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (B, T, H, P), k and v (B, Hkv, T, P), with q and k rotated."""
        projected = [proj(x) for proj in (self.q_proj, self.k_proj, self.v_proj)]
        if adapters is not None:
            projected = [y + own(x) for y, own in zip(projected, adapters, strict=True)]
        if self.normed_whole:
            projected[:2] = self.q_norm(projected[0]), self.k_norm(projected[1])
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)) for each in projected)
        if self.normed and not self.normed_whole:
            q, k = self.q_norm(q), self.k_norm(k)
        assert context.rotary is not None
        q, k = (naive.rotate(part, *context.rotary) for part in (q, k))
        return q, k.transpose(1, 2), v.transpose(1, 2)

    def forward(self, x: Tensor, context: TrainingPass, adapters: Adapters = None) -> Tensor:
        q, k, v = self._project(x, context, adapters)
        return self._finish(self._attend(q, k, v, context), x)

    def ahead(self, x: Tensor, cache_index: int, context: MultiStepPass) -> Tensor:
        """Run one of the passes of `stree.models.multi_step`."""
        q, k, v = self._project(x, context, None)
        passes = [*context.scanned.get(cache_index, []), (k.transpose(1, 2), v.transpose(1, 2))]
        context.scanned[cache_index] = passes
        return self._finish(attended_ahead(q, passes, self.scale, context.segment_ids), x)

    def extend(
        self, x: Tensor, cache: AttentionCache, context: PrefillPass, adapters: Adapters = None
    ) -> Tensor:
        q, k, v = self._project(x, context, adapters)
        bound = context.start + x.shape[1]
        cache.keys[:, :, context.start : bound] = k
        cache.values[:, :, context.start : bound] = v
        y = self._attend(q, cache.keys[:, :, :bound], cache.values[:, :, :bound], context)
        return self._finish(y, x)

    def tree(
        self, x: Stream, cache: AttentionCache, call: TreePass, adapters: Adapters = None
    ) -> Tensor:
        read, last = self.packed
        projected = read.linear(x)
        if adapters is not None:
            projected = projected + torch.cat([own(ops.norm(x)) for own in adapters], dim=-1)
        return last.parts(self.between(projected, cache, call))

    def between(
        self, projected: Tensor, cache: AttentionCache, call: TreePass, out: Tensor | None = None
    ) -> Tensor:
        qkv = projected
        if self.gated:
            qkv, gate = projected.split([self.width, projected.shape[-1] - self.width], dim=-1)
        if self.normed:
            qkv = self._norm(qkv, cache.keys.shape[1])
        if not self.gated:
            return call.over_nodes(self, qkv, cache, out)
        return put(ops.sigmoid_gated(call.over_nodes(self, qkv, cache), gate), out)

    def mix(
        self, advanced: Tensor, cache: AttentionCache, nodes: Nodes, out: Tensor | None
    ) -> Tensor:
        state = nodes.cache_state
        if self.normed and state.ready == "all":  # the norm is the previous launch
            state = replace(state, ready="memory")
        return ops.attend_tree(
            advanced, cache.keys, cache.values, cache.rotary,
            nodes.topology, state, nodes.num_read, nodes.bound, self.scale, out, self.window,
        )

    def _norm(self, qkv: Tensor, num_k: int) -> Tensor:
        """Norm q and k (B, Q, …) of heads side by side, with `num_k` heads of keys."""
        scales, eps = (self.q_norm.weight, self.k_norm.weight), self.q_norm.eps
        if not self.normed_whole:
            return ops.norm_heads(qkv, *scales, eps, num_k)
        if len(scales[0]) == len(scales[1]):  # all of q is one head of that width, and all of k
            return ops.norm_heads(qkv, *scales, eps, 1)
        widths = [*map(len, scales), len(scales[1])]
        q, k, v = (each.contiguous() for each in qkv.split(widths, dim=-1))
        q, k = (
            ops.add_rms_norm(each, None, scale, eps)[1]
            for each, scale in zip((q, k), scales, strict=True)
        )
        return torch.cat([q, k, v], dim=-1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, context: TrainingPass) -> Tensor:
        if context.bounds is not None and context.mask is None:
            return packed_attention(
                q, k.transpose(1, 2), v.transpose(1, 2), context.bounds, self.scale
            )
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, attn_mask=context.mask, is_causal=context.mask is None,
            scale=self.scale, enable_gqa=True,
        )
        return y.transpose(1, 2).flatten(-2)

    def _finish(self, y: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(naive.sigmoid_gated(y, self.gate_proj(x)) if self.gated else y)


def takes_packed(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether `packed_attention` has a kernel for heads of this width, in this dtype."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    return (
        head_dim % 8 == 0 and head_dim <= 256 and torch.cuda.get_device_capability(device) >= (8,)
    )


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float | None
) -> Tensor:
    """Compute causal attention (B, T, H · P) within each of the samples that rows are packed of.

    PyTorch's flash attention reads no mask, and computes nothing that a mask would drop. Call it
    only if `takes_packed` returns True.

    Args:
        q: (B, T, H, P).
        k: (B, T, Hkv, P).
        v: (B, T, Hkv, P).
        bounds: (samples + 1,) int32, see `sample_bounds`.
        scale: Factor of the scores; None is P^−½.
    """
    longest = q.shape[1]
    parts = [each.to(v.dtype).flatten(0, 1) for each in (q, k, v)]
    y, *_ = torch.ops.aten._flash_attention_forward(
        *parts, bounds, bounds, longest, longest, 0.0, True, False, scale=scale
    )
    return y.flatten(-2).unflatten(0, q.shape[:2])
