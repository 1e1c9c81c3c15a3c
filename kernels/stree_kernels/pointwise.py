"""The small ops between matrix products, each in one launch (Triton).

Norm with residual, gated norm, norms of heads, gates, and the end of a tree call. Roundings follow
the naive twins: intermediate values that these store in a narrow type are rounded here, too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree_kernels.contracts import Added, CacheState, Split
from stree_kernels.launch import follow, lead, load_kept, overlapping, store_kept
from stree_kernels.products.split import store_split

# Fastest on an H200, or as fast as the rest
GATE_BLOCK = 1024  # channels of a gate that a program takes
GATE_WARPS = 4
GATED_BLOCK = 512  # channels of whole groups that a program of the gated norm takes, at least one


def add_rms_norm(
    x: Tensor, added: Added, weight: Tensor, eps: float, beside: Tensor | None = None,
    split: Split | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `naive.add_rms_norm` in one launch of up to two sums; all tensors contiguous.

    `split` is filled with the norm, too.
    """
    added, also = two_sums(added)
    for each in (x, added, also, beside):
        assert each is None or each.is_contiguous()
    own, width = x.shape[-1], len(weight)
    total = x if added is None else torch.empty_like(x)
    out = x.new_empty(*x.shape[:-1], width)
    norm_kernel[(x.numel() // own, 1)](
        x, own, added, x.numel(), also, None, 0, beside, weight, total, out,
        *((None, None) if split is None else (split.pieces, split.unit)), width,
        width, 1, eps, BITWISE=x.is_cuda, PARTS=1 if added is None else len(added),
        MORE_PARTS=0 if also is None else len(also),
        GROUPS=1, GATE_AFTER=False, BLOCK=triton.next_power_of_2(width),
        num_warps=warps(width), **overlapping(x),
    )
    return total, out


def two_sums(added: Added) -> tuple[Tensor | None, Tensor | None]:
    """Split the sums to be added to a stream into up to two tensors of parts."""
    if not isinstance(added, tuple):
        return added, None
    first, *others = added
    return first, others[0] if len(others) == 1 else torch.cat(others)


def gated_rms_norm(y: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
    """Compute `naive.gated_rms_norm` in one launch; y, gate (B, Q, C), gate's last stride is 1."""
    return _gated(y, gate, weight, eps, y.shape[-1] // groups, after=False)


def gate_normed(y: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `naive.gate_normed` in one launch; y, gate (B, Q, C), gate's last stride is 1."""
    return _gated(y, gate, weight, eps, len(weight), after=True)


def _gated(
    y: Tensor, gate: Tensor, weight: Tensor, eps: float, width: int, *, after: bool
) -> Tensor:
    """Norm groups of `width` channels, gated after the norm (one weight for all) or before it."""
    groups = y.shape[-1] // width
    assert y.is_contiguous() and gate.stride(-1) == 1
    gate = gate.flatten(0, -2)
    out = torch.empty_like(y)
    block = triton.next_power_of_2(width)
    together = max(1, min(triton.next_power_of_2(groups), GATED_BLOCK // block))
    norm_kernel[(y.numel() // y.shape[-1], triton.cdiv(groups, together))](
        y, y.shape[-1], None, 0, None, gate, gate.stride(0), None, weight, None, out, None, None,
        y.shape[-1], width, groups, eps, BITWISE=False, PARTS=1, MORE_PARTS=0, GROUPS=together,
        GATE_AFTER=after, BLOCK=block, num_warps=warps(block * together), **overlapping(y),
    )
    return out


def norm_heads(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, num_k: int) -> Tensor:
    """Compute `naive.norm_heads` in one launch; qkv (B, Q, E) with unit last stride."""
    assert qkv.stride(-1) == 1
    width, rows = len(q_weight), qkv.flatten(0, -2)
    num_heads = qkv.shape[-1] // width
    out = qkv.new_empty(qkv.shape)
    block = triton.next_power_of_2(width)
    together = max(1, min(triton.next_power_of_2(num_heads), GATED_BLOCK // block))
    heads_kernel[(len(rows), triton.cdiv(num_heads, together))](
        rows, rows.stride(0), q_weight, k_weight, out, num_heads, num_k, width, eps,
        HEADS=together, BLOCK=block, num_warps=warps(block * together), **overlapping(qkv),
    )
    return out


def gated(y: Tensor, gate: Tensor) -> Tensor:
    """Compute `naive.gated` in one launch; y (B, Q, C), gate (B, Q, C) with unit last stride."""
    return _opened(y, gate, silu=True)


def sigmoid_gated(y: Tensor, gate: Tensor) -> Tensor:
    """Compute `naive.sigmoid_gated` in one launch; y, gate (B, Q, C), gate's last stride is 1."""
    return _opened(y, gate, silu=False)


def _opened(y: Tensor, gate: Tensor, *, silu: bool) -> Tensor:
    assert y.is_contiguous() and gate.stride(-1) == 1
    gate, width = gate.flatten(0, -2), y.shape[-1]
    out = torch.empty_like(y)
    gate_kernel[(len(gate), triton.cdiv(width, GATE_BLOCK))](
        y, gate, gate.stride(0), out, width,
        SILU=silu, BLOCK=GATE_BLOCK, num_warps=GATE_WARPS, **overlapping(y),
    )
    return out


def activated(y: Tensor, kind: str) -> Tensor:
    """Compute `naive.activated` in one launch; y contiguous."""
    return _activated(y, None, None, 0, kind)


def activated_product(halves: Tensor, unit: Tensor, scale: Tensor, kind: str | None) -> Tensor:
    """Compute `naive.activated` of a product (…, E), or for None the product itself.

    The product is the sum of halves (2, …, E) times unit (…), of the rows, and scale (E), of the
    weight.
    """
    return _activated(halves[0], unit, scale, halves[0].numel(), kind)


def _activated(
    y: Tensor, unit: Tensor | None, scale: Tensor | None, to_half: int, kind: str | None
) -> Tensor:
    assert y.is_contiguous()
    width = y.shape[-1] if kind in (None, "relu2", "gelu") else y.shape[-1] // 2
    out = y.new_empty(*y.shape[:-1], width)
    activation_kernel[(out.numel() // width, triton.cdiv(width, GATE_BLOCK))](
        y, to_half, unit, scale, out, width, KIND=kind, BLOCK=GATE_BLOCK, num_warps=GATE_WARPS,
        **overlapping(y),
    )
    return out


def advance(cache_state: CacheState) -> None:
    """Compute `naive.advance` in one launch."""
    batch = cache_state.length.shape[0]
    advance_kernel[(1,)](
        cache_state.length, cache_state.path_length, cache_state.parity, batch,
        BLOCK=triton.next_power_of_2(batch), num_warps=1, **overlapping(cache_state.length),
    )


def warps(width: int) -> int:
    """Return the number of warps for a row of a norm; one needs no exchange between warps."""
    if width <= 256:
        return 1
    return 4 if width <= 2048 else 8


@triton.jit
def norm_kernel(
    x, x_stride, added, part_stride, also, gate, gate_stride, beside, weight,
    total, out, pieces, unit, out_stride, width, groups, eps,
    BITWISE: tl.constexpr, PARTS: tl.constexpr, MORE_PARTS: tl.constexpr, GROUPS: tl.constexpr,
    GATE_AFTER: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):
    lead(OVERLAPS)  # the product that follows asks for its weight while this one waits
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = tl.arange(0, BLOCK)
    mask = (group < groups)[:, None] & (at < width)[None, :]
    channel = at[None, :]
    at = group[:, None] * width + channel
    scale = load_kept(weight + (channel if GATE_AFTER else at), mask)
    follow(OVERLAPS)
    own = mask & (at < x_stride)
    value = load_kept(x + row * x_stride + at, own)
    if beside is not None:
        there = beside + row * (out_stride - x_stride) + at - x_stride
        value = tl.where(own, value, load_kept(there, mask & (at >= x_stride)))
    if gate is not None:
        z = tl.load(gate + row * gate_stride + at, mask=mask, other=0.0).to(tl.float32)
    if added is not None:
        line = row * x_stride + at
        if also is not None:
            also += line
        value = with_parts(value, added + line, also, part_stride, own, PARTS, MORE_PARTS)
        store_kept(total + line, value, own)
    wide = value.to(tl.float32)
    if gate is not None and not GATE_AFTER:
        wide = wide * (z * tl.sigmoid(z))
    y = normed(wide, scale, width, eps, value.dtype)
    if GATE_AFTER:
        y = (y.to(tl.float32) * (z * tl.sigmoid(z))).to(value.dtype)
    tl.store(out + row * out_stride + at, y, mask=mask)
    if pieces is not None:
        store_split(y, pieces, unit, at, mask, width, BITWISE)


@triton.jit
def with_parts(
    values, added, also, part_stride, there, PARTS: tl.constexpr, MORE_PARTS: tl.constexpr
):
    """Add to values the parts of one sum or of two, rounded once."""
    more = tl.load(added, mask=there, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        more += tl.load(added + part * part_stride, mask=there, other=0.0).to(tl.float32)
    for part in tl.static_range(MORE_PARTS):
        more += tl.load(also + part * part_stride, mask=there, other=0.0).to(tl.float32)
    more = more.to(values.dtype).to(tl.float32)
    return (values.to(tl.float32) + more).to(values.dtype)


@triton.jit
def normed(wide, scale, width, eps, dtype: tl.constexpr):
    """Divide rows by their root mean squares, round to the dtype, scale and round again."""
    wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=1) / width + eps)[:, None]
    return (scale.to(tl.float32) * wide.to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def heads_kernel(
    qkv, stride, q_weight, k_weight, out, num_heads, num_k, width, eps,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    channel = tl.arange(0, BLOCK)[None, :]
    mask = (head < num_heads) & (channel < width)
    q_scale = load_kept(q_weight + channel, channel < width)
    k_scale = load_kept(k_weight + channel, channel < width)
    follow(OVERLAPS)
    at = head * width + channel
    value = tl.load(qkv + row * stride + at, mask=mask, other=0.0)
    scale = tl.where(head < num_heads - 2 * num_k, q_scale, k_scale)
    y = normed(value.to(tl.float32), scale, width, eps, value.dtype)
    y = tl.where(head < num_heads - num_k, y, value)
    tl.store(out + row * num_heads * width + at, y, mask=mask)


@triton.jit
def gate_kernel(
    y, gate, gate_stride, out, width,
    SILU: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    follow(OVERLAPS)
    value = tl.load(y + row * width + at, mask=mask, other=0.0)
    z = tl.load(gate + row * gate_stride + at, mask=mask, other=0.0).to(tl.float32)
    opened = tl.sigmoid(z)
    if SILU:
        opened *= z
    tl.store(out + row * width + at, (value.to(tl.float32) * opened).to(value.dtype), mask=mask)


@triton.jit
def activation_kernel(
    inner, to_half, units, scale, out, width,
    KIND: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    follow(OVERLAPS)
    unit = None
    if units is not None:
        unit = tl.load(units + row)
    if KIND is None or KIND == "relu2" or KIND == "gelu":
        y = _load_product(inner + row * width, at, mask, to_half, unit, scale)
        if KIND == "relu2":
            positive = tl.maximum(y.to(tl.float32), 0.0, propagate_nan=tl.PropagateNan.ALL)
            y = (positive * positive).to(y.dtype)
        elif KIND == "gelu":
            y = gelu_of(y)
    else:
        inner += row * 2 * width
        gate = _load_product(inner, at, mask, to_half, unit, scale)
        up = _load_product(inner, width + at, mask, to_half, unit, scale)
        y = gated_by(gate, up, KIND)
    tl.store(out + row * width + at, y, mask=mask)


@triton.jit
def _load_product(row, at, mask, to_half, unit, scale):
    """Load outputs of a row; where it has a unit, the sum of its halves times unit and scale."""
    value = tl.load(row + at, mask=mask, other=0.0)
    if unit is not None:
        half = tl.load(row + to_half + at, mask=mask, other=0.0)
        factor = unit * tl.load(scale + at, mask=mask, other=0.0)
        value = ((value.to(tl.float32) + half.to(tl.float32)) * factor).to(value.dtype)
    return value


@triton.jit
def gated_by(gate, up, KIND: tl.constexpr):
    """Return silu(gate)·up or gelu(gate)·up, rounded to their dtype after each operation."""
    if KIND == "geglu":
        y = (gelu_of(gate).to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    else:
        y = silu_times(gate, up)
    return y


@triton.jit
def gelu_of(x):
    """Return gelu(x) in its dtype."""
    wide = x.to(tl.float32)
    return (0.5 * wide * (1.0 + tl.erf(wide * 0.7071067811865476))).to(x.dtype)


@triton.jit
def silu_times(gate, up):
    """Return silu(gate)·up, rounded to their dtype after each operation."""
    wide = gate.to(tl.float32)
    silu = (wide * tl.sigmoid(wide)).to(gate.dtype).to(tl.float32)
    return (silu * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def advance_kernel(
    lengths, path_lengths, parities, batch, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
):
    row = tl.arange(0, BLOCK)
    mask = row < batch
    follow(OVERLAPS)
    length = tl.load(lengths + row, mask=mask, other=0)
    more = tl.load(path_lengths + row, mask=mask, other=0)
    parity = tl.load(parities)
    tl.store(lengths + row, length + more, mask=mask)
    tl.store(path_lengths + row, more * 0, mask=mask)
    tl.store(parities, 1 - parity)
