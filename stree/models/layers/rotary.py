"""Rotary positions, with the scalings for long contexts of Llama 3.1 and of YaRN."""

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
    angles = torch.stack([angles.cos(), angles.sin()])
    factor = dict(scaling).get("attention_factor", 1.0)
    if factor != 1:
        angles[..., : rotated // 2] *= factor
    return angles


@functools.lru_cache(maxsize=64)
def _frequencies(
    rotated: int, pairs: int, theta: float, scaling: tuple[tuple[str, object], ...],
    device: torch.device,
) -> Tensor:
    """Return inverse frequencies (pairs,) in fp64; 0 for channels that are not rotated.

    scaling is Llama 3.1's for long contexts, or YaRN's (Peng et al. 2023, Section 3.2).
    """
    exponents = torch.arange(0, rotated, 2, dtype=torch.float64) / rotated
    frequencies = theta**-exponents
    values = dict(scaling)
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "llama3":
        factor, low, high, original = (
            float(values[key])  # type: ignore[arg-type]
            for key in (*ROPE_NUMBERS["llama3"], ROPE_LENGTH)
        )
        wavelengths = 2 * math.pi / frequencies
        # 1 keeps a frequency, 0 divides it by the factor, between the two bands a blend
        keep = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies * (keep + (1 - keep) / factor)
    elif kind == "yarn":
        factor, slow, fast, original = (
            float(values[key])  # type: ignore[arg-type]
            for key in (*ROPE_NUMBERS["yarn"], ROPE_LENGTH)
        )
        # Channels that turn `fast` times within the original length keep their frequency, those
        # that turn `slow` times have it divided
        low, high = (
            rotated * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (fast, slow)
        )
        if values.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotated - 1)
        pair = torch.arange(rotated // 2, dtype=torch.float64)
        divided = ((pair - low) / ((high - low) or 0.001)).clamp(0, 1)
        frequencies = frequencies * (1 - divided + divided / factor)
    elif kind != "default":
        wanted = "wanted 'default', 'llama3' or 'yarn'"
        raise UsageError(f"rope type {kind!r} is not supported, {wanted}")
    return F.pad(frequencies, (0, pairs - rotated // 2)).to(device)


def positions_of(tokens: Tensor, segment_ids: Tensor | None) -> Tensor:
    """Return the positions (B, T) of tokens (B, T), anew from 0 with each packed sample."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    if segment_ids is None:
        return positions
    starts = torch.ones_like(segment_ids, dtype=torch.bool)
    starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    return positions - torch.where(starts, positions, 0).cummax(1).values
