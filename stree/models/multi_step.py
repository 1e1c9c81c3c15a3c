"""Multi-step training: train a drafter on its own drafts, after every token of a sequence at once.

Pass 0 reads each token with its target's feature. Pass k reads each token t as the k-th of a draft
that begins after token t − k: with the drafter's own hidden state of pass k − 1 after token t − 1
(`stree.models.hidden_states`), from the state that pass 0 has after token t − k, as a decoder does.
A Mamba-2 layer needs no state a token for that. Its state after token t of pass k is

    h^k_t = (Π_{i<k} a^{k−i}_{t−i}) h^0_{t−k}
            + Σ_{i<k} (Π_{j<i} a^{k−j}_{t−j}) (dt·x ⊗ B)^{k−i}_{t−i}

with a = exp(dt·A), so y^k_t = h^k_t·C^k_t is the scan of pass 0, k tokens later and with the C of
pass k, and k further products. Token t − j in the conv is that of pass max(k − j, 0).

An attention layer attends in pass k to the keys of pass 0 up to token t − k, and to that of pass
k − i at token t − i for each i < k (EAGLE-3's training-time test).

Outputs of pass k at the first k tokens of a sequence have no meaning, and affect no others.

Shapes: B rows of a batch, T tokens, H heads, P head dim, S state, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stree.common.errors import UsageError
from stree.models.config import MIXERS, HybridConfig
from stree.models.layers.part import TrainingPass
from stree_kernels.mamba.chunk_scan import chunk_scan


@dataclass(frozen=True)
class Scanned:
    """Inputs of a layer's conv and scan in one pass.

    Attributes:
        inputs: (B, T, C) of the conv.
        x: (B, T, Gx, P).
        dt: (B, T, H).
        B: (B, T, Gb, S).
    """

    inputs: Tensor
    x: Tensor
    dt: Tensor
    B: Tensor


@dataclass
class MultiStepPass(TrainingPass):
    """One pass over whole sequences.

    `scanned` holds what each layer reads of the passes so far, by the index of its cache: a scan's
    inputs, or keys and values.
    """

    scanned: dict[int, list[Any]] = field(default_factory=dict)

    def run(self, part: Any, x: Tensor, cache_index: int | None, *adapters: Any) -> Tensor:
        return part(x, self) if cache_index is None else part.ahead(x, cache_index, self)


def convolved(
    weight: Tensor, bias: Tensor | None, passes: Sequence[Tensor], segment_ids: Tensor | None
) -> Tensor:
    """Convolve the inputs (B, T, C) of the last pass, as `naive.segment_conv` does.

    Token t − j in the window of token t comes from the pass j before the last, or from the first.
    """
    width, depth = weight.shape[1], len(passes) - 1
    weight = weight.to(passes[0].dtype)
    y = passes[-1] * weight[:, -1]
    for back in range(1, min(width, y.shape[1])):
        shifted = passes[max(depth - back, 0)][:, :-back]
        if segment_ids is not None:
            shifted = shifted * (segment_ids[:, back:] == segment_ids[:, :-back])[..., None]
        y = y + F.pad(shifted * weight[:, -1 - back], (0, 0, back, 0))
    return y if bias is None else y + bias.to(y.dtype)


def scanned_ahead(
    passes: Sequence[Scanned], A: Tensor, C: Tensor, D: Tensor, chunk_size: int,
    segment_ids: Tensor | None,
) -> Tensor:
    """Return y (B, T, H, P) of the last pass, given the scan's inputs in all passes.

    C (B, T, Gc, S) is the last pass's own.
    """
    first, last, depth = passes[0], passes[-1], len(passes) - 1
    x, dt, B = (_later(each, depth) for each in (first.x, first.dt, first.B))
    segments = None
    if segment_ids is not None:
        before = segment_ids[:, :1].expand(-1, depth)
        segments = torch.cat([before, segment_ids], 1)[:, : C.shape[1]]
    y, _ = chunk_scan(x, dt, A, B, C, chunk_size=chunk_size, segment_ids=segments)
    y = y.to(last.dt.dtype)
    heads = last.dt.shape[-1]
    asked = _per_head(C, heads)
    total = torch.zeros_like(last.dt)  # dt·A summed over the tokens after t − i, up to t
    new = torch.zeros_like(y)
    for back in range(depth):
        kept = passes[depth - back]
        x, dt, B = (_later(each, back) for each in (kept.x, kept.dt, kept.B))
        score = (asked * _per_head(B, heads)).sum(-1, dtype=dt.dtype) * dt * total.exp()
        new = new + score[..., None] * _per_head(x, heads)
        total = total + dt * A
    y = y * total.exp()[..., None] + new + D[:, None] * _per_head(last.x, heads)
    return y.to(last.x.dtype)


def attended_ahead(
    q: Tensor, passes: Sequence[tuple[Tensor, Tensor]], scale: float | None,
    segment_ids: Tensor | None,
) -> Tensor:
    """Return the last pass's attention (B, T, H · P).

    Args:
        q: (B, T, H, P), the last pass's.
        passes: Keys and values (B, T, Hkv, P) of all passes.
        scale: Factor of the scores; None is P^−½.
        segment_ids: (B, T), numbers of packed samples; None for one sample a row.
    """
    depth, heads = len(passes) - 1, q.shape[2]
    k, v = (_per_head(each, heads) for each in passes[0])
    seen = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).tril(-depth)
    if segment_ids is not None:
        seen = (seen & (segment_ids[:, :, None] == segment_ids[:, None]))[:, None]
    of_first = torch.einsum("bthp,bshp->bhts", q, k).masked_fill(~seen, -torch.inf)
    scores, own = [of_first], []
    for back in range(depth):
        key, value = (_per_head(_later(each, back), heads) for each in passes[depth - back])
        scores.append((q * key).sum(-1).transpose(1, 2)[..., None])
        own.append(value)
    wide = torch.promote_types(q.dtype, torch.float32)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    weights = (torch.cat(scores, -1).to(wide) * factor).softmax(-1).to(v.dtype)
    y = torch.einsum("bhts,bshp->bthp", weights[..., : q.shape[1]], v)
    for value, weight in zip(own, weights[..., q.shape[1] :].unbind(-1), strict=True):
        y = y + weight.transpose(1, 2)[..., None] * value
    return y.flatten(2)


def _later(values: Tensor, count: int) -> Tensor:
    """Shift values (B, T, …) by `count` tokens to later places; the first ones are zero."""
    if not count:
        return values
    return torch.cat([torch.zeros_like(values[:, :count]), values[:, :-count]], dim=1)


def _per_head(values: Tensor, num_heads: int) -> Tensor:
    """Repeat the groups of (B, T, G, ·) to one for each head, (B, T, H, ·)."""
    groups = values.shape[2]
    return values if groups == num_heads else values.repeat_interleave(num_heads // groups, 2)


def require_ahead(config: HybridConfig) -> None:
    """Raise `UsageError` for a drafter whose layers cannot be trained on several steps."""
    known = ("mamba", "attention")
    others = [part for part in MIXERS if part not in known and config.has(part)]
    if config.sliding_window:
        others.append("a sliding window")
    if others:
        raise UsageError(
            "model.features.ahead is for drafters of Mamba-2 layers, attention and MLPs, this one "
            f"has {others[0]}: set it to 0, or take other layers"
        )
