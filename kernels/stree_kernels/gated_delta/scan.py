"""The gated delta rule of training and prefill: flash-linear-attention's kernel if it is installed.

Else it is our scan in plain PyTorch.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from stree_kernels import naive
from stree_kernels.segments import sample_bounds

KERNEL_DTYPES = (torch.bfloat16, torch.float16)  # it refuses fp32
MAX_KEY_DIM = 256  # of it


@functools.cache
def flash_linear_attention_kernel() -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return flash-linear-attention's `chunk_gated_delta_rule`, or None without the package."""
    try:
        module = importlib.import_module("fla.ops.gated_delta_rule")
    except ImportError:
        return None
    return module.chunk_gated_delta_rule


def gated_delta_scan(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, *, chunk_size: int = 64,
    initial_state: Tensor | None = None, segment_ids: Tensor | None = None,
    bounds: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `naive.gated_delta_scan`, by flash-linear-attention's kernel on CUDA in 16 bits.

    That needs the package; the kernel has chunks of its own size, and takes `bounds`, the
    `sample_bounds` of `segment_ids` (None finds them, which waits for the device). Both return
    y (B, T, H, V) in v's dtype and the last state, (B, H, K, V).
    """
    kernel = None
    if v.is_cuda and v.dtype in KERNEL_DTYPES and k.shape[-1] <= MAX_KEY_DIM:
        kernel = flash_linear_attention_kernel()
    if kernel is None:
        with torch.autocast(v.device.type, enabled=False):
            return naive.gated_delta_scan(
                q, k, v, log_decay, beta,
                chunk_size=chunk_size, initial_state=initial_state, segment_ids=segment_ids,
            )
    batch, num_heads = v.shape[0], v.shape[2]
    # Only newer versions of the package have grouped heads
    q, k = (
        part.to(v.dtype).repeat_interleave(num_heads // part.shape[2], dim=2) for part in (q, k)
    )
    inputs: tuple[Tensor, ...] = (q, k, v, log_decay.float(), beta.to(v.dtype))
    if segment_ids is not None:  # one row with the segments' bounds is how the kernel takes them
        bounds = sample_bounds(segment_ids) if bounds is None else bounds
        first_of_row = torch.searchsorted(
            bounds, torch.arange(batch + 1, device=v.device, dtype=bounds.dtype) * v.shape[1]
        )
        if initial_state is not None:
            segment_states = initial_state.new_zeros(len(bounds) - 1, *initial_state.shape[1:])
            initial_state = segment_states.index_copy(0, first_of_row[:-1], initial_state)
        inputs = tuple(part.flatten(0, 1)[None] for part in inputs)
    y, state = kernel(
        *inputs, initial_state=initial_state, output_final_state=True,
        use_qk_l2norm_in_kernel=True, cu_seqlens=bounds,
    )
    if segment_ids is not None:
        y, state = y.unflatten(1, (batch, -1))[0], state.index_select(0, first_of_row[1:] - 1)
    return y, state
