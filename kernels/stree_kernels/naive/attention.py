"""Attention of tree nodes in plain PyTorch: the twin of `attention/tree_attention.py`.

Shapes: B batch, N tree nodes, Q new nodes, H heads, Hkv heads of keys, D head dim, L cache slots,
K places of an accepted path.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from stree_kernels.contracts import CacheState, Topology
from stree_kernels.index_plan import Index, attention_places, moved_slots
from stree_kernels.naive.dtypes import as_dtype


def attend_tree(
    qkv: Tensor, keys: Tensor, values: Tensor, rotary: Tensor, topology: Topology,
    cache_state: CacheState, num_read: int, bound: int, scale: float | None = None,
    out: Tensor | None = None, window: int = 0,
) -> Tensor:
    """Compute attention between a layer's projections, for Q new nodes of trees.

    With num_read = 0 a new tree begins, and the accepted keys of the last one are made contiguous.
    The new nodes' keys and values are rotated to their depths, and take the slots after them; nodes
    without a slot are not stored.

    Args:
        qkv: (B, Q, (H + 2·Hkv)·D), the projections of q, k and v.
        keys: (B, Hkv, L, D), written in place.
        values: (B, Hkv, L, D), written in place.
        rotary: (2, positions, D / 2), cosines and sines.
        topology: The trees.
        cache_state: Committed lengths, accepted paths, and the tree of each sequence.
        num_read: Nodes of the trees that earlier calls have read.
        bound: Slots to attend to, at least those in use after this call.
        scale: Factor of the scores; None is D^−½.
        out: (B, Q, H·D), written; None returns a new tensor.
        window: Positions that a node sees, its own included; 0 is all.

    Returns (B, Q, H·D) in qkv's dtype.
    """
    batch, num_new, _ = qkv.shape
    if cache_state.rows is not None:
        return _attend_rows(
            qkv, (keys, values), rotary, topology, cache_state, num_read, bound, scale, out, window
        )
    num_kv_heads, head_dim = keys.shape[1], keys.shape[3]
    heads = qkv.view(batch, num_new, -1, head_dim).transpose(1, 2)
    num_heads, bound = heads.shape[1] - 2 * num_kv_heads, min(bound, keys.shape[2])
    places = attention_places(
        topology, cache_state, num_read, num_new, bound, rotary, (num_heads, num_kv_heads),
        qkv.dtype, window,
    )
    rotated = rotate(heads.narrow(1, 0, num_heads + num_kv_heads), *places.rotary)
    new = rotated.narrow(1, num_heads, num_kv_heads), heads.narrow(1, -num_kv_heads, num_kv_heads)
    for cache, each in zip((keys, values), new, strict=True):
        if places.moves is not None:
            _move(cache, places.moves)
        cache.scatter_(2, places.slots, each)
    q = rotated.narrow(1, 0, num_heads)
    keys, values = (each.narrow(2, 0, places.bound) for each in (keys, values))
    y = tree_attention(q, keys, values, places.mask, places.unused, scale)
    y = y.transpose(1, 2).flatten(2)
    return y if out is None else out.copy_(y)


def _attend_rows(
    qkv: Tensor, caches: tuple[Tensor, Tensor], rotary: Tensor, topology: Topology,
    cache_state: CacheState, num_read: int, bound: int, scale: float | None, out: Tensor | None,
    window: int,
) -> Tensor:
    """Compute `attend_tree` of some sequences of a cache, on copies with a slot for each node."""
    rows, count = cache_state.rows, caches[0].shape[2]
    assert rows is not None
    room = (0, 0, 0, num_read + qkv.shape[1])
    keys, values = (F.pad(cache.index_select(0, rows), room) for cache in caches)
    cache_state = replace(cache_state, rows=None)
    y = attend_tree(
        qkv, keys, values, rotary, topology, cache_state, num_read, bound, scale, out, window
    )
    for cache, each in zip(caches, (keys, values), strict=True):
        cache.index_copy_(0, rows, each[:, :, :count])
    return y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to halves of x (…, D); cos and sin are from `whole_heads`."""
    wide = as_dtype(x, cos.dtype)
    y = torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, -1), sin)
    return as_dtype(y, x.dtype)


def tree_attention(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, unused: Tensor | None,
    scale: float | None = None,
) -> Tensor:
    """Compute attention of tree nodes to the committed keys and to their ancestors.

    Args:
        q: (B, H, Q, D).
        keys: (B, Hkv, L, D).
        values: (B, Hkv, L, D).
        mask: (B, 1, H / Hkv·Q, L), as in `AttentionPlaces`.
        unused: (B, 1, L, 1), slots that may hold anything, as in `AttentionPlaces`.
        scale: Factor of the scores; None is D^−½.

    Returns (B, H, Q, D) in q's dtype.
    """
    if unused is not None:  # 0 · NaN would be NaN
        keys, values = (each.masked_fill(unused, 0.0) for each in (keys, values))
    # The heads that share keys are further queries: the keys need not be repeated
    batch, num_kv_heads, _, head_dim = keys.shape
    queries = q.reshape(batch, num_kv_heads, -1, head_dim)
    y = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
    return y.reshape(q.shape)


def move_accepted(cache: Tensor, length: Tensor, path: Tensor, path_length: Tensor) -> None:
    """Make the keys (or values) of an accepted path contiguous, in place.

    Args:
        cache: (B, Hkv, L, D); slots length … length + K − 1 may be written.
        length: (B,) committed slots.
        path: (B, K) node indices.
        path_length: (B,) nodes of the path that count.
    """
    moves = moved_slots(length, path, path_length)
    if moves is not None:
        _move(cache, moves)


def _move(cache: Tensor, moves: Index) -> None:
    rows, source, target = moves
    cache[rows, :, target] = cache[rows, :, source]
