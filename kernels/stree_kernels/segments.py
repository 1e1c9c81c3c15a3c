"""Bounds of the samples that rows are packed of."""

from __future__ import annotations

import torch
from torch import Tensor


def sample_bounds(segment_ids: Tensor) -> Tensor:
    """Return the bounds (samples + 1,) int32 of the samples in rows laid end to end.

    segment_ids (B, T): numbers of the samples packed into rows; a row begins a sample. The last
    bound is B · T. On a GPU this waits for the device: a training finds the bounds on the host.
    """
    starts = torch.ones_like(segment_ids, dtype=torch.bool)
    starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    begins = starts.flatten().nonzero()[:, 0].int()
    return torch.cat([begins, torch.full_like(begins[:1], starts.numel())])
