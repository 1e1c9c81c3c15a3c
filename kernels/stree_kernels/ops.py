"""Choose, for every op of a tree call, between the Triton kernel and its naive twin.

Triton serves CUDA tensors of 16 or 32 bits, plain PyTorch (`stree_kernels.naive`) all others. Both
give the same results up to rounding. An op has its twin's signature and docstring.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from stree_kernels import naive
from stree_kernels.contracts import CacheState, Derived, Gated, Scaled, Stream
from stree_kernels.shapes import GatedDeltaShape, Mamba1Shape, MixerShape

P = ParamSpec("P")
R = TypeVar("R")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_DIM = 256  # of a head or a state: larger tiles do not fit a multiprocessor's registers
BUCKET = 256  # cache slots, of which plain PyTorch reads a multiple in a graph


@functools.cache
def fused(device: torch.device, dtype: torch.dtype, largest_dim: int = 0) -> bool:
    """Return True if the Triton kernels serve a device, type and largest head or state dimension.

    The answer is found once per combination and process. `STREE_KERNELS=naive` in the environment
    chooses plain PyTorch, for comparisons. A CUDA device that the kernels cannot serve is warned
    about.
    """
    if device.type != "cuda" or os.environ.get("STREE_KERNELS") == "naive":
        return False
    if importlib.util.find_spec("triton") is None:
        reason = "triton is not installed"
    elif dtype not in DTYPES:
        reason = f"they have no {dtype}"
    elif torch.cuda.get_device_capability(device) < (8, 0):
        reason = f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    elif largest_dim > MAX_DIM:
        reason = f"a dimension of {largest_dim} is above their {MAX_DIM}"
    else:
        return True
    message = f"models run on plain PyTorch, not on the fused kernels: {reason}"
    warnings.warn(message, stacklevel=3)
    return False


def current(device: torch.device) -> torch.cuda.device:
    """Make a GPU the current one inside a `with` block; do nothing for other devices.

    Triton launches, streams, events and graphs go to the current GPU, whatever GPU their tensors
    are on.
    """
    return torch.cuda.device(device if device.type == "cuda" else -1)


def new_derived(shape: MixerShape | GatedDeltaShape, history: Tensor) -> Derived | None:
    """Allocate zeros for the per-node values that a mixer's kernels keep with its raw inputs.

    Args:
        shape: the mixer's dimensions.
        history: (2, B, W − 1 + N, C) raw inputs of the mixer, double-buffered.

    Returns:
        The buffers, or None where plain PyTorch serves, which keeps raw inputs only.
    """
    if not fused(history.device, history.dtype, shape.largest_dim):
        return None
    batch, num_nodes = history.shape[1], history.shape[2] - shape.tail
    return Derived(
        history.new_zeros(2, batch, num_nodes, sum(shape.conv_dims[:2])),
        history.new_zeros(2, batch, 2, num_nodes, shape.num_heads, dtype=torch.float32),
    )


def bucket(num_slots: int, device: torch.device, dtype: torch.dtype) -> int:
    """Return the granularity, in cache slots, by which captured calls bound their reads.

    The kernels read lengths on the device, so one graph with all num_slots serves. Plain PyTorch
    needs a graph for each multiple of BUCKET slots.
    """
    return num_slots if fused(device, dtype) else min(BUCKET, num_slots)


def _kernel(module: str, name: str) -> Callable[..., Any]:
    """Return a function of a Triton module, imported when first needed."""
    return getattr(importlib.import_module(f"stree_kernels.{module}"), name)


def _first(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    return tensor


def _second(_: Any, tensor: Tensor, *__: Any, **___: Any) -> Tensor:
    return tensor


def _source(stream: Stream, *_: Any, **__: Any) -> Tensor:
    return stream.source


def _of_weight(x: Tensor | Stream | Gated, weight: Tensor | Scaled, *_: Any, **__: Any) -> Tensor:
    """Return the weight, or with one in 8 bits the inputs."""
    if isinstance(weight, Tensor):
        return weight
    if isinstance(x, Tensor):
        return x
    return x.y if isinstance(x, Gated) else x.source


def _no_dim(*_: Any, **__: Any) -> int:
    return 0


def _of_shape(*args: Any, **_: Any) -> int:
    kinds = MixerShape | GatedDeltaShape | Mamba1Shape
    return next(each for each in args if isinstance(each, kinds)).largest_dim


def _with_kernel(
    module: str, decided_by: Callable[..., Tensor] = _first, dtype: torch.dtype | None = None,
    largest_dim: Callable[..., int] = _no_dim,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a naive op: calls go to the kernel of its name where that serves.

    Args:
        module: the kernel's module within `stree_kernels`.
        decided_by: picks, of an op's arguments, the tensor whose device and dtype decide.
        dtype: decides in the place of the tensor's own dtype, for ops over token ids.
        largest_dim: returns, of an op's arguments, its largest head or state dimension.
    """

    def decorate(twin: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(twin)
        def op(*args: P.args, **kwargs: P.kwargs) -> R:
            tensor = decided_by(*args, **kwargs)
            decided = (tensor.device, dtype or tensor.dtype, largest_dim(*args, **kwargs))
            # PyTorch's compiler fuses a twin's operations itself
            if not torch.compiler.is_compiling() and fused(*decided):
                return _kernel(module, twin.__name__)(*args, **kwargs)
            return twin(*args, **kwargs)

        return op

    return decorate


_pointwise = _with_kernel("pointwise")
_short = _with_kernel("products.short", _of_weight)
_linear = _with_kernel("products.linear")
_experts = _with_kernel("products.experts")
_top = _with_kernel("sampling.top")
_dynamic = _with_kernel("sampling.dynamic_trees", dtype=torch.float32)

add_rms_norm = _pointwise(naive.add_rms_norm)
gated_rms_norm = _pointwise(naive.gated_rms_norm)
gate_normed = _pointwise(naive.gate_normed)
norm_heads = _pointwise(naive.norm_heads)
gated = _pointwise(naive.gated)
sigmoid_gated = _pointwise(naive.sigmoid_gated)
activated = _pointwise(naive.activated)

segment_conv = _with_kernel("conv.segment_conv")(naive.segment_conv)  # these two have gradients
rms_norm = _with_kernel("rms_norm")(naive.rms_norm)

norm = _with_kernel("products.short", _source)(naive.norm)
linear = _short(naive.linear)
linear_parts = _short(naive.linear_parts)
linear_swiglu = _short(naive.linear_swiglu)
linear_wide = _linear(naive.linear_wide)
linear_adapted = _linear(naive.linear_adapted)
laid = _linear(naive.laid)

choose_experts = _experts(naive.choose_experts)
experts = _experts(naive.experts)

attend_tree = _with_kernel(
    "attention.tree_attention", largest_dim=lambda qkv, keys, *_, **__: keys.shape[3]
)(naive.attend_tree)
short_conv_tree = _with_kernel("conv.short_conv")(naive.short_conv_tree)
mamba_tree = _with_kernel("mamba.tree_scan", largest_dim=_of_shape)(naive.mamba_tree)
mamba1_advance = _with_kernel("mamba1.tree", largest_dim=_of_shape)(naive.mamba1_advance)
mamba1_scan = _with_kernel("mamba1.tree", largest_dim=_of_shape)(naive.mamba1_scan)
gated_delta_tree = _with_kernel("gated_delta.tree", largest_dim=_of_shape)(naive.gated_delta_tree)

choose_best = _top(naive.choose_best)
choose_children = _top(naive.choose_children)
build_topology = _dynamic(naive.build_topology)
pick_level = _dynamic(naive.pick_level)
pick_tree = _dynamic(naive.pick_tree)
draft_ngrams = _with_kernel("sampling.ngrams", dtype=torch.float32)(naive.draft_ngrams)
norm_at = _with_kernel("gather")(naive.norm_at)
take_roots = _with_kernel("gather", _source)(naive.take_roots)
draw_children = _with_kernel("products.head", _of_weight)(naive.draw_children)
accept_choices = _with_kernel("sampling.accept", _second, torch.float32)(naive.accept_choices)
accept_drafts = _with_kernel("sampling.verification", _second)(naive.accept_drafts)


def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **options: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run `naive.selective_scan` or its kernel, in the inputs' own dtypes also under autocast."""
    serves = fused(x.device, x.dtype, A.shape[1])
    scan = _kernel("mamba1.scan", "selective_scan") if serves else naive.selective_scan
    with torch.autocast(x.device.type, enabled=False):
        return scan(x, dt, A, B, C, **options)


def advance(cache_state: CacheState, like: Tensor) -> None:
    """Run `naive.advance`; `like` is a tensor of the call that ends."""
    serves = fused(like.device, like.dtype)
    (_kernel("pointwise", "advance") if serves else naive.advance)(cache_state)
