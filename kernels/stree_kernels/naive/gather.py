"""Gather rows at tokens or nodes, and norms, in plain PyTorch: the twins of `gather.py`.

The norm takes a stream, which may begin as such rows.

Shapes: B batch, N tree nodes, Q of which are asked for, V vocabulary, D width, C channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stree_kernels.contracts import CacheState, Stream
from stree_kernels.naive.pointwise import add_rms_norm, advance, rms_norm


def embed_norm(
    weight: Tensor, tokens: Tensor, nodes: Tensor | None, scale: Tensor, eps: float,
    written: bool = False, added: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return rows of a weight at tokens, and their norm, both (B, N or Q, D).

    Args:
        weight: (V, D).
        tokens: (B, N).
        nodes: (B, Q), nodes to read; below 0 stands for the first. None is all.
        written: Whether launches of the same step write the nodes.
        added: (B, N or Q, D), added to the rows before the norm; None adds nothing.
    """
    x = F.embedding(tokens if nodes is None else tokens.gather(1, nodes.clamp(min=0)), weight)
    if added is not None:
        x = x + added
    return add_rms_norm(x, None, scale, eps)


def norm(stream: Stream) -> Tensor:
    """Return the norm (B, Q, D) of a stream."""
    return stream.norm_by(embed_norm, add_rms_norm)


def norm_at(x: Tensor, nodes: Tensor, scale: Tensor, eps: float, groups: int) -> Tensor:
    """Return rows (B, M, C) of x (B, N, C) at nodes (B, M), normed over groups of channels.

    An index without a node stands for the last one.
    """
    nodes = nodes.clamp(max=x.shape[1] - 1)[..., None]
    return rms_norm(x.gather(1, nodes.expand(-1, -1, x.shape[2])), scale, eps, groups)


def take_roots(
    stream: Stream, block: Tensor, active: Tensor, tokens: Tensor, cache_state: CacheState
) -> Tensor:
    """End the call that reads certain tokens, and begin drafts after each row's last, its root.

    Args:
        stream: Of B rows after each of the certain tokens.
        block: (B, 1 + M), the number of certain tokens, and the tokens.
        active: (B,) bool.
        tokens: (B, N), whose first column is written: the roots.
        cache_state: Written as by `advance`, and path_length, since all certain tokens of active
            rows are accepted.

    Returns the norm (B, 1, D) after the roots.
    """
    hidden = norm(stream)
    advance(cache_state)
    count = torch.where(active, block[:, 0], 0)
    cache_state.path_length.copy_(count)
    count = count.clamp(min=1)[:, None]
    tokens[:, :1] = block.gather(1, count)
    return hidden.gather(1, (count - 1)[..., None].expand(-1, -1, hidden.shape[2]))
