"""A gated short convolution as a mixer: C · conv(B · x), without activation or further state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stree.models.config import HybridConfig
from stree.models.layer_caches import ShortConvCache
from stree.models.layers.part import Mixer, Nodes, PrefillPass, TrainingPass, put
from stree_kernels import ops


class ShortConv(Mixer):
    """Short convolution as a mixer (LFM2), as wide as the model."""

    cache_class = ShortConvCache

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        width, bias = config.d_model, config.short_conv_bias
        self.in_proj = nn.Linear(width, 3 * width, bias=bias)
        self.conv = nn.Conv1d(width, width, config.d_conv, groups=width, bias=bias)
        self.out_proj = nn.Linear(width, width, bias=bias)

    def products(self) -> list[tuple[nn.Linear, ...]]:
        return [(self.in_proj,), (self.out_proj,)]

    def forward(self, x: Tensor, context: TrainingPass) -> Tensor:
        B, C, values = self.in_proj(x).chunk(3, dim=-1)
        y = ops.segment_conv(
            B * values, self.conv.weight[:, 0], self.conv.bias, context.segment_ids
        )
        return self.out_proj(C * y)

    def extend(self, x: Tensor, cache: ShortConvCache, context: PrefillPass) -> Tensor:
        B, C, values = self.in_proj(x).chunk(3, dim=-1)
        tail = cache.width - 1
        seen = torch.cat([cache.conv_state, B * values], dim=1)
        y = ops.segment_conv(seen, self.conv.weight[:, 0], self.conv.bias, None)[:, tail:]
        cache.conv_state = seen[:, -tail:]
        return self.out_proj(C * y)

    def mix(
        self, advanced: Tensor, cache: ShortConvCache, nodes: Nodes, out: Tensor | None
    ) -> Tensor:
        return put(ops.short_conv_tree(
            advanced, cache.history, self.conv.weight[:, 0], self.conv.bias,
            nodes.topology, nodes.cache_state, nodes.num_read,
        ), out)
