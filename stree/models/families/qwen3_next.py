"""Qwen3-Next's projections of the gated delta rule."""

from __future__ import annotations

import torch
from torch import Tensor

from stree_kernels.shapes import GatedDeltaShape


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
