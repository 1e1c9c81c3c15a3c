"""Rotary positions, with Llama 3.1's scaling for long contexts."""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from stree.common.errors import UsageError
from stree.models.config import ROPE_LENGTH, ROPE_NUMBERS, HybridConfig


def rotary_angles(config: HybridConfig, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return cosines and sines (2, …, D / 2) in `dtype` at positions (…).

    If only some channels of a head are rotated, they are the first of each half, and the others
    have the frequency 0, so that kernels treat all alike (loading puts the channels in that order).
    """
    scaling = tuple(sorted((config.rope_scaling or {}).items()))
    rotated = config.head_dim if config.rotary_dim is None else config.rotary_dim
    pairs = config.head_dim // 2
    frequencies = _frequencies(rotated, pairs, config.rope_theta, scaling, positions.device)
    angles = positions[..., None].to(dtype) * frequencies.to(dtype)
    return torch.stack([angles.cos(), angles.sin()])


@functools.lru_cache(maxsize=64)
def _frequencies(
    rotated: int,
    pairs: int,
    theta: float,
    scaling: tuple[tuple[str, object], ...],
    device: torch.device,
) -> Tensor:
    """Return inverse frequencies (pairs,) in fp64; 0 for channels that are not rotated.

    scaling is Llama 3.1's for long contexts.
    """
    exponents = torch.arange(0, rotated, 2, dtype=torch.float64) / rotated
    frequencies = theta**-exponents
    values = dict(scaling)
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "llama3":
        factor, low, high, original = (
            float(values[key])  # type: ignore[arg-type]
            for key in (*ROPE_NUMBERS, ROPE_LENGTH)
        )
        wavelengths = 2 * math.pi / frequencies
        # 1 keeps a frequency, 0 divides it by the factor, between the two bands a blend
        keep = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies * (keep + (1 - keep) / factor)
    elif kind != "default":
        raise UsageError(f"rope type {kind!r} is not supported, wanted 'default' or 'llama3'")
    return F.pad(frequencies, (0, pairs - rotated // 2)).to(device)
