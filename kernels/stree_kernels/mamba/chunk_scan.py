"""Chunk scan of training and prefill: mamba-ssm's Triton kernel if it is installed, else ours."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from stree_kernels import naive

T = TypeVar("T", bound=Callable[..., Any])


@functools.cache
def mamba_ssm_kernel() -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return mamba-ssm's `mamba_chunk_scan_combined`, or None without the package."""
    try:
        module = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
    except ImportError:
        return None
    return module.mamba_chunk_scan_combined


def chunk_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, *,
    chunk_size: int = 64, initial_state: Tensor | None = None, segment_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `naive.chunk_scan`, by mamba-ssm's kernel on CUDA in 16 or 32 bits if installed.

    Both return y (B, T, H, P) in x's dtype and the last state, (B, H, P, S).
    """
    if x.is_cuda and x.dtype != torch.float64:
        scanned = _mamba_ssm_scan(x, dt, A, B, C, D, chunk_size, initial_state, segment_ids)
        if scanned is not None:
            return scanned
    with torch.autocast(x.device.type, enabled=False):
        return naive.chunk_scan(
            x, dt, A, B, C, D,
            chunk_size=chunk_size, initial_state=initial_state, segment_ids=segment_ids,
        )


def uncompiled(function: T) -> T:
    """Keep PyTorch's compiler out of a function.

    The import takes a second, and is not needed where PyTorch is built without GPUs.
    """
    on_gpus = torch.version.cuda or torch.version.hip
    return torch.compiler.disable(function) if on_gpus else function


@uncompiled  # The compiler would trace mamba-ssm's import and fail inside it.
def _mamba_ssm_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None,
    chunk_size: int, initial_state: Tensor | None, segment_ids: Tensor | None,
) -> tuple[Tensor, Tensor] | None:
    """Return the scan by mamba-ssm's kernel, or None without the package."""
    kernel = mamba_ssm_kernel()
    if kernel is None:
        return None
    num_heads = dt.shape[-1]
    if B.shape[2] != C.shape[2]:  # the kernel wants one number of groups for both
        groups = math.lcm(B.shape[2], C.shape[2])
        B, C = (part.repeat_interleave(groups // part.shape[2], dim=2) for part in (B, C))
    if x.shape[2] != num_heads:
        x = x.repeat_interleave(num_heads // x.shape[2], dim=2)
    # It is tuned anew for each chunk size, so only what would take much memory is clamped
    longest = max(256, 1 << (dt.shape[1] - 1).bit_length())
    return kernel(
        x, dt.float(), A.float(), B.to(x.dtype), C.to(x.dtype), min(chunk_size, longest),
        D=None if D is None else D.float(),
        initial_states=initial_state,
        seq_idx=None if segment_ids is None else segment_ids.int(),
        return_final_states=True,
    )
