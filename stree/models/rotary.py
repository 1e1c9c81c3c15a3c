"""Rotary positions, with Llama 3.1's scaling for long contexts."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from stree.errors import UsageError
from stree.models.config import HybridConfig


def rotary_angles(config: HybridConfig, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Cosines and sines (2, …, D / 2) in `dtype` at positions (…)."""
    scaling = tuple(sorted((config.rope_scaling or {}).items()))
    frequencies = _frequencies(config.head_dim, config.rope_theta, scaling, positions.device)
    angles = positions[..., None].to(dtype) * frequencies.to(dtype)
    return torch.stack([angles.cos(), angles.sin()])


@functools.lru_cache(maxsize=64)
def _frequencies(
    head_dim: int, theta: float, scaling: tuple[tuple[str, object], ...], device: torch.device
) -> Tensor:
    """Inverse frequencies (head_dim / 2,) in fp64, with Llama 3.1's long-context scaling."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequencies = theta**-exponents
    values = dict(scaling)
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "llama3":
        factor, low, high, original = (
            float(values[key])  # type: ignore[arg-type]
            for key in (
                "factor",
                "low_freq_factor",
                "high_freq_factor",
                "original_max_position_embeddings",
            )
        )
        wavelengths = 2 * math.pi / frequencies
        # 1 keeps a frequency, 0 divides it by the factor, between the two bands a blend
        keep = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies * (keep + (1 - keep) / factor)
    elif kind != "default":
        raise UsageError(f"rope type {kind!r} is not supported, wanted 'default' or 'llama3'")
    return frequencies.to(device)
