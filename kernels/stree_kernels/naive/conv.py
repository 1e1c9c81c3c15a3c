"""Causal depthwise convolutions in plain PyTorch: along a tree, over a sequence, and gated.

The gated one is a layer of its own, the twin of `conv/short_conv.py`. The last functions read and
write a layer's `history`.

Shapes: B batch, T tokens, N tree nodes, C channels, W conv width, L inputs of a line.
Sums run in fp32, or in fp64 when the inputs are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stree_kernels.contracts import CacheState, Topology
from stree_kernels.index_plan import ConvPlaces, conv_places, path_places
from stree_kernels.naive.dtypes import as_dtype, widened


def tree_conv(
    inputs: Tensor, tail: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor
) -> Tensor:
    """Convolve each node's inputs with those of its ancestors, before the activation.

    Args:
        inputs: (B, N, C).
        tail: (B, W − 1, C), the conv state: the last committed inputs.
        weight: (C, W).
        bias: (C,) or None.
        windows: (N, W) or (B, N, W), indices into [tail, inputs], oldest first
            (`TokenTree.windows`).

    Returns (B, N, C) in inputs' dtype.
    """
    sequences = torch.arange(len(inputs), device=inputs.device)[:, None, None]
    seen = torch.cat([tail.to(inputs.dtype), inputs], dim=1)[sequences, windows]
    return convolve(seen, weight, bias)


def segment_conv(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, segment_ids: Tensor | None,
    silu: bool = False,
) -> Tensor:
    """Convolve packed sequences; a token sees its own segment only.

    Args:
        inputs: (B, T, C).
        weight: (C, W).
        bias: (C,) or None.
        segment_ids: (B, T), or None for one segment a row.
        silu: Apply SiLU to the result.

    Returns (B, T, C) in inputs' dtype.
    """
    width = weight.shape[1]
    weight = weight.to(inputs.dtype)
    y = inputs * weight[:, -1]
    for back in range(1, min(width, inputs.shape[1])):
        shifted = inputs[:, :-back]
        if segment_ids is not None:
            same = segment_ids[:, back:] == segment_ids[:, :-back]
            shifted = shifted * same[..., None]
        y = y + F.pad(shifted * weight[:, -1 - back], (0, 0, back, 0))
    y = y if bias is None else y + bias.to(inputs.dtype)
    return F.silu(y) if silu else y


def convolve(seen: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve windows of inputs (B, n, W, C), oldest first, to (B, n, C) in their dtype."""
    y = (widened(seen) * widened(weight).t()).sum(2)
    y = y if bias is None else y + widened(bias)
    return as_dtype(y, seen.dtype)


def short_conv_tree(
    projected: Tensor, history: Tensor, weight: Tensor, bias: Tensor | None, topology: Topology,
    cache_state: CacheState, num_read: int,
) -> Tensor:
    """Compute the gated convolution C·conv(B·x) of nodes num_read … num_read + Q − 1 of trees.

    As in `mamba_tree`, with num_read = 0 a new tree begins after the accepted path of the last one;
    else the trees continue. Writes `history`.

    Args:
        projected: (B, Q, 3·C), the gates B and C, and then x.
        history: (2, B, W − 1 + N, C), two halves of B·x of [conv state, nodes], as in `mamba_tree`.
        weight: (C, W).
        bias: (C,) or None.

    Returns (B, Q, C) in projected's dtype.
    """
    opened, gate, values = projected.chunk(3, dim=-1)
    inputs = opened * values
    places = conv_places(
        history, weight.shape[1] - 1, topology, cache_state, num_read, num_read, inputs.shape[1]
    )
    line = torch.cat([held_at(history, places.before), inputs], dim=1)
    write_kept(history, places, line)
    seen = seen_of(line, places.windows, weight.shape[1])[:, places.path :]
    return gate * convolve(seen, weight, bias)


def short_conv_replay(history: Tensor, tail: int, cache_state: CacheState) -> Tensor:
    """Return the conv state (B, W − 1, C) after the accepted path, for the caller to write.

    tail is W − 1.
    """
    places = path_places(history, tail, cache_state)
    return kept_of(held_at(history, places.before), places)


def held_at(history: Tensor, places: Tensor) -> Tensor:
    """Return the entries (…, C) of history (…, C) at flat indices (…) of all but its last dim."""
    channels = history.shape[-1]
    found = history.reshape(-1, channels).index_select(0, places.reshape(-1))
    return found.view(*places.shape, channels)


def seen_of(line: Tensor, windows: Tensor | None, width: int) -> Tensor:
    """Return the inputs that a conv reads of lines (B, L, C), by `ConvPlaces`: (B, …, W, C)."""
    return line.unfold(1, width, 1).mT if windows is None else held_at(line, windows)


def kept_of(line: Tensor, places: ConvPlaces) -> Tensor:
    """Return the entries of lines (B, L, C) that `ConvPlaces` keeps."""
    kept = places.kept
    return line[:, kept:] if isinstance(kept, int) else held_at(line, kept)


def write_kept(history: Tensor, places: ConvPlaces, line: Tensor) -> None:
    """Write the entries that `ConvPlaces` keeps of lines to the history."""
    kept = kept_of(line, places)
    there = history.narrow(2, places.written, kept.shape[1])
    there.index_copy_(0, places.half, kept[None])
