"""Fill the parts of caches that nothing may read with NaN."""

from __future__ import annotations

import torch

from stree.models.cache import HybridCache
from stree.models.layer_caches import NODES, AttentionCache, ConvCache


def poison(cache: HybridCache) -> None:
    """Put NaN wherever a cache holds nothing valid, so that reading it shows."""
    for layer in cache.layers:
        if isinstance(layer, AttentionCache):
            layer.keys[:, :, cache.num_committed :] = torch.nan
            layer.values[:, :, cache.num_committed :] = torch.nan
        else:
            tail = layer.conv_state.clone()
            for _, _, tensor in layer.buffers(NODES):
                tensor.fill_(torch.nan)
            if isinstance(layer, ConvCache):  # its conv state lies among them
                layer.conv_state = tail
